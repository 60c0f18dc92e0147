"""Check the installation: packages, devices, memory, compilers, data sets."""

import json as texts
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import fedfr_jax

EXTRAS = {  # of the package, and what they are for
    "report": "charts, fedfr report and fedfr serve",
    "privacy": "differential privacy",
    "flower": "real clients",
    "export": "export to ONNX",
    "detect": "finding faces",
    "remote": "runs in buckets",
    "search": "search by FAISS",
    "tfds": "TensorFlow Datasets",
    "torch": "PyTorch modules and checkpoints",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow",
    "trackio": "Trackio",
}
MIN_FREE_GIB = 2  # of memory and of the disk, below which a run may not fit
GPU_TOOLS = {"nvidia-smi": "cuda12", "rocm-smi": "rocm"}
GIB = 2**30


class Finding(NamedTuple):
    """Result of one check."""

    name: str
    state: str  # ok, note or fix
    detail: str
    fix: str = ""  # what to do


def doctor(*, json: bool = False) -> None:
    """Check the installation: packages, devices, memory, data sets.

    Printed is what a run needs, and what to fix: Python and packages, devices, memory
    and disk, the compiler, data sets. The exit code is 1 if something has to be fixed.

    Args:
      json: print a JSON list
    """
    results = []
    for finding in findings():
        results.append(finding)
        if not json:
            print_finding(finding)
    if json:
        print(texts.dumps([finding._asdict() for finding in results], indent=1))
    if any(finding.state == "fix" for finding in results):
        sys.exit(1)


def print_finding(finding: Finding) -> None:
    """Print a finding in one line, and its fix in a second."""
    mark = {"ok": "ok  ", "note": "note", "fix": "FIX "}[finding.state]
    print(f"{mark}  {finding.name:12} {finding.detail}", flush=True)
    if finding.fix:
        print(f"      {'':12} {finding.fix}", flush=True)


def findings() -> Iterator[Finding]:
    """Yield the results of all checks."""
    yield _python()
    yield _packages()
    yield from _extras()
    yield _disk()
    yield _locks()
    yield from _devices()
    yield _compiler()
    yield _data_sets()


def _python() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    detail = f"{platform.python_version()} on {system}, fedfr {fedfr_jax.__version__}"
    return Finding("python", "ok", detail)


def installed(extra: str = "") -> tuple[list[str], list[str]]:
    """Packages of the library, or of an extra: (those there are, the others)."""
    found, missing = {}, []
    for line in metadata.requires("fedfr_jax") or ():
        requirement, _, condition = line.partition(";")
        name = re.split(r"[^\w.-]", requirement)[0]
        if [extra] * bool(extra) != re.findall('extra == "(.*)"', condition):
            continue
        try:
            found[name] = f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            missing.append(name)
    return [*found.values()], missing


def _packages() -> Finding:
    found, missing = installed()
    if missing:
        fix = "pip install --force-reinstall fedfr_jax"
        return Finding("packages", "fix", f"missing: {', '.join(missing)}", fix)
    return Finding("packages", "ok", ", ".join(found))


def _extras() -> Iterator[Finding]:
    for extra, purpose in EXTRAS.items():
        if installed(extra)[1]:
            fix = f"pip install 'fedfr_jax[{extra}]'"
            yield Finding("extra", "note", f"no {extra}: {purpose}", fix)
        else:
            yield Finding("extra", "ok", f"{extra}: {purpose}")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / GIB
    detail = f"{free:.1f} GiB free in {pathlib.Path.cwd()}"
    if free < MIN_FREE_GIB:
        fix = "Make room, or name a --workdir on another disk."
        return Finding("disk", "fix", detail, fix)
    return Finding("disk", "ok", detail)


def _locks() -> Finding:
    """Check whether files of the current folder can be locked, as runs need."""
    from fedfr_jax.runs.locks import lock_to_write

    try:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            lock_to_write(pathlib.Path(folder), "").close()
    except (OSError, ValueError) as error:
        fix = "Start from a folder that you may write to, on a disk with locks."
        return Finding("folder", "fix", f"no run can be kept here: {error}", fix)
    return Finding("folder", "ok", "runs can be kept here")


def _devices() -> Iterator[Finding]:
    import jax

    from fedfr_jax import distributed, mesh
    from fedfr_jax.files import MEMORY

    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Finding(
            "devices", "fix", f"JAX finds none: {error}", "Unset JAX_PLATFORMS."
        )
        return
    kind = devices[0].platform
    detail = f"{len(devices)} x {devices[0].device_kind}"
    tools = [tool for tool in GPU_TOOLS if shutil.which(tool)]
    if kind == "cpu" and tools:
        fix = f'pip install "jax[{GPU_TOOLS[tools[0]]}]"'
        yield Finding("devices", "fix", f"{detail}, but {tools[0]} is here", fix)
    else:
        yield Finding("devices", "ok", detail)
    free = mesh.free_bytes(mesh.make_mesh())
    state = "note" if free and free * len(devices) < MIN_FREE_GIB * GIB else "ok"
    detail = f"{MEMORY / GIB:.1f} GiB, {distributed.num_cores()} cores"
    if free:
        detail += f"; {free / GIB:.1f} GiB free a device"
    yield Finding("memory", state, detail)


def _compiler() -> Finding:
    import jax
    import jax.numpy as jnp

    started = time.perf_counter()
    try:
        jax.jit(lambda x: (x @ x).sum())(jnp.ones((64, 64))).block_until_ready()
    except Exception as error:
        text = str(error).partition("\n")[0]
        fix = "Install jax and jaxlib of one version: pip install -U jax"
        return Finding("compiler", "fix", f"XLA fails: {text}", fix)
    seconds = time.perf_counter() - started
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    caching = f"programs are kept in {cache}" if cache else "programs are not kept"
    fix = "" if cache else "Set JAX_COMPILATION_CACHE_DIR to compile a program once."
    return Finding("compiler", "ok", f"XLA compiles ({seconds:.1f} s), {caching}", fix)


def _data_sets() -> Finding:
    folder = pathlib.Path(os.environ.get("FEDFR_DATA", "../shared/data"))
    if not folder.is_dir():
        detail = f"no folder {folder}; rendered faces and fake_data need none"
        fix = "Set FEDFR_DATA to the folder of your data sets."
        return Finding("data sets", "note", detail, fix)
    names = sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
    return Finding("data sets", "ok", f"{folder}: {', '.join(names) or 'empty'}")
