"""What a stage has cost, by hand."""

from types import SimpleNamespace

import pytest

from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.systems.failures import Stragglers
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.costs import communication, cost_of_target
from fedfr_jax.types import Evaluation, Evaluator
from tests.federated.toys import fedavg_toy, feed, problem


def test_the_first_evaluation_at_the_target_is_told():
    evaluator = Evaluator(evaluate=None, targets={"accuracy": 0.6})
    found, numbers = Evaluation({"accuracy": 0.7}), (0.5, 0.6, 0.7)
    rows = [{"round": 2 * i + 1, "own/accuracy": x} for i, x in enumerate(numbers)]
    assert cost_of_target("own", evaluator, rows, found) == {"rounds_to_0.6": 3}
    assert cost_of_target("own", evaluator, rows[:1], found) == {"rounds_to_0.6": None}
    assert cost_of_target("own", evaluator, rows, Evaluation()) == {}
    timed = [{**row, "simulated_seconds": 5.0 * row["round"]} for row in rows]
    assert cost_of_target("own", evaluator, timed, found) == {
        "rounds_to_0.6": 3,
        "simulated_seconds_to_0.6": 15.0,
    }
    assert cost_of_target("own", evaluator, timed[:1], found) == {
        "rounds_to_0.6": None,
        "simulated_seconds_to_0.6": None,
    }


def test_clients_that_are_dropped_send_nothing():
    algorithm, variables = fedavg_toy()
    for are_dropped in (False, True):
        settings = Settings(4, 2, stragglers=Stragglers(0.5, are_dropped))
        parts = algorithm, feed(), *problem(), settings
        sim = build_simulation(*parts, mesh=make_mesh(1))
        server = start_simulation(sim, variables)
        store = open_store(sim, server, None)
        begun = SimpleNamespace(sim=sim, server=server, store=store)
        found = communication(begun, rounds=3)
        up, down, total = (found[f"{x}_mb"] for x in ("upload", "download", "total"))
        senders = 2 if are_dropped else 4
        assert total == pytest.approx(3 * (senders * up + 4 * down))
