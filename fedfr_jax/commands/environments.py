"""Virtual environments with the compilers of TPUs (2 GB) and of GPUs (6 GB).

Each is made from the package registry when it is first asked for, under
$FEDFR_ACCELERATORS or the system's temporary folder, and used again.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata

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

    Raises:
      OSError: when the environment cannot be made.
    """
    python = python_of(extra)
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    with tempfile.TemporaryDirectory() as folder:
        # The library without what is installed beside it.
        (pathlib.Path(folder) / LIBRARY.name).symlink_to(LIBRARY)
        given = {**ours, **environment, "PYTHONPATH": folder}
        return subprocess.run(
            [python, *words], capture_output=True, text=True, env=given
        )


def python_of(extra: str) -> pathlib.Path:
    """The interpreter of the environment with `jax[extra]`; makes it, in minutes.

    Raises:
      OSError: when the disk is too full, or pip fails, with its errors.
    """
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
    """What the library needs, without its extras."""
    project = PINS.with_name("pyproject.toml")
    if PINS.is_file() and project.is_file():
        return tomllib.loads(project.read_text())["project"]["dependencies"]
    return [x for x in metadata.requires("fedfr_jax") or () if "extra ==" not in x]


def _interpreter() -> str:
    """Python 3.12, for which the newest JAX is, or the one that runs this."""
    known = shutil.which("python3.12")
    test = lambda: subprocess.run([known, "-c", ""], capture_output=True)
    works = known and test().returncode == 0
    return known if works else sys.executable


def _run(*command) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
        raise OSError(f"pip must install what is asked for, but: {' '.join(errors)}")
