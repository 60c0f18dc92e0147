"""Rules of the house: each lists what it visits, and what breaks it."""

import ast
import graphlib
import pathlib
import re
from collections import defaultdict
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "fedfr_jax"
TESTS = ROOT / "tests"

# Rooms from the ground up: imports point to a lower floor. A module of the package's
# own folder that is not listed is ground; ground and the top may import sideways.
FLOORS = (
    (),
    ("data", "evaluation", "losses", "models", "scaling"),
    ("central", "federated"),
    ("tasks",),
    ("runs",),
    ("config",),
    ("deploy", "plan", "viewer"),
    (
        *("__init__", "__main__", "api", "cli", "counterfactual"),
        *("flower", "flower_nodes", "loading"),
    ),
)
# Folders of tests that cross rooms.
CROSSING = {"contracts", "faults", "golden", "mutants"}
LAZY = "tensorflow_datasets|tensorboardX|onnx|cv2|faiss|sklearn|torch"
LAZY += "|dp_accounting|jax_privacy|flwr"
LAZY += "|jinja2|vl_convert|starlette|uvicorn|wandb|trackio|mlflow"
# A client's step, a central one, and the server's on rows of classes.
GRADIENTS = ("federated/local.py", "central/step.py", "losses/spreadout.py")
GRADIENTS += ("convolutions/",)
# Patterns of source text, and which files may hold them.
ONLY_IN = {
    r"^ *(import|from) flax\b": ("models/",),
    r"^ *(import|from) orbax\b": ("runs/checkpoint.py",),
    r"^ *(import|from) tensorflow_datasets\b": ("data/sources/",),
    r"^ *(import|from) ml_collections\b": ("config/", "cli/"),
    r"^ *(import|from) rich\b": ("runs/", "cli/"),
    rf"^(import|from) ({LAZY})\b": (),  # imported where it is used, not at the top
    r"\bmesh(es)?\.(CLIENTS|MODEL)\b": ("federated/", "central/", "data/stream.py"),
    r"for round(_number)? in range\(": ("runs/loop.py",),
    r"\bvalue_and_grad\(": GRADIENTS,
    # FedFR's words: its task's and its algorithms', of a table of classes, of plans.
    r"\b(phi|hard_negatives?|public_classes)\b": (
        *("tasks/faces/", "federated/algorithms/", "central/class_parallel.py"),
        *("central/settings.py", "plan/", "cli/plan"),
    ),
    r"^ *(import|from) fedfr_jax\.federated(\.| import .*)parameter_packing\b": (
        *("tasks/faces/", "runs/stages.py"),
        "loading.py",
    ),
    # Public names are loaded when asked for; a key of a tree path has two names in JAX;
    # an optimizer goes by its name in optax, a section by its mark.
    r"\bgetattr\(": (
        "__init__.py",
        "trees.py",
        "parts.py",
        "schema.py",
        "tasks/methods.py",
    ),
    r"^ *(import importlib|from importlib import import)": (
        *("__init__.py", "cli/main.py"),
    ),
    r"\b(__import__|eval|exec)\(|^ *from \.": (),  # and no relative import
}
MAX_ALGORITHM_CODE, MAX_FUNCTION_CODE = 200, 75  # see `File.code`
IMPORTS = ast.Import | ast.ImportFrom
# Their errors wrap one that says "must", or are wrapped by one.
RETOLD = (
    "flags.py",
    "schema.py",
    "parts.py",
    "methods.py",
    "sources/decoding.py",
    "sources/pairs.py",
)
# What may be asked of JAX while a module is imported: nothing that makes an array.
WRAPPERS = ("jax.jit", "jax.custom_vjp", "jax.custom_jvp")


class File(NamedTuple):
    """A module of the package."""

    name: str  # "runs/loop.py"
    text: str
    tree: ast.Module
    code: list[int]  # numbers of lines that are no docstring, no comment, not blank


def read(path):
    text = path.read_text()
    tree, docs = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs |= {*range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    code = [n for n, x in lines if n not in docs and re.match(r"\s*[^\s#]", x)]
    return File(path.relative_to(PACKAGE).as_posix(), text, tree, code)


FILES = [read(path) for path in sorted(PACKAGE.rglob("*.py"))]
NODES = [(file, node) for file in FILES for node in ast.walk(file.tree)]


def room(file):
    """First part of a module's name, such as "runs"."""
    return file.name.partition("/")[0].removesuffix(".py")


def imported(node):
    """Modules of the package that a line imports, with the names from them."""
    if not isinstance(node, IMPORTS):
        return
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        if f"{prefix}{alias.name}.".startswith("fedfr_jax."):
            yield f"{prefix}{alias.name}"


def imports_point_down():
    floors = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    assert all((PACKAGE / x).exists() or (PACKAGE / f"{x}.py").exists() for x in floors)
    ends, offenders, sideways = (0, len(FLOORS) - 1), [], defaultdict(set)
    imports = [(file, module) for file, node in NODES for module in imported(node)]
    for file, module in imports:
        here, there = room(file), f"{module}.__init__".split(".")[1]
        above, below = floors.get(here, 0), floors.get(there, 0)
        if here != there and above == below and above in ends:
            sideways[here].add(there)
        elif here != there and above <= below:
            name = ".".join(module.split(".")[:3])
            offenders.append(f"{file.name} imports {name}")
    graphlib.TopologicalSorter(sideways).prepare()  # raises for a circle
    return imports, offenders


def folders_of_tests_mirror_the_package():
    """A folder as in the package or the repository; a file at the top as a module."""
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    offenders = []
    for folder in sorted({path.parent for path in files}):
        is_like = (PACKAGE / folder).is_dir() or (ROOT / folder).is_dir()
        if not is_like and folder.parts[0] not in CROSSING:
            offenders.append(f"tests/{folder} mirrors no folder")
    root = {path.stem.lower() for path in ROOT.iterdir()} | {"house", "packaging"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    for path in files:
        subject = path.stem.removeprefix("test_")
        if len(path.parts) == 1 and subject not in modules | root:
            offenders.append(f"tests/{path} tests no module")
    return files, offenders


def libraries_axes_and_the_loop_over_rounds_stay_where_they_belong():
    offenders = []
    for pattern, places in ONLY_IN.items():
        users = [f.name for f in FILES if re.search(pattern, f.text, re.MULTILINE)]
        offenders += [f"{x} has {pattern}" for x in users if not x.startswith(places)]
        if places and not users:
            offenders.append(f"nobody has {pattern}")
    return ONLY_IN, offenders


def a_module_and_a_function_are_one_idea():
    offenders = []
    for file in FILES:
        is_algorithm = file.name.startswith("federated/algorithms/")
        if is_algorithm and len(file.code) > MAX_ALGORITHM_CODE:
            offenders.append(f"{file.name} has too much code for an algorithm")
        if pathlib.Path(file.name).stem in ("utils", "common", "helpers", "misc"):
            offenders.append(f"{file.name} must be named after what it does")
    for file, node in NODES:
        if isinstance(node, ast.FunctionDef):
            own = [n for n in file.code if node.lineno <= n <= node.end_lineno]
            if len(own) > MAX_FUNCTION_CODE:
                offenders.append(f"{file.name}: {node.name} is too long")
    return FILES, offenders


def errors_say_what_must_be():
    errors, offenders = [], []
    for file, node in NODES:
        if isinstance(node, ast.Raise) and not file.name.endswith(RETOLD):
            errors.append(error := ast.unparse(node))
            is_whole = "must" in error and re.search(r"\b(got|but)\b", error)
            is_whole = is_whole or re.search(r"\b(needs|cannot)\b", error)
            if error.startswith("raise ValueError(") and not is_whole:
                offenders.append(f"{file.name}, line {node.lineno}: {error}")
    return errors, offenders


def a_family_is_one_dict_with_a_public_register_function():
    public = (PACKAGE / "__init__.pyi").read_text()
    offenders, owner = [], {}
    for file in FILES:
        pairs = re.findall(r'\bregister\((\w+), "(\w+)", name', file.text)
        if re.findall(r"def register_(\w+)\(", file.text) != [w for _, w in pairs]:
            offenders.append(f"{file.name} must register by schema.register")
        for family, word in pairs:
            owner[family] = file.name
            names = (family, f"register_{word}")
            hidden = [name for name in names if f"import {name} as" not in public]
            offenders += [f"{name} of {file.name} is not public" for name in hidden]
    for file in FILES:
        for name in re.findall(r"^([A-Z_]+)\b.* = \{", file.text, re.MULTILINE):
            if name not in owner and file.name.endswith("__init__.py"):
                offenders.append(f"{name} of {file.name} is closed")
            if owner.get(name, file.name) != file.name:
                offenders.append(f"{name} of {file.name} is in {owner[name]} too")
    return owner, offenders


def at_import(node):
    """Calls that an import makes: of functions, only in defaults and decorators."""
    for child in ast.iter_child_nodes(node):
        parts = [child]
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            parts = [child.args, *vars(child).get("decorator_list", [])]
        for part in parts:
            if isinstance(part, ast.Call):
                yield ast.unparse(part.func)
            yield from at_import(part)


def nothing_is_computed_at_import():
    offenders = []
    for file in FILES:
        names = [x for x in at_import(file.tree) if x.startswith(("jnp.", "jax."))]
        wrong = [name for name in names if not name.startswith(WRAPPERS)]
        offenders += [f"{file.name} calls {name} at import" for name in wrong]
    return FILES, offenders


def nothing_of_a_workplace_is_in_the_tree():
    folders = ("docs", "configs", "experiments", "fedfr_jax")
    texts = [path for x in folders for path in (ROOT / x).rglob("*.[mp][dy]")]
    offenders = []
    for path in [*ROOT.glob("*.md"), *texts]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"/(work|root|home|tmp)/|\t|\b(TODO|FIXME|XXX)\b", line):
                offenders.append(f"{path.relative_to(ROOT)}, line {number}: {line}")
    return texts, offenders


RULES = (
    imports_point_down,
    folders_of_tests_mirror_the_package,
    libraries_axes_and_the_loop_over_rounds_stay_where_they_belong,
    a_module_and_a_function_are_one_idea,
    errors_say_what_must_be,
    a_family_is_one_dict_with_a_public_register_function,
    nothing_is_computed_at_import,
    nothing_of_a_workplace_is_in_the_tree,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    visited, offenders = rule()
    assert list(visited), "this rule visits nothing"
    broken = list(offenders)
    assert not broken, "\n" + "\n".join(broken)
