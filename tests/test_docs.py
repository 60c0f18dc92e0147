"""Pages of the documentation: code and commands run, names and pictures are current.

A block below a comment `<!-- shown only: reason -->` is compiled or parsed, not run;
one below "Fails with `ValueError: words`:" must fail so.
"""

import builtins
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import jax
import pytest

import fedfr_jax as ff
from fedfr_jax.cli import flags
from fedfr_jax.cli.describe import load_families
from fedfr_jax.cli.main import COMMANDS, main
from fedfr_jax.federated.settings import Federation
from fedfr_jax.tasks import TASKS

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"(?P<shown><!-- shown only: [^>]+ -->\n)?"
    r"(?:Fails with `(?P<error>\w+): (?P<words>[^`]+)`:\n\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)\n(?P=indent)```",
    re.S,
)
# Pages whose code other tests run in part, or that compile much.
SLOW = ("index", "first-run", "own-algorithm", "scaling-law")
SLOW += ("personal-layers", "faces-folder", "foundation-model")
SMALLER = ("--config.pretrain.epochs=1", "--config.federation.rounds=1")


def load(path):
    """The module of a script of docs/."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    runs: bool
    error: str  # its type, "" for none
    words: str  # in it


def blocks(path):
    """The blocks of a page, in order."""
    for found in BLOCK.finditer(path.read_text()):
        indent = len(found["indent"])
        text = "\n".join(line[indent:] for line in found["text"].split("\n"))
        error, words = found["error"] or "", found["words"] or ""
        yield Block(found["language"], text, not found["shown"], error, words)


def commands(text):
    """The words of every fedfr command in a block, a backslash joins lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(x, comments=True) for x in lines if x.startswith("fedfr ")]


def kinds(path):
    """{(language, whether it runs)} of the blocks of a page."""
    return {(block.language, block.runs) for block in blocks(path)}


PAGES = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
WITH_CODE = PAGES | {"AGENTS.md": ROOT / "AGENTS.md"}
CODE = [k for k, x in WITH_CODE.items() if ("python", True) in kinds(x)]
SHELL = {k: x for k, x in PAGES.items() if {("sh", True), ("sh", False)} & kinds(x)}
README = (ROOT / "README.md").read_text().replace("\n.venv/bin/fedfr ", "\nfedfr ")
COMMANDS_OF_PAGES = [("README", words) for words in commands(README)]
for page, path in sorted(SHELL.items()):
    texts = [b.text for b in blocks(path) if b.language == "sh"]
    COMMANDS_OF_PAGES += [(page, words) for x in texts for words in commands(x)]


def marked(names):
    slow = {name for name in names if pathlib.Path(name).stem in SLOW}
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in slow)) for n in names]


@pytest.fixture
def as_a_user_has_it(tmp_path, monkeypatch):
    """An empty folder, and JAX without the strict settings of the tests."""
    monkeypatch.chdir(tmp_path)
    families = (ff.ALGORITHMS, ff.SOURCES, ff.MODELS)
    before = [dict(family) for family in families]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    for family, known in zip(families, before, strict=True):
        for name in family.keys() - known.keys():
            del family[name]


@pytest.mark.ci
@pytest.mark.parametrize("name", marked(CODE))
def test_the_code_of_a_page_runs_from_top_to_bottom(name, as_a_user_has_it):
    names = {}
    for block in blocks(WITH_CODE[name]):
        if block.language == "python":
            code = compile(block.text, name, "exec")
            if block.error:
                with pytest.raises(vars(builtins)[block.error]) as failed:
                    exec(code, names)
                assert block.words in str(failed.value)
            elif block.runs:
                exec(code, names)


class Parsed(Exception):
    """Raised with a command's flags, before it does anything."""


def test_commands_of_pages_have_the_flags_and_configs_that_they_name(monkeypatch):
    parse_flags = flags.parse_flags

    def parse(parser, argv):
        raise Parsed(parse_flags(parser, argv))

    monkeypatch.setattr(flags, "parse_flags", parse)
    assert {"README", "how-to/clusters.md"} <= {page for page, _ in COMMANDS_OF_PAGES}
    for page, words in COMMANDS_OF_PAGES:
        assert words[1] in COMMANDS, page
        if words[1] in ("configs", "launch"):  # without flags, or hands them on
            continue
        with pytest.raises(Parsed) as parsed:
            main(words[1:])
        (values,) = parsed.value.args
        named = getattr(values, "config", None)
        if named and not named.endswith((".py", "...")):
            assert flags.load_config(values, words[1]).task in TASKS, page


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHELL))
def test_the_commands_of_a_page_run(name, tmp_path):
    """With code of the page between them; training is shortened."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    run = lambda argv: subprocess.run(argv, cwd=tmp_path, env=env, check=True)
    code = []
    for block in blocks(PAGES[name]):
        if block.language == "python" and block.runs and not block.error:
            code.append(block.text)
        if block.language != "sh" or not block.runs:
            continue
        run([sys.executable, "-c", "\n".join(code)])  # what the commands need
        for words in commands(block.text):
            is_long = "--config=demo" in words and words[1] in ("train", "sweep")
            smaller = SMALLER if is_long else ()
            run([sys.executable, "-m", "fedfr_jax", *words[1:], *smaller])


def test_every_block_has_a_language_that_a_test_knows():
    for name, path in PAGES.items():
        for block in blocks(path):
            known = ("python", "sh", "bash", "text", "yaml", "json")
            assert block.language in known, f"{name}: {block.text[:60]}"


def test_every_public_name_is_on_the_page_of_the_api():
    hooks = load(DOCS / "hooks.py")
    text = hooks.with_api(PAGES["reference/api.md"].read_text())
    entries = re.findall(r"^::: ([\w.]+)$", text, re.M)
    assert len(entries) == len({*entries})
    names = {entry.rpartition(".")[2] for entry in entries}
    assert names <= {*ff._PLACES} <= names | {*hooks.NAME.findall(text)}
    without = [name for name in names if not getattr(ff, name).__doc__]
    assert not without


def test_the_walk_through_the_code_names_files_and_functions_that_there_are():
    text = PAGES["explanation/read-the-code.md"].read_text()
    stops = re.findall(r"^\| \d \| `([\w/.]+)` \| (.*?) \|(.*?)\|$", text, re.M)
    assert len(stops) == 7
    nano = (ROOT / "examples" / "nano.py").read_text()
    for file, names, of_nano in stops:
        code = (ROOT / file).read_text()
        for where, text in ((code, names), (nano, of_nano)):
            for name in re.findall(r"`(\w+)`", text):
                assert re.search(rf"^(def|class) {name}\b", where, re.M), name


def test_every_key_of_a_config_is_on_a_page_of_keys():
    hooks, texts = load(DOCS / "hooks.py"), {}
    index = PAGES["reference/config/index.md"].read_text()
    for family, members in load_families().items():
        page = PAGES[f"reference/config/{family}.md"].read_text()
        text = hooks.GENERATED_HERE.sub(lambda x: hooks.GENERATED[x[1]](x[2]), page)
        for name in members:
            assert f"\n## {name}\n" in text or f"| `{name}` |" in text, (family, name)
        assert f"({family}.md)" in index
        texts[family] = text
    fields = inspect.signature(Federation).parameters
    missed = [key for key in fields if f"| `{key}` |" not in texts["sections"]]
    assert not missed


def test_pictures_are_those_that_the_code_draws():
    draw = load(DOCS / "pictures" / "draw.py")
    files = {p.stem: p.read_text() for p in (DOCS / "pictures").glob("*.svg")}
    assert files == {name: function() for name, function in draw.PICTURES.items()}


def test_the_files_that_the_readme_names_exist():
    named = re.findall(r"\]\((?!http)([\w./-]+)\)", README)
    assert named and all((ROOT / path).exists() for path in named)


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert {*re.findall(r"([\w/-]+\.md)$", nav, re.M)} == {*PAGES}


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script_and_pictures(path):
    jupytext = pytest.importorskip("jupytext")
    cells = json.loads(path.read_text())["cells"]
    script = jupytext.read(path.with_suffix(".py"))
    assert ["".join(c["source"]) for c in cells] == [c.source for c in script.cells]
    outputs = [out for cell in cells for out in cell.get("outputs", ())]
    assert any("image/svg+xml" in out.get("data", {}) for out in outputs)
    assert not any(out["output_type"] == "error" for out in outputs)


def test_the_page_of_notebooks_shows_a_picture_of_each():
    page = load(DOCS / "hooks.py").notebooks()
    assert page.count("](data:image/svg+xml;base64,PHN2Z") == len(NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")
    load(path.parent / "build.py").execute(path.stem)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
