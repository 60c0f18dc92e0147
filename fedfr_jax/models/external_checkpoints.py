"""External checkpoints: conversion between PyTorch parameters and ours.

Convolutions OIHW <-> HWIO, linear [out, in] <-> [in, out], the flattening before the
linear layer C, H, W <-> H, W, C, and blocks <-> stacks of equal ones. Names on the
PyTorch side are those of FedFR's and InsightFace's backbones and of torchvision's
ResNets; batch counters are dropped. `bases` has those of transformers and ConvNeXt.

`detect_model` also knows the names of the "IR" networks of TreB1eN, face.evoLVe, TFace
and AdaFace, and our own leaves such as `params/stem/conv/kernel`.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import jax
import numpy as np
from annotated_types import Interval

from fedfr_jax.json_files import parse_json
from fedfr_jax.models import MODELS, build_model
from fedfr_jax.models.bases import base_network, is_base, our_arrays, resized
from fedfr_jax.models.norm import EPSILON
from fedfr_jax.models.weights import Weights
from fedfr_jax.ranges import Count
from fedfr_jax.scanned_blocks import by_block_name, unstack_like
from fedfr_jax.schema import (
    broken_rule,
    check_choice,
    check_without_code,
    has_kind,
    with_tuples,
)
from fedfr_jax.trees import by_name
from fedfr_jax.types import InputShape, PyTree

Arrays = Mapping[str, np.ndarray]
Side = Annotated[int, Interval(ge=1, le=2**13)]
Image, Vector = tuple[Side, Side, Side], tuple[Count]
DEPTHS = ("depth", "num_blocks")  # where a network's section has no `blocks`
LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "slope": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
TOPS = {  # layers outside of the stages, ours and PyTorch's
    "sphereface": {"fc": "fc"},
    "iresnet": {
        "stem/conv": "conv1",
        "stem/bn": "bn1",
        "stem/prelu": "prelu",
        "bn": "bn2",
        "fc": "fc",
        "bn_out": "features",
    },
    "resnet": {"stem/conv": "conv1", "stem/bn": "bn1", "fc": "fc"},
}
LEFT_OUT = ("fc", "mask_token")  # modules of a base that a network can do without
SPHEREFACE_FIRST = {"conv": "0", "prelu": "1"}  # layers before a stage's blocks
IR = "body.0.res_layer.0.weight"
IR_LAYERS = {  # of a block, with and without a normalization after conv1
    6: {"0": "bn1", "1": "conv1", "2": "bn2", "3": "prelu", "4": "conv2", "5": "bn3"},
    5: {"0": "bn1", "1": "conv1", "2": "prelu", "3": "conv2", "4": "bn3"},
}
IR_TOPS = {
    "input_layer.0": "conv1",
    "input_layer.1": "bn1",
    "input_layer.2": "prelu",
    "output_layer.0": "bn2",
    "output_layer.3": "fc",
    "output_layer.4": "features",
}


def convert_variables(
    weights: Weights, model: Mapping[str, Any], input_shape: InputShape
) -> PyTree:
    """Convert loaded weights to the variables of the config's `model`.

    Args:
      model: {"name": of MODELS, settings of its factory}.
      input_shape: (H, W, C).

    Returns:
      {"params", "batch_stats"} of numpy arrays, float32.
    """
    _check_model(weights, model, input_shape)
    arrays, is_external = _float32(weights.arrays), is_base(weights.arrays)
    if is_external:
        arrays = our_arrays(arrays)
    if is_external or any(name.startswith("params/") for name in arrays):
        built = build_model(model, input_shape)
        shapes = jax.eval_shape(built.init, jax.random.key(0))
        if is_external:
            tops = [name for name in LEFT_OUT if name not in shapes["params"]]
            arrays = {k: x for k, x in arrays.items() if k.split("/")[1] not in tops}
        return fitted(arrays, shapes)
    settings = {k: v for k, v in model.items() if k != "name"}
    return from_torch(model["name"], weights.arrays, input_shape, **settings)


def from_torch(
    model_name: str, state_dict: Arrays, input_shape: InputShape, **settings
) -> PyTree:
    """Convert a PyTorch state dict to a model's variables.

    Args:
      model_name: "sphereface", "iresnet" with head E, or "resnet" (stem "imagenet").
      state_dict: tensor name -> array, every tensor of the backbone.
      input_shape: (H, W, C) of the model.
      **settings: of the model's factory, such as depth or widths.

    Returns:
      {"params", "batch_stats"} of numpy arrays, float32.
    """
    template, head = _template(model_name, input_shape, settings)
    tensors = _torch_tensors(state_dict)
    if model_name == "iresnet" and "features.weight" in tensors:
        tensors = _with_unit_scale(tensors)
        del tensors["features.weight"]
    shapes = by_name(jax.eval_shape(by_block_name, template))
    return fitted(_to_jax(model_name, tensors, shapes, head), template)


def fill_resnet(variables: PyTree, state_dict: Arrays) -> PyTree:
    """Replace the ResNet in `variables`, as of `reid`, by torchvision's weights.

    Args:
      variables: {"params", "batch_stats"}; only "stem" and each "stage" are replaced.
      state_dict: tensor name -> array; its last layer, "fc", is ignored.
    """
    leaves = by_name(variables)
    trunk = {k: x for k, x in leaves.items() if "/stem/" in k or "/stage" in k}
    tensors = _torch_tensors(state_dict)
    tensors = {k: x for k, x in tensors.items() if not k.startswith("fc.")}
    return fitted({**leaves, **_to_jax("resnet", tensors, trunk)}, variables)


def to_torch(
    model_name: str, variables: PyTree, input_shape: InputShape, **settings
) -> dict[str, np.ndarray]:
    """PyTorch state dict of a model's variables; the inverse of `from_torch`."""
    _, head = _template(model_name, input_shape, settings)
    state_dict = {}
    for name, leaf in by_name(by_block_name(variables)).items():
        array = np.asarray(leaf)
        if array.ndim == 4:
            array = array.transpose(3, 2, 0, 1)
        elif name == "params/fc/kernel":
            array = array.reshape(*head, -1).transpose(3, 2, 0, 1)
            array = array.reshape(array.shape[0], -1)
        state_dict[_torch_name(model_name, name)] = array
    if model_name == "iresnet":
        state_dict["features.weight"] = np.ones_like(state_dict["features.bias"])
    return state_dict


def fitted(arrays: Arrays, template: PyTree) -> PyTree:
    """Arrange arrays, named as ours, like the pytree `template` of arrays or shapes."""
    structs = jax.eval_shape(by_block_name, template)
    expected = by_name(structs)
    arrays = resized(arrays, {name: x.shape for name, x in expected.items()})
    _check_fit(arrays, {name: x.shape for name, x in expected.items()})
    tree = jax.tree.unflatten(jax.tree.structure(structs), map(arrays.get, expected))
    return unstack_like(tree, template)


def _check_fit(arrays: Arrays, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless there are arrays of these names and shapes alone."""
    actual = {name: x.shape for name, x in arrays.items()}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"weights must fit the network: {name} must be "
                f"{expected.get(name, 'absent')}, got {actual.get(name, 'none')}. "
                "Check `model` in the config."
            )


def _template(model_name, input_shape, settings):
    """Shapes of the variables, and (h, w, C) of the map before the linear layer."""
    check_choice("model_name", model_name, TOPS)
    model = MODELS[model_name](input_shape, **settings)
    template = jax.eval_shape(model.init, jax.random.key(0))
    params = template["params"]
    stages = {name for name in params if name.startswith("stage")}
    if tops := {*params} - {*stages, "stem", *TOPS[model_name]}:
        raise ValueError(f"{model_name} must have a head of PyTorch's, got {tops}.")
    num_features = params["fc"]["kernel"].shape[0]
    if model_name == "resnet":  # the mean over pixels
        return template, (1, 1, num_features)
    height, width = (-(-size // 2 ** len(stages)) for size in input_shape[:2])
    return template, (height, width, num_features // (height * width))


def _float32(arrays: Arrays) -> dict[str, np.ndarray]:
    is_float = lambda x: np.issubdtype(x.dtype, np.floating) or x.dtype.kind == "V"
    return {k: x.astype(np.float32) if is_float(x) else x for k, x in arrays.items()}


def _torch_tensors(arrays: Arrays) -> dict[str, np.ndarray]:
    """Tensors by InsightFace's or torchvision's names, without batch counters."""
    counter = "num_batches_tracked"
    arrays = {k: np.asarray(x) for k, x in arrays.items() if not k.endswith(counter)}
    arrays = _float32(arrays)
    return from_ir(arrays) if IR in arrays else arrays


def _torch_name(model_name: str, name: str) -> str:
    """Name of the PyTorch tensor for a leaf such as params/stem/conv/kernel."""
    _, *module, kind = name.split("/")
    if not module[0].startswith("stage"):
        return f"{TOPS[model_name]['/'.join(module)]}.{LEAVES[kind]}"
    layer, number = f"layer{module[0][5:]}", int(module[1].removeprefix("block"))
    inner = ".".join(module[2:])
    if model_name == "sphereface":
        inner = SPHEREFACE_FIRST[inner] if number == 1 else f"{number}.{inner}"
    else:
        inner = inner.replace("shortcut.conv", "downsample.0")
        inner = f"{number - 1}.{inner.replace('shortcut.bn', 'downsample.1')}"
    return f"{layer}.{inner}.{LEAVES[kind]}"


def _to_jax(model_name, tensors, leaves, head=(1, 1, 1)) -> dict[str, np.ndarray]:
    """Arrays by the names of `leaves`, in our layouts, from PyTorch's tensors."""
    names = {name: _torch_name(model_name, name) for name in leaves}

    def torch_shape(shape):
        return (shape[3], shape[2], *shape[:2]) if len(shape) == 4 else shape[::-1]

    shapes = {names[name]: torch_shape(x.shape) for name, x in leaves.items()}
    _check_fit(tensors, shapes)
    arrays = {}
    for name, torch_name in names.items():
        array = tensors[torch_name]
        if array.ndim == 4:
            array = array.transpose(2, 3, 1, 0)
        elif name == "params/fc/kernel":
            height, width, channels = head
            array = array.reshape(-1, channels, height, width).transpose(2, 3, 1, 0)
            array = array.reshape(height * width * channels, -1)
        arrays[name] = array
    return arrays


def detect_model(weights: Weights) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Guess (config section `model`, input_shape) from names and shapes."""
    if {"model", "image_shape"} <= weights.about.keys():
        model = with_tuples(parse_json(weights.about["model"], "model"))
        text = weights.about["image_shape"]
        kind = dict if text.startswith("{") else list  # of several arrays by name
        shape = with_tuples(parse_json(text, "image_shape", kind))
        _check_model(weights, model, shape)
        return model, shape
    if is_base(weights.arrays):
        return base_network(our_arrays(_float32(weights.arrays)), weights.arrays)
    arrays = from_ir(weights.arrays) if IR in weights.arrays else weights.arrays
    blocks = _blocks(arrays)
    if not blocks or "fc.weight" not in arrays:
        raise ValueError(
            "weights must have the names of InsightFace, TreB1eN, FedFR's SphereFace, "
            f"torchvision, timm, DINOv2 or CLIP, got {sorted(arrays)[:4]}: name the "
            "network."
        )
    if "layer1.0.weight" in arrays:  # a stage begins with a convolution and its PReLU
        counts = {stage: number - 2 for stage, number in blocks.items()}
        return _face_network("sphereface", arrays, counts, "layer{}.0.weight")
    if "features.bias" in arrays:
        pooled = {"shortcut": "pool"} if IR in weights.arrays else {}
        first = "layer{}.0.conv1.weight"
        return _face_network("iresnet", arrays, blocks, first, pooled)
    return _resnet(arrays, blocks)


def _check_model(weights: Weights, model: Mapping, input_shape: Any) -> None:
    """Raise ValueError for a model that is code, or too large for the file."""
    check_without_code({"model": model}, "the weights' network")
    count = len(weights.arrays)
    for name in ("blocks",) if "blocks" in model else DEPTHS:
        blocks = model.get(name, 0)
        if has_kind(int | Sequence[int], blocks) and int(np.sum(blocks)) > count:
            raise ValueError(
                f"model.{name} must be at most {count}, the number of the file's "
                f"arrays, got {int(np.sum(blocks))} blocks."
            )
    is_named = isinstance(input_shape, Mapping)
    for shape in input_shape.values() if is_named else [input_shape]:
        if rule := broken_rule(Image | Vector, tuple(shape)):
            raise ValueError(
                f"image_shape must {rule}, as (H, W, C) or (D,), got {shape}."
            )


def from_ir(arrays: Arrays) -> dict[str, np.ndarray]:
    """Rename the arrays of TreB1eN's IR networks to InsightFace's names.

    Blocks without a normalization between the first convolution and PReLU get one that
    changes nothing.
    """
    blocks, renamed = _block_names(arrays), {}
    for name, array in arrays.items():
        *module, leaf = name.split(".")
        if module[0] != "body":
            renamed[f"{IR_TOPS.get('.'.join(module), '.'.join(module))}.{leaf}"] = array
            continue
        number, kind, layer = int(module[1]), module[2], module[3]
        length = 1 + max(_numbers(arrays, rf"body\.{number}\.res_layer\.(\d+)\."))
        if length not in IR_LAYERS or len(module) > 4:
            raise ValueError(
                "IR blocks must have 5 or 6 plain layers (no squeeze-excitation), got "
                f"{name} in a block of {length}."
            )
        is_short = kind == "shortcut_layer"
        inner = f"downsample.{layer}" if is_short else IR_LAYERS[length][layer]
        renamed[f"{blocks[number]}.{inner}.{leaf}"] = array
    for block in blocks.values():
        if f"{block}.bn2.weight" not in renamed:
            width = len(renamed[f"{block}.prelu.weight"])
            one, zero = np.ones(width, np.float32), np.zeros(width, np.float32)
            bn2 = {"weight": one, "bias": zero, "running_mean": zero}
            bn2 |= {"running_var": one - EPSILON}
            renamed |= {f"{block}.bn2.{leaf}": x for leaf, x in bn2.items()}
    bias = np.zeros_like(renamed["features.running_mean"])
    return {"features.weight": bias + 1, "features.bias": bias, **renamed}


def _block_names(arrays) -> dict[int, str]:
    """InsightFace's name of each block of `body`; new widths begin a stage."""
    numbers = sorted({*_numbers(arrays, r"body\.(\d+)\.")})

    def width(number):
        return arrays[f"body.{number}.res_layer.1.weight"].shape[0]

    stages = [list(run) for _, run in itertools.groupby(numbers, key=width)]
    return {
        number: f"layer{stage}.{place}"
        for stage, run in enumerate(stages, 1)
        for place, number in enumerate(run)
    }


def _with_unit_scale(arrays: Arrays) -> dict[str, np.ndarray]:
    """Fold the last scale, frozen at 1 here, into the linear layer before it."""
    scale = arrays["features.weight"]
    return {
        **arrays,
        "fc.weight": arrays["fc.weight"] * scale[:, None],
        "fc.bias": arrays["fc.bias"] * scale,
        "features.running_mean": arrays["features.running_mean"] * scale,
    }


def _blocks(arrays) -> dict[int, int]:
    """Number of blocks of each stage."""
    stages = sorted({*_numbers(arrays, r"layer(\d+)\.")})
    return {
        i: 1 + max(_numbers(arrays, rf"layer{i}\.(\d+)\."), default=0) for i in stages
    }


def _numbers(arrays, pattern) -> list[int]:
    matches = [re.match(pattern, name) for name in arrays]
    return [int(match[1]) for match in matches if match]


def _face_network(name, arrays, blocks, first, more: Mapping = MappingProxyType({})):
    """Section and input shape of a network that ends in a linear layer on the map.

    Args:
      blocks: number of blocks of each stage.
      first: name of a stage's first convolution; {} stands for its number.
    """
    widths = [len(arrays[first.format(i)]) for i in blocks]
    dim, features = arrays["fc.weight"].shape
    settings = {"blocks": [*blocks.values()], "widths": widths, "embedding_dim": dim}
    stem = "conv1.weight" if "conv1.weight" in arrays else first.format(1)
    shape = (features // widths[-1], len(blocks), arrays[stem].shape[1])
    return {"name": name, **settings, **more}, _infer_input_shape(*shape)


def _resnet(arrays, blocks):
    widths = [len(arrays[f"layer{i}.0.conv1.weight"]) for i in blocks]
    is_large = arrays["conv1.weight"].shape[-1] == 7
    settings = {
        "num_classes": len(arrays["fc.weight"]),
        "depth": 50 if "layer1.0.conv3.weight" in arrays else 18,
        "blocks": [*blocks.values()],
        "widths": widths,
        "stem": "imagenet" if is_large else "cifar",
    }
    size = 224 if is_large else 32  # of the usual training; the network takes any
    return {"name": "resnet", **settings}, (size, size, arrays["conv1.weight"].shape[1])


def _infer_input_shape(pixels, num_stages, channels):
    """Input shape, square or 112 x 96, from the number of the last map's pixels."""
    side = math.isqrt(pixels)
    height, width = (side, side) if side * side == pixels else (7, 6)
    if height * width != pixels:
        raise ValueError(
            f"fc.weight must have columns of a square map, got {pixels} pixels: name "
            "the network."
        )
    return height << num_stages, width << num_stages, channels
