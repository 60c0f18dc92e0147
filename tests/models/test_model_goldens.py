"""Parity with the official networks: features, stages, gradients, running statistics.

Weights are drawn again from the recipes that made the golden files.
"""

import functools
import json
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedfr_jax.models import MODELS
from fedfr_jax.models.block_scan import Stage
from fedfr_jax.models.external_checkpoints import from_torch, to_torch
from fedfr_jax.models.iresnet import Block
from fedfr_jax.models.layers import LayerSettings
from fedfr_jax.models.norm import moved

SHAPE = (112, 112, 3)
NETS = {
    "sphere20": ("sphereface", 20),
    "sphere64": ("sphereface", 64),
    "iresnet18": ("iresnet", 18),
    "iresnet50": ("iresnet", 50),
}


def _fedfr_state_dict(path, net):
    rules = {
        "0.1z": lambda z: 0.1 * z,
        "prelu 0.25+0.05z": lambda z: 0.25 + 0.05 * z,
        "bn gamma 1+0.1z": lambda z: 1 + 0.1 * z,
        "exp(0.1z)": lambda z: np.exp(0.1 * z),
        "weight: z/sqrt(fan_in)": lambda z: z / np.sqrt(np.prod(z.shape[1:])),
    }
    state_dict = {}
    for name, shape, rule in json.loads(path.read_text())[net]:
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        z = rng.standard_normal(shape)
        state_dict[name] = rules[rule](z).astype(np.float32)
    return state_dict


def _with_unit_scale(state_dict):
    """The golden nets have a random last scale, which ours freezes at 1."""
    if "features.weight" not in state_dict:
        return state_dict, lambda features: features
    scale, bias = state_dict["features.weight"], state_dict["features.bias"]
    state_dict = state_dict | {"features.weight": np.ones_like(scale)}
    return state_dict, lambda features: (features - bias) / scale + bias


def _nhwc(images):
    return jnp.asarray(images.transpose(0, 2, 3, 1))


def _stages(model, variables, x):
    """The embedding, and outputs of the stages, in order."""

    def run(variables, x):
        outputs = {}

        def record(function, arguments, keywords, context):
            output = function(*arguments, **keywords)
            if isinstance(context.module, Stage) and context.method_name == "__call__":
                outputs[context.module.name] = output
            return output

        with nn.intercept_methods(record):
            return model.apply(variables, x)[0], outputs

    embedding, outputs = jax.jit(run)(variables, x)
    return embedding, [np.asarray(outputs[name]) for name in sorted(outputs)]


def _assert_close(got, want, rtol):
    """Relative to the size of the whole array."""
    scale = np.sqrt(np.mean(np.square(want)))
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * scale)


@pytest.fixture
def fedfr_net(golden, request):
    """Load a net of fedfr_backbones: arrays, variables, and features to ours."""
    path = request.path.parent.parent / "golden" / "fedfr_backbones_params.json"

    def load(net):
        family, depth = NETS[net]
        state_dict, to_ours = _with_unit_scale(_fedfr_state_dict(path, net))
        variables = from_torch(family, state_dict, SHAPE, depth=depth)
        return golden("fedfr_backbones"), variables, to_ours

    return load


@pytest.mark.parametrize(
    "net",
    [
        "sphere20",
        "iresnet18",
        pytest.param("sphere64", marks=pytest.mark.slow),
        pytest.param("iresnet50", marks=pytest.mark.slow),
    ],
)
def test_fedfr_backbones_give_the_official_features_and_stages(fedfr_net, net):
    arrays, variables, to_ours = fedfr_net(net)
    family, depth = NETS[net]
    model = MODELS[family](SHAPE, depth=depth)
    embedding, stages = _stages(model, variables, _nhwc(arrays["input"][:2]))
    assert len(stages) == 4
    for i, stage in enumerate(stages):
        want = arrays[f"{net}/layer{i + 1}_patch"]
        _assert_close(stage[:, :4, :4, :4], want.transpose(0, 2, 3, 1), 2e-5)
        moments = [stage.mean(), stage.std(ddof=1)]
        want = arrays[f"{net}/layer{i + 1}_mean_std"]
        np.testing.assert_allclose(moments, want, rtol=1e-4, atol=1e-5)
    _assert_close(embedding, to_ours(arrays[f"{net}/eval_features"]), 2e-5)


@pytest.mark.slow
def test_iresnet18_trains_with_the_official_batch_statistics(fedfr_net):
    arrays, variables, to_ours = fedfr_net("iresnet18")
    model = MODELS["iresnet"](SHAPE, depth=18)
    run = jax.jit(lambda v, x: model.apply(v, x, True))
    embedding, stats = run(variables, _nhwc(arrays["input"]))
    _assert_close(embedding, to_ours(arrays["iresnet18/train_features"]), 1e-4)
    after = to_torch("iresnet", variables | {"batch_stats": stats}, SHAPE, depth=18)
    for name in arrays:
        if name.startswith("iresnet18/after_train_"):
            _assert_close(after[name.split("after_train_")[1]], arrays[name], 1e-5)


BLOCK_NAMES = {"downsample.0": ("shortcut", "conv"), "downsample.1": ("shortcut", "bn")}
LEAF_NAMES = {"running_mean": "mean", "running_var": "var", "bias": "bias"}


def _block_leaf(name, array):
    """Collection, path and array of one of the golden block's tensors."""
    module, kind = name.rsplit(".", 1)
    collection = "batch_stats" if kind.startswith("running") else "params"
    leaf = LEAF_NAMES.get(kind, "kernel" if array.ndim == 4 else "scale")
    leaf = "slope" if module == "prelu" else leaf
    array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
    return collection, (*BLOCK_NAMES.get(module, (module,)), leaf), array


def _block_tree(arrays, prefix):
    tree = {"params": {}, "batch_stats": {}}
    for key in arrays:
        if key.startswith(prefix):
            collection, path, array = _block_leaf(key[len(prefix) :], arrays[key])
            node = tree[collection]
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = array
    return tree


@pytest.mark.parametrize("case", ["identity", "down", "same_down"])
def test_a_block_has_the_official_outputs_gradients_and_statistics(golden, case):
    arrays = golden("bigface_iblock")
    strides = (1, 1) if case == "identity" else (1, 2)
    block = Block(arrays[f"{case}/eval_y"].shape[1], LayerSettings(), strides=strides)
    variables = _block_tree(arrays, f"{case}/w/")
    x, cotangent = _nhwc(arrays[f"{case}/x"]), _nhwc(arrays[f"{case}/cotangent"])
    y = jax.jit(block.apply, static_argnames="train")(variables, x, train=False)
    np.testing.assert_allclose(y, _nhwc(arrays[f"{case}/eval_y"]), rtol=0, atol=1e-5)

    def run(params, x):
        own = {**variables, "params": params}
        return block.apply(own, x, train=True, mutable=["batch_stats"])

    @jax.jit
    def train(params, x):
        y, pull, updated = jax.vjp(run, params, x, has_aux=True)
        return y, pull(cotangent), updated

    y, (gradients, dx), updated = train(variables["params"], x)
    np.testing.assert_allclose(y, _nhwc(arrays[f"{case}/train_y"]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(dx, _nhwc(arrays[f"{case}/dx"]), rtol=0, atol=5e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5)
    jax.tree.map(close, gradients, _block_tree(arrays, f"{case}/g/")["params"])
    after = _block_tree(arrays, f"{case}/after/")["batch_stats"]
    now = moved(variables["batch_stats"], updated["batch_stats"])
    jax.tree.map(close, now, after)


TINY = {"blocks": (1, 1, 1, 1)}


def _bigface_state_dict(arrays):
    rng = np.random.RandomState(1234)
    state_dict = {}
    for name, shape in zip(arrays["names"], arrays["shapes"], strict=True):
        shape = tuple(int(n) for n in re.findall(r"\d+", str(shape)))
        z = rng.standard_normal(int(np.prod(shape))).reshape(shape)
        state_dict[str(name)] = _bigface_tensor(str(name), z).astype(np.float32)
    sums = [np.sum(tensor, dtype=np.float64) for tensor in state_dict.values()]
    np.testing.assert_allclose(sums, arrays["wsum"], rtol=1e-6, atol=1e-6)
    return state_dict


def _bigface_tensor(name, z):
    if name.endswith("running_mean"):
        return 0.1 * z
    if name.endswith("running_var"):
        return 1 + 0.2 * np.tanh(z)
    if z.ndim == 4:
        return z * np.sqrt(2 / np.prod(z.shape[1:]))
    if z.ndim == 2:
        return z * np.sqrt(1 / z.shape[1])
    if name.endswith("prelu.weight"):
        return 0.25 + 0.05 * np.tanh(z)
    if name == "features.weight":
        return np.ones_like(z)
    return 1 + 0.1 * np.tanh(z) if name.endswith("weight") else 0.1 * z


def _bigface_images(arrays):
    images = (arrays["img_uint8_nchw_rgb"] / 255 - 0.5) / 0.5
    return _nhwc(images.astype(np.float32))


@pytest.mark.slow
def test_the_tiny_iresnet_evaluates_to_the_official_features(golden):
    arrays = golden("bigface_iresnet_tiny")
    variables = from_torch("iresnet", _bigface_state_dict(arrays), SHAPE, **TINY)
    model = MODELS["iresnet"](SHAPE, **TINY)
    embedding, stages = _stages(model, variables, _bigface_images(arrays))
    _assert_close(embedding, arrays["eval_out_f64"], 2e-5)
    patch = stages[0][0, :8, :8, :8].transpose(2, 0, 1)
    _assert_close(patch, arrays["eval_layer1_patch"], 2e-5)
    _assert_close(stages[3].mean((1, 2)), arrays["eval_layer4_pool"], 2e-5)
    _assert_close(
        stages[3][0].transpose(2, 0, 1)[:16], arrays["eval_layer4_img0"], 2e-5
    )


@pytest.mark.slow
def test_the_tiny_iresnet_trains_with_the_official_gradients(golden):
    arrays = golden("bigface_iresnet_tiny")
    variables = from_torch("iresnet", _bigface_state_dict(arrays), SHAPE, **TINY)
    x = _bigface_images(arrays)
    with jax.enable_x64(True):
        variables = jax.tree.map(lambda x: x.astype(np.float64), variables)
        x = x.astype(np.float64)
        model = MODELS["iresnet"](SHAPE, **TINY)
        cotangent = jnp.asarray(arrays["train_cotangent"].astype(np.float64))

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def run(params):
            own = {**variables, "params": params}
            embedding, stats = model.apply(own, x, True)
            return jnp.sum(embedding * cotangent), (embedding, stats)

        gradients, (embedding, stats) = run(variables["params"])
        own = {"params": gradients, "batch_stats": stats}
        got = to_torch("iresnet", own, SHAPE, **TINY)
    _assert_close(embedding, arrays["train_out_f64"], 1e-11)
    for name, norm, total, head in zip(
        arrays["grad_names"],
        arrays["grad_l2_f64"],
        arrays["grad_sum_f64"],
        arrays["grad_head8_f64"],
        strict=True,
    ):
        gradient = got[str(name)]
        np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(gradient.sum(), total, rtol=1e-8, atol=1e-7)
        first = gradient.ravel()[: head.size]
        np.testing.assert_allclose(first, head, rtol=1e-8, atol=1e-9)
    for kind in ("mean", "var"):
        flat = np.concatenate(
            [got[f"{name}.running_{kind}"] for name in arrays["bn_names"]]
        )
        _assert_close(flat, arrays[f"train_running_{kind}_concat"], 1e-5)
