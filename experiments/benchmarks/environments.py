"""One virtual environment per system, made from the package registry once.

Every recipe is a list of pip calls. fedjax and TensorFlow Federated need the old
versions that are pinned here: their releases do not resolve, or do not import, with
what the registry serves today.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2] / ".venv-bench"
TORCH = "torch==2.13.0"  # one version for all that compute with it
PEFT = "peft==0.21.2"  # of vit_lora
TFF = """absl-py==1.4.0 attrs~=23.1 cachetools~=5.3 dm-tree==0.1.8 dp-accounting==0.4.3
googleapis-common-protos==1.61.0 jax==0.4.18 jaxlib==0.4.18 numpy~=1.25 portpicker~=1.6
scipy<1.12 setuptools<80 tensorflow==2.14.* tqdm~=4.64 typing-extensions==4.5.*"""
TFF_ALONE = """google-vizier==0.1.11 tensorflow-federated==0.87.0
tensorflow-model-optimization==0.7.5 tensorflow-privacy==0.9.0
tensorflow-probability==0.22.*"""
TFF_REST = """cloudpickle decorator matplotlib<3.9 pandas<2.2 scikit-learn<1.5
statsmodels<0.14.2 tensorflow-estimator==2.14.*"""
RECIPES = {
    "torch": (f"{TORCH} {PEFT} numpy",),
    "fedjax": (
        "fedjax==0.0.17 jax==0.4.30 jaxlib==0.4.30 dm-haiku==0.0.12 numpy<2 scipy<1.13",
    ),
    "pfl": (f"pfl[pytorch]==0.6.0 {TORCH} {PEFT}",),
    "flower": (f"flwr[simulation]==1.42.0 {TORCH} numpy",),
    # It asks for Python 3.14; `peer_blazefl.py` says what is changed for an older one.
    "blazefl": (
        f"{TORCH} numpy tqdm",
        "--no-deps --ignore-requires-python blazefl==3.0.0",
    ),
    "tff": (TFF, f"--no-deps {TFF_ALONE}", TFF_REST),
}
PYTHON = "python3.11"  # the newest that all recipes install on


def python_of(system: str) -> str:
    """Path of the system's interpreter; the first call installs it, in minutes.

    Raises:
      RuntimeError: when it cannot be installed, with pip's last line.
    """
    recipe = RECIPES[system]
    folder = ROOT / system
    stamp = folder / hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]
    if not stamp.exists():
        print(f"installing {system} into {folder}", file=sys.stderr, flush=True)
        _run([_interpreter(), "-m", "venv", "--clear", str(folder)])
        for arguments in recipe:
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
            _run([*pip, "--disable-pip-version-check", *arguments.split()])
        stamp.touch()
    return str(folder / "bin/python")


def _interpreter() -> str:
    path = shutil.which(PYTHON)
    if not path:
        raise RuntimeError(f"{PYTHON} must be on PATH, found none.")
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(lines[-1][:300])


if __name__ == "__main__":
    for name in sys.argv[1:] or RECIPES:
        print(name, python_of(name))
