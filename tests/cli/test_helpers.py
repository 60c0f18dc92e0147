"""Commands beside training: doctor, completion, demo; a config shown or repeated."""

import json
import pathlib
import shutil
import subprocess
import tomllib

import pytest

from fedfr_jax.cli import describe, doctor, train
from fedfr_jax.cli.main import COMMANDS, main

ROOT = pathlib.Path(__file__).parents[2]


def test_doctor_says_what_there_is_and_what_to_fix(capsys, monkeypatch):
    monkeypatch.setenv("FEDFR_DATA", "nowhere")
    asked = doctor.metadata.requires("fedfr_jax")
    extras = [f"none-{line}" for line in asked if "extra ==" in line]
    core = [line for line in asked if "extra ==" not in line]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: core + extras)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in found}
    for name in ("python", "packages", "devices", "memory", "compiler", "disk"):
        assert by_name[name]["state"] == "ok", by_name[name]
    assert by_name["data sets"]["fix"].startswith("Set FEDFR_DATA")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_users = extras.keys() - {"docs", "test"}
    assert doctor.EXTRAS.keys() == of_users
    fixes = {row["fix"] for row in found}
    assert {f"pip install 'fedfr_jax[{name}]'" for name in of_users} <= fixes


def test_doctor_ends_with_1_where_something_must_be_fixed(capsys, monkeypatch):
    broken = doctor.Finding("disk", "fix", "0.1 GiB free", "Make room.")
    monkeypatch.setattr(doctor, "findings", lambda: iter([broken]))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FIX   disk") and "Make room." in said


@pytest.fixture(scope="module")
def flags():
    return describe.all_flags()


def test_every_command_completes_its_flags(flags):
    assert flags.keys() == COMMANDS.keys()
    assert {"--config=", "--from=", "--sinks="} <= {*flags["train"]}
    assert {"--weights=", "--output="} <= {*flags["export"]}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    "words, expected",
    [
        ("fedfr repo", "report"),
        ("fedfr train --from", "--from="),
        ("fedfr train --config = fedfr/d", "fedfr/demo"),
    ],
)
def test_bash_completes(flags, words, expected, tmp_path):
    script = tmp_path / "fedfr"
    script.write_text(describe.bash(flags, ["fedfr/demo", "fedfr/lfw"], "bash"))
    typed = " ".join(repr(word) for word in words.split())
    run = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words.split()) - 1}"
    run += "; compopt() { :; }; _fedfr; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, cwd="/")
    assert done.stdout.split() == [expected], done.stderr


def test_zsh_and_fish_have_the_same_words(flags):
    assert describe.bash(flags, [], "zsh").startswith("#compdef fedfr")
    assert "seen_subcommand_from train' -l from -r" in describe.fish(flags, ["a"])


def test_a_config_is_printed_as_a_run_keeps_it_and_repeated_from_a_run(
    config, tmp_path, capsys
):
    words = [f"--config={config}", "--config.seed=7", "--print-config"]
    assert main(["train", *words]) == 0
    kept = capsys.readouterr().out
    assert json.loads(kept)["seed"] == 7
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(kept)
    again = [f"--from={run}", "--config.seed=8", "--print-config"]
    assert main(["train", *again]) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert repeated["seed"] == 8 and repeated["federation"]["rounds"] == 3
    for wrong, says in (
        ([f"--from={tmp_path}", "--print-config"], "--from must be a run directory"),
        (
            [f"--from={run}", f"--config={config}"],
            "--config cannot be used with --from",
        ),
    ):
        assert main(["train", *wrong]) == 2
        assert says in capsys.readouterr().err


def test_demo_trains_the_shipped_config(tmp_path, monkeypatch, capsys):
    of = []
    monkeypatch.setattr(train, "train", lambda *args, **x: of.append((*args, x)))
    assert main(["demo", f"--workdir={tmp_path / 'a'}", "--config.seed=3"]) == 0
    config, others = of[0]
    assert config.seed == 3 and others["workdir"] == f"{tmp_path / 'a'}"
    assert f"fedfr report {tmp_path / 'a'}" in capsys.readouterr().out
