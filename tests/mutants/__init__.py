"""Small faults that the tests of CI must notice, one at a time.

Each is an edit of one place of the product. The lists are by room; `python -m
tests.mutants` puts every fault into a copy of the tree and runs the tests named beside
it.
"""

from typing import NamedTuple


class Mutants(NamedTuple):
    """Faults of one file, each of which fails a test among `tests`."""

    file: str  # from the repository's root
    tests: str  # files, or file::test, from `tests/`, by blanks
    changes: list[tuple[str, str]]  # (text found once in the file, what it becomes)
