"""The network of re-identification: torchvision's ResNet in it, and its two necks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import fill_resnet
from fedfr_jax.trees import by_name

pytestmark = pytest.mark.ci

SHAPE = (24, 12, 3)
TRUNK = {"widths": (2, 3), "blocks": (1, 2), "depth": 50, "stem": "imagenet"}
EPSILON = 1e-5


def model_of(**settings):
    return MODELS["reid"](SHAPE, num_classes=4, neck_dim=5, **TRUNK, **settings)


def torch_trunk(variables):
    """A made-up state dict that fits, as torchvision names it."""
    rng, tensors = np.random.default_rng(0), {}
    rows = {"kernel": "weight", "scale": "weight", "bias": "bias"}
    rows |= {"mean": "running_mean", "var": "running_var"}
    for path, leaf in by_name(variables).items():
        *module, kind = path.split("/")[1:]
        if not module[0].startswith("st"):
            continue
        if module[0] == "stem":
            name = {"conv": "conv1", "bn": "bn1"}[module[1]]
        else:
            stage, block = module[0][5:], int(module[1][5:]) - 1
            rest = ".".join(module[2:]).replace("shortcut.conv", "downsample.0")
            rest = rest.replace("shortcut.bn", "downsample.1")
            name = f"layer{stage}.{block}.{rest}"
        shape = leaf.shape
        if len(shape) == 4:
            shape = (shape[3], shape[2], *shape[:2])
        drawn = rng.uniform(0.5, 1.5, shape) if kind in ("scale", "var") else None
        drawn = rng.normal(size=shape, scale=0.4) if drawn is None else drawn
        tensors[f"{name}.{rows[kind]}"] = drawn.astype(np.float32)
    return {**tensors, "bn1.num_batches_tracked": np.array(3), "fc.bias": np.zeros(9)}


def convolved(x, kernel, stride):
    """[B, I, H, W] with [O, I, k, k] as torch's conv2d, padded by k // 2."""
    k = kernel.shape[-1]
    x = np.pad(x, ((0, 0), (0, 0), (k // 2, k // 2), (k // 2, k // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (2, 3))
    windows = windows[:, :, ::stride, ::stride]
    return np.einsum("bihwkl,oikl->bohw", windows, kernel)


def torch_forward(tensors, x, last_stride):
    """torchvision's ResNet of bottlenecks, pooled: x [B, H, W, C] -> [B, 4 width]."""

    def norm(x, name):
        mean, var, scale, bias = (
            tensors[f"{name}.{leaf}"].reshape(1, -1, 1, 1)
            for leaf in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / np.sqrt(var + EPSILON) * scale + bias

    def block(x, name, stride):
        y = x
        for i, step in ((1, 1), (2, stride), (3, 1)):
            y = convolved(y, tensors[f"{name}.conv{i}.weight"], step)
            y = norm(y, f"{name}.bn{i}")
            y = np.maximum(y, 0) if i < 3 else y
        if f"{name}.downsample.0.weight" in tensors:
            x = convolved(x, tensors[f"{name}.downsample.0.weight"], stride)
            x = norm(x, f"{name}.downsample.1")
        return np.maximum(x + y, 0)

    x = convolved(x.transpose(0, 3, 1, 2), tensors["conv1.weight"], 2)
    x = np.maximum(norm(x, "bn1"), 0)
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    x = windows[:, :, ::2, ::2].max(axis=(4, 5))
    for name, stride in (("1.0", 1), ("2.0", last_stride), ("2.1", 1)):
        x = block(x, f"layer{name}", stride)
    return x.mean(axis=(2, 3))


@pytest.mark.parametrize("last_stride", [1, 2])
def test_torchvisions_weights_give_its_features(last_stride):
    model = model_of(neck="bnneck", last_stride=last_stride)
    first = model.init(jax.random.key(0))
    tensors = torch_trunk(first)
    variables = fill_resnet(first, tensors)
    x = np.random.default_rng(1).normal(size=(3, *SHAPE)).astype(np.float32)
    logits, found, _ = jax.jit(model.apply_with_features)(variables, jnp.asarray(x))
    # Statistics of the neck are 0 and 1 as yet.
    wanted = torch_forward(tensors, x, last_stride) / np.sqrt(1 + EPSILON)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)
    kernel = variables["params"]["classifier"]["kernel"]
    assert "bias" not in variables["params"]["classifier"]
    np.testing.assert_allclose(logits, found @ kernel, rtol=1e-4, atol=1e-6)


def test_a_linear_neck_is_linear_norm_and_dropout_without_relu():
    model = model_of(dropout=0.5)
    variables, x = model.init(jax.random.key(0)), jnp.ones((64, *SHAPE))
    x = x * jnp.linspace(-1, 1, 64)[:, None, None, None]
    features = jax.jit(model.apply_with_features, static_argnums=2)
    _, found, _ = features(variables, x, False)
    assert found.shape == (64, 5) and (np.asarray(found) < 0).any()
    _, dropped, _ = features(variables, x, True, key=jax.random.key(1))
    assert 0.4 < (np.asarray(dropped) == 0).mean() < 0.6
    names = {"neck/fc/kernel", "neck/bn/scale", "classifier/bias"}
    assert names <= by_name(variables["params"]).keys()
    assert model.blocks[-2:] == ("neck", "classifier")


def test_a_bnneck_compares_before_its_norm_and_retrieves_after_it(golden):
    arrays = golden("reid_more")
    model = model_of(neck="bnneck")
    variables, x = model.init(jax.random.key(0)), jnp.ones((6, *SHAPE))
    x = x * jnp.linspace(-1, 1, 6)[:, None, None, None]
    assert set(variables["params"]["neck"]["bn"]) == {"scale"}
    logits, compared, _ = jax.jit(model.apply_with_features, static_argnums=2)(
        variables, x, True
    )
    compared = np.asarray(compared)
    assert (np.abs(compared.mean(0)) > 10 * EPSILON).any()  # not normalized
    unit = (compared - compared.mean(0)) / np.sqrt(compared.var(0) + EPSILON)
    wanted = unit @ variables["params"]["classifier"]["kernel"]
    np.testing.assert_allclose(logits, wanted, rtol=1e-3, atol=1e-5)
    # The same arithmetic is the official code's.
    pooled = arrays["bn_x"]
    unit = (pooled - pooled.mean(0)) / np.sqrt(pooled.var(0) + EPSILON)
    wanted = unit * arrays["bn_gamma"]
    np.testing.assert_allclose(arrays["bn_train_feat"], wanted, rtol=1e-8, atol=1e-10)
