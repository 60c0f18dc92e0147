"""Weights of the PyTorch networks, to ours and back.

Convolutions OIHW <-> HWIO, linear [out, in] <-> [in, out], the flattening before the
linear layer C, H, W <-> H, W, C, and equal blocks <-> one stack. Names on the PyTorch
side are those of FedFR's and InsightFace's backbones; batch counters are dropped.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.sphereface import sphereface
from fedfr_jax.types import PyTree

_FACTORIES = {"sphereface": sphereface, "iresnet": iresnet}

_LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "slope": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
_SPHEREFACE_FIRST = {"conv": "0", "prelu": "1"}
_IRESNET_TOP = {
    "stem/conv": "conv1",
    "stem/bn": "bn1",
    "stem/prelu": "prelu",
    "bn": "bn2",
    "fc": "fc",
    "bn_out": "features",
}
_FROZEN = {"sphereface": (), "iresnet": ("features.weight",)}


def from_torch(
    model_name: str,
    state_dict: Mapping[str, np.ndarray],
    image_shape: Sequence[int],
    **settings,
) -> PyTree:
    """Variables of a model from a PyTorch state dict.

    Args:
      model_name: "sphereface" or "iresnet".
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
    names = [_torch_names(model_name, path, leaf) for path, leaf in _leaves(template)]
    _check_names(given, [n for group in names for n in group], _FROZEN[model_name])
    problems, arrays = [], []
    for (path, leaf), group in zip(_leaves(template), names, strict=True):
        shape = leaf.shape[1:] if "blocks" in path else leaf.shape
        expected = _torch_shape(shape)
        for name in group:
            if given[name].shape != expected:
                problems.append(f"{name} {given[name].shape} instead of {expected}")
        if not problems:
            parts = [_to_jax(given[name], path, head) for name in group]
            arrays.append(np.stack(parts) if "blocks" in path else parts[0])
    if problems:
        raise ValueError(
            f"Tensor shapes must fit the model, got {', '.join(problems)}."
        )
    return jax.tree.unflatten(jax.tree.structure(template), arrays)


def to_torch(
    model_name: str, variables: PyTree, image_shape: Sequence[int], **settings
) -> dict[str, np.ndarray]:
    """PyTorch state dict of a model's variables; the inverse of `from_torch`.

    Raises:
      ValueError: when the variables are not those of the model.
    """
    template, head = _template(model_name, image_shape, settings)
    of = lambda tree: jax.tree.map(np.shape, tree)
    if of(variables) != of(template):
        found = trees.difference(template, jax.tree.map(np.asarray, variables))
        raise ValueError(f"variables must be those of this {model_name}, got {found}.")
    state_dict = {}
    for path, leaf in _leaves(variables):
        names = _torch_names(model_name, path, leaf)
        parts = np.asarray(leaf) if "blocks" in path else np.asarray(leaf)[None]
        for name, part in zip(names, parts, strict=True):
            state_dict[name] = _to_numpy(part, path, head)
    for name in _FROZEN[model_name]:
        bias = state_dict[name.replace("weight", "bias")]
        state_dict[name] = np.ones_like(bias)
    return state_dict


def _template(model_name, image_shape, settings):
    """Shapes of the variables, and (h, w, C) of the map before the linear layer."""
    if model_name not in _FACTORIES:
        known = ", ".join(_FACTORIES)
        raise ValueError(f"model_name must be one of {known}, got {model_name!r}.")
    model = _FACTORIES[model_name](image_shape, **settings)
    template = jax.eval_shape(model.init, jax.random.key(0))
    params = template["params"]
    num_stages = sum(name.startswith("stage") for name in params)
    height, width = (-(-size // 2**num_stages) for size in model.image_shape[:2])
    num_features = params["fc"]["kernel"].shape[0]
    return template, (height, width, num_features // (height * width))


def _leaves(tree):
    """(path below the collection, leaf) in the order of jax.tree.leaves."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(key.key for key in keys[1:]), leaf


def _torch_names(model_name, path, leaf):
    """Names of the tensors that make up a leaf: one, or one per stacked block."""
    *module, kind = path
    if not module[0].startswith("stage"):
        top = "/".join(module)
        names = [top if model_name == "sphereface" else _IRESNET_TOP[top]]
    else:
        names = _stage_names(model_name, module, leaf)
    return [f"{name}.{_LEAVES[kind]}" for name in names]


def _stage_names(model_name, module, leaf):
    layer = module[0].replace("stage", "layer")
    rest = ".".join(module[2:])
    if model_name == "sphereface":
        if module[1] == "first":
            return [f"{layer}.{_SPHEREFACE_FIRST[rest]}"]
        # Blocks come after the convolution and its PReLU.
        return [f"{layer}.{i + 2}.{rest}" for i in range(leaf.shape[0])]
    rest = re.sub("^shortcut.conv$", "downsample.0", rest)
    rest = re.sub("^shortcut.bn$", "downsample.1", rest)
    if module[1] == "first":
        return [f"{layer}.0.{rest}"]
    return [f"{layer}.{i + 1}.{rest}" for i in range(leaf.shape[0])]


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
