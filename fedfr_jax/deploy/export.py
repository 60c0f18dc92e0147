"""Export of trained models to other formats, and import of external checkpoints.

Exported files run or open without this library:

.onnx         images [N, C, H, W] -> embedding [N, D], any N
.stablehlo    images [N, H, W, C] -> embedding [N, D], any N, by jax.export
.safetensors  the leaves with our names; `load_model` opens it
.npz          the same without metadata
.pt, .pth     a state dict with PyTorch's names, see `to_torch`; needs PyTorch

Images are RGB in [-1, 1], pixel / 127.5 - 1, for every network: other statistics and
sums with mirror images are part of the graph. The metadata `preprocessing` of an ONNX
file describes the steps before, resizing and alignment. Embeddings are not normalized.
"""

import json
import os
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np

from fedfr_jax.data.preprocessing import from_unit, metadata, sum_views
from fedfr_jax.deploy.calibration import CURVE, curve_text
from fedfr_jax.deploy.onnx_graph import trace_graph, write_onnx
from fedfr_jax.deploy.trained_model import TrainedModel, build_trained_model
from fedfr_jax.models.external_checkpoints import to_torch
from fedfr_jax.models.torch_graph import from_json, state_arrays
from fedfr_jax.models.weights import read_weights, write_weights
from fedfr_jax.types import InputShape, is_image

PLATFORMS = ("cpu", "cuda", "tpu")
TOLERANCE = 1e-4  # of the largest number of an embedding


def export(network: TrainedModel, path: str | os.PathLike) -> str:
    """Write a model to a file in the format of its suffix; return a line on the check.

    Raises:
      ValueError: for an unknown suffix, or a network that the format cannot hold.
      ImportError: when a package that the format needs is missing.
    """
    path = pathlib.Path(path)
    if path.suffix not in WRITERS:
        raise ValueError(f"file must end in one of {list(WRITERS)}, got {path}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    return WRITERS[path.suffix](network, path)


def export_model(network: TrainedModel) -> Callable:
    """Embedding function of images [B, H, W, C] in [-1, 1], or vectors: [B, D]."""
    preprocessing = network.preprocessing

    def embed(images):
        return network.apply(network.variables, images)

    if not is_image(network.input_shape):
        return embed
    embed = sum_views(embed, preprocessing)
    return lambda images: embed(from_unit(images, preprocessing))


def _to_onnx(network, path) -> str:
    graph, output = trace_graph(export_model(network), network.image_shape)
    recorded = network.recorded
    if recorded:
        recorded = recorded._replace(mean=127.5, std=127.5, mirrored=False)
    about = {**network.metadata, **metadata(recorded)}
    write_onnx(graph, output, network.image_shape, about, path)
    return check_export(network, path)


def check_export(network: TrainedModel, path: pathlib.Path) -> str:
    """Compare an ONNX file with the model on one image and on three; return a line.

    Raises:
      ValueError: if the difference exceeds TOLERANCE.
    """
    try:
        import onnxruntime
    except ImportError:
        return "not checked: onnxruntime is not installed"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng, worst = np.random.default_rng(0), 0.0
    for number in (1, 3):
        images = rng.integers(256, size=(number, *network.image_shape), dtype=np.uint8)
        expected = network.embed(images)
        inputs = (images.transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32)
        (actual,) = session.run(None, {"images": inputs})
        worst = max(worst, np.abs(actual - expected).max() / np.abs(expected).max())
    if not worst < TOLERANCE:
        raise ValueError(
            f"{path} must give the model's embeddings within {TOLERANCE}, got a "
            f"difference of {worst}."
        )
    return f"checked by onnxruntime: off by {worst:.1e} of the largest number"


def _to_stablehlo(network, path) -> str:
    (size,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((size, *network.input_shape), np.float32)
    exported = jax.export.export(jax.jit(export_model(network)), platforms=PLATFORMS)(
        images
    )
    path.write_bytes(bytes(exported.serialize()))
    return f"for {', '.join(PLATFORMS)}"


def _to_weights(network, path) -> str:
    arrays, about = network.weights
    write_weights(path, arrays, {**about, CURVE: curve_text(network.roc)})
    return f"{len(arrays)} arrays"


def _to_pytorch(network, path) -> str:
    write_weights(path, arrays := torch_arrays(network))
    return f"{len(arrays)} tensors"


def torch_arrays(network: TrainedModel) -> dict[str, np.ndarray]:
    """The model's arrays by PyTorch's names, see `to_torch`."""
    settings = json.loads(network.weights.about["model"])
    if "graph" in settings:
        return state_arrays(from_json(settings["graph"]), network.variables)
    name, shape = settings.pop("name"), network.image_shape
    return to_torch(name, network.variables, shape, **settings)


WRITERS = {
    ".onnx": _to_onnx,
    ".stablehlo": _to_stablehlo,
    ".safetensors": _to_weights,
    ".npz": _to_weights,
    ".pt": _to_pytorch,
    ".pth": _to_pytorch,
}


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    model: Mapping | None = None,
    input_shape: InputShape | None = None,
    key: str = "",
) -> str:
    """Convert the weights file `source` to `target`, in the formats of `export`.

    Args:
      model: {"name": of MODELS, settings}; None finds it from names and shapes.
      input_shape: (H, W, C), likewise.
      key: which weights of a file that has several, see `read_weights`.
    """
    network = build_trained_model(read_weights(source, key), source, model, input_shape)
    check = export(network, target)
    section = {k: v for k, v in (network.model or {}).items() if k != "num_classes"}
    shape = network.input_shape
    return f"{target}: {check}, images {shape}, config.model = {section}"
