"""Adapters, against the same network with other kernels and against arithmetic."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.models import MODELS
from fedfr_jax.models.adapters import bias, bottleneck, head, lora, prompt
from fedfr_jax.scanned_blocks import by_block_name

SIDE = (16, 16, 3)
NETWORKS = {
    "cnn": MODELS["cnn"](SIDE, num_classes=4),
    "vit": MODELS["vit"](SIDE, width=8, depth=4, num_heads=2, patch_size=8),
    "vit, unrolled and again in the backward pass": MODELS["vit"](
        SIDE, width=8, depth=3, num_heads=2, patch_size=8, remat=True, scan_blocks=False
    ),
}
VIT = NETWORKS["vit"]
X = jax.random.normal(jax.random.key(1), (4, *SIDE))
KEY = jax.random.key(0)


def shaken(tree, seed=0):
    rng = np.random.default_rng(seed)
    shake = lambda x: (x + 0.1 * rng.normal(size=x.shape)).astype(x.dtype)
    return jax.tree.map(shake, tree)


def output_of(model, variables):
    return jax.jit(model.output)(variables, X)


def names_of(tree):
    return {*trees.by_name(by_block_name(tree["params"]))}


@pytest.mark.parametrize("adapter", [lora(rank=2), bottleneck(rank=2)])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_new_adapter_changes_no_output_and_is_all_that_moves(network, adapter):
    base = NETWORKS[network]
    variables = base.init(KEY)
    model = ff.with_adapter(base, adapter, variables=variables)
    moving = model.init(KEY)
    output = output_of(base, variables)
    np.testing.assert_allclose(output_of(model, moving), output, rtol=1e-4, atol=1e-5)
    top = base.blocks[-1]
    assert all(
        x.split("/")[-1] not in ("kernel", "scale") or top in x
        for x in names_of(moving)
    )
    new = {x for x in names_of(moving) if not x.startswith(top)}
    assert new and all("lora_" in x or "adapter_" in x for x in new)


@pytest.mark.parametrize("network", NETWORKS)
def test_lora_is_the_network_of_the_merged_kernels(network):
    base = NETWORKS[network]
    model = ff.with_adapter(
        base, lora(rank=3, alpha=6), variables=shaken(base.init(KEY))
    )
    moving = shaken(model.init(KEY), 1)
    merged = ff.merge_adapter(model, moving)
    chex.assert_trees_all_equal_shapes(
        by_block_name(merged), by_block_name(base.init(KEY))
    )
    output = output_of(model, moving)
    np.testing.assert_allclose(output, output_of(base, merged), rtol=1e-5, atol=1e-5)
    apart = np.abs(output - output_of(base, shaken(base.init(KEY)))).max()
    assert apart > 1e-3
    found = by_block_name(ff.whole_variables(model, moving))["params"]
    layer = found["fc" if network == "cnn" else [*found][0]]
    if network == "cnn":
        change = np.asarray(layer["lora_a"]) @ np.asarray(layer["lora_b"]) * 2
        expected = layer["kernel"] + change
        np.testing.assert_allclose(
            merged["params"]["fc"]["kernel"], expected, rtol=1e-5
        )


@pytest.mark.parametrize("network", ["cnn", "vit"])
def test_gradients_of_lora_are_those_of_the_merged_kernels(network):
    base = NETWORKS[network]
    model = ff.with_adapter(base, lora(rank=2), variables=shaken(base.init(KEY)))
    moving = shaken(model.init(KEY), 1)
    loss = lambda output: (output**2).mean()
    merge = lambda moving: ff.merge_adapter(model, moving)
    own = jax.jit(jax.grad(lambda moving: loss(model.output(moving, X))))(moving)
    plain = jax.grad(lambda moving: loss(base.output(merge(moving), X)))
    plain = jax.jit(plain)(moving)
    chex.assert_trees_all_close(own, plain, rtol=1e-3, atol=1e-4)


def test_each_lane_has_its_own_adapter_on_one_base():
    model = ff.with_adapter(VIT, lora(rank=2), variables=shaken(VIT.init(KEY)))
    lanes = [shaken(model.init(KEY), i) for i in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *lanes)
    outputs = jax.vmap(model.output, (0, None))(stacked, X)
    expected = [output_of(model, x) for x in lanes]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_a_bottleneck_follows_its_layer():
    base = MODELS["mlp"]((6,), hidden_dim=5, num_classes=3)
    model = ff.with_adapter(
        base, bottleneck(rank=2, targets="fc"), variables=base.init(KEY)
    )
    moving = shaken(model.init(KEY))
    whole = ff.whole_variables(model, moving)["params"]
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    whole = jax.tree.map(np.asarray, whole)
    y = x @ whole["fc"]["kernel"] + whole["fc"]["bias"]
    down = np.asarray(jax.nn.gelu(y @ whole["fc"]["adapter_down"]))
    y = y + down @ whole["fc"]["adapter_up"]
    top = whole["classifier"]
    expected = np.maximum(y, 0) @ top["kernel"] + top["bias"]
    np.testing.assert_allclose(model.output(moving, x), expected, rtol=1e-5, atol=1e-6)


def test_prompts_are_seen_by_the_blocks_alone():
    variables = shaken(VIT.init(KEY))
    model = ff.with_adapter(VIT, prompt(num_tokens=3), variables=variables, head="")
    moving = model.init(KEY)
    assert moving["params"]["prompt"].shape == (3, 8)
    assert names_of(moving) == {"prompt"}
    output = output_of(model, moving)
    assert output.shape == output_of(VIT, variables).shape
    assert np.abs(output - output_of(VIT, variables)).max() > 1e-4
    turned = jax.tree.map(lambda x: x[::-1], moving)  # attention has no order
    np.testing.assert_allclose(output, output_of(model, turned), rtol=1e-4, atol=1e-5)


def test_bias_and_head_move_what_they_say():
    model = ff.with_adapter(NETWORKS["cnn"], bias())
    kernels = {x for x in names_of(model.init(KEY)) if x.endswith("kernel")}
    assert kernels == {"classifier/kernel"}
    assert "conv1/bias" in names_of(model.init(KEY))
    model = ff.with_adapter(NETWORKS["cnn"], head())
    assert names_of(model.init(KEY)) == {"classifier/kernel", "classifier/bias"}


def test_frozen_a_is_not_among_the_variables():
    adapter = lora(rank=2, targets="fc", train_a=False)
    base = NETWORKS["cnn"]
    model = ff.with_adapter(base, adapter, variables=base.init(KEY), head="")
    assert names_of(model.init(KEY)) == {"fc/lora_b"}
    whole = ff.whole_variables(model, model.init(jax.random.key(5)))
    assert np.abs(whole["params"]["fc"]["lora_a"]).max() > 0


def test_only_a_traced_network_has_an_adapter():
    base = NETWORKS["cnn"]
    variables = base.init(KEY)
    model = ff.with_adapter(base, lora(rank=2), variables=variables)
    moving = shaken(model.init(KEY))
    whole = ff.whole_variables(model, moving)
    output_of(model, moving)
    plain = {**variables, "params": {**whole["params"]}}
    assert np.abs(output_of(base, plain) - output_of(model, moving)).max() > 1e-3


@pytest.mark.parametrize(
    ("adapter", "network", "words"),
    [
        (
            lambda: lora(targets="none_such"),
            "cnn",
            "adapter.targets must match a layer such as",
        ),
        (
            lambda: lora(rank=28, targets="conv"),
            "cnn",
            "rank must be at most 27, .* conv1",
        ),
        (lambda: lora(rank=0), "cnn", "rank must be in"),
        (lambda: lora(rank=2, targets="block2/qkv"), "vit", "all blocks of"),
        (prompt, "cnn", "needs a network with tokens"),
        (lambda: ff.adapters.Adapter("/none_such$"), "cnn", "must move leaves"),
    ],
)
def test_what_does_not_fit_is_one_line(adapter, network, words):
    with pytest.raises(ValueError, match=words):
        ff.with_adapter(NETWORKS[network], adapter())


def test_a_layer_that_no_adapter_reaches_is_refused():
    base = MODELS["mobilenet"](SIDE, num_classes=4)
    with pytest.raises(ValueError, match="in one group of channels"):
        ff.with_adapter(base, lora(rank=1))
    with pytest.raises(ValueError, match="must be lora, bias or head"):
        ff.merge_adapter(ff.with_adapter(VIT, prompt()), {})
