"""Config files: shipped, of the user, and stored in a run."""

import copy
import pathlib
import runpy
import sys
import traceback
import types
from collections.abc import Collection

from ml_collections import ConfigDict

from fedfr_jax import manifest
from fedfr_jax.configs import FOLDER
from fedfr_jax.schema import check_without_code, hint, naming, with_tuples

MAX_NAMES = 30  # configs that an error lists


def shipped() -> dict[str, pathlib.Path]:
    """Shipped configs, {name: file}; such as "fedfr/demo"."""
    files = [path for path in sorted(FOLDER.rglob("*.py")) if path.stem != "base"]
    return {
        path.relative_to(FOLDER).with_suffix("").as_posix(): path
        for path in files
        if "def get_config(" in path.read_text()
    }


def find(name: str) -> pathlib.Path:
    """Find the file of --config: a path, or the name of a shipped config.

    Raises:
      ValueError: when there is no such file, or several of that name.
    """
    if pathlib.Path(name).is_file():
        return pathlib.Path(name)
    files = shipped()
    wanted_name = name.removeprefix("configs/").removesuffix(".py")
    if wanted_name in files:
        return files[wanted_name]
    matches = [x for x in files if x.rpartition("/")[2] == wanted_name]
    if len(matches) == 1:
        return files[matches[0]]
    if matches:
        raise ValueError(f"--config must be one of {matches}, got {name!r}.")
    rest = len(files) - MAX_NAMES
    more = f" and {rest} more (fedfr configs)" if rest > 0 else ""
    raise ValueError(
        f"--config must be one of {list(files)[:MAX_NAMES]}{more} or a Python file, "
        f"got {name!r}{_hint(wanted_name, files)}."
    )


def _hint(wanted_name: str, files: Collection[str]) -> str:
    """Suggest a shipped config, by its full name or its last part."""
    last = {name.rpartition("/")[2]: name for name in files}
    return hint(wanted_name, files) or hint(wanted_name.rpartition("/")[2], last)


def with_argument(name: str) -> tuple[str, str | None]:
    """Split --config=NAME:WORD into the name and the argument of get_config, if any.

    >>> with_argument("classification/comparison:mnist"), with_argument("fedfr/demo")
    (('classification/comparison', 'mnist'), ('fedfr/demo', None))
    """
    head, colon, word = name.rpartition(":")
    is_part_of_path = pathlib.Path(name).is_file() or {"/", "\\"} & set(word)
    return (name, None) if not colon or is_part_of_path else (head, word)


def load(path: pathlib.Path, argument: str | None = None) -> ConfigDict:
    """Run a Python config file and return get_config() or get_config(argument).

    Raises:
      ValueError: for any error in the file, with its line.
    """
    _make_importable(path)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        arguments = () if argument is None else (argument,)
        config = get_config(*arguments) if get_config is not None else None
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{_location(error, path)} must run without errors, got "
            f"{_error_line(error)}."
        ) from error
    if get_config is None:
        raise ValueError(f"{path} must define get_config(), got no such function.")
    if not isinstance(config, ConfigDict):
        is_function = isinstance(get_config, types.FunctionType)
        line = get_config.__code__.co_firstlineno if is_function else None
        raise ValueError(
            f"{_with_line(path, line)} must return an ml_collections ConfigDict from "
            f"get_config(), got {type(config).__name__}."
        )
    return _unshared(config)


def _unshared(config: ConfigDict) -> ConfigDict:
    """Copy each section: a change of one that stands twice in a file is of one place.

    References, such as of a section's seed to the config's, stay.
    """
    alone = copy.copy(config)
    fields = vars(config)["_fields"].items()
    is_section = lambda x: isinstance(x, ConfigDict)
    vars(alone)["_fields"] = {
        k: _unshared(x) if is_section(x) else x for k, x in fields
    }
    return alone


def restore(path: pathlib.Path) -> ConfigDict:
    """Load the config that a run has stored as JSON; lists become tuples.

    Raises:
      ValueError: naming the file when it is damaged.
    """
    with naming(path):
        config = with_tuples(manifest.read_object(path))
        check_without_code(config, path)
        return ConfigDict(config)


def _make_importable(path: pathlib.Path) -> None:
    """Let a config import files of its folder, and `configs.base` from any folder.

    `configs` is the folder of that name above the file, then the shipped one.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    folders = [str(folder) for folder in path.parents if folder.name == "configs"]
    for name in [n for n in sys.modules if n.partition(".")[0] == "configs"]:
        del sys.modules[name]  # of a config that was loaded before
    package = types.ModuleType("configs")
    package.__path__ = [*folders[:1], str(FOLDER)]
    sys.modules["configs"] = package


def _location(error: BaseException, path: pathlib.Path) -> str:
    """File and line of the error in the config `path`."""
    if isinstance(error, SyntaxError) and error.filename:  # not of a NUL byte
        return _with_line(error.filename, error.lineno)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return _with_line(path, lines[-1] if lines else None)


def _with_line(path: str | pathlib.Path, line: int | None) -> str:
    """A file with its line number, if known."""
    return f"{path}, line {line}," if line else str(path)


def _error_line(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    text = error.msg if isinstance(error, SyntaxError) else error
    message = "" if text is None else " ".join(str(text).split())
    return ": ".join(filter(None, (type(error).__name__, message)))
