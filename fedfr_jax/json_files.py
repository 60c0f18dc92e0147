"""JSON files and lines, read with errors that name the file."""

import json
import os
import pathlib
from typing import Any

from pydantic import ValidationError

from fedfr_jax.files import check_list
from fedfr_jax.text import printable

KINDS = {dict: "object", list: "list"}


def read_json(path: str | os.PathLike, kind: type = dict) -> Any:
    """Read an object, or another type of value, from a JSON file.

    Raises:
      ValueError: naming the file, when it holds no JSON or another kind of value.
      OSError: when there is no such file.
    """
    check_list(path)
    return parse_json(pathlib.Path(path).read_bytes(), path, kind)


def parse_json(text: str | bytes, origin: str | os.PathLike, kind: type = dict) -> Any:
    """Parse JSON text as an object, or another type of value; errors name `origin`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} must be readable JSON, got {error}.") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"{origin} must be a JSON {KINDS[kind]}, got {json.dumps(value)[:60]}."
        )
    return value


def broken_rule(error: ValidationError) -> str:
    """The first rule that a value breaks, such as "task must be text, got 5"."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"it must be readable JSON, got {first['msg']}"
    place = printable(".".join(str(x) for x in first["loc"])[:200])
    rule = first["msg"].removeprefix("Input should be ")
    return f"{place or 'it'} must be {rule}, got {str(first['input'])[:60]!r}"


def read_json_lines(path: str | os.PathLike) -> list[dict]:
    """Read a JSON-lines file, see `parse_json_lines`."""
    check_list(path)
    return parse_json_lines(pathlib.Path(path).read_bytes(), path)


def parse_json_lines(
    data: bytes,
    origin: str | os.PathLike,
    key: str = "",
    kind: type = str,
    *,
    torn: bool = False,
) -> list[dict]:
    """Parse JSON lines; blank lines are skipped.

    Args:
      key: of every object, with a value of `kind`; "": none.
      torn: skip a last line that is no such object, as after a kill.

    Raises:
      ValueError: naming `origin` and the first line that is no such object.
    """
    lines, rows = data.splitlines(), []
    for number, line in enumerate(lines, start=1):
        row = _object(line)
        if row is not None and (not key or isinstance(row.get(key), kind)):
            rows.append(row)
        elif line.strip() and not (torn and number == len(lines)):
            rule = f'a JSON object with a "{key}"' if key else "a JSON object"
            raise ValueError(
                f"{origin}, line {number}, must be {rule}, got {line[:60]!r}."
            )
    return rows


def _object(line: bytes) -> dict | None:
    """Parse a line as a JSON object; None if it is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
