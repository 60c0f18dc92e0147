"""The list of faults cannot rot; that tests notice them is `make mutants`."""

from tests.mutants.lists import ROOT, mutants


def exists(name):
    """Whether `name` is a file under tests, or file::test."""
    file, _, test = name.partition("::")
    path = ROOT / "tests" / file
    return path.exists() and f"def {test}" in path.read_text()


def test_every_fault_has_one_place_and_tests_that_exist():
    wrong = []
    for file, old, new, tests in mutants():
        count = (ROOT / file).read_text().count(old)
        missing = [name for name in tests if not exists(name)]
        if count != 1 or old == new or missing or not tests:
            wrong.append(f"{file}: {old!r} is found {count} times {missing}")
    assert not wrong, "\n".join(wrong)
    assert len(mutants()) >= 80
