"""A run that has ended and is asked for more rounds."""

import json

import dp_accounting
import jax
import numpy as np
import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.config.build import build
from fedfr_jax.runs.checkpoint import read_ledger
from fedfr_jax.runs.stages import load_models
from fedfr_jax.runs.workdir import stored_config
from fedfr_jax.schema import with_tuples
from tests.cli.conftest import write_config

pytestmark = pytest.mark.ci


def train(*words):
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        assert main(["train", *map(str, words)]) == 0


def trained(folder):
    """Leaves of the server's network, and lines of metrics.jsonl."""
    experiment = build(with_tuples(stored_config(folder)))
    found = load_models(experiment, "scaffold", folder).variables
    lines = (folder / "scaffold" / "metrics.jsonl").read_text().splitlines()
    is_clock = lambda name: name == "seconds" or name.endswith("_per_second")
    rows = [{k: v for k, v in json.loads(x).items() if not is_clock(k)} for x in lines]
    return jax.tree.leaves(found), rows


def test_more_rounds_give_the_bits_of_as_many_from_the_beginning(tmp_path, capsys):
    method = {"algorithm": "scaffold", "learning_rate": 0.05, "decay_rounds": (1, 4)}
    rounds, methods = {"rounds": 6, "cohort_size": 2}, {"scaffold": method}
    config = f"--config={write_config(tmp_path, rounds, methods=methods)}"
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    train(config, f"--workdir={whole}")
    for rounds in (2, 6):
        more = f"--config.federation.rounds={rounds}"
        train(config, f"--workdir={longer}", more)
    assert capsys.readouterr().out.count("scaffold continues from its last") == 1
    (expected, lines), (found, own_lines) = trained(whole), trained(longer)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left, right)
    assert own_lines == lines and len(lines) == 6
    summary = json.loads((longer / "summary.json").read_text())
    shares = summary["time_shares"]
    assert summary["goodput"] == shares["training"] > 0 and shares["compile"] > 0
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    log = (longer / "scaffold" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(log[-1])
    images = last["images_per_second"]
    assert last["clients_per_second"] * 8 * 2 == pytest.approx(images)  # two batches
    assert last["model_flops_per_second"] == pytest.approx(images * 3 * 2 * 16 * 5)
    assert main(["evaluate", f"--workdir={longer}"]) == 0


def private_run(tmp_path, **noise):
    """(words of `fedfr train`, the run's folder) of a private method."""
    privacy = {"clip_norm": 0.5, "delta": 0.01, "epsilon": 8.0, **noise}
    methods = {"row": {"learning_rate": 0.05, "privacy": privacy}}
    path = write_config(tmp_path, methods=methods)
    folder = tmp_path / "run"
    return [f"--config={path}", f"--workdir={folder}"], folder


def spent(folder):
    """Epsilon after each round, and that of the summary."""
    lines = (folder / "row" / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    of_rounds = [json.loads(line)["epsilon"] for line in lines]
    return of_rounds, summary["methods"]["row"]["privacy"]["epsilon"]


def test_more_private_rounds_than_the_budget_has_left_are_refused(tmp_path, capsys):
    """Their noise is calibrated anew, to as much as six rounds from the start need."""
    words, folder = private_run(tmp_path)
    train(*words, "--config.federation.rounds=3")
    before = spent(folder)
    assert 7.9 < before[1] == before[0][-1] <= 8
    capsys.readouterr()
    assert main(["train", *words, "--config.federation.rounds=6"]) != 0
    error = capsys.readouterr().err
    assert "rounds must stay at 3" in error and "privacy.epsilon = 8" in error
    assert "Compil" not in error
    train(*words, "--config.federation.rounds=3")
    assert spent(folder) == before


@pytest.mark.slow
def test_more_private_rounds_with_budget_are_those_of_as_many(tmp_path, capsys):
    words, folder = private_run(tmp_path, noise_multiplier=4.0)
    for rounds in (2, 4):
        train(*words, f"--config.federation.rounds={rounds}")
    of_rounds, last = spent(folder)
    expected = [
        dp_accounting.get_epsilon_gaussian(4 / number**0.5, 0.01)
        for number in range(1, 5)
    ]
    np.testing.assert_allclose([*of_rounds, last], [*expected, expected[-1]], rtol=1e-6)
    path = folder / "row" / "checkpoints" / "4" / "default" / "ledger.json"
    assert json.loads(path.read_text())[0]["rounds"] == 4
    assert main(["evaluate", f"--workdir={folder}"]) == 0
    found = json.loads((folder / "evaluation.json").read_text())["methods"]["row"]
    assert found["privacy"]["epsilon"] == last
    for ledger in folder.glob("row/checkpoints/*/default/ledger.json"):
        ledger.write_text(ledger.read_text().replace("4.0", "40.0"))
    capsys.readouterr()
    assert main(["train", *words, "--config.federation.rounds=6"]) != 0
    assert "4/default/ledger.json must be as it was" in capsys.readouterr().err
    path.unlink()
    (path.parent / "manifest.json").unlink()
    with pytest.raises(ValueError, match="must have a ledger.json .*--overwrite=row"):
        read_ledger(folder / "row", 4)
