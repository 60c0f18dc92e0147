"""Data sources: factories of a `Source`.

`index` is the one reader of encoded images; `image_files` lists folders and archives,
`folder`, `pairs`, `reid`, `segmentation`, `flickr_aes`, `recordio` and `tfds` know what
a set's names and lists say. `arrays`, `packed`, `table` and `synthetic` are decoded
already.

Opening a source lists its images and reads labels; image files are decoded when they
are read. Errors are ValueErrors that name the file (and the line of a list). Unless a
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

from fedfr_jax.data.sources import (
    arrays,
    flickr_aes,
    folder,
    packed,
    pairs,
    recordio,
    reid,
    segmentation,
    synthetic,
    table,
    tfds,
)
from fedfr_jax.data.sources.selection import concat_sources
from fedfr_jax.data.synthetic_faces import synthetic_faces
from fedfr_jax.parts import call
from fedfr_jax.schema import check_choice, register
from fedfr_jax.types import Source


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
    "3dpes": reid.three_dpes,
    "arrays": arrays.arrays,
    "bin_pairs": pairs.bin_pairs,
    "camvid": segmentation.camvid,
    "cifar10": folder.cifar10,
    "cifar100": arrays.cifar100,
    "concat": concat,
    "cuhk01": reid.cuhk01,
    "cuhk03_np": reid.cuhk03_np,
    "fake_data": synthetic.fake_data,
    "fashion_mnist": arrays.fashion_mnist,
    "fei": folder.fei,
    "femnist10": tfds.femnist10,
    "flickr_aes": flickr_aes.flickr_aes,
    "folder": folder.folder,
    "ilids": reid.ilids,
    "image_classes": folder.image_classes,
    "image_masks": segmentation.image_masks,
    "lfw": folder.lfw,
    "listed_pairs": pairs.listed_pairs,
    "market1501": reid.market1501,
    "mnist": arrays.mnist,
    "msmt17": reid.msmt17,
    "omniglot": arrays.omniglot,
    "orl": folder.orl,
    "packed": packed.packed,
    "prid2011": reid.prid2011,
    "recordio": recordio.recordio,
    "reid_csv": reid.reid_csv,
    "source_object": source_object,
    "synthetic": synthetic.synthetic,
    "synthetic_faces": synthetic_faces,
    "table": table.table,
    "tfds": tfds.tfds,
    "viper": reid.viper,
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
            settings[key] = os.path.expanduser(settings[key])
    check_exists(f"source {name}", {"name": name, **settings})
    return call(f"source {name}", SOURCES[name], settings)


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
        path = settings.get(key)
        if key not in parameters or not isinstance(path, str | os.PathLike):
            continue
        is_needed = parameters[key].default is parameters[key].empty
        if is_needed and not os.path.exists(path):
            folder = os.environ.get("FEDFR_DATA")
            raise ValueError(
                f"{where}.{key} must exist, got {path}, which does not. The library's "
                "own configs look below the folder FEDFR_DATA, now "
                f"{folder or '../shared/data, as it is not set'}."
            )
