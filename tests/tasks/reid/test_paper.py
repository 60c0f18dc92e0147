"""configs/fedreid/paper.py is FedReID at the size and with the rules that it states.

Zhuang et al., arXiv:2205.12144 (table 1, section 4) and the released code.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.config.build import plain
from fedfr_jax.config.files import find, load
from fedfr_jax.federated.algorithms.fedreid import kd
from fedfr_jax.models import MODELS
from fedfr_jax.parts import parse
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.methods import LOCAL
from fedfr_jax.tasks.reid.evaluator import EvaluationConfig
from fedfr_jax.tasks.trainers import build_local

SETS = "msmt17 duke market cuhk03 prid2011 cuhk01 viper 3dpes ilids"
TRAINING = "learning_rate learning_rate_multipliers optimizer weight_decay".split()


@pytest.fixture(scope="module")
def config():
    return plain(load(find("fedreid/paper")))


def defaults(function):
    """Default of every keyword argument."""
    return {k: v.default for k, v in keywords(function).items()}


def test_clients_are_the_nine_sets_for_300_rounds_of_an_epoch(config):
    assert sorted(config["data"]["sources"]) == sorted(SETS.split())
    assert config["partition"]["name"] == "by_dataset"
    assert "cuhk02" in str(config["partition"]["public"]["source"]["path"])
    federation = config["federation"]
    wanted = {"rounds": 300, "local_epochs": 1, "batch_size": 32, "drop_last": True}
    assert wanted.items() <= federation.items()
    assert federation["evaluate_every"] == 10 and not federation.get("cohort_size")
    assert dict(federation["augment"][0]) == {"name": "pad_and_crop", "padding": 10}


def test_the_network_is_resnet_50_with_a_neck_of_512_and_only_a_classifier_of_ones_own(
    config,
):
    settings = {
        k: v for k, v in config["model"].items() if k not in ("name", "weights")
    }
    model = MODELS["reid"]((256, 128, 3), num_classes=1041, **settings)
    shapes = jax.eval_shape(model.init, jax.random.key(0))["params"]
    assert shapes["classifier"]["kernel"].shape == (512, 1041)
    assert shapes["neck"]["fc"]["kernel"].shape == (2048, 512)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    trunk = {k: v for k, v in shapes.items() if k not in ("neck", "classifier")}
    assert count(trunk) == 23_508_032  # torchvision's resnet50 without its fc
    assert defaults(MODELS["reid"])["dropout"] == 0.5
    assert defaults(MODELS["reid"])["last_stride"] == 2
    shared = [r for r in config["methods"].values() if "kind" not in r]
    assert sum(row.get("personal") == "." for row in shared) == 1  # standalone


@pytest.mark.parametrize("round", [0, 39, 40, 299])
def test_rates_are_a_tenth_below_the_neck_and_never_decay(config, round):
    """The released scheduler is made anew every round and never comes to step 40."""
    row = {key: config["methods"]["fedpav"][key] for key in TRAINING}
    local = build_local(parse(LOCAL, row), lambda *_: 0.0)
    names = ("stem", "stage4", "neck", "classifier")
    params = {name: {"kernel": jnp.array([2.0])} for name in names}
    gradient = jax.tree.map(lambda x: jnp.array([3.0]), params)
    optimizer = local.optimizer(local.learning_rate(round, 0))
    state, moved, velocity = optimizer.init(params), 2.0, 0.0
    for _ in range(2):
        steps, state = optimizer.update(gradient, state, params)
        slope = 3.0 + 5e-4 * moved  # PyTorch's SGD with Nesterov's momentum
        velocity = 0.9 * velocity + slope
        for name, rate in zip(names, (0.005, 0.005, 0.05, 0.05), strict=True):
            step = steps[name]["kernel"][0]
            np.testing.assert_allclose(step, -rate * (slope + 0.9 * velocity), 1e-5)
    assert "decay_epochs" not in config["methods"]["fedpav"]
    assert (
        config["methods"]["merged"]["learning_rate_multipliers"]
        == row["learning_rate_multipliers"]
    )


def test_what_the_released_code_does_otherwise_than_the_text_is_set(config):
    rows, evaluation = config["methods"], dict(config["evaluation"])
    clients = {name: row for name, row in rows.items() if "kind" not in row}
    assert {row["batch_stats"] for row in clients.values()} == {"random_client"}
    made = {**defaults(kd), **rows["kd"]["algorithm"]}
    assert (
        made["distill_every"],
        made["distill_learning_rate"],
        made["normalize"],
    ) == (10, 5e-4, True)
    assert (made["distill_momentum"], made["distill_weight_decay"]) == (0.9, 5e-4)
    assert rows["kd_cdw"]["algorithm"]["weighting"] == "distance"
    after = evaluation.pop("local_training")
    assert dict(after).items() <= dict(rows["fedpav"]).items()
    judged = parse(EvaluationConfig, evaluation)
    assert judged.flip_test and judged.ranks == (1, 5, 10)
    assert (judged.average_precision, judged.average_over) == ("official", "all")
