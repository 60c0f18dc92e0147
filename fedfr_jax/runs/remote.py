"""Run directories in a bucket, mirrored by a local copy.

A run works in its copy, a folder of the user's cache. With every checkpoint the changed
files are uploaded, and after them the manifest, which lists all files of the run with
their digests: a partial upload is not listed, and is ignored. Readers download what the
manifest lists, and check it. The large files of a client-state store are not uploaded;
they are rebuilt from its log, see `federated.row_log`.

Buckets have no locks. Of several processes the one that started last has the greatest
claim, see `bucket_manifest`; an earlier one finds it and ends at its next checkpoint.
While a process trains, it writes the time into HEARTBEAT.

A bucket may be a stranger's: paths, sizes and digests are those of a checked manifest,
and the copy has only real folders and files, so that nothing is written through a link.

JAX is not needed here, and fsspec is imported where a path is a URL.
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fedfr_jax.files import check_bytes, digest_of_file
from fedfr_jax.manifest import is_plain
from fedfr_jax.runs import bucket_manifest, heartbeat, locks
from fedfr_jax.runs.bucket_manifest import (
    OBJECTS,
    Manifest,
    StoredFile,
    claim_of,
    claim_of_upload,
)
from fedfr_jax.runs.scratch import RUNNING, copy_folder, is_url
from fedfr_jax.text import printable, without_secrets

HEARTBEAT, CHECK = "HEARTBEAT", ".write-check"
TRIES = 5  # of a download, while another process writes the run
DOWNLOADED = ".download"  # folder of a copy for files until they are checked
MARK = "copy of a run in a bucket\n"  # content of a copy's lock file
LARGE = ("rows.bin", "stamps.bin")  # of a store
PARTIAL = (".tmp", "-tmp")  # suffixes of files and folders that are being written
DEPTH = 3  # levels of folders in which runs are listed
# Suffixes of the files that pages and tables of runs read.
REPORTED = (".json", ".jsonl", ".png", ".jpg", ".webp", ".txt")
MODEL = ("model.json", "weights.safetensors", "config.json")
Files = Mapping[str, StoredFile]  # by path


class Mirror:
    """A run in a bucket and its copy in `folder`."""

    def __init__(self, url: str, folder: pathlib.Path):
        self.url, self.folder = without_secrets(url), folder
        self._claim = None  # of this process, once it has claimed the run
        self._seen = None  # the newest claim at the last download
        self._uploads = itertools.count(1)
        self._entries = {}  # {path: (state of the file, its entry)}
        with explained(url, "opened"):
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
            self._fs.auto_mkdir = True  # of file://, others make folders anyway

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
            self._put_bytes(name, b"")
            self._fs.rm_file(f"{self._root}/{name}")

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
        size = sum(entry.bytes for entry in missing.values())
        with _empty_folder(self.folder / DOWNLOADED) as folder:
            check_bytes(size, self.url, shutil.disk_usage(folder).free)
            with explained(self.url, "read"):
                self._get(missing, folder)
            for path in local.keys() - files.keys():
                (self.folder / path).unlink()
            _remove_empty(self.folder)
            wrong = [path for path in missing if not self._keep(path, missing[path])]
        if wrong:
            place = missing[wrong[0]].place(wrong[0])
            raise OSError(
                f"{self.url}/{place} must have its sha256 in the manifest, got other "
                "bytes (damaged, or changed by hand). Put back an older version of it, "
                f"or the file in {self.folder} of the machine that wrote it; all other "
                "files are in that folder here."
            )

    def _keep(self, path: str, entry: StoredFile) -> bool:
        """Move a downloaded file to its place, if it has the content of its entry."""
        new, place = self.folder / DOWNLOADED / path, self.folder / path
        if not new.exists() or self._entry(new).sha256 != entry.sha256:
            return False
        os.utime(new, (entry.modified,) * 2)
        place.parent.mkdir(parents=True, exist_ok=True)
        new.replace(place)
        return True

    def claim(self) -> None:
        """Take over the run as its only writer, and upload the local copy."""
        newest = self._newest()
        self._claim = bucket_manifest.next_claim(newest)
        begun = Manifest({}) if newest is None else Manifest({}, after=newest)
        with explained(self.url, "written"):
            self._write_manifest(begun)
        self._upload()

    def claim_unchanged(self) -> None:
        """Upload the local copy, unless another process has written since `download`.

        Raises:
          OSError: when one has, or the bucket cannot be written.
        """
        self._check_newest(self._seen)
        self.claim()

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
        self._check_newest(self._claim)
        self._upload()

    def _check_newest(self, claim: str | None) -> None:
        if self._newest() != claim:
            raise OSError(
                f"{self.url} has been taken over by another process, which was started "
                "later. This one ends; its files stay in "
                f"{self.folder}."
            )

    def _upload(self) -> None:
        """Upload changed files as new objects, then the manifest of this claim.

        What no manifest names any more is removed last, and only while the claim is the
        newest: a later one begins with the files of this manifest.
        """
        listed, local = self._read_files(self._claim), self.files()
        upload = f"{self._claim}-{next(self._uploads)}"
        changed = [k for k, entry in local.items() if not _is_same(listed, k, entry)]
        files = {
            path: entry._replace(upload=upload) if path in changed else listed[path]
            for path, entry in local.items()
        }
        with explained(self.url, "written"):
            self._put({path: files[path] for path in changed})
            self._write_manifest(Manifest(files))
        self._check_newest(self._claim)
        with explained(self.url, "written"):
            self._remove_unlisted(listed, files)

    def _remove_unlisted(self, before: Files, files: Files) -> None:
        """Remove earlier manifests, and objects of this and earlier claims."""
        uploads = {entry.upload for entry in files.values()}
        gone, gone_folders = {x.place(path) for path, x in before.items()}, set()
        for path in self._find(OBJECTS):
            upload = path.split("/")[1]
            if (claim := claim_of_upload(upload)) and claim <= self._claim:
                kept = upload in uploads
                gone.add(path) if kept else gone_folders.add(f"{OBJECTS}/{upload}")
        for name in self._list():
            if (claim := claim_of(name)) is not None and claim < self._claim:
                gone.add(name)
        gone -= {entry.place(path) for path, entry in files.items()}
        gone = {x for x in gone if "/".join(x.split("/")[:2]) not in gone_folders}
        for paths, recursive in ((gone, False), (gone_folders, True)):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                places = [f"{self._root}/{path}" for path in sorted(paths)]
                self._fs.rm(places, recursive=recursive)

    def files(self) -> dict[str, StoredFile]:
        """Return {path: entry} of the local copy's files, without links to others."""
        entries = {}
        for path in sorted(self.folder.rglob("*")):
            inner = path.relative_to(self.folder)
            partial = any(part.endswith(PARTIAL) for part in inner.parts)
            name, is_file = inner.as_posix(), path.is_file() and not path.is_symlink()
            if is_file and is_plain(name) and not partial and path.name not in LARGE:
                entries[name] = self._entry(path)
        return entries

    def _entry(self, path: pathlib.Path) -> StoredFile:
        """Entry of a local file; its digest is cached until the file changes."""
        state = path.stat()
        key = state.st_size, state.st_mtime_ns
        if self._entries.get(path, (None,))[0] != key:
            digest = digest_of_file(path)
            self._entries[path] = (
                key,
                StoredFile(state.st_size, digest, state.st_mtime),
            )
        return self._entries[path][1]

    def _newest(self) -> str | None:
        """The greatest claim in the bucket; None if there is none."""
        claims = [claim_of(name) for name in self._list()]
        return max((x for x in claims if x is not None), default=None)

    def _read_files(self, claim: str | None) -> Files:
        """Files of a claim, or of the one that it is to replace."""
        while claim is not None:
            manifest = self._read_manifest(claim)
            if manifest.after is None:
                return manifest.files
            claim = manifest.after
        return {}

    def _read_manifest(self, claim: str) -> Manifest:
        name = bucket_manifest.name_of(claim)
        with explained(self.url, "read"):
            path = f"{self._root}/{name}"
            size = self._fs.info(path)["size"]
        check_bytes(size, f"{self.url}/{name}", bucket_manifest.MAX_BYTES)
        with explained(self.url, "read"):
            data = self._fs.cat_file(path)
        return bucket_manifest.parse(data, claim, f"{self.url}/{name}")

    def _write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of this claim atomically, by renaming."""
        name = bucket_manifest.name_of(self._claim)
        self._put_bytes(f".{name}", bucket_manifest.dump(manifest))
        self._fs.mv(f"{self._root}/.{name}", f"{self._root}/{name}")

    def _list(self) -> list[str]:
        """Names in the run's own folder.

        Raises:
          ValueError: for a link, pipe or device, of a bucket that is a folder.
        """
        with explained(self.url, "read"):
            try:
                found = self._fs.ls(self._root, detail=True, refresh=True)
            except FileNotFoundError:
                return []
        names = {entry["name"].rpartition("/")[2]: entry["type"] for entry in found}
        for name, kind in names.items():
            if kind not in ("file", "directory"):
                raise ValueError(
                    f"{self.url} must have files and folders only, got a link, pipe or "
                    f"device {name!r}. Remove it."
                )
        return [*filter(None, names)]

    def _find(self, place: str = "") -> dict[str, dict]:
        """{path: what the bucket says} of all objects below a folder of the run."""
        self._fs.invalidate_cache()
        found = self._fs.find(f"{self._root}/{place}".rstrip("/"), detail=True)
        root = self._root.strip("/")
        return {
            path.strip("/").removeprefix(root).strip("/"): entry
            for path, entry in found.items()
        }

    def _get(self, files: Files, folder: pathlib.Path) -> None:
        """Download the files that have the size of their entries."""
        found = self._find() if files else {}
        places = {}
        for path, entry in files.items():
            there = found.get(entry.place(path), {})
            if there.get("type") == "file" and there.get("size") == entry.bytes:
                places[f"{self._root}/{entry.place(path)}"] = folder / path
        for path in places.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        if places:
            self._fs.get([*places], [*map(str, places.values())])

    def _put(self, files: Files) -> None:
        if files:
            places = [f"{self._root}/{x.place(path)}" for path, x in files.items()]
            self._fs.put([str(self.folder / path) for path in files], places)

    def _put_bytes(self, name: str, data: bytes) -> None:
        """Write bytes through a temporary file, as `pipe_file` makes no folders."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self._fs.put_file(file.name, f"{self._root}/{name}")


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
        raise ValueError(f"{mirror.url} must be a run, got no manifest there.")
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
    if mirror.is_running():
        raise ValueError(
            f"{mirror.url} cannot be evaluated while it trains. Wait for its end."
        )
    before = mirror.files()
    yield mirror.folder
    if mirror.files() != before and not process:
        mirror.claim_unchanged()


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
            try:
                _fetch_reported(f"{url}/{name}" if name else url, copy / name)
            except (OSError, ValueError) as error:  # the others are listed
                text = printable(without_secrets(str(error)))
                print(text, file=sys.stderr, flush=True)
    return copy


def _fetch_reported(url: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(url, folder)
    mirror.download(is_reported)
    mark_running(mirror)


def _find_runs(url: str) -> list[str]:
    """Paths of the runs below a URL; "" is the URL itself."""
    with explained(url, "opened"):
        import fsspec

        fs, root = fsspec.core.url_to_fs(url)
    found = []
    with explained(url, "read"):
        fs.invalidate_cache()  # or a list stays as it was
        for depth in range(DEPTH + 1):
            found += fs.glob("/".join([root, *["*"] * depth, "MANIFEST*.json"]))
    bare = root.strip("/")
    inner = (path.strip("/").removeprefix(bare).strip("/") for path in found)
    folders_and_names = (path.rpartition("/") for path in inner)
    folders = {x for x, _, name in folders_and_names if claim_of(name) is not None}
    return sorted(x for x in folders if not x or is_plain(x))
