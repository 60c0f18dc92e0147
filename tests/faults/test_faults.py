"""The search for faults finds those that are put in, and a little of it is a test."""

import pathlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated import store as store_module
from tests.faults import damage, inputs
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
    assert "flaw" in found


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
