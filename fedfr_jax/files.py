"""Files: atomic writes, size checks before reading, memory maps.

Files are written under a temporary name that nobody can guess, then renamed: no reader
sees half a file, and no link that somebody planted is followed.
"""

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import math
import mmap
import os
import pathlib
import re
import secrets
import stat
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np

DRAFT = ".????????????????.tmp"  # pattern of the names of files being written


def is_url(path: str | os.PathLike) -> bool:
    """Whether a path is a URL, such as of a bucket.

    >>> is_url("s3://bucket/run"), is_url("runs/a")
    (True, False)
    """
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path)) is not None


def cache_folder() -> pathlib.Path:
    """The library's cache folder, below $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root).absolute() / "fedfr_jax"


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Name `path` in an OSError of the block that names no file, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def replace_file(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Open a file for bytes that replaces `path` atomically at the end of the block.

    A reader sees the old file or the whole new one, also after a kill or a power cut. A
    block that raises leaves `path` unchanged. Creates the folder. Of several writers
    the last one stays.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with naming(path), temporary.open("x+b") as file:  # never an existing name
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with replace_file(path) as file:
        file.write(text.encode())


def digest_of_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_drafts(folder: pathlib.Path) -> None:
    """Remove what killed processes left half written, at any depth; nobody may write.

    Links are not followed.
    """
    for path in folder.rglob(DRAFT):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike) -> Iterator[None]:
    """Lock the file `path` for one process at a time, by a hidden file that stays."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with open(lock, "a", opener=open_regular) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


MAX_LIST_BYTES = 2**30  # bytes; IJB-C's list of 15 million pairs has less than 2^28
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_file(path: str | os.PathLike, max_bytes: int | None = None) -> None:
    """Raise ValueError for a pipe or device, or a file of more than `max_bytes`.

    A missing file is left to its reader.
    """
    try:
        state = os.stat(path)
    except OSError:
        return
    if not stat.S_ISREG(state.st_mode):
        kind = stat.filemode(state.st_mode)
        raise ValueError(f"{path} must be a regular file, got {kind}. Check the path.")
    if max_bytes is not None:
        check_bytes(state.st_size, str(path), max_bytes)


def open_regular(path: str | os.PathLike, flags: int) -> int:
    """Opener for `open` of an untrusted file: a link, pipe or device is an OSError."""
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "Is a link", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Is no regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike, max_bytes: int) -> bytes:
    """Read an untrusted file; an OSError if it is no regular file or too large."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            text = f"Has more than {max_bytes >> 20} MiB"
            raise OSError(errno.EFBIG, text, os.fspath(path))
        return file.read()


def check_list(path: str | os.PathLike) -> None:
    """`check_file` for a text list, which is read at once."""
    check_file(path, MAX_LIST_BYTES)


def read_list(path: str | os.PathLike) -> str:
    """Read a text list; names are normalized to NFC, as those of files are.

    A byte order mark is dropped. A list that cannot be read, or is not UTF-8, is a
    ValueError that names the file.
    """
    check_list(path)
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{path} must be a readable list in UTF-8, got {type(error).__name__}: "
            f"{error}."
        ) from error
    return unicodedata.normalize("NFC", text)


def read_csv(path: str | os.PathLike, columns: Sequence[str]) -> dict[int, list[str]]:
    """Read `columns` of a .csv with a header: {line number: stripped cells}."""
    table = csv.reader(io.StringIO(read_list(path)), skipinitialspace=True)
    lines = {}
    try:
        header = [name.strip() for name in next(table, [])]
        indices = [header.index(name) for name in columns]
        for cells in filter(None, table):
            lines[table.line_num] = [cells[i].strip() for i in indices]
    except (ValueError, IndexError, csv.Error) as error:
        raise ValueError(
            f"{path} must be a csv with the columns {', '.join(columns)}, but line "
            f"{max(table.line_num, 1)} is not: {error}."
        ) from error
    return lines


def check_bytes(num_bytes: int, origin: str, max_bytes: int = MEMORY) -> None:
    """Raise ValueError if `num_bytes` exceeds `max_bytes`, by default all memory."""
    if num_bytes > max_bytes:
        raise ValueError(
            f"{origin} must take at most {max_bytes / 2**30:.2f} GiB, got "
            f"{num_bytes / 2**30:.2f} GiB."
        )


def read_npz(path: str | os.PathLike) -> dict[str, np.ndarray | bytes]:
    """Read all of an .npz; a member that is no array as bytes.

    Raises:
      ValueError, OSError, zipfile.BadZipFile, zlib.error: for a damaged file, or an
        array that needs more memory than the machine, or than its own numbers, have.
    """
    check_archive(path)
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
        for member in stored.zip.infolist():
            with stored.zip.open(member) as array:
                if array.peek().startswith(np.lib.format.MAGIC_PREFIX):
                    check_npy(array, member.file_size)
        return dict(stored)


def read_npy(file: IO[bytes]) -> np.ndarray:
    """Read the array at the place of an open file, if the file has all its numbers."""
    start = file.tell()
    check_npy(file, os.fstat(file.fileno()).st_size)
    file.seek(start)
    return np.load(file, allow_pickle=False)


def check_npy(file: IO[bytes], end: int) -> None:
    """Read the header of an array; ValueError if its numbers do not end until `end`.

    NumPy allocates them all before it reads the first.
    """
    shape, _, dtype = read_npy_header(file)
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or num_bytes > end - file.tell():
        raise ValueError(f"{dtype} {shape} must have as many numbers, but is truncated")


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read an array's header: (shape, whether in Fortran's order, dtype)."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def check_archive(path: str | os.PathLike) -> None:
    """Raise ValueError for a zip that unpacks to more than all memory.

    A file that is no zip is left to its reader.
    """
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return
    check_bytes(size, str(path))


def read_array(path: str | os.PathLike, key: str) -> np.ndarray:
    """Read the array `key` of a .npz; a damaged or missing one is a ValueError."""
    check_archive(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            return stored[key]
    except Exception as error:  # of zipfile, zlib and NumPy
        raise ValueError(
            f"{path} must be an undamaged .npz with the array {key}, got {error}."
        ) from error


CHUNK_BYTES = 2**17  # of a longer request Linux reads only its read-ahead


def advise_random_access(array: np.memmap) -> np.memmap:
    """Turn off read-ahead for a memory map that is read at random positions."""
    _map_of(array).madvise(mmap.MADV_RANDOM)
    return array


def _map_of(array: np.memmap) -> mmap.mmap:
    assert isinstance(array.base, mmap.mmap)
    return array.base


def will_need(array: np.memmap, begin: int, end: int) -> None:
    """Prefetch the bytes [begin, end) of a memory map with one request."""
    header = array.offset % mmap.ALLOCATIONGRANULARITY
    first, end = header + begin, header + end
    for start in range(first - first % mmap.PAGESIZE, end, CHUNK_BYTES):
        size = min(CHUNK_BYTES, end - start)
        _map_of(array).madvise(mmap.MADV_WILLNEED, start, size)


def will_need_rows(array: np.memmap, rows: np.ndarray) -> None:
    """Prefetch `rows` [n] of a memory map, neighbors in one request."""
    rows = np.unique(rows)
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        will_need(array, *(array.strides[0] * np.array([run[0], run[-1] + 1])).tolist())
