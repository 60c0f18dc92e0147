"""Milliseconds for one face on one CPU thread, in the manner of FRUITS.

    pip install "fedfr_jax[export]"
    python experiments/benchmarks/latency.py [--depths 18 34 50] [--repeats=30]

FRUITS (Zhu et al., "WebFace260M", CVPR 2021) bounds detection, alignment and embedding
of one picture at 100, 500 or 1000 ms on one thread of a CPU. Here are the two that are
ours: reading and aligning a picture of 480 x 640 pixels by given landmarks, and the
embedding through onnxruntime, of IResNets as `fedfr export` writes them, with one
thread within and between operations. What is left of a bound is the detector's. Weights
are all alike: they change no time. Each is called `--repeats` times and the least
counts, because others may be at work on the machine. Prints JSON.
"""

import argparse
import json
import pathlib
import tempfile
import time

import jax
import numpy as np
import onnxruntime
import results_file
from PIL import Image

from fedfr_jax.data.align import arcface_template
from fedfr_jax.deploy.export import export
from fedfr_jax.deploy.face_images import read_images
from fedfr_jax.deploy.trained_model import build_trained_model
from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import to_torch
from fedfr_jax.models.weights import Weights

SHAPE = (112, 112, 3)
BOUNDS = (100, 500, 1000)  # ms


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[18, 34, 50, 100])
    parser.add_argument("--repeats", type=int, default=30)
    results_file.add_flag(parser)
    return parser.parse_args()


def network(depth: int):
    """An IResNet of ones: the time of an operation is that of any numbers."""
    model = MODELS["iresnet"](SHAPE, depth=depth)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    drawn = jax.tree.map(lambda x: np.full(x.shape, 1e-2, np.float32), shapes)
    arrays = to_torch("iresnet", drawn, SHAPE, depth=depth)
    return build_trained_model(Weights(arrays, {}), f"r{depth}")


def milliseconds(call, repeats: int) -> float:
    """The least, after one call that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def aligning(folder: pathlib.Path, repeats: int) -> float:
    """Of reading and aligning one picture."""
    picture = np.random.default_rng(0).integers(256, size=(480, 640, 3), dtype=np.uint8)
    Image.fromarray(picture).save(folder / "face.jpg")
    points = 1.7 * arcface_template((112, 112)) + 150
    columns = ",".join(f"{axis}{i}" for i in range(1, 6) for axis in "xy")
    row = ",".join(map(str, points.reshape(-1)))
    csv, path = folder / "landmarks.csv", folder / "face.jpg"
    csv.write_text(f"name,{columns}\n{path},{row}\n")
    return milliseconds(lambda: read_images([path], SHAPE, landmarks=csv), repeats)


def embedding(path: pathlib.Path, repeats: int) -> float:
    """Of one image through onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    image = np.zeros((1, 3, 112, 112), np.float32)
    return milliseconds(lambda: session.run(None, {"images": image}), repeats)


def main():
    args = parse_arguments()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        align = aligning(folder, args.repeats)
        for depth in args.depths:
            path = folder / f"r{depth}.onnx"
            export(network(depth), path)
            embed = embedding(path, args.repeats)
            left = {f"left of {bound} ms": bound - align - embed for bound in BOUNDS}
            shown = {"read and align ms": align, "embed ms": embed, **left}
            rows[f"R{depth}"] = {key: round(value, 2) for key, value in shown.items()}
    results_file.write(args.out, rows)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
