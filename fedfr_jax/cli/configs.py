"""List the configs that come with the library."""

import ast
import pathlib

from fedfr_jax.cli.flags import new_parser, parse_flags
from fedfr_jax.config.files import shipped

ABOUT = """\
List the shipped configs. --config takes a name, or only its last part. Your own Python
file starts with `from fedfr_jax.configs import base`."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parse_flags(new_parser("fedfr configs", ABOUT, epilog=""), argv)
    files = shipped()
    width = max(map(len, files), default=0)
    for name, path in files.items():
        print(f"{name:{width}}  {summary(path)}")


def summary(path: pathlib.Path) -> str:
    """First line of a Python file's docstring, without running the file."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0]
