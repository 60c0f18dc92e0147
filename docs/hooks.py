"""Hooks of mkdocs: what pages take from the code when the site is built.

A comment in a page becomes text:
  <!-- api: init run_round -->      entries of mkdocstrings for public names
  <!-- api: * -->                   those of all names that the page does not have yet
  <!-- generated: commands -->      the output of a function of GENERATED
  <!-- generated: members losses -->    that of one with an argument
Formulas between dollars become MathML, which browsers draw without a script.
Links to files of the repository outside of docs/ become their paths.
"""

import base64
import contextlib
import inspect
import io
import json
import os
import pathlib
import posixpath
import re
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
API = re.compile(r"<!-- api: (.*?) -->", re.S)
NAME = re.compile(r"`(?:ff\.)?(\w+)`")
GENERATED_HERE = re.compile(r"<!-- generated: (\w+) ?(\w*) -->")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)
DISPLAY, INLINE = re.compile(r"\$\$(.+?)\$\$", re.S), re.compile(r"\$([^$\n]+?)\$")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def with_api(markdown: str) -> str:
    """`markdown` with its comments `api` as entries of mkdocstrings."""
    import fedfr_jax as ff

    listed = {*" ".join(API.findall(markdown)).split(), *NAME.findall(markdown)}
    others = " ".join(sorted({*ff._PLACES} - listed))
    return API.sub(lambda x: api_entries(x[1].replace("*", others)), markdown)


def api_entries(names: str) -> str:
    """Entries of mkdocstrings, each from the module that a public name is of."""
    import fedfr_jax as ff

    entries = []
    for name in names.split():
        entries.append(f"::: {ff._PLACES[name]}.{name}")
        if inspect.isclass(getattr(ff, name)):
            own = vars(getattr(ff, name)).items()
            methods = [k for k, x in own if is_method(x) and not k.startswith("_")]
            entries[-1] += f"\n    options:\n      members: {methods or 'false'}"
    return "\n\n".join(entries)


def is_method(member) -> bool:
    """Whether a member of a class is a function that is called, with a docstring."""
    function = getattr(member, "__func__", member)
    return inspect.isfunction(function) and bool(function.__doc__)


def with_formulas(markdown: str) -> str:
    """`markdown` with $...$ and $$...$$ outside of code as MathML."""
    from latex2mathml.converter import convert

    parts = CODE.split(markdown)  # text and code in turns
    for i in range(0, len(parts), 2):
        parts[i] = DISPLAY.sub(lambda x: convert(x[1], display="block"), parts[i])
        parts[i] = INLINE.sub(lambda x: convert(x[1]), parts[i])
    return "".join(parts)


def printed(*argv: str) -> str:
    """What a command prints, 80 columns wide."""
    from fedfr_jax.cli.main import main

    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main([*argv])
    return text.getvalue()


def commands() -> str:
    """Every command with its help."""
    from fedfr_jax.cli.main import COMMANDS, about_command

    parts = [f"```text\n{printed('--help')}```"]
    for name in COMMANDS:
        parts.append(f"## fedfr {name}\n\n{about_command(name)}.")
        parts.append(f"```text\n{printed(name, '--help')}```")
    return "\n\n".join(parts)


# What the library passes itself, see `fedfr describe --help`.
PASSED = {"image_shape", "input_shape", "labels", "cosine", "local", "training"}
PASSED |= {"loss", "model", "task", "mesh", "seen", "num_classes", "kwargs", "self"}


def members(family: str) -> str:
    """Every member of a family that a config can name, with a table of its keys."""
    from fedfr_jax.cli.describe import load_families, summary
    from fedfr_jax.tasks.methods import VARIANTS

    if family == "variants":
        rows = [(f"`{k}`", f"`{row}`", text) for k, (row, text) in VARIANTS.items()]
        return table(("method", "entry of config.methods", "what it is"), rows)
    parts = []
    for name, member in sorted(load_families()[family].items()):
        parts.append(f"## {name}\n\n{summary(member)}")
        keys = keys_of(member) if callable(member) else []  # a task has none
        if keys:
            parts.append(table(("key", "default", "meaning"), keys))
    return "\n\n".join(parts)


def keys_of(member: Callable) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every setting of a factory, or field of a section."""
    is_section = inspect.isclass(member)
    package = sys.modules[member.__module__.rpartition(".")[0]]  # has shared arguments
    meanings = arguments_of(package) | arguments_of(member)
    meanings = comments_of(member) if is_section else meanings
    rows = []
    for key, parameter in inspect.signature(member).parameters.items():
        if key in PASSED and not is_section:
            continue
        default = parameter.default
        text = getattr(default, "__name__", None) or repr(default)
        text = "needed" if default is parameter.empty else f"`{text}`"
        text = "" if parameter.kind is parameter.VAR_KEYWORD else text
        rows.append((f"`{key}`", text, meanings.get(key, "")))
    return rows


def arguments_of(documented: Any) -> dict[str, str]:
    """{argument: meaning} out of the section Args of a docstring."""
    text = inspect.getdoc(documented) or ""
    block = re.search(r"^Args:\n((?: +.*\n?|\n)+)", text, re.M)
    found = re.findall(
        r"^  (\w[\w, ]*): ((?:.|\n   )*)", block[1] if block else "", re.M
    )
    return {
        name: " ".join(text.split())
        for names, text in found
        for name in names.split(", ")
    }


def comments_of(section: type) -> dict[str, str]:
    """{field: the comment above it or beside it} of a class of settings."""
    found, above = {}, []
    try:
        lines = inspect.getsource(section).splitlines()
    except OSError:
        return {}
    for line in lines:
        code, _, beside = line.partition("  # ")
        if line.startswith("    # "):
            above.append(line[6:])
        elif field := re.match(r"    (\w+): ", code):
            found[field[1]] = " ".join([*above, beside]).strip()
            above = []
        else:
            above = []
    return found


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    cells = [[x.replace("|", "\\|").replace("\n", " ") for x in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def configs() -> str:
    """The shipped configs, each with the first line of its docstring."""
    return f"```text\n{printed('configs')}```"


FORMULAS = [f"explanation/{name}.md" for name in ("fedfr", "fedper")]
FORMULAS += [f"explanation/{name}.md" for name in ("fedmargin", "fedreid", "bigface")]


SVG = "image/svg+xml"


def notebooks() -> str:
    """Every notebook with its first words, its last picture and a link."""
    parts = []
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        title, _, about = texts[0].partition("\n\n")
        outputs = [out for c in cells for out in c.get("outputs", ())]
        data = [out.get("data", {}) for out in outputs]
        pictures = ["".join(x[SVG]) for x in data if SVG in x]
        source = f"data:{SVG};base64,{base64.b64encode(pictures[-1].encode()).decode()}"
        parts.append(f"#{title}\n\n{about}\n\n![{title}]({source})")
        parts.append(f"[Open {path.name}]({path.name})")
    return "\n\n".join(parts)


GENERATED: dict[str, Callable[..., str]] = {
    "commands": commands,
    "members": members,
    "configs": configs,
    "notebooks": notebooks,
}


def outside_links(markdown: str, page: str) -> str:
    """`markdown` whose links to files outside of docs/ are their paths in code."""

    def replace(link):
        path = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(page), link[2])
        )
        if path.startswith("docs/") or path == "docs":
            return link[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(
                f"docs/{page} links to {path}, which does not exist."
            )
        return f"{link[1]} (`{path}`)"

    return LINK.sub(replace, markdown)


def on_page_markdown(markdown: str, page, **_) -> str:
    """Called by mkdocs with the text of a page."""
    markdown = with_api(markdown) if API.search(markdown) else markdown
    markdown = GENERATED_HERE.sub(
        lambda found: GENERATED[found[1]](*found[2].split()), markdown
    )
    markdown = outside_links(markdown, page.file.src_uri)
    return with_formulas(markdown) if page.file.src_uri in FORMULAS else markdown
