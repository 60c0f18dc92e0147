"""Run directories in a bucket, mirrored by a local copy.

A run works in its copy, a folder of the user's cache. With every checkpoint the changed
files are uploaded, and after them MANIFEST.json, which lists all files of the run with
their digests: a partial upload is not listed, and is ignored. Readers download what the
manifest lists, and check it. The large files of a client-state store are not uploaded;
they are rebuilt from its log, see `federated.row_log`.

Buckets have no locks. The process that starts last writes its name into the manifest;
an earlier one finds it there and ends at its next checkpoint. While a process trains,
it writes the time into HEARTBEAT.

JAX is not needed here, and fsspec is imported where a path is a URL.
"""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedfr_jax.digest_json import digest_of_file
from fedfr_jax.json_files import parse_json
from fedfr_jax.runs import heartbeat, locks
from fedfr_jax.runs.scratch import RUNNING, copy_folder, is_url

MANIFEST, HEARTBEAT = "MANIFEST.json", "HEARTBEAT"
CHECK, NEW = ".write-check", f"{MANIFEST}.new"
LEFT = (CHECK, NEW, HEARTBEAT)  # files that a killed process may leave in the bucket
TRIES = 5  # of a download, while another process writes the run
DOWNLOADED = ".download"  # folder of a copy for files until they are checked
MARK = "copy of a run in a bucket\n"  # content of a copy's lock file
LARGE = ("rows.bin", "stamps.bin")  # of a store
PARTIAL = (".tmp", "-tmp")  # suffixes of files that are being written
DEPTH = 3  # levels of folders in which runs are listed
# Suffixes of the files that pages and tables of runs read.
REPORTED = (".json", ".jsonl", ".png", ".jpg", ".webp", ".txt")
MODEL = ("model.json", "weights.safetensors", "config.json")


class Mirror:
    """A run in a bucket and its copy in `folder`."""

    def __init__(self, url: str, folder: pathlib.Path):
        self.url, self.folder = url, folder
        self._writer = None  # id of this process, once it has claimed the run
        self._digests = {}  # {path: (state of the file, its entry in the manifest)}
        with explained(url, "opened"):
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
            self._fs.auto_mkdir = True  # of file://, others make folders anyway

    def is_there(self) -> bool:
        """Whether the bucket has a run at the URL."""
        return self._read_manifest() is not None

    def check_writable(self) -> None:
        """Raise OSError if the bucket is not writable, ValueError for other files."""
        if self._read_manifest() is None:
            with explained(self.url, "read"):
                names = self._list_names()
            if names:
                raise ValueError(
                    f"{self.url} must be empty or a run, got a folder with "
                    f"{', '.join(names[:3])}. Take another --workdir."
                )
        with explained(self.url, "written"):
            self._put_bytes(CHECK, b"")
            self._fs.rm_file(f"{self._root}/{CHECK}")

    def download(self, is_wanted: Callable[[str], bool] = lambda path: True) -> None:
        """Download the wanted files to the local copy; delete files not in the bucket.

        Raises:
          OSError: when the bucket cannot be read, or a file differs from the manifest;
            all others are in the copy then.
        """
        for tries_left in reversed(range(TRIES)):
            manifest = self._read_manifest() or {}
            try:
                return self._download(manifest, is_wanted)
            except OSError:
                if not tries_left or self._read_manifest() == manifest:
                    raise  # the run has not changed meanwhile

    def _download(self, manifest: Mapping[str, Any], is_wanted: Callable) -> None:
        files, local = manifest.get("files", {}), self.files()
        missing = [
            path
            for path, entry in files.items()
            if is_wanted(path) and not _is_same(local, path, entry)
        ]
        with _empty_folder(self.folder / DOWNLOADED) as folder:
            with explained(self.url, "read"):
                self._get(missing, folder)
            wrong = [path for path in missing if not self._keep(path, manifest)]
        if wrong:
            raise OSError(
                f"{self.url}/{wrong[0]} must have its sha256 in {MANIFEST}, got other "
                "bytes (damaged, or changed by hand). Put back an older version of it, "
                f"or the file in {self.folder} of the machine that wrote it; all other "
                "files are in that folder here."
            )
        for path in local.keys() - files.keys():
            (self.folder / path).unlink()
        _remove_empty(self.folder)

    def _keep(self, path: str, manifest: Mapping[str, Any]) -> bool:
        """Move a downloaded file to its place, if the manifest names its content."""
        new, place = self.folder / DOWNLOADED / path, self.folder / path
        entry = self._entry(new)
        for allowed in _versions(manifest, path):
            if allowed["sha256"] == entry["sha256"]:
                os.utime(new, (allowed["modified"],) * 2)
                place.parent.mkdir(parents=True, exist_ok=True)
                new.replace(place)
                return True
        return False

    def claim(self) -> None:
        """Take over the run as its only writer, and upload the local copy."""
        self._writer = uuid.uuid4().hex
        manifest = self._read_manifest()
        if manifest is None:  # before any file, or what follows would be in its way
            manifest = {"writer": self._writer, "files": {}}
            with explained(self.url, "written"):
                self._write_manifest(manifest)
        self._upload(manifest)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Mark the run as training, in the bucket, within the block."""
        with heartbeat.beating(self._fs, f"{self._root}/{HEARTBEAT}"):
            yield

    def is_running(self) -> bool:
        """Whether a process has written a heartbeat within the last minutes."""
        with explained(self.url, "read"):
            return heartbeat.is_beating(self._fs, f"{self._root}/{HEARTBEAT}")

    def upload(self) -> None:
        """Upload changes of the local copy to the bucket.

        Raises:
          OSError: when another process has begun to write the run, or the bucket cannot
            be written.
        """
        manifest = self._read_manifest() or {}
        if manifest.get("writer") != self._writer:
            raise OSError(
                f"{self.url} has been taken over by another process, which was started "
                "later. This one ends; its files stay in "
                f"{self.folder}."
            )
        self._upload(manifest)

    def add(self, names: Sequence[str]) -> None:
        """Upload single files to the bucket, without claiming the run."""
        manifest, local = self._read_manifest() or {}, self.files()
        added = {name: local[name] for name in names if name in local}
        files = manifest["files"] | added
        self._put_named(manifest, added, {**manifest, "files": files})

    def _upload(self, manifest: Mapping[str, Any]) -> None:
        uploaded, local = manifest.get("files", {}), self.files()
        changed = {k: x for k, x in local.items() if not _is_same(uploaded, k, x)}
        self._put_named(manifest, changed, {"writer": self._writer, "files": local})
        if gone := [*uploaded.keys() - local.keys()]:
            with explained(self.url, "written"):
                self._remove(gone)

    def _put_named(
        self, before: Mapping[str, Any], files: Mapping[str, dict], after: Mapping
    ) -> None:
        """Upload files, and replace the manifest `before` by `after`.

        In between a replaced file may have either content: the manifest lists both, for
        readers and for a resume after a kill.
        """
        replaced = {k: x for k, x in files.items() if k in before.get("files", {})}
        with explained(self.url, "written"):
            if replaced:
                either = dict(before.get("replaced", {}))
                for path, new_entry in replaced.items():
                    either[path] = [*either.get(path, ()), new_entry]
                writer = after.get("writer")
                self._write_manifest({**before, "writer": writer, "replaced": either})
            self._put([*files])
            self._write_manifest({k: x for k, x in after.items() if k != "replaced"})

    def files(self) -> dict[str, dict]:
        """Return {path: manifest entry} of the local copy's files."""
        entries = {}
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            hidden = any(part[0] == "." or part.endswith(PARTIAL) for part in parts)
            if path.is_file() and not hidden and path.name not in LARGE:
                entries["/".join(parts)] = self._entry(path)
        return entries

    def _entry(self, path: pathlib.Path) -> dict:
        """Manifest entry of a file; its digest is cached until the file changes."""
        state = path.stat()
        key = state.st_size, state.st_mtime_ns
        if self._digests.get(path, (None,))[0] != key:
            entry = {
                "bytes": state.st_size,
                "sha256": digest_of_file(path),
                "modified": state.st_mtime,
            }
            self._digests[path] = key, entry
        return self._digests[path][1]

    def _read_manifest(self) -> dict | None:
        """Read the bucket's manifest, or None if there is none."""
        with explained(self.url, "read"):
            try:
                data = self._fs.cat_file(f"{self._root}/{MANIFEST}")
            except FileNotFoundError:
                return None
        return parse_json(data, f"{self.url}/{MANIFEST}")

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest atomically, by renaming."""
        self._put_bytes(NEW, json.dumps(manifest, indent=1).encode())
        self._fs.mv(f"{self._root}/{NEW}", f"{self._root}/{MANIFEST}")

    def _list_names(self) -> list[str]:
        try:
            paths = self._fs.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = (name.rpartition("/")[2] for name in paths)
        return [name for name in names if name not in LEFT]

    def _get(self, paths: list[str], folder: pathlib.Path) -> None:
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if paths:
            there = [f"{self._root}/{path}" for path in paths]
            self._fs.get(there, [str(folder / path) for path in paths])

    def _put(self, paths: list[str]) -> None:
        if paths:
            there = [f"{self._root}/{path}" for path in paths]
            self._fs.put([str(self.folder / path) for path in paths], there)

    def _put_bytes(self, name: str, data: bytes) -> None:
        """Write bytes through a temporary file, as `pipe_file` makes no folders."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self._fs.put_file(file.name, f"{self._root}/{name}")

    def _remove(self, paths: list[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            self._fs.rm([f"{self._root}/{path}" for path in paths])


def _is_same(entries: Mapping[str, dict], path: str, entry: Mapping) -> bool:
    """Whether a file's digest is that of `entry`; times may differ."""
    return path in entries and entries[path]["sha256"] == entry["sha256"]


def _versions(manifest: Mapping[str, Any], path: str) -> list[dict]:
    """Entries that a file in the bucket may have, several while it is replaced."""
    return [manifest["files"][path], *manifest.get("replaced", {}).get(path, ())]


@contextlib.contextmanager
def _empty_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Create an empty folder for the block; remove it afterwards."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_empty(folder: pathlib.Path) -> None:
    """Remove empty folders, such as those of deleted checkpoints."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


@contextlib.contextmanager
def explained(url: str, done: str) -> Iterator[None]:
    """Turn errors of fsspec into one line: what could not be `done`, and advice.

    Raises:
      ImportError: when the package for its scheme is missing.
      ValueError: for an unknown scheme.
      OSError: for any other error of fsspec and its packages.
    """
    scheme = url.partition("://")[0]
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
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class RunFolder(NamedTuple):
    """Working directory of a run, and the bucket that mirrors it, if any."""

    path: pathlib.Path
    mirror: Mirror | None = None

    @property
    def is_mirrored(self) -> bool:
        """Whether the path is this process's copy of a run in a bucket."""
        return self.mirror is not None

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
                refresh(self.mirror)
        with contextlib.ExitStack() as stack:
            if mesh.is_first_process():
                stack.enter_context(self.mirror.beating())
            yield


@contextlib.contextmanager
def open_run(workdir: str | os.PathLike, process: int = 0) -> Iterator[RunFolder]:
    """Yield a run's working directory: for a URL, a locked local copy.

    Args:
      process: number of this process, each of which has a copy; the first one's is
        downloaded here, those of others once that one has claimed the run.

    Raises:
      ValueError, OSError: when the bucket cannot be used.
    """
    if not is_url(workdir):
        yield RunFolder(pathlib.Path(workdir))
        return
    mirror = Mirror(str(workdir), copy_folder(str(workdir), process))
    if not process:
        mirror.check_writable()
    with _locked_copy(mirror):
        if not process:
            refresh(mirror)
        yield RunFolder(mirror.folder, mirror)


@contextlib.contextmanager
def _locked_copy(mirror: Mirror) -> Iterator[None]:
    """Lock the local copy against other processes of this machine."""
    mirror.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = locks.lock_to_write(mirror.folder.parent, MARK)
    except locks.RunInUse:
        raise locks.RunInUse(
            f"{mirror.url} is in use by another process of this machine. Wait for it, "
            "or choose another --workdir."
        ) from None
    with contextlib.closing(lock):
        yield


def refresh(mirror: Mirror) -> None:
    """Download the bucket to the local copy, and restore its client-state stores."""
    from fedfr_jax.federated.store import restore_rows  # which needs JAX

    mirror.download()
    for layout in mirror.folder.glob("*/store/layout.txt"):
        restore_rows(layout.parent)


def fetch(
    path: str | os.PathLike, is_wanted: Callable[[str], bool] | None = None
) -> pathlib.Path:
    """A folder to read a run from: of a URL a local copy of the wanted files.

    Raises:
      ValueError: when there is no run.
      OSError: when the bucket cannot be read.
    """
    if not is_url(path):
        return pathlib.Path(path)
    return _fetch_copy(str(path), is_wanted).folder


def _fetch_copy(
    url: str, is_wanted: Callable[[str], bool] | None, process: int = 0
) -> Mirror:
    mirror = Mirror(url, copy_folder(url, process, use="read"))
    if not mirror.is_there():
        raise ValueError(f"{url} must be a run, got no {MANIFEST} there.")
    mirror.folder.mkdir(parents=True, exist_ok=True)
    lock = locks.lock_to_write(mirror.folder.parent, MARK, waits=True)
    with contextlib.closing(lock):
        if is_wanted is None:
            refresh(mirror)
        else:
            mirror.download(is_wanted)
        mark_running(mirror)
    return mirror


def mark_running(mirror: Mirror) -> None:
    """Mark a copy for reading if the run in the bucket is training."""
    if mirror.is_running():
        (mirror.folder / RUNNING).touch()
    else:
        (mirror.folder / RUNNING).unlink(missing_ok=True)


def is_reported(path: str) -> bool:
    """Whether pages and tables of runs read a file of a run."""
    return path.endswith(REPORTED) and "/checkpoints/" not in path


def is_model(path: str) -> bool:
    """Whether a file belongs to a stage's model, or is the config with the stages."""
    return path.rpartition("/")[2] in MODEL


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
    before = mirror.files()
    yield mirror.folder
    now = mirror.files()
    changed = [path for path in now if not _is_same(before, path, now[path])]
    if changed and not process:
        mirror.add(changed)


def fetch_runs(folder: str | os.PathLike) -> pathlib.Path:
    """A folder of runs to list: of a URL a local copy of their reports.

    Raises:
      ValueError, OSError: when the bucket cannot be read.
    """
    if not is_url(folder):
        return pathlib.Path(folder)
    url, copy = str(folder).rstrip("/"), copy_folder(str(folder), use="list")
    copy.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(locks.lock_to_write(copy.parent, MARK, waits=True)):
        names = _find_runs(url)
        for path in copy.rglob("config.json"):
            if path.parent not in {copy / name for name in names}:
                shutil.rmtree(path.parent)  # of a run that is gone
        for name in names:
            mirror = Mirror(f"{url}/{name}" if name else url, copy / name)
            mirror.folder.mkdir(parents=True, exist_ok=True)
            mirror.download(is_reported)
            mark_running(mirror)
    return copy


def _find_runs(url: str) -> list[str]:
    """Paths of the runs below a URL; "" is the URL itself."""
    with explained(url, "opened"):
        import fsspec

        fs, root = fsspec.core.url_to_fs(url)
    manifests = []
    with explained(url, "read"):
        fs.invalidate_cache()  # or a list stays as it was
        for depth in range(DEPTH + 1):
            pattern = "/".join([root, *["*"] * depth, MANIFEST])
            manifests += fs.glob(pattern)
    bare = root.strip("/")
    inner = (x.strip("/").removeprefix(bare).strip("/") for x in manifests)
    return [name.removesuffix(MANIFEST).strip("/") for name in inner]
