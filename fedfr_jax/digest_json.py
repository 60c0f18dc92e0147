"""Checksums of files, and JSON objects with a digest inside."""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from fedfr_jax import files
from fedfr_jax.json_files import read_json

DIGEST = "sha256"


def digest_of_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Mapping[str, Any]) -> str:
    """SHA-256 of an object without its digest, independent of order and spacing."""
    plain = {key: item for key, item in value.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def text(value: Mapping[str, Any]) -> str:
    """Format an object with its digest."""
    return json.dumps({DIGEST: digest_of(value), **value}, indent=1) + "\n"


def write(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Write an object with its digest, atomically."""
    files.write_text(path, text(value))


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read an object without its digest, after comparing it if there is one."""
    try:
        value = read_json(path)
        digest = value.pop(DIGEST, None)
        if digest in (None, digest_of(value)):
            return value
        fault = f"its digest is not {digest}, it was changed."
    except ValueError as error:
        fault = str(error).replace(f"{path} ", "it ", 1)
    raise ValueError(
        f"{path} must be undamaged JSON of the run, but: {fault} Restore a copy, or "
        "move it away and start `fedfr train` with the original config; finished "
        "training is kept."
    )
