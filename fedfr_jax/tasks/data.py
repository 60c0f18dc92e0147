"""Data of a config: source, partition, data set or stream."""

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.augment import build_augment, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import ClientPartition, drop_clients
from fedfr_jax.data.partition.client_partition import hold_out_by_name
from fedfr_jax.data.partition.identities import IdentityNames
from fedfr_jax.data.preprocessing import VECTORS
from fedfr_jax.data.sources import SOURCES, check_exists
from fedfr_jax.data.sources.selection import names_from
from fedfr_jax.data.stream import Stream, fits_devices, stream
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation
from fedfr_jax.parts import Member, Part, call, key_error
from fedfr_jax.schema import naming, with_tuples
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


class SourceReader:
    """Reader of a data source: a member of SOURCES, those of `concat` too."""

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read the source's part."""
        part = Member(SOURCES).read(value, where, mistakes)
        if part is not None and part.factory is SOURCES["concat"]:
            for name, source in part.settings.get("sources", {}).items():
                self.read(source, f"{where}.sources.{name}", mistakes)
        return part


class PartitionReader(NamedTuple):
    """Reader of a partition, whose lists of identities may name a part of the data."""

    family: Mapping[str, Callable]
    default: str = ""

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read a part that waits for labels, and for what the source may know."""
        lists = {}
        if isinstance(value, Mapping):
            lists = {k: x for k, x in value.items() if k.endswith("_ids_from")}
            lists = {key: x for key, x in lists.items() if isinstance(x, str)}
            value = {key: x for key, x in value.items() if key not in lists}
        later = "is_test", "client_ids", "names"
        reader = Member(self.family, self.default, 1, later)
        part = reader.read(value, where, mistakes)
        if part is None:
            return None
        known = inspect.signature(part.factory).parameters
        mistakes += [key_error(where, x, known) for x in lists if x not in known]
        return part._replace(settings={**part.settings, **lists})


def open_data(part: Part) -> Source:
    """Open a data source; errors of its files name them."""
    settings = part.settings
    check_exists(part.where, part.section)
    source = part()
    location = settings.get("path", settings.get("data_dir", part.where))

    def named(read):
        def call(rows):
            with naming(location):
                return read(rows)

        return call

    def read_checked(rows):
        examples = source.read(rows)
        _check_images(examples, (len(rows), *source.input_shape))
        return examples

    with naming(location):
        _check_labels(source)
    shape, masks = source.input_shape, source.masks
    is_of_images = not isinstance(shape, Mapping) and len(shape) == 3
    if masks is not None:
        masks = masks._replace(read=named(masks.read))
    read = named(read_checked if is_of_images else source.read)
    return source._replace(read=read, masks=masks)


def _check_images(images: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless images are uint8 of the shape [n, H, W, C]."""
    if images.dtype != np.uint8 or images.shape != shape:
        raise ValueError(
            f"read of the source must return uint8 {shape}, got {images.dtype} "
            f"{images.shape}. Its images have values from 0 to 255."
        )


def _check_labels(source: Source) -> None:
    """Raise ValueError unless labels [T] are numbers of the source's names."""
    labels, names = np.asarray(source.labels), source.names
    if labels.dtype.kind not in "iu" or labels.max(initial=0) >= max(len(names), 1):
        raise ValueError(
            f"labels of the source must be integers below its {len(names)} names, got "
            f"{labels.dtype} up to {labels.max(initial=0)}."
        )


def with_report(facts: Mapping, text: str, *passed_over: str) -> dict:
    """Report fields of a `Task`, with the files that its sources ignored."""
    if not any(passed_over):
        return {"data_report": facts, "data_report_text": text}
    ignored = "\n".join(filter(None, passed_over))
    return {
        "data_report": {**facts, "passed_over": ignored.split("\n")},
        "data_report_text": f"{text}\n{ignored}",
    }


def split(part: Part, source: Source) -> Any:
    """Partition a source.

    The name of a joined part stands for its identities; partitions that know test rows,
    owners or names are given those that the source has. Where images have names, what a
    partition of classes holds out of clients' images is decided by the names.
    """
    settings = dict(part.settings)
    for key, value in settings.items():
        if key.endswith("_ids_from") and isinstance(value, str):
            settings[key] = names_from(source.names, value, f"{part.where}.{key}")
    parameters = inspect.signature(part.factory).parameters
    offered = {
        "is_test": source.is_test,
        "client_ids": source.client_ids,
        "names": None,
    }
    names = source.stored.names if source.stored and source.stored.is_named else None
    if names is not None:
        offered["names"] = IdentityNames(names, source.names)
    known = {k: x for k, x in offered.items() if k in parameters and x is not None}
    owners = parameters.get("client_ids")
    is_needed = owners is not None and owners.default is owners.empty
    if is_needed and "client_ids" not in {**known, **settings}:
        raise ValueError(f"{part.where} needs the key client_ids.")
    parts = part._replace(settings=settings)(source.labels, **known)
    is_held_out = "is_test" not in {**known, **settings}
    fraction = parameters.get("test_fraction")
    if not isinstance(parts, ClientPartition) or not (fraction and is_held_out):
        return parts
    if names is None:
        return parts
    share = settings.get("test_fraction", fraction.default)
    seed = settings.get("seed", 0)
    return hold_out_by_name(parts, source.labels, names, share, seed)


def split_classes(
    part: Part, source: Source, num_unseen: int = 0
) -> tuple[ClientPartition, ClientPartition]:
    """Partition examples by class.

    Returns:
      (clients of the federation, `num_unseen` clients left out of it), drawn with the
      partition's seed.

    Raises:
      ValueError: for a partition of faces, or one that leaves a class without a
        training image (with its name), no test image or no client.
    """
    parts = split(part, source)
    if not isinstance(parts, ClientPartition):
        raise ValueError(
            f"config.partition.name must be a partition by class, got {part.name!r}."
        )
    with naming("config.partition"):
        seed = part.settings.get("seed", 0)
        parts, unseen = drop_clients(parts, num_unseen, seed=seed)
    counts = np.bincount(parts.train.labels, minlength=len(source.names))
    if not counts.all():
        without = f" without the {num_unseen} unseen_clients" if num_unseen else ""
        raise ValueError(
            "config.partition must leave each class at least one training image of a "
            f"client{without}, got none of {source.names[int(np.argmin(counts))]!r} "
            f"({np.sum(counts == 0)} such of {len(counts)})."
        )
    if not len(parts.test.rows):
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
            held = part.train if use == "train" else part.test
            used[prefix + use] = UsedRows(held.rows, first + held.client, held.labels)
        first += part.num_clients
    return DataUsage(source, used)


def build_population(parts: ClientPartition, num_classes: int) -> Population:
    """Population of a partition, with the same number of classes for all clients."""
    each = np.broadcast_to(np.int32(num_classes), parts.num_clients)
    return Population(parts.train.offsets, each)


def build_dataset(
    source: Source, rows: np.ndarray, stream_bytes: int | None, **targets: np.ndarray
) -> Dataset | Stream:
    """Images and labels of source rows [n], on the host or streamed from the source.

    Args:
      targets: others beside the label, of the rows, [n, ...] each; or another `label`.
    """
    targets = {"label": source.labels[rows], **targets}
    targets["label"] = targets["label"].astype(np.int32)
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


def client_batching(federation: Federation, *, is_images: bool = True) -> Batching:
    """Batching of clients, see `build_batching`."""
    with naming("config.federation"):
        last = {"drop_last": federation.drop_last}
        return build_batching(federation, is_images=is_images, **last)


@functools.cache  # what is compiled knows an augmentation by its functions
def build_data_augment(flip: float, listed: str) -> Augment:
    """Build the augments `listed`, as JSON, after a random horizontal flip."""
    return build_augment(json.loads(listed), flip_probability=flip)


def build_preprocessing(
    augments: Mapping[str, Sequence], source: Source
) -> Preprocessing:
    """Preprocessing of images, the same for all models of a config.

    Files are prepared by the source, pixels are scaled by the `normalize` that the
    augments list.

    Args:
      augments: {key of the config: list} of all trainings.

    Raises:
      ValueError: for trainings that scale pixels differently.
    """
    if not is_image(source.input_shape):
        return VECTORS
    how, first = source.preprocessing or Preprocessing(), ""
    for key, augment in augments.items():
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


def _normalization(augment: Sequence, key: str) -> dict[str, float | tuple]:
    """`mean` and `std` in a list of augments."""
    settings = {}
    for entry in augment:
        if isinstance(entry, Mapping) and entry.get("name") == "normalize":
            settings = {k: v for k, v in entry.items() if k != "name"}
    call(f"config.{key}", normalize, settings)
    default = Preprocessing()
    return with_tuples({"mean": default.mean, "std": default.std, **settings})


def example_bytes(shape: InputShape) -> int:
    """Bytes of an input: 1 per value of an image, 4 per value of anything else."""
    values = sum(math.prod(x.shape) for x in jax.tree.leaves(input_structs(shape)))
    return values if is_image(shape) else 4 * values


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
