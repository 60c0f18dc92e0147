"""The search for faults finds those that are put in, and a little of it is a test."""

import pathlib

import numpy as np
import pytest

from tests.faults import inputs
from tests.faults.inputs import SETS
from tests.faults.small_sets import Small


@pytest.mark.parametrize("name", SETS)
def test_damaged_inputs_are_read_as_what_is_valid_or_refused(name, monkeypatch):
    monkeypatch.setattr(inputs, "limit", lambda: None)  # this process has more to do
    found = list(inputs.attack(name, range(12)))
    assert {result for *_, result in found} <= {"same", "valid", "refused"}, found


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
