"""Variables of MATLAB's files of version 5 to 7, but for structs and sparse matrices.

"MAT-File Format", The MathWorks, chapter 1. SciPy reads more, and ends the process
where it is given a damaged file.
"""

import os
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np

from fedfr_jax.limits import check_list

DTYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4"}
DTYPES |= {9: "<f8", 12: "<i8", 13: "<u8", 16: "u1", 17: "<u2"}
MATRIX, COMPRESSED = 14, 15  # elements that hold elements
CELL, CHAR = 1, 4  # classes of matrices
HEADER = 128
MOST = 2**28  # bytes of a variable


def read_mat(path: str | os.PathLike) -> dict[str, np.ndarray | str | list]:
    """Numbers [n], texts, or lists of those (cells) by name; shapes are not kept.

    Raises:
      ValueError, KeyError, IndexError, zlib.error: for a damaged or another file.
    """
    check_list(path)
    data = pathlib.Path(path).read_bytes()
    if data[124:HEADER] != b"\0\1IM":
        raise ValueError(
            f"{path} must be of MATLAB 5 to 7, little-endian, got {data[:20]}: save it "
            "with -v7."
        )
    found = {}
    for kind, part in _elements(data[HEADER:]):
        if kind == COMPRESSED:
            unpack = zlib.decompressobj()
            part = unpack.decompress(part, MOST)
            if not unpack.eof:
                raise ValueError(f"{path} must hold whole variables, got a cut one.")
            ((kind, part),) = _elements(part)
        if kind == MATRIX:
            name, values = _matrix(part)
            found[name] = values
    return found


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, content) one after the other, each padded to 8 bytes unless compressed."""
    place = 0
    while place < len(data):
        kind, size = np.frombuffer(data[place : place + 8], "<u4").tolist()
        begin, place = place + 8, place + 8 + size + -size % 8
        if kind >> 16:  # at most 4 bytes, in place of the size
            kind, size, begin = kind & 0xFFFF, kind >> 16, begin - 4
            place = begin + 4
        elif kind == COMPRESSED:
            place = begin + size
        if begin + size > len(data):
            raise ValueError(f"elements must end in the file, got {size} bytes.")
        yield kind, data[begin : begin + size]


def _matrix(data: bytes) -> tuple[str, np.ndarray | str | list]:
    """(name, values) of a matrix."""
    (_, flags), _, (_, name), *rest = _elements(data)
    name = name.decode("ascii")
    if flags[0] == CELL:
        return name, [_matrix(part)[1] for _, part in rest]
    kind, content = rest[0]
    values = np.frombuffer(content, DTYPES[kind])
    if flags[0] != CHAR:
        return name, values
    return name, content.decode("utf-16-le" if values.itemsize == 2 else "utf-8")
