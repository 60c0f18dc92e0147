"""mutmut over some files of the library, with the tests that import them.

    make mutants                                          # files that main has not so
    make mutants ARGS="fedfr_jax/losses/distillation.py"  # 110 mutants, 16 minutes

mutmut leaves out decorated functions; `mutant_sample.py` does not. Its settings are in
pyproject.toml, what it made is in mutants/ (`mutmut browse`, `mutmut show NAME`).
"""

import dataclasses
import pathlib
import subprocess
import sys

from mutant_sample import tests_of

CHANGED = "git diff --name-only --diff-filter=d main -- fedfr_jax/*.py"


def main() -> None:
    """Try all mutants of the files on the command line."""
    # Imported where the project's folder is known.
    from mutmut import __main__ as mutmut
    from mutmut import configuration

    changed = subprocess.run(CHANGED.split(), capture_output=True, text=True).stdout
    files = sys.argv[1:] or changed.split()
    root = pathlib.Path()
    configuration._config = dataclasses.replace(
        configuration.config(),
        only_mutate=files,
        pytest_add_cli_args_test_selection=sorted(
            {test for file in files for test in tests_of(root, root / file)}
        ),
    )
    mutmut._run((), max_children=None)


if __name__ == "__main__":
    main()
