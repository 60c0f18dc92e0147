"""Files of named arrays: .safetensors, .npz and PyTorch's .pt or .pth.

safetensors (https://github.com/huggingface/safetensors): eight bytes with the length of
a JSON header {name: {dtype, shape, data_offsets}}, the header, then the numbers, all
little-endian. Reading any of them runs nothing that the file holds.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedfr_jax.drafts import replacing
from fedfr_jax.json_files import parse_json
from fedfr_jax.limits import MEMORY, check_archive, check_file
from fedfr_jax.models.torch_file import read_torch, write_torch
from fedfr_jax.schema import naming

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
ABOUT = "__metadata__"  # in a header of safetensors
PREFIXES = ("module.", "_orig_mod.")  # of PyTorch's wrappers around a network


class Weights(NamedTuple):
    """Named arrays, and what their file says of them."""

    arrays: dict[str, np.ndarray]
    about: dict[str, str]  # only a .safetensors has any


def read_weights(path: str | os.PathLike) -> Weights:
    """The arrays of a file, by its suffix.

    A PyTorch file may hold the state dict itself, or a dict with one; names lose the
    "module." of a wrapped network.

    Raises:
      ValueError: for another suffix, or a file that is damaged, holds anything else or
        asks for more than all memory.
      OSError: when there is no such file.
    """
    suffix = pathlib.Path(path).suffix if isinstance(path, str | os.PathLike) else None
    if suffix not in READERS:
        raise ValueError(f"weights must be a file of {(*READERS,)}, got {path!r}.")
    pathlib.Path(path).stat()  # there is such a file
    check_file(path, MEMORY)
    with naming(path):
        try:
            return READERS[suffix](path)
        except OSError as error:  # from a place that a damaged file names
            raise ValueError(f"{path} must be a whole file, got {error}.") from error


def write_weights(
    path: str | os.PathLike,
    arrays: Mapping[str, np.ndarray],
    about: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a file, by its suffix; only a .safetensors keeps `about`.

    Raises:
      ValueError: for another suffix, or an array of a dtype that the format lacks.
    """
    suffix = pathlib.Path(path).suffix
    if suffix not in READERS:
        raise ValueError(f"weights must be a file of {(*READERS,)}, got {path}.")
    if suffix == ".safetensors":
        _write_safetensors(path, arrays, about or {})
    elif suffix == ".npz":
        with replacing(path) as file:
            np.savez(file, **arrays)
    else:
        write_torch(path, arrays)


def _read_safetensors(path) -> Weights:
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError(f"{path} must be a whole .safetensors, got {len(data)} bytes.")
    header = parse_json(data[8 : 8 + size], f"{path}: header")
    about, body = header.pop(ABOUT, {}), memoryview(data)[8 + size :]
    return Weights({name: _array(name, of, body) for name, of in header.items()}, about)


def _read_npz(path) -> Weights:
    check_archive(path)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if others := [k for k, x in arrays.items() if not isinstance(x, np.ndarray)]:
        raise ValueError(f"{path} must hold arrays, got other members {others}.")
    return Weights(arrays, {})


def _read_state_dict(path) -> Weights:
    return Weights(_state_dict(read_torch(path), path), {})


READERS = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".pt": _read_state_dict,
    ".pth": _read_state_dict,
}


def _array(name: str, of: Mapping, body: memoryview) -> np.ndarray:
    dtype, shape, (start, stop) = DTYPES[of["dtype"]], of["shape"], of["data_offsets"]
    wanted = math.prod(shape) * dtype.itemsize
    if not 0 <= start <= stop <= len(body) or stop - start != wanted:
        raise ValueError(
            f"{name} must be {wanted} of {len(body)} bytes, got {start} to {stop}."
        )
    return np.frombuffer(body[start:stop], dtype).reshape(shape)


def _write_safetensors(path, arrays, about):
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, start = {ABOUT: dict(about)}, 0
    for name, array in arrays.items():
        if array.dtype not in names:
            raise ValueError(f"{name} must be of {list(names)}, got {array.dtype}.")
        offsets = [start, start + array.nbytes]
        kind = {"dtype": names[array.dtype], "shape": list(array.shape)}
        header[name] = {**kind, "data_offsets": offsets}
        start += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _state_dict(saved: Any, path) -> dict[str, np.ndarray]:
    """The tensors of what torch.save was given: a state dict, or a dict with one."""
    if not isinstance(saved, Mapping):
        kind = type(saved).__name__
        raise ValueError(f"{path} must hold a state dict, got a {kind}.")
    inside = {k: v for k, v in saved.items() if isinstance(v, Mapping) and _has_any(v)}
    if not _has_any(saved) and len(inside) != 1:
        raise ValueError(
            f"{path} must hold one state dict, got {sorted(inside) or sorted(saved)}."
        )
    found = saved if _has_any(saved) else next(iter(inside.values()))
    return {_bare(k): v for k, v in found.items() if isinstance(v, np.ndarray)}


def _has_any(tree: Mapping) -> bool:
    return any(isinstance(x, np.ndarray) for x in tree.values())


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
