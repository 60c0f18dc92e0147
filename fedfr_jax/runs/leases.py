"""Leases of a sweep's cells in a folder or bucket that many machines write, no locks.

A lease is an object `.leases/<cell>/<number>` that only one process can create. While
its owner lives, the object changes every few seconds. A process that has seen it
unchanged for SILENT seconds, by its own clock, may create the next number, and the
greatest number counts; an owner that was only slow finds it and leaves the cell. No
clocks are compared, and what is in an object decides nothing but whether it changed,
and whether its process on this host has ended.
"""

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fedfr_jax.files import is_url
from fedfr_jax.mesh import BOOT
from fedfr_jax.runs.buckets import explained, open_folder
from fedfr_jax.runs.locks import RunInUse

FOLDER = ".leases"  # hidden, as it is of no interest once cells have ended
BEAT_EVERY = 10.0  # seconds between changes of a lease
SILENT = 60.0  # seconds without one after which it has ended
MAX_BYTES = 2**10  # of a lease; of a longer one the size is compared
NUMBER = r"[1-9][0-9]{0,17}"


class Leases:
    """Leases in the folder or bucket `location` of a sweep."""

    def __init__(self, location: str | os.PathLike):
        is_bucket = is_url(location)
        self.url = str(location) if is_bucket else f"file://{os.path.abspath(location)}"
        self._fs, self._is_bucket = open_folder(self.url), is_bucket
        self._seen: dict[str, tuple[bytes, float]] = {}  # {path: (bytes, since when)}

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Hold the lease `name` in the block.

        Raises:
          RunInUse: when another process holds it.
          OSError: when the folder or bucket cannot be read or written.
        """
        with explained(self.url, "read"):
            newest = self._newest(name)
            is_held = newest and not self._has_ended(self._path(name, newest))
        if is_held:
            raise RunInUse(
                f"{name} is trained by another process, whose lease is younger than "
                f"{SILENT:g} seconds. It is tried again later."
            )
        number, owner = newest + 1, uuid.uuid4().hex
        with explained(self.url, "written"):
            is_mine = self._create(self._path(name, number), owner)
        if not is_mine:
            raise RunInUse(f"{name} was taken by another process first.")
        is_over = threading.Event()
        args = name, number, owner, is_over
        thread = threading.Thread(target=self._keep, args=args, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            with contextlib.suppress(Exception):  # then it ends by its silence
                self._remove(name, number, owner)

    def _path(self, name: str, number: int) -> str:
        return f"{FOLDER}/{name}/{number}"

    def _numbers(self, name: str) -> list[int]:
        """Numbers of a cell's leases, ascending."""
        try:
            self._fs.invalidate_cache()
            found: Any = self._fs.ls(f"{FOLDER}/{name}", detail=True)
        except FileNotFoundError:
            return []
        names = [x["name"].rpartition("/")[2] for x in found if x["type"] == "file"]
        return sorted(int(x) for x in names if re.fullmatch(NUMBER, x))

    def _newest(self, name: str) -> int:
        """Greatest number of a lease; 0 if there is none."""
        return max(self._numbers(name), default=0)

    def _read(self, path: str) -> bytes | None:
        """What is in a lease, or says that it changed; None if it is gone."""
        try:
            size = self._fs.info(path)["size"]
            return self._fs.cat_file(path) if size <= MAX_BYTES else b"%d" % size
        except FileNotFoundError:
            return None

    def _has_ended(self, path: str) -> bool:
        """Whether the owner of a lease has given it up, has ended, or is silent."""
        data = self._read(path)
        if data is None or _is_of_dead_process(data):
            return True
        now = time.monotonic()
        before, since = self._seen.get(path, (None, now))
        if before != data:
            since = now
        self._seen[path] = data, since
        return now - since >= SILENT

    def _create(self, path: str, owner: str) -> bool:
        """Create a lease unless it exists; whether it is the owner's."""
        data = _dump(owner, 0)
        try:
            if self._is_bucket:
                self._fs.pipe_file(path, data, mode="create")
            else:
                os.makedirs(self._local(os.path.dirname(path)), exist_ok=True)
                with open(self._local(path), "xb") as file:
                    file.write(data)
        except Exception:  # it exists, in the words of many stores; or it was created
            if (found := self._read(path)) is None:
                raise
            return _owner(found) == owner
        return _owner(self._read(path)) == owner

    def _local(self, path: str) -> str:
        return os.path.join(self.url.removeprefix("file://"), path)

    def _keep(self, name, number, owner, is_over: threading.Event) -> None:
        """Change the lease until it is over, or another process has taken it."""
        path, count = self._path(name, number), 0
        while not is_over.wait(BEAT_EVERY):
            with contextlib.suppress(Exception):  # a store that is away comes back
                is_mine = _owner(self._read(path)) == owner
                if not is_mine or self._newest(name) != number:
                    return
                count += 1
                self._fs.pipe_file(path, _dump(owner, count))

    def _remove(self, name: str, number: int, owner: str) -> None:
        """Remove the leases up to this one, the oldest first, if it is still owned."""
        if _owner(self._read(self._path(name, number))) == owner:
            for n in self._numbers(name):
                if n <= number:
                    self._fs.rm_file(self._path(name, n))


def _dump(owner: str, count: int) -> bytes:
    process = {"host": machine(), "pid": os.getpid()}
    return json.dumps({"owner": owner, **process, "n": count}).encode()


def machine() -> str | None:
    """What numbers this machine's processes, or this container's; None if unknown.

    A name would not do: machines made from one image share it.
    """
    if not BOOT.exists():
        return None
    return f"{BOOT.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def _parse(data: bytes | None) -> dict:
    """What a lease says; {} of a damaged one."""
    try:
        found = json.loads(data or b"")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _owner(data: bytes | None) -> Any:
    return _parse(data).get("owner")


def _is_of_dead_process(data: bytes) -> bool:
    """Whether a lease names a process of this host that is no more."""
    found = _parse(data)
    pid, here = found.get("pid"), machine()
    if here is None or found.get("host") != here or type(pid) is not int:
        return False
    if not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        pass
    return False
