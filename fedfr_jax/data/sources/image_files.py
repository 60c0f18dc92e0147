"""Image files of a folder or zip archive."""

import os
import pathlib
import posixpath
import re
import zipfile
from collections.abc import Callable, Collection
from typing import NamedTuple

from fedfr_jax.data.sources.decoding import read_size
from fedfr_jax.files import check_bytes, check_file
from fedfr_jax.text import normalize_unicode, printable

IMAGE_SUFFIXES = ".bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .ppm .tif".split()
IMAGE_SUFFIXES += [".tiff", ".webp"]
MAX_IMAGE_BYTES = 2**28  # bytes of an image file; photographs have less than 2^25
# Folders of operating systems: thumbnails of a network storage, resource forks of macOS
# archives, recycle bins.
SYSTEM_FOLDERS = ("@eaDir", "__MACOSX", "#recycle", "$RECYCLE.BIN")


class Files(NamedTuple):
    """Image files of a folder or archive, and functions to read them."""

    # Relative, with forward slashes, composed (Unicode's NFC), in natural order
    names: list[str]
    read: Callable[[str], bytes]
    origin: Callable[[str], str]  # what to call a file in an error
    ignored: Collection[str] = ()  # files that are no images
    path: str = ""  # of the directory or archive
    size: Callable[[str], int] = lambda name: 0  # bytes of a file

    def image_size(self, name: str) -> tuple[int, int]:
        """(H, W) of an image, as stored."""
        return read_size(self.read(name), self.origin(name))

    def passed_over(self, used: Collection[str] | None = None) -> str:
        """Count ignored files, with the first of each kind; "" if there are none.

        Args:
          used: the images that are read; None for all.
        """
        unused = [] if used is None else sorted({*self.names} - {*used})
        kinds = {"of the images": unused} if unused else {}
        for name in self.ignored:
            kinds.setdefault(_ignored_reason(name), []).append(name)
        summary = ", ".join(
            f"{len(names)} {kind} (first {printable(names[0])})"
            for kind, names in kinds.items()
        )
        return f"passed over in {self.path}: {summary}" if kinds else ""


def open_files(path: str | os.PathLike, *, under: str = "") -> Files:
    """List the images below `under` in a directory or .zip.

    Hidden files, those of SYSTEM_FOLDERS and files that are no images by their suffix
    are passed over, see `Files.passed_over`.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(
            f"{path} must be a directory or a .zip of images, but does not exist."
        )
    listed, read, size = _open_directory(path) if path.is_dir() else _open_zip(path)
    prefix = under.strip("/") + "/" if under else ""
    stored = {}
    for name in listed:
        composed = normalize_unicode(name)
        if stored.setdefault(composed, name) != name:
            raise ValueError(
                f"{path} must have each file once, got {composed} in two spellings of "
                "Unicode. Rename one."
            )
    below = [name for name in stored if name.startswith(prefix)]
    names = sorted(filter(_is_image, below), key=natural_key)
    files = Files(
        names=names,
        read=lambda name: read(stored[name]),
        origin=lambda name: f"{name} in {path}",
        ignored=sorted({*below} - {*names}),
        path=str(path),
        size=lambda name: size(stored[name]),
    )
    if not names:
        raise ValueError(
            f"{path} must have images{f' below {prefix}' if prefix else ''} "
            f"({' '.join(IMAGE_SUFFIXES)}), got none. Check the path. "
            f"{files.passed_over()}".rstrip()
        )
    return files


def natural_key(text: str) -> list:
    """Sort key that puts s2 before s10.

    >>> sorted(["s10", "s2", "t"], key=natural_key)
    ['s2', 's10', 't']
    """
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]


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


def _open_directory(path: pathlib.Path):
    """(names of all files, functions that read one and give its size)."""
    names, seen = [], {}
    for folder, _, files in os.walk(path, followlinks=True):
        other = seen.setdefault(os.path.realpath(folder), folder)
        if other != folder:  # its images would be another identity's too
            raise ValueError(
                f"{folder} must be in the set once, got a link to {other}."
            )
        under = pathlib.Path(folder).relative_to(path)
        names += [(under / file).as_posix() for file in files]

    def read(name):
        check_file(path / name, MAX_IMAGE_BYTES)
        try:
            return (path / name).read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path / name} must be readable, got {error.strerror}. "
                "Restore the file or open the folder again."
            ) from error

    return names, read, lambda name: os.stat(path / name).st_size


def _open_zip(path: pathlib.Path):
    """As `_open_directory`, of an archive's files by their unpacked names."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} must be a whole zip archive, got {error}: copy it again."
        ) from error
    members = {}
    for member in archive.infolist():
        if member.is_dir():
            continue
        name = member.filename
        if member.create_system == 0:  # some archives of Windows have backslashes
            name = name.replace("\\", "/")
        name = posixpath.normpath(name)
        if name in members:
            raise ValueError(f"{path} must have each file once, got {name} twice.")
        members[name] = member

    def read(name):
        check_bytes(members[name].file_size, f"{name} in {path}", MAX_IMAGE_BYTES)
        try:
            return archive.read(members[name])
        except Exception as error:  # of zipfile, zlib and other methods
            raise ValueError(
                f"{name} in {path} must be readable, got {error}. "
                "Copy or make the archive again."
            ) from error

    return list(members), read, lambda name: members[name].file_size
