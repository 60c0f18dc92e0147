"""Re-identification sets that come with lists: a csv of our own, and MSMT17's files."""

import csv
import io
import os
import pathlib
from typing import NamedTuple

from fedfr_jax.data.sources.files import Files, open_files
from fedfr_jax.data.sources.folder import archive_in
from fedfr_jax.data.sources.reid import (
    IMAGE_SIZE,
    Listing,
    check_disjoint,
    reid_source,
)
from fedfr_jax.limits import read_list
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Source

COLUMNS = ("file", "identity", "camera", "split")
SPLITS = {"train": TRAIN, "query": QUERY, "gallery": GALLERY}
MSMT17_LISTS = {"train": TRAIN, "val": TRAIN, "query": QUERY, "gallery": GALLERY}


class Line(NamedTuple):
    """An image of a list."""

    where: str  # in which file and line
    file: str
    person: str
    camera: int
    role: int


def reid_csv(
    path: str | os.PathLike,
    *,
    images: str | os.PathLike | None = None,
    image_size: int | tuple[int, int] | None = IMAGE_SIZE,
) -> Source:
    """The images that a csv lists, in its order.

    Args:
      path: csv with the columns of COLUMNS: a file's path below `images`, a name, a
        whole number of at least 0, and train, query or gallery. The identity -1 is
        nobody.
      images: directory or .zip; None is the csv's folder.
      image_size: side or (H, W), to which images are resized; None takes images of
        one size as they are.

    Raises:
      ValueError: naming the csv and its line, for other columns, another camera or
        split, a file that comes twice or is not there, or a person to train on and to
        be tested; (when read) naming an unreadable image.
    """
    rows = []
    try:
        table = csv.DictReader(io.StringIO(read_list(path)), skipinitialspace=True)
        for row in table:
            words = [row[column].strip() for column in COLUMNS]
            rows.append((f"{path}, line {table.line_num}", *words))
    except (OSError, KeyError, AttributeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} must be a csv with the columns {', '.join(COLUMNS)}, got "
            f"{type(error).__name__}: {error}."
        ) from error
    for where, _, person, camera, split in rows:
        if not person:
            raise ValueError(
                f"{where}: identity must be a name, or -1 of nobody, got none."
            )
        if not camera.isdecimal() or split not in SPLITS:
            raise ValueError(
                f"{where}: camera must be a whole number and split one of "
                f"{', '.join(SPLITS)}, got {camera!r} and {split!r}."
            )
    listed = [
        Line(where, file, person, int(camera), SPLITS[split])
        for where, file, person, camera, split in rows
    ]
    folder = images or pathlib.Path(path).parent
    return _listed(listed, open_files(folder), image_size, path)


def msmt17(
    data_dir: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = IMAGE_SIZE,
    folders: tuple[str, str] = ("train", "test"),
) -> Source:
    """MSMT17 (Wei et al., CVPR 2018) by its own list_{train,val,query,gallery}.txt.

    A line is "<path> <number>", where the path is 0000/0000_000_01_... and its third
    word the camera; those of train and val are below folders[0], the others below
    folders[1]. People of both are numbered from 0: their names are train-0 and test-0.

    Args:
      data_dir: folder of the lists and the folders (or one .zip of them).
      image_size: side or (H, W), to which images are resized.
      folders: of training and test images; ("mask_train_v2", "mask_test_v2") in the
        second release.

    Raises:
      ValueError: naming the list and its line, for a line of another form or a file
        that is not there.
    """
    listed = []
    for part, role in MSMT17_LISTS.items():
        path = pathlib.Path(data_dir, f"list_{part}.txt")
        kind, folder = ("train", folders[0]) if role == TRAIN else ("test", folders[1])
        for number, line in enumerate(_lines(path), 1):
            where = f"{path}, line {number}"
            name, camera, person = _parse(line, where)
            file, person = f"{folder}/{name}", f"{kind}-{person}"
            listed.append(Line(where, file, person, camera, role))
    return _listed(listed, open_files(archive_in(data_dir)), image_size, data_dir)


def _lines(path):
    try:
        return read_list(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} must be a list of images, got {type(error).__name__}: {error}."
        ) from error


def _parse(line, where):
    """(path, camera, person) of a line of MSMT17's."""
    try:
        name, person = line.split()
        return name, int(name.split("/")[-1].split("_")[2]), int(person)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{where} must be <path> <number> with the camera as the third word of the "
            f"file's name, as 0000/0000_000_01_a.jpg 0, got {line!r}."
        ) from error


def _listed(lines: list[Line], files: Files, image_size, path) -> Source:
    """The source of what is listed, after a look whether it is there."""
    known, seen = set(files.names), {}
    missing = [line for line in lines if line.file not in known]
    if missing:
        raise ValueError(
            f"{path} must list images that are there, got {len(missing)} of "
            f"{len(lines)} that are not, first {missing[0].file} ({missing[0].where}): "
            "copy them or take their lines out."
        )
    for line in lines:
        if not 0 <= line.camera < 2**31:
            raise ValueError(
                f"{line.where}: camera must lie in [0, 2^31), got {line.camera}."
            )
        first = seen.setdefault(line.file, line.where)
        if first != line.where:
            raise ValueError(
                f"{line.where}: an image must be listed once, got {line.file} of "
                f"{first} again."
            )
    listing = Listing(
        names=[line.file for line in lines],
        identities=[line.person for line in lines],
        cameras=[line.camera for line in lines],
        roles=[line.role for line in lines],
    )
    check_disjoint(listing, files)
    return reid_source(files, listing, image_size, path)
