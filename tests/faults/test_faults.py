"""The search for faults finds those that are put in, and a little of it is a test."""

import json
import pathlib
import re
import sys

import numpy as np
import pytest

from fedfr_jax.data.sources import SOURCES
from tests.faults import damage, inputs
from tests.faults.__main__ import main
from tests.faults.inputs import SETS
from tests.faults.small_sets import Small


@pytest.mark.parametrize("name", SETS)
def test_damaged_inputs_are_read_as_what_is_valid_or_refused(name, monkeypatch):
    monkeypatch.setattr(inputs, "limit", lambda: None)  # this process has more to do
    found = list(inputs.attack(name, range(12)))
    assert {result for *_, result in found} <= {"same", "valid", "refused"}, found


# Sources whose files another's name stands for in SETS, and those without files.
SAME_READER = {
    "arrays": "npz",
    "bin_pairs": "bin",
    "cifar10": "classes",
    "cifar100": "two parts",
    "cuhk03_np": "cuhk03",
    "fashion_mnist": "two parts",
    "fei": "folder",
    "image_classes": "classes",
    "image_masks": "masks",
    "listed_pairs": "listed pairs",
    "mnist": "two parts",
    "msmt17": "msmt17",
    "orl": "folder",
    "recordio": "rec",
    "reid_csv": "reid csv",
}
NO_FILES = {"blank", "faces_synthetic", "join", "opened", "synthetic"}
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
