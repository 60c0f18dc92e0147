"""Folders and zip archives of images, with labels from file names.

A `filename_pattern` is a regular expression over the relative path with a group
`identity` and, if names have them, groups `camera` and `test`; the latter matches for
images of the set's test part only.
"""

import os
import pathlib
import re

import numpy as np

from fedfr_jax.data.align import rescale_points
from fedfr_jax.data.sources.decoding import (
    Channels,
    ImageSize,
    check_landmarks,
    parse_size,
    plan_alignment,
)
from fedfr_jax.data.sources.image_files import Files, any_image, natural_key, open_files
from fedfr_jax.data.sources.listed_images import listed_reader
from fedfr_jax.data.sources.pairs import read_lfw_pairs
from fedfr_jax.data.sources.selection import check_unique, keep_identities
from fedfr_jax.data.sources.stored import stored_files
from fedfr_jax.files import read_csv
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import naming
from fedfr_jax.text import normalize_unicode, parse_number
from fedfr_jax.types import Preprocessing, Source

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
    source, _ = _open_folder(
        path, image_size, channels, filename_pattern, subfolder, landmarks, align
    )
    return keep_identities(source, min_images, str(path))


def orl(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = (112, 92),
    channels: Channels = 1,
    min_images: Whole = 1,
) -> Source:
    """The AT&T (ORL) faces: 40 people x 10 gray images, s<id>/<number>.pgm."""
    return folder(
        archive_in(data_dir),
        image_size=image_size,
        channels=channels,
        min_images=min_images,
    )


def fei(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = 28,
    channels: Channels = 3,
    min_images: Whole = 1,
) -> Source:
    """The FEI faces: 200 people x 14 views, <subject>-<view>.jpg; camera = view."""
    return folder(
        archive_in(data_dir),
        image_size=image_size,
        channels=channels,
        filename_pattern="subject-view",
        min_images=min_images,
    )


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
    archive = archive_in(data_dir)
    landmarks = pathlib.Path(data_dir, "landmarks.csv") if align else None
    source, names = _open_folder(
        archive, image_size, channels, "directory", "", landmarks, align
    )
    if pairs is not None:
        rows = {pathlib.PurePosixPath(n).stem: row for row, n in enumerate(names)}
        source = source._replace(
            pairs=read_lfw_pairs(pathlib.Path(data_dir, pairs), rows)
        )
    return keep_identities(source, min_images, str(archive))


def read_landmarks(path: str | os.PathLike, files: Files) -> tuple[Files, np.ndarray]:
    """Read a landmarks csv: (files with a face, landmarks [T, 5, 2] float32 x, y).

    The csv names its columns: name (the image's relative path), x1, y1 ... x5, y5; the
    points are eye at image left, eye at image right, nose, mouth corner at image left,
    mouth corner at image right, in the upright picture (see `images`). An image whose
    ten cells are empty shows no face and is left out. Other columns and other images'
    rows are ignored, but no image may come twice.
    """
    columns = [f"{axis}{point}" for point in range(1, 6) for axis in "xy"]
    rows = read_csv(path, ["name", *columns])
    with naming(path):
        named = [(name, _numbers(cells)) for name, *cells in rows.values()]
    points = check_unique(named, "image", path)
    missing = [name for name in files.names if name not in points]
    if missing:
        raise ValueError(
            f"{path} must have landmarks for every image, got none for {len(missing)}, "
            f"the first {missing[0]}. Add rows or set align=False."
        )
    names = [name for name in files.names if points[name]]
    if not names:
        raise ValueError(
            f"{path} must have landmarks for at least one image, got empty cells."
        )
    landmarks = np.array([points[name] for name in names], np.float32)
    landmarks = check_landmarks(landmarks.reshape(-1, 5, 2), names, path)
    return files._replace(names=names), landmarks


def _numbers(cells: list[str]) -> list[float]:
    """Numbers of a row's cells; empty if all cells are empty."""
    return [parse_number(cell) for cell in cells] if any(cells) else []


def _open_folder(
    path, image_size, channels, filename_pattern, subfolder, landmarks, align
):
    files = all_files = open_files(path, under=subfolder)
    points, first_size = None, None
    if landmarks is not None:
        files, points = read_landmarks(landmarks, files)
    elif align:
        raise ValueError("landmarks must be a csv file if align is True, got None.")
    stored = stored_files(files, files.names, landmarks=points)
    labels, names, cameras, is_test = _index(files, filename_pattern, path, subfolder)
    has_one_size = points is not None and not align  # by which landmarks are rescaled
    if image_size is None or has_one_size:
        first_size = files.image_size(files.names[0])
    size = parse_size(image_size or first_size)
    shape = (*size, channels)
    preprocessing = Preprocessing("stretch", alignment="arcface" if align else None)
    read = listed_reader(
        files,
        files.names,
        shape,
        preprocessing,
        landmarks=points if align else None,
        stored_size=first_size if has_one_size else None,
    )
    if align:
        points = plan_alignment(points, size)[2]
    elif points is not None:
        points = rescale_points(points, first_size, size)
    source = Source(
        read=read,
        labels=labels,
        names=names,
        input_shape=shape,
        landmarks=points,
        cameras=cameras,
        is_test=is_test,
        passed_over=all_files.passed_over(files.names),
        preprocessing=preprocessing,
        stored=stored,
    )
    return source, files.names


def _index(files, filename_pattern, path, subfolder):
    if filename_pattern not in NAMINGS and "(?P<identity>" not in filename_pattern:
        raise ValueError(
            f"filename_pattern must be one of {', '.join(NAMINGS)} or a regular "
            f"expression with a group `identity`, got {filename_pattern}."
        )
    pattern = re.compile(NAMINGS.get(filename_pattern, filename_pattern))
    skip = len(subfolder.strip("/")) + 1 if subfolder else 0
    matches = [pattern.fullmatch(name[skip:]) for name in files.names]
    if None in matches:
        stray = files.names[matches.index(None)]
        raise ValueError(
            f"{stray} in {path} must match filename_pattern={filename_pattern} "
            f"({pattern.pattern}), but does not. Move it, or choose another pattern."
        )
    labels, names = _number([match["identity"] for match in matches])
    cameras = None
    if "camera" in pattern.groupindex:
        cameras, _ = _number([match["camera"] for match in matches])
    is_test = None
    if "test" in pattern.groupindex:
        is_test = np.array([match["test"] is not None for match in matches])
    return labels, _without_common_folder(names), cameras, is_test


def _number(identities: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    identities = [normalize_unicode(identity) for identity in identities]
    names = sorted(set(identities), key=natural_key)
    label_of = {name: i for i, name in enumerate(names)}
    labels = np.array([label_of[identity] for identity in identities], np.int32)
    return labels, tuple(names)


def _without_common_folder(names: tuple[str, ...]) -> tuple[str, ...]:
    """Remove the folders that all names begin with."""
    while len(names) > 1 and all("/" in name for name in names):
        if len({name.partition("/")[0] for name in names}) > 1:
            break
        names = tuple(name.partition("/")[2] for name in names)
    return names


def archive_in(data_dir: str | os.PathLike) -> pathlib.Path:
    """Path of the only .zip in a data set's folder, or the folder if it has none."""
    archives = sorted(pathlib.Path(data_dir).glob("*.zip"))
    if len(archives) > 1:
        raise ValueError(
            f"{data_dir} must have at most one .zip, got {[a.name for a in archives]}. "
            "Choose one with the data source `folder`."
        )
    if not archives:
        return pathlib.Path(data_dir)
    if image := any_image(data_dir):
        raise ValueError(
            f"{data_dir} must have one .zip or folders of images, got both: "
            f"{archives[0].name} and {image}. Move one of them to another folder."
        )
    return archives[0]
