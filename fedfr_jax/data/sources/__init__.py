"""Data sources: factories of a `Source`.

Opening a source lists its images and reads labels; images are decoded when they are
read. Errors are ValueErrors that name the file (and the line of a list). Unless a
source says otherwise:

Args:
  image_size: side or (H, W) of the result.
  channels: 1 for gray, 3 for color.
  min_images: identities with fewer images are left out.
"""

import inspect as signatures
import os
from collections.abc import Callable, Mapping
from typing import get_args

from fedfr_jax.data.sources.classification_sets import (
    arrays,
    cifar10,
    cifar100,
    fashion_mnist,
    image_classes,
    mnist,
    omniglot,
)
from fedfr_jax.data.sources.flickr_aes import flickr_aes
from fedfr_jax.data.sources.folder import fei, folder, lfw, orl
from fedfr_jax.data.sources.inspection import inspect
from fedfr_jax.data.sources.packed import pack, packed, verify
from fedfr_jax.data.sources.pairs import bin_pairs, listed_pairs
from fedfr_jax.data.sources.recordio import recordio
from fedfr_jax.data.sources.reid import cuhk03_np, market1501, msmt17, reid_csv
from fedfr_jax.data.sources.reid_archives import (
    cuhk01,
    ilids,
    prid2011,
    three_dpes,
    viper,
)
from fedfr_jax.data.sources.segmentation import camvid, image_masks
from fedfr_jax.data.sources.selection import (
    concat_sources,
    keep_identities,
    keep_rows,
    names_from,
)
from fedfr_jax.data.sources.synthetic import fake_data, synthetic
from fedfr_jax.data.sources.table import table
from fedfr_jax.data.sources.tfds import femnist10, tfds
from fedfr_jax.data.synthetic_faces import synthetic_faces
from fedfr_jax.schema import call_at, check_choice, register
from fedfr_jax.types import Source

__all__ = [
    "SOURCES",
    "check_exists",
    "inspect",
    "keep_identities",
    "keep_rows",
    "names_from",
    "open_source",
    "pack",
    "path_settings",
    "register_source",
    "verify",
]


def concat(*, sources: Mapping[str, Mapping]) -> Source:
    """Concatenate several sources; see `concat_sources`.

    Args:
      sources: {part: {"name": a key of SOURCES, and that source's settings}}.
    """
    opened = {part: open_source(**settings) for part, settings in sources.items()}
    return concat_sources(opened)


def source_object(*, source: Source) -> Source:
    """Pass a source that is already open, from Python only."""
    return source


SOURCES: dict[str, Callable[..., Source]] = {
    "3dpes": three_dpes,
    "arrays": arrays,
    "bin_pairs": bin_pairs,
    "camvid": camvid,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "concat": concat,
    "cuhk01": cuhk01,
    "cuhk03_np": cuhk03_np,
    "fake_data": fake_data,
    "fashion_mnist": fashion_mnist,
    "fei": fei,
    "femnist10": femnist10,
    "flickr_aes": flickr_aes,
    "folder": folder,
    "ilids": ilids,
    "image_classes": image_classes,
    "image_masks": image_masks,
    "lfw": lfw,
    "listed_pairs": listed_pairs,
    "market1501": market1501,
    "mnist": mnist,
    "msmt17": msmt17,
    "omniglot": omniglot,
    "orl": orl,
    "packed": packed,
    "prid2011": prid2011,
    "recordio": recordio,
    "reid_csv": reid_csv,
    "source_object": source_object,
    "synthetic": synthetic,
    "synthetic_faces": synthetic_faces,
    "table": table,
    "tfds": tfds,
    "viper": viper,
}


def register_source(name: str, factory: Callable[..., Source]) -> None:
    """Register a source under a name for configs.

    Args:
      factory: (**settings) -> Source; its signature is the schema of the config's
        section.
    """
    register(SOURCES, "source", name, factory)


def path_settings(name: str) -> list[str]:
    """Names of the settings of SOURCES[name] that are paths."""
    parameters = signatures.signature(SOURCES[name]).parameters.values()
    return [x.name for x in parameters if os.PathLike in get_args(x.annotation)]


def open_source(name: str, **settings) -> Source:
    """Open the source SOURCES[name] with its settings; expands ~ in paths."""
    check_choice("source", name, SOURCES)
    for key in path_settings(name):
        if str(settings.get(key, "")).startswith("~"):
            path = settings[key]
            kind = type(path) if isinstance(path, str) else str
            settings[key] = kind(os.path.expanduser(path))
    check_exists(f"source {name}", {"name": name, **settings})
    return call_at(f"source {name}", SOURCES[name], settings)


def check_exists(where: str, settings: Mapping) -> None:
    """Raise ValueError if the folder or file that a source reads does not exist.

    Args:
      settings: of the source, with its name; other mistakes in them are found when it
        is opened.
    """
    if settings.get("name") not in SOURCES:
        return
    parameters = signatures.signature(SOURCES[settings["name"]]).parameters
    for key in ("path", "data_dir"):
        is_needed = (
            key in parameters and parameters[key].default is parameters[key].empty
        )
        path = settings.get(key)
        if (
            is_needed
            and isinstance(path, str | os.PathLike)
            and not os.path.exists(path)
        ):
            folder = os.environ.get("FEDFR_DATA")
            raise ValueError(
                f"{where}.{key} must exist, got {path}, which does not. The library's "
                "own configs look below the folder FEDFR_DATA, now "
                f"{folder or '../shared/data, as it is not set'}."
            )
