"""Put in every fault, one at a time: python -m tests.mutants [--only=TEXT]

The tests must succeed without a fault first: tests that fail anyway notice nothing.
Prints what was not noticed, and exits with 1 when there is any.
"""

import argparse
import collections
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tests.mutants.lists import ROOT, Mutant, mutants

LEFT_OUT = ("runs", "build", "dist")  # of the repository's root
LONGEST = 900  # seconds of a mutant's tests
WORDS = {0: "survived", 1: "noticed", None: "timed out"}  # by pytest's exit status


def main() -> int:
    """0 when the tests notice every fault, else 1."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="part of a file's name or text")
    only = parser.parse_args().only
    chosen = [m for m in mutants() if only in f"{m.file}: {m.old}"]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "tree")
        shutil.copytree(ROOT, copy, ignore=ignored)
        groups = collections.defaultdict(list)
        for mutant in chosen:
            groups[mutant.tests].append(mutant)
        found = [x for tests in groups for x in outcomes(copy, tests, groups[tests])]
    missed = [(m, word) for m, word in found if word != "noticed"]
    for mutant, word in missed:
        print(f"{word}: {mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    counts = collections.Counter(word for _, word in found)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if missed else 0


def ignored(folder: str, names: list[str]) -> set[str]:
    """What of a folder is not copied."""
    left_out = LEFT_OUT if pathlib.Path(folder) == ROOT else ()
    return {n for n in names if n[0] == "." or n in (*left_out, "__pycache__")}


def outcomes(
    copy: pathlib.Path, tests: tuple[str, ...], chosen: list[Mutant]
) -> list[tuple[Mutant, str]]:
    """What becomes of the faults that `tests` are for, which must succeed without."""
    if do_fail(copy, tests):
        return [(mutant, "not tried") for mutant in chosen]
    return [(mutant, outcome(copy, mutant)) for mutant in chosen]


def do_fail(copy: pathlib.Path, tests: tuple[str, ...]) -> bool:
    """Whether `tests` do not succeed on the copy as it is."""
    status = run_tests(copy, tests)
    if status != 0:
        print(f"fail without a fault: {' '.join(tests)}", flush=True)
    return status != 0


def outcome(copy: pathlib.Path, mutant: Mutant) -> str:
    """What becomes of the fault in `copy`, which is as before afterwards."""
    path, began = copy / mutant.file, time.perf_counter()
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return "not found once"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        status = run_tests(copy, mutant.tests)
    finally:
        path.write_text(text)
    word = WORDS.get(status, f"pytest gave {status}")
    seconds = time.perf_counter() - began
    print(f"{word} in {seconds:.0f} s: {mutant.file}: {mutant.old!r}", flush=True)
    return word


def run_tests(copy: pathlib.Path, tests: tuple[str, ...]) -> int | None:
    """Exit status of pytest: 1 when a test failed, and nothing else; None if late."""
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
        return None


if __name__ == "__main__":
    sys.exit(main())
