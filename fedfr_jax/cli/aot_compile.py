"""Ahead-of-time compilation of a config for TPUs and GPUs that are not attached.

The compilers of TPUs (2 GB) and of GPUs (6 GB) are in virtual environments. Each is
made from the package registry at its first use, under $FEDFR_ACCELERATORS or the
system's temporary folder, and kept.

`compile_for` starts `python -m fedfr_jax.cli.aot_compile` with the same words in the
environment that has the compiler.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

import ml_collections

from fedfr_jax import distributed
from fedfr_jax.cli.flags import define, kept_text, names, new_parser, parse
from fedfr_jax.config.build import sections
from fedfr_jax.plan.dummy_inputs import without_files
from fedfr_jax.plan.topologies import device_kind, topology
from fedfr_jax.tasks import TASKS
from fedfr_jax.types import Experiment

LIBRARY = pathlib.Path(__file__).resolve().parents[1]
PINS = LIBRARY.parent / "requirements.txt"  # of a source checkout, as pyproject.toml
FREE_GB = {"tpu": 5, "cuda12": 20}  # on the disk, while it is made


def run_in(
    extra: str, words: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess:
    """Run this library in the environment of `jax[extra]`.

    Args:
      words: what follows `python`.
      environment: variables; those of JAX and XLA that are set here do not count.
    """
    python = environment_python(extra)
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    with tempfile.TemporaryDirectory() as folder:
        # The library without what is installed beside it.
        (pathlib.Path(folder) / LIBRARY.name).symlink_to(LIBRARY)
        given = {**ours, **environment, "PYTHONPATH": folder}
        return subprocess.run(
            [python, *words], capture_output=True, text=True, env=given
        )


def environment_python(extra: str) -> pathlib.Path:
    """Interpreter of the environment with `jax[extra]`, which is created in minutes."""
    base, wanted = _interpreter(), [f"jax[{extra}]", *_dependencies()]
    pins = PINS.read_text() if PINS.is_file() else ""
    parent = os.environ.get("FEDFR_ACCELERATORS")
    parent = parent or pathlib.Path(tempfile.gettempdir()) / "fedfr_accelerators"
    folder = pathlib.Path(parent) / extra
    python, ready = folder / "bin" / "python", folder / ".ready"
    made_of = "\n".join([base, *wanted, pins])
    if ready.exists() and ready.read_text() == made_of:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < FREE_GB[extra] * 1e9:
        raise OSError(f"{folder} must have {FREE_GB[extra]} GB free for jax[{extra}].")
    print(f"installing jax[{extra}] into {folder}", file=sys.stderr, flush=True)
    _run(base, "-m", "venv", "--clear", folder)
    pinned = ["-c", PINS] if pins else []
    quietly = ["--quiet", "--disable-pip-version-check"]
    _run(python, "-m", "pip", "install", *quietly, *pinned, *wanted)
    ready.write_text(made_of)
    return python


def _dependencies() -> list[str]:
    """Requirements of the library, without its extras."""
    project = PINS.with_name("pyproject.toml")
    if PINS.is_file() and project.is_file():
        return tomllib.loads(project.read_text())["project"]["dependencies"]
    return [x for x in metadata.requires("fedfr_jax") or () if "extra ==" not in x]


def _interpreter() -> str:
    """Python 3.12, for which the newest JAX is built, or the current interpreter."""
    known = shutil.which("python3.12")
    test = lambda: subprocess.run([known, "-c", ""], capture_output=True)
    works = known and test().returncode == 0
    return known if works else sys.executable


def _run(*command) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
        raise OSError(f"pip could not install the compiler: {' '.join(errors)}")


BAD_CONFIG_EXIT = 2  # exit code of a config that is wrong
ABOUT = "Compile the programs of a config's rows for devices that need not be there."


def compile_here(words: Sequence[str]) -> dict:
    """`compile_for` of this machine's own devices."""
    command = [sys.executable, "-m", "fedfr_jax.cli.aot_compile", "--device=cpu"]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    return _result(done, "cpu", words)


def compile_for(device: str, words: Sequence[str]) -> dict:
    """Compile a config for a device: {stage: {program: result of `compile_programs`}}.

    Args:
      device: such as v5p:4x4x8 or h200:1x1x8, see `topologies`.
      words: flags of a config: --config=NAME, --config.key=value, --methods=A,B.

    Raises:
      ValueError: for an unknown device, and for anything wrong in the config.
      OSError: when the compiler cannot be installed.
      ChildProcessError: with the end of what the process said, where it failed
        otherwise.
    """
    kind = device_kind(device)
    command = ["-m", "fedfr_jax.cli.aot_compile", f"--device={device}", *words]
    return _result(run_in(kind.extra, command, kind.environment), device, words)


def _result(
    done: subprocess.CompletedProcess, device: str, words: Sequence[str]
) -> dict:
    """What a process of `main` has printed, see `compile_for`."""
    if done.returncode == BAD_CONFIG_EXIT:
        says = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"the config cannot be built for {device}: {says}")
    if done.returncode:
        says = done.stderr[-4000:]
        raise ChildProcessError(f"{device} does not compile {words}:\n{says}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    """Print the compiler's results as JSON on the last line."""
    parser = new_parser("fedfr_jax.cli.aot_compile", ABOUT)
    define(parser, needs_workdir=False)
    parser.add_argument("--device", required=True, metavar="KIND:GRID")
    parser.add_argument("--methods", type=names, default=(), metavar="A,B")
    parser.add_argument("--save", metavar="FOLDER")
    values = parse(parser, argv)
    from fedfr_jax.plan.aot import compile_stages

    is_here = values.device == "cpu"
    with (
        contextlib.nullcontext() if is_here else topology(values.device),
        saving(values) if values.save else contextlib.nullcontext(),
    ):
        found = compile_stages(without_images(values.config), values.methods)
    print(json.dumps(found))


@contextlib.contextmanager
def saving(values: argparse.Namespace) -> Iterator[None]:
    """Keep what the block compiles in --save, for `fedfr train --compiled`."""
    from fedfr_jax import mesh
    from fedfr_jax.runs.compiled_programs import programs_in, write_stamp

    distributed.use_every_core()  # the flags of a training, by which JAX finds them
    folder = pathlib.Path(values.save)
    folder.mkdir(parents=True, exist_ok=True)
    with programs_in(folder):
        yield
    config = json.loads(kept_text(values.config))
    write_stamp(folder, config, mesh.list_devices())


def without_images(config: ml_collections.ConfigDict) -> Experiment:
    """Build the config's experiment with black images, same `data_placement`."""
    settings = sections(config)
    black = without_files(settings)
    where = settings["federation"].get("data_placement", "auto")
    federation = {**black["federation"], "data_placement": where}
    return TASKS[settings["task"]]({**black, "federation": federation})


def config_words(argv: Sequence[str]) -> list[str]:
    """Words of a command about its config: --config, its changes, --methods, --workdir.

    >>> config_words(["--config", "demo", "--json=x", "--methods=a", "--config.seed=1"])
    ['--config=demo', '--methods=a', '--config.seed=1']
    >>> config_words(["--workdir=runs/a", "--compile"])
    ['--workdir=runs/a']
    """
    kept = []
    for i, word in enumerate(argv):
        if word in ("--config", "--methods", "--workdir") and i + 1 < len(argv):
            kept.append(f"{word}={argv[i + 1]}")
        elif word.startswith(("--config=", "--config.", "--methods=", "--workdir=")):
            kept.append(word)
    return kept


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        if "FEDFR_DEBUG" in os.environ:
            raise
        print(error, file=sys.stderr)
        sys.exit(BAD_CONFIG_EXIT)
