"""Folders and zip archives of images, with labels from file names.

A `filename_pattern` is a regular expression over the relative path with a group
`identity` and, if names have them, groups `camera` and `test`; the latter matches for
images of the set's test part only.
"""

import os
import pathlib
import re

import numpy as np

from fedfr_jax.data.sources.decoding import Channels, ImageSize, check_landmarks
from fedfr_jax.data.sources.image_files import Files, open_files
from fedfr_jax.data.sources.index import (
    STRETCHED,
    Index,
    index_files,
    number_identities,
    open_index,
)
from fedfr_jax.data.sources.pairs import read_lfw_pairs
from fedfr_jax.data.sources.selection import check_unique
from fedfr_jax.files import read_csv
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import naming
from fedfr_jax.text import parse_number
from fedfr_jax.types import Source

NAMINGS = {
    "directory": r"(?P<identity>.+)/[^/]+",  # <identity>/<image>
    "subject-view": r"(?:.*/)?(?P<identity>[^/]+)-(?P<camera>[0-9]+)\.[^./]+",
    "market1501": r"(?:.*/)?(?P<identity>-?[0-9]+)_c(?P<camera>[0-9]+)s[^/]+",
    "train-test": r"(?:.*/)?(?:train|(?P<test>test))/(?P<identity>[^/]+)/[^/]+",
}


def folder(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None,
    channels: Channels = 3,
    filename_pattern: str = "directory",
    subfolder: str = "",
    landmarks: str | os.PathLike | None = None,
    align: bool = False,
    min_images: Whole = 1,
) -> Source:
    """Images of a directory or .zip; folders or file names give the identity.

    Args:
      path: the directory or archive.
      image_size: side or (H, W) in pixels; images are stretched to it. None is the
        size of the first image.
      filename_pattern: a key of NAMINGS, or a regular expression over the whole
        relative path with a group `identity` and perhaps groups `camera` and `test`.
      subfolder: only files below this sub-folder, such as "train".
      landmarks: csv file with the columns name, x1, y1 ... x5, y5 (see
        `read_landmarks`).
      align: warp each face to the ArcFace template; needs landmarks.
    """
    if align and landmarks is None:
        raise ValueError("landmarks must be a csv file if align is True, got None.")
    index = index_folder(path, filename_pattern, subfolder, landmarks)
    preprocessing = STRETCHED._replace(alignment="arcface" if align else None)
    return open_index(index, image_size, channels, preprocessing, min_images=min_images)


def index_folder(path, filename_pattern, subfolder="", landmarks=None) -> Index:
    """Index of the images of `folder`."""
    files, points = open_files(path, under=subfolder), None
    names = files.names
    if landmarks is not None:
        names, points = read_landmarks(landmarks, files)
    if filename_pattern not in NAMINGS and "(?P<identity>" not in filename_pattern:
        raise ValueError(
            f"filename_pattern must be one of {', '.join(NAMINGS)} or a regular "
            f"expression with a group `identity`, got {filename_pattern}."
        )
    pattern = re.compile(NAMINGS.get(filename_pattern) or filename_pattern)
    skip = len(subfolder.strip("/")) + 1 if subfolder else 0
    matches = [match for x in names if (match := pattern.fullmatch(x[skip:]))]
    if len(matches) < len(names):
        other = next(x for x in names if not pattern.fullmatch(x[skip:]))
        raise ValueError(
            f"{other} in {path} must match filename_pattern="
            f"{filename_pattern} ({pattern.pattern}), but does not. Move it, or choose "
            "another pattern."
        )
    labels, identities = number_identities([match["identity"] for match in matches])
    cameras = is_test = None
    if "camera" in pattern.groupindex:
        cameras, _ = number_identities([match["camera"] for match in matches])
    if "test" in pattern.groupindex:
        is_test = np.array([match["test"] is not None for match in matches])
    return index_files(
        files,
        names,
        labels=labels,
        identities=_without_common_folder(identities),
        landmarks=points,
        cameras=cameras,
        is_test=is_test,
    )


def _without_common_folder(names: tuple[str, ...]) -> tuple[str, ...]:
    """Remove the folders that all names begin with."""
    while len(names) > 1 and all("/" in name for name in names):
        if len({name.partition("/")[0] for name in names}) > 1:
            break
        names = tuple(name.partition("/")[2] for name in names)
    return names


def read_landmarks(
    path: str | os.PathLike, files: Files
) -> tuple[list[str], np.ndarray]:
    """Read a landmarks csv: (T names of files with a face, landmarks [T, 5, 2] x, y).

    The csv names its columns: name (the image's relative path), x1, y1 ... x5, y5; the
    points are eye at image left, eye at image right, nose, mouth corner at image left,
    mouth corner at image right, in the upright picture (see `decoding`). An image whose
    ten cells are empty shows no face and is left out. Other columns and other images'
    rows are ignored, but no image may come twice.
    """
    columns = [f"{axis}{point}" for point in range(1, 6) for axis in "xy"]
    rows = read_csv(path, ["name", *columns])
    listed = ((name, cells) for name, *cells in rows.values())
    points = check_unique(listed, "image", path)
    missing = [name for name in files.names if name not in points]
    if missing:
        raise ValueError(
            f"{path} must have landmarks for every image, got none for {len(missing)}, "
            f"the first {missing[0]}. Add rows or set align=False."
        )
    names = [name for name in files.names if any(points[name])]
    if not names:
        raise ValueError(
            f"{path} must have landmarks for at least one image, got empty cells."
        )
    with naming(path):
        numbers = [[parse_number(cell) for cell in points[name]] for name in names]
    landmarks = np.array(numbers, np.float32).reshape(-1, 5, 2)
    return names, check_landmarks(landmarks, names, path)


def archive_in(data_dir: str | os.PathLike) -> pathlib.Path:
    """Path of the only .zip in a data set's folder, or the folder if it has none."""
    archives = sorted(pathlib.Path(data_dir).glob("*.zip"))
    if not archives:
        return pathlib.Path(data_dir)
    folders = [x for x in pathlib.Path(data_dir).iterdir() if x.is_dir()]
    folders = [x.name for x in folders if x.name[0] not in "._@#$"]
    if len(archives) > 1 or folders:
        raise ValueError(
            f"{data_dir} must have one .zip or folders of images, got "
            f"{[*(x.name for x in archives), *folders]}. Move the others, or choose "
            "one with the data source `folder`."
        )
    return archives[0]


def orl(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = (112, 92),
    channels: Channels = 1,
    min_images: Whole = 1,
) -> Source:
    """The AT&T (ORL) faces: 40 people x 10 gray images, s<id>/<number>.pgm."""
    index = index_folder(archive_in(data_dir), "directory")
    return open_index(index, image_size, channels, min_images=min_images)


def fei(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = 28,
    channels: Channels = 3,
    min_images: Whole = 1,
) -> Source:
    """The FEI faces: 200 people x 14 views, <subject>-<view>.jpg; camera = view."""
    index = index_folder(archive_in(data_dir), "subject-view")
    return open_index(index, image_size, channels, min_images=min_images)


def lfw(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = 112,
    channels: Channels = 3,
    align: bool = True,
    min_images: Whole = 1,
    pairs: str | None = "pairsDevTrain.txt",
) -> Source:
    """Labeled Faces in the Wild: Name/Name_0001.jpg with landmarks and pairs.

    Args:
      data_dir: folder with one .zip (or the folders of the people), `landmarks.csv`
        when `align`, and the pairs file.
      align: warp to the ArcFace template by `landmarks.csv`.
      min_images: people with fewer images are left out, and their pairs with them.
      pairs: name of the pairs file of either view in `data_dir`; None for no pairs.
    """
    landmarks = pathlib.Path(data_dir, "landmarks.csv") if align else None
    index = index_folder(archive_in(data_dir), "directory", landmarks=landmarks)
    if pairs is not None:
        stems = [pathlib.PurePosixPath(name).stem for name in index.names]
        rows = {stem: row for row, stem in enumerate(stems)}
        read = read_lfw_pairs(pathlib.Path(data_dir, pairs), rows)
        index = index._replace(pairs=read)
    preprocessing = STRETCHED._replace(alignment="arcface" if align else None)
    return open_index(index, image_size, channels, preprocessing, min_images=min_images)


def image_classes(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    channels: Channels = 3,
    train: str = "train",
    test: str = "test",
    min_images: Whole = 1,
) -> Source:
    """A folder or .zip of images, <part>/<class>/<image>, with a test part.

    Args:
      path: the directory or archive; folders above the parts are passed over.
      image_size: side or (H, W) in pixels; None is the size of the first image.
      train: name of the folder of the training part.
      test: name of the folder of the test part, such as "val".
      min_images: classes with fewer images are left out.
    """
    parts = f"(?:{re.escape(train)}|(?P<test>{re.escape(test)}))"
    pattern = rf"(?:.*/)?{parts}/(?P<identity>[^/]+)/[^/]+"
    index = index_folder(path, pattern)
    if index.is_test is None or len(np.unique(index.is_test)) < 2:
        raise ValueError(
            f"{path} must have images below {train}/ and {test}/, got only one of them."
        )
    return open_index(index, image_size, channels, min_images=min_images)


def cifar10(
    data_dir: str | os.PathLike, *, image_size: ImageSize | None = None
) -> Source:
    """CIFAR-10 as images: {train,test}/<class>/<number>.jpg in a .zip or a folder."""
    return image_classes(archive_in(data_dir), image_size=image_size)
