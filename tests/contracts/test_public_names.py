"""No public name vanishes by accident: `public_names.txt` has what 1.x promises.

    python -m tests.contracts.test_public_names

writes the file anew, after a name was added. A line has a name, and behind it the words
that belong to it: arguments, fields and methods, keys of a config, flags.
"""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator

import fedfr_jax as ff
from fedfr_jax import types
from fedfr_jax.cli import flags
from fedfr_jax.cli.describe import load_families
from fedfr_jax.cli.exit_codes import BUG, MISTAKE, RETRY
from fedfr_jax.cli.main import COMMANDS, load_command

FILE = pathlib.Path(__file__).with_name("public_names.txt")
ROOT = pathlib.Path(__file__).parents[2]
PRIVACY = "Mechanism banded_noise blt_noise build_accountant calibrate_noise"
FURTHER = {  # of a module, beside the members of families
    "ff.aggregation": "chain of_all_updates weighted_mean",
    "ff.convolutions": "fast use_forms",
    "ff.privacy": f"{PRIVACY} skellam_noise",
    "fedfr_jax.federated.systems.fedscale": "read_availability read_profiles",
    "fedfr_jax.flower": "build_deployment client_app from_config server_app",
    "fedfr_jax.runs.sinks": "Sink",
}
PASSED = {"args", "kwargs", "self", "cls"}
VANISHED = (
    "These public names are gone: {}. 1.x keeps them (docs/reference/stable.md): bring "
    "each back, perhaps as another word for the new one. For 2.0 write it below "
    "'Removed' in CHANGELOG.md, then run python -m tests.contracts.test_public_names."
)
ADDED = (
    "These public names are new: {}. From the next release on they are promised. If "
    "they are meant so, run python -m tests.contracts.test_public_names."
)
Entry = tuple[str, list[str]]  # a name and the words behind it


def of_python() -> Iterator[Entry]:
    """Names of `ff`, and of `types` what `ff` has not."""
    for name in sorted(ff._PLACES):
        yield f"ff.{name}", words_of(getattr(ff, name))
    for name, member in sorted(vars(types).items()):
        is_own = getattr(member, "__module__", "") == types.__name__
        if is_own and name[0] != "_" and name not in ff._PLACES:
            yield f"fedfr_jax.types.{name}", words_of(member)


def of_modules() -> Iterator[Entry]:
    """Public names of modules, and those that the examples of CONTRIBUTING import."""
    families = {"aggregation": ff.AGGREGATORS, "partition": ff.PARTITIONS}
    for module, family in {**families, "adapters": ff.ADAPTERS}.items():
        yield f"ff.{module}", sorted(family.keys() & vars(getattr(ff, module)).keys())
    named = {module: names.split() for module, names in FURTHER.items()}
    for path in imported_by_examples():
        module, _, name = path.rpartition(".")
        named[module] = [*named.get(module, ()), name]
    for module, names in sorted(named.items()):
        short = module.removeprefix("ff.")
        holder = (
            importlib.import_module(module) if short == module else getattr(ff, short)
        )
        there = [x for x in names if hasattr(holder, x) or is_module(f"{module}.{x}")]
        yield module, sorted({*there})


def is_module(path: str) -> bool:
    """Whether a module has this path."""
    return path.startswith("fed") and importlib.util.find_spec(path) is not None


def imported_by_examples() -> set[str]:
    """What the examples of CONTRIBUTING import, `types` aside."""
    text, found = (ROOT / "CONTRIBUTING.md").read_text(), set()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fed"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in found if not path.startswith("fedfr_jax.types")}


def of_configs() -> Iterator[Entry]:
    """Members of families, and the keys of each."""
    for family, members in load_families().items():
        for name, member in sorted(members.items()):
            yield f"{family} {name}", arguments(member) if callable(member) else []


def of_commands() -> Iterator[Entry]:
    """Commands with their flags, and exit codes."""
    for name in sorted(COMMANDS):
        yield f"fedfr {name}", sorted(flags_of(load_command(name)))
    for name, code in {"bug": BUG, "mistake": MISTAKE, "retry": RETRY}.items():
        yield f"exit code {code}", [name]


def words_of(member) -> list[str]:
    """Arguments of a function; fields, properties and methods of a class."""
    own = vars(member) if inspect.isclass(member) else ()
    methods = {name for name in own if not name.startswith("_")}
    return sorted({*arguments(member)} | methods) if callable(member) else []


def arguments(member: Callable) -> list[str]:
    """Names of what a function takes, or of the fields of a NamedTuple."""
    return sorted(inspect.signature(member).parameters.keys() - PASSED)


def flags_of(command: Callable) -> set[str]:
    """Flags of a command, --config.KEY aside."""
    found = set()
    for key, parameter in inspect.signature(command).parameters.items():
        if flags._is_group(parameter.annotation):
            found |= {f"--{field}" for field in parameter.annotation._fields}
        elif parameter.kind is parameter.KEYWORD_ONLY and key != "typed":
            found.add(f"--{key.rstrip('_')}")
    return found


def public_names() -> str:
    """The lines of the file."""
    entries = [*of_python(), *of_modules(), *of_configs(), *of_commands()]
    return "".join(
        f"{name}: {' '.join(words)}".strip() + "\n" for name, words in entries
    )


def pairs(text: str) -> set[str]:
    """Every name, and every word with its name."""
    found = set()
    for line in text.splitlines():
        name, _, words = line.partition(":")
        found |= {name, *(f"{name}: {word}" for word in words.split())}
    return found


def test_no_public_name_vanishes_without_being_noted():
    promised, there = pairs(FILE.read_text()), pairs(public_names())
    assert len(promised) > 1000
    assert promised <= there, VANISHED.format(sorted(promised - there))
    assert there <= promised, ADDED.format(sorted(there - promised))


if __name__ == "__main__":
    FILE.write_text(public_names())
