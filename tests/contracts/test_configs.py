"""Every config under configs/: how it is run, what came out, and what papers say."""

import ast
import functools
import pathlib
import re

import jax
import numpy as np
import pytest
from fedfr_jax.configs.classification import comparison

from fedfr_jax.config.build import build, plain
from fedfr_jax.config.files import find, load
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.models import MODELS
from fedfr_jax.parts import parse
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.classification import cross_entropy
from fedfr_jax.tasks.methods import AlgorithmReader
from fedfr_jax.types import Source
from tests.contracts import test_algorithms as contracts
from tests.contracts.rows import FACTS, required

KEY = jax.random.key(0)
ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if p.stem != "base")


def test_a_config_says_how_it_is_run():
    offenders = []
    for path in CONFIGS:
        flag = "--config=" + str(path.relative_to(ROOT))
        if flag not in (ast.get_docstring(ast.parse(path.read_text())) or ""):
            offenders.append(flag)
    assert not offenders, "\n".join(offenders)


FIGURE = r"\d\.\d.*\(20\d\d-\d\d-\d\d"  # and its date
PAGE = r"\b(?:docs|experiments/\w+)/\w+\.md\b"
NOT_YET = r"\bNot (run|measured)\b|\bNobody has run it\b"


def test_a_config_says_what_came_out_or_where_that_is_or_that_nobody_ran_it():
    offenders = []
    for path in CONFIGS:
        text = " ".join(ast.get_docstring(ast.parse(path.read_text())).split())
        pages = [ROOT / page for page in re.findall(PAGE, text)]
        found = all(page.is_file() for page in pages)
        if not found or not (pages or re.search(f"{FIGURE}|{NOT_YET}", text)):
            offenders.append(str(path.relative_to(ROOT)))
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize(
    ("name", "batch", "clients", "model"),
    [
        ("cifar10_mobilenet", 128, 10, "mobilenet"),
        ("cifar10_resnet34", 128, 10, "resnet"),
        ("cifar100_mobilenet", 128, 10, "mobilenet"),
        ("cifar100_resnet34", 128, 10, "resnet"),
        ("flickr_aes", 4, 30, "mobilenet"),
    ],
)
def test_fedpers_own_sizes_are_those_of_its_section_4_1(name, batch, clients, model):
    config = plain(load(find(f"fedper/{name}")))
    federation, partition = config["federation"], config["partition"]
    assert (federation["rounds"], federation["local_epochs"]) == (100, 4)
    assert (federation["batch_size"], partition["num_clients"]) == (batch, clients)
    assert config["model"]["name"] == model
    rows = {k: v for k, v in config["methods"].items() if k != "central"}
    assert {row["learning_rate"] for row in rows.values()} == {0.01}
    if name == "flickr_aes":
        assert partition["test_fraction"] == 0.2
    else:
        few = {"cifar10": 4, "cifar100": 40}[config["data"]["dataset"]]
        assert partition["classes_per_client"] == few


@pytest.mark.parametrize("network", ["mobilenet", "resnet34"])
@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_a_linear_base_gives_the_last_block_what_it_has_in_the_network(data, network):
    """Blocks 13 of MobileNet-v1 and 16 of ResNet-34 keep their input's shape."""
    whole, linear = (
        plain(load(find(f"fedper/{data}_{network}"), word)) for word in (None, "linear")
    )
    assert set(linear["methods"]) == {"fedper_2"} < set(whole["methods"])
    assert linear["methods"]["fedper_2"] == whole["methods"]["fedper_2"]
    settings = linear["model"]
    halvings = {"mobilenet": 4, "resnet34": 3}[network]  # of 32 pixels
    assert settings["side"] == 32 // 2**halvings
    last = {"mobilenet": ("block13",), "resnet34": ("stage4", "block3")}[network]
    in_network, alone = (shapes_of(of) for of in (whole["model"], settings))
    for name in last:
        in_network = in_network[name]
    assert in_network == alone["block1"]


def shapes_of(model):
    """{block: shapes} of a network's parameters, on images of 32 pixels."""
    factory = MODELS[model["name"]]
    settings = {key: value for key, value in model.items() if key != "name"}
    made = factory((32, 32, 3), num_classes=10, **settings)
    params = jax.eval_shape(lambda key: by_block_name(made.init(key)["params"]), KEY)
    return jax.tree.map(lambda leaf: leaf.shape, params)


def test_every_default_may_be_written_into_a_config():
    offenders, losses = [], {"class_pull_loss": cross_entropy}
    reader = AlgorithmReader("any", losses=losses, offered=FACTS)
    for name, function in ALGORITHMS.items():
        given = contracts.MEMBERS[name].build.keywords
        facts = {key: given[key] for key in given.keys() & FACTS}
        row = required(name, contracts.HEAD)
        offers = {**dict.fromkeys(FACTS, True), **facts}
        for key, parameter in keywords(function).items():
            if not isinstance(parameter.default, str | bool | int | float):
                continue
            given = {**row, key: parameter.default}
            try:
                part = parse(reader, {"name": name, **given})
                part.build(None, offers)[0](contracts.LOCAL)
            except ValueError as error:
                offenders.append(f"{name}.{key}: {error}")
    assert not offenders, "\n".join(offenders)


SETS = {  # classes and images of the comparison's sets
    "fashion_mnist": (10, (28, 28, 1)),
    "mnist": (10, (28, 28, 1)),
    "cifar10": (10, (32, 32, 3)),
    "cifar100": (100, (32, 32, 3)),
    "cifar100_resnet": (100, (32, 32, 3)),
    "emnist": (62, (28, 28, 1)),
}


def built_on_black(config, num_classes, shape, monkeypatch):
    """The experiment of a config, on black images of a set's classes and shape."""
    labels = (np.arange(30 * num_classes) % num_classes).astype(np.int32)

    @functools.wraps(SOURCES[config.data.name])  # which has the keys that it must have
    def stand_in(*args, **settings):
        del args, settings
        read = lambda rows: np.zeros((len(rows), *shape), np.uint8)
        names = tuple(str(c) for c in range(num_classes))
        is_test = np.arange(len(labels)) >= 20 * num_classes
        return Source(read, labels, names, shape, is_test=is_test)

    monkeypatch.setitem(SOURCES, config.data.name, stand_in)
    return build(config)


@pytest.mark.parametrize("data", comparison.DATA)
def test_every_row_of_the_comparison_is_built_on_each_of_its_sets(data, monkeypatch):
    config = comparison.get_config(data)
    experiment = built_on_black(config, *SETS[data], monkeypatch)
    assert {*experiment.stages} == {*config.methods}
    assert len(experiment.task.population.num_classes) == 20


@pytest.mark.parametrize("data, clients", [("mnist", 20), ("emnist", 100)])
def test_the_first_configs_of_a_newcomer_are_built_as_shipped(
    data, clients, monkeypatch
):
    config = load(find(f"classification/{data}"))
    experiment = built_on_black(config, *SETS[data], monkeypatch)
    assert len(experiment.task.population.num_classes) == clients
