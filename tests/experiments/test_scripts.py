"""Every script can be imported as `python experiments/<folder>/<script>.py` is run."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# Other systems and their networks live in environments of their own, mutmut in that of
# `make mutants`.
PEERS = ("torch", "torchvision", "flwr", "fedjax", "pfl", "tensorflow_federated")
PEERS += ("tensorflow", "mutmut", "libcst")
IMPORT_ALL = """
import importlib, pathlib, sys
folder, peers = pathlib.Path(sys.argv[1]), sys.argv[2:]
sys.path.insert(0, "")
for path in sorted(folder.rglob("*.py")):
    sys.path[0] = str(path.parent)
    before = set(sys.modules)
    try:
        importlib.import_module(path.stem)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in peers:
            print(f"{path.relative_to(folder)}: {error}")
    except ImportError as error:
        print(f"{path.relative_to(folder)}: {error}")
    for name in {*sys.modules} - before:  # another folder may have one of this name
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
"""


def test_every_script_finds_what_it_imports(tmp_path):
    # The library alone is found, as where it is installed: not the repository's root.
    (tmp_path / "fedfr_jax").symlink_to(ROOT / "fedfr_jax")
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, str(ROOT / "experiments"), *PEERS],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
