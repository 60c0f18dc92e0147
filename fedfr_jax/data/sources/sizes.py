"""What a file may ask for before it is read: a kind of file, bytes, pixels."""

import os
import stat
import zipfile

MOST_IMAGE = 2**28  # bytes of an image file; photographs have less than 2^25
MOST_PIXELS = 2**26  # of a picture: 8192 x 8192
MOST_CLASSES = 10**7  # the largest face sets have 4 million
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_file(path: str | os.PathLike, most: int | None = None) -> None:
    """Raise ValueError for a pipe, where a reader waits, or more than `most` bytes.

    What cannot be found is left to its reader.
    """
    try:
        state = os.stat(path)
    except OSError:
        return
    if not stat.S_ISREG(state.st_mode):
        kind = stat.filemode(state.st_mode)
        raise ValueError(f"{path} must be a file, got {kind}: check the path.")
    if most is not None:
        check_bytes(state.st_size, str(path), most)


def check_bytes(num_bytes: int, origin: str, most: int = MEMORY) -> None:
    """Raise ValueError when `origin` asks for more bytes than `most`, all memory."""
    if num_bytes > most:
        raise ValueError(
            f"{origin} must take at most {most / 2**30:.2f} GiB, got "
            f"{num_bytes / 2**30:.2f} GiB."
        )


def check_pixels(width: int, height: int, origin: str) -> None:
    """Raise ValueError for a picture that is too large to be one of a face."""
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"{origin} must have at most {MOST_PIXELS} pixels, got {width} x {height}: "
            "make it smaller or take it out of the set."
        )


def check_classes(number: int, origin: str | os.PathLike) -> None:
    """Raise ValueError for more classes than any set has."""
    if number > MOST_CLASSES:
        raise ValueError(
            f"{origin} must have at most {MOST_CLASSES} classes, got {number}."
        )


def check_members(path: str | os.PathLike, keys: list[str]) -> None:
    """Raise ValueError for arrays of a .npz that unpack to more than all memory.

    A file that is no .npz is left to its reader.
    """
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return
    for key in keys:
        check_bytes(sizes.get(f"{key}.npy", 0), f"{path}: {key}")
