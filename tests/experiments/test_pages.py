"""READMEs of experiments: what was asked and answered is on the first screen."""

import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parent.parent.parent / "experiments"
PAGES = sorted(FOLDER.glob("*/README.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_a_page_is_short_and_begins_with_its_answer(path):
    text = path.read_text()
    assert len(text.split()) <= (2200 if "fedmargin" in str(path) else 1500)
    first = text[:3500]  # a screen
    assert re.search(r"python experiments/|make bench", first)
    assert re.search(r"^\| |!\[", first, re.M)
    is_empty = re.search(r"<!-- (\w+) -->\n<!-- /\1 -->", text)  # not run yet
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        if is_empty and target.endswith(".png"):
            continue
        assert (path.parent / target).exists(), target
