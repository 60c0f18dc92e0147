"""Networks that tests make, and how they are counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.models import MODELS

TINY = {"widths": (6,), "blocks": (4,), "embedding_dim": 10}
SETTINGS = {
    "sphereface": TINY,
    "iresnet": TINY,
    "mobilefacenet": {"blocks": (3, 0, 0), "embedding_dim": 10},
    "vit": {"width": 8, "num_heads": 2, "depth": 4, "embedding_dim": 10},
    "vision_transformer": {
        **{"width": 8, "num_heads": 2, "depth": 4, "patch_size": 9},
        **{"registers": 2, "layer_scale": 0.5, "embedding_dim": 10},
    },
    "convnext": {"widths": (4, 6), "blocks": (1, 4), "num_classes": 10},
    "resnet": {"widths": (4, 6), "blocks": (1, 1), "num_classes": 10},
    "mobilenet": {"width": 0.1, "num_blocks": 8, "num_classes": 10},
    "reid": {
        **{"widths": (4, 6), "blocks": (1, 1), "depth": 18, "stem": "cifar"},
        **{"neck_dim": 5, "dropout": 0.0, "num_classes": 10},
    },
    "linear_base": {"width": 6, "side": 3, "num_classes": 10, "block": "mobilenet"},
    "segmenter": {
        "encoder": {"name": "resnet", "widths": (4, 6), "blocks": (1, 1)},
        "width": 4,
        "num_classes": 10,
    },
    "cnn": {"widths": (4, 6), "embedding_dim": 10},
    "mlp": {"hidden_dim": 10},
    "leaf_celeba": {"widths": (4, 6), "num_classes": 10},
    "leaf_femnist": {"widths": (4, 6), "hidden_dim": 12, "num_classes": 10},
    "logistic": {"num_classes": 10},
}
SHAPE = (30, 28, 3)


@functools.cache
def model_of(name, **settings):
    return MODELS[name](SHAPE, **SETTINGS[name] | settings)


@functools.cache
def variables_of(name, seed=0):
    return model_of(name).init(jax.random.key(seed))


def outputs_of(model, variables, x, train):
    return jax.jit(model.apply, static_argnums=2)(variables, x, train)


def images_of(num, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(-1, 1, (num, *SHAPE)).astype(np.float32))


@functools.cache
def count_of(model):
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))
