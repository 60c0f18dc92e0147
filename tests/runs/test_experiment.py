"""What the settings of a federation do to a run."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedfr_jax.federated.settings import Federation, check_federation
from fedfr_jax.federated.store import Store
from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import parse
from fedfr_jax.runs import experiment as experiment_module
from fedfr_jax.runs.stages import evaluate, final_simulation, run_stage
from fedfr_jax.types import (
    Evaluation,
    Evaluator,
    Experiment,
    FederatedTrainer,
    FinalAdaptation,
    Task,
    TrainedModels,
)
from tests.federated import toys


def experiment(federation, *, devices=1, judge=lambda networks: None):
    """On the toys' examples; `judge` is handed the networks of every evaluation."""

    def generic(networks):
        judge(networks.variables)
        return Evaluation({"score": 0.5})

    table, population = toys.problem()
    return Experiment(
        task=Task(
            dataset=table,
            population=population,
            evaluators={"generic": Evaluator(generic)},
            data_report={},
            data_report_text="",
        ),
        stages={},
        mesh=make_mesh(devices),
        batching=toys.feed(batch_size=federation.batch_size),
        federation=federation,
        seed=0,
    )


def test_the_table_is_printed_before_plots_that_fail(tmp_path, monkeypatch, capsys):
    """What was trained for hours is not lost with them."""

    def fail(*args, **named):
        assert json.loads((tmp_path / "summary.json").read_text())["methods"] == scores
        raise RuntimeError("no font")

    found = {"fedavg": {"generic": Evaluation({"accuracy": 0.8125})}}
    scores = {"fedavg": {"generic": {"accuracy": 0.8125}}}
    monkeypatch.setattr(experiment_module, "run_stages", lambda *args: found)
    monkeypatch.setattr(experiment_module, "drawing", SimpleNamespace(draw=fail))
    with pytest.raises(RuntimeError, match="no font"):
        experiment_module.run_experiment(experiment(parse(Federation, {})), tmp_path)
    said = capsys.readouterr().out
    assert "fedavg" in said and "0.8125" in said


SETTINGS = {"rounds": 1, "local_epochs": 1, "batch_size": 4, "flip_probability": 0.0}


def toy_trainer():
    """FedAvg of a toy, which no evaluator applies."""
    algorithm, variables = toys.fedavg_toy()
    return FederatedTrainer(
        algorithm,
        init_variables=lambda before: variables,
        apply=None,
        global_model=algorithm.global_model,
        apply_global=None,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("run_level")
def test_a_config_may_ask_for_the_same_bits_on_any_number_of_devices(tmp_path):
    settings = {**SETTINGS, "reproducible_sum": True, "num_partial_sums": 2}
    federation = parse(Federation, settings, "config.federation")
    check_federation(federation, 5)
    trainer = toy_trainer()
    adaptation = FinalAdaptation(trainer.algorithm, 1)
    trainer = trainer._replace(final_adaptation=adaptation)
    ends = []
    for devices in (1, 2):
        seen = []
        whole = experiment(federation, devices=devices, judge=seen.append)
        folder = tmp_path / str(devices)
        run_stage(whole, trainer, None, folder)
        assert len(seen) == 2  # after either round; the end is the last one
        rows = json.loads((folder / "clients.jsonl").read_text().splitlines()[-1])
        ends.append((jax.device_get(seen), rows))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_the_last_round_is_evaluated_once(tmp_path):
    trainer = toy_trainer()
    seen = []

    def norm(networks):
        leaves = jax.tree.leaves(networks.variables)
        seen.append(float(sum(np.abs(x).sum() for x in leaves)))
        return Evaluation({"norm": seen[-1]})

    whole = experiment(
        parse(Federation, {**SETTINGS, "rounds": 3, "evaluate_every": 2})
    )
    evaluators = {
        "late": Evaluator(lambda networks: Evaluation(), during_training=False),
        "generic": Evaluator(norm),
    }
    whole = whole._replace(task=whole.task._replace(evaluators=evaluators))
    ends = [run_stage(whole, trainer, None, tmp_path)[1] for _ in range(2)]
    assert len(seen) == 3  # after rounds 2 and 3, and of the finished stage
    assert seen[0] != seen[1] == seen[2]
    for evaluations in ends:
        assert list(evaluations)[:2] == ["late", "generic"]
        assert evaluations["generic"].metrics == {"norm": seen[1]}


def test_rows_that_nobody_needs_are_freed_at_the_end_and_more_rounds_follow(
    tmp_path, monkeypatch
):
    algorithm, variables = toys.fedavg_toy(personal="head")
    trainer = FederatedTrainer(
        algorithm,
        init_variables=lambda before: variables,
        apply=lambda variables, x: x,
        global_model=None,
        apply_global=None,
    )

    def train(folder, rounds):
        seen = []
        of = parse(Federation, {**SETTINGS, "rounds": rounds})
        whole = experiment(of)
        rows = lambda networks: seen.append(
            [networks.client_variables(k) for k in range(5)]
        )
        evaluators = {"own": Evaluator(lambda networks: rows(networks) or Evaluation())}
        whole = whole._replace(task=whole.task._replace(evaluators=evaluators))
        run_stage(whole, trainer, None, tmp_path / folder)
        stamps = np.fromfile(tmp_path / folder / "store" / "stamps.bin", np.int32)
        assert np.count_nonzero(stamps) == 5  # all have trained in every round
        return jax.device_get(seen[-1])

    wanted = train("whole", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "keep_newest", lambda store: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("more", 2)
    train("more", 2)
    train("more", 2)  # finished: judged again
    jax.tree.map(np.testing.assert_array_equal, train("more", 3), wanted)


def test_the_last_round_adds_up_as_the_rounds_do():
    algorithm, _ = toys.fedavg_toy()
    for canonical in ({}, {"reproducible_sum": True, "num_partial_sums": 3}):
        sim = toys.build(algorithm, mesh=(2, 1), **canonical)
        last = final_simulation(sim, FinalAdaptation(algorithm, 1), 0)
        assert (
            last.settings.partial_sums
            == sim.settings.partial_sums
            == canonical.get("num_partial_sums")
        )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"error": 1.0}, "evaluator mine must return an Evaluation, got a dict"),
        (Evaluation({"error": np.ones(2)}), "error of evaluator mine must be a number"),
    ],
)
def test_what_an_evaluator_returns_is_as_its_contract_says(returned, message):
    evaluators = {"mine": Evaluator(lambda models: returned)}
    with pytest.raises(ValueError, match=f"^{message}"):
        evaluate(evaluators, TrainedModels(None, None, None, None))
