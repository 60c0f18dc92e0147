"""Ahead-of-time compilation of a config for TPUs and GPUs that are not attached.

The compilers of TPUs (2 GB) and of GPUs (6 GB) are in virtual environments, which are
created from the package registry at their first use, under $FEDFR_ACCELERATORS or the
system's temporary folder.

`compile_for` starts `python -m fedfr_jax.cli.aot_compile` with the same flags in the
environment of the compiler.
"""

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

from ml_collections import ConfigDict

from fedfr_jax import distributed
from fedfr_jax.cli import flags
from fedfr_jax.cli.flags import config_text
from fedfr_jax.config.build import sections
from fedfr_jax.plan.dummy_inputs import without_files
from fedfr_jax.plan.topologies import device_kind, topology
from fedfr_jax.tasks import TASKS
from fedfr_jax.tasks.experiment import build_experiment
from fedfr_jax.types import Experiment

LIBRARY = pathlib.Path(__file__).resolve().parents[1]
PINS = LIBRARY.parent / "requirements.txt"  # of a source checkout, as pyproject.toml
FREE_GB = {"tpu": 5, "cuda12": 20}  # of disk that an installation needs


def run_in(
    extra: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess:
    """Run this library in the environment of `jax[extra]`.

    Args:
      arguments: of `python`.
      environment: variables; those of JAX and XLA that are set here are dropped.
    """
    python = environment_python(extra)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    with tempfile.TemporaryDirectory() as folder:
        # The library without the packages that are installed next to it.
        (pathlib.Path(folder) / LIBRARY.name).symlink_to(LIBRARY)
        env |= {**environment, "PYTHONPATH": folder}
        return subprocess.run(
            [python, *arguments], capture_output=True, text=True, env=env
        )


def environment_python(extra: str) -> pathlib.Path:
    """Interpreter of the environment with `jax[extra]`, which is created if missing."""
    base, requirements = _interpreter(), [f"jax[{extra}]", *_dependencies()]
    pins = PINS.read_text() if PINS.is_file() else ""
    parent = os.environ.get("FEDFR_ACCELERATORS")
    parent = parent or pathlib.Path(tempfile.gettempdir()) / "fedfr_accelerators"
    folder = pathlib.Path(parent) / extra
    python, ready = folder / "bin" / "python", folder / ".ready"
    content = "\n".join([base, *requirements, pins])
    if ready.exists() and ready.read_text() == content:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < FREE_GB[extra] * 1e9:
        raise OSError(f"{folder} must have {FREE_GB[extra]} GB free for jax[{extra}].")
    print(f"installing jax[{extra}] into {folder}", file=sys.stderr, flush=True)
    _run(base, "-m", "venv", "--clear", folder)
    pinned = ["-c", PINS] if pins else []
    quietly = ["--quiet", "--disable-pip-version-check"]
    _run(python, "-m", "pip", "install", *quietly, *pinned, *requirements)
    ready.write_text(content)
    return python


def _dependencies() -> list[str]:
    """Requirements of the library, without its extras."""
    project = PINS.with_name("pyproject.toml")
    if PINS.is_file() and project.is_file():
        return tomllib.loads(project.read_text())["project"]["dependencies"]
    return [x for x in metadata.requires("fedfr_jax") or () if "extra ==" not in x]


def _interpreter() -> str:
    """Python 3.12, for which the newest JAX is built, or the current interpreter."""
    newest = shutil.which("python3.12")
    if (
        newest
        and not subprocess.run([newest, "-c", ""], capture_output=True).returncode
    ):
        return newest
    return sys.executable


def _run(*command) -> None:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        errors = [x for x in process.stderr.splitlines() if x.startswith("ERROR")]
        raise OSError(f"pip could not install the compiler: {' '.join(errors)}")


BAD_CONFIG_EXIT = 2  # exit code for an invalid config


def compile_here(flags: Sequence[str]) -> dict:
    """`compile_for` of this machine's own devices."""
    command = [sys.executable, "-m", "fedfr_jax.cli.aot_compile", "--device=cpu"]
    process = subprocess.run([*command, *flags], capture_output=True, text=True)
    return _result(process, "cpu", flags)


def compile_for(device: str, flags: Sequence[str]) -> dict:
    """Compile a config for a device: {stage: {program: result of `compile_programs`}}.

    Args:
      device: such as v5p:4x4x8 or h200:1x1x8, see `topologies`.
      flags: --config=NAME, --config.key=value, --methods=A,B.

    Raises:
      ValueError: for an unknown device or an invalid config.
      OSError: when the compiler cannot be installed.
      ChildProcessError: for any other failure, with the end of the process's output.
    """
    kind = device_kind(device)
    command = ["-m", "fedfr_jax.cli.aot_compile", f"--device={device}", *flags]
    return _result(run_in(kind.extra, command, kind.environment), device, flags)


def _result(process, device: str, flags: Sequence[str]) -> dict:
    """Result that a process of `main` has printed, see `compile_for`."""
    if process.returncode == BAD_CONFIG_EXIT:
        message = process.stderr.strip().splitlines()[-1]
        raise ValueError(f"the config cannot be built for {device}: {message}")
    if process.returncode:
        message = process.stderr[-4000:]
        raise ChildProcessError(f"{device} does not compile {flags}:\n{message}")
    return json.loads(process.stdout.splitlines()[-1])


def aot_compile(
    config: ConfigDict,
    *,
    device: str,
    methods: tuple[str, ...] = (),
    save: str | None = None,
) -> None:
    """Print the compiler's results for devices that are not attached, as JSON.

    Args:
      device: KIND:GRID devices to compile for
      methods: A,B stages (default all)
      save: FOLDER folder for the programs
    """
    from fedfr_jax.plan.aot import compile_stages

    is_here = device == "cpu"
    with (
        contextlib.nullcontext() if is_here else topology(device),
        saving(save, config) if save else contextlib.nullcontext(),
    ):
        results = compile_stages(without_images(config), methods)
    print(json.dumps(results))


@contextlib.contextmanager
def saving(save: str, config: ConfigDict) -> Iterator[None]:
    """Save the block's compiled programs to --save, for `fedfr train --compiled`."""
    from fedfr_jax import mesh
    from fedfr_jax.runs.compiled_programs import programs_in, write_stamp

    distributed.use_every_core()  # XLA's flags of a training are part of JAX's key
    folder = pathlib.Path(save)
    folder.mkdir(parents=True, exist_ok=True)
    with programs_in(folder):
        yield
    write_stamp(folder, json.loads(config_text(config)), mesh.list_devices())


def without_images(config: ConfigDict) -> Experiment:
    """Build the config's experiment with black images, same `data_placement`."""
    settings = sections(config)
    black = without_files(settings)
    data_placement = settings["federation"].get("data_placement", "auto")
    federation = {**black["federation"], "data_placement": data_placement}
    task = TASKS[settings["task"]]
    return build_experiment(task, {**black, "federation": federation})


def config_flags(argv: Sequence[str]) -> list[str]:
    """Flags of a command that choose its config and stages.

    >>> config_flags(["--config", "demo", "--json=x", "--methods=a", "--config.seed=1"])
    ['--config=demo', '--methods=a', '--config.seed=1']
    >>> config_flags(["--workdir=runs/a", "--compile"])
    ['--workdir=runs/a']
    """
    flags = []
    for i, word in enumerate(argv):
        if word in ("--config", "--methods", "--workdir") and i + 1 < len(argv):
            flags.append(f"{word}={argv[i + 1]}")
        elif word.startswith(("--config=", "--config.", "--methods=", "--workdir=")):
            flags.append(word)
    return flags


if __name__ == "__main__":
    try:
        flags.run("aot_compile", aot_compile, sys.argv[1:])
    except ValueError as error:
        if "FEDFR_DEBUG" in os.environ:
            raise
        print(error, file=sys.stderr)
        sys.exit(BAD_CONFIG_EXIT)
