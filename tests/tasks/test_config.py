"""A mistake in a config is an error of one line, most of them before data is opened."""

import re
import runpy

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedfr_jax.central.settings import Training
from fedfr_jax.config.build import build, sections
from fedfr_jax.config.files import load, shipped
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.tasks import TASKS
from fedfr_jax.tasks.experiment import parse_config
from tests.contracts.rows import FACTS, required, rows_of
from tests.tasks import tiny

# Each is (keys of a method, words); that of a config begins with "config.methods.x".
EVERYWHERE = [
    ({"learning_rat": 0.1}, r" must have .*mean learning_rate\?"),
    ({"learning_rate": "fast"}, ".learning_rate must be a finite"),
    ({"kind": "centrl"}, ".kind must be one of"),
    ({"kind": "central", "batch_sise": 1}, r".*\(did you mean batch_size\?\)"),
    ({"kind": "central", "loss": {"margn": 1}}, ".*'margn'"),
    ({"algorithm": "fedprx"}, r".algorithm.name must .*mean fedprox\?"),
    ({"algorithm": {"name": None}}, ".algorithm.name must be one of .*got None"),
    ({"algorithm": "fedavgm"}, ".algorithm .* describe variants fedavgm"),
    ({"algorithm": {"name": "fedprox", "mu": "x"}}, ".algorithm.mu must be a finite"),
    ({"algorithm": {"name": "fedprox", "m": 0.1}}, ".algorithm needs the key mu"),
    (
        {"algorithm": "fedprox", "mu": 0.1},
        r".*\(a key of the algorithm: algorithm.mu\)",
    ),
    (
        {"algorithm": {"server_optimizer": {"name": "fedavgm", "rate": 1.0}}},
        ".*server_optimizer|.*'server_optimizer'",
    ),
    ({"loss": "nosuch"}, ".*loss.* must be .*'nosuch'"),
    ({"loss": {"margn": 0.4}}, ".*loss must have keys .*'margn'"),
    ({"optimizer": "adm"}, ".optimizer must be the name"),
    ({"optimizer": "apply_updates"}, ".optimizer must be the name"),
    ({"optimizer": {"name": "adam", "b3": 1}}, ".optimizer must have keys of .*'b1'"),
    ({"optimizer": {"name": "sgd", "momentun": 0.9}}, ".*mean momentum"),
    (
        {"optimizer": "adamw", "momentum": 0.0, "weight_decay": 0.1},
        ": weight_decay must be set inside `optimizer` for adamw",
    ),
    ({"personal": 2}, ".personal must be a regular expression or a mapping .*got 2"),
    ({"personal": {}}, ".personal: leaves must have exactly one key of"),
    ({"personal": {"blocks": 1, "batch_norms": True}}, ".personal: leaves must have"),
    ({"personal": {"block": 1}}, r".personal must have .*mean blocks\?"),
    ({"personal": {"blocks": True}}, ".personal.blocks must be a whole .*got True"),
    ({"personal": "fc("}, r".personal must be a reg.*'fc\(': missing"),
    ({"learning_rate_multipliers": {"(": 1.0}}, ".*of regular expressions to"),
    ({"frozen": {"batch_norms": True}}, ": frozen must select blocks or leaves"),
    ({"kind": "central", "frozen": "("}, ".frozen must be a regular expression"),
    ({"batch_stats": "frozen"}, ".batch_stats must be one of .*'frozen'"),
    ({"local_epochs": ()}, ".local_epochs must have an entry"),
    ({"aggregation": "medan"}, r".aggregation.name must .*mean median\?"),
    ({"aggregation": ("median", "mean")}, r".aggregation\[1\].name must be one of"),
    ({"aggregation": 3}, ".aggregation must be a text or a mapping or a list, got 3"),
    ({"attack": {"name": "signflip", "share": 0.1}}, ".attack.name must be one of"),
    ({"attack": {"name": "alie"}}, ".attack needs the key share"),
    ({"attack": {"name": "alie", "share": 0.1, "tow": 1}}, ".attack must have keys .*"),
    ({"on_bad_update": "skip"}, ".on_bad_update.name must be one of"),
    ({"on_bad_update": {"name": "stop", "norm": 1}}, ".on_bad_update must have keys"),
    ({"privacy": {"clip": 1.0}}, r".privacy must have .*mean clip_norm\?"),
    ({"privacy": {"clip_norm": 1.0, "delta": 1e-2}}, ".*epsilon or noise_multiplier"),
    (
        {"init_per_client": True, "personal": ""},
        "(: init_per_client needs personal|.*batch_stats)",
    ),
    (
        {"personal": "fc", "personal_epochs": 1, "algorithm": "scaffold"},
        ": personal_epochs needs the algorithm fedavg, got 'scaffold'",
    ),
]
FEDFR = {"name": "fedfr", "branch": None}
OF_A_TASK = {
    "faces": [
        ({"use_public_data": 1}, r".*\(a key of the algorithm: algorithm.use_pub"),
        ({"loss": {"name": "cosface", "t": 1}}, ".*loss must have keys of"),
        ({"loss": {"name": "adaface", "h": 0.0}}, ".*h must be positive"),
        ({"loss": {"name": "magface", "max_norm": 10.0}}, ".*max_norm must be above"),
        ({"loss": "adaptive"}, ".*loss.name must be one of .*, got 'adaptive'"),
        ({"loss": {"margin": -0.4}}, ".loss.margin must be at least 0, got -0.4"),
        ({"algorithm": {"branch": {"scal": 1}}}, r".*mean scale\?"),
        ({"algorithm": {"branch": "bec"}}, r".*branch.name must .*mean bce\?"),
        ({"algorithm": {"branch": {"weight": -10}}}, ".*weight must be at least 0"),
        ({"algorithm": {"branch": {"t": 0.5}}}, ".*t must be at least 1, got 0.5"),
        ({"loss": "adaface", "algorithm": {"branch": "cosface"}}, ".*a softmax"),
        (
            {"loss": "uniface", "algorithm": {"branch_reweighting": "corrected"}},
            ".*loss must be a softmax",
        ),
        ({"algorithm": {"hard_negative_level": "pixel"}}, ".*_level must be one"),
        ({"algorithm": {"spreadout": {"steps": 1}}}, ".*needs the key threshold"),
        ({"algorithm": {"spreadout": 2.0}}, ".*spreadout must be in .-1, 1., got"),
        ({"algorithm": {"adaptation": {}}}, ".*None with adaptation"),
        ({"algorithm": {**FEDFR, "adaptation": {"epoch": 1}}}, ".*got 'epoch'"),
        ({"algorithm": {**FEDFR, "adaptation": {"kind": "x"}}}, ".*kind must be"),
        (
            {"algorithm": {**FEDFR, "adaptation": {"loss": "adaface"}}},
            ".*adaptation.loss must be a softmax",
        ),
        (
            {"algorithm": {**FEDFR, "adaptation": {}}, "batch_stats": "local"},
            ": batch_stats must be average or random_client",
        ),
        ({"distill": {"weight": 1.0}}, ".distill: teacher or cache must be set"),
        ({"distill": {"teacher": {"file": "t"}}}, ".distill.teacher must have"),
        ({"kind": "central", "distill": {"wight": 1.0}}, r".*mean weight\?"),
    ],
    "classification": [
        ({"loss": "arcface"}, ".*a loss on logits, got 'arcface'"),
        ({"loss": {"label_smoothing": 1.0}}, r".*smoothing must .*\[0, 1\)"),
        ({"loss": {"class_weights": [1.0]}}, ".*'class_weights'"),
        ({"distill": {}}, " must have .*'distill'"),
        ({"kind": "central", "gate_weight": 2.0}, ".*got 'gate_weight'"),
        (
            {"algorithm": {"name": "fedavg", "contrastive_weight": 1.0}},
            ".*must have keys of .*contrastive_weight",
        ),
        (
            {"algorithm": {"name": "moon", "contrastive_temperature": 0.0}},
            ".*contrastive_temperature must be positive",
        ),
    ],
    "segmentation": [
        ({"loss": {"class_weights": "a"}}, ".loss.class_weights must be"),
        ({"loss": {"label_smoothing": 0.1}}, ".*'label_smoothing'"),
    ],
    "reid": [
        ({"loss": "arcface"}, ".*settings of the task's only loss"),
        ({"loss": {"triplet_metric": "l1"}}, ".*triplet_metric must be one of"),
        ({"identities_per_batch": 1.5}, ".identities_per_batch must be a whole"),
    ],
}
KD = {"partition": {"name": "by_camera", "public": {"max_images": 3}}}
OF_A_SECTION = {
    "faces": [
        ({"evaluation": {"fars": (1e-3, 1.5)}}, "evaluation.fars must be"),
        ({"pretrain": {"gate_weight": -1.0}}, "pretrain.gate_weight must"),
        ({"pretrain": {"optimizer": "larc"}}, "pretrain.optimizer must be one of"),
        (
            {"pretrain": {"sharding": (("kernel", "zero4"),)}},
            "pretrain.sharding must be .*zero4",
        ),
        (
            {"pretrain": {"class_sample_rate": (0.1, 0.0)}},
            "pretrain.class_sample_rate must be in",
        ),
    ],
    "classification": [
        ({"federation": {"augment": ("blur",)}}, r"federation.augment\["),
        (
            {"evaluation": {"finetune": {"epochs": 0, "learning_rate": 0.1}}},
            "evaluation.finetune.epochs must be at least 1, got 0",
        ),
        (
            {"evaluation": {"finetune": {}}},
            "evaluation.finetune needs the key learning_rate",
        ),
        (
            {"evaluation": {"representation": {"max_images": 2.5}}},
            "evaluation.representation.max_images must be a whole number, got 2.5",
        ),
        ({"model": {"projection": 0}}, "model.projection must be in"),
        (
            {"model": {"name": "resnet", "dtype": "int8"}},
            "model.dtype must be None or the name of a floating dtype, got 'int8'",
        ),
    ],
    "segmentation": [],
    "reid": [
        ({"evaluation": {"ranks": ()}}, "evaluation.ranks must have an entry"),
        ({"evaluation": {"rerank": {"k3": 1}}}, "evaluation.rerank must have keys"),
        (
            {"evaluation": {"local_training": "x"}},
            "evaluation.local_training must be a mapping or none, got 'x'",
        ),
        (KD, "partition.public must have a fraction or a source"),
        ({"partition": {"name": "by_cam"}}, "partition.name must be one of"),
    ],
}
SECTIONS = ("data", "partition", "model", "federation", "evaluation", "pretrain")


@pytest.fixture
def unopened(monkeypatch):
    """The config of a task whose data must not be opened."""

    def opened():
        raise AssertionError("the data was opened")

    monkeypatch.setitem(SOURCES, "unopened", opened)

    def make(task, method=None, **sections):
        return tiny.config(task, method, **{"data": {"name": "unopened"}, **sections})

    return make


def mistake(config) -> str:
    """The error of a config."""
    with (
        jax.numpy_dtype_promotion("standard"),  # which optax's optimizers need
        pytest.raises(ValueError) as error,
    ):
        build(config)
    return str(error.value)


def check(found) -> None:
    """Compare pairs (pattern, message)."""
    wrong = [pair for pair in found if not re.match(*pair, re.DOTALL)]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("task", tiny.TASKS)
def test_a_mistake_is_refused_before_the_data_is_opened(task, unopened):
    methods = [*EVERYWHERE, *OF_A_TASK[task]]
    found = [
        ("config.methods.x" + words, mistake(unopened(task, keys)))
        for keys, words in methods
    ]
    found += [
        (f"config.{words}", mistake(unopened(task, **keys)))
        for keys, words in OF_A_SECTION[task]
    ]
    for section in SECTIONS:
        name = {"name": "unopened"} if section == "data" else {}
        keys = {section: {**name, "nosuch": 1}}
        words = f"config.{section} must have .*'nosuch'"
        found.append((words, mistake(unopened(task, **keys))))
    check(found)


@pytest.mark.parametrize("task", tiny.TASKS)
def test_all_mistakes_of_a_config_are_reported_together(task, unopened):
    wrong = {"nosuch": 1, "number": 2}
    found = mistake(unopened(task, partition=wrong, pretrain=wrong)).splitlines()
    for section in ("partition", "pretrain"):
        for key in wrong:
            rule = f"^config.{section} must have .*got '{key}'"
            assert any(re.search(rule, line) for line in found), found
    assert len(found) == 4
    if task == "faces":
        pretrain = {"epochs": -1, "loss": "nosuch"}
        found = mistake(unopened(task, pretrain=pretrain)).splitlines()
        assert found[0].startswith("config.pretrain.epochs must be") and len(found) == 2
        assert "'nosuch'" in found[1]


# What only the data or the network tell: {task: (keys of a method, words)}.
FEDREP = {"name": "fedrep", "head": "params/classifier"}
PRIVATE = {"clip_norm": 0.5, "delta": 1e-2, "epsilon": 4.0}
CENTRAL = {"kind": "central"}
BUILT = {
    "classification": [
        ({"personal": {"blocks": 3}}, r".*blocks must be in \[0, 2\]"),
        ({"personal": {"all_but_blocks": 2}}, r".*be in \[1, 1\], got 2"),
        ({"personal": "conv1"}, ".*pattern must match a leaf.*'conv1'"),
        ({"personal": {"batch_norms": True}}, ".*must have batch norms"),
        ({"batch_stats": "local"}, ".*must have batch norms, got none"),
        ({"frozen": "fcc"}, ".*must match a leaf.*got 'fcc'"),
        ({"personal_epochs": 1}, ".*personal_epochs needs personal leav"),
        (
            {"optimizer": {"weight_decay": 0.1, "weight_decay_mask": "kernl"}},
            ".*must match a leaf.*got 'kernl'",
        ),
        ({"learning_rate_multipliers": {"stem": 0.1}}, ".*must match a leaf such as"),
        (
            {"algorithm": {"name": "fedrep", "head": ".", "head_epochs": 1}},
            ".*head must leave some params to the body, got '.'",
        ),
        (
            {"algorithm": {**FEDREP, "head_epochs": 5}, "local_epochs": (9, 3)},
            ".*head_epochs must be below the 3 local epochs of a round, .* got 5",
        ),
        ({"algorithm": "fedaws", "personal": {"blocks": 1}}, ".*a leaf"),
        ({"aggregation": ("median", "rfa")}, ".*must end with link 1"),
        ({"algorithm": "ifca", "aggregation": "median"}, ".*replace the m"),
        ({"algorithm": "ifca", "aggregation": "rfa"}, ".*with a center"),
        (
            {"aggregation": {"name": "krum", "num_malicious_clients": 5}},
            ": .*cohort_size must be at least 13 .* got 2",
        ),
        ({"privacy": {**PRIVATE, "delta": 0.9}}, ".*delta must be .* at most 1 / N"),
        ({**CENTRAL, "batch_size": 999}, ".batch_size must be at most"),
        ({**CENTRAL, "epochs": 0}, ".epochs must be at least 1, got 0"),
        (
            {**CENTRAL, "learning_rate_multipliers": {"stemm": 0.1}},
            ".learning_rate_multipliers: path pattern must match a leaf",
        ),
        (
            {**CENTRAL, "sharding": (("nosuch", "zero3"),)},
            ".sharding: path pattern must match a leaf.*got 'nosuch'",
        ),
        (
            {**CENTRAL, "sharding": ((".", "zero1"),), "gather_dtype": "bfloat16"},
            ".gather_dtype needs .*sharding with the rule zero2 or zero3, got 'bf",
        ),
        ({**CENTRAL, "frozen": "no"}, ".frozen: path .*match a leaf"),
    ],
    "segmentation": [
        ({"loss": {"class_weights": (1.0, 2.0)}}, ".*must have 3 entries"),
        (
            {**CENTRAL, "loss": {"class_weights": (0, 0, 0)}},
            ".*class_weights must .*not all 0",
        ),
    ],
    "reid": [
        ({"algorithm": "kd"}, ".*public data.*. Set config.partition.public"),
        (
            {"identities_per_batch": 3},
            ": identities_per_batch must be at least 2 and div",
        ),
    ],
}
OWNERS = {"name": "natural", "client_ids": [0] * 76 + [1] * 4, "num_clients": 1}
BUILT_OF_SECTIONS = {
    "classification": [
        (
            {"partition": {"name": "by_identity", **tiny.IDS}},
            "partition.name must be a partition by class, got 'by_identity'",
        ),
        ({"partition": {"name": "iid", "num_clients": 80}}, "partition must leave"),
        (
            {"partition": {"name": "iid", "num_clients": 3, "unseen_clients": 3}},
            r"partition: unseen_clients must be an integer in \[0, 3\), .*got 3",
        ),
        (
            {"model": {"name": "mlp", "num_classes": 7}},
            "model.num_classes must be the 10 classes of the data, got 7",
        ),
        (
            {"model": {"name": "sphereface", **tiny.SMALL, "embedding_dim": 7}},
            "model.embedding_dim must be the 10 classes of the data, got 7",
        ),
        ({"federation": {"cohort_size": 5}}, "federation: cohort_size must"),
        (
            {"federation": {"straggler_fraction": 0.5}},
            "federation: local_epochs must be at least 2 with stragglers",
        ),
        (
            {"evaluation": {"finetune": {"trainable": "conv", "learning_rate": 0.1}}},
            "evaluation.finetune.trainable: path pattern must match a leaf.*got 'conv'",
        ),
        (
            {"evaluation": {"representation": {"reference": "nowhere"}}},
            "evaluation.representation.reference: weights must be .*run's folder",
        ),
    ],
    "segmentation": [
        ({"model": {"num_classes": 7}}, r"model must .*\(8, 8, 3\), got \(8, 8, 7\)"),
        ({"model": {"encoder": {"name": "vgg"}}}, "model.encoder.name must be one"),
        (
            {"data": {"name": "fake_data", "num_identities": 9, "image_size": 8}},
            "data must be a source with masks",
        ),
    ],
    "reid": [({"model": {"name": "segmenter"}}, "model must have features")],
    "faces": [
        ({"pretrain": {"class_sample_rate": 0.1}}, "pretrain.class_sample_rate ne"),
        ({"pretrain": {"frozen": "nothing"}}, "pretrain.frozen: .*such as .*back"),
        (
            {"pretrain": {"class_parallel": True, "loss": "uniface"}},
            "pretrain.*loss must be a softmax|loss must be a softmax",
        ),
    ],
}


@pytest.mark.parametrize("task", tiny.TASKS)
def test_what_does_not_fit_the_data_or_the_network_is_refused_by_its_key(task):
    found = [
        ("config.methods.x" + words, mistake(tiny.config(task, keys)))
        for keys, words in BUILT.get(task, ())
    ]
    found += [
        (f"(config.)?{words}", mistake(tiny.config(task, **keys)))
        for keys, words in BUILT_OF_SECTIONS[task]
    ]
    check(found)


def test_an_evaluation_fine_tunes_only_adapters_that_are_merged():
    words = "config.methods.x.adapter must be lora, bias or head"
    evaluation = {"finetune": {"learning_rate": 0.1}}
    given = lambda name: tiny.config(
        "classification", {"adapter": {"name": name}}, evaluation=evaluation
    )
    check([(words, mistake(given("bottleneck")))])
    build(given("bias"))


# {task: (what it offers to algorithms, its last layer, {algorithm: what it lacks})}
ONE_SET, CLASS_VECTORS = "one set of classes for all clients", "a parameter with a vec"
PUBLIC_IDS = "public identities next to those of clients"
OFFERS = {
    "classification": (
        FACTS - {"identities", "shared"},
        "params/classifier",
        {"fedfr": PUBLIC_IDS, "finch": "public data", "kd": "public data"},
    ),
    "segmentation": (
        {"model", "num_clients", "num_classes"},
        "params/classifier",
        {
            **dict.fromkeys(("fedaws", "one_shot"), CLASS_VECTORS),
            **{"fedfr": PUBLIC_IDS, "finch": "public data", "kd": "public data"},
        },
    ),
    "reid": (
        {"model", "num_clients", "shared"},
        "params/neck/",
        {
            **{"afl": ONE_SET, "fedmargin": ONE_SET},
            **dict.fromkeys(("fedaws", "one_shot"), CLASS_VECTORS),
            "fedfr": PUBLIC_IDS,
        },
    ),
    "faces": (
        {"model", "num_clients", "identities"},
        "params/(head|backbone/fc)",
        {
            **{"afl": ONE_SET, "fedmargin": ONE_SET},
            **dict.fromkeys(("fedaws", "one_shot"), CLASS_VECTORS),
            **{"finch": "public data", "kd": "public data"},
            **{"feddane": "a classifier on", "mime": "a classifier on"},
        },
    ),
}


@pytest.mark.parametrize("task", OFFERS)
def test_every_algorithm_is_a_method_or_refused_with_what_it_needs(task):
    offers, head, lacking = OFFERS[task]
    rows = {k: x for k, x in rows_of(head, given=offers).items() if k not in lacking}
    assert ALGORITHMS.keys() - rows.keys() == lacking.keys()
    for name, words in lacking.items():
        words = f"config.methods.x: algorithm {name} needs {words}.* task {task}"
        algorithm = {"name": name, **required(name, head)}
        check([(words, mistake(tiny.config(task, {"algorithm": algorithm})))])
    config = tiny.config(task, federation={"local_epochs": 2})
    if task == "reid":
        config["partition"] = {"name": "by_camera", "public": {"fraction": 0.25}}
    if task == "faces":
        rows = {k: {**x, "momentum": 0.0, "weight_decay": 0.0} for k, x in rows.items()}
    stages = build({**config, "methods": rows}).stages
    assert stages.keys() - {"pretrained"} == rows.keys()


def test_what_a_run_cannot_store_of_its_config_is_refused_by_its_key():
    for methods, message in (
        ({1: {}}, "config.methods must have string keys, got 1."),
        ({"a": {"b": ({"c": {2: 0}},)}}, r"config.methods.a.b\[0\].c must have string"),
        ({"a": {"b": [1, {2}]}}, r"config.methods.a.b\[1\] must be .*, got \{2\}."),
        ({"a": {"b": 1j}}, "config.methods.a.b must be .*, got 1j."),
        ({"a": {"b": ...}}, "config.methods.a.b must be .*, got Ellipsis."),
    ):
        for given in ({"methods": methods}, ConfigDict({"methods": methods})):
            with pytest.raises(ValueError, match=f"^{message}"):
                sections(given)
    given = {"weights": np.zeros(2), "of": build, "mesh": Training()}
    assert sections({"methods": {"a": given}})["methods"]["a"]["of"] is build


def test_mistakes_in_sections_themselves_are_reported_together():
    with pytest.raises(ValueError) as error:
        sections({"modle": {}, "seed": -1, "data": 3})
    rules = (
        r"config must have keys of .*did you mean model\?",
        "config.seed must be in",
        "config.data must be a mapping, got 3",
    )
    check(zip(rules, str(error.value).splitlines(), strict=True))


def test_shipped_configs_are_parsed(monkeypatch):
    monkeypatch.setenv("FEDFR_DATA", "data")
    for path in shipped().values():
        for word in runpy.run_path(str(path)).get("DATA") or (None,):
            settings = sections(load(path, word))
            parse_config(TASKS[settings["task"]], settings)
