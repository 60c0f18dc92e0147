"""Put in every fault, one at a time: python -m tests.mutants [--only=TEXT]

Prints the survivors; exits with 1 when there is one, or a text is not found once.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tests.mutants.lists import ROOT, Mutant, mutants

IGNORED = shutil.ignore_patterns(".*", "runs", "__pycache__", "build", "dist")
LONGEST = 900  # seconds of a mutant's tests: one that hangs is noticed


def main() -> int:
    """0 when the tests notice every fault, else 1."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="part of a file's name or text")
    only = parser.parse_args().only
    chosen = [m for m in mutants() if only in f"{m.file}: {m.old}"]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "tree")
        shutil.copytree(ROOT, copy, ignore=IGNORED)
        escaped = [m for m in chosen if not is_noticed(copy, m)]
    for mutant in escaped:
        print(f"SURVIVOR {mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    print(f"{len(chosen) - len(escaped)} of {len(chosen)} faults were noticed")
    return 1 if escaped else 0


def is_noticed(copy: pathlib.Path, mutant: Mutant) -> bool:
    """Whether a test fails with the fault in `copy`, which is as before afterwards."""
    path, began = copy / mutant.file, time.perf_counter()
    text = path.read_text()
    if text.count(mutant.old) != 1:
        print(f"not found once: {mutant.file}: {mutant.old!r}", flush=True)
        return False
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        result = run_tests(copy, mutant.tests)
    finally:
        path.write_text(text)
    words = {0: "survived", 1: "noticed"}.get(result, f"pytest gave {result}")
    seconds = time.perf_counter() - began
    print(f"{words} in {seconds:.0f} s: {mutant.file}: {mutant.old!r}", flush=True)
    return result == 1


def run_tests(copy: pathlib.Path, tests: tuple[str, ...]) -> int:
    """Exit status of pytest: 1 when a test failed, and nothing else."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)]
    settings = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(copy.parent / "compiled"),
    }
    try:
        return subprocess.run(
            command, cwd=copy, env=settings, capture_output=True, timeout=LONGEST
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


if __name__ == "__main__":
    sys.exit(main())
