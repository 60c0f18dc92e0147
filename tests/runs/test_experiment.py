"""What the settings of a federation do to a run."""

import types

import jax
import pytest

from fedfr_jax.build import call
from fedfr_jax.federated import lanes
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.experiment import Experiment, run_method
from fedfr_jax.runs.settings import Federation, Pretraining, check_federation
from fedfr_jax.tasks.methods import federated_faces
from fedfr_jax.tasks.recognition import Judgement
from tests.federated import toys


def test_lanes_are_a_number_or_auto():
    check_federation(call("federation", Federation, {"lanes": "auto"}), 5)
    for wrong, rule in [("many", "a number or auto"), (0, "at least 1")]:
        federation = call("federation", Federation, {"lanes": wrong})
        with pytest.raises(ValueError, match=f"config.federation.lanes must be {rule}"):
            check_federation(federation, 5)
    with pytest.raises(ValueError, match="config.federation.rounds must be a number"):
        call("federation", Federation, {"rounds": "auto"})


def test_auto_lanes_are_measured_once_for_equal_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    fake = lambda sim, *_: asked.append(sim.lanes) or 1.0 / sim.lanes
    monkeypatch.setattr(lanes, "seconds", fake)
    model, (table, population) = toys.linear_model(), toys.problem()
    method = federated_faces(
        model, num_classes=3, public=False, contrastive_weight=0.0, branch=None
    )
    nothing = Judgement({}, None, None)
    experiment = Experiment(
        model=model,
        task=types.SimpleNamespace(table=table, population=population),
        judge=types.SimpleNamespace(
            generic=lambda *_: nothing, personalised=lambda *_: nothing
        ),
        mesh=make_mesh(1),
        pretraining=Pretraining(),
        federation=Federation(
            rounds=1, local_epochs=1, batch_size=4, lanes="auto", flip=0.0
        ),
        methods={},
        seed=0,
    )
    start = {"backbone": model.init(jax.random.key(0)), "phi": None}
    for folder in ("a", "b", "b"):  # the last is finished: nothing to choose
        run_method(experiment, method, start, tmp_path / folder)
    assert asked == [1, 2, 4]
    assert capsys.readouterr().out.count("lanes: 4 (measured") == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    more = experiment.federation._replace(rounds=2)
    run_method(experiment._replace(federation=more), method, start, tmp_path / "a")
    assert asked == [1, 2, 4]  # a run that goes on keeps its own
    assert "lanes: 4 (as this run began" in capsys.readouterr().out
