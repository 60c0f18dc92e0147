"""What a config does not say, and what its rows say, by value.

Values of algorithms and servers are those of the papers that their files name, or of
the released code; `tests/tasks/faces/test_defaults.py` has those of faces, and
`test_defaults_of_data.py` those of sources and partitions.
"""

import functools
import inspect

import numpy as np
import pytest
from fedfr_jax.configs.classification import comparison

from fedfr_jax.config.build import build
from fedfr_jax.config.files import find, load
from fedfr_jax.configs import base
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedavg import SERVER_OPTIMIZERS
from fedfr_jax.parts import parse
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.classification import cross_entropy
from fedfr_jax.tasks.methods import LOCAL_KEYS, AlgorithmReader, Method
from fedfr_jax.types import Source
from tests.contracts import test_algorithms as contracts
from tests.contracts.rows import FACTS, required

EXAMPLES, EQUALLY = {"weighting": "num_examples"}, {"weighting": "uniform"}
SERVER = {"server_optimizer": None}
GROUPS = {"num_clusters": 2, "init_noise": 0.05}
MIME = {"server_momentum": 0.9, "server_learning_rate": 1.0, **EXAMPLES}
EXPECTED = {
    "afl": {"domain_learning_rate": 0.1, "domain_window_size": 1, "domain_of": None},
    "apfl": {"alpha": 0.5, **SERVER, **EQUALLY},
    "ditto": {"lam": 1.0, **SERVER, **EXAMPLES},
    "fedavg": {**SERVER, **EXAMPLES},
    "fedaws": {"margin": 0.9, "lam": 10.0, "server_learning_rate": 0.1, **EXAMPLES},
    "feddane": EXAMPLES,
    "feddyn": {"alpha": 0.1, "mean_examples": None},
    "fedfr": {
        "reference_features": None,
        "prepare": None,
        "public_classes_update": "average",
        "initial_previous_model": None,
        "weighting": "num_examples+hard_negatives",
        "begin": None,
    },
    "fedmargin": {
        "measure": "displacement",
        "temperature": 1.0,
        "normalize_features": True,
        **EQUALLY,
        "prototype_momentum": 0.0,
    },
    "fednova": {"momentum": None, "mu": 0.0, **EXAMPLES},
    "fedprox": {**SERVER, **EXAMPLES},
    "fedrep": EXAMPLES,
    "fesem": GROUPS,
    "finch": {**EXAMPLES},
    "hypcluster": GROUPS,
    "ifca": {**GROUPS, **EQUALLY},
    "kd": {
        "distill_every": 10,
        "normalize": True,
        "distill_learning_rate": 5e-4,
        "distill_momentum": 0.9,
        "distill_weight_decay": 5e-4,
        **EXAMPLES,
    },
    "mime": MIME,
    "mimelite": MIME,
    "moon": {**SERVER, **EXAMPLES},
    "perfedavg": {"order": "fo", "hf_delta": 1e-3, **SERVER, **EQUALLY},
    "pfedme": {"lam": 15.0, "inner_steps": 5, **SERVER, **EXAMPLES},
    "qfedavg": {},
    "scaffold": {"server_learning_rate": 1.0},
}
MOMENTS = {"b1": 0.9, "eps": 1e-3, "initial_accumulator_value": 0.0}
SERVERS = {
    "fedadagrad": MOMENTS,
    "fedadam": {"b2": 0.99, **MOMENTS},
    "fedavgm": {"learning_rate": 1.0, "momentum": 0.9, "nesterov": False},
    "fedyogi": {"b2": 0.99, **MOMENTS},
}
LINKS = {
    "attention": {"epsilon": 1.2, "distance_norm": "l2"},
    "bulyan": {"num_malicious_clients": 1},
    "centered_clip": {"max_norm": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "geometric_median": {"iterations": 10, "smoothing": 1e-6},
    "krum": {"num_malicious_clients": 1, "num_clients_to_keep": 1},
    "median": {},
    "rfa": {"smoothing": 1e-6},
    "quantize": {"range": 8.0, "levels": 2**22},
    "stochastic_quantize": {"bits": 8, "error_feedback": False},
    "trimmed_mean": {"trim_fraction": 0.1},
}
LOCAL = {
    "decay_epochs": 0,
    "decay_rounds": (),
    "decay_factor": 0.1,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip_norm": 0.0,
    "learning_rate_multipliers": {},
}


def differences(family, expected):
    """What the members that are listed default to, where it is something else."""
    found = {name: defaults(member) for name, member in family.items()}
    pairs = [(name, found.get(name), expected[name]) for name in sorted(expected)]
    return [f"{n}: {got} instead of {want}" for n, got, want in pairs if got != want]


def defaults(function):
    empty = inspect.Parameter.empty
    given = inspect.signature(function).parameters.items()
    return {name: p.default for name, p in given if p.default is not empty}


def test_every_default_has_the_value_of_its_paper_or_of_the_released_code():
    wrong = differences(ALGORITHMS, EXPECTED)
    wrong += differences(SERVER_OPTIMIZERS, SERVERS) + differences(AGGREGATORS, LINKS)
    of_method = Method._field_defaults.items()
    assert {k: v for k, v in of_method if k in LOCAL_KEYS} == LOCAL
    assert not wrong, "\n".join(wrong)


# Those that offer what an algorithm needs, where classification does not.
TASKS = {"fedfr": "faces", "finch": "reid", "kd": "reid"}


def test_every_default_may_be_written_into_a_config():
    offenders = []
    for name, function in ALGORITHMS.items():
        told = contracts.MEMBERS[name].build.keywords
        facts = {key: told[key] for key in told.keys() & FACTS}
        row = required(name, contracts.HEAD)
        offers = {**dict.fromkeys(FACTS, True), **facts}
        for key, parameter in keywords(function).items():
            if not isinstance(parameter.default, str | bool | int | float):
                continue
            given = {**row, key: parameter.default}
            try:
                losses = {"class_pull_loss": cross_entropy}
                task = TASKS.get(name, "classification")
                reader = AlgorithmReader(task, losses=losses)
                part = parse(reader, {"name": name, **given})
                part.build(None, offers)[0](contracts.LOCAL)
            except ValueError as error:
                offenders.append(f"{name}.{key}: {error}")
    assert not offenders, "\n".join(offenders)


def test_fedpers_rows_keep_as_many_blocks_as_their_names_say():
    layer = lambda k: {
        "learning_rate": 0.01,
        "init_per_client": True,
        "personal": {"blocks": k},
    }
    central = {"kind": "central", "epochs": 7, "batch_size": 128}
    assert base.fedper_rows({"learning_rate": 0.01}, epochs=7, batch_size=128) == {
        "fedavg": {"learning_rate": 0.01},
        "fedper_1": layer(1),
        "fedper_2": layer(2),
        "fedper_3": layer(3),
        "fedper_4": layer(4),
        "finetune": {**layer(2), "personal_epochs": 1},
        "local": {"learning_rate": 0.01, "personal": "."},
        "central": central,
    }


SPECTRAL = {"name": "attention", "distance_norm": "spectral"}


def below(name, **settings):
    """The key `algorithm` of a method."""
    return {"algorithm": {"name": name, **settings} if settings else name}


UNIFORM = below("fedavg", weighting="uniform")


def test_fedmargins_rows_are_those_of_its_table_1():
    rate = {"learning_rate": 0.03}
    named = lambda name, **more: {**rate, **below(name, **more)}
    assert base.fedmargin_rows(10, **rate) == {
        "fedavg": rate,
        "fairavg": {**rate, **UNIFORM},
        "local": {**rate, "personal": "."},
        "fedper": {**rate, "personal": {"blocks": 1}},
        "fedrep": named("fedrep", head="/classifier/", head_epochs=10),
        "fesem": named("fesem", num_clusters=3),
        "fedatt": {**rate, "aggregation": "attention", **UNIFORM},
        "fedatt_spectral": {**rate, "aggregation": SPECTRAL, **UNIFORM},
        "feddane": named("feddane", mu=1.0),
        "fedprox": named("fedprox", mu=0.1),
        "fedmargin": {**rate, "algorithm": {"name": "fedmargin"}},
        "fedmargin_counts": named("fedmargin", weighting="num_examples"),
        "fedmargin_hypothesis": named(
            "fedmargin", measure="hypothesis", normalize_features=False
        ),
        "fedmargin_hypothesis_unit": named("fedmargin", measure="hypothesis"),
    }


def test_fedreids_rows_switch_what_their_names_say():
    rate = {"learning_rate": 0.05}
    named = lambda name, **more: {**rate, **below(name, **more)}
    assert base.fedreid_rows(rate, every=10, epochs=300, batch_size=32) == {
        "fedpav": rate,
        "standalone": {**rate, "personal": "."},
        "fedprox": named("fedprox", mu=0.01),
        "cdw": named("cdw"),
        "kd": named("kd", distill_every=10),
        "kd_cdw": named("kd", distill_every=10, weighting="distance"),
        "clustering": named("finch"),
        "merged": {"kind": "central", "epochs": 300, "batch_size": 32},
    }


RATE = {"learning_rate": 0.05}
HEAD = {"blocks": 1}
ALONE = {  # rows of `comparison` by what they have beside the rate
    "fedprox": {"mu": 0.01},
    "scaffold": {},
    "fednova": {},
    "moon": {"contrastive_weight": 1.0},
    "feddyn": {"alpha": 0.01},
    "qfedavg": {"q": 1.0},
    "afl": {"domain_learning_rate": 0.1},
    "fedaws": {},
    "fedrep": {"head": "params/classifier/", "head_epochs": 1},
    "ditto": {"lam": 1.0},
    "apfl": {},
    "ifca": {"num_clusters": 2},
    "hypcluster": {"num_clusters": 2},
    "fesem": {"num_clusters": 2},
}
FEW = {"num_malicious_clients": 2}
LINKED = {
    "fedatt": "attention",
    "median": {"name": "median"},
    "trimmed_mean": {"name": "trimmed_mean", "trim_fraction": 0.2},
    "krum": {"name": "krum", **FEW},
    "multi_krum": {"name": "krum", **FEW, "num_clients_to_keep": 6},
    "bulyan": {"name": "bulyan", "num_malicious_clients": 1},
    "geometric_median": {"name": "geometric_median"},
    "weiszfeld": {"name": "rfa"},
    "norm_clipping": {"name": "clip_by_global_norm", "max_norm": 1.0},
    "centered_clipping": {"name": "centered_clip", "max_norm": 1.0},
}
REDDI = {  # table 8 of arXiv:2003.00295: rates of the server and the clients, tau
    "fedavgm": (1.0, 0.032, {}),
    "fedadagrad": (0.1, 0.1, {"eps": 0.01}),
    "fedadam": (1.0, 0.032, {"eps": 0.1}),
    "fedyogi": (1.0, 0.032, {"eps": 0.1}),
}
OTHERS = {
    "fedavg": RATE,
    "mime": {"algorithm": "mime", "learning_rate": 0.001},
    "mimelite": {**below("mimelite", server_momentum=0.2), "learning_rate": 0.02},
    "perfedavg": {**below("perfedavg", inner_learning_rate=0.02), **RATE},
    "local": {"personal": ".", **RATE},
    "fedper": {"personal": HEAD, **RATE},
    "fedbabu": {"personal": HEAD, "frozen": HEAD, **RATE},
    "lg_fedavg": {"personal": {"all_but_blocks": 2}, **UNIFORM, **RATE},
    "pfedme": {
        **below("pfedme", personal_learning_rate=0.03, lam=15.0),
        "learning_rate": 0.005,
    },
}


def test_the_rows_of_the_comparison_have_these_settings():
    servers = {
        name: {
            **below(
                "fedavg",
                server_optimizer={"name": name, "learning_rate": server, **more},
            ),
            "learning_rate": rate,
        }
        for name, (server, rate, more) in REDDI.items()
    }
    expected = {
        **{name: {**below(name, **row), **RATE} for name, row in ALONE.items()},
        **{x: {"aggregation": y, **UNIFORM, **RATE} for x, y in LINKED.items()},
        **servers,
        **OTHERS,
        "central": {
            "kind": "central",
            "epochs": 24,
            "batch_size": 32,
            "flip_probability": 0,
            **RATE,
        },
    }
    given = comparison.get_config("fashion_mnist").methods.to_dict()
    wrong = [n for n in given.keys() | expected if given.get(n) != expected.get(n)]
    assert not wrong, {name: given.get(name) for name in wrong}
    resnet = comparison.get_config("cifar100_resnet").methods.to_dict()
    assert resnet["fedbn"] == {"personal": {"batch_norms": True}, **RATE}
    assert resnet["fedrep"]["algorithm"]["head"] == "params/fc/"


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
