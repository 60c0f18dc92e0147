"""Manifest of a run in a bucket: its files, and the objects that hold them.

Each process that writes the run has a claim, a number and a random id, and writes only
MANIFEST-<claim>.json and objects below files/<claim>-<number of the upload>/. The
manifest of the greatest claim counts. So what an earlier process still writes replaces
nothing of a later one. A claim begins as {"after": the claim before}, and stands for
the files of that one until its own are uploaded.

A manifest is a stranger's: it is checked here, and nothing else reads it.
"""

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedfr_jax.json_files import parse_json
from fedfr_jax.manifest import is_entry, is_plain

OBJECTS = "files"  # folder of all objects in the bucket
CLAIM = r"[0-9]{9}-[0-9a-f]{32}"
UPLOAD = rf"({CLAIM})-[0-9]+"
NAME = rf"MANIFEST-({CLAIM})\.json"
MAX_BYTES = 2**26  # of a manifest


class StoredFile(NamedTuple):
    """A file of a run, and where it lies in the bucket."""

    size: int
    sha256: str
    modified: float  # seconds since 1970
    upload: str = ""  # of which claim

    def place(self, path: str) -> str:
        """Path of the object that holds the file `path`."""
        return f"{OBJECTS}/{self.upload}/{path}"


class Manifest(NamedTuple):
    """Files of a run, or the claim whose files they are."""

    files: dict[str, StoredFile]  # by path in the run's folder
    after: str | None = None  # None: `files` are this claim's own


def claim_of(name: str) -> str | None:
    """Claim in the name of a manifest; None for others."""
    match = re.fullmatch(NAME, name)
    return match and match[1]


def claim_of_upload(folder: str) -> str | None:
    """Claim in the name of an upload's folder; None for other folders."""
    match = re.fullmatch(UPLOAD, folder)
    return match and match[1]


def name_of(claim: str) -> str:
    """Name of the manifest of a claim."""
    return f"MANIFEST-{claim}.json"


def next_claim(newest: str | None) -> str:
    """A new claim, greater than `newest`."""
    number = int(newest.partition("-")[0]) if newest else 0
    return f"{number + 1:09d}-{uuid.uuid4().hex}"


def dump(manifest: Manifest) -> bytes:
    """Text of a manifest."""
    files = {path: entry._asdict() for path, entry in manifest.files.items()}
    value = {"files": files} if manifest.after is None else {"after": manifest.after}
    return json.dumps(value, indent=1).encode()


def parse(data: bytes, claim: str, origin: str) -> Manifest:
    """Check and read the manifest of a claim.

    Raises:
      ValueError: naming `origin`, the first entry that is not as it must be, and why.
    """
    value = parse_json(data, origin)
    after, files = value.get("after"), value.get("files")

    def refuse(rule: str, got: Any):
        shown = ascii(got)[:80] if isinstance(got, str) else type(got).__name__
        raise ValueError(
            f"{origin} must have {rule}, got {shown}. Nothing was downloaded; if the "
            "run is yours, put back an older version of this file."
        )

    if after is not None:
        is_earlier = _matches(CLAIM, after) and after < claim
        return Manifest({}, after) if is_earlier else refuse("an earlier claim", after)
    if not isinstance(files, dict):
        refuse("an object of files", files)
    for path, entry in files.items():
        if not is_plain(path):
            refuse("plain paths below the run's folder", path)
        parts = path.split("/")
        if any("/".join(parts[:depth]) in files for depth in range(1, len(parts))):
            refuse("no file that is a folder as well", path)
        if not _is_stored_file(entry):
            refuse("size, sha256, modified and upload of every file", path)
    return Manifest({path: StoredFile(**entry) for path, entry in files.items()})


def _is_stored_file(entry: Any) -> bool:
    """Whether a file's entry has the fields of `StoredFile`, of their types."""
    if not isinstance(entry, Mapping) or {*entry} != {*StoredFile._fields}:
        return False
    modified = entry["modified"]
    is_time = type(modified) in (int, float) and 0 <= modified < 2**33
    return is_entry(entry) and is_time and _matches(UPLOAD, entry["upload"])


def _matches(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None
