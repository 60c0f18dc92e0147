"""Every config under configs/: how it is run, what came out, and what papers say."""

import ast
import pathlib
import re

import jax
import pytest

from fedfr_jax.config.build import plain
from fedfr_jax.config.files import find, load
from fedfr_jax.models import MODELS
from fedfr_jax.scanned_blocks import by_block_name

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
