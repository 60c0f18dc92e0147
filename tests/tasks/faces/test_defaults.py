"""What a row gets that a config does not say, by value: the paper's or the code's."""

import inspect

from fedfr_jax.configs.fedfr import demo, ms1m_40x100

from fedfr_jax.central.settings import Training
from fedfr_jax.configs import base
from fedfr_jax.data.partition.identities import ms1m
from fedfr_jax.federated.settings import Federation
from fedfr_jax.losses.binary import binary_branch
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.margin_losses import arcface, cosface
from fedfr_jax.losses.spreadout import spread, spreadout_sum
from fedfr_jax.tasks.faces import evaluator
from fedfr_jax.tasks.faces.evaluator import FaceEvaluator
from fedfr_jax.tasks.faces.loss import branch_settings, face_loss, margin_settings
from fedfr_jax.tasks.faces.methods import (
    DEFAULTS,
    METHODS,
    FaceTerms,
    build_face_adaptation,
)
from fedfr_jax.tasks.faces.methods import SGD as STEPS
from tests.tasks.faces.given import nested

SGD = {"momentum": 0.9, "weight_decay": 5e-4}
COSFACE = {"name": "cosface", "scale": 30.0, "margin": 0.4}
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
    face_loss: {
        **BRANCH,
        "loss": "cosface",
        "contrastive_weight": 0.0,
        "contrastive_temperature": 0.5,
        "branch": None,
        "branch_reweighting": None,
        "num_clients": 0,
        "interclass_filtering_threshold": None,
    },
    binary_branch: {
        "class_mask": None,
        "scale": 30.0,
        "margin": 0.4,
        "t": 3.0,
        "positive_weight": 0.7,
    },
    model_contrastive: {"temperature": 0.5},
    cosface: {"scale": 64.0, "margin": 0.4},  # the class defaults of insightface
    arcface: {"scale": 64.0, "margin": 0.5},
    spreadout_sum: {"margin": 0.4, "class_mask": None},
    spread: {
        **SGD,
        "steps": 20,
        "learning_rate": 0.01,
        "margin": 0.4,
        "class_mask": None,
    },
    build_face_adaptation: {
        **SGD,
        "loss": "cosface",
        "kind": "finetune",
        "learning_rate": 1e-3,
        "alpha": 0.95,
        "temperature": 6.0,
        "weight": 9.0,
    },
    ms1m: {
        "num_clients": 40,
        "ids_per_client": 100,
        "num_public_ids": 6000,
        "num_unseen_ids": 0,
        "num_test_images": 40,
        "client_images": (100, 110),
        "public_images": (60, 80),
        "seed": 100,
    },
    Training: {
        "epochs": 16,
        "batch_size": 64,
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "warmup_fraction": 0.05,
        "warmup_start_factor": 0.0,
        "milestones": (),
        "schedule_unit": "step",
        "weight_decay": 5e-4,
        "learning_rate_multipliers": None,
        "clip_norm": 0.0,
        "loss": "",
        "interclass_filtering_threshold": None,
        "flip_probability": 0.5,
        "augment": (),
        "checkpoint_every": 1,
        "base_batch_size": 0,
        "gradient_accumulation_steps": 1,
        "sync_batch_norm": False,
        "sharding": (),
        "reduce_dtype": None,
        "class_parallel": False,
        "class_chunk_size": 0,
        "class_dtype": None,
        "class_sample_rate": 1.0,
        "init": None,
        "frozen": "",
        "distill": None,
        "gate_weight": 1.0,
    },
    Federation: {
        "rounds": 20,
        "cohort_size": 0,
        "sampling": "shuffle",
        "systems": {},
        "local_epochs": (10, 8, 6, 4),  # E <- max(4, E - 2)
        "straggler_fraction": 0.0,
        "drop_stragglers": False,
        "batch_size": 64,
        "drop_last": False,
        "flip_probability": 0.5,
        "augment": (),
        "clients_per_device": 1,
        "steps_per_loop": "auto",
        "reproducible_sum": False,
        "num_partial_sums": 8,
        "model_shards": 1,
        "rounds_per_call": 1,
        "evaluate_every": 0,
        "checkpoint_every": 1,
        "data_placement": "auto",
        "stream_buffer_gib": 1.0,
    },
}
SHARED = {"learning_rate": 2e-3}
FEDAVG = {"use_public_data": False, "contrastive_weight": 0.0, "branch": None}
ADAPT = {"epochs": 5}
ROWS = {
    "local": {**SHARED, **FEDAVG, "personal": "."},
    "fedavg": {**SHARED, **FEDAVG},
    "fedface": {
        **{**SHARED, **FEDAVG, "loss": {"name": "class_hinge", "margin": 0.1}},
        **{
            "init_head_from_class_means": True,
            "spreadout": {"threshold": 0.3, "steps": 10},
        },
    },
    "spreadout": {**SHARED, **FEDAVG, "spreadout": 0.4},
    "local_equal": {**SHARED, **FEDAVG, "personal": ".", "local_epochs": (6, 5)},
    "fedavg_equal": {**SHARED, **FEDAVG, "local_epochs": (6, 5)},
    "local_negatives": {
        **{**SHARED, "contrastive_weight": 0.0, "branch": None},
        "public_classes_update": "frozen",
        "personal": "^(?!params/phi)",
    },
    "branch_only": {**SHARED, "use_public_data": False, "contrastive_weight": 0.0},
    "no_images": {**SHARED, "use_public_data": False},
    "no_contrastive": {**SHARED, "contrastive_weight": 0.0},
    "moon": {**SHARED, "use_public_data": False, "branch": None},
    "hard_negatives": {**SHARED, "contrastive_weight": 0.0, "branch": None},
    "contrastive": {**SHARED, "branch": None},
    "finetune": {**SHARED, "branch": None, "adaptation": {**ADAPT, "kind": "finetune"}},
    "distill": {**SHARED, "branch": None, "adaptation": {**ADAPT, "kind": "distill"}},
    "cosface_branch": {**SHARED, "branch": {"name": "cosface", "weight": 1.0}},
    "fedfr": SHARED,
    "central": {"kind": "central", "epochs": 3},
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
    assert margin_settings("") == COSFACE
    assert branch_settings("bce") == {"name": "bce", "weight": 10.0}
    moon = METHODS.algorithm.terms["contrastive_loss"]
    assert moon.keywords == {"contrastive_weight": 5.0}
    assert evaluator.MAX_PAIRS == 6000  # of LFW's protocol


def test_every_row_of_the_tables_switches_what_its_name_says():
    settings = {"equal_epochs": (6, 5), "central": {"epochs": 3}, **SHARED}
    made = base.table_rows(ADAPT, terms={}, **settings)
    assert made == {
        name: row if "kind" in row else nested(row) for name, row in ROWS.items()
    }
    assert base.FEDAVG == nested(FEDAVG) and base.FEDFR == {"algorithm": "fedfr"}


def test_the_rates_that_are_judged_suit_sets_of_some_thousand_images():
    judged = defaults(FaceEvaluator)
    assert (judged["fars"], judged["fpirs"]) == ((1e-3, 1e-2), (1e-2, 1e-1))
    assert judged["client_thresholds"] == "exact"


PAPER = {
    "seed": 100,
    "partition": {"name": "ms1m", "num_unseen_ids": 500},
    "model": {"name": "sphereface", "depth": 64, "embedding_dim": 512},
    "pretrain": {
        "epochs": 16,
        "batch_size": 256,
        "learning_rate": 0.05 * 256 / 512,
        "milestones": (5 / 16, 13 / 16),  # before the 0-based epochs 5 and 13
    },
    "federation": {
        "rounds": 20,
        "local_epochs": (10, 8, 6, 4),
        "batch_size": 256,
        "drop_last": True,
    },
    "evaluation": {"fars": (1e-6, 1e-5, 1e-4), "fpirs": (1e-5, 1e-4)},
}
PAPER_ROW = {
    "learning_rate": 1e-3,
    "decay_epochs": (8, 6, 4, 3),
    "hard_negative_threshold": 0.4,
    "contrastive_weight": 5.0,
}
RATE = {"learning_rate": 1e-3, "decay_epochs": (3, 3, 2)}
DEMO = {
    "partition": {
        "num_clients": 10,
        "ids_per_client": 10,
        "num_public_ids": 200,
        "num_unseen_ids": 60,
    },
    "pretrain": {"epochs": 6, "learning_rate": 2e-3, "optimizer": "adam"},
    "federation": {
        "rounds": 6,
        "local_epochs": (4, 4, 3),
        "batch_size": 32,
        "evaluate_every": 1,
    },
    "methods": {
        "fedavg": nested({**RATE, **FEDAVG}),
        "fedfr": nested(
            {**RATE, "hard_negative_threshold": 0.5, "max_hard_negatives": 120}
        ),
    },
}


def test_the_papers_config_and_the_demo_by_value():
    config = ms1m_40x100.get_config().to_dict()
    assert {key: config[key] for key in PAPER} == PAPER
    rows = config["methods"]
    assert rows["fedfr"] == nested(PAPER_ROW)
    assert rows["fedavg"] == nested({**PAPER_ROW, **FEDAVG})
    assert rows["fedavg_equal"]["local_epochs"] == (15, 12, 9, 6)
    assert rows["cosface_branch"]["algorithm"]["branch"]["weight"] == 1.0
    assert rows["finetune"]["algorithm"]["adaptation"] == {
        **ADAPT,
        "learning_rate": 1e-3,
        "kind": "finetune",
    }
    assert rows["central"] == {"kind": "central"}
    config = demo.get_config().to_dict()
    assert {key: config[key] for key in DEMO} == DEMO
