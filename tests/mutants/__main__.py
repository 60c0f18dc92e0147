"""Put in every fault, one at a time: python -m tests.mutants [--only=TEXT]

[--sample=N [--seed=S]] [--jobs=J] [--results=PATH]

The tests must succeed without a fault first: tests that fail anyway notice nothing.
Prints what was not noticed and a table by room, and exits with 1 when there is any.
Every outcome becomes a line of JSON in --results; a later start of the same tree tries
only what has none there.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from tests.mutants.lists import ROOT, Mutant, mutants

LEFT_OUT = ("runs", "build", "dist")  # of the repository's root
LONGEST = 900  # seconds of a mutant's tests
WORDS = {0: "survived", 1: "noticed", None: "timed out"}  # by pytest's exit status
# Plugins that no test needs and every start pays for; libraries' are not loaded at all.
UNUSED = ("cacheprovider", "junitxml")


def main() -> int:
    """0 when the tests notice every fault, else 1."""
    given = parse_arguments()
    chosen = [m for m in mutants() if given.only in f"{m.file}: {m.old}"]
    if given.sample:
        chosen = sampled(chosen, given.sample, given.seed)
    tree = digest(ROOT)
    found = kept(given.results, tree)
    missing = [mutant for mutant in chosen if mutant not in found]
    if len(missing) < len(chosen):
        print(f"{len(chosen) - len(missing)} of {len(chosen)} are known", flush=True)
    lock = threading.Lock()

    def note(mutant, word, seconds):
        with lock:
            found[mutant] = word
            keep(given.results, tree, mutant, word, seconds)
            print(f"{word} in {seconds:.0f} s: {mutant.file}: {mutant.old!r}")
            sys.stdout.flush()

    try_all(missing, given.jobs, note)
    missed = [m for m in chosen if found[m] != "noticed"]
    for mutant in missed:
        print(f"{found[mutant]}: {mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    print(table({mutant: found[mutant] for mutant in chosen}))
    return 1 if missed else 0


def parse_arguments() -> argparse.Namespace:
    """What is tried, how many at once, and where outcomes are kept."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="part of a file's name or text")
    parser.add_argument("--sample", type=int, default=0, help="so many, of all rooms")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="tried at once")
    parser.add_argument("--results", type=pathlib.Path, help="file of JSON lines")
    return parser.parse_args()


def room(mutant: Mutant) -> str:
    """Where a fault is: a folder of the package, or one of its files."""
    return pathlib.PurePath(mutant.file).parts[1]


def sampled(chosen: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the faults by chance, of each room its share, in their order."""
    rng, rooms = random.Random(seed), collections.defaultdict(list)
    for mutant in chosen:
        rooms[room(mutant)].append(mutant)
    places = {}
    for own in rooms.values():
        for i, mutant in enumerate(rng.sample(own, len(own))):
            places[mutant] = (i + rng.random()) / len(own)
    taken = set(sorted(places, key=places.get)[:count])
    return [mutant for mutant in chosen if mutant in taken]


def digest(root: pathlib.Path) -> str:
    """A name of what the outcomes are of: the code, the configs and the tests."""
    found = hashlib.sha256()
    for folder in ("fedfr_jax", "configs", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith("tests/mutants/"):  # a new fault spoils no outcome
                found.update(f"{name}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def kept(path: pathlib.Path | None, tree: str) -> dict[Mutant, str]:
    """Outcomes in a file of lines that a start with this `tree` has written."""
    if path is None or not path.exists():
        return {}
    text, rows = path.read_text(), []
    if text and not text.endswith("\n"):  # a start that was stopped within a line
        path.write_text(text + "\n")
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return {
        Mutant(row["file"], row["old"], row["new"], tuple(row["tests"])): row["outcome"]
        for row in rows
        if row["tree"] == tree and row["outcome"] in WORDS.values()
    }


def keep(path: pathlib.Path | None, tree: str, mutant, word, seconds) -> None:
    """Add a line to the file of outcomes."""
    if path is None:
        return
    row = {**mutant._asdict(), "outcome": word, "seconds": round(seconds, 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**row, "tree": tree}) + "\n")


def try_all(chosen: list[Mutant], jobs: int, note: Callable) -> None:
    """Try faults in `jobs` copies of the tree at once.

    Args:
      note: is told each outcome: (mutant, word, seconds).
    """
    with tempfile.TemporaryDirectory() as folder:
        copies = queue.SimpleQueue()
        for i in range(min(jobs, len(chosen))):
            copy = pathlib.Path(folder, f"tree{i}")
            shutil.copytree(ROOT, copy, ignore=ignored)
            copies.put(copy)

        def on_a_copy(work, *given):
            copy = copies.get()
            try:
                return work(copy, *given)
            finally:
                copies.put(copy)

        def attempt(mutant):
            begin = time.perf_counter()
            is_fair = mutant.tests not in failing
            word = on_a_copy(outcome, mutant) if is_fair else "not tried"
            note(mutant, word, time.perf_counter() - begin)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            groups = list(dict.fromkeys(mutant.tests for mutant in chosen))
            fails = pool.map(lambda tests: on_a_copy(do_fail, tests), groups)
            failing = {x for x, is_so in zip(groups, fails, strict=True) if is_so}
            collections.deque(pool.map(attempt, chosen), maxlen=0)


def ignored(folder: str, names: list[str]) -> set[str]:
    """What of a folder is not copied."""
    left_out = LEFT_OUT if pathlib.Path(folder) == ROOT else ()
    return {n for n in names if n[0] == "." or n in (*left_out, "__pycache__")}


def do_fail(copy: pathlib.Path, tests: tuple[str, ...]) -> bool:
    """Whether `tests` do not succeed on the copy as it is."""
    status = run_tests(copy, tests)
    if status != 0:
        print(f"fail without a fault: {' '.join(tests)}", flush=True)
    return status != 0


def outcome(copy: pathlib.Path, mutant: Mutant) -> str:
    """What becomes of the fault in `copy`, which is as before afterwards."""
    path = copy / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return "not found once"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        status = run_tests(copy, mutant.tests)
    finally:
        path.write_text(text)
    return WORDS.get(status, f"pytest gave {status}")


def run_tests(copy: pathlib.Path, tests: tuple[str, ...]) -> int | None:
    """Exit status of pytest: 1 when a test failed, and nothing else; None if late."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow"]
    for plugin in UNUSED:
        command += ["-p", f"no:{plugin}"]
    command += [f"tests/{name}" for name in tests]
    settings = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # What one fault's tests compile most others' do, too.
        "JAX_COMPILATION_CACHE_DIR": str(copy.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    try:
        return subprocess.run(
            command, cwd=copy, env=settings, capture_output=True, timeout=LONGEST
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def table(found: dict[Mutant, str]) -> str:
    """Counts of outcomes by room, a line each, and of all."""
    rooms = collections.defaultdict(collections.Counter)
    for mutant, word in found.items():
        rooms[room(mutant)][word] += 1
    total = sum(rooms.values(), collections.Counter())
    lines = [["room", *total]]
    for name, counts in [*sorted(rooms.items()), ("all", total)]:
        lines.append([name, *(str(counts[word]) for word in total)])
    return "\n".join(
        f"{name:20}" + "".join(f"{cell:>16}" for cell in cells)
        for name, *cells in lines
    )


if __name__ == "__main__":
    sys.exit(main())
