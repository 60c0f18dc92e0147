"""The README's example runs, and it stays short; its commands: `test_docs`."""

import pathlib
import re

import numpy as np

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.tasks.methods import VARIANTS

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_trains(capsys):
    blocks = r"<!-- example.*?```python\n(.*?)```\n\n```text\n(.*?)```"
    example, output = re.search(blocks, README, re.S).groups()
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 20 and example.count("import fedfr_jax") == 1
    exec(example, {})
    number = re.compile(r"[\d.]+$", re.M)
    printed = capsys.readouterr().out
    assert number.sub("", printed) == number.sub("", output)
    accuracies = [np.array(number.findall(text), float) for text in (printed, output)]
    np.testing.assert_allclose(*accuracies, atol=0.005)


def test_it_is_at_most_900_words():
    assert len(README.split()) <= 900


def test_its_numbers_of_methods_are_those_of_describe():
    assert f"{len(ALGORITHMS)} algorithms and {len(VARIANTS)} variants" in README
