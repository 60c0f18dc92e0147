"""The README's example runs, its commands are understood, and it stays short."""

import pathlib
import re
import shlex

import numpy as np
import pytest

from fedfr_jax.cli import flags
from fedfr_jax.cli.describe import VARIANTS
from fedfr_jax.cli.main import COMMANDS, main
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.tasks import TASKS

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


def test_its_number_of_methods_is_that_of_describe():
    assert f"{len(ALGORITHMS) + len(VARIANTS)} methods" in README


def test_the_files_that_it_names_exist():
    root = pathlib.Path(__file__).parent.parent
    named = re.findall(r"\]\((?!http)([\w./-]+)\)", README)
    assert named
    for path in named:
        assert (root / path).exists(), path


LINES = re.findall(r"^\.venv/bin/(fedfr .*)$", README, re.M)


class Parsed(Exception):
    """Raised with a command's flags, before it does anything."""


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[1])
def test_its_commands_have_the_flags_and_configs_that_it_names(line, monkeypatch):
    parse_flags = flags.parse_flags

    def parse(parser, argv):
        raise Parsed(parse_flags(parser, argv))

    if line == "fedfr configs":
        return
    monkeypatch.setattr(flags, "parse_flags", parse)
    words = shlex.split(line, comments=True)[1:]
    assert words[0] in COMMANDS
    with pytest.raises(Parsed) as parsed:
        main(words)
    (values,) = parsed.value.args
    if "--config=" in line:
        assert flags.load_config(values, words[0]).task in TASKS


def test_it_shows_how_to_train():
    assert "train" in {line.split()[1] for line in LINES}
