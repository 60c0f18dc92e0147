"""Run directories in a bucket, mirrored by a local copy.

A run works in its copy, a folder of the user's cache. With every checkpoint the changed
files are uploaded, and after them the manifest, which lists all files of the run with
their digests: a partial upload is not listed, and is ignored. Readers download what the
manifest lists, and check it. The large files of a client-state store are not uploaded;
they are rebuilt from its log, see `federated.row_log`. Of several processes each has a
copy, and in it the rows of the clients that it has trained; it uploads their log.

Buckets have no locks. Each process that writes the run has a claim, a number and a
random id, and writes only MANIFEST-<claim>.json and objects below files/<claim>-<number
of the upload>/. The manifest of the greatest claim counts, so that what an earlier
process still writes replaces nothing of a later one; the earlier one finds the greater
claim and ends at its next checkpoint. A claim begins as {"after": the claim before},
and stands for the files of that one until its own are uploaded.
While a process trains, it writes the time into HEARTBEAT, whose age shows that it
lives.

A bucket is not trusted: paths, sizes and digests are those of a checked manifest,
and the copy has only real folders and files, so that nothing is written through a link.

JAX is not needed here, and fsspec is imported where a path is a URL.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Interval
from pydantic import (
    AfterValidator,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from fedfr_jax.federated.row_log import process_of
from fedfr_jax.files import (
    cache_folder,
    check_bytes,
    digest_of_file,
    is_url,
    replace_file,
)
from fedfr_jax.json_files import broken_rule
from fedfr_jax.manifest import DIGEST, PlainPath, is_plain
from fedfr_jax.runs import locks
from fedfr_jax.text import printable, without_secrets

HEARTBEAT, CHECK = "HEARTBEAT", ".write-check"
BEAT_EVERY = 60.0  # seconds between heartbeats
SILENT = 300.0  # seconds after which a run counts as ended
TRIES = 5  # of a download, while another process writes the run
DOWNLOADED = ".download"  # prefix of a copy's folder for files that are not checked
RUNNING = ".running"  # in a copy, while the run in the bucket trains
MARK = "copy of a run in a bucket\n"  # content of a copy's lock file
LARGE = ("rows.bin", "stamps.bin", "owners.bin")  # of a store
STATES = "states"  # folder of client states that move between processes
PARTIAL = (".tmp", "-tmp")  # suffixes of files and folders that are being written
DEPTH = 3  # levels of folders in which runs are listed
# Suffixes of the files that pages and tables of runs read.
REPORTED = (".json", ".jsonl", ".png", ".jpg", ".webp", ".txt")
MODEL = ("model.json", "weights.safetensors", "config.json", "manifest.json")
OBJECTS = "files"  # folder of all objects in the bucket
CLAIM = r"[0-9]{9}-[0-9a-f]{32}"
UPLOAD = rf"({CLAIM})-[0-9]+"
NAME = rf"MANIFEST-({CLAIM})\.json"
MAX_BYTES = 2**26  # of a manifest


class TakenOver(ValueError):
    """A process that was started later writes the run in a bucket."""


class StoredFile(NamedTuple):
    """A file of a run, and where it lies in the bucket."""

    size: Annotated[int, Strict(), Ge(0)]
    sha256: Annotated[str, StringConstraints(pattern=DIGEST)]
    modified: Annotated[float, Strict(), Interval(ge=0, lt=2**33)]  # seconds since 1970
    upload: Annotated[str, StringConstraints(pattern=f"^{UPLOAD}$")] = ""  # of a claim

    def object_path(self, path: str) -> str:
        """Path of the object that holds the file `path`."""
        return f"{OBJECTS}/{self.upload}/{path}"


Files = Mapping[str, StoredFile]  # by path


def _no_file_in_a_file(files: Files) -> Files:
    for path in files:
        parts = path.split("/")
        if {"/".join(parts[:depth]) for depth in range(1, len(parts))} & files.keys():
            raise PydanticCustomError(
                "path", "Input should be files, none below another"
            )
    return files


class Manifest(NamedTuple):
    """Files of a run, or the claim whose files they are."""

    files: Annotated[dict[PlainPath, StoredFile], AfterValidator(_no_file_in_a_file)]
    # None: `files` are this claim's own
    after: Annotated[str, StringConstraints(pattern=f"^{CLAIM}$")] | None = None


MANIFEST = TypeAdapter(Manifest)


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


def dump_manifest(manifest: Manifest) -> bytes:
    """Text of a manifest."""
    files = {path: entry._asdict() for path, entry in manifest.files.items()}
    return json.dumps({"files": files, "after": manifest.after}, indent=1).encode()


def parse_manifest(data: bytes, claim: str, origin: str) -> Manifest:
    """Check and read the manifest of a claim.

    Raises:
      ValueError: naming `origin`, the first entry that is not as it must be, and why.
    """
    try:
        manifest = MANIFEST.validate_json(data)
        if manifest.after is None or manifest.after < claim:
            return manifest
        rule = "after must be an earlier claim"
    except ValidationError as error:
        rule = broken_rule(error)
    raise ValueError(
        f"{origin} must list the files of a run, but {rule}. Nothing was downloaded; "
        "if the run is yours, put back an older version of this file."
    )


def copy_folder(url: str, process: int = 0, *, use: str = "run") -> pathlib.Path:
    """Folder of a local copy, in the cache folder.

    Args:
      process: number of the process; each has a copy.
      use: kind of the copy; only "run" is written to.
    """
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    name = re.sub("[?#:@].*", "", url.rpartition("/")[2]).lstrip(".") or "run"
    kind = use if not process else f"{use}-{process}"
    return cache_folder() / "buckets" / digest / kind / name


class Mirror:
    """A run in a bucket and its copy in `folder`.

    Args:
      process, count: number of this process among those that train the run. Of the
        client states each downloads and uploads those that it has; the first one
        uploads all else.
    """

    def __init__(
        self, url: str, folder: pathlib.Path, process: int = 0, count: int = 1
    ):
        self._process, self._count = process, count
        self.url, self.folder = without_secrets(url), folder
        self._claim = ""  # of this process, once it has claimed the run
        self._seen: str | None = None  # the newest claim at the last download
        self._num_uploads = 0
        self._digests = {}  # of local files by path, size and time
        self._fs = open_folder(url)

    def is_there(self) -> bool:
        """Whether the bucket has a run at the URL."""
        return self._newest() is not None

    def check_writable(self) -> None:
        """Raise OSError if the bucket is not writable, ValueError for other files."""
        names = [x for x in self._list() if x[0] != "." and x != HEARTBEAT]
        if names and not self.is_there():
            raise ValueError(
                f"{self.url} must be empty or a run, got a folder with "
                f"{', '.join(names[:3])}. Take another --workdir."
            )
        with explained(self.url, "written"):
            name = f"{CHECK}-{uuid.uuid4().hex}"  # nobody has made a link of this name
            self._fs.pipe_file(name, b"")
            self._fs.rm_file(name)

    def download(self, is_wanted: Callable[[str], bool] = lambda path: True) -> None:
        """Download the wanted files to the local copy; delete files not in the bucket.

        Raises:
          ValueError: for a manifest that is not one, or more bytes than the disk has.
          OSError: when the bucket cannot be read, or a file differs from the manifest;
            all others are in the copy then.
        """
        for tries_left in reversed(range(TRIES)):
            self._seen, files = self._newest(), None
            try:
                files = self._read_files(self._seen)
                return self._download(files, is_wanted)
            except OSError:
                now = self._newest()
                is_same = now == self._seen and self._read_files(now) == files
                if is_same or not tries_left:  # the run has not changed meanwhile
                    raise

    def _download(self, files: Files, is_wanted: Callable) -> None:
        _remove_links(self.folder)
        local = self.files()
        missing = {
            path: entry
            for path, entry in files.items()
            if is_wanted(path) and not _is_same(local, path, entry)
        }
        size = sum(entry.size for entry in missing.values())
        with tempfile.TemporaryDirectory(
            prefix=DOWNLOADED, dir=self.folder, ignore_cleanup_errors=True
        ) as name:
            folder = pathlib.Path(name)
            check_bytes(size, self.url, shutil.disk_usage(folder).free)
            with explained(self.url, "read"):
                self._get(missing, folder)
            for path in local.keys() - files.keys():
                (self.folder / path).unlink()
            for path in sorted(self.folder.rglob("*"), reverse=True):
                if path.is_dir() and not any(path.iterdir()):  # of a deleted checkpoint
                    path.rmdir()
            wrong = [k for k, x in missing.items() if not self._keep(k, x, folder / k)]
        if wrong:
            path = missing[wrong[0]].object_path(wrong[0])
            raise ValueError(
                f"{self.url}/{path} must have its sha256 in the manifest, got other "
                "bytes (damaged, or changed by hand). Put back an older version of it, "
                f"or the file in {self.folder} of the machine that wrote it; all other "
                "files are in that folder here."
            )

    def _keep(self, path: str, entry: StoredFile, new: pathlib.Path) -> bool:
        """Move a downloaded file to its place, if it has the content of its entry."""
        place = self.folder / path
        if not new.exists() or digest_of_file(new) != entry.sha256:
            return False
        os.utime(new, (entry.modified, entry.modified))
        place.parent.mkdir(parents=True, exist_ok=True)
        new.replace(place)
        return True

    def _get(self, files: Files, folder: pathlib.Path) -> None:
        """Download the files that have the size of their entries."""
        found = self._find() if files else {}
        objects = {}
        for path, entry in files.items():
            there = found.get(entry.object_path(path), {})
            if there.get("type") == "file" and there.get("size") == entry.size:
                objects[entry.object_path(path)] = folder / path
        for path in objects.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        if objects:
            self._fs.get([*objects], [*map(str, objects.values())])

    def claim(self) -> None:
        """Take over the run as its only writer, and upload the local copy."""
        newest = self._newest()
        self._claim = next_claim(newest)
        with explained(self.url, "written"):
            self._write_manifest(Manifest({}, after=newest))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(STATES, recursive=True)
        listed = self._read_files(self._claim).items()
        of_others = {path: entry for path, entry in listed if not self._is_own(path)}
        self._write_files({**of_others, **self._put_changed()})

    def share_claim(self) -> None:
        """Let all processes write below the claim of the first one."""
        from fedfr_jax import mesh

        self._claim = mesh.gather_texts(f"claim of {self.url}", self._claim)[0]
        self._num_uploads = 1  # of the first process, in `claim`

    def upload(self) -> None:
        """Upload changes of the local copies to the bucket; all processes call it.

        Raises:
          TakenOver: when another process has begun to write the run.
          OSError: when the bucket cannot be written.
        """
        self._check_newest(self._claim)
        files = self._put_changed()
        if self._count > 1:
            from fedfr_jax import mesh

            name = f"files of {self.url}, {self._num_uploads}"
            parts = mesh.gather_texts(name, dump_manifest(Manifest(files)).decode())
            for part in parts[1:]:
                files |= parse_manifest(part.encode(), self._claim, self.url).files
        if not self._process:
            self._write_files(files)

    def _is_own(self, path: str) -> bool:
        """Whether a file is of all processes, or has client states of this one."""
        number = process_of(path)
        return number is None or number % self._count == self._process

    def _is_uploaded(self, path: str) -> bool:
        """Whether this process uploads a file."""
        return (process_of(path) or 0) % self._count == self._process

    def check_unchanged(self) -> None:
        """Raise TakenOver when another process has written since `download`."""
        self._check_newest(self._seen)

    def _check_newest(self, claim: str | None) -> None:
        if self._newest() != claim:
            raise TakenOver(
                f"{self.url} has been taken over by another process, which was started "
                f"later. This one ends; its files stay in {self.folder}."
            )

    def _put_changed(self) -> dict[str, StoredFile]:
        """Upload the changed files of this process as new objects; all its files."""
        listed, local = self._read_files(self._claim), self.files(self._is_uploaded)
        self._num_uploads += 1
        upload = f"{self._claim}-{self._num_uploads}"
        changed = [k for k, entry in local.items() if not _is_same(listed, k, entry)]
        files = {
            path: entry._replace(upload=upload) if path in changed else listed[path]
            for path, entry in local.items()
        }
        with explained(self.url, "written"):
            self._put({path: files[path] for path in changed})
        return files

    def _write_files(self, files: dict[str, StoredFile]) -> None:
        """Write the manifest of this claim.

        What no manifest names any more is removed last, and only while the claim is the
        newest: a later one begins with the files of this manifest.
        """
        with explained(self.url, "written"):
            self._write_manifest(Manifest(files))
        self._check_newest(self._claim)
        with explained(self.url, "written"):
            self._remove_unlisted(files)

    def _put(self, files: Files) -> None:
        if files:
            objects = [entry.object_path(path) for path, entry in files.items()]
            self._fs.put([str(self.folder / path) for path in files], objects)

    def _remove_unlisted(self, files: Files) -> None:
        """Remove earlier manifests, and objects of this and earlier claims."""
        claims = filter(None, map(claim_of, self._list()))
        gone = {name_of(claim) for claim in claims if claim < self._claim}
        uploads, folders = {entry.upload for entry in files.values()}, set()
        for path in self._find(OBJECTS):
            upload = path.split("/")[1]
            claim = claim_of_upload(upload)
            if claim is not None and claim <= self._claim:
                is_kept = upload in uploads
                gone.add(path) if is_kept else folders.add(f"{OBJECTS}/{upload}")
        gone -= {entry.object_path(path) for path, entry in files.items()}
        for paths in (gone, folders):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                if paths:
                    self._fs.rm(sorted(paths), recursive=paths is folders)

    def put(self, name: str, data: bytes) -> None:
        """Write an object for other processes, see `federated.row_exchange`."""
        with explained(self.url, "written"):
            self._fs.pipe_file(f"{STATES}/{self._claim}/{name}", data)

    def get(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read bytes start..end-1 of an object, of each span."""
        path = f"{STATES}/{self._claim}/{name}"
        with explained(self.url, "read"):
            return [self._fs.cat_file(path, start=a, end=b) for a, b in spans]

    def remove(self, name: str) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError), explained(self.url, "written"):
            self._fs.rm_file(f"{STATES}/{self._claim}/{name}")

    def files(
        self, is_wanted: Callable[[str], bool] = lambda path: True
    ) -> dict[str, StoredFile]:
        """Return {path: entry} of the local copy's files, without links to others."""
        entries = {}
        for path in sorted(self.folder.rglob("*")):
            inner = path.relative_to(self.folder)
            partial = any(part.endswith(PARTIAL) for part in inner.parts)
            name, is_file = inner.as_posix(), path.is_file() and not path.is_symlink()
            is_listed = is_plain(name) and not partial and path.name not in LARGE
            if is_file and is_listed and is_wanted(name):
                entries[name] = self._entry(path)
        return entries

    def _entry(self, path: pathlib.Path) -> StoredFile:
        """Entry of a local file; its digest is cached until the file changes."""
        state = path.stat()
        key = path, state.st_size, state.st_mtime_ns
        if key not in self._digests:
            self._digests[key] = digest_of_file(path)
        return StoredFile(state.st_size, self._digests[key], state.st_mtime)

    def _newest(self) -> str | None:
        """The greatest claim in the bucket; None if there is none."""
        return max(filter(None, map(claim_of, self._list())), default=None)

    def _read_files(self, claim: str | None) -> Files:
        """Files of a claim, or of the one that it is to replace."""
        while claim is not None:
            name = name_of(claim)
            with explained(self.url, "read"):
                size = self._fs.info(name)["size"]
            check_bytes(size, f"{self.url}/{name}", MAX_BYTES)
            with explained(self.url, "read"):
                data = self._fs.cat_file(name)
            manifest = parse_manifest(data, claim, f"{self.url}/{name}")
            if manifest.after is None:
                return manifest.files
            claim = manifest.after
        return {}

    def _write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of this claim atomically, by renaming."""
        name = name_of(self._claim)
        self._fs.pipe_file(f".{name}", dump_manifest(manifest))
        self._fs.mv(f".{name}", name)

    def _list(self) -> list[str]:
        """Names in the run's own folder.

        Raises:
          ValueError: for a link, pipe or device, of a bucket that is a folder.
        """
        with explained(self.url, "read"):
            try:
                found: Any = self._fs.ls("", detail=True, refresh=True)
            except FileNotFoundError:
                return []
        for entry in found:
            if entry["type"] not in ("file", "directory"):
                raise ValueError(
                    f"{self.url} must have files and folders only, got a link, pipe or "
                    f"device {entry['name']!r}. Remove it."
                )
        return [*filter(None, (entry["name"].strip("/") for entry in found))]

    def find_runs(self) -> list[str]:
        """Paths of the runs below the URL; "" is the URL itself."""
        with explained(self.url, "read"):
            self._fs.invalidate_cache()  # or a list stays as it was
            levels = ("*/" * depth for depth in range(DEPTH + 1))
            patterns = (f"{level}MANIFEST*.json" for level in levels)
            found = [path for pattern in patterns for path in self._fs.glob(pattern)]
        folders = (path.rpartition("/") for path in found)
        runs = {folder for folder, _, name in folders if claim_of(name)}
        return sorted(x for x in runs if not x or is_plain(x))

    def _find(self, place: str = "") -> Any:
        """{path: what the bucket says} of all objects below a folder of the run."""
        self._fs.invalidate_cache()
        return self._fs.find(place, detail=True)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Write the time to HEARTBEAT, from a thread, in the block.

        Failures are ignored: the next upload raises them.
        """
        is_over = threading.Event()

        def beat():
            with contextlib.suppress(Exception):
                self._fs.pipe_file(HEARTBEAT, str(time.time()).encode())

        def keep_beating():
            while not is_over.wait(BEAT_EVERY):
                beat()

        beat()
        thread = threading.Thread(target=keep_beating, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            with contextlib.suppress(Exception):  # then it counts as alive for a while
                self._fs.rm_file(HEARTBEAT)

    def is_running(self) -> bool:
        """Whether a process has written a heartbeat within the last minutes."""
        with explained(self.url, "read"):
            try:
                written = float(self._fs.cat_file(HEARTBEAT))
            except (FileNotFoundError, ValueError):  # none, or no number
                return False
        return math.isfinite(written) and time.time() - written < SILENT

    def mark_running(self) -> None:
        """Mark the copy if the run in the bucket is training."""
        if self.is_running():
            (self.folder / RUNNING).touch()
        else:
            (self.folder / RUNNING).unlink(missing_ok=True)

    def refresh(self) -> None:
        """Download the bucket to the copy, and restore its client-state stores."""
        from fedfr_jax.federated.store import restore_rows  # which needs JAX

        self.download(self._is_own)
        for layout in self.folder.glob("*/store/layout.txt"):
            restore_rows(layout.parent, self._process, self._count)


def open_folder(url: str):
    """Open the folder at a URL: an fsspec file system of paths relative to it."""
    with explained(url, "opened"):
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        fs, root = fsspec.core.url_to_fs(url.rstrip("/"))
        if "file" in fs.protocol:
            fs = _whole_files()
        return DirFileSystem(root, fs)


@functools.cache
def _whole_files() -> Any:
    """Local files that are written whole or not at all, as the objects of a bucket."""
    from fsspec.implementations.local import LocalFileSystem

    class WholeFiles(LocalFileSystem):
        def pipe_file(self, path, value, mode="overwrite", **options):
            if mode != "overwrite":
                super().pipe_file(path, value, mode=mode, **options)
                return
            with replace_file(self._strip_protocol(path)) as file:
                file.write(value)

    return WholeFiles(auto_mkdir=True)


def _is_same(entries: Files, path: str, entry: StoredFile) -> bool:
    """Whether a file's digest is that of `entry`; times may differ."""
    return path in entries and entries[path].sha256 == entry.sha256


def _remove_links(folder: pathlib.Path) -> None:
    """Remove all in a copy that is neither a folder nor a file."""
    for root, folders, files in os.walk(folder):
        for path in (pathlib.Path(root, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                path.unlink()


@contextlib.contextmanager
def explained(url: str, done: str) -> Iterator[None]:
    """Turn errors of fsspec into one line: what could not be `done`, and advice.

    Raises:
      ImportError: when the package for its scheme is missing.
      ValueError: for an unknown scheme.
      OSError: for any other error of fsspec and its packages.
    """
    url, scheme = without_secrets(url), url.partition("://")[0]
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{url} needs a package for {scheme}:// ({_first_line(error)}). Run "
            "pip install 'fedfr_jax[remote]'."
        ) from error
    except Exception as error:
        text = _first_line(error)
        if done == "opened" and "rotocol not known" in text:
            raise ValueError(
                f"{url} must begin with a scheme that fsspec knows, such as gs://, "
                f"s3:// or abfs://, got {scheme}://."
            ) from error
        raise OSError(
            f"{url} could not be {done} ({text}). Check its name, and that this "
            "account may read and write there (docs/how-to/buckets.md)."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = without_secrets(lines[0]) if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class RunFolder(NamedTuple):
    """Working directory of a run, and the bucket that mirrors it, if any."""

    path: pathlib.Path
    mirror: Mirror | None = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Claim a run in a bucket before writing; then other processes download it."""
        from fedfr_jax import mesh

        if self.mirror is None:
            yield
            return
        with mesh.first_process_first("bucket"):
            if mesh.is_first_process():
                self.mirror.claim()
            else:
                self.mirror.refresh()
        self.mirror.share_claim()
        is_first = mesh.is_first_process()
        with self.mirror.beating() if is_first else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def open_run(
    workdir: str | os.PathLike, process: int = 0, count: int = 1
) -> Iterator[RunFolder]:
    """Yield a run's working directory: for a URL, a locked local copy.

    Args:
      process, count: number of this process, each of which has a copy; the first
        one's is downloaded here, those of others once that one has claimed the run.

    Raises:
      ValueError, OSError: when the bucket cannot be used.
    """
    if not is_url(workdir):
        yield RunFolder(pathlib.Path(workdir))
        return
    url = str(workdir)
    with contextlib.ExitStack() as stack:
        try:
            copy = _locked_copy(url, "run", process, count, waits=False)
            mirror = stack.enter_context(copy)
        except locks.RunInUse:
            raise locks.RunInUse(
                f"{without_secrets(url)} is in use by another process of this machine. "
                "Wait for it, or choose another --workdir."
            ) from None
        if not process:
            mirror.check_writable()
            mirror.refresh()
        yield RunFolder(mirror.folder, mirror)


@contextlib.contextmanager
def _locked_copy(
    url: str, use: str, process: int = 0, count: int = 1, *, waits: bool = True
) -> Iterator[Mirror]:
    """A run in a bucket, whose copy no other process uses in the block."""
    mirror = Mirror(url, copy_folder(url, process, use=use), process, count)
    mirror.folder.mkdir(parents=True, exist_ok=True)
    with locks.lock_to_write(mirror.folder.parent, MARK, waits=waits):
        yield mirror


def fetch(
    path: str | os.PathLike, is_wanted: Callable[[str], bool] | None = None
) -> pathlib.Path:
    """A folder to read a run from: of a URL a local copy of the wanted files.

    Raises:
      ValueError: when there is no run.
      OSError: when the bucket cannot be read.
    """
    return (
        _fetch_copy(str(path), is_wanted).folder if is_url(path) else pathlib.Path(path)
    )


def _fetch_copy(
    url: str, is_wanted: Callable[[str], bool] | None, process: int = 0
) -> Mirror:
    with _locked_copy(url, "read", process) as mirror:
        if not mirror.is_there():
            raise ValueError(f"{mirror.url} must be a run, got no manifest there.")
        if is_wanted is None:
            mirror.refresh()
        else:
            mirror.download(is_wanted)
        mirror.mark_running()
    return mirror


def is_reported(path: str) -> bool:
    """Whether pages and tables of runs read a file of a run."""
    is_of_clients = re.search(r"(^|/)clients(-[0-9]+)?\.jsonl$", path)
    is_read = path.endswith(REPORTED) and "/checkpoints/" not in path
    return is_read and not is_of_clients  # which no page shows


def is_model(path: str) -> bool:
    """Whether a file belongs to a stage's model, or is the config with the stages."""
    return path.rpartition("/")[2] in MODEL and "/checkpoints/" not in path


@contextlib.contextmanager
def fetched_to_evaluate(
    workdir: str | os.PathLike, process: int = 0
) -> Iterator[pathlib.Path]:
    """A copy of a run; changes that the block makes are uploaded.

    Args:
      process: number of this process, each of which has a copy; the first one uploads.
    """
    if not is_url(workdir):
        yield pathlib.Path(workdir)
        return
    mirror = _fetch_copy(str(workdir), None, process)
    if mirror.is_running():
        raise ValueError(
            f"{mirror.url} cannot be evaluated while it trains. Wait for its end."
        )
    before = mirror.files()
    yield mirror.folder
    if mirror.files() != before and not process:
        mirror.check_unchanged()
        mirror.claim()


def fetch_runs(folder: str | os.PathLike) -> pathlib.Path:
    """A folder of runs to list: of a URL a local copy of their reports.

    Raises:
      ValueError, OSError: when the bucket cannot be read.
    """
    if not is_url(folder):
        return pathlib.Path(folder)
    url = str(folder).rstrip("/")
    with _locked_copy(url, "list") as bucket:
        copy, names = bucket.folder, bucket.find_runs()
        for path in copy.rglob("config.json"):
            if path.parent not in {copy / name for name in names}:
                shutil.rmtree(path.parent)  # of a run that is gone
        for name in names:
            (copy / name).mkdir(parents=True, exist_ok=True)
            try:
                mirror = Mirror(f"{url}/{name}".rstrip("/"), copy / name)
                mirror.download(is_reported)
                mirror.mark_running()
            except (OSError, ValueError) as error:  # the others are listed
                text = printable(without_secrets(str(error)))
                print(text, file=sys.stderr, flush=True)
    return copy
