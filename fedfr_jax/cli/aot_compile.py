"""Ahead-of-time compilation of a config for TPUs and GPUs that are not attached.

The compilers of TPUs and GPUs (6 GB) are packages that JAX's extras name. They are
installed from the package registry at their first use, under $FEDFR_ACCELERATORS or the
system's temporary folder.

`compile_for` starts `python -m fedfr_jax.cli.aot_compile` with the same flags, and with
the compiler in its path.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata

from ml_collections import ConfigDict

from fedfr_jax import distributed
from fedfr_jax.cli import flags
from fedfr_jax.cli.flags import config_text
from fedfr_jax.plan.devices import CPU, Kind, parse_grid, topology
from fedfr_jax.plan.dummy_inputs import blind_experiment

MODULE = "fedfr_jax.cli.aot_compile"
READY = ".ready"  # in the folder of a compiler that is installed
PACKAGES = pathlib.Path(__file__).resolve().parents[2]  # folder of this library
FREE_GB = {"tpu": 5, "cuda12": 20}  # of disk that an installation needs


def compiler_environment(kind: Kind) -> dict[str, str]:
    """Environment variables of a process that compiles for a kind of device.

    The packages that the installed JAX needs for it are installed if they are missing.
    Variables of JAX and XLA that are set here are dropped.
    """
    name = f"{kind.extra}-jax{metadata.version('jax')}-{sys.implementation.cache_tag}"
    parent = os.environ.get("FEDFR_ACCELERATORS")
    parent = parent or pathlib.Path(tempfile.gettempdir()) / "fedfr_accelerators"
    folder = pathlib.Path(parent) / name
    if not (folder / READY).exists():
        _install(kind.extra, folder)
        (folder / READY).touch()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    paths = [str(folder), str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, paths))
    return {**env, **kind.environment, "PYTHONPATH": paths}


def _install(extra: str, folder: pathlib.Path) -> None:
    """Install the packages of `jax[extra]`, without JAX, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < FREE_GB[extra] * 1e9:
        raise OSError(f"{folder} must have {FREE_GB[extra]} GB free for jax[{extra}].")
    print(f"installing jax[{extra}] into {folder}", file=sys.stderr, flush=True)
    of_extra = [x for x in metadata.requires("jax") or () if f'"{extra}"' in x]
    packages = [x.partition(";")[0] for x in of_extra if not x.startswith("jaxlib")]
    quietly = ["--quiet", "--disable-pip-version-check", "--upgrade"]
    process = subprocess.run(
        [sys.executable, "-m", "pip", "install", *quietly, "--target", folder]
        + packages,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise OSError(f"pip could not install the compiler: {process.stderr[-300:]}")


BAD_CONFIG_EXIT = 2  # exit code for an invalid config


def compile_for(device: str, flags: Sequence[str]) -> dict:
    """Compile a config for a device: {stage: {program: result of `compile_programs`}}.

    Args:
      device: such as v5p:4x4x8 or h200:1x1x8, see `topologies`; cpu is this machine.
      flags: --config=NAME, --config.key=value, --methods=A,B.

    Raises:
      ValueError: for an unknown device or an invalid config.
      OSError: when the compiler cannot be installed.
      ChildProcessError: for any other failure, with the end of the process's output.
    """
    is_here = device == CPU
    process = subprocess.run(
        [sys.executable, "-m", MODULE, f"--device={device}", *flags],
        capture_output=True,
        text=True,
        env=None if is_here else compiler_environment(parse_grid(device).kind),
    )
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

    with (
        contextlib.nullcontext() if device == CPU else topology(device),
        saving(save, config) if save else contextlib.nullcontext(),
    ):
        results = compile_stages(blind_experiment(config, is_placed=True), methods)
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
