"""Files of torch.save, read and written without PyTorch.

Such a file is a zip of `data.pkl`, a pickle whose tensors name a storage, an offset, a
size and strides, and of one file of raw bytes for each storage. A pickle may run any
function that it names; here it finds only those that plain tensors need, in forms of
our own, and anything else is refused. The bytes are little-endian. No member is packed,
and tensors are views, so reading takes no more memory than the file has bytes.
"""

import collections
import functools
import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedfr_jax.drafts import replacing
from fedfr_jax.limits import check_pickle

# Name of a storage's class, what it holds.
STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
TOP = "archive"  # the folder in the zip that torch.save makes today


def read_torch(path: str | os.PathLike) -> Any:
    """What torch.save wrote: dicts, lists and numbers, with numpy arrays for tensors.

    Raises:
      ValueError: for a file of PyTorch before 1.6, a damaged one, or one that holds
        anything but tensors and plain Python values; nothing of it is run.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} must be a zip, as torch.save writes it since PyTorch 1.6, got "
            "another file: load and save it with a newer one."
        )
    try:
        with zipfile.ZipFile(path) as file:
            _check_stored(file, path)
            return _unpickled(file, path)
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise ValueError(
            f"{path} must be a whole file of torch.save, got {error!r}."
        ) from error


def _check_stored(file, path):
    """Raise ValueError for a member that unpacks to more than it has in the file."""
    for member in file.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{path} must hold members as they are, got {member.filename} packed: "
                "write the file with torch.save."
            )


def _unpickled(file, path):
    (place,) = [x for x in file.namelist() if x.endswith("data.pkl")][:1] or [None]
    if place is None:
        raise ValueError(f"{path} must hold data.pkl, got {file.namelist()[:3]}.")
    top = place.removesuffix("data.pkl")
    if f"{top}byteorder" in file.namelist():
        if (order := file.read(f"{top}byteorder")) != b"little":
            raise ValueError(f"{path} must have little-endian numbers, got {order}.")
    storage = functools.cache(lambda key: file.read(f"{top}data/{key}"))
    check_pickle(text := file.read(place))
    return _Unpickler(io.BytesIO(text), storage, path).load()


class _Unpickler(pickle.Unpickler):
    """Knows the names that tensors need, and no other."""

    def __init__(self, file, storage: Callable[[str], bytes], path):
        super().__init__(file)
        self._storage, self._path = storage, path

    def find_class(self, module, name):
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch", "Size"): tuple,
        }
        if (module, name) not in known:
            raise ValueError(
                f"{self._path} must hold tensors and plain values, got {module}.{name}:"
                " save model.state_dict() alone."
            )
        return known[module, name]

    def persistent_load(self, saved):
        _, dtype, key, _, size = saved
        data = np.frombuffer(self._storage(key), dtype)
        if len(data) < size:
            raise ValueError(
                f"{self._path} must hold {size} numbers in storage {key}, got "
                f"{len(data)}."
            )
        return data


def _tensor(storage, offset, size, strides, *_):
    """A strided view of a storage [n], which must not leave it nor be larger."""
    last = offset + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    is_inside = min((offset, *strides)) >= 0 and last < len(storage)
    if 0 in size:
        return np.zeros(size, storage.dtype)
    if not is_inside:
        raise ValueError(
            f"tensors must lie within their storage of {len(storage)}, got {last}."
        )
    if (count := math.prod(size)) > len(storage):
        raise ValueError(
            f"tensors must have at most their storage's {len(storage)} numbers, got "
            f"{count}: save contiguous ones."
        )
    steps = [s * storage.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(
        storage[offset:], size, steps, writeable=False
    )


def write_torch(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a state dict that torch.load(path, weights_only=True) reads.

    Raises:
      ValueError: for an array of a dtype that PyTorch has no storage for.
    """
    arrays = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    text = _pickled(arrays)  # before the file is there
    with replacing(path) as draft, zipfile.ZipFile(draft, "w") as file:
        file.writestr(f"{TOP}/data.pkl", text)
        file.writestr(f"{TOP}/byteorder", "little")
        for i, array in enumerate(arrays.values()):
            file.writestr(f"{TOP}/data/{i}", array.tobytes())
        file.writestr(f"{TOP}/version", "3\n")


def _pickled(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An OrderedDict of tensors in the pickle protocol 2, by its operations.

    pickle.dump would have to import the classes that it names.
    """
    empty = _class("collections", "OrderedDict") + b")R"  # called with ()
    entries = [
        _text(name) + _rebuilt(str(i), array, empty)
        for i, (name, array) in enumerate(arrays.items())
    ]
    return b"\x80\x02" + empty + b"(" + b"".join(entries) + b"u."


def _rebuilt(key, array, empty):
    names = {dtype: name for name, dtype in STORAGES.items()}
    if array.dtype not in names:
        raise ValueError(f"tensors must be of {list(names)}, got {array.dtype}.")
    parts = _text("storage"), _class("torch", names[array.dtype]), _text(key)
    storage = b"(" + b"".join([*parts, _text("cpu"), _number(array.size)]) + b"tQ"
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    sizes = [_numbers(array.shape), _numbers(strides)]
    given = b"".join([storage, _number(0), *sizes, b"\x89", empty])  # no gradient
    return _class("torch._utils", "_rebuild_tensor_v2") + b"(" + given + b"tR"


def _class(module, name):
    return f"c{module}\n{name}\n".encode()


def _text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value):
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _numbers(values):
    return b"(" + b"".join(_number(int(x)) for x in values) + b"t"
