"""No number of a run is read that was not written."""

import contextlib
import json
import os
import pathlib
import shutil

import pytest

from fedfr_jax import files, manifest, scaling
from fedfr_jax.runs import costs, evaluation_record, sinks, sweep_results
from fedfr_jax.types import Evaluation

ROUNDS = 6


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def log_rounds(path, rounds, *, resume_step=0, covered=(), seed=0):
    """Append lines; cover all so far after the rounds `covered`."""
    with contextlib.closing(sinks.JsonlSink(path, resume_step=resume_step)) as sink:
        for r in rounds:
            sink(r, {"loss": 1 / (r + 3 + seed), "steps": 7.0})
            if r in covered:
                sinks.cover_logs([None, print, sink])


def evaluate(folder, accuracy):
    """End a stage with its evaluation."""
    evaluations = {"generic": Evaluation({"accuracy": accuracy})}
    evaluation_record.write_record(folder, "fedavg", evaluations)


def write_run(folder, seed=0):
    """Write every file of a finished run and a sweep from which numbers are read."""
    for name in ("metrics", "clients"):
        path = folder / "fedavg" / f"{name}.jsonl"
        log_rounds(path, range(ROUNDS), covered=[3, 5], seed=seed)
    evaluate(folder, 0.75 + seed)
    numbers = {"fedavg": {"generic": {"accuracy": 0.75 + seed}}}
    for name in ("evaluation", "summary"):
        sinks.write_json(folder / f"{name}.json", {"methods": numbers})
    rows = [
        {"run": f"r{i}", "params_backbone": 10 * i, "error": 0.5 / i + seed}
        for i in range(1, ROUNDS)
    ]
    sweep_results.write(folder, rows)


READERS = {
    "fedavg/metrics.jsonl": lambda path: costs.read_metrics(path.parent),
    "fedavg/clients.jsonl": sinks.read_jsonl,
    "fedavg/evaluation.json": manifest.read_bytes,
    "evaluation.json": manifest.read_bytes,
    "summary.json": manifest.read_bytes,
    "results.jsonl": lambda path: sweep_results.read(path.parent),
    "results.csv": lambda path: scaling.read_rows(str(path)),
}


def damages(path, other):
    """Damage a file in one way after the other."""
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    digits = [i for i, byte in enumerate(whole) if chr(byte).isdigit()]
    for i in digits[:: max(len(digits) // 10, 1)]:
        yield "a digit", whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]
    middle = len(lines) // 2
    yield "cut in half", whole[: len(whole) // 2]
    yield "a byte less", whole[:-1]
    yield "emptied", b""
    yield "of another run", other.read_bytes()
    yield "a line less", b"".join(lines[:middle] + lines[middle + 1 :])
    yield "the last line less", b"".join(lines[:-1])
    yield "a line twice", b"".join(lines[:middle] + lines[middle:][:1] + lines[middle:])
    yield "a line more", whole + lines[middle]
    yield "removed", None


def test_every_damage_of_every_file_is_named(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    write_run(run)
    write_run(other, seed=1)
    for name, read in READERS.items():
        path = run / name
        whole, expected = path.read_bytes(), read(path)
        for how, data in damages(path, other / name):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(ValueError, match="must be") as error:
                read(path)
            said = str(error.value)
            assert str(path) in said and "\n" not in said, (name, how)
            if data is not None:
                advice = f"delete {path.with_name('manifest.json')} to use"
                assert "as it was written" in said and advice in said, (name, how)
            path.write_bytes(whole)
        assert read(path) == expected
    digit = (run / "results.jsonl").read_text().replace("0.25", "0.24")
    (run / "results.jsonl").write_text(digit)
    with pytest.raises(ValueError, match="results.jsonl must be as it was written"):
        scaling.read_rows(str(run))
    (run / "manifest.json").unlink()  # as the message says
    assert scaling.read_rows(str(run))[1]["error"] == 0.24


def test_lines_after_a_checkpoint_are_read_but_dropped_by_a_resume(tmp_path):
    path, whole = tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl"
    log_rounds(whole, range(ROUNDS))
    log_rounds(path, range(5), covered=[3])
    with path.open("a") as file:
        file.write('{"round": 2, "loss": 9}\n')  # of a covered round, but after it
    rows = sinks.read_jsonl(path)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 2]
    text = path.read_text()
    for old, new in (("0.25", "0.35"), (text[:30], ""), ('{"round": 2', '{"round": 3')):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match="metrics.jsonl must be as it was"):
            sinks.JsonlSink(path, resume_step=4)
        with pytest.raises(ValueError, match="metrics.jsonl must be as it was"):
            manifest.check_logs(path.parent)
    path.write_text(text)
    manifest.check_logs(path.parent)
    log_rounds(path, range(4, ROUNDS), resume_step=4)
    assert path.read_bytes() == whole.read_bytes()
    log_rounds(path, range(ROUNDS), resume_step=0)
    assert path.read_bytes() == whole.read_bytes()


def test_the_digest_of_a_log_is_that_of_its_beginning(tmp_path):
    path, first = tmp_path / "metrics.jsonl", 0
    for end in (2, 3, 5):
        log_rounds(path, range(first, end + 1), resume_step=first, covered=[end - 1])
        lines = path.read_bytes().splitlines(keepends=True)
        entry = manifest.read(tmp_path)["metrics.jsonl"]
        assert len(lines) == end + 1
        expected = manifest.entry_of(b"".join(lines[:end]))
        assert entry == expected._replace(is_log=True)
        assert manifest.read_covered(path) == b"".join(lines[:end])
        first = end


def killed_after(monkeypatch, number, action):
    """Do an action until a file is renamed for the `number`-th time; whether it was."""
    count = 0
    replace = pathlib.Path.replace

    def counted(*args):
        nonlocal count
        count += 1
        if count > number:
            raise Killed
        return replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "replace", counted)
        try:
            action()
        except Killed:
            return True
    return False


def test_a_kill_at_any_moment_leaves_files_that_are_as_they_were_written(
    tmp_path, monkeypatch
):
    run, started = tmp_path / "run", tmp_path / "started"
    write_run(started)
    log = run / "fedavg" / "metrics.jsonl"
    expected = (started / "fedavg" / "metrics.jsonl").read_bytes()

    def go_on():  # from an earlier checkpoint, as when the last one is damaged
        log_rounds(log, range(2, ROUNDS), resume_step=2, covered=[3, 5])
        evaluate(run, 0.75)
        sinks.write_json(run / "summary.json", {"seconds": 2})

    for number in range(100):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(started, run)
        is_killed = killed_after(monkeypatch, number, go_on)
        for name, read in READERS.items():
            read(run / name)
        assert expected.startswith(log.read_bytes())
        go_on()
        assert log.read_bytes() == expected
        assert json.loads(manifest.read_bytes(run / "summary.json")) == {"seconds": 2}
        if not is_killed:
            break
    assert number == 11


def test_a_file_that_is_replaced_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    path, read = tmp_path / "summary.json", manifest.read
    manifest.write(path, "old\n")

    def read_before_a_change(folder):
        entries = read(folder)
        monkeypatch.setattr(manifest, "read", read)
        manifest.write(path, "newer\n")
        return entries

    monkeypatch.setattr(manifest, "read", read_before_a_change)
    assert manifest.read_bytes(path) == b"newer\n"


def test_files_of_a_folder_are_covered_by_their_paths(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("a", "d/b", ".hidden", "later"):
        (tmp_path / name).write_text(name)
    manifest.write_all(tmp_path, but_for=["later"])
    assert {*manifest.read(tmp_path)} == {"a", "d/b"}
    assert manifest.difference(tmp_path) is None
    (tmp_path / "d" / "b").write_text("d/B")
    assert manifest.difference(tmp_path) == "d/b is not as it was written"
    manifest.cover_files(tmp_path, ["d/b", "gone"])
    assert manifest.difference(tmp_path) is None
    (tmp_path / "a").unlink()
    assert manifest.difference(tmp_path) == "a is not as it was written"
    manifest.cover(tmp_path, {"a": None, "d/b": None})
    assert manifest.difference(tmp_path) == "no manifest.json in it"


ENTRY = {"size": 1, "sha256": "0" * 64}
PATHS = ("../a", "/a", "a/../b", "a//b", "./a", "", "a\\b", "a\n", "..")
VALUES = (
    *({}, [], 1, None, ENTRY | {"more": 1}, {"size": 1}, ENTRY | {"is_log": 1}),
    *(ENTRY | {"size": -1}, ENTRY | {"size": 1.0}),
    *(ENTRY | {"size": True}, ENTRY | {"sha256": "0" * 63}, ENTRY | {"sha256": 1}),
    *(ENTRY | {"sha256": "G" * 64}, ENTRY | {"sha256": "0" * 65}),
)


def test_a_wrong_manifest_is_refused_in_one_line(tmp_path):
    (tmp_path / "a").write_text("a")
    path = tmp_path / "manifest.json"
    contents = [{"files": {path: ENTRY}} for path in PATHS]
    contents += [{"files": {"a": value}} for value in VALUES]
    contents += [{}, [], {"files": []}, {"files": None}, "no JSON", {"files": "a"}]
    for content in contents:
        path.write_text(json.dumps(content)[: -1 if content == "no JSON" else None])
        with pytest.raises(ValueError, match="must be an undamaged manifest") as error:
            manifest.read_bytes(tmp_path / "a")
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        assert manifest.difference(tmp_path) == "manifest.json is not as it was written"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="Is no regular file"):
        manifest.read_bytes(tmp_path / "a")
    path.unlink()
    files.write_text(path, json.dumps({"files": {"b/c": ENTRY}}))
    assert manifest.read_bytes(tmp_path / "a") == b"a"  # not covered
