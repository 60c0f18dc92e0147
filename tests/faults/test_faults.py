"""The search for faults finds those that are put in, and a little of it is a test."""

import json
import pathlib
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated import store as store_module
from tests.faults import damage, inputs, kills
from tests.faults.__main__ import main
from tests.faults.inputs import SETS
from tests.faults.small_sets import Small
from tests.runs import test_loop


@pytest.mark.parametrize("name", SETS)
def test_damaged_inputs_are_read_as_what_is_valid_or_refused(name, monkeypatch):
    monkeypatch.setattr(inputs, "limit", lambda: None)  # this process has more to do
    found = list(inputs.attack(name, range(12)))
    assert {result for *_, result in found} <= {"same", "valid", "refused"}, found


# Sources whose files another's name stands for in SETS, and those without files.
SAME_READER = {
    "3dpes": "cuhk03",
    "arrays": "npz",
    "bin_pairs": "bin",
    "cifar10": "classes",
    "cifar100": "two parts",
    "cuhk01": "cuhk03",
    "cuhk03_np": "cuhk03",
    "fashion_mnist": "two parts",
    "fei": "folder",
    "ilids": "cuhk03",
    "image_classes": "classes",
    "image_masks": "masks",
    "listed_pairs": "listed pairs",
    "mnist": "two parts",
    "msmt17": "msmt17",
    "orl": "folder",
    "prid2011": "cuhk03",
    "recordio": "rec",
    "reid_csv": "reid csv",
    "viper": "cuhk03",
}
NO_FILES = {"fake_data", "synthetic_faces", "concat", "source_object", "synthetic"}
OF_A_LIBRARY = {"tfds", "femnist10"}  # TensorFlow Datasets reads their files


def test_every_source_that_reads_files_is_attacked():
    """A new source has a line here, or in SETS."""
    missed = {name for name in SOURCES if SAME_READER.get(name, name) not in SETS}
    assert missed == NO_FILES | OF_A_LIBRARY


def test_a_reader_that_trusts_its_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "limit", lambda: None)
    path = lambda folder: folder / "labels.txt"
    whole = SETS["npz"]

    def write(folder: pathlib.Path):
        whole.write(folder)
        path(folder).write_text("0 1 2 0 1 2 0 1 2")

    def read(folder):
        labels = np.array([int(x) for x in path(folder).read_text().split()])
        return whole.read(folder)._replace(labels=labels)

    small = Small(write, ("labels.txt",), read)
    monkeypatch.setitem(SETS, "trusting", small)
    found = {
        result.partition(":")[0] for *_, result in inputs.attack("trusting", range(40))
    }
    assert {"no name", "flaw"} <= found


@pytest.mark.ci
def test_rows_that_nothing_checks_are_found_by_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "zlib", SimpleNamespace(crc32=lambda *_: 0))
    sim, server = test_loop.build("fedfr")
    expected = test_loop.train(sim, server, tmp_path / "whole", rounds=6)
    damage.stopped(sim, server, tmp_path / "stopped")
    found = set()
    for how in damage.damages(tmp_path / "stopped" / "store" / "rows.bin"):
        shutil.copytree(tmp_path / "stopped", tmp_path / how, dirs_exist_ok=True)
        found.add((how, damage.outcome(sim, server, tmp_path / how, expected)))
        shutil.rmtree(tmp_path / how)
    assert {("a flipped bit", "other numbers"), ("emptied", "refused")} <= found


def left_by_a_run(workdir):
    """A folder with a little of all that is compared."""
    for stage in kills.STAGES:
        checkpoint = workdir / stage / "checkpoints" / "5" / "default"
        checkpoint.mkdir(parents=True)
        (checkpoint / "kernel").write_bytes(b"11")
        (workdir / stage / "metrics.jsonl").write_text('{"round": 1, "seconds": 7}\n')
        store = workdir / stage / "store"
        store.mkdir()
        np.int32([[0, 3, 0], [4, 0, 1]]).tofile(store / "stamps.bin")
        (store / "rows.bin").write_bytes(b"aa11aa" + b"22bbbb")  # the newest in digits
    (workdir / "summary.json").write_text('{"methods": {"fedfr": {"rate": 1}}}')
    (workdir / "partition.json").write_text("[1]")
    return workdir


@pytest.mark.parametrize(
    "file, old, new, names",
    [
        ("fedfr/store/rows.bin", b"22b", b"23b", ["fedfr store"]),
        ("fedfr/store/rows.bin", b"aa1", b"ab1", []),
        ("fedfr/store/stamps.bin", b"\4", b"\5", ["fedfr store"]),
        ("fedavg/metrics.jsonl", b": 1", b": 2", ["fedavg metrics"]),
        ("fedavg/metrics.jsonl", b": 7", b": 8", []),
        ("pretrained/checkpoints/5/default/kernel", b"1", b"2", ["pretrained kernel"]),
        ("summary.json", b"1", b"2", ["summary"]),
        ("partition.json", b"1", b"2", ["partition"]),
    ],
)
def test_an_end_that_differs_after_kills_is_found(
    file, old, new, names, tmp_path, monkeypatch
):
    leaves = lambda folder: {"kernel": np.fromfile(folder / "kernel", np.uint8)}
    monkeypatch.setattr(kills, "leaves_of", leaves)
    expected = kills.ends_of(left_by_a_run(tmp_path / "whole"))
    path = left_by_a_run(tmp_path / "killed") / file
    assert kills.different(kills.ends_of(tmp_path / "killed"), expected) == []
    whole = path.read_bytes()
    path.write_bytes(whole.replace(old, new))
    assert path.read_bytes() != whole
    assert kills.different(kills.ends_of(tmp_path / "killed"), expected) == names


@pytest.mark.parametrize("findings", [[], ["FOUND it"]])
def test_a_part_is_kept_with_its_command_and_commit(findings, monkeypatch, tmp_path):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # which `main` sets
        monkeypatch.setenv(name, "")
    report = lambda step: {"table": {"step": step}, "findings": findings}
    monkeypatch.setattr(damage, "report", report)
    words = ["--only=damage", "--quick", f"--out={tmp_path / 'a.json'}"]
    monkeypatch.setattr(sys, "argv", ["", *words])
    assert main() == len(findings)
    found = json.loads((tmp_path / "a.json").read_text())["rows"]["damage"]
    assert found["table"] == {"step": 10} and found["findings"] == findings
    made = found["made"]
    assert made["command"] == " ".join(["python -m tests.faults", *words])
    assert re.fullmatch(r"([0-9a-f]{7,}\+?)?", made["commit"])
    assert {"date", "machine"} <= made.keys()


def test_the_pages_tables_are_those_of_the_kept_numbers():
    root = pathlib.Path(__file__).parents[2]
    path = root / "experiments" / "benchmarks" / "results" / "faults.json"
    page = (root / "docs" / "explanation" / "reliability.md").read_text()
    rows = json.loads(path.read_text())["rows"]
    ends = ("same", "valid", "refused")
    for name, counts in rows["inputs"]["table"].items():
        numbers = [sum(counts.values()), *(counts.get(end, 0) for end in ends)]
        assert f"| {' | '.join(f'{n:,}' for n in numbers)} |" in page, name
    for how in ("a flipped bit", "cut in half", "emptied", "removed"):
        of = lambda end, how=how: rows["damage"]["table"].get(f"{how}, {end}", 0)
        found = [of(end) for end in ("same", "refused", "other numbers")]
        assert f"| {' | '.join(map(str, [sum(found), *found]))} |" in page, how
    stages = {
        "before the first": "the start",
        "pretrained": "pretraining",
        "fedavg": "FedAvg",
        "fedfr": "FedFR",
    }
    killed = rows["kills"]["table"]
    for stage, title in stages.items():
        cells = []
        for number in (1, 2):
            name = f"{stage}, processes: {number}, killed at a"
            at = [killed.get(f"{name} {how}", 0) for how in ("change", "moment")]
            cells.append("{}, {}".format(*at))
        assert f"| {title} | {' | '.join(cells)} |" in page, stage
    assert f"{sum(killed.values())} kills" in page
    for part in rows.values():
        made = part["made"]
        assert re.search(rf"{made['date']},\s+commit {made['commit']}", page)
