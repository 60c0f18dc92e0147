"""The wheel and the sdist in empty environments: Pythons, and sets of dependencies.

    make wheels
    make wheels ARGS="--pythons 3.12 /opt/python3.13"

On every Python: the wheel with the newest dependencies, the wheel with the lowest that
pyproject.toml names, the sdist with the newest. In each of these, from an empty folder,
the README's example must print its numbers, and `fedfr` its version and configs, and
train a round of the config smoke. It prints a table, and ends with 1 if one failed.
Needs uv and the package registry.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from tests.test_packaging import PROJECT, ROOT, built

PYTHONS = ("3.11", "3.12", "3.13")
SHOWN = ("jax", "flax", "numpy", "optax", "orbax-checkpoint")
ROUND = "train --config=smoke --config.federation.rounds=1 --workdir=run"
EXAMPLE = re.compile(
    r"<!-- example.*?```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL
)


class Case(NamedTuple):
    """An environment to try."""

    python: str
    dependencies: str  # newest or lowest
    archive: pathlib.Path


def cases(pythons: list[str], wheel: pathlib.Path) -> list[Case]:
    """Three environments for each Python."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    kinds = (("newest", wheel), ("lowest", wheel), ("newest", sdist))
    return [Case(python, *kind) for python in pythons for kind in kinds]


def run(folder: pathlib.Path, *words: str | pathlib.Path) -> str:
    """Output of a program that is started in `folder` and knows no source tree.

    Raises:
      RuntimeError: if it fails, with the end of what it printed.
    """
    env = {k: x for k, x in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        text = (done.stdout + done.stderr).strip()[-1500:]
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.returncode}\n{text}")
    return done.stdout


def install(case: Case, folder: pathlib.Path) -> pathlib.Path:
    """Make an environment in `folder`; return its bin."""
    run(folder, "uv", "venv", "--quiet", "--python", case.python, "env")
    wanted = [case.archive]
    if case.dependencies == "lowest":  # of a file's lines, not of a wheel's metadata
        wanted += ["--resolution=lowest-direct", "-r", ROOT / "pyproject.toml"]
    programs = folder / "env" / "bin"
    install = ["uv", "pip", "install", "--quiet", f"--python={programs / 'python'}"]
    run(folder, *install, *wanted)
    return programs


def check(programs: pathlib.Path, folder: pathlib.Path) -> None:
    """Run what the README promises.

    Raises:
      RuntimeError, AssertionError: for what does not hold.
    """
    found = EXAMPLE.search((ROOT / "README.md").read_text())
    assert found
    code, expected = found.groups()
    printed = run(folder, programs / "python", "-c", code).split()
    for word, other in zip(printed, expected.split(), strict=True):
        is_number = re.fullmatch(r"0\.\d+", other)
        assert abs(float(word) - float(other)) < 0.005 if is_number else word == other
    fedfr = programs / "fedfr"
    assert run(folder, fedfr, "--version").split()[-1] == PROJECT["version"]
    assert "fedfr/demo" in run(folder, fedfr, "configs")
    run(folder, fedfr, *ROUND.split())
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["methods"].keys() == {"fedper"}


def versions(programs: pathlib.Path) -> list[str]:
    """Python, and packages that decide what works."""
    code = (
        "import platform; from importlib.metadata import version; "
        f"print(platform.python_version(), *map(version, {SHOWN}))"
    )
    return run(programs, programs / "python", "-c", code).split()


def attempt(case: Case) -> tuple[list[str], str]:
    """(a line of the table, the error or "")."""
    start, error, found = time.perf_counter(), "", [case.python, *"-" * len(SHOWN)]
    with tempfile.TemporaryDirectory() as name:
        folder, empty = pathlib.Path(name), pathlib.Path(name, "empty")
        empty.mkdir()
        try:
            programs = install(case, folder)
            found = versions(programs)
            check(programs, empty)
        except (RuntimeError, AssertionError) as failed:
            error = f"{type(failed).__name__}: {failed}"
    archive = "sdist" if case.archive.name.endswith(".tar.gz") else "wheel"
    result = "failed" if error else f"{time.perf_counter() - start:.0f} s"
    return [found[0], archive, case.dependencies, *found[1:], result], error


def main(argv: list[str]) -> int:
    """Try all cases, print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    pythons = parser.parse_args(argv).pythons
    head = ["Python", "archive", "dependencies", *SHOWN, "result"]
    lines, errors = [head, ["---"] * len(head)], []
    with tempfile.TemporaryDirectory() as name:
        wheel = built(pathlib.Path(name))
        check_command = [sys.executable, "-m", "twine", "check", "--strict"]
        print(run(ROOT, *check_command, *wheel.parent.iterdir()))
        for case in cases(pythons, wheel):
            line, error = attempt(case)
            lines.append(line)
            errors += [f"{' '.join(line)}\n{error}"] * bool(error)
            print(f"{' '.join(line)}\n{error}", flush=True)
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    print("\n\n".join(errors))
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
