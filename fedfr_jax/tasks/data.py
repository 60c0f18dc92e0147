"""Data of a config: source, partition, data set or stream."""

import functools
import inspect
import json
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.augment import build_augment, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import PARTITIONS, ClientPartition, drop_clients
from fedfr_jax.data.partition.client_partition import hold_out_by_name
from fedfr_jax.data.partition.identities import IdentityNames
from fedfr_jax.data.preprocessing import VECTORS
from fedfr_jax.data.sources import SOURCES, check_exists
from fedfr_jax.data.sources.selection import names_from
from fedfr_jax.data.stream import Stream, fits_devices, stream
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation
from fedfr_jax.schema import call, check_choice, choose, naming, with_tuples
from fedfr_jax.types import (
    Augment,
    Dataset,
    DataUsage,
    InputShape,
    Preprocessing,
    Source,
    UsedRows,
    input_structs,
    is_image,
)


def open_data(settings: Mapping) -> Source:
    """Open the config's data source; errors of its files name them."""
    check_exists("config.data", settings)
    source = choose("data", SOURCES, settings)
    location = settings.get("path", settings.get("data_dir", "config.data"))

    def named(read):
        def call(rows):
            with naming(location):
                return read(rows)

        return call

    masks = source.masks
    if masks is not None:
        masks = masks._replace(read=named(masks.read))
    return source._replace(read=named(source.read), masks=masks)


def with_report(facts: Mapping, text: str, *passed_over: str) -> dict:
    """Report fields of a `Task`, with the files that its sources ignored."""
    if not any(passed_over):
        return {"data_report": facts, "data_report_text": text}
    ignored = "\n".join(filter(None, passed_over))
    return {
        "data_report": {**facts, "passed_over": ignored.split("\n")},
        "data_report_text": f"{text}\n{ignored}",
    }


def split(settings: Mapping, source: Source):
    """Partition a source by the config; by_identity is the default.

    The name of a joined part stands for its identities; partitions that know test rows,
    owners or names are given those that the source has. Where images have names, what a
    partition of classes holds out of clients' images is decided by the names.
    """
    settings = {"name": "by_identity", **settings}
    for key, value in settings.items():
        if key.endswith("_ids_from") and isinstance(value, str):
            key_path = f"config.partition.{key}"
            settings[key] = names_from(source.names, value, key_path)
    check_choice("config.partition.name", settings["name"], sorted(PARTITIONS))
    parameters = inspect.signature(PARTITIONS[settings["name"]]).parameters
    offered = {"is_test": source.is_test, "client_ids": source.client_ids}
    if source.stored is not None and source.stored.is_named:
        offered["names"] = IdentityNames(source.stored.names, source.names)
    for key, array in offered.items():
        if key in parameters and array is not None:
            settings.setdefault(key, array)
    parts = choose("partition", PARTITIONS, settings, source.labels)
    is_held_out = "test_fraction" in parameters and settings.get("is_test") is None
    if isinstance(parts, ClientPartition) and is_held_out and "names" in offered:
        fraction = settings.get("test_fraction", parameters["test_fraction"].default)
        drawn = fraction, settings.get("seed", 0)
        return hold_out_by_name(parts, source.labels, offered["names"].images, *drawn)
    return parts


def split_classes(
    settings: Mapping, source: Source, num_unseen: int = 0
) -> tuple[ClientPartition, ClientPartition]:
    """Partition examples by class as in the config; iid is the default.

    Returns:
      (clients of the federation, `num_unseen` clients left out of it), drawn with the
      partition's seed.

    Raises:
      ValueError: for a partition of faces, or one that leaves a class without a
        training image (with its name), no test image or no client.
    """
    parts = split({"name": "iid", **settings}, source)
    if not isinstance(parts, ClientPartition):
        name = settings["name"]
        raise ValueError(
            f"config.partition.name must be a partition by class, got {name!r}."
        )
    with naming("config.partition"):
        parts, unseen = drop_clients(parts, num_unseen, seed=settings.get("seed", 0))
    counts = np.bincount(source.labels[parts.train], minlength=len(source.names))
    if not counts.all():
        without = f" without the {num_unseen} unseen_clients" if num_unseen else ""
        raise ValueError(
            "config.partition must leave each class at least one training image of a "
            f"client{without}, got none of {source.names[int(np.argmin(counts))]!r} "
            f"({np.sum(counts == 0)} such of {len(counts)})."
        )
    if not len(parts.test):
        raise ValueError("config.partition must leave test images, got none.")
    return parts, unseen


def data_usage(
    source: Source, parts: ClientPartition, unseen: ClientPartition | None = None
) -> DataUsage:
    """Images of a split's clients, and of unseen clients, by use."""
    used, first = {}, 0
    for prefix, part in (("", parts), ("unseen ", unseen)):
        if part is None:
            continue
        for use in ("train", "test"):
            rows, offsets = (part.train, part.train_offsets)
            if use == "test":
                rows, offsets = (part.test, part.test_offsets)
            client = first + np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            used[prefix + use] = UsedRows(rows, client, source.labels[rows])
        first += len(part.train_offsets) - 1
    return DataUsage(source, used)


def build_population(parts: ClientPartition, num_classes: int) -> Population:
    """Population of a partition, with the same number of classes for all clients."""
    offsets = parts.train_offsets.astype(np.int64)
    return Population(offsets, np.broadcast_to(np.int32(num_classes), len(offsets) - 1))


def build_dataset(
    source: Source, rows: np.ndarray, stream_bytes: int | None, **targets
) -> Dataset | Stream:
    """Images and labels of source rows [n], on the host or streamed from the source.

    Args:
      targets: others beside the label, of the rows, [n, ...] each.
    """
    targets = {"label": source.labels[rows].astype(np.int32), **targets}
    if stream_bytes is None:
        return Dataset.from_arrays(source.read(rows), None)._replace(targets=targets)
    return stream(lambda i: source.read(rows[i]), targets, memory=stream_bytes)


def build_batching(
    settings, *, drop_last: bool = False, is_images: bool = True
) -> Batching:
    """Batching of uint8 images: augmented, flipped, by default scaled to [-1, 1].

    Vectors are taken as they are.

    Args:
      settings: with batch_size, augment and flip_probability, such as a `Federation`.

    Raises:
      ValueError: for an unknown augmentation or setting of one.
    """
    if not is_images:
        for key, off in (("flip_probability", 0), ("augment", ())):
            value = settings._asdict()[key]
            if value:
                default = type(settings)._field_defaults.get(key)
                suffix = ", the default" if value == default else ""
                raise ValueError(
                    f"{key} must be {off} for data other than images, got {value}"
                    f"{suffix}."
                )
        return Batching(settings.batch_size, drop_last=drop_last)
    augment = build_data_augment(
        settings.flip_probability, json.dumps(settings.augment)
    )
    return Batching(settings.batch_size, augment, drop_last=drop_last)


@functools.cache  # what is compiled knows an augmentation by its functions
def build_data_augment(flip: float, listed: str) -> Augment:
    """Build the augments `listed`, as JSON, after a random horizontal flip."""
    return build_augment(json.loads(listed), flip_probability=flip)


def build_preprocessing(
    settings: Mapping, source: Source, *, pretrains: bool = False
) -> Preprocessing:
    """Preprocessing of images, the same for all models of a config.

    Files are prepared by the source, pixels are scaled by the `normalize` that the
    config's augments list.

    Args:
      settings: the config's sections.
      pretrains: whether config.pretrain is a training.

    Raises:
      ValueError: for trainings that scale pixels differently.
    """
    if not is_image(source.input_shape):
        return VECTORS
    how, first = source.preprocessing or Preprocessing(), ""
    for key, augment in _augments(settings, pretrains).items():
        found = how._replace(**_normalization(augment, key))
        if first and found != how:
            of = lambda x: f"mean {x.mean} and std {x.std}"
            raise ValueError(
                f"config.{key} must normalize images as config.{first} does, by "
                f"{of(how)}, got {of(found)}: all networks of a config are evaluated "
                "on the same images."
            )
        how, first = found, first or key
    return how


def _augments(settings: Mapping, pretrains: bool) -> dict[str, Sequence]:
    """Lists of augments in a config, by key."""
    lists, rows = {}, settings["methods"].items()
    if any(row.get("kind") != "central" for _, row in rows):
        lists["federation.augment"] = settings["federation"].get("augment", ())
    if pretrains:
        lists["pretrain.augment"] = settings["pretrain"].get("augment", ())
    for name, row in rows:
        if row.get("kind") == "central":
            lists[f"methods.{name}.augment"] = row.get("augment", ())
    return lists


def _normalization(augment: Sequence, key: str) -> dict[str, float | tuple]:
    """`mean` and `std` in a list of augments."""
    settings = {}
    for entry in augment:
        if isinstance(entry, Mapping) and entry.get("name") == "normalize":
            settings = {k: v for k, v in entry.items() if k != "name"}
    call(key, normalize, settings)
    default = Preprocessing()
    return with_tuples({"mean": default.mean, "std": default.std, **settings})


def example_bytes(shape: InputShape) -> int:
    """Bytes of an input: 1 per value of an image, 4 per value of anything else."""
    if is_image(shape):
        return math.prod(shape)
    return 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(input_structs(shape)))


def should_stream(
    federation: Federation, source: Source, parts: Sequence, mesh: Mesh
) -> int | None:
    """Bytes that streamed images may take on a device; None to have them all there.

    As configured, or streamed when they do not fit the devices, and in a run of several
    processes, each of which reads the images of its own clients.

    Args:
      parts: rows of the source, [n] each, that a run needs.
    """
    is_streamed = federation.data_placement == "stream"
    if federation.data_placement == "auto":
        num_images = sum(len(rows) for rows in parts)
        num_bytes = num_images * example_bytes(source.input_shape)
        is_streamed = mesh.is_multi_process or not fits_devices(num_bytes, mesh)
    return int(federation.stream_buffer_gib * 2**30) if is_streamed else None
