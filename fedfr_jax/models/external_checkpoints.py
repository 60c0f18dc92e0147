"""External checkpoints: conversion between PyTorch parameters and ours.

Convolutions OIHW <-> HWIO, linear [out, in] <-> [in, out], the flattening before the
linear layer C, H, W <-> H, W, C, and blocks <-> stacks of equal ones. Names on the
PyTorch side are those of FedFR's and InsightFace's backbones and of torchvision's
ResNets; batch counters are dropped.

`detect_model` also knows the names of the "IR" networks of TreB1eN, face.evoLVe, TFace
and AdaFace, and our own leaves such as `params/stem/conv/kernel`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import jax
import numpy as np
from annotated_types import Interval

from fedfr_jax import trees
from fedfr_jax.json_files import parse_json
from fedfr_jax.models import build_model
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.norm import EPSILON
from fedfr_jax.models.resnet import resnet
from fedfr_jax.models.sphereface import sphereface
from fedfr_jax.models.weights import Weights
from fedfr_jax.ranges import Count
from fedfr_jax.scanned_blocks import by_block_name, unstack_like
from fedfr_jax.schema import broken_rule, check_choice, has_kind, with_tuples
from fedfr_jax.types import PyTree

_FACTORIES = {"sphereface": sphereface, "iresnet": iresnet, "resnet": resnet}

_LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "slope": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
_SPHEREFACE_FIRST = {"conv": "0", "prelu": "1"}
_TOPS = {
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
_FROZEN = {"sphereface": (), "iresnet": ("features.weight",), "resnet": ()}


def from_torch(
    model_name: str,
    state_dict: Mapping[str, np.ndarray],
    input_shape: Sequence[int],
    **settings,
) -> PyTree:
    """Convert a PyTorch state dict to a model's variables.

    Args:
      model_name: "sphereface", "iresnet" with head E, or "resnet" (stem "imagenet").
      state_dict: tensor name -> array, every tensor of the backbone.
      input_shape: (H, W, C) of the model.
      **settings: of the model's factory, such as depth or widths.

    Returns:
      {"params": ..., "batch_stats": ...} as numpy arrays of the tensors' dtype.
    """
    template, head = _template(model_name, input_shape, settings)
    blocks = jax.eval_shape(by_block_name, template)
    tensors = {k: np.asarray(v) for k, v in state_dict.items() if not _is_counter(k)}
    arrays = _convert_tensors(model_name, tensors, list(_leaves(blocks)), head)
    tree = jax.tree.unflatten(jax.tree.structure(blocks), arrays)
    return unstack_like(tree, template)


def _convert_tensors(model_name, tensors, leaves, head=None):
    """Arrays for the (path, leaf) pairs of a model, from PyTorch's tensors by name."""
    names = [_torch_name(model_name, path) for path, _ in leaves]
    _check_names(tensors, names, _FROZEN[model_name])
    arrays = []
    for (path, leaf), name in zip(leaves, names, strict=True):
        if tensors[name].shape != (expected := _torch_shape(leaf.shape)):
            raise ValueError(
                f"Tensor shapes must fit the model, got {name} {tensors[name].shape} "
                f"instead of {expected}."
            )
        arrays.append(_to_jax(tensors[name], path, head))
    return arrays


def fill_resnet(variables: PyTree, state_dict: Mapping[str, np.ndarray]) -> PyTree:
    """Replace the ResNet in `variables`, as of `reid`, by torchvision's weights.

    Args:
      variables: {"params", "batch_stats"}; only "stem" and each "stage" are replaced.
      state_dict: tensor name -> array; its last layer, "fc", is ignored.
    """
    tensors = {
        name: np.asarray(x)
        for name, x in state_dict.items()
        if not _is_counter(name) and not name.startswith("fc.")
    }
    leaves = dict(_leaves(variables))
    trunk = {p: x for p, x in leaves.items() if p[0].startswith(("stem", "stage"))}
    arrays = _convert_tensors("resnet", tensors, [*trunk.items()])
    for (path, leaf), array in zip(trunk.items(), arrays, strict=True):
        leaves[path] = array.astype(leaf.dtype)
    return jax.tree.unflatten(jax.tree.structure(variables), leaves.values())


def to_torch(
    model_name: str, variables: PyTree, input_shape: Sequence[int], **settings
) -> dict[str, np.ndarray]:
    """PyTorch state dict of a model's variables; the inverse of `from_torch`."""
    template, head = _template(model_name, input_shape, settings)
    blocks = by_block_name(jax.tree.map(np.asarray, variables))
    shapes = jax.eval_shape(by_block_name, template)
    if jax.tree.map(np.shape, blocks) != jax.tree.map(np.shape, shapes):
        difference = trees.difference(shapes, blocks)
        raise ValueError(
            f"variables must be those of this {model_name}, got {difference}."
        )
    state_dict = {}
    for path, leaf in _leaves(blocks):
        state_dict[_torch_name(model_name, path)] = _to_numpy(leaf, path, head)
    for name in _FROZEN[model_name]:
        bias = state_dict[name.replace("weight", "bias")]
        state_dict[name] = np.ones_like(bias)
    return state_dict


def _template(model_name, input_shape, settings):
    """Shapes of the variables, and (h, w, C) of the map before the linear layer."""
    check_choice("model_name", model_name, _FACTORIES)
    model = _FACTORIES[model_name](input_shape, **settings)
    template = jax.eval_shape(model.init, jax.random.key(0))
    params = template["params"]
    if tops := {*params} - {*_stages(params), "stem", *_TOPS[model_name]}:
        raise ValueError(f"{model_name} must have a head of PyTorch's, got {tops}.")
    num_features = params["fc"]["kernel"].shape[0]
    if model_name == "resnet":  # the mean over pixels
        return template, (1, 1, num_features)
    num_stages = len(_stages(params))
    height, width = (-(-size // 2**num_stages) for size in model.input_shape[:2])
    return template, (height, width, num_features // (height * width))


def _stages(params):
    return [name for name in params if name.startswith("stage")]


def _leaves(tree):
    """Yield (path below the collection, leaf) in the order of jax.tree.leaves."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(key.key for key in keys[1:]), leaf


def _torch_name(model_name, path):
    """Name of the PyTorch tensor for a leaf's path."""
    *module, kind = path
    if module[0].startswith("stage"):
        name = _stage_name(model_name, module)
    else:
        name = _TOPS[model_name]["/".join(module)]
    return f"{name}.{_LEAVES[kind]}"


def _stage_name(model_name, module):
    stage, block, *rest = module
    layer, rest = stage.replace("stage", "layer"), ".".join(rest)
    number = int(block.removeprefix("block"))
    if model_name == "sphereface":
        if number == 1:
            return f"{layer}.{_SPHEREFACE_FIRST[rest]}"
        # The first block is layers 0 and 1, a convolution and its PReLU.
        return f"{layer}.{number}.{rest}"
    rest = re.sub("^shortcut.conv$", "downsample.0", rest)
    rest = re.sub("^shortcut.bn$", "downsample.1", rest)
    return f"{layer}.{number - 1}.{rest}"


def _torch_shape(shape):
    if len(shape) == 4:
        return (shape[3], shape[2], shape[0], shape[1])
    return tuple(reversed(shape))


def _to_jax(array, path, head):
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if path != ("fc", "kernel"):
        return array
    height, width, channels = head
    array = array.reshape(-1, channels, height, width).transpose(2, 3, 1, 0)
    return array.reshape(height * width * channels, -1)


def _to_numpy(array, path, head):
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    if path != ("fc", "kernel"):
        return array
    array = array.reshape(*head, -1).transpose(3, 2, 0, 1)
    return array.reshape(array.shape[0], -1)


def _is_counter(name):
    return name.endswith("num_batches_tracked")


def _check_names(tensors: Mapping, names: Iterable[str], frozen: Iterable[str]):
    expected = {*names, *frozen}
    missing = sorted(expected - tensors.keys())
    unknown = sorted(tensors.keys() - expected)
    if missing or unknown:
        raise ValueError(
            "Tensors must be those of the model, got missing: "
            f"{', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}. "
            "Check `model` in the config."
        )
    for name in frozen:
        scale = tensors[name]
        if not np.all(scale == 1):
            raise ValueError(
                f"{name} must be all ones (that scale is frozen), got "
                f"{scale[scale != 1][0]}."
            )


Arrays = Mapping[str, np.ndarray]
Side = Annotated[int, Interval(ge=1, le=2**13)]
Image, Vector = tuple[Side, Side, Side], tuple[Count]
DEPTHS = ("depth", "num_blocks")  # where a network's section has no `blocks`
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


def convert_variables(weights: Weights, model: Mapping, input_shape: Sequence[int]):
    """Convert loaded weights to the variables of the config's `model`.

    Args:
      model: {"name": of MODELS, settings of its factory}.
      input_shape: (H, W, C).

    Returns:
      {"params", "batch_stats"} of numpy arrays, float32.
    """
    _check_model(weights, model, input_shape)
    arrays = {k: _float32(v) for k, v in weights.arrays.items()}
    if any(name.startswith("params/") for name in arrays):
        built = build_model(model, input_shape)
        return fitted(arrays, jax.eval_shape(built.init, jax.random.key(0)))
    arrays = from_ir(arrays) if IR in arrays else arrays
    settings = {k: v for k, v in model.items() if k != "name"}
    return from_torch(model["name"], arrays, input_shape, **settings)


def detect_model(weights: Weights) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Guess (config section `model`, input_shape) from names and shapes."""
    if {"model", "image_shape"} <= weights.about.keys():
        model = with_tuples(parse_json(weights.about["model"], "model"))
        text = weights.about["image_shape"]
        kind = dict if text.startswith("{") else list  # of several arrays by name
        shape = with_tuples(parse_json(text, "image_shape", kind))
        _check_model(weights, model, shape)
        return model, shape
    arrays = from_ir(weights.arrays) if IR in weights.arrays else weights.arrays
    blocks = _blocks(arrays)
    _check_model(weights, {"blocks": [*blocks.values()]}, (1, 1, 1))
    if not blocks or "fc.weight" not in arrays:
        raise ValueError(
            "weights must have the names of InsightFace, TreB1eN, FedFR's SphereFace "
            f"or torchvision, got {sorted(arrays)[:4]}: name the network."
        )
    if "layer1.0.weight" in arrays:  # a stage begins with a convolution and its PReLU
        counts = {stage: number - 2 for stage, number in blocks.items()}
        return _face_network("sphereface", arrays, counts, "layer{}.0.weight")
    if "features.bias" in arrays:
        pooled = {"shortcut": "pool"} if IR in weights.arrays else {}
        first = "layer{}.0.conv1.weight"
        return _face_network("iresnet", arrays, blocks, first, pooled)
    return _resnet(arrays, blocks)


def _check_model(weights: Weights, model: Mapping, input_shape: Sequence[int]) -> None:
    """Raise ValueError if the model is too large for the file, before it is built."""
    count = len(weights.arrays)
    for name in ("blocks",) if "blocks" in model else DEPTHS:
        blocks = model.get(name, 0)
        if has_kind(int | Sequence[int], blocks) and int(np.sum(blocks)) > count:
            raise ValueError(
                f"model.{name} must be at most {count}, the number of the file's "
                f"arrays, got {int(np.sum(blocks))} blocks."
            )
    if isinstance(input_shape, Mapping):
        for shape in input_shape.values():
            _check_model(weights, model, shape)
        return
    if rule := broken_rule(Image | Vector, tuple(input_shape)):
        raise ValueError(
            f"image_shape must {rule}, as (H, W, C) or (D,), got {input_shape}."
        )


def from_ir(arrays: Arrays) -> dict[str, np.ndarray]:
    """Rename the arrays of TreB1eN's IR networks to InsightFace's names.

    Blocks without a normalization between the first convolution and PReLU get one that
    changes nothing. The last one's scale, frozen at 1 here, goes into the linear layer.
    """
    arrays = {k: v for k, v in arrays.items() if not k.endswith("num_batches_tracked")}
    blocks, renamed = _places(arrays), {}
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
    for place in blocks.values():
        if f"{place}.bn2.weight" not in renamed:
            renamed |= _identity(f"{place}.bn2", len(renamed[f"{place}.prelu.weight"]))
    return _with_unit_scale(renamed)


def _places(arrays) -> dict[int, str]:
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


def _identity(name, width) -> dict[str, np.ndarray]:
    one, zero = np.ones(width, np.float32), np.zeros(width, np.float32)
    statistics = {f"{name}.running_mean": zero, f"{name}.running_var": one - EPSILON}
    return {f"{name}.weight": one, f"{name}.bias": zero, **statistics}


def _with_unit_scale(arrays):
    """Fold the scale g of g (y - m) / s + b into the linear layer before it."""
    scale = arrays.get("features.weight", np.ones(1, np.float32))
    zero = np.zeros_like(arrays["features.running_mean"])
    return arrays | {
        "fc.weight": arrays["fc.weight"] * scale[:, None],
        "fc.bias": arrays["fc.bias"] * scale,
        "features.running_mean": arrays["features.running_mean"] * scale,
        "features.weight": np.ones_like(zero),
        "features.bias": arrays.get("features.bias", zero),
    }


def fitted(arrays: Arrays, template: PyTree) -> PyTree:
    """Arrange arrays, named as ours, like the pytree `template` of arrays or shapes."""
    structs = jax.eval_shape(by_block_name, template)
    expected = {
        trees.path_name(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(structs)
    }
    actual = {name: x.shape for name, x in arrays.items()}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"weights must fit the network: {name} must be "
                f"{expected.get(name, 'absent')}, got {actual.get(name, 'none')}."
            )
    # Leaves in the order of `structs`, whose names `expected` has.
    tree = jax.tree.unflatten(jax.tree.structure(structs), map(arrays.get, expected))
    return unstack_like(tree, template)


def _blocks(arrays) -> dict[int, int]:
    """Number of blocks of each stage."""
    stages = sorted({*_numbers(arrays, r"layer(\d+)\.")})
    return {
        i: 1 + max(_numbers(arrays, rf"layer{i}\.(\d+)\."), default=0) for i in stages
    }


def _numbers(arrays, pattern) -> list[int]:
    matches = [re.match(pattern, name) for name in arrays]
    return [int(match[1]) for match in matches if match]


def _face_network(name, arrays, blocks, first, more=MappingProxyType({})):
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


def _float32(array):
    is_float = np.issubdtype(array.dtype, np.floating) or array.dtype.kind == "V"
    return array.astype(np.float32) if is_float else array
