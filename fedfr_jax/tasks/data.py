"""From a config's sections to a source, its split and where the examples lie."""

import functools
import inspect
import json
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from fedfr_jax.data.augment import build_augment
from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.sources import SOURCES, names_from
from fedfr_jax.federated.settings import Federation
from fedfr_jax.feed import Feed
from fedfr_jax.models import MODELS, conv
from fedfr_jax.schema import choose, naming
from fedfr_jax.stream import fits_devices
from fedfr_jax.types import Augment, Source


def open_data(settings: Mapping) -> Source:
    """The config's source; what goes wrong in a file names it, read late or early."""
    source = choose("data", SOURCES, settings)
    where = settings.get("path", settings.get("data_dir", "config.data"))

    def named(read):
        def call(rows):
            with naming(where):
                return read(rows)

        return call

    masks = source.masks
    if masks is not None:
        masks = masks._replace(read=named(masks.read))
    return source._replace(read=named(source.read), masks=masks)


def split(settings: Mapping, source: Source):
    """The config's partition of a source, by_identity unless it names another.

    The name of a joined part stands for its identities; partitions that know test rows
    or owners are given those that the source has.
    """
    settings = {"name": "by_identity", **settings}
    for key, value in settings.items():
        if key.endswith("_ids_from") and isinstance(value, str):
            where = f"config.partition.{key}"
            settings[key] = names_from(source.names, value, where)
    factory = PARTITIONS.get(settings["name"])
    asked = inspect.signature(factory).parameters if factory else {}
    for key, known in (("is_test", source.is_test), ("owners", source.owners)):
        if key in asked and known is not None:
            settings.setdefault(key, known)
    return choose("partition", PARTITIONS, settings, source.labels)


def feed_of(settings, *, drop_last: bool = False, is_images: bool = True) -> Feed:
    """How batches are made of uint8 images: augmented, mirrored and in [-1, 1].

    Vectors are taken as they are.

    Args:
      settings: with batch_size, augment and flip, such as a `Federation`.

    Raises:
      ValueError: for an unknown augmentation or setting of one.
    """
    if not is_images:
        for key, value in (("flip", settings.flip), ("augment", settings.augment)):
            if value:
                raise ValueError(
                    f"{key} must be off for data that are no images, got {value}."
                )
        return Feed(settings.batch_size, drop_last=drop_last)
    augment = augment_of(settings.flip, json.dumps(settings.augment))
    return Feed(settings.batch_size, augment, drop_last=drop_last)


@functools.cache  # what is compiled knows an augmentation by its functions
def augment_of(flip: float, listed: str) -> Augment:
    """What is `listed`, as JSON, behind a mirror of probability `flip`."""
    return build_augment([{"name": "mirror", "probability": flip}, *json.loads(listed)])


def streams(
    federation: Federation, source: Source, parts: Sequence, mesh: Mesh
) -> int | None:
    """Bytes that streamed images may take on a device; None has them all on it.

    As told, or streamed when they do not fit the devices; in a run of several processes
    they are, each of which reads the images of its own clients.

    Args:
      parts: rows of the source, [n] each, that a run needs.
    """
    is_streamed = federation.table == "stream"
    if federation.table == "auto":
        num_images = sum(len(rows) for rows in parts)
        num_bytes = num_images * math.prod(source.image_shape)
        is_streamed = mesh.is_multi_process or not fits_devices(num_bytes, mesh)
    return int(federation.table_gib * 2**30) if is_streamed else None


def other_lowerings(settings: Mapping) -> tuple[str, ...]:
    """Of convolutions, to be timed: none when the config's model has or names one."""
    known = inspect.signature(MODELS[settings["name"]]).parameters
    is_open = "lowering" in known and settings.get("lowering", conv.AUTO) == conv.AUTO
    return conv.others() if is_open else ()
