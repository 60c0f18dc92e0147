"""Programs that a plan has compiled are not compiled again, or refused."""

import jax
import pytest

from fedfr_jax import manifest
from fedfr_jax.cli import aot_compile, flags
from fedfr_jax.cli.main import main
from fedfr_jax.runs.compiled_programs import STAMP
from tests.cli.conftest import write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Flag of a tiny config."""
    return f"--config={write_config(tmp_path_factory.mktemp('config'))}"


@pytest.fixture(scope="module")
def saved(config, tmp_path_factory):
    """A folder with the programs of a config, for the devices of this process."""
    folder = tmp_path_factory.mktemp("saved")
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot_compile.distributed, "use_every_core", lambda: None)
        words = [config, "--device=cpu", f"--save={folder}"]
        flags.run("aot_compile", aot_compile.aot_compile, words)
    return folder


def rounds_in(folder):
    return sorted(path.name for path in folder.glob("jit_whole-*-cache"))


@pytest.mark.ci
def test_a_training_compiles_no_round_that_a_plan_has(config, saved, tmp_path, capsys):
    before, cache = rounds_in(saved), jax.config.jax_compilation_cache_dir
    assert len(before) == 1
    words = [config, f"--workdir={tmp_path / 'run'}", "--sinks=csv"]
    with jax.numpy_dtype_promotion("standard"):
        assert main(["train", *words, f"--compiled={saved}"]) == 0
    assert rounds_in(saved) == before  # a round of its own would lie there now
    more = "--config.federation.rounds=3"  # it resumes, and compiles no other round
    with jax.numpy_dtype_promotion("standard"):
        assert main(["train", *words, f"--compiled={saved}", more]) == 0
    assert rounds_in(saved) == before
    assert f"programs were in {saved}, " in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir == cache


@pytest.mark.parametrize(
    "change, says",
    [
        ({"jax": "0.1"}, "got jax 0.1 in "),
        ({"device": "TPU v5 lite"}, "got device TPU v5 lite in "),
        ({"num_devices": 4}, "got num_devices 4 in "),
        ({"config": {"seed": 1}}, " in "),
        (None, "without compiled.json"),
    ],
)
def test_programs_of_something_else_are_refused(
    config, saved, tmp_path, capsys, change, says
):
    if change is not None:
        stamp = manifest.read_object(saved / STAMP) | change
        manifest.write_object(tmp_path / STAMP, stamp)
    words = [config, f"--workdir={tmp_path / 'run'}", f"--compiled={tmp_path}"]
    assert main(["train", *words]) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("--compiled must be") and says in line


def test_a_plan_says_what_it_cannot_save(config, capsys):
    for words, says in [
        (["--save=a"], "--save needs --compile for a grid of TPUs, or cpu"),
        (["--compile", "--save=a", "--device=h200:1x1x8"], "tuned on the device"),
    ]:
        assert main(["plan", config, *words]) == 2
        assert says in capsys.readouterr().err
