"""Share of a sample of mutants that the tests kill, and of the same ones elsewhere.

    python experiments/benchmarks/mutant_sample.py OUT [--number=150] [--seed=0]
    python experiments/benchmarks/mutant_sample.py OUT --again=OUT_OF_ANOTHER_COMMIT

Mutants are mutmut's, in decorated functions too. Each is put alone into a copy of the
tree, where the tests run that import its module, or else anything of its room; a test
that fails is tried without it. OUT gets a line of JSON for each. `--again` tries those
whose lines still stand once in a function of that name.
"""

import argparse
import ast
import collections
import difflib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

import libcst
from mutmut.mutation import file_mutation
from mutmut.mutation.pragma_handling import IgnoredCode

SECONDS = 900  # of a mutant's tests
MOST = 12  # test files of a mutant: those named like its module, then small ones
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__")
MADE = ("mutants", "build", "runs")  # beside the package, which has a room `runs`


class Mutant(NamedTuple):
    """Lines of a function, and what stands there instead."""

    file: str
    function: str
    kind: str  # of the changed syntax, such as SimpleString
    old: str
    new: str


class Mutations(file_mutation.MutationVisitor):
    """mutmut's mutations, but in decorated functions too."""

    def _skip_node_and_children(self, node):
        is_function = isinstance(node, libcst.FunctionDef)
        return not is_function and super()._skip_node_and_children(node)


def main() -> None:
    """Try every mutant, and print the share that is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=pathlib.Path)
    flags = parser.parse_args()
    if flags.again:
        kept = map(json.loads, flags.again.read_text().splitlines())
        mutants = [Mutant(*map(row.get, Mutant._fields)) for row in kept]
    else:
        mutants = draw(flags.number, random.Random(flags.seed))
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, flags.out.open("a") as out:
        copy = pathlib.Path(folder, "tree")
        copy.mkdir()
        for path in pathlib.Path().iterdir():
            if path.is_dir() and path.name not in MADE and path.name[0] != ".":
                shutil.copytree(path, copy / path.name, ignore=LEFT_OUT)
            elif path.is_file():
                shutil.copy(path, copy)
        for mutant in mutants:
            row = outcome(copy, mutant)
            counts[row["outcome"]] += 1
            out.write(json.dumps(mutant._asdict() | row) + "\n")
            out.flush()
    print(dict(counts))


def draw(number: int, rng: random.Random) -> list[Mutant]:
    """Mutants of the library's files, of each as many as it is long."""
    files = sorted(pathlib.Path("fedfr_jax").rglob("*.py"))
    sizes = [path.stat().st_size for path in files]
    drawn = {}
    while len(drawn) < number:
        path = rng.choices(files, sizes)[0]
        wrapper = libcst.MetadataWrapper(libcst.parse_module(path.read_text()))
        visitor = Mutations(
            file_mutation.mutation_operators, IgnoredCode(set(), set(), set())
        )
        wrapper.visit(visitor)
        if found := [x for x in visitor.mutations if is_in_function(x)]:
            mutant = as_lines(path, wrapper.module, rng.choice(found))
            if place(pathlib.Path(), mutant):
                drawn[mutant] = None
    return list(drawn)


def is_in_function(mutation: file_mutation.Mutation) -> bool:
    """Whether a mutation is of a function or method, not of what is around them."""
    return isinstance(mutation.contained_by_top_level_function, libcst.FunctionDef)


def as_lines(path, module: libcst.Module, mutation: file_mutation.Mutation) -> Mutant:
    """The lines that a mutation changes."""
    old, new = mutation.original_node, mutation.mutated_node
    before = module.code.splitlines()
    after = file_mutation.deep_replace(module, old, new).code.splitlines()
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False)
    spans = [x for x in changes.get_opcodes() if x[0] != "equal"]
    start, end = spans[0][1], spans[-1][2]
    return Mutant(
        file=str(path),
        function=mutation.contained_by_top_level_function.name.value,
        kind=type(old).__name__,
        old="\n".join(before[start:end]),
        new="\n".join(after[spans[0][3] : spans[-1][4]]),
    )


def place(tree: pathlib.Path, mutant: Mutant) -> tuple[pathlib.Path, int] | None:
    """(file, first line) of the mutant's old lines; None if not there just once."""
    for files in ([tree / mutant.file], (tree / "fedfr_jax").rglob("*.py")):
        found = []
        for path in files:
            lines = path.read_text().splitlines() if path.exists() else []
            old = mutant.old.splitlines()
            for node in ast.walk(ast.parse("\n".join(lines))):
                if getattr(node, "name", "") == mutant.function:
                    first = range(node.lineno - 1, node.end_lineno - len(old) + 1)
                    found += [
                        (path, i) for i in first if lines[i : i + len(old)] == old
                    ]
        if len(found) == 1 and mutant.old:
            return found[0]
    return None


def outcome(tree: pathlib.Path, mutant: Mutant) -> dict:
    """What the tests in `tree` say of a mutant; the tree is as before afterwards."""
    found = place(tree, mutant)
    if not found:
        return {"outcome": "gone"}
    path, first = found
    text = path.read_text()
    lines = text.splitlines()
    lines[first : first + len(mutant.old.splitlines())] = mutant.new.splitlines()
    tests = tests_of(tree, path)
    path.write_text("\n".join(lines) + "\n")
    try:
        status, said = run(tree, tests)
    finally:
        path.write_text(text)
    if status == 0:
        return {"outcome": "survived", "tests": tests}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    fails_without = run(tree, failed[:1] or tests)[0]
    outcome = "fails without" if fails_without else "killed"
    return {"outcome": outcome, "tests": tests, "by": failed[:1]}


def tests_of(tree: pathlib.Path, path: pathlib.Path) -> list[str]:
    """Test files that import a module, else those that import of its folder."""
    parts = path.relative_to(tree).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    found = {}
    for test in sorted((tree / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(test.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found.setdefault(str(test.relative_to(tree)), []).extend(names)
    for prefix in (name, name.rpartition(".")[0], "fedfr_jax"):
        inside = re.compile(re.escape(prefix) + r"(\.|$)")
        tests = [test for test, names in found.items() if any(map(inside.match, names))]
        if tests:
            break
    size = lambda test: (tree / test).stat().st_size
    return sorted(tests, key=lambda test: (parts[-1] not in test, size(test)))[:MOST]


def run(tree: pathlib.Path, tests: list[str]) -> tuple[int, str]:
    """(exit status, output) of pytest; not 0 when it is too slow."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow"]
    settings = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=settings,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, ""
    return done.returncode, done.stdout


if __name__ == "__main__":
    main()
