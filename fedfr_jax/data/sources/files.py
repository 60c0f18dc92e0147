"""The files of a directory tree or of a zip archive, behind one view."""

import array
import contextlib
import os
import pathlib
import re
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.npz import DAMAGED
from fedfr_jax.data.sources.sizes import MOST_IMAGE
from fedfr_jax.limits import check_bytes, check_file

IMAGE_SUFFIXES = ".bmp .gif .jpeg .jpg .pbm .pgm .png .ppm .tif .tiff .webp".split()


class Files(NamedTuple):
    """Image files and how to read them."""

    names: list[str]  # relative, with forward slashes, in natural order
    read: Callable[[str], bytes]
    origin: Callable[[str], str]  # what to call a file in an error
    confirm: Callable[[str], None] = lambda name: None  # a name that is passed over


def open_files(path: str | os.PathLike, *, under: str = "") -> Files:
    """List the images below `under` in a directory or in a .zip.

    Hidden files and files that are no images are passed over. Whoever passes over an
    image has its name confirmed: a damaged archive must not lose one.

    Raises:
      ValueError: when the path does not exist, is no archive, or holds no image.
    """
    path = pathlib.Path(path)
    prefix = under.strip("/") + "/" if under else ""
    is_wanted = lambda name: name.startswith(prefix) and _is_image(name)
    if path.is_dir():
        (names, read), confirm = _open_directory(path, is_wanted), lambda name: None
    elif path.is_file():
        names, read, confirm = _open_zip(path)
    else:
        raise ValueError(
            f"{path} must be a directory or a .zip of images, got nothing there."
        )
    for name in names:
        if not is_wanted(name):
            confirm(name)
    names = sorted(filter(is_wanted, names), key=natural_key)
    _check_names(path, names)
    if not names:
        raise ValueError(
            f"{path} must hold images{f' below {prefix}' if prefix else ''} "
            f"({' '.join(IMAGE_SUFFIXES)}), got none: check the path."
        )
    return Files(names, read, lambda name: f"{name} in {path}", confirm)


def natural_key(text: str) -> list:
    """Sort key under which s2 comes before s10.

    >>> sorted(["s10", "s2", "t"], key=natural_key)
    ['s2', 's10', 't']
    """
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]


def _check_names(path, names):
    """Raise ValueError for a name that is not UTF-8: no file of a run can hold it."""
    try:
        "\n".join(names).encode()
    except UnicodeEncodeError as error:
        name = "\n".join(names)[: error.start].count("\n")
        raise ValueError(
            f"{path} must have names in UTF-8, got {os.fsencode(names[name])}: rename "
            "the file or its folder."
        ) from error


def _is_image(name: str) -> bool:
    parts = name.split("/")
    is_hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
    return not is_hidden and parts[-1].lower().endswith(tuple(IMAGE_SUFFIXES))


def _open_directory(path: pathlib.Path, is_wanted: Callable[[str], bool]):
    names, places, seen, folders = [], array.array("Q"), {}, [(str(path), "")]
    while folders:
        folder, under = folders.pop()
        device, number = _place(os.stat(folder))
        other = seen.setdefault((device, number), folder)
        if other != folder:  # its images would count once more, as other people's
            raise _twice(folder, other)
        for entry in _listed(folder):
            name = under + entry.name
            if _is_folder(entry):
                folders.append((entry.path, f"{name}/"))
            elif is_wanted(name):
                places.extend(_place_of_file(entry, device, len(names)))
                names.append(name)
    _check_each_once(path, names, np.frombuffer(places, np.uint64).reshape(-1, 2))

    def read(name):
        check_file(path / name, MOST_IMAGE)
        try:
            return (path / name).read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path / name} must be readable, got {error.strerror}: "
                "restore the file or open the folder again."
            ) from error

    return names, read


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _listed(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise ValueError(
            f"{folder} must be a folder that can be listed, got {error.strerror}."
        ) from error


def _place(state: os.stat_result) -> tuple[int, int]:
    """(device, inode): two names with one place are of one file."""
    return state.st_dev, state.st_ino


def _place_of_file(entry: os.DirEntry, device: int, number: int) -> tuple[int, int]:
    """`_place` of a file, asking the disk about links alone."""
    if not entry.is_symlink():
        return device, entry.inode()
    try:
        return _place(entry.stat())
    except OSError:  # of a link to nothing, which is told when it is read
        return 2**64 - 1, number


def _check_each_once(path: pathlib.Path, names: list[str], places: np.ndarray) -> None:
    """Raise ValueError when two of `names` are links to one image.

    Args:
      places: [T, 2] of each name; on some file systems two files have one.
    """
    order = np.lexsort(places.T)
    is_next = (places[order[1:]] == places[order[:-1]]).all(axis=1)
    for i in np.flatnonzero(is_next):
        first, second = sorted(path / names[place] for place in order[i : i + 2])
        with contextlib.suppress(OSError):
            if os.path.samefile(first, second):
                raise _twice(second, first)


def _twice(name: str | pathlib.Path, other: str | pathlib.Path) -> ValueError:
    return ValueError(f"{name} must be in the set once, got a link: it is {other} too.")


def _open_zip(path: pathlib.Path):
    try:
        archive = zipfile.ZipFile(path)
        count = _count_of_end(path)
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be a whole zip archive, got {error}: copy it again."
        ) from error

    listed = archive.infolist()
    if count not in (len(listed) % 2**16, 2**16 - 1):  # the latter where it is longer
        raise ValueError(
            f"{path} must list {count} files, as its end says, got {len(listed)}: copy "
            "it again."
        )
    members = _by_name(path, listed)

    def confirm(name):  # by its own header
        try:
            archive.open(members[name]).close()
        except DAMAGED as error:
            raise ValueError(
                f"{path} must be a whole zip archive, got {error}: copy it again."
            ) from error

    def read(name):
        member = members[name]
        check_bytes(member.file_size, f"{name} in {path}", MOST_IMAGE)
        try:
            return archive.read(member)
        except DAMAGED as error:
            raise ValueError(
                f"{name} in {path} must be readable, got {error}: "
                "copy or make the archive again."
            ) from error

    return list(members), read, confirm


def _by_name(path, listed: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """{name: member}, by the names that an unpacked archive would have."""
    members = {}
    for member in listed:
        name = _unpacked(path, _with_slashes(member))
        if name in members:
            raise ValueError(
                f"{path} must hold each file once, got {members[name].filename} and "
                f"{member.filename}."
            )
        members[name] = member
    return members


def _with_slashes(member: zipfile.ZipInfo) -> str:
    """Its name with forward slashes: some archives of Windows have others."""
    is_of_windows = member.create_system == 0
    return member.filename.replace("\\", "/") if is_of_windows else member.filename


def _unpacked(path, name: str) -> str:
    """The name of a member in one spelling: `a//b` and `./a/b` are `a/b`."""
    *folders, last = name.split("/")
    if name.startswith("/") or ".." in (*folders, last):
        raise ValueError(
            f"{path} must hold relative paths without .., got {name}: make the archive "
            "again."
        )
    return "/".join([*(part for part in folders if part not in ("", ".")), last])


def _count_of_end(path):
    """How many files a zip has, by the record at its end, which zipfile passes over."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 2**16 - 22, 0))  # the record has a comment
        end = file.read()
    place = end.rindex(b"PK\5\6")
    return int.from_bytes(end[place + 10 : place + 12], "little")
