"""The FedFR objective, composed of this room's losses, over three official steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from fedfr_jax.losses.binary import binary_branch, linear_converter
from fedfr_jax.losses.contract import logits as logits_of
from fedfr_jax.losses.contract import margin_inputs
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.margin import cosine, softmax_cross_entropy
from fedfr_jax.losses.margin_losses import cosface

NAMES = (
    "backbone.w.weight",
    "backbone.w.bias",
    "fc_module.fc",
    "bce_module.converter.0.weight",
    "bce_module.converter.0.bias",
    "bce_module.weight",
    "bce_module.bias",
)


def backbone(params, inputs):
    return inputs @ params["backbone.w.weight"].T + params["backbone.w.bias"][None]


def total_loss(params, inputs, labels, global_features, last_features):
    features = backbone(params, inputs)
    cosines = cosine(features, params["fc_module.fc"])
    seen = margin_inputs(features, cosines, labels)
    logits = logits_of(cosface(scale=30.0), cosines, labels, seen, {})
    converter = {
        "kernel": params["bce_module.converter.0.weight"].T,
        "bias": params["bce_module.converter.0.bias"],
    }
    converted = linear_converter(converter, features)
    weights, bias = params["bce_module.weight"], params["bce_module.bias"]
    cos = softmax_cross_entropy(logits, labels).mean()
    con = model_contrastive(features, global_features, last_features).mean()
    bce = binary_branch(converted, weights, bias, labels).mean()
    total = cos + 5 * con + 10 * bce
    return total, jnp.stack([total, cos, con, bce])


# The official code's 1e-8 inside its logarithm is worth 5e-10 in the branch's loss,
# which is weighted by 10; everything else agrees to 1e-10.
@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
def test_losses_gradients_and_three_sgd_steps_match_the_official_code(
    golden, dtype, relative
):
    want = golden("fedfr_total_loss_sgd")

    def assert_params(actual, prefix):
        for name in NAMES:
            expected = want[f"{prefix}/{name}"]
            atol = 5e-9 + relative * np.abs(expected).max()
            assert_allclose(actual[name], expected, rtol=0, atol=atol, err_msg=name)

    with jax.enable_x64(dtype == "float64"):
        params = {name: want[f"init/{name}"].astype(dtype) for name in NAMES}
        inputs, labels = want["inputs"].astype(dtype), np.int32(want["labels"])
        last = {
            "backbone.w.weight": want["last_weight"].astype(dtype),
            "backbone.w.bias": want["last_bias"].astype(dtype),
        }
        frozen = backbone(params, inputs), backbone(last, inputs)
        sgd = optax.chain(
            optax.add_decayed_weights(float(want["weight_decay"])),
            optax.sgd(float(want["lr"]), float(want["momentum"])),
        )
        state = jax.jit(sgd.init)(params)

        @jax.jit
        def move(params, state):
            of = jax.grad(total_loss, has_aux=True)
            gradient, losses = of(params, inputs, labels, *frozen)
            update, state = sgd.update(gradient, state, params)
            return gradient, losses, optax.apply_updates(params, update), state

        for step in range(3):
            gradient, losses, params, state = move(params, state)
            expected = want["losses_total_cos_con_bce"][step]
            assert_allclose(losses[1:3], expected[1:3], rtol=relative)
            assert_allclose(losses[3], expected[3], rtol=relative, atol=5e-10)
            assert_allclose(losses[0], expected[0], rtol=relative, atol=5e-9)
            if step == 0:
                assert_params(gradient, "grad0")
            assert_params(params, f"step{step + 1}")
