"""What a stage has cost, by hand."""

from types import SimpleNamespace

import pytest

from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.systems.stragglers import Stragglers
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs import costs
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


def test_rounds_to_a_target_are_left_out_where_rounds_are_lost(monkeypatch, capsys):
    monkeypatch.setattr(costs, "communication", lambda begun, rounds: {})
    evaluators = {"own": Evaluator(evaluate=None, targets={"accuracy": 0.6})}
    found = {"own": Evaluation({"accuracy": 0.7})}
    rows = [{"round": i + 1, "own/accuracy": 0.5 + i / 10} for i in range(3)]
    told = costs.with_costs(found, evaluators, rows, None, rounds=3)
    assert told["own"].metrics == {"accuracy": 0.7, "rounds_to_0.6": 2}
    assert capsys.readouterr().out == ""
    told = costs.with_costs(found, evaluators, rows[2:], None, rounds=3)
    assert told == found
    assert "metrics.jsonl has lost 2 rounds (1, 2...)" in capsys.readouterr().out


def test_clients_that_are_dropped_send_nothing():
    algorithm, variables = fedavg_toy()
    for are_dropped in (False, True):
        sizes = {"cohort_size": 4, "local_epochs": 2, "seed": 0}
        late = Stragglers(0.5, are_dropped)
        options = {"mesh": make_mesh(1), "stragglers": late, **sizes}
        sim = build_simulation(algorithm, feed(), *problem(), **options)
        server = start_simulation(sim, variables)
        store = open_store(sim, server, None)
        begun = SimpleNamespace(sim=sim, server=server, store=store)
        found = communication(begun, rounds=3)
        up, down, total = (found[f"{x}_mb"] for x in ("upload", "download", "total"))
        senders = 2 if are_dropped else 4
        assert total == pytest.approx(3 * (senders * up + 4 * down))
