"""The list of faults cannot rot; that tests notice them is `make mutants`."""

import collections
import json
import sys

import pytest

from tests.mutants import __main__ as attempts
from tests.mutants.lists import ROOT, Mutant, mutants


def exists(name):
    """Whether `name` is a file under tests, or file::test."""
    file, _, test = name.partition("::")
    path = ROOT / "tests" / file
    return path.exists() and (not test or f"def {test}(" in path.read_text())


def test_every_fault_has_one_place_and_tests_that_exist():
    wrong = []
    for file, old, new, tests in mutants():
        count = (ROOT / file).read_text().count(old)
        missing = [name for name in tests if not exists(name)]
        if count != 1 or old == new or missing or not tests:
            wrong.append(f"{file}: {old!r} is found {count} times {missing}")
    assert not wrong, "\n".join(wrong)
    assert len(mutants()) >= 80
    assert len(set(mutants())) == len(mutants())


def test_a_sample_has_of_each_room_its_share():
    every = mutants()
    of = lambda found: collections.Counter(attempts.room(m) for m in found)
    some = attempts.sampled(every, len(every) // 4, seed=1)
    assert len(some) == len(every) // 4
    for room, count in of(every).items():
        assert abs(of(some)[room] - count / 4) <= 2, room
    assert some == attempts.sampled(every, len(every) // 4, seed=1)
    assert some != attempts.sampled(every, len(every) // 4, seed=2)
    assert attempts.sampled(every, len(every) + 9, seed=0) == every


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of two files with a test each, of which one is blind."""
    root = tmp_path / "tree"
    texts = {
        "fedfr_jax/losses/one.py": "ONE = 1\nTWO = 2\n",
        "fedfr_jax/two.py": "ONE = 1\n",
        "tests/test_one.py": "from fedfr_jax.losses import one\n\n\n"
        "def test_one():\n    assert one.ONE == 1\n",
        "tests/test_two.py": "def test_two():\n    pass\n",
        "tests/test_wrong.py": "def test_wrong():\n    assert not 1\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "fedfr_jax" / "__init__.py").touch()
    listed = [
        Mutant("fedfr_jax/losses/one.py", "ONE = 1", "ONE = 2", ("test_one.py",)),
        Mutant("fedfr_jax/losses/one.py", "TWO = 2", "TWO = 3", ("test_one.py",)),
        Mutant("fedfr_jax/two.py", "ONE = 1", "ONE = 2", ("test_two.py",)),
        Mutant("fedfr_jax/two.py", "ONE = 1", "ONE = 3", ("test_wrong.py",)),
    ]
    monkeypatch.setattr(attempts, "ROOT", root)
    monkeypatch.setattr(attempts, "mutants", lambda: listed)
    return root


def rows_of(path):
    """The whole lines of a file of outcomes."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.ci
def test_a_stopped_start_goes_on_with_what_is_missing(tree, capsys, monkeypatch):
    results = tree / "out" / "results.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--jobs=2", f"--results={results}"])
    assert attempts.main() == 1
    said = capsys.readouterr().out
    assert "fail without a fault: test_wrong.py" in said
    counts = dict(line.split(maxsplit=1) for line in said.splitlines()[-4:])
    assert sorted(counts) == ["all", "losses", "room", "two.py"]
    assert sorted(counts["all"].split()) == ["1", "1", "2"]
    outcomes = {(row["file"], row["new"]): row["outcome"] for row in rows_of(results)}
    assert outcomes == {
        ("fedfr_jax/losses/one.py", "ONE = 2"): "noticed",
        ("fedfr_jax/losses/one.py", "TWO = 3"): "survived",
        ("fedfr_jax/two.py", "ONE = 2"): "survived",
        ("fedfr_jax/two.py", "ONE = 3"): "not tried",
    }
    lines = results.read_text().splitlines()
    fair = [line for line in lines if "not tried" not in line]
    results.write_text("\n".join([*fair[1:], fair[0][:20]]))  # cut within a line
    tried = []
    outcome = attempts.outcome
    monkeypatch.setattr(attempts, "outcome", lambda *x: tried.append(x) or outcome(*x))
    assert attempts.main() == 1
    assert [mutant.new for _, mutant in tried] == [json.loads(fair[0])["new"]]
    (tree / "tests" / "test_two.py").write_text("def test_two():\n    assert 1\n")
    assert attempts.main() == 1
    assert len(tried) == 1 + 3  # all outcomes were of another tree


def test_the_page_says_what_the_kept_outcomes_say():
    path = ROOT / "experiments" / "benchmarks" / "results" / "mutants.json"
    kept = json.loads(path.read_text())["rows"]["mutants"]
    counts = collections.Counter()
    for of_room in kept["table"].values():
        counts.update(of_room)
    path = ROOT / "docs" / "explanation" / "reliability.md"
    page = " ".join(path.read_text().split())
    made = kept["made"]
    assert len(kept["missed"]) == counts.total() - counts["noticed"]
    assert f"Of {counts.total()} on {made['date']}, commit {made['commit']} " in page
    assert f"noticed {counts['noticed']} and not {counts['survived']}," in page
