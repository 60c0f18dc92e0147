"""Manifest of a folder: size and SHA-256 of its files, against changed numbers.

`manifest.json` is {"files": {path: {"size": bytes, "sha256": digest, "is_log": bool}}}.
A log grows by lines, and its entry covers its first `size` bytes: later lines are of
work that no checkpoint has yet. A file without an entry is not covered, such as one
that is being replaced: its entry goes before it, and comes back after it, so that a
kill at any moment leaves no entry of other bytes.

A stage's manifest covers its settings, data digest, logs, evaluation and model, a
checkpoint's the files of the checkpoint, a run's its summary and config, a sweep's its
results.
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge
from pydantic import (
    AfterValidator,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from fedfr_jax.files import (
    check_list,
    digest_of_file,
    file_lock,
    read_regular,
    write_text,
)
from fedfr_jax.json_files import broken_rule, parse_json

FILE, LOG = "manifest.json", ".jsonl"
MAX_BYTES = 2**26  # of a manifest
MAX_NAME = 255  # bytes, of file systems
DIGEST = "^[0-9a-f]{64}$"


class Entry(NamedTuple):
    """Bytes of a file that are covered, or of a log's beginning."""

    size: Annotated[int, Strict(), Ge(0)]
    sha256: Annotated[str, StringConstraints(pattern=DIGEST)]
    is_log: Annotated[bool, Strict()] = False

    def is_of(self, data: bytes) -> bool:
        """Whether a file with these bytes is as it was written."""
        covered = data[: self.size] if self.is_log else data
        return entry_of(covered) == self._replace(is_log=False)


def entry_of(data: bytes) -> Entry:
    """Entry of a file with these bytes."""
    return Entry(len(data), hashlib.sha256(data).hexdigest())


def is_plain(path: str) -> bool:
    """Whether a path stays below the folder that it is in, on every machine.

    >>> [is_plain(x) for x in ("a/b.txt", "../a", "/a", "a//b", ".a", "a/..", "C:a")]
    [True, False, False, False, False, False, False]
    """
    return (
        path.isprintable()
        and not {*path} & {"\\", ":"}
        and all(
            part and part[0] != "." and len(part.encode()) <= MAX_NAME
            for part in path.split("/")
        )
    )


def _check_plain(path: str) -> str:
    if not is_plain(path):
        rule = "Input should be a plain path below the folder"
        raise PydanticCustomError("path", rule)
    return path


PlainPath = Annotated[str, AfterValidator(_check_plain)]


class Manifest(NamedTuple):
    """Content of a manifest."""

    files: dict[PlainPath, Entry]


FILES = TypeAdapter(Manifest)


def read(folder: pathlib.Path) -> dict[str, Entry]:
    """Entries of a folder's manifest by path; {} without one.

    Raises:
      ValueError: for a manifest that is none, or names a file outside of the folder.
    """
    path = folder / FILE
    try:
        return _parse(read_regular(path, MAX_BYTES), path)
    except FileNotFoundError:
        return {}


@functools.lru_cache(maxsize=16)  # a list of runs compares several files of each
def _parse(data: bytes, path: pathlib.Path) -> dict[str, Entry]:
    try:
        return FILES.validate_json(data).files
    except ValidationError as error:
        raise ValueError(
            f"{path} must be an undamaged manifest, but {broken_rule(error)}. Restore "
            f"a copy, or delete it to use the files of {path.parent} as they are."
        ) from error


def read_bytes(
    path: str | os.PathLike, read_file: Callable[[pathlib.Path], bytes] | None = None
) -> bytes:
    """Read a file, after comparing it with its folder's manifest.

    Args:
      read_file: of an untrusted file; None trusts it.

    Raises:
      ValueError: for a file that is not as it was written; says what to do.
      OSError: when it cannot be read.
    """
    return _read(pathlib.Path(path), read_file)[0]


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object, after comparing it with its folder's manifest."""
    return parse_json(read_bytes(path), path)


def read_covered(path: pathlib.Path) -> bytes:
    """Read what the manifest covers of a file: all of it if it has no entry."""
    data, entry = _read(path)
    return data[: entry.size] if entry else data


def _read(path, read_file=None) -> tuple[bytes, Entry | None]:
    if read_file is None:
        check_list(path)
    while True:
        entry = read(path.parent).get(path.name)
        try:
            data = read_file(path) if read_file else path.read_bytes()
        except FileNotFoundError:
            if entry is None:
                raise
            data = None
        if data is not None and (entry is None or entry.is_of(data)):
            return data, entry
        now = read(path.parent).get(path.name)
        if entry and entry == now:  # else a writer came between
            got = "no file" if data is None else f"{len(data)} bytes that differ"
            raise _changed(path, entry, got)


def _changed(path: pathlib.Path, entry: Entry, got: str) -> ValueError:
    return ValueError(
        f"{path} must be as it was written, {entry.size} bytes, got {got}. Restore a "
        f"copy of it, or delete {path.with_name(FILE)} to use the files there as they "
        "are."
    )


def check_file(path: pathlib.Path) -> None:
    """Raise ValueError for a covered file, of any size, that has changed."""
    entry = read(path.parent).get(path.name)
    if entry and (not path.is_file() or digest_of_file(path) != entry.sha256):
        raise _changed(path, entry, "another file" if path.is_file() else "no file")


def difference(folder: pathlib.Path) -> str | None:
    """First covered file that has changed; None if all are as they were written.

    Files that the manifest does not name, such as a file manager's, do not count.
    """
    try:
        entries = read(folder)
    except ValueError:
        return f"{FILE} is not as it was written"
    for name, entry in entries.items():
        try:
            is_same = digest_of_file(folder / name) == entry.sha256
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            is_same = False
        if not is_same:
            return f"{name} is not as it was written"
    return None if entries else f"no {FILE} in it"


def cover(folder: pathlib.Path, entries: Mapping[str, Entry | None]) -> None:
    """Set entries of a folder's manifest; None removes one."""
    with file_lock(folder / FILE):
        _set(folder, entries)


def cover_files(folder: pathlib.Path, names: Collection[str]) -> None:
    """Cover those files of a folder that exist."""
    files = {name: folder / name for name in names}
    cover(folder, {k: _entry_of_file(x) for k, x in files.items() if x.is_file()})


def write_all(folder: pathlib.Path, but_for: Collection[str] = ()) -> None:
    """Write a manifest of all files below a new folder, without hidden ones."""
    paths = [x for x in folder.rglob("*") if not x.is_dir()]
    names = {x.relative_to(folder).as_posix(): x for x in paths}
    named = sorted(x for x in names if is_plain(x) and x not in (FILE, *but_for))
    _write(folder, {name: _entry_of_file(names[name]) for name in named})


def write(path: pathlib.Path, text: str) -> None:
    """Write a text file atomically, and cover it."""
    with file_lock(path.with_name(FILE)):
        _set(path.parent, {path.name: None})
        write_text(path, text)
        _set(path.parent, {path.name: entry_of(text.encode())})


def write_object(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, and cover it."""
    write(path, json.dumps(value, indent=1) + "\n")


def check_logs(folder: pathlib.Path) -> None:
    """Raise ValueError for a log of a folder that is not as it was written."""
    for name in read(folder):
        if name.endswith(LOG):
            read_bytes(folder / name)


def end_logs(folder: pathlib.Path) -> None:
    """Cover the whole logs of a folder: none has lines to come."""
    logs = {k: x for k, x in read(folder).items() if x.is_log}
    cover(folder, {name: x._replace(is_log=False) for name, x in logs.items()})


def _set(folder, entries):
    before = read(folder)
    after = {k: x for k, x in {**before, **entries}.items() if x is not None}
    if after != before:
        _write(folder, after)


def _entry_of_file(path: pathlib.Path) -> Entry:
    return Entry(path.stat().st_size, digest_of_file(path))


def _write(folder: pathlib.Path, entries: Mapping[str, Entry]) -> None:
    files = {name: entry._asdict() for name, entry in entries.items()}
    write_text(folder / FILE, json.dumps({"files": files}, indent=1) + "\n")
