"""A bucket is a stranger's: its files stay in the copy; of two writers one stays."""

import hashlib
import json
import os
import pathlib
import time

import fsspec
import pytest

from fedfr_jax.runs import buckets
from fedfr_jax.runs.buckets import (
    Manifest,
    Mirror,
    TakenOver,
    claim_of,
    dump_manifest,
    name_of,
    next_claim,
)

CLAIM = next_claim(None)
UPLOAD = f"{CLAIM}-1"
TEXT = b"{}"


def entry(text=TEXT, **changes):
    sha256 = hashlib.sha256(text).hexdigest()
    right = {"size": len(text), "sha256": sha256, "modified": 1.0, "upload": UPLOAD}
    return {**right, **changes}


def stranger(folder, files, text=TEXT):
    """URL of a bucket with a manifest of `files`, each with the content `text`."""
    folder.mkdir(parents=True)
    for path in files if isinstance(files, dict) else ():
        place = folder / "files" / UPLOAD / path.lstrip("/")
        if path.isprintable() and len(path) < 200:
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_dir():
                place.write_bytes(text)
    (folder / name_of(CLAIM)).write_text(json.dumps({"files": files}))
    return f"file://{folder}"


def mirror(url, folder):
    folder.mkdir(parents=True, exist_ok=True)
    return Mirror(url, folder)


HOSTILE_PATHS = (
    "../out",
    "a/../../out",
    "a/..",
    "..",
    "/out",
    "a//b",
    "a/",
    "",
    ".",
    "./a",
    ".lock",
    "a/.hidden/b",
    "..\\out",
    "C:out",
    "a\0b",
    "a\x1b[2J",
    "a" * 256,
    "\ud800",
)
HOSTILE_ENTRIES = (
    None,
    [],
    {},
    entry(size="2"),
    entry(size=True),
    entry(size=-1),
    entry(sha256="0" * 63),
    entry(sha256=7),
    entry(sha256="G" * 64),
    entry(modified="now"),
    entry(modified=float("nan")),
    entry(modified=1e30),
    entry(modified=10**400),
    entry(modified=-1),
    entry(upload="../.."),
    entry(upload=5),
    entry(more=1),
)


def test_a_manifest_of_a_stranger_is_refused_before_anything_is_written(tmp_path):
    manifests = [{"good": entry(), path: entry()} for path in HOSTILE_PATHS]
    manifests += [{"good": entry(), "a": x} for x in HOSTILE_ENTRIES]
    manifests += [[], "text", None]
    for number, files in enumerate(manifests):
        home = tmp_path / str(number)
        url = stranger(home / "bucket", files)
        with pytest.raises(ValueError, match=rf"{name_of(CLAIM)} must list .*, but"):
            mirror(url, home / "home" / "copy").download()
        assert not [path for path in (home / "home").rglob("*") if path.is_file()]
    both = json.dumps({"files": {"a": entry(), "a/b/c": entry()}}).encode()
    for text in (
        b"{",
        b"[1]",
        b"{}",
        b'{"files": {}, "after": "../x"}',
        b'{"files": {}, "after": 3}',
        b"[" * 10**5,
        both,
    ):
        with pytest.raises(ValueError, match="name must"):
            buckets.parse_manifest(text, CLAIM, "name")
    later = next_claim(CLAIM)
    with pytest.raises(ValueError, match="an earlier claim"):  # nor a circle
        buckets.parse_manifest(dump_manifest(Manifest({}, later)), later, "name")


def test_nothing_is_written_through_a_link_in_the_copy(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    url = stranger(tmp_path / "bucket", {"stage/file": entry(), "file": entry()})
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "stage").symlink_to(outside)
    (copy / "file").symlink_to(outside / "file")
    (copy / ".download").symlink_to(outside)
    os.mkfifo(copy / "pipe")
    Mirror(url, copy).download()
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"
    assert (copy / "stage" / "file").read_bytes() == TEXT
    assert not (copy / "stage").is_symlink() and not (copy / "pipe").exists()


def test_links_and_pipes_of_a_bucket_are_not_opened(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(TEXT)
    url = stranger(tmp_path / "bucket", {"a": entry(), "b": entry(), "c/d": entry()})
    objects = tmp_path / "bucket" / "files" / UPLOAD
    (objects / "a").unlink()
    (objects / "a").symlink_to(secret)
    (objects / "b").unlink()
    os.mkfifo(objects / "b")
    with pytest.raises(ValueError, match="/a must have its sha256"):
        mirror(url, tmp_path / "copy").download()
    assert sorted(mirror(url, tmp_path / "copy").files()) == ["c/d"]
    (tmp_path / "bucket" / buckets.HEARTBEAT).symlink_to(secret)
    with pytest.raises(ValueError, match="link, pipe or device 'HEARTBEAT'"):
        mirror(url, tmp_path / "copy").download()
    assert secret.read_bytes() == TEXT


def test_a_file_of_other_bytes_is_named_and_no_larger_one_is_fetched(tmp_path):
    url = stranger(tmp_path / "bucket", {"a": entry(), "b": entry()})
    objects = tmp_path / "bucket" / "files" / UPLOAD
    reader = mirror(url, tmp_path / "copy")
    get, fetched = reader._fs.get, []
    reader._fs.get = lambda found, places: fetched.extend(found) or get(found, places)
    for text in (b"()", TEXT + b"more"):  # of the same size, of another
        (objects / "a").write_bytes(text)
        with pytest.raises(ValueError, match="/a must have its sha256"):
            reader.download()
        assert [*reader.files()] == ["b"]
    assert [path.rpartition("/")[2] for path in fetched] == ["a", "b"]
    (objects / "a").write_bytes(TEXT)
    reader.download()
    assert [*reader.files()] == ["a", "b"]
    url = stranger(tmp_path / "large", {"a": entry(size=2**60)})
    with pytest.raises(ValueError, match="large must take at most .*, got 1073741824"):
        mirror(url, tmp_path / "large-copy").download()


def test_runs_of_a_bucket_are_listed_without_those_that_are_refused(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stranger(tmp_path / "runs" / "good", {"config.json": entry()})
    stranger(tmp_path / "runs" / "bad", {"../../config.json": entry()})
    (tmp_path / "runs" / "good" / buckets.HEARTBEAT).write_text("soon")  # no number
    (tmp_path / "runs" / "MANIFEST-of-mine.json").write_text("no run's")
    copy = buckets.fetch_runs(f"file://{tmp_path}/runs")
    assert [x.parent.name for x in copy.rglob("config.json")] == ["good"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "bad/MANIFEST" in line and "a plain path" in line
    files = fsspec.filesystem("memory")
    found = [f"/runs/../../out/{name_of(CLAIM)}"]
    monkeypatch.setattr(files, "glob", lambda _: found, raising=False)
    assert Mirror("memory://runs", tmp_path).find_runs() == []
    for text in (b"nan", b"", b"soon", str(time.time() - 900).encode()):
        files.pipe_file("/beat/HEARTBEAT", text)
        assert not Mirror("memory://beat", tmp_path).is_running()


@pytest.fixture
def run(tmp_path):
    """(bucket, writer A): a run that A has claimed, with a log of one line."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "log").write_text("A1\n")
    (folder / "old").write_text("old")
    first = Mirror(f"file://{tmp_path}/bucket/run", folder)
    first.claim()
    return tmp_path / "bucket" / "run", first


def second_writer(run, folder):
    other = mirror(f"file://{run}", folder)
    other.download()
    return other


def contents(run, folder):
    """{path: text} of what a new reader of the bucket finds."""
    reader = mirror(f"file://{run}", folder)
    reader.download()
    return {path: (folder / path).read_text() for path in reader.files()}


# In which step of A's upload another process takes the run over and writes.
STEPS = ("_put", "_write_manifest", "_remove_unlisted")


def test_a_late_upload_changes_nothing_of_a_later_writer(run, tmp_path, monkeypatch):
    bucket, first = run
    for number, (step, is_before) in enumerate((x, y) for x in STEPS for y in (1, 0)):
        first.claim()
        second = second_writer(bucket, tmp_path / f"b{number}")
        whole = getattr(Mirror, step)

        def interleaved(self, *arguments, second=second, whole=whole, before=is_before):
            if self is not first:
                return whole(self, *arguments)
            result = None if before else whole(self, *arguments)
            if not second._claim:
                (second.folder / "log").write_text("B1\nB2\n")
                second.claim()
            return whole(self, *arguments) if before else result

        (first.folder / "log").write_text(f"A{number}\n")
        (first.folder / "old").unlink()  # which B has downloaded, and lists
        with monkeypatch.context() as patch:
            patch.setattr(Mirror, step, interleaved)
            if step == "_remove_unlisted":  # A was the newest when it looked
                first.upload()
            else:
                with pytest.raises(TakenOver, match="taken over by another process"):
                    first.upload()
        with pytest.raises(TakenOver, match="taken over by another process"):
            first.upload()
        expected = {"log": "B1\nB2\n", "old": "old"}
        assert contents(bucket, tmp_path / f"c{number}") == expected, step
        (second.folder / "log").write_text("B3\n")
        second.upload()
        assert contents(bucket, tmp_path / f"d{number}")["log"] == "B3\n"
        (first.folder / "old").write_text("old")


def test_a_claim_that_is_cut_off_stands_for_the_files_before(
    run, tmp_path, monkeypatch
):
    bucket, first = run
    second = second_writer(bucket, tmp_path / "b")
    (second.folder / "log").write_text("B1\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def cut_off(*_):
            raise KeyboardInterrupt

        patch.setattr(second, "_put", cut_off)
        second.claim()
    assert contents(bucket, tmp_path / "c") == {"log": "A1\n", "old": "old"}
    with pytest.raises(TakenOver, match="taken over"):
        first.upload()
    third = second_writer(bucket, tmp_path / "d")
    (third.folder / "old").unlink()
    third.claim()
    assert contents(bucket, tmp_path / "e") == {"log": "A1\n"}


def test_what_no_manifest_names_is_removed(run, tmp_path):
    bucket, first = run
    orphan = bucket / "files" / f"{first._claim}-9" / "part"  # of a killed upload
    orphan.parent.mkdir()
    orphan.write_text("part")
    later = bucket / "files" / f"{next_claim(first._claim)}-1" / "part"
    later.parent.mkdir()
    later.write_text("of a process that has just begun")
    (bucket / "files" / "notes").mkdir()
    (bucket / "files" / "notes" / "mine").write_text("mine")
    (first.folder / "link").symlink_to(orphan)  # what it leads to is not uploaded
    for text in ("A2\n", "A3\n"):
        (first.folder / "log").write_text(text)
        first.upload()
    names = [x.name for x in (bucket / "files").glob("*/*")]
    assert sorted(names) == ["log", "mine", "old", "part"] and later.exists()
    assert len([x for x in bucket.iterdir() if claim_of(x.name)]) == 1
    assert contents(bucket, tmp_path / "c") == {"log": "A3\n", "old": "old"}


def test_an_evaluation_is_not_written_over_a_run_that_trains(
    run, tmp_path, monkeypatch
):
    bucket, first = run
    url = f"file://{bucket}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def evaluate(meanwhile=lambda: None):
        with buckets.fetched_to_evaluate(url) as folder:
            meanwhile()
            (folder / "evaluation.json").write_text("{}")

    with (
        first.beating(),
        pytest.raises(ValueError, match="cannot be evaluated while it trains"),
    ):
        evaluate()
    with pytest.raises(TakenOver, match="taken over"):
        evaluate(meanwhile=first.claim)
    evaluate()
    assert "evaluation.json" in contents(pathlib.Path(bucket), tmp_path / "c")
