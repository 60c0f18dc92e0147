"""The segmenter: what its decoder is given, and bilinear enlargement by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS

SHAPE = (37, 50, 3)  # no multiple of the encoder's strides
ENCODER = {"name": "resnet", "blocks": (1, 1, 1), "widths": (4, 6, 8)}


def model_of(**settings):
    given = {"num_classes": 5, "encoder": ENCODER, "width": 4, **settings}
    return MODELS["segmenter"](SHAPE, **given)


@pytest.mark.parametrize("stem, last", [("imagenet", (3, 4)), ("cifar", (10, 13))])
def test_features_are_the_last_map_and_logits_are_of_pixels(stem, last):
    model = model_of(encoder={**ENCODER, "stem": stem}, norm="group", norm_groups=2)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    assert not variables["batch_stats"]
    images = jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32)
    logits, features, _ = jax.eval_shape(model.apply_with_features, variables, images)
    assert logits.shape == (2, 37, 50, 5) and features.shape == (2, *last, 8)
    assert variables["params"]["up2"]["conv"]["kernel"].shape == (3, 3, 8 + 6, 4)
    assert variables["params"]["up1"]["conv"]["kernel"].shape == (3, 3, 4 + 4, 4)


MOBILE = {"name": "mobilenet", "num_blocks": 8, "width": 0.1}


@pytest.mark.ci
@pytest.mark.parametrize(
    "encoder",
    [ENCODER, pytest.param(MOBILE, marks=pytest.mark.slow)],
    ids=lambda x: x["name"],
)
def test_the_encoder_is_the_trunk_of_the_network_for_classification(encoder):
    segmenter = model_of(encoder=encoder)
    given = {"num_classes": 5, "stem": "imagenet", **encoder}
    classifier = MODELS[given.pop("name")](SHAPE, **given)
    given = jax.jit(segmenter.init)(jax.random.key(0))
    own = jax.jit(classifier.init)(jax.random.key(1))
    below = {
        kind: {key: given[kind].get(key, leaf) for key, leaf in own[kind].items()}
        for kind in own
    }
    x = jax.random.normal(jax.random.key(2), (2, *SHAPE))
    _, maps, _ = jax.jit(segmenter.apply_with_features)(given, x)
    _, pooled, _ = jax.jit(classifier.apply_with_features)(below, x)
    np.testing.assert_allclose(maps.mean((1, 2)), pooled, rtol=1e-5, atol=1e-6)
