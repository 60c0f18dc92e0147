"""Attackers and checks of updates by the keys of a config."""

import jax
import pytest

from fedfr_jax.config.build import build
from fedfr_jax.tasks import trainers
from tests.tasks.test_privacy import config_of
from tests.tasks.tiny import config


def algorithm_of(**method):
    given = config_of(cohort_size=5)
    given["methods"]["row"] |= method
    return build(given).stages["row"].trainer.algorithm


ALIE = {"name": "alie", "share": 0.4, "tau": 1.0}


def test_a_methods_keys_are_attackers_around_its_rule_and_checks_around_all():
    algorithm = algorithm_of(attack=ALIE, aggregation="median", on_bad_update="stop")
    assert algorithm.min_kept == 1 and algorithm.aggregator.role == "last"
    given = {"name": "exclude", "max_norm": 10.0, "min_kept": 0.75}
    assert algorithm_of(on_bad_update=given).min_kept == 0.75
    plain = algorithm_of()
    assert plain.min_kept == 0 and plain.aggregator.role == "mean"


@pytest.mark.parametrize("task", ["faces", "classification"])
def test_attackers_are_drawn_by_the_configs_seed(task, monkeypatch):
    seeds = []

    def attacked(algorithm, attack, *, seed, **others):
        seeds.append(seed)
        return algorithm

    monkeypatch.setattr(trainers, "with_attack", attacked)
    attack = {"name": "sign_flip", "share": 0.5}
    for given in ({}, {"seed": 3}):
        settings = config(task, {"algorithm": "fedavg", "attack": {**attack, **given}})
        with jax.numpy_dtype_promotion("standard"):
            build({**settings, "seed": 7})
    assert seeds == [7, 3]
