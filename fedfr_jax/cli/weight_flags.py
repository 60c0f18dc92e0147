"""Flags of commands that use trained models: --weights, images, thresholds."""

import argparse
import math
import os

from fedfr_jax.cli.flags import Parser, count, define_data_changed
from fedfr_jax.text import printable


def define_weights(parser: Parser) -> None:
    """Add --weights, --method and --client."""
    parser.flag(
        "--weights",
        "PATH",
        "run directory, its folder of a stage, or a file of weights (fedfr export)",
    )
    parser.flag("--method", "METHOD", "method of the run (default the last)")
    client = "client whose personalized model is used (default the global model)"
    parser.flag("--client", "I", client, type=count)
    define_data_changed(parser)


def define_images(parser: Parser, description: str) -> None:
    """Add images, --landmarks and --detector."""
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=description)
    parser.flag(
        "--landmarks",
        "CSV",
        "to align faces by: columns name, x1, y1 ... x5, y5 of eyes, nose and mouth",
    )
    detector = "file of OpenCV's YuNet, which finds the landmarks"
    parser.flag("--detector", "ONNX", detector)


def define_threshold(parser: Parser) -> None:
    """Add --far and --threshold."""
    rate = (
        "false accept rate, by the evaluation of the model's run (default 0.001, or "
        "the smallest one that its pairs can measure)"
    )
    parser.flag("--far", "RATE", rate, type=float)
    threshold = "minimum cosine of one person, instead of --far"
    parser.flag("--threshold", "COSINE", threshold, type=float)


def load_weights(values: argparse.Namespace, command: str):
    """Load the model of the flags."""
    if not values.weights:
        raise ValueError(
            f"{command}: needs --weights=PATH, a run directory or a file of weights."
        )
    check_files(values)
    from fedfr_jax.loading import load_model

    return load_model(
        values.weights,
        method=values.method,
        client=values.client,
        data_changed=values.data_changed,
    )


def check_files(values: argparse.Namespace) -> None:
    """Raise ValueError for an image or a landmarks file that does not exist."""
    flags = vars(values)
    named = {f"--{flag}": flags.get(flag) for flag in ("landmarks", "detector")}
    paths = [("images", path) for path in flags.get("images", ())]
    for name, path in [*paths, *named.items()]:
        if path is not None and not os.path.exists(path):
            raise ValueError(f"{name} must exist, got {path}, which does not.")


def load_images(values: argparse.Namespace, network):
    """Read the images of the flags; print how they are aligned."""
    from fedfr_jax.deploy.face_images import read_images

    images = read_images(
        values.images,
        network.input_shape,
        network.recorded,
        landmarks=values.landmarks,
        detector=values.detector,
    )
    print(printable(images.alignment, keep="\n"))
    return images


def get_threshold(values: argparse.Namespace, calibration: str) -> tuple[float, str]:
    """(value of --threshold, else the threshold of --far; where it comes from)."""
    if values.threshold is not None:
        if not math.isfinite(values.threshold):
            raise ValueError(f"--threshold must be a number, got {values.threshold}.")
        return values.threshold, "given"
    from fedfr_jax.deploy.calibration import threshold

    return threshold(calibration, values.far)


def required_flag(value: str | None, flag: str, command: str) -> str:
    """Check that a flag has a value, and return it."""
    if not value:
        raise ValueError(f"{command}: needs --{flag}=FILE.")
    return value
