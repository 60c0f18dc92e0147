"""Stages whose method has frozen leaves."""

import chex
import jax
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.models.frozen import whole_variables
from fedfr_jax.models.weights import read_weights, write_weights
from fedfr_jax.plan.aot import check_saved
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.runs.stages import start_stage
from fedfr_jax.runs.sweep_results import count_sizes
from fedfr_jax.runs.vmapped_sweep import SweepMember, train_stage
from tests.tasks import tiny

pytestmark = pytest.mark.ci

RESNET = {"name": "resnet", "stem": "cifar", **tiny.SMALL}


def weights_of(path, scale):
    """A file with another network's first layers."""
    model = build(tiny.config("classification", {}, model=RESNET)).stages["x"].trainer
    arrays = trees.by_name(model.init_variables(None))
    write_weights(path, {k: np.asarray(scale * x) for k, x in arrays.items()})


def config(task="classification", path=None, rounds=1, **method):
    sections = {"model": RESNET} if task == "classification" else {}
    if path is not None:
        sections["pretrain"] = {"init": str(path)}
    method = {"frozen": "params/(stem|stage|encoder)", **method}
    return tiny.config(task, method, federation={"rounds": rounds}, **sections)


@pytest.mark.parametrize("features", ["device", "host"])
def test_features_change_no_number_of_a_run(features, tmp_path):
    folders = {"kept": features, "run": "off"}
    for name, place in folders.items():
        run_experiment(build(config(rounds=2, features=place)), tmp_path / name)
    kept, run = (
        read_weights(tmp_path / name / "x" / "weights.safetensors").arrays
        for name in folders
    )
    chex.assert_trees_all_close(kept, run, rtol=1e-4, atol=1e-6)
    start = build(config()).stages["x"].trainer
    start.init_variables(None)
    for name, leaf in trees.by_name(start.frozen_model.frozen.value).items():
        np.testing.assert_array_equal(kept[name], leaf)
    assert np.abs(kept["params/fc/kernel"]).max() > 0


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_checkpoints_and_state_have_no_frozen_leaf(task, tmp_path):
    experiment = build(config(task))
    trainer = experiment.stages["x"].trainer
    state = start_stage(experiment, trainer, None, tmp_path / "x")
    state.checkpointer.close()
    frozen = trainer.frozen_model.frozen.shapes
    names = lambda tree: {*trees.by_name(tree)}
    kept = names(trainer.algorithm.global_model(state.server))
    assert kept and names(frozen) and not kept & names(frozen)
    whole = trainer.global_model(state.server)
    assert names(whole) == kept | names(frozen)


def test_another_base_is_refused_and_other_last_bits_are_not(tmp_path):
    path, workdir = tmp_path / "base.npz", tmp_path / "run"
    weights_of(path, 1.0)
    run_experiment(build(config(path=path)), workdir)
    weights_of(path, 1 + 2e-7)
    run_experiment(build(config(path=path, rounds=2)), workdir)
    weights_of(path, 1 + 1e-4)
    with pytest.raises(ValueError, match=r"frozen.json: the frozen leaves must be"):
        run_experiment(build(config(path=path, rounds=3)), workdir)


def test_a_finished_stage_computes_no_features(tmp_path, capsys):
    for text, rounds in [("kept: device", 1), ("", 1), ("kept: device", 2)]:
        run_experiment(build(config(rounds=rounds, features="device")), tmp_path)
        said = capsys.readouterr().out
        assert text in said if text else "kept:" not in said


def test_programs_of_features_that_a_run_decides_on_are_not_saved():
    check_saved(build(config(features="host")))
    with pytest.raises(ValueError, match="methods.x.features must be device, host"):
        check_saved(build(config()))


def test_a_vmapped_sweep_of_one_base_trains_what_each_run_does_alone(tmp_path):
    rates = (0.05, 0.1)
    members = [
        SweepMember(
            build(config(learning_rate=rate)),
            tmp_path / str(rate),
            {"x": {"learning_rate": rate}},
        )
        for rate in rates
    ]
    build_trainer = members[0].experiment.with_hyperparameters
    train_stage(members, "x", [None, None], build_trainer)
    for member in members:
        run_experiment(member.experiment, member.folder)  # reads and evaluates it
        alone = tmp_path / f"alone_{member.folder.name}"
        run_experiment(build(config(**member.numbers["x"], features="off")), alone)
        found, expected = (
            read_weights(x / "x" / "weights.safetensors").arrays
            for x in (member.folder, alone)
        )
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_vmapped_sweep_of_several_bases_is_refused(tmp_path):
    settings = [{**config(), "seed": seed} for seed in (0, 1)]
    members = [SweepMember(build(x), tmp_path, {}) for x in settings]
    build_trainer = members[0].experiment.with_hyperparameters
    with pytest.raises(ValueError, match="methods.x: runs must have the same frozen"):
        train_stage(members, "x", [None, None], build_trainer)


@pytest.mark.parametrize(
    "method", [{}, {"frozen": "", "adapter": {"name": "lora", "rank": 1}}]
)
def test_a_sweep_counts_all_of_the_network(method):
    found = count_sizes(build(config(**method)))
    plain = count_sizes(build(config(frozen="")))
    assert found.params_backbone >= plain.params_backbone > 0


def test_adapters_of_two_methods_are_evaluated_each_with_its_own_factor():
    outputs = []
    for alpha in (1.0, 50.0):
        adapter = {"name": "lora", "rank": 1, "alpha": alpha}
        trainer = build(config(frozen="", adapter=adapter)).stages["x"].trainer
        start = whole_variables(trainer.frozen_model, trainer.init_variables(None))
        ones = jax.tree_util.tree_map_with_path(
            lambda path, x: x + 0.1 * (path[-1].key == "lora_b"), start
        )
        outputs.append(trainer.apply(ones, np.ones((1, *tiny.SHAPE), np.float32)))
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
