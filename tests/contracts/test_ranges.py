"""Numbers of algorithms and of what they are told: out of range is refused by name."""

from typing import Annotated, get_args, get_origin

import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedavg import SERVER_OPTIMIZERS
from fedfr_jax.federated.local import sgd
from fedfr_jax.parts import parse
from fedfr_jax.schema import kinds_of
from fedfr_jax.tasks.methods import CLASS_KEYS, Method
from fedfr_jax.tasks.reid.stages import SPEC
from tests.contracts.test_algorithms import MEMBERS

RATE = {"learning_rate": 0.1}
NEEDED = {name: {} if name == "fedavgm" else RATE for name in SERVER_OPTIMIZERS}
# {name: how to make it from settings}; every number of each is at least 0.
MAKERS = {name: MEMBERS[name].build for name in ALGORITHMS}
MAKERS |= AGGREGATORS
MAKERS |= {
    name: lambda make=make, needed=NEEDED[name], **more: make(**{**needed, **more})
    for name, make in SERVER_OPTIMIZERS.items()
}
MAKERS |= {
    "method": lambda **more: parse(SPEC.methods, {**RATE, **more}, "config.methods.x"),
    "sgd": sgd,
}
SIGNATURES = ALGORITHMS | AGGREGATORS | SERVER_OPTIMIZERS
SIGNATURES |= {"method": Method, "sgd": sgd}
TOO_LARGE = {
    "apfl": {"alpha": 2.0},
    "fedadagrad": {"b1": 1.0},
    "fedadam": {"b1": 1.0, "b2": 1.5},
    "fedavgm": {"momentum": 1.0},
    "fedaws": {"margin": 2.5},
    "fedmargin": {"prototype_momentum": 1.0},
    "fednova": {"momentum": 1.0},
    "fedyogi": {"b1": 1.0, "b2": 1.5},
    "kd": {"distill_momentum": 1.0},
    "method": {"decay_factor": 2.0, "momentum": 1.0},
    "mime": {"server_momentum": 1.0},
    "mimelite": {"server_momentum": 1.0},
    "sgd": {"momentum": 1.0},
    "stochastic_quantize": {"bits": 24},
    "trimmed_mean": {"trim_fraction": 0.5},
}
NOT_ZERO = {
    "adaptive_robust_clipping": ("num_malicious_clients",),
    "afl": ("num_classes", "domain_window_size"),
    "bucketing": ("clients_per_bucket",),
    "bulyan": ("num_malicious_clients",),
    "centered_clip": ("max_norm",),
    "clip_by_global_norm": ("max_norm",),
    "fedadagrad": ("eps",),
    "fedadam": ("eps",),
    "feddyn": ("num_clients", "alpha", "mean_examples"),
    "fedmargin": ("temperature",),
    "fedrep": ("head_epochs",),
    "fedyogi": ("eps",),
    "fesem": ("num_clusters",),
    "finch": ("num_clients",),
    "geometric_median": ("iterations", "smoothing"),
    "hypcluster": ("num_clusters",),
    "ifca": ("num_clusters",),
    "kd": ("distill_every",),
    "krum": ("num_clients_to_keep",),
    "method": ("decay_rounds", "features_gib", "local_epochs"),
    "nearest_neighbor_mixing": ("num_malicious_clients",),
    "one_shot": ("regularization",),
    "perfedavg": ("hf_delta", "inner_learning_rate"),
    "pfedme": ("personal_learning_rate", "inner_steps"),
    "quantize": ("range", "levels"),
    "random_k": ("fraction",),
    "rfa": ("smoothing",),
    "scaffold": ("num_clients",),
    "stochastic_quantize": ("bits",),
    "top_k": ("fraction",),
}


def numbers_of(member):
    """Names of the arguments that are numbers, or lists of them."""
    kinds = kinds_of(SIGNATURES[member]).items()
    lacking = CLASS_KEYS if member == "method" else ()  # which reid has not
    return [name for name, kind in kinds if is_number(kind) and name not in lacking]


def is_number(kind):
    """Whether an annotation has no other values but None."""
    if get_origin(kind) is Annotated:
        return is_number(get_args(kind)[0])
    inside = [x for x in get_args(kind) if x not in (type(None), ...)]
    return kind in (int, float) or (inside != [] and all(map(is_number, inside)))


def is_refused(make, name, value):
    """Whether a value is refused by an error that says its name and itself."""
    try:
        make(**{name: value})
    except ValueError as error:
        return f"{name} must " in str(error) and f"got {value}" in str(error)
    return False


def test_a_number_out_of_its_range_is_refused():
    wrong = [
        (member, name, value)
        for member, given in TOO_LARGE.items()
        for name, value in given.items()
    ]
    numbers = {member: numbers_of(member) for member in MAKERS}
    for value, members in ((-1, numbers), (0, NOT_ZERO)):
        for member, names in members.items():
            is_list = [name == "decay_rounds" for name in names]
            values = [(value,) if x else value for x in is_list]
            wrong += zip([member] * len(names), names, values, strict=True)
    assert len(wrong) > 80
    taken = [case for case in wrong if not is_refused(MAKERS[case[0]], *case[1:])]
    assert not taken, "\n".join(map(str, taken))


@pytest.mark.parametrize("name", MAKERS)
def test_the_bounds_themselves_are_taken(name):
    for number in numbers_of(name):
        if number not in NOT_ZERO.get(name, ()) and "num_" not in number:
            MAKERS[name](**{number: 0})


def test_an_array_of_one_number_is_a_number():
    sgd(weight_decay=jnp.float32(1e-4), momentum=np.float64(0.5))
    with pytest.raises(ValueError, match="weight_decay must be at least 0, got -1"):
        sgd(weight_decay=jnp.float32(-1.0))
