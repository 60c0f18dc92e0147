"""The examples of CONTRIBUTING.md are whole: files of a user that train."""

import importlib
import json
import pathlib
import re
import runpy
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import fedfr_jax as ff
from fedfr_jax.cli.main import main
from fedfr_jax.config.build import build
from fedfr_jax.config.files import load
from fedfr_jax.data.augment import AUGMENTS
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.losses import LOSSES
from fedfr_jax.models import MODELS
from fedfr_jax.runs.experiment import run_stages
from fedfr_jax.tasks import TASKS
from fedfr_jax.tasks.methods import FACTS
from tests.contracts import test_algorithms as contract
from tests.contracts.rows import required, rows_of

pytestmark = pytest.mark.ci

TEXT = (pathlib.Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
FAMILIES = (AGGREGATORS, ALGORITHMS, AUGMENTS, LOSSES, MODELS, SOURCES, TASKS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The examples as files, by the name in each one's first line, and their digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known, modules = [dict(family) for family in FAMILIES], set(sys.modules)
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        (tmp_path / re.match(r'"""(\w+\.py)', code)[1]).write_text(code)
    runpy.run_path(str(tmp_path / "make_digits.py"))
    yield tmp_path
    for family, before in zip(FAMILIES, known, strict=True):
        for name in family.keys() - before.keys():
            del family[name]
    for name in sys.modules.keys() - modules:
        if name.startswith("my_"):
            del sys.modules[name]


def test_an_algorithm_of_the_library_costs_the_lines_that_the_table_names(
    folder, monkeypatch
):
    """The example in ALGORITHMS, `__init__.pyi` and MEMBERS passes all list checks."""
    monkeypatch.syspath_prepend(str(folder))
    bounded = importlib.import_module("my_algorithm").bounded
    monkeypatch.setitem(ALGORITHMS, "bounded", bounded)
    monkeypatch.setitem(ff._PLACES, "bounded", "my_algorithm")
    name, line = re.search(r'`"(\w+)": (Member\(.*\)),`', TEXT).groups()
    monkeypatch.setitem(contract.MEMBERS, name, eval(line, vars(contract)))
    contract.test_every_algorithm_is_under_contract()
    row = {"learning_rate": 0.1, "algorithm": {"name": "bounded", "most": 1.0}}
    assert rows_of("params/fc", given=())["bounded"] == row  # in the tests of tasks
    assert required("bounded", "params/fc") == {"most": 1.0}  # and of faces


@pytest.mark.parametrize("task", ["faces", "classification"])
def test_a_users_own_members_train_by_a_config_without_touching_the_library(
    task, folder
):
    config = load(folder / "mine.py", task)
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        found = run_stages(build(config), folder)["bounded"]
    numbers = [list(of.metrics.values()) for of in found.values()]
    assert numbers and all(np.isfinite(values).all() for values in numbers)
    own = {
        "bounded",
        "signs",
        "noise",
        "additive",
        "focal",
        "linear",
        "digits",
        "counting",
    }
    assert own <= {name for family in FAMILIES for name in family}


@pytest.mark.parametrize(
    "key", ["methods.bounded.personal=.", "federation.data_placement=stream"]
)
def test_a_users_own_task_is_trained_and_evaluated_by_the_commands(key, folder):
    words = ["--config=mine.py:counting", "--workdir=run", f"--config.{key}"]
    with jax.numpy_dtype_promotion("standard"):
        assert [main([command, *words]) for command in ("train", "evaluate")] == [0, 0]
    of = lambda name: json.loads((folder / "run" / name).read_text())["methods"]
    assert of("evaluation.json") == of("summary.json")
    found = of("summary.json")["bounded"]
    assert 0 < found["personalized"]["error"] < 9
    assert bool(found["generic"]) == ("personal" not in key)


def test_a_run_of_a_users_own_task_asks_for_its_config(folder, capsys):
    config = {"task": "counting", "methods": {}}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["evaluate", "--workdir=."]) == 2
    assert "a task of your own needs --config=FILE" in capsys.readouterr().err


def test_a_list_of_images_is_a_source_of_clients_and_parts(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    lines = ["file,class,client,part", "a.png,cat,x,train", "b.png,cat,x,test"]
    (folder / "list.csv").write_text("\n".join(lines))
    for name in "ab":
        Image.new("RGB", (20, 20), "red").save(folder / f"{name}.png")
    source = importlib.import_module("my_list").listed(folder, folder / "list.csv")
    assert source.read(np.arange(2)).shape == (2, 16, 16, 3)
    assert source.names == ("cat",) and source.labels.tolist() == [0, 0]
    split = ff.partition.natural(
        source.labels, client_ids=source.client_ids, is_test=source.is_test
    )
    assert split.train.rows.tolist() == [0] and split.test.rows.tolist() == [1]


def test_the_names_that_are_no_settings_are_listed():
    listed = re.search(r"one of these names: (.*?) \(`FACTS`", TEXT, re.S)[1]
    assert {*re.findall(r"`(\w+)`", listed)} == FACTS
