"""Check the installation: packages, devices, memory, compilers, data sets."""

import json
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata, util
from typing import NamedTuple

import fedfr_jax
from fedfr_jax.cli.flags import add_switch, new_parser, parse_flags

ABOUT = """\
Check what a run needs, and print what to fix: Python and packages, devices, memory and
disk, the compiler, data sets. The exit code is 1 if something has to be fixed."""
# Extra of the package: (its modules, purpose).
EXTRAS = {
    "report": (
        ("jinja2", "starlette", "uvicorn", "vl_convert"),
        "charts, fedfr report and fedfr serve",
    ),
    "privacy": (("dp_accounting", "jax_privacy"), "differential privacy"),
    "flower": (("flwr",), "real clients"),
    "export": (("flatbuffers", "onnx", "onnxruntime"), "export to ONNX"),
    "detect": (("cv2",), "finding faces"),
    "remote": (("fsspec", "gcsfs", "s3fs"), "runs in buckets"),
    "search": (("faiss",), "search by FAISS"),
    "tfds": (("importlib_resources", "tensorflow_datasets"), "TensorFlow Datasets"),
    "torch": (("torch",), "PyTorch checkpoints"),
    "tensorboard": (("tensorboardX",), "TensorBoard"),
    "wandb": (("wandb",), "Weights & Biases"),
    "mlflow": (("mlflow",), "MLflow"),
    "trackio": (("trackio",), "Trackio"),
}
CORE = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
MIN_FREE_GIB = 2  # of memory and of the disk, below which a run may not fit
GPU_TOOLS = {"nvidia-smi": "cuda12", "rocm-smi": "rocm"}
GIB = 2**30


class Finding(NamedTuple):
    """Result of one check."""

    name: str
    state: str  # ok, note or fix
    detail: str
    fix: str = ""  # what to do


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr doctor", ABOUT, epilog="")
    add_switch(parser, "json", "print a JSON list")
    values = parse_flags(parser, argv)
    results = []
    for finding in findings():
        results.append(finding)
        if not values.json:
            print_finding(finding)
    if values.json:
        print(json.dumps([finding._asdict() for finding in results], indent=1))
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


def _packages() -> Finding:
    versions, missing = [], []
    for name in CORE:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        fix = "pip install --force-reinstall fedfr_jax"
        return Finding("packages", "fix", f"missing: {', '.join(missing)}", fix)
    return Finding("packages", "ok", ", ".join(versions))


def _extras() -> Iterator[Finding]:
    for extra, (modules, purpose) in EXTRAS.items():
        if all(map(util.find_spec, modules)):
            yield Finding("extra", "ok", f"{extra}: {purpose}")
        else:
            fix = f"pip install 'fedfr_jax[{extra}]'"
            yield Finding("extra", "note", f"no {extra}: {purpose}", fix)


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
