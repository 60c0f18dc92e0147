"""Privacy goes with every algorithm that sends one mean, on every task."""

import jax
import pytest

from fedfr_jax.config import build as builds
from fedfr_jax.config.build import build
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.runs import shapes
from tests.contracts.rows import FACTS, rows_of
from tests.federated import toys
from tests.tasks.test_privacy import config_of
from tests.tasks.tiny import TASKS, config

pytestmark = pytest.mark.ci

PRIVACY = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
ROWS = {
    "fedavg": {},
    "fedopt": {
        "algorithm": {
            "name": "fedavg",
            "server_optimizer": {"name": "fedadam", "learning_rate": 0.1},
        }
    },
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.1}},
    "scaffold": {"algorithm": "scaffold"},
    "moon": {"algorithm": "moon"},
    "personal": {"personal": "bias"},
}


def private(**row):
    """A private row; faces' own default is FedFR."""
    return {"algorithm": "fedavg", "learning_rate": 0.1, "privacy": PRIVACY, **row}


@pytest.mark.parametrize("task", toys.others_are_slow({("classification",)}, TASKS))
def test_the_mechanism_covers_all_that_clients_of_a_task_send(task, monkeypatch):
    """Drift and control of SCAFFOLD are both in what is clipped."""
    rows = {**ROWS, "fedper": {"personal": {"blocks": 2 if task == "reid" else 1}}}
    rows |= {"fedfr": {"algorithm": "fedfr"}} if task == "faces" else {}
    found, given = {}, config(task)
    given["methods"] = {name: private(**row) for name, row in rows.items()}

    def disclose(experiment, name):
        found[name] = shapes.disclose_stage(experiment, name)

    monkeypatch.setattr(builds, "disclose_stage", disclose)
    with jax.numpy_dtype_promotion("standard"):
        build(given)
    assert found.keys() == rows.keys()
    for name, one in found.items():
        assert one.covered and one.summed and not one.per_client, name
        assert all(x.name.startswith("update/") for x in one.summed), name
    drift = {x.name for x in found["fedavg"].summed}
    assert len(found["scaffold"].summed) > len(drift)
    assert {x.name for x in found["fedper"].summed} < drift


SUMS = "got sums beside the update"
PREPARED = "got what the server prepares of the clients' examples"
SEVERAL = "privacy needs an algorithm that aggregates"
REFUSED = {
    **dict.fromkeys(("afl", "fednova", "qfedavg"), SUMS),
    **dict.fromkeys(("feddane", "mime"), PREPARED),
    **dict.fromkeys(("fedmargin", "fesem", "hypcluster", "ifca"), SEVERAL),
}


def test_an_algorithm_that_sends_more_is_refused_in_one_line_before_it_trains():
    rows, found = rows_of("params/classifier", given=FACTS), {}
    for name in sorted(ALGORITHMS.keys() - {"fedfr", "finch", "kd"}):
        given = config_of(local_epochs=2)
        given["methods"] = {"row": private(**rows[name])}
        try:
            build(given)
        except ValueError as error:
            found[name] = str(error)
    assert found.keys() == REFUSED.keys(), found
    for name, message in found.items():
        assert message.startswith("config.methods.row") and "\n" not in message
        assert REFUSED[name] in message


def test_numbers_of_one_client_are_refused_in_one_line():
    """FedFace's class embeddings, which the server pushes apart."""
    given = config("faces")
    given["methods"] = {"row": private(algorithm={"name": "fedfr", "spreadout": 0.5})}
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match="class embeddings that each client uploads"),
    ):
        build(given)
