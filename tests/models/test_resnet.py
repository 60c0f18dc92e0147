"""ResNet against the published counts, shapes and a plain forward pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedfr_jax.models import MODELS
from fedfr_jax.models.resnet import (
    Block,
    LayerSettings,
    ResNet,
    Stage,
    Stem,
    Trunk,
    _max_pool,
)
from fedfr_jax.trees import path_name

SHAPE = (16, 14, 3)
TINY = {"blocks": (1, 2), "widths": (4, 8), "num_classes": 5}
X = jax.random.normal(jax.random.key(1), (4, *SHAPE))


def _model(**settings):
    return MODELS["resnet"](SHAPE, **TINY | settings)


def _names(tree):
    return {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("depth", "count"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        (101, 44_549_160),
        (152, 60_192_808),
    ],
)
def test_numbers_of_parameters_are_torchvisions(depth, count):
    model = MODELS["resnet"](
        (224, 224, 3), depth=depth, stem="imagenet", num_classes=1000
    )
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


def test_fedper_counts_the_blocks_of_a_resnet34_and_its_classifier():
    model = MODELS["resnet"]((32, 32, 3), depth=34, num_classes=10)
    assert len(model.blocks) == 1 + 16 + 1
    assert model.blocks[0] == "stem"
    assert model.blocks[-4:] == (
        "stage4/block1",
        "stage4/block2",
        "stage4/block3",
        "fc",
    )


def test_names_of_a_basic_network():
    variables = jax.eval_shape(_model().init, jax.random.key(0))
    convolutions = {
        "stem/conv",
        "stage1/block1/conv1",
        "stage1/block1/conv2",
        "stage2/block1/conv1",
        "stage2/block1/conv2",
        "stage2/block1/shortcut/conv",
        "stage2/block2/conv1",
        "stage2/block2/conv2",
    }
    norms = {name.replace("conv", "bn") for name in convolutions}
    kernels = {f"{name}/kernel" for name in convolutions}
    vectors = {f"{name}/{leaf}" for name in norms for leaf in ("scale", "bias")}
    assert _names(variables["params"]) == kernels | vectors | {"fc/kernel", "fc/bias"}
    statistics = {f"{name}/{leaf}" for name in norms for leaf in ("mean", "var")}
    assert _names(variables["batch_stats"]) == statistics


def test_shapes_of_a_bottleneck_network():
    variables = jax.eval_shape(_model(depth=50).init, jax.random.key(0))
    params = variables["params"]
    first, second = (params["stage2"][f"block{i}"] for i in (1, 2))
    assert first["conv1"]["kernel"].shape == (1, 1, 16, 8)
    assert first["conv2"]["kernel"].shape == (3, 3, 8, 8)
    assert first["conv3"]["kernel"].shape == (1, 1, 8, 32)
    assert first["shortcut"]["conv"]["kernel"].shape == (1, 1, 16, 32)
    assert second["conv1"]["kernel"].shape == (1, 1, 32, 8)
    assert "shortcut" not in second
    # The stem has a quarter of the channels, so the first stage needs one too.
    assert "shortcut" in params["stage1"]["block1"]
    assert params["fc"]["kernel"].shape == (32, 5)


def test_initial_values_are_he_normal_and_those_of_a_linear_layer():
    model = MODELS["resnet"](SHAPE, blocks=(1, 1), widths=(32, 64), num_classes=100)
    params = model.init(jax.random.key(0))["params"]
    kernel = params["stage2"]["block1"]["conv1"]["kernel"]
    deviation = np.asarray(kernel).std()
    np.testing.assert_allclose(deviation, np.sqrt(2 / (9 * 64)), rtol=0.05)
    for leaf in params["fc"].values():
        assert 0.95 / 8 < np.max(np.abs(leaf)) <= 1 / 8


def _outputs(input_shape, kinds, is_bottleneck=False, stem="cifar", **settings):
    """Shape and dtype of the outputs of modules of these kinds: {path: struct}."""
    trunk = Trunk((1, 1, 1, 1), (8, 8, 8, 8), is_bottleneck, stem, remat=False)
    module = ResNet(trunk, 5, LayerSettings(**settings))
    x = jax.ShapeDtypeStruct((2, *input_shape), jnp.float32)

    def run(x):
        return module.init_with_output(
            jax.random.key(0),
            x,
            train=False,
            capture_intermediates=lambda module, _: isinstance(module, kinds),
            mutable=["params", "batch_stats", "intermediates"],
        )

    _, variables = jax.eval_shape(run, x)
    leaves = jax.tree_util.tree_leaves_with_path(variables["intermediates"])
    named = {path_name(p): x for p, x in leaves}
    end = "/__call__/0"  # other intermediates are what a network itself hands out
    return {k.removesuffix(end): x for k, x in named.items() if k.endswith(end)}


@pytest.mark.parametrize(
    ("stem", "size", "sides"),
    [
        ("cifar", 32, [32, 32, 16, 8, 4]),
        ("cifar", 28, [28, 28, 14, 7, 4]),
        ("imagenet", 224, [56, 56, 28, 14, 7]),
        ("imagenet", 97, [25, 25, 13, 7, 4]),
    ],
)
@pytest.mark.parametrize("is_bottleneck", [False, True])
def test_sides_of_the_maps(stem, size, sides, is_bottleneck):
    shape, settings = (size, size, 3), {"is_bottleneck": is_bottleneck, "stem": stem}
    outputs = _outputs(shape, (Stem, Stage), **settings)
    channels = [8] + [32 if is_bottleneck else 8] * 4
    for i, name in enumerate(["stem", "stage1", "stage2", "stage3", "stage4"]):
        assert outputs[name].shape == (2, sides[i], sides[i], channels[i])


def test_the_stride_of_a_bottleneck_is_on_its_3x3_convolution():
    pixels, quarter = 16 * 14, 8 * 7
    stem = pixels * 27 * 4
    first = pixels * (4 * 4 + 9 * 4 * 4 + 4 * 16 + 4 * 16)
    second = pixels * 16 * 8 + quarter * (9 * 8 * 8 + 8 * 32 + 16 * 32)
    third = quarter * (32 * 8 + 9 * 8 * 8 + 8 * 32)
    operations = _model(depth=50).flops
    assert operations == 2 * (stem + first + second + third + 32 * 5)


def _plain(variables, x, stem):
    """The forward pass of a basic network in evaluation, written down again."""
    params, stats = variables["params"], variables["batch_stats"]

    def conv_bn(where, number, x, stride=1):
        p, s = params, stats
        for name in where:
            p, s = p[name], s[name]
        kernel = p[f"conv{number}"]["kernel"]
        pad = kernel.shape[0] // 2
        x = lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            [(pad, pad)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        own, running = p[f"bn{number}"], s[f"bn{number}"]
        unit = (x - running["mean"]) / jnp.sqrt(running["var"] + 1e-5)
        return unit * own["scale"] + own["bias"]

    relu = lambda x: jnp.maximum(x, 0)
    x = relu(conv_bn(["stem"], "", x, 2 if stem == "imagenet" else 1))
    if stem == "imagenet":
        x = _reduce_window(x)
    for where, stride in [
        (["stage1", "block1"], 1),
        (["stage2", "block1"], 2),
        (["stage2", "block2"], 1),
    ]:
        y = relu(conv_bn(where, 1, x, stride))
        y = conv_bn(where, 2, y)
        x = conv_bn([*where, "shortcut"], "", x, 2) if stride == 2 else x
        x = relu(x + y)
    return x.mean((1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]


def _reduce_window(x):
    pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_the_forward_pass_is_the_one_written_down_again(stem):
    model = _model(stem=stem)
    leaves, structure = jax.tree.flatten(model.init(jax.random.key(0)))
    noise = np.random.default_rng(0)
    shaken = [x + noise.uniform(0, 0.3, x.shape).astype(np.float32) for x in leaves]
    variables = structure.unflatten(shaken)
    got, _ = jax.jit(model.apply)(variables, X)
    with jax.numpy_rank_promotion("allow"):
        want = jax.jit(_plain, static_argnums=2)(variables, X, stem)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(6, 5), (7, 8), (1, 2)])
def test_max_pooling_is_that_of_windows_with_its_gradient(size):
    @jax.jit
    def both(x):
        (got, pull), (want, pull_back) = (
            jax.vjp(pool, x) for pool in (_max_pool, _reduce_window)
        )
        dy = jax.random.normal(jax.random.key(1), got.shape)
        return (got, want), (pull(dy), pull_back(dy))

    x = np.random.default_rng(0).uniform(size=(2, *size, 3)).astype(np.float32)
    values, gradients = both(x)
    np.testing.assert_array_equal(*values)
    chex.assert_trees_all_close(*gradients, rtol=1e-6)


def test_training_moves_the_running_statistics():
    model = _model()
    variables = model.init(jax.random.key(0))
    _, stats = jax.jit(model.apply, static_argnames="train")(variables, X, train=True)
    for old, new in zip(
        jax.tree.leaves(variables["batch_stats"]), jax.tree.leaves(stats), strict=True
    ):
        assert np.all(old != new)


def test_group_norm_has_no_statistics_and_its_own_names():
    model = _model(norm="group", norm_groups=2)
    variables = model.init(jax.random.key(0))
    assert variables["batch_stats"] == {}
    assert set(variables["params"]["stem"]) == {"conv", "gn"}
    trained, stats = jax.jit(model.apply, static_argnums=2)(variables, X, True)
    evaluated, _ = jax.jit(model.apply)(variables, X)
    assert stats == {}
    np.testing.assert_allclose(trained, evaluated, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "norm, dtype", [("batch", "bfloat16"), ("group", jnp.bfloat16)]
)
def test_half_precision_keeps_parameters_gradients_and_logits_in_float32(norm, dtype):
    model = _model(norm=norm, norm_groups=2, dtype=dtype)
    variables = model.init(jax.random.key(0))

    def loss(params):
        logits, stats = model.apply({**variables, "params": params}, X, True)
        return jnp.sum(jnp.sin(logits)), (logits, stats)

    gradients, aux = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    for leaf in jax.tree.leaves((variables, gradients, aux)):
        assert leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf))


def test_half_precision_is_that_of_the_blocks():
    outputs = _outputs((32, 32, 3), (Stem, Block), dtype="bfloat16")
    assert {x.dtype for x in outputs.values()} == {jnp.dtype(jnp.bfloat16)}


def test_a_network_learns():
    model = _model(norm="group", norm_groups=2, remat=True)
    variables = model.init(jax.random.key(0))
    labels = jax.nn.one_hot(jnp.arange(4), 5)

    def loss(params):
        logits, _ = model.apply({**variables, "params": params}, X, train=True)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, axis=1))

    @jax.jit
    def step(params):
        value, gradients = jax.jit(jax.value_and_grad(loss))(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params, values = variables["params"], []
    for _ in range(60):
        value, params = step(params)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 19, "blocks": None}, "depth must be one of .18, 34, 50.*got 19"),
        ({"blocks": (1,)}, "blocks must be 2 integers >= 1, one per stage"),
        ({"stem": "face"}, "stem must be one of .*, got 'face'"),
        ({"norm": "layer"}, "norm must be one of .*, got 'layer'"),
    ],
)
def test_impossible_resnets_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _model(**settings)


def test_groups_that_do_not_divide_the_channels_are_refused_at_the_start():
    with pytest.raises(
        ValueError, match="norm_groups must divide the 4 channels, got 3"
    ):
        _model(norm="group", norm_groups=3).init(jax.random.key(0))
