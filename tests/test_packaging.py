"""What is installed, what the library imports, and what its wheel holds."""

import ast
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = (ROOT / "requirements.txt").read_text()
NOT_PINNED = "detect docs export flower mlflow torch trackio wandb".split()  # extras
READY = pathlib.Path(sys.prefix) / ".ready"  # requirements.txt as it was installed
# Where a module has another name than its package.
PACKAGES = {
    "cv2": "opencv-python-headless",
    "faiss": "faiss-cpu",
    "PIL": "pillow",
    "orbax": "orbax-checkpoint",
    "vl_convert": "vl-convert-python",
}


def name_of(requirement):
    return requirement.name.lower().replace("_", "-")


def requirements(lines, python=None):
    """{package: its specifier} of `lines` on this or another version of Python."""
    environment = {"python_version": python} if python else None
    words = [line.partition("#")[0].strip() for line in lines]
    found = [Requirement(word) for word in words if word]
    here = [r for r in found if r.marker is None or r.marker.evaluate(environment)]
    assert len({name_of(r) for r in here}) == len(here)
    return {name_of(r): r.specifier for r in here}


def imported():
    """Packages that the library imports and that are not Python's."""
    roots = set()
    for path in (ROOT / "fedfr_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add(node.module.partition(".")[0])
    roots -= {*sys.stdlib_module_names, "fedfr_jax"}
    return {PACKAGES.get(x, x).lower().replace("_", "-") for x in roots}


def test_what_is_installed_is_what_is_pinned():
    if not READY.is_file() or READY.read_text() != PINS:
        pytest.skip("this environment was not made from requirements.txt")
    for name, version in requirements(PINS.splitlines()).items():
        assert version.contains(metadata.version(name)), name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pins_are_exact_and_within_what_the_package_asks_for(python):
    pinned = requirements(PINS.splitlines(), python)
    for name, specifier in pinned.items():
        assert [s.operator for s in specifier] == ["=="], name
    extras = PROJECT["optional-dependencies"]
    asked = [x for name in extras if name not in NOT_PINNED for x in extras[name]]
    needed = requirements([*PROJECT["dependencies"], *asked], python)
    for name, specifier in needed.items():
        assert name in pinned, name
        assert all(specifier.contains(pin.version) for pin in pinned[name]), name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_dependency_names_its_lowest_version(python):
    """`make wheels` installs these."""
    for name, specifier in requirements(PROJECT["dependencies"], python).items():
        assert [s.operator for s in specifier] == [">="], name


def test_dependencies_are_what_the_library_imports():
    core = set(requirements(PROJECT["dependencies"]))
    extras = PROJECT["optional-dependencies"].items()
    optional = {name for key, x in extras if key != "test" for name in requirements(x)}
    assert core <= imported() <= core | optional


CALLS = """\
import jax, fedfr_jax as ff
def check(local: ff.LocalTraining, data: ff.FederatedDataset, variables: dict):
    algorithm = ff.fedavg(local, weighting="uniform")
    ff.fedavg(local, weightng="x")  # wrong
    ff.fedavg(local, weighting=1)  # wrong
    run = ff.init(algorithm, data, variables, batch_size=8)
    ff.init(algorithm, data, variables, batch_size="8")  # wrong
    ff.init(algorithm, data)  # wrong
    ff.evaluate(run, data)  # wrong
    ff.fedavgg  # wrong
"""


@pytest.mark.ci
def test_mistyped_calls_of_the_public_functions_are_reported(tmp_path):
    pytest.importorskip("basedpyright")
    (tmp_path / "calls.py").write_text(CALLS)
    settings = {"typeCheckingMode": "standard", "include": ["calls.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "fedfr_jax").symlink_to(ROOT / "fedfr_jax")
    words = ["--pythonpath", sys.executable, "--outputjson"]
    command = [sys.executable, "-m", "basedpyright", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [x for x in found if x["severity"] == "error"]
    lines = enumerate(CALLS.splitlines())
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    assert {error["range"]["start"]["line"] for error in errors} == wrong, errors


def built(tmp_path):
    """The wheel and beside it the source archive, of a copy of the repository."""
    source, out = tmp_path / "source", tmp_path / "dist"
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    )
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "build", "-o", out, source], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_what_is_uploaded_is_whole_small_and_well_described(tmp_path):
    """Needs setuptools from the package registry."""
    wheel = built(tmp_path)
    (archive,) = wheel.parent.glob("*.tar.gz")
    check = [sys.executable, "-m", "twine", "check", "--strict", wheel, archive]
    subprocess.run(check, check=True)
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    for name in (
        "AGENTS.md",
        "CITATION.cff",
        "SECURITY.md",
        "LICENSE",
        "configs/base.py",
    ):
        assert name in names
    assert "fedfr_jax/viewer/templates/report.html" in names
    assert not [name for name in names if name.startswith(("tests", "experiments"))]
    assert archive.stat().st_size < 2**21
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    for path in (ROOT / "fedfr_jax").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for path in (ROOT / "configs").rglob("*.py"):
        assert f"fedfr_jax/{path.relative_to(ROOT).as_posix()}" in names
    assert {"fedfr_jax/py.typed", "fedfr_jax/viewer/templates/style.css"} <= names
    folders = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert folders == {"fedfr_jax"}


@pytest.mark.slow
def test_the_wheel_without_extras_trains_the_demo_in_an_environment_of_its_own(
    tmp_path,
):
    """Needs the package registry and a GB of the disk."""
    python, workdir = tmp_path / "env" / "bin" / "python", tmp_path / "run"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    pins = ["--quiet", "-c", ROOT / "requirements.txt"]
    install = [python, "-m", "pip", "install", *pins, built(tmp_path)]
    subprocess.run(install, check=True)
    ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}

    def fedfr(*words):
        command = [python, "-m", "fedfr_jax", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=ours, capture_output=True, text=True
        )

    changes = ["--config.federation.rounds=1", "--config.pretrain.epochs=1"]
    done = fedfr("demo", *changes, f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr[-2000:]
    methods = json.loads((workdir / "summary.json").read_text())["methods"]
    assert methods.keys() == {"pretrained", "fedavg", "fedfr"}
    rates = [of["personalized"]["tar@far=1e-03"] for of in methods.values()]
    assert all(0 < rate < 1 for rate in rates)
    for line in ("tar@far=1e-03", "No plots: pip install 'fedfr_jax[report]'"):
        assert line in done.stdout
    for words, says in (
        (["configs"], "fedfr/demo"),
        (["doctor"], "pip install 'fedfr_jax[report]'"),
        (["report", str(workdir)], "pip install 'fedfr_jax[report]'"),
    ):
        done = fedfr(*words)
        assert says in done.stdout + done.stderr
