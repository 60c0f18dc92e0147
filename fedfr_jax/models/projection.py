"""A projection between a network's features and its classifier, as MOON has it.

Li, He, Song 2021, arXiv:2103.16257, section 3.2: two linear layers with a ReLU between
them; their output is what the contrastive term compares and what the classifier sees.
Linear layers start as PyTorch's do.

Parameters, beside those of the network, whose last block is the classifier:
projection/hidden/kernel [D, D], bias [D], projection/out/kernel [D, P], bias [P]; the
classifier's kernel is [P, M].
"""

import math

import jax
import jax.numpy as jnp

from fedfr_jax.types import Model

NAME = "projection"


def with_projection(model: Model, *, projection: int) -> Model:
    """`model`, a classifier with features, behind a projection to so many numbers, P.

    Raises:
      ValueError: for a projection below 1, or a network without features of its own.
    """
    top = model.blocks[-1] if model.blocks else ""
    shapes = jax.eval_shape(model.init, jax.random.key(0))["params"]
    if projection < 1:
        raise ValueError(f"projection must be at least 1, got {projection}.")
    if model.features is None or "kernel" not in shapes.get(top, {}):
        raise ValueError(
            "projection must go with a classifier with features, got none."
        )
    dim, num_classes = shapes[top]["kernel"].shape

    def init(key):
        first, *keys = jax.random.split(key, 4)
        variables = model.init(first)
        sizes = ((dim, dim), (dim, projection), (projection, num_classes))
        hidden, out, head = map(linear, keys, sizes)
        added = {NAME: {"hidden": hidden, "out": out}, top: head}
        return {**variables, "params": {**variables["params"], **added}}

    def features(variables, x, train=False, key=None):
        params = dict(variables["params"])
        added, head = params.pop(NAME), params.pop(top)
        # The network's own classifier is not looked at, and so not computed.
        unused = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[top])
        inner = {**variables, "params": {**params, top: unused}}
        _, seen, stats = model.features(inner, x, train, key=key)
        hidden = jax.nn.relu(through(added["hidden"], seen))
        projected = through(added["out"], hidden)
        return through(head, projected), projected, stats

    def apply(variables, x, train=False, key=None):
        logits, _, stats = features(variables, x, train, key)
        return logits, stats

    blocks = (*model.blocks[:-1], NAME, top)
    return model._replace(
        init=init, apply=apply, features=features, blocks=blocks, fold=None
    )


def linear(key: jax.Array, size: tuple[int, int]) -> dict[str, jax.Array]:
    """Kernel [I, O] and bias [O], uniform within 1 / sqrt(I)."""
    draw = lambda key, shape: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
    kernel_key, bias_key = jax.random.split(key)
    bound = 1 / math.sqrt(size[0])
    kernel, bias = draw(kernel_key, size), draw(bias_key, size[1:])
    return {"kernel": bound * kernel, "bias": bound * bias}


def through(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A linear layer of x [B, I], [B, O]."""
    return x @ layer["kernel"] + layer["bias"][None]
