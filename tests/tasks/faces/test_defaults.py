"""What a row gets that a config does not say, by value: the paper's or the code's."""

import inspect

from fedfr_jax.losses.binary import binary_branch
from fedfr_jax.parts import parse
from fedfr_jax.tasks.faces import evaluator
from fedfr_jax.tasks.faces.loss import COSFACE, Branch, BranchReader, MarginReader
from fedfr_jax.tasks.faces.methods import (
    DEFAULTS,
    METHODS,
    FaceTerms,
    build_face_adaptation,
)
from fedfr_jax.tasks.faces.methods import SGD as STEPS

SGD = {"momentum": 0.9, "weight_decay": 5e-4}
BRANCH = {"converter": "linear", "detach_branch": False}
EXPECTED = {
    FaceTerms: {
        **BRANCH,
        "use_public_data": True,
        "hard_negative_threshold": 0.4,
        "max_hard_negatives": 0,
        "contrastive_weight": 5.0,
        "contrastive_temperature": 0.5,
        "branch": "bce",
        "branch_reweighting": None,
        "initial_previous_model": "global",
        "hard_negative_level": "image",
        "init_head_from_class_means": False,
        "spreadout": None,
        "adaptation": None,
    },
    binary_branch: {
        "class_mask": None,
        "scale": 30.0,
        "margin": 0.4,
        "t": 3.0,
        "positive_weight": 0.7,
    },
    build_face_adaptation: {
        **SGD,
        "loss": COSFACE,
        "kind": "finetune",
        "learning_rate": 1e-3,
        "alpha": 0.95,
        "temperature": 6.0,
        "weight": 9.0,
    },
}


def defaults(function):
    empty = inspect.Parameter.empty
    given = inspect.signature(function).parameters.items()
    return {name: p.default for name, p in given if p.default is not empty}


def test_every_default_has_the_value_of_the_paper_or_of_the_released_code():
    wrong = [
        f"{function.__name__}: {known} instead of {expected}"
        for function, expected in EXPECTED.items()
        if (known := defaults(function)) != expected
    ]
    assert not wrong, "\n".join(wrong)
    assert STEPS == SGD
    assert DEFAULTS == {
        "learning_rate": 1e-3,
        "decay_epochs": (8, 6, 4, 3),  # 0.75 of the epochs of each round
    }
    cosface = {"name": "cosface", "scale": 30.0, "margin": 0.4}
    assert parse(MarginReader(), "").section == COSFACE.section == cosface
    assert parse(BranchReader(), "bce") == Branch("bce", 10.0, {})
    moon = METHODS.algorithm.terms["contrastive_loss"]
    assert moon.keywords == {"contrastive_weight": 5.0}
    assert evaluator.MAX_PAIRS == 6000  # of LFW's protocol
