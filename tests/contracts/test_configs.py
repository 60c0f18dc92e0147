"""Every config under configs/ has keys that its functions know."""

import ast
import pathlib
import re
import runpy

import jax
import pytest

from fedfr_jax.central.settings import Training
from fedfr_jax.config.build import SECTIONS, plain
from fedfr_jax.config.files import find, load
from fedfr_jax.data.augment import build_augment
from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.settings import Federation
from fedfr_jax.models import MODELS
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.schema import check_settings, keywords, kinds_of
from fedfr_jax.tasks.classification.loss import class_pull, cross_entropy
from fedfr_jax.tasks.contrastive import with_contrastive_loss
from fedfr_jax.tasks.faces import methods as faces
from fedfr_jax.tasks.faces.evaluator import FaceEvaluator
from fedfr_jax.tasks.faces.loss import build_rule
from fedfr_jax.tasks.method_algorithm import NESTED
from fedfr_jax.tasks.methods import LOCAL_KEYS, Method, named
from fedfr_jax.tasks.reid.data import SCENARIOS
from fedfr_jax.tasks.reid.evaluator import EvaluationConfig as Retrieving
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.tasks.reid.public_data import PublicDataConfig
from fedfr_jax.tasks.segmentation.loss import pixel_cross_entropy
from fedfr_jax.tasks.segmentation.stages import EvaluationConfig
from fedfr_jax.tasks.task_methods import FACE_ONLY_KEYS

KEY = jax.random.key(0)
ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if p.stem != "base")


def check(function, settings, what):
    check_settings(what, settings, kinds_of(function))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_configures_functions_that_exist(path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    module = runpy.run_path(str(path))
    for word in module.get("DATA") or (None,):
        check_config(module, *(word,) if word else ())
    assert "--config=" + str(path.relative_to(ROOT)) in module["__doc__"]


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


def check_config(module, *given):
    config = plain(module["get_config"](*given))
    assert set(config) <= set(SECTIONS)
    is_reid = config.get("task") == "reid"
    partitions = SCENARIOS if is_reid else PARTITIONS
    named = [("data", SOURCES), ("model", MODELS), ("partition", partitions)]
    for section, family in named:
        settings = dict(config[section])
        if is_reid:  # sections of the task's own
            check(PublicDataConfig, settings.pop("public", {}), "partition.public")
            settings.pop("weights", None)
        name = settings.pop("name", "by_identity")
        # Names of sources, of which the task makes a mask.
        settings = {k: x for k, x in settings.items() if not k.endswith("ids_from")}
        check(family[name], settings, f"{section}.{name}")
    check(Federation, config["federation"], "federation")
    for augment in augments_of(config):
        build_augment(augment)
    of_task = {
        "faces": check_faces,
        "classification": check_classification,
        "reid": check_reid,
        "segmentation": check_segmentation,
    }
    of_task[config.get("task", "faces")](config)


def augments_of(settings):
    """What keys called `augment` have, anywhere in a config."""
    if not isinstance(settings, dict):
        return []
    below = [x for value in settings.values() for x in augments_of(value)]
    return [settings["augment"], *below] if settings.get("augment") else below


def check_faces(config):
    check(Training, config["pretrain"], "pretrain")
    build_rule(config["pretrain"].get("loss", ""))
    check(FaceEvaluator, config["evaluation"], "evaluation")
    for name, options in config["methods"].items():
        build_rule(options.get("loss", ""))
        if options.get("kind") == "central":
            check(Training, {k: v for k, v in options.items() if k != "kind"}, name)
            continue
        check_below(name, check_method(name, options, "fedfr"), faces.FaceTerms._fields)


def check_method(name, options, default):
    """What a method says of its algorithm, {"name": ..., settings}."""
    check(Method, options, name)
    return named(options.get("algorithm", ""), default)


def check_central(name, options, loss, *others):
    """A central method of another task than faces; `loss` is the task's own."""
    settings = {k: v for k, v in options.items() if k not in ("kind", *others)}
    assert not settings.keys() & {*FACE_ONLY_KEYS}, name
    check(Training, settings, name)
    check_loss(name, options, loss)


def check_loss(name, options, loss):
    settings = named(options.get("loss", ""), "own")
    if settings.pop("name") == "own":
        kinds = {k: p.annotation for k, p in keywords(loss).items()}
        check_settings(f"{name}.loss", settings, kinds)


def check_below(name, algorithm, others=()):
    """The algorithm's own keys, and those of the loss or term that it needs."""
    function, others = ALGORITHMS[algorithm["name"]], {*others}
    if algorithm["name"] == "moon":
        others |= {*keywords(with_contrastive_loss)}
    if algorithm["name"] == "fedaws":
        others |= {*keywords(class_pull)}
    assert set(algorithm) <= {"name", *keywords(function), *others}, name
    settings = {k: v for k, v in algorithm.items() if k in keywords(function)}
    for key, family in NESTED.items():
        if key in settings:
            of = dict(settings.pop(key))
            check(family[of.pop("name")], of, f"{name}.{key}")
    check(function, settings, name)


def check_classification(config):
    assert not config["pretrain"]
    check_methods(config, cross_entropy)


def check_segmentation(config):
    assert not config["pretrain"]
    check(EvaluationConfig, config["evaluation"], "evaluation")
    check_methods(config, pixel_cross_entropy)


def check_methods(config, loss, *others):
    for name, options in config["methods"].items():
        if options.get("kind") == "central":
            check_central(name, options, loss, *others)
        else:
            check_loss(name, options, loss)
            check_below(name, check_method(name, options, "fedavg"))


def check_reid(config):
    assert not config["pretrain"]
    evaluation = dict(config["evaluation"])
    known = {"epochs", "loss", "identities_per_batch", *LOCAL_KEYS}
    assert set(evaluation.pop("local_training", {})) <= known
    check(Retrieving, evaluation, "evaluation")
    check_methods(config, reid_loss, "identities_per_batch")
