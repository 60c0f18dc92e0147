"""Weights of the PyTorch networks, to ours and back.

Convolutions OIHW <-> HWIO, linear [out, in] <-> [in, out], the flattening before the
linear layer C, H, W <-> H, W, C, and blocks <-> stacks of equal ones. Names on the
PyTorch side are those of FedFR's and InsightFace's backbones and of torchvision's
ResNets; batch counters go. `foreign` knows further names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.resnet import resnet
from fedfr_jax.models.sphereface import sphereface
from fedfr_jax.schema import check_choice
from fedfr_jax.stacks import laid_out, named
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
    image_shape: Sequence[int],
    **settings,
) -> PyTree:
    """Variables of a model from a PyTorch state dict.

    Args:
      model_name: "sphereface", "iresnet" with head E, or "resnet" (stem "imagenet").
      state_dict: tensor name -> array, every tensor of the backbone.
      image_shape: (H, W, C) of the model.
      **settings: of the model's factory, such as depth or widths.

    Returns:
      {"params": ..., "batch_stats": ...} as numpy arrays of the tensors' dtype.

    Raises:
      ValueError: naming the tensors that are missing, unknown or of another shape.
    """
    template, head = _template(model_name, image_shape, settings)
    given = {k: np.asarray(v) for k, v in state_dict.items() if not _is_counter(k)}
    blocks = jax.eval_shape(named, template)
    names = [_torch_name(model_name, path) for path, _ in _leaves(blocks)]
    _check_names(given, names, _FROZEN[model_name])
    problems, arrays = [], []
    for (path, leaf), name in zip(_leaves(blocks), names, strict=True):
        expected = _torch_shape(leaf.shape)
        if given[name].shape != expected:
            problems.append(f"{name} {given[name].shape} instead of {expected}")
        if not problems:
            arrays.append(_to_jax(given[name], path, head))
    if problems:
        raise ValueError(
            f"Tensor shapes must fit the model, got {', '.join(problems)}."
        )
    return laid_out(jax.tree.unflatten(jax.tree.structure(blocks), arrays), template)


def with_resnet(variables: PyTree, state_dict: Mapping[str, np.ndarray]) -> PyTree:
    """A network on a ResNet, such as `reid`, whose ResNet is torchvision's.

    Args:
      variables: {"params", "batch_stats"}, where what is neither "stem" nor a "stage"
        stays as it is.
      state_dict: tensor name -> array; its own last layer, "fc", is left out.

    Raises:
      ValueError: naming the tensors that are missing, unknown or of another shape.
    """
    is_trunk = lambda path: path[0].startswith(("stem", "stage"))
    given = {k: np.asarray(v) for k, v in state_dict.items() if not _is_counter(k)}
    given = {k: v for k, v in given.items() if not k.startswith("fc.")}
    paths = [path for path, _ in _leaves(variables)]
    names = [_torch_name("resnet", path) for path in paths if is_trunk(path)]
    _check_names(given, names, ())
    found = []
    for path, leaf in _leaves(variables):
        if is_trunk(path):
            array = given[name := _torch_name("resnet", path)]
            if array.shape != _torch_shape(leaf.shape):
                raise ValueError(
                    f"Tensor shapes must fit the model, got {name} {array.shape} "
                    f"instead of {_torch_shape(leaf.shape)}."
                )
            leaf = _to_jax(array, path, None).astype(leaf.dtype)
        found.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(variables), found)


def to_torch(
    model_name: str, variables: PyTree, image_shape: Sequence[int], **settings
) -> dict[str, np.ndarray]:
    """PyTorch state dict of a model's variables; the inverse of `from_torch`.

    Raises:
      ValueError: when the variables are not those of the model.
    """
    template, head = _template(model_name, image_shape, settings)
    blocks = named(jax.tree.map(np.asarray, variables))
    shapes = jax.eval_shape(named, template)
    of = lambda tree: jax.tree.map(np.shape, tree)
    if of(blocks) != of(shapes):
        found = trees.difference(shapes, blocks)
        raise ValueError(f"variables must be those of this {model_name}, got {found}.")
    state_dict = {}
    for path, leaf in _leaves(blocks):
        state_dict[_torch_name(model_name, path)] = _to_numpy(leaf, path, head)
    for name in _FROZEN[model_name]:
        bias = state_dict[name.replace("weight", "bias")]
        state_dict[name] = np.ones_like(bias)
    return state_dict


def _template(model_name, image_shape, settings):
    """Shapes of the variables, and (h, w, C) of the map before the linear layer."""
    check_choice("model_name", model_name, _FACTORIES)
    model = _FACTORIES[model_name](image_shape, **settings)
    template = jax.eval_shape(model.init, jax.random.key(0))
    params = template["params"]
    if tops := {*params} - {*_stages(params), "stem", *_TOPS[model_name]}:
        raise ValueError(f"{model_name} must have a head of PyTorch's, got {tops}.")
    num_features = params["fc"]["kernel"].shape[0]
    if model_name == "resnet":  # the mean over pixels
        return template, (1, 1, num_features)
    num_stages = len(_stages(params))
    height, width = (-(-size // 2**num_stages) for size in model.image_shape[:2])
    return template, (height, width, num_features // (height * width))


def _stages(params):
    return [name for name in params if name.startswith("stage")]


def _leaves(tree):
    """(path below the collection, leaf) in the order of jax.tree.leaves."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(key.key for key in keys[1:]), leaf


def _torch_name(model_name, path):
    """Name of the tensor that is a leaf of a block."""
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


def _check_names(given: Mapping, wanted: Iterable[str], frozen: Iterable[str]):
    wanted = {*wanted, *frozen}
    missing = sorted(wanted - given.keys())
    unknown = sorted(given.keys() - wanted)
    if missing or unknown:
        raise ValueError(
            "Tensors must be those of the model, got missing: "
            f"{', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
        )
    for name in frozen:
        if not np.all(given[name] == 1):
            other = given[name][given[name] != 1][0]
            raise ValueError(
                f"{name} must be all ones (that scale is frozen), got {other}."
            )
