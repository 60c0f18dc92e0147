"""Weight files: .safetensors, .npz and, where PyTorch is installed, its checkpoints.

Reading any of them runs nothing that the file holds.
"""

import json
import os
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from fedfr_jax.files import (
    MEMORY,
    check_archive,
    check_file,
    read_npz,
    replace_file,
)
from fedfr_jax.schema import naming

PREFIXES = ("module.", "_orig_mod.")  # of PyTorch's wrappers around a network
WITHOUT_TORCH = (
    'pip install torch, or where it is installed: python -c "import numpy, torch; '
    "w = torch.load('w.pt', map_location='cpu', weights_only=True); "
    "numpy.savez('w.npz', **w)\""
)


class Weights(NamedTuple):
    """Named arrays and the metadata of their file."""

    arrays: dict[str, np.ndarray]
    about: dict[str, str]  # only a .safetensors has any


def read_weights(path: str | os.PathLike, key: str = "") -> Weights:
    """Read the arrays of a file, whose suffix gives its format.

    A PyTorch file may hold the state dict itself, or a dict with one; names lose the
    "module." and "_orig_mod." of a wrapped network.

    Args:
      key: which state dict of several: its name in the file, or what the names of its
        arrays begin with; "a/b" is b inside a.

    Raises:
      ValueError: for another suffix, or a file that is damaged, holds anything else,
        asks for more than all memory or has numbers that are not finite.
      ImportError: for a file of PyTorch where that is not installed.
      OSError: when there is no such file.
    """
    suffix = _suffix(path)
    pathlib.Path(path).stat()  # there is such a file
    check_file(path, MEMORY)
    with naming(path):
        try:
            tree, about = READERS[suffix](path)
        except OSError as error:  # of an offset that a damaged file contains
            raise ValueError(
                f"{path} must be a complete, undamaged file, got {error}."
            ) from error
        arrays = _state_dict(_part(tree, key), path)
        _check_finite(arrays)
        return Weights(arrays, about)


def write_weights(
    path: str | os.PathLike,
    arrays: Mapping[str, np.ndarray],
    about: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a file in the format of its suffix.

    Args:
      about: metadata, which only a .safetensors keeps.

    Raises:
      ValueError: for another suffix, or an array of a dtype that the format lacks.
      ImportError: for a file of PyTorch where that is not installed.
    """
    suffix = _suffix(path)
    if suffix == ".safetensors":
        _write_safetensors(path, arrays, about or {})
    elif suffix == ".npz":
        members: dict[str, Any] = dict(arrays)
        with replace_file(path) as file:
            np.savez(file, **members)
    else:
        torch = _torch(path)
        tensors = {k: torch.from_numpy(np.array(x)) for k, x in arrays.items()}
        with replace_file(path) as file:
            torch.save(tensors, file)


def _suffix(path) -> str:
    """Suffix of a known format."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    for suffix in READERS:
        if name.endswith(suffix):
            return suffix
    raise ValueError(
        f"weights must be a file with suffix {(*READERS,)} or a run's folder, got "
        f"{path!r}."
    )


def _read_safetensors(path) -> tuple[dict, dict[str, str]]:
    with safetensors.safe_open(path, "numpy") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, file.metadata() or {}


def _read_npz(path) -> tuple[dict, dict[str, str]]:
    arrays = read_npz(path)
    if members := [k for k, x in arrays.items() if not isinstance(x, np.ndarray)]:
        raise ValueError(f"{path} must hold only arrays, got the members {members}.")
    return arrays, {}


def _read_torch(path) -> tuple[dict, dict[str, str]]:
    """Read with torch.load(weights_only=True): tensors and plain values only."""
    torch = _torch(path)
    check_archive(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} must hold only tensors and plain values, got objects that "
            "torch.load refuses with weights_only=True. Save model.state_dict() alone."
        ) from error
    saved = _with_arrays(saved, torch)
    if not isinstance(saved, Mapping):
        kind = type(saved).__name__
        raise ValueError(f"{path} must hold a state dict, got a {kind}.")
    return dict(saved), {}


READERS = {".safetensors": _read_safetensors, ".npz": _read_npz}
READERS |= dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".pth.tar"), _read_torch)


def _torch(path):
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{path} needs PyTorch: {WITHOUT_TORCH}.") from error
    return torch


def _with_arrays(value: Any, torch) -> Any:
    """Convert tensors in dicts to arrays."""
    if isinstance(value, Mapping):
        return {str(k): _with_arrays(x, torch) for k, x in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _write_safetensors(path, arrays, about):
    whole = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    with naming(path), replace_file(path) as file:
        data = safetensors.numpy.save(whole, dict(about))
        header, numbers = _sorted_header(data)
        file.write(header)
        file.write(numbers)


def _sorted_header(data: bytes) -> tuple[bytes, memoryview]:
    """(header, numbers) of a .safetensors, its metadata sorted.

    The package writes them in another order each time.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    about = header.pop("__metadata__", {})
    header = {"__metadata__": dict(sorted(about.items())), **header}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers are aligned
    return len(text).to_bytes(8, "little") + text, memoryview(data)[end:]


def _part(tree: Mapping, key: str) -> Mapping:
    """Subtree of `tree` at the path `key`; see `read_weights`."""
    for word in filter(None, key.split("/")):
        subtree = tree.get(word)
        if not isinstance(subtree, Mapping):
            prefix = f"{word}."
            subtree = {
                name.removeprefix(prefix): x
                for name, x in tree.items()
                if name.startswith(prefix)
            }
        if not subtree:
            keys = sorted({name.partition(".")[0] for name in tree})
            raise ValueError(f"--key must be one of {keys}, got {word!r}.")
        tree = subtree
    return tree


def _state_dict(saved: Mapping, path) -> dict[str, np.ndarray]:
    """The arrays of `saved` itself, or of the only mapping in it that has arrays."""
    inside = {k: v for k, v in saved.items() if isinstance(v, Mapping) and _has_any(v)}
    if not _has_any(saved) and len(inside) != 1:
        raise ValueError(
            f"{path} must hold one state dict, got the keys "
            f"{sorted(inside) or sorted(saved)}. Choose one with `fedfr convert "
            "--key=NAME`."
        )
    state = saved if _has_any(saved) else next(iter(inside.values()))
    arrays, origins = {}, {}
    for name, array in state.items():
        if not isinstance(array, np.ndarray):
            continue
        short = _strip_prefix(name)
        if short in arrays:
            raise ValueError(
                f"{path} must have {short} once, got {origins[short]} and {name}: the "
                "states of a network and of a wrapper around it. Save one of them."
            )
        arrays[short], origins[short] = array, name
    return arrays


def _has_any(tree: Mapping) -> bool:
    return any(isinstance(x, np.ndarray) for x in tree.values())


def _strip_prefix(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def _check_finite(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        is_float = array.dtype.kind == "f" or array.dtype == jnp.bfloat16
        if is_float and not np.isfinite(array).all():
            count = int((~np.isfinite(array)).sum())
            raise ValueError(
                f"{name} must hold finite numbers, got {count} nan or infinite. Use "
                "the weights of an earlier checkpoint."
            )
