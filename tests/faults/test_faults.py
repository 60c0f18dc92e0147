"""The search for faults finds those that are put in, and a little of it is a test."""

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


def test_what_is_reported_says_of_which_day_and_commit(monkeypatch, capsys):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # which `main` sets
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(damage, "report", lambda **given: print(given) or True)
    monkeypatch.setattr(sys, "argv", ["", "--only=damage", "--quick"])
    assert main() == 0
    expected = (
        r"damage: \d{4}-\d\d-\d\d, commit ([0-9a-f]{7,}\+?|unknown), \d+ cores .+"
    )
    first, last = capsys.readouterr().out.splitlines()
    assert first == "{'step': 10}" and re.fullmatch(expected, last)
