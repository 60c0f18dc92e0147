"""Image files of a folder or zip archive."""

import array
import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.decoding import MAX_IMAGE_BYTES, read_size
from fedfr_jax.data.sources.zip_files import open_zip
from fedfr_jax.files import check_file
from fedfr_jax.text import normalize_unicode, printable

IMAGE_SUFFIXES = ".bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .ppm .tif".split()
IMAGE_SUFFIXES += [".tiff", ".webp"]
# Folders of operating systems: thumbnails of a network storage, resource forks of macOS
# archives, recycle bins.
SYSTEM_FOLDERS = ("@eaDir", "__MACOSX", "#recycle", "$RECYCLE.BIN")
NOT_READ = "of the images"


class Files(NamedTuple):
    """Image files of a folder or archive, and functions to read them."""

    # Relative, with forward slashes, composed (Unicode's NFC), in natural order
    names: list[str]
    read: Callable[[str], bytes]
    origin: Callable[[str], str]  # what to call a file in an error
    confirm: Callable[[str], None] = lambda name: None  # check an unread file's name
    ignored: Collection[str] = ()  # files that are no images
    path: str = ""  # of the directory or archive
    size: Callable[[str], int] = lambda name: 0  # bytes of a file

    def image_size(self, name: str) -> tuple[int, int]:
        """(H, W) of an image, as stored."""
        return read_size(self.read(name), self.origin(name))

    def passed_over(self, used: Collection[str] | None = None) -> str:
        """Count ignored files, with the first of each kind; "" if there are none.

        Args:
          used: the images that are read; None for all. The names of the others are
            confirmed: a damaged name must not hide an image.
        """
        unused = [] if used is None else sorted({*self.names} - {*used})
        for name in unused:
            self.confirm(name)
        kinds = {NOT_READ: unused} if unused else {}
        for name in self.ignored:
            kinds.setdefault(_ignored_reason(name), []).append(name)
        if not kinds:
            return ""
        summary = ", ".join(
            f"{len(names)} {kind} (first {printable(names[0])})"
            for kind, names in kinds.items()
        )
        return f"passed over in {self.path}: {summary}"


def open_files(path: str | os.PathLike, *, under: str = "") -> Files:
    """List the images below `under` in a directory or .zip.

    Hidden files, those of SYSTEM_FOLDERS and files that are no images by their suffix
    are passed over, see `Files.passed_over`.
    """
    path = pathlib.Path(path)
    prefix = under.strip("/") + "/" if under else ""
    is_wanted = lambda name: name.startswith(prefix) and _is_image(name)
    if path.is_dir():
        listed, read = _open_directory(path, is_wanted)
        confirm = lambda name: None
        size = lambda name: _size(path / name)
    elif path.is_file():
        listed, read, confirm, size = open_zip(path)
    else:
        raise ValueError(
            f"{path} must be a directory or a .zip of images, but does not exist."
        )
    images, ignored = [], []
    for name in listed:
        if is_wanted(name):
            images.append(name)
            continue
        confirm(name)
        if name.startswith(prefix) and not name.endswith("/"):
            ignored.append(name)
    _check_names(path, images)
    stored = _decomposed(images)
    names = set(images).difference(stored.values()).union(stored)
    files = Files(
        names=sorted(names, key=natural_key),
        read=lambda name: read(stored.get(name, name)),
        origin=lambda name: f"{name} in {path}",
        confirm=lambda name: confirm(stored.get(name, name)),
        ignored=sorted(ignored),
        path=str(path),
        size=lambda name: size(stored.get(name, name)),
    )
    if not names:
        raise ValueError(
            f"{path} must have images{f' below {prefix}' if prefix else ''} "
            f"({' '.join(IMAGE_SUFFIXES)}), got none. Check the path."
            + (f" ({files.passed_over()})" if ignored else "")
        )
    return files


def _decomposed(names: Iterable[str]) -> dict[str, str]:
    """Names that are not in NFC: {NFC name: name as stored}.

    A name whose composed form is another file is not changed.
    """
    existing, changed = set(names), {}
    for name in existing:
        if normalize_unicode(name) not in existing:
            changed[normalize_unicode(name)] = name
    return changed


def any_image(path: str | os.PathLike) -> str | None:
    """Name of an image below a directory; None if there is none."""
    for folder, _, files in os.walk(path):
        for file in files:
            name = pathlib.Path(folder, file).relative_to(path).as_posix()
            if _is_image(name):
                return name
    return None


def natural_key(text: str) -> list:
    """Sort key that puts s2 before s10.

    >>> sorted(["s10", "s2", "t"], key=natural_key)
    ['s2', 's10', 't']
    """
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]


def _check_names(path, names):
    """Raise ValueError for a name that is not UTF-8."""
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
    is_hidden = any(x.startswith(".") or x in SYSTEM_FOLDERS for x in parts)
    return not is_hidden and parts[-1].lower().endswith(tuple(IMAGE_SUFFIXES))


def _ignored_reason(name: str) -> str:
    """Reason why a file is ignored, to follow a count."""
    *folders, last = name.split("/")
    for folder in folders:
        if folder in SYSTEM_FOLDERS:
            return f"in {folder}"
    if any(part.startswith(".") for part in (*folders, last)):
        return "hidden"
    return os.path.splitext(last)[1].lower() or "without a suffix"


def _open_directory(path: pathlib.Path, is_wanted: Callable[[str], bool]):
    """List a directory: (names of images and ignored files, function to read one)."""
    names, ignored, inodes = [], [], array.array("Q")
    folders, folders_by_inode = [(str(path), "")], {}
    while folders:
        folder, under = folders.pop()
        device, number = _inode(os.stat(folder))
        other = folders_by_inode.setdefault((device, number), folder)
        if other != folder:  # its images would be another identity's too
            raise _duplicates(folder, other)
        for entry in _list_members(folder):
            name = under + entry.name
            if _is_folder(entry):
                folders.append((entry.path, f"{name}/"))
            elif is_wanted(name):
                inodes.extend(_file_inode(entry, device, len(names)))
                names.append(name)
            else:
                ignored.append(name)
    _check_each_once(path, names, np.frombuffer(inodes, np.uint64).reshape(-1, 2))

    def read(name):
        check_file(path / name, MAX_IMAGE_BYTES)
        try:
            return (path / name).read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path / name} must be readable, got {error.strerror}. "
                "Restore the file or open the folder again."
            ) from error

    return names + ignored, read


def _size(path: pathlib.Path) -> int:
    """Size of a file in bytes; 0 for a broken link, which is reported on reading."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _list_members(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise ValueError(
            f"{folder} must be a folder that can be listed, got {error.strerror}."
        ) from error


def _inode(state: os.stat_result) -> tuple[int, int]:
    """(device, inode) of a file: equal for two links to one file."""
    return state.st_dev, state.st_ino


def _file_inode(entry: os.DirEntry, device: int, number: int) -> tuple[int, int]:
    """(device, inode) of a file; only links need a system call."""
    if not entry.is_symlink():
        return device, entry.inode()
    try:
        return _inode(entry.stat())
    except OSError:  # of a broken link, reported when it is read
        return 2**64 - 1, number


def _check_each_once(path: pathlib.Path, names: list[str], inodes: np.ndarray) -> None:
    """Raise ValueError if two of `names` are links to one image.

    Args:
      inodes: [T, 2] of each name; on some file systems two files share one.
    """
    order = np.lexsort(inodes.T)
    is_next = (inodes[order[1:]] == inodes[order[:-1]]).all(axis=1)
    for i in np.flatnonzero(is_next):
        first, second = sorted(path / names[index] for index in order[i : i + 2])
        with contextlib.suppress(OSError):
            if os.path.samefile(first, second):
                raise _duplicates(second, first)


def _duplicates(name: str | pathlib.Path, other: str | pathlib.Path) -> ValueError:
    return ValueError(f"{name} must be in the set once, got a link to {other}.")
