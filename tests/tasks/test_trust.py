"""Attackers and checks of updates by the keys of a config."""

import jax
import pytest

from fedfr_jax.config.build import build
from fedfr_jax.tasks import trainers
from tests.tasks.test_numerics import config as faces_config
from tests.tasks.test_privacy import config_of


def algorithm_of(**method):
    config = config_of(cohort_size=5)
    config["methods"]["row"] |= method
    return build(config).stages["row"].trainer.algorithm


ALIE = {"name": "alie", "share": 0.4, "tau": 1.0}


def test_a_methods_keys_are_attackers_around_its_rule_and_checks_around_all():
    algorithm = algorithm_of(attack=ALIE, aggregation="median", on_bad_update="stop")
    assert algorithm.min_kept == 1 and algorithm.aggregator.role == "last"
    given = {"name": "exclude", "max_norm": 10.0, "min_kept": 0.75}
    assert algorithm_of(on_bad_update=given).min_kept == 0.75
    plain = algorithm_of()
    assert plain.min_kept == 0 and plain.aggregator.role == "mean"


@pytest.mark.parametrize(
    "method, words",
    [
        ({"attack": {**ALIE, "tow": 1}}, r"methods.row.attack must have keys .*'tow'"),
        ({"attack": {"name": "alie"}}, r"methods.row.attack needs the key share"),
        ({"attack": {**ALIE, "name": "alia"}}, r"attack.name must .*did you mean alie"),
        ({"attack": {**ALIE, "share": 1.5}}, r"attack.share must be in \[0, 1\)"),
        (
            {"attack": ALIE, "aggregation": {"name": "krum"}},
            "attack.share must be at most 0.2 .* it tolerates 1",
        ),
        (
            {"aggregation": {"name": "quantize", "levels": 2**30}},
            "cohort_size must be at most 3 .* overflow 32 bits",
        ),
        ({"aggregation": {"name": "quantize", "range": 0}}, "range must be positive"),
        ({"on_bad_update": "ignore"}, "on_bad_update.name must be one of .*'ignore'"),
        (
            {"on_bad_update": {"name": "stop", "norm": 1}},
            "on_bad_update must have keys",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_compiled(method, words):
    with pytest.raises(ValueError, match=words):
        algorithm_of(**method)


@pytest.mark.parametrize("task", ["faces", "classification"])
def test_attackers_are_drawn_by_the_configs_seed(task, monkeypatch):
    seeds = []

    def attacked(algorithm, attack, *, seed, **others):
        seeds.append(seed)
        return algorithm

    monkeypatch.setattr(trainers, "with_attack", attacked)
    config = config_of() if task == "classification" else faces_config(task)
    attack = {"name": "sign_flip", "share": 0.5}
    for given in ({}, {"seed": 3}):
        config["methods"]["row"]["attack"] = {**attack, **given}
        with jax.numpy_dtype_promotion("standard"):
            build({**config, "seed": 7})
    assert seeds == [7, 3]
