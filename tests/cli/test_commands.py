"""The command line as a user meets it: help, and data that is looked at."""

import json
import subprocess
import sys

import pytest

from fedfr_jax.cli.main import main


@pytest.mark.parametrize(
    ("code", "slow"),
    {
        "import fedfr_jax.cli.main": {"jax", "numpy"},
        "import fedfr_jax as ff; ff.fedavg; ff.init": {"flax", "scipy", "PIL", "rich"},
    }.items(),
)
def test_nothing_slow_is_imported_before_it_is_used(code, slow):
    code += "; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert slow.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("command", ["train", "evaluate", "prepare", "launch"])
def test_help_is_everywhere(command, capsys):
    assert main([command, "--help"]) == 0
    expected = "--processes_per_host" if command == "launch" else "--config"
    assert expected in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(
        command in text for command in ("train", "evaluate", "prepare", "launch")
    )


def test_prepare_reports_the_data_and_its_split(config, tmp_path, capsys):
    assert main(["prepare", f"--config={config}", f"--workdir={tmp_path / 'w'}"]) == 0
    assert "3 clients, train" in capsys.readouterr().out
    facts = json.loads((tmp_path / "w" / "data.json").read_text())
    assert facts["data"]["identities"] == 19


def test_prepare_packs_the_data_into_a_new_folder_and_finds_damage(
    config, tmp_path, capsys
):
    words = ["prepare", f"--config={config}", f"--pack={tmp_path / 'p'}", "--checksums"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert "images-00000.npy: rows 0 to 151" in first and "3 clients, train" in first
    assert main(words) == 2
    assert "p must be a new folder to pack into" in capsys.readouterr().err
    shard = tmp_path / "p" / "images-00000.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    data = ["--config.data.name=packed", f"--config.data.path={tmp_path / 'p'}"]
    assert main(["prepare", f"--config={config}", "--checksums", *data]) == 2
    assert f"{shard} must be as it was written" in capsys.readouterr().err
