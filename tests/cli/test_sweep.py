"""A sweep: a row per run, resumed and not repeated, side by side as alone."""

import csv
import json
import runpy

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedfr_jax.cli import sweep as sweeps
from fedfr_jax.cli.main import main
from fedfr_jax.cli.sweep import build_runs, group_runs, parse_axis
from fedfr_jax.config.build import build
from fedfr_jax.plan.needs import needs_function
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.runs.sweep_results import add, count_sizes, read, write
from tests.cli.conftest import write_config

pytestmark = pytest.mark.ci

RATE = "methods.fedavg.learning_rate"


@pytest.fixture
def config(tmp_path):
    """A config file."""
    return write_config(tmp_path)


def sweep(config, folder, *words):
    """Run the command: its rows by their values."""
    code = main(["sweep", f"--config={config}", f"--workdir={folder}", *words])
    assert code == 0
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def numbers(row):
    return {k: v for k, v in row.items() if "/" in k}


def rounds(folder, row):
    lines = (folder / row["run"] / "fedavg" / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds", "_per_second")  # which runs side by side do not have
    of = lambda row: {k: v for k, v in row.items() if not k.endswith(clock)}
    return [of(json.loads(line)) for line in lines]


def test_runs_side_by_side_are_those_of_runs_alone_up_to_rounding(
    config, tmp_path, capsys
):
    axes = [f"seed,{RATE}=[(0, 0.05), (0, 0.2), (1, 0.2)]"]
    alone = sweep(config, tmp_path / "alone", *axes)
    together = sweep(config, tmp_path / "together", *axes, "--vmap")
    said = capsys.readouterr().out
    assert said.count("together: ") == 1 and "one by one" not in said
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert one["run"] == other["run"] and one["seed"] == other["seed"]
        left, right = (
            rounds(tmp_path / "alone", one),
            rounds(tmp_path / "together", other),
        )
        assert len(left) == len(right) == 2
        for a, b in zip(left, right, strict=True):
            assert a == pytest.approx(b, rel=1e-4)
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-4)
    losses = {rounds(tmp_path / "alone", row)[-1]["loss"] for row in alone}
    assert len(losses) == 3  # seeds and rates are what they say
    with (tmp_path / "alone" / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["run"] for row in table] == [row["run"] for row in alone]
    images = float(table[0]["num_images"])
    assert images < 60 and float(table[0]["num_images_seen"]) >= 2 * images
    assert (
        float(table[0]["params_with_head"]) - float(table[0]["params_backbone"])
        == 5 * 17
    )


def test_runs_whose_seed_draws_attackers_go_together_by_seed(config):
    """Who attacks is part of the program."""
    base = runpy.run_path(str(config))["get_config"]()
    axes = ["seed=[0, 1]", f"{RATE}=[0.05, 0.2]"]
    sizes = lambda: sorted(len(x) for x in group_runs(build_runs(base, axes)))
    assert sizes() == [4]
    with base.unlocked():
        base.methods.fedavg.attack = {"name": "sign_flip", "share": 0.4}
    assert sizes() == [2, 2]


def test_a_run_that_another_sweep_trains_is_left_to_it(
    config, tmp_path, capsys, monkeypatch
):
    folder, axis = tmp_path / "s", f"{RATE}=[0.05, 0.2]"
    first, second = sweep(config, folder, axis)
    for name in ("results.jsonl", "manifest.json"):
        (folder / name).unlink()
    add(folder, {"run": "another"})
    monkeypatch.setattr(sweeps.leases, "SILENT", 0.0)
    monkeypatch.setattr(sweeps, "WATCH", 0.1)
    with lock_to_write(folder / first["run"], "of another process"):
        rows = sweep(config, folder, axis)
    assert [row["run"] for row in rows] == ["another", second["run"]]
    assert f"{first['run']} is left to another sweep" in capsys.readouterr().out
    rows = sweep(config, folder, axis)
    assert [row["run"] for row in rows] == ["another", second["run"], first["run"]]


def test_a_sweep_and_a_run_take_no_folder_of_other_things(config, tmp_path, capsys):
    axis = f"{RATE}=[0.05]"
    sweep(config, tmp_path / "s", axis)
    for words, says in [
        (["train", "--overwrite", f"--workdir={tmp_path / 's'}"], "a run directory of"),
        (["sweep", axis, f"--workdir={tmp_path}"], "a sweep of"),
    ]:
        assert main([*words, f"--config={config}"]) == 2
        assert f"must be empty or {says} fedfr_jax" in capsys.readouterr().err
    assert (tmp_path / "s" / "results.jsonl").exists() and config.exists()


def test_a_sweep_ends_with_a_table_over_seeds(config, tmp_path, capsys):
    rows = sweep(config, tmp_path / "s", "seed=[0, 1]", f"{RATE}=[0.001, 0.2]")
    said = capsys.readouterr().out
    assert rows[0]["run"].startswith("seed=0,learning_rate=0.001-")
    values = [row["fedavg/generic/accuracy"] for row in rows]
    worse, better = np.mean(values[::2]), np.mean(values[1::2])
    assert better > worse
    line = next(line for line in said.splitlines() if line.startswith("best "))
    cell = f"{better:.3f}±{np.std(values[1::2]):.3f}"
    assert "learning_rate=0.2" in line and cell in line and cell in said


def test_a_number_that_is_not_finite_is_null_in_the_table(tmp_path):
    """As a mean over classes is, where nothing can be judged."""
    row = {"run": "a", "fedavg/generic/mIoU": float("nan"), "seed": 1}
    write(tmp_path, [row, {"run": "b", "loss": np.float64(-np.inf)}])
    rows = read(tmp_path)
    assert rows["a"] == {**row, "fedavg/generic/mIoU": None}
    assert rows["b"] == {"run": "b", "loss": None}


def test_a_run_that_fails_is_a_row_and_parts_its_group(config, tmp_path, capsys):
    decay = ["--config.methods.fedavg.weight_decay=1.0"]
    decay += ["--config.federation.local_epochs=3"]  # steps enough to overflow
    axis = f"{RATE}=[0.05, 2e9, -1.0]"
    good, wild, wrong = sweep(config, tmp_path / "s", axis, "--vmap", *decay)
    assert good["fedavg/generic/accuracy"] >= 0 and "error" not in good
    assert "must be finite" in wild["error"] and "at least 0" in wrong["error"]
    assert "one by one: FloatingPointError" in capsys.readouterr().out
    assert "Traceback" in (tmp_path / "s" / wild["run"] / "error.txt").read_text()
    words = ["--score=fedavg/generic/accuracy", "--num_resamples=1"]
    assert main(["scaling", str(tmp_path / "s"), *words]) == 0  # but for the failed


def test_a_killed_sweep_goes_on_and_repeats_nothing(config, tmp_path, monkeypatch):
    played = []
    run = sweeps.run_experiment

    def counted(experiment, folder, **rest):
        played.append(folder.name)
        if len(played) == 2:
            raise KeyboardInterrupt
        return run(experiment, folder, **rest)

    monkeypatch.setattr(sweeps, "run_experiment", counted)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, tmp_path / "s", "seed=[0, 1]")
    rows = sweep(config, tmp_path / "s", "seed=[0, 1]")
    assert [row["seed"] for row in rows] == [0, 1]
    assert played == [rows[0]["run"], rows[1]["run"], rows[1]["run"]]
    rows = sweep(config, tmp_path / "s", "seed=[0, 1, 2]")
    assert len(played) == 4 and len(rows) == 3


@pytest.mark.parametrize(
    "together", [["--vmap"], pytest.param([], marks=pytest.mark.slow)]
)
def test_what_runs_have_in_common_is_trained_once(together, tmp_path, capsys):
    central = {"kind": "central", "epochs": 2, "batch_size": 8, "learning_rate": 0.1}
    methods = {"central": central, "fedavg": {"learning_rate": 0.05}}
    config = write_config(tmp_path, {"evaluate_every": 0}, methods=methods)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        rows = sweep(config, tmp_path / "s", f"{RATE}=[0.05, 0.2]", *together)
    said = capsys.readouterr().out
    assert said.count("central is that of") == 1 and "fedavg is that" not in said
    lines = [tmp_path / "s" / row["run"] / "central" / "metrics.jsonl" for row in rows]
    assert lines[0].read_text() == lines[1].read_text()  # its seconds too
    assert rows[0]["central/generic/accuracy"] == rows[1]["central/generic/accuracy"]


def test_a_sweep_is_of_one_config(config, tmp_path, capsys):
    folder = tmp_path / "s"
    words = ["sweep", f"--config={config}", f"--workdir={folder}"]
    wrong = "methods.fedavg.learning_rate=[-1.0]"
    assert main([*words, wrong]) == 2  # its only run fails
    assert "all 1 runs in" in capsys.readouterr().err
    assert main([*words, "--config.federation.rounds=4", wrong]) == 2
    assert "config.federation.rounds must be 2 as in" in capsys.readouterr().err
    assert main(words) == 2 and "KEY=[VALUE, ...]" in capsys.readouterr().err
    assert main([*words, "nothing.at=[1]"]) == 2
    assert "config must have keys of" in capsys.readouterr().err


def test_axes_are_lists_and_make_every_combination():
    base = ConfigDict({"seed": 0, "model": {"a": 1, "b": 2}, "methods": {"x": {}}})
    runs = build_runs(base, ["model.a,model.b=[(1, 2), (3, 4)]", "seed=[5, 6, 6]"])
    assert [tuple(run.changes.values()) for run in runs] == [
        (1, 2, 5),
        (1, 2, 6),
        (3, 4, 5),
        (3, 4, 6),
    ]
    assert runs[3].config.model.b == 4 and base.model.b == 2
    assert [len(group) for group in group_runs(runs)] == [2, 2]
    for word in ("seed=3", "seed=[", "=[1]", "seed=[]", "a,b=[1]", "a,b=[(1, 2, 3)]"):
        with pytest.raises(ValueError, match="must be"):
            parse_axis(word)
    with pytest.raises(ValueError, match="set once"):
        build_runs(base, ["seed=[1]", "seed=[2]"])


def test_a_setting_of_an_algorithm_is_swept_in_one_program():
    """Also where the config names the algorithm alone."""
    base = ConfigDict({"seed": 0, "methods": {"prox": {"algorithm": "fedprox"}}})
    runs = build_runs(base, ["methods.prox.algorithm.mu=[0.1, 1.0]"])
    changed = runs[1].config.methods.prox.algorithm.to_dict()
    assert changed == {"name": "fedprox", "mu": 1.0}
    ((first, second),) = group_runs(runs)
    assert first[1] == {"prox": {"algorithm.mu": 0.1}}
    assert second[1] == {"prox": {"algorithm.mu": 1.0}}


def face_config(folder):
    """A network of two convolutions on 12 made-up people."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (12 * 4, 8, 8, 1), np.uint8)
    np.savez(folder / "a.npz", images=images, labels=np.repeat(np.arange(12), 4))
    return {
        "data": {"name": "arrays", "path": str(folder / "a.npz")},
        "partition": {
            "num_clients": 2,
            "ids_per_client": (2, 3),
            "num_public_ids": 4,
            "num_unseen_ids": 3,
        },
        "model": {
            "name": "sphereface",
            "blocks": (0, 0),
            "widths": (2, 4),
            "embedding_dim": 8,
        },
        "pretrain": {"epochs": 1, "batch_size": 8},
        "federation": {"rounds": 1, "batch_size": 4},
        "methods": {"fedfr": {}},
    }


def test_operations_are_those_of_the_network_however_it_is_computed(tmp_path):
    """Winograd's products are fewer, and of a small image more, with its padding."""
    config = face_config(tmp_path)
    model = {**config["model"], "widths": (8, 16), "blocks": (1, 0)}
    experiment = build(config | {"model": model})
    network = 2 * (16 * 9 * 8 * (1 + 2 * 8) + 4 * 9 * 16 * 8 + 4 * 16 * 8)
    assert count_sizes(experiment).flops == 3 * (network + 2 * 8 * (4 + 3))
    with jax.numpy_dtype_promotion("standard"):
        for row, classes in {"pretrained": 4, "fedfr": 0}.items():
            needs = needs_function(experiment, row)()
            assert needs.forward == network + 2 * 8 * classes


def test_faces_have_parameters_by_three_definitions(tmp_path):
    config = face_config(tmp_path)

    def experiment_with(**pretrain):
        return build({**config, "pretrain": {**config["pretrain"], **pretrain}})

    sizes = count_sizes(experiment_with())
    conv = (9 * 1 * 2 + 2 + 2) + (9 * 2 * 4 + 4 + 4)  # kernels, biases, PReLUs
    assert sizes.params_backbone == conv + 2 * 2 * 4 * 8 + 8
    assert sizes.params_with_head == sizes.params_backbone + 8 * (4 + 2 + 3)
    assert sizes.params_active == sizes.params_backbone + 8 * (4 + 3)
    assert sizes.num_identities == 9
    forward = 2 * (9 * 2 * 16 + 9 * 2 * 4 * 4 + 16 * 8)
    assert sizes.flops == 3 * (forward + 2 * 8 * 7)
    kept = {**config, "partition": {**config["partition"], "num_trained_public_ids": 2}}
    assert count_sizes(build(kept)).num_identities == sizes.num_identities - 2
    # On 8 devices the table has rows for 24: 3 classes a device in chunks.
    rates = {
        "class_sample_rate": (0.25, 0.5),
        "epochs": 4,
    }  # 0.25, then 0.5 three times
    cut = count_sizes(experiment_with(class_parallel=True, class_chunk_size=3, **rates))
    assert cut[:2] == sizes[:2] and cut.num_identities == 9
    drawn = round(4 * (0.25 + 3 * 0.5) / 4)
    assert cut.params_active == sizes.params_backbone + 8 * (drawn + 3)
    assert cut.flops == 3 * (forward + 2 * 8 * (drawn + 3))
