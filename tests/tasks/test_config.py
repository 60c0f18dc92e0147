"""A mistake in a section of a config ends in one line before the data is opened."""

import re
import runpy
from collections.abc import Mapping

import pytest

from fedfr_jax.config.build import build, sections
from fedfr_jax.config.files import load, shipped
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.tasks import SPECS
from fedfr_jax.tasks.experiment import parse_config

TASKS = {
    "faces": {
        "model": {"name": "sphereface"},
        "partition": {"num_clients": 2, "ids_per_client": 2, "num_public_ids": 2},
        "pretrain": {"epochs": 1, "learning_rate": 0.1},
    },
    "classification": {"model": {"name": "mlp"}, "partition": {"num_clients": 2}},
    "segmentation": {"model": {}, "partition": {"num_clients": 2}},
    "reid": {"model": {}, "partition": {"name": "by_camera"}},
}
EVERYWHERE = [
    ({"learning_rat": 0.1}, r"^config.methods.x must have .*mean learning_rate\?"),
    ({"learning_rate": "fast"}, "^config.methods.x.learning_rate must be a finite"),
    ({"kind": "centrl"}, "^config.methods.x.kind must be one of"),
    ({"kind": "central", "batch_sise": 1}, r"\(did you mean batch_size\?\)"),
    ({"kind": "central", "loss": {"margn": 1}}, "^config.methods.x.*'margn'"),
    ({"algorithm": "fedprx"}, r"^config.methods.x.algorithm must .*mean fedprox\?"),
    ({"algorithm": {"name": "fedprox", "mu": "x"}}, "x.algorithm.mu must be a finite"),
    ({"algorithm": {"name": "fedprox", "m": 0.1}}, "algorithm needs the key mu"),
    ({"algorithm": "fedprox", "mu": 0.1}, r"\(a key of the algorithm: algorithm.mu\)"),
    ({"loss": "nosuch"}, r"^config.methods.x.*loss.* must be .*'nosuch'"),
    ({"loss": {"margn": 0.4}}, "^config.methods.x.*loss must have keys .*'margn'"),
    ({"optimizer": "adm"}, "^config.methods.x.optimizer must be the name"),
    ({"personal": {"block": 1}}, r"x.personal must have .*mean blocks\?"),
    ({"personal": {"blocks": "x"}}, "x.personal.blocks must be a whole number"),
    ({"personal": "fc("}, r"x.personal must be a reg.*'fc\(': missing"),
    ({"learning_rate_multipliers": {"(": 1.0}}, "of regular expressions to"),
    ({"frozen": {"batch_norms": True}}, "x.frozen must have keys of"),
    ({"kind": "central", "frozen": "("}, "x.frozen must be a regular expression"),
    ({"aggregation": "medan"}, r"x.aggregation.name must .*mean median\?"),
    ({"aggregation": 3}, "x.aggregation must be a text or a mapping or a list, got 3"),
    ({"attack": {"name": "signflip", "share": 0.1}}, "x.attack.name must be one of"),
    ({"on_bad_update": "skip"}, "x.on_bad_update.name must be one of"),
    ({"privacy": {"clip": 1.0}}, r"x.privacy must have .*mean clip_norm\?"),
]
NO_BRANCH = {"branch": None}
OF_A_TASK = [
    ("faces", {"use_public_data": 1}, r"\(a key of the algorithm: algorithm.use_pub"),
    ("faces", {"loss": {"name": "cosface", "t": 1}}, "loss must have keys of"),
    ("faces", {"algorithm": "kd"}, "needs public data"),
    ("faces", {"algorithm": {"branch": {"scal": 1}}}, r"mean scale\?"),
    ("faces", {"algorithm": {"branch": "bec"}}, r"x: branch must .*mean bce\?"),
    ("faces", {"loss": "adaface", "algorithm": {"branch": "cosface"}}, "a softmax"),
    ("faces", {"algorithm": {"spreadout": {"steps": 1}}}, "needs the key threshold"),
    ("faces", {"algorithm": {"adaptation": {}}}, "None with adaptation"),
    ("faces", {"algorithm": {**NO_BRANCH, "adaptation": {"epoch": 1}}}, "got 'epoch'"),
    ("faces", {"distill": {"weight": 1.0}}, "x.distill: teacher or cache must be set"),
    ("faces", {"distill": {"teacher": {"file": "t"}}}, "x.distill.teacher must have"),
    ("faces", {"kind": "central", "distill": {"wight": 1.0}}, r"mean weight\?"),
    ("classification", {"loss": "arcface"}, "a loss on logits, got 'arcface'"),
    ("classification", {"algorithm": "fedfr"}, "needs public identities"),
    ("classification", {"loss": {"class_weights": [1.0]}}, "'class_weights'"),
    ("classification", {"distill": {}}, "^config.methods.x must have .*'distill'"),
    ("segmentation", {"loss": {"class_weights": "a"}}, "loss.class_weights must be"),
    ("reid", {"loss": "arcface"}, "settings of the task's only loss"),
    ("reid", {"identities_per_batch": 1.5}, "identities_per_batch must be a whole"),
]
SERVER = {"name": "fedavg", "server_optimizer": {"name": "fedavgm", "rate": 1.0}}
EVERYWHERE.append(({"algorithm": SERVER}, "server_optimizer must have keys of"))
SECTIONS = ("data", "partition", "model", "federation", "evaluation", "pretrain")


@pytest.fixture(autouse=True)
def unopened(monkeypatch):
    def opened():
        raise AssertionError("the data was opened")

    monkeypatch.setitem(SOURCES, "unopened", opened)


def mistake(task: str, method: Mapping | None = None, **sections) -> str:
    """The error of a config with these keys."""
    config = {
        "data": {"name": "unopened"},
        "federation": {"rounds": 1},
        **TASKS[task],
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys}
    methods = {"x": {"learning_rate": 0.1, **(method or {})}}
    with pytest.raises(ValueError) as error:
        build({"task": task, **config, "methods": methods})
    return str(error.value)


@pytest.mark.parametrize("task", TASKS)
def test_a_wrong_method_is_refused_before_the_data_is_opened(task):
    found = [(words, mistake(task, method)) for method, words in EVERYWHERE]
    wrong = [pair for pair in found if not re.search(*pair)]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("task, method, message", OF_A_TASK)
def test_a_method_has_keys_of_its_task_only(task, method, message):
    assert re.search(message, mistake(task, method))


@pytest.mark.parametrize("task", TASKS)
def test_each_section_refuses_an_unknown_key(task):
    for section in SECTIONS:
        found = mistake(task, **{section: {"nosuch": 1}})
        assert re.search(f"^config.{section} must have .*'nosuch'", found), found


@pytest.mark.parametrize("task", TASKS)
def test_mistakes_of_partition_and_pretraining_are_reported_together(task):
    wrong = {"nosuch": 1, "number": 2}
    found = mistake(task, partition=wrong, pretrain=wrong).splitlines()
    for section in ("partition", "pretrain"):
        for key in wrong:
            rule = f"^config.{section} must have .*got '{key}'"
            assert any(re.search(rule, line) for line in found), found
    assert len(found) == 4
    if task == "faces":
        found = mistake(task, pretrain={"epochs": -1, "loss": "nosuch"}).splitlines()
        assert found[0].startswith("config.pretrain.epochs must be") and len(found) == 2
        assert "'nosuch'" in found[1]


def test_rates_of_faces_are_shares():
    for key in ("fars", "fpirs", "masked_fars"):
        found = mistake("faces", evaluation={key: (1e-3, 1.5)})
        assert f"config.evaluation.{key} must be" in found, found


def test_shipped_configs_are_parsed(monkeypatch):
    monkeypatch.setenv("FEDFR_DATA", "data")
    for path in shipped().values():
        for word in runpy.run_path(str(path)).get("DATA") or (None,):
            settings = sections(load(path, word))
            parse_config(SPECS[settings["task"]], settings)
