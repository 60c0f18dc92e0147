"""The README's example runs, and it stays short."""

import pathlib
import re

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_trains(capsys):
    example = re.search(r"<!-- example.*?```python\n(.*?)```", README, re.S).group(1)
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 20 and example.count("import fedfr_jax") == 1
    exec(example, {})
    assert float(capsys.readouterr().out) > 0.95


def test_it_is_at_most_150_lines():
    assert len(README.splitlines()) <= 150


def test_the_files_that_it_names_exist():
    root = pathlib.Path(__file__).parent.parent
    named = re.findall(r"(?:configs|tests|experiments)/[\w/]+\.py", README)
    named += [f"fedfr_jax/{x}" for x in re.findall(r"`(tasks/[\w/]+\.py)", README)]
    assert named
    for path in named:
        assert (root / path).exists(), path
