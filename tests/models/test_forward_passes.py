"""Networks against forward passes that are written down again."""

import functools

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS

SHAPE = (20, 17, 3)
X = np.random.default_rng(0).normal(size=(3, *SHAPE)).astype(np.float32)


def relu(x):
    return np.maximum(x, 0)


def conv(leaves, x, *, pad, stride=1, by_channel=False):
    """Cross-correlation of x [B, H, W, C] and kernel [k, k, C or 1, O], zeros around.

    With `by_channel` of every channel with a kernel of its own.
    """
    kernel = leaves["kernel"]
    x = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    height, width = (size - len(kernel) + 1 for size in x.shape[1:3])
    total = 0
    for i, j in np.ndindex(kernel.shape[:2]):
        pixels = x[:, i : i + height : stride, j : j + width : stride]
        total += pixels * kernel[i, j] if by_channel else pixels @ kernel[i, j]
    return total + leaves.get("bias", 0)


def linear(leaves, x):
    return x @ leaves["kernel"] + leaves["bias"]


def normed(leaves, running, x):
    unit = (x - running["mean"]) / np.sqrt(running["var"] + 1e-5)
    return unit * leaves["scale"] + leaves["bias"]


def pooled(x):
    """The largest of every whole square of two pixels by two."""
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    x = x[:, :height, :width]
    return np.max([x[:, i::2, j::2] for i in range(2) for j in range(2)], axis=0)


def separable(p, s, x, stride=1):
    """A block of MobileNet."""
    x = conv(p["depthwise"], x, pad=1, stride=stride, by_channel=True)
    x = relu(normed(p["bn1"], s["bn1"], x))
    return relu(normed(p["bn2"], s["bn2"], conv(p["pointwise"], x, pad=0)))


def mobile_maps(params, stats, x, stem):
    """What each of eight blocks gives."""
    x = conv(params["stem"]["conv"], x, pad=1, stride=2 if stem == "imagenet" else 1)
    x = relu(normed(params["stem"]["bn"], stats["stem"]["bn"], x))
    maps = []
    for j, stride in enumerate((1, 2, 1, 2, 1, 2, 2, 1), 1):
        x = separable(params[f"block{j}"], stats[f"block{j}"], x, stride)
        maps.append(x)
    return maps


def mobilenet(params, stats, x, stem):
    x = mobile_maps(params, stats, x, stem)[-1]
    return linear(params["fc"], x.mean((1, 2)))


def enlarged(x, size):
    """Bilinear, a pixel being a square, the border going on as it is."""
    for axis, wide in zip((1, 2), size, strict=True):
        last = x.shape[axis] - 1
        place = ((np.arange(wide) + 0.5) * (last + 1) / wide - 0.5).clip(0, last)
        low = place.astype(int)
        part = np.expand_dims(place - low, [a for a in range(4) if a != axis])
        above = x.take(np.minimum(low + 1, last), axis)
        x = x.take(low, axis) * (1 - part) + above * part
    return x


def segmenter(params, stats, x):
    """A decoder from MobileNet's last map of every size, smallest first."""
    maps = mobile_maps(params, stats, x, "cifar")
    y = maps[7]
    for i, block in ((4, 5), (3, 4), (2, 2), (1, 0)):  # blocks from 0
        p, s, skip = params[f"up{i}"], stats[f"up{i}"], maps[block]
        y = np.concatenate([enlarged(y, skip.shape[1:3]), skip], axis=-1)
        y = relu(normed(p["bn"], s["bn"], conv(p["conv"], y, pad=1)))
    return enlarged(conv(params["classifier"], y, pad=0), x.shape[1:3])


def residual(p, s, x):
    """A basic block that keeps its size."""
    y = relu(normed(p["bn1"], s["bn1"], conv(p["conv1"], x, pad=1)))
    return relu(normed(p["bn2"], s["bn2"], conv(p["conv2"], y, pad=1)) + x)


def linear_base(params, stats, x, block):
    x = linear(params["base"], x.reshape(len(x), -1)).reshape(-1, 3, 3, 6)
    x = block(params["block1"], stats["block1"], x)
    return linear(params["fc"], x.mean((1, 2)))


def leaf_celeba(params, stats, x):
    for i in (1, 2, 3):
        x = conv(params[f"conv{i}"], x, pad=1)
        x = relu(pooled(normed(params[f"bn{i}"], stats[f"bn{i}"], x)))
    return linear(params["classifier"], x.reshape(len(x), -1))


def leaf_femnist(params, stats, x):
    assert not stats
    for i in (1, 2):
        x = relu(pooled(conv(params[f"conv{i}"], x, pad=2)))
    x = relu(linear(params["fc"], x.reshape(len(x), -1)))
    return linear(params["classifier"], x)


def cnn(params, stats, x):
    assert not stats
    for i in (1, 2):
        x = relu(conv(params[f"conv{i}"], x, pad=0))
    x = relu(linear(params["fc"], pooled(x).reshape(len(x), -1)))
    return linear(params["classifier"], x)


MOBILE = {"width": 0.2, "num_blocks": 8}
LINEAR = {"width": 6, "side": 3}
ENCODER = {"name": "mobilenet", "width": 0.2, "num_blocks": 8, "stem": "cifar"}
CASES = {  # name of the network: (its settings, the same again)
    "mobilenet": (MOBILE, lambda *given: mobilenet(*given, "cifar")),
    "mobilenet imagenet": (
        {**MOBILE, "stem": "imagenet"},
        lambda *given: mobilenet(*given, "imagenet"),
    ),
    "segmenter": ({"width": 4, "encoder": ENCODER}, segmenter),
    "linear_base": (LINEAR, lambda *given: linear_base(*given, residual)),
    "linear_base mobilenet": (
        {**LINEAR, "block": "mobilenet"},
        lambda *given: linear_base(*given, separable),
    ),
    "leaf_celeba": ({"widths": (4, 6, 5)}, leaf_celeba),
    "leaf_femnist": ({"widths": (4, 6), "hidden_dim": 12}, leaf_femnist),
    "cnn": ({"widths": (4, 6), "embedding_dim": 12}, cnn),
}


def drawn(path, leaf, rng):
    """A leaf's values: about 1 for scales and variances, else about 0."""
    name = path[-1].key
    if name in ("scale", "var"):
        return rng.uniform(0.7, 1.3, leaf.shape).astype(np.float32)
    inputs = max(np.prod(leaf.shape[:-1]), 9)
    return (np.sqrt(2 / inputs) * rng.normal(size=leaf.shape)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass_is_the_one_written_down_again(name):
    settings, again = CASES[name]
    model = MODELS[name.split()[0]](SHAPE, num_classes=5, **settings)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    draw = functools.partial(drawn, rng=np.random.default_rng(1))
    variables = jax.tree_util.tree_map_with_path(draw, shapes)
    got, _ = jax.jit(model.apply)(variables, X)
    want = again(variables["params"], variables["batch_stats"], X)
    assert np.ptp(want, axis=0).min() > 1e-3  # images differ
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
