"""Data that change, and data that move, between a run's training and its later use."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.cli.main import main
from tests.cli.conftest import write_config

pytestmark = pytest.mark.ci


def picture(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders set and run, and the config, of a finished run."""
    root = tmp_path_factory.mktemp("trained")
    for who in "abc":
        (root / "set" / who).mkdir(parents=True)
        for number in range(12):
            picture(root / "set" / who / f"{number}.bmp", [ord(who), number])
    data = {"name": "folder", "path": str(root / "set"), "image_size": 4}
    partition = {"name": "iid", "num_clients": 2}
    write_config(root, {"rounds": 1}, data=data, partition=partition)
    assert main(["train", f"--config={root}/tiny.py", f"--workdir={root}/run"]) == 0
    return root


@pytest.fixture
def case(trained, tmp_path):
    """A copy of it, whose data have moved with it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(case, command, *words, config="tiny.py"):
    """Exit status of a command on the case's data."""
    here = f"--workdir={case}/run", f"--config.data.path={case}/set"
    config = [f"--config={case}/{config}"] if config else []
    return main([command, *config, *here, *words])


def add_a_picture(data):
    picture(data / "b" / "99.bmp", 1)


def rename_a_class(data):
    (data / "b").rename(data / "z")


def swap_two_people(data):
    for one, other in (("a", "x"), ("b", "a"), ("x", "b")):
        (data / one).rename(data / other)


CHANGES = {
    add_a_picture: "b/99.bmp is new",
    rename_a_class: "z/0.bmp is new; z/1.bmp is new; ",
    swap_two_people: "24 images differ: a/0.bmp was ",
}


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_are_refused_with_what_changed(change, command, case, capsys):
    before = (case / "run" / "config.json").read_text()
    change(case / "set")
    assert run(case, command)
    said = capsys.readouterr().err
    assert "must be used with the data that it was trained on" in said
    assert CHANGES[change] in said and "--data-changed=accept" in said
    assert (case / "run" / "config.json").read_text() == before


def test_changed_data_are_accepted_where_that_is_meant(case, capsys):
    """By `train` once for all, by `evaluate` for this time."""
    add_a_picture(case / "set")
    kept = (case / "run" / "fedavg" / "data.npz").read_bytes()
    assert run(case, "evaluate", "--data-changed=accept") == 0
    said = capsys.readouterr().out
    assert "its data have changed: " in said and "b/99.bmp is new" in said
    assert (case / "run" / "fedavg" / "data.npz").read_bytes() == kept
    assert run(case, "evaluate")
    assert run(case, "train", "--data_changed=accept") == 0
    assert run(case, "evaluate") == 0


def test_data_that_moved_are_found_from_any_folder(case, monkeypatch):
    """The place is no part of the run; the kept one is absolute, and ~ is home."""
    (case / "home").mkdir()
    shutil.move(case / "set", case / "home" / "moved")
    monkeypatch.setenv("HOME", str(case / "home"))
    words = f"--config={case}/tiny.py", f"--workdir={case}/run"
    assert main(["train", *words, "--config.data.path=~/moved"]) == 0
    kept = json.loads((case / "run" / "config.json").read_text())
    assert kept["data"]["path"] == str(case / "home" / "moved")
    monkeypatch.chdir(case / "home")
    assert main(["train", *words, "--config.data.path=moved"]) == 0
    monkeypatch.chdir(case)
    assert main(["evaluate", f"--workdir={case}/run"]) == 0


def test_a_clients_network_whose_data_moved_says_what_to_do(case, capsys):
    words = f"--weights={case}/run", f"--output={case}/x.npz", "--client=0"
    assert run(case, "train") == 0  # with the case's own place
    (case / "set").rename(case / "moved")
    assert main(["embed", *words[:2], str(case / "moved")]) == 0  # the server's own
    assert main(["embed", *words, str(case / "moved")])
    said = capsys.readouterr().err
    assert f"data at the path in its config.json, {case}/set" in said
    assert f"`fedfr train --workdir={case}/run --config.data.path=NEW`" in said
    assert (
        main(["train", f"--workdir={case}/run", f"--config.data.path={case}/moved"])
        == 0
    )
    assert main(["embed", *words, str(case / "moved")]) == 0


def test_a_sweep_takes_nothing_from_runs_on_other_data(case, capsys):
    words = f"--config={case}/tiny.py", f"--config.data.path={case}/set"
    sweep = ["sweep", *words, f"--workdir={case}/sweep"]
    assert main([*sweep, "federation.clients_per_device=[1]"]) == 0
    add_a_picture(case / "set")
    main([*sweep, "federation.clients_per_device=[1, 2]"])
    lines = (case / "sweep" / "results.jsonl").read_text().splitlines()
    one, other = map(json.loads, lines)
    assert "error" not in one and "b/99.bmp is new" in other["error"]
    accept = "--data-changed=accept", "--retry_failed"
    assert main([*sweep, "federation.clients_per_device=[1, 2]", *accept]) == 0
    lines = (case / "sweep" / "results.jsonl").read_text().splitlines()
    assert not any("error" in json.loads(line) for line in lines)
    assert "fedavg is that of " in capsys.readouterr().out
