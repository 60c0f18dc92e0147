"""A pass of SGD towards given features of shared images; see `kd` for its source."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.shared_images import Shared
from fedfr_jax.stacks import laid_out
from fedfr_jax.types import Model, PyTree


def feature_distance(student: jax.Array, target: jax.Array, is_valid: jax.Array):
    """Mean square [] of student - target [b, D] over the rows that count [b]."""
    squares = jnp.square(student - target).mean(axis=1)
    count = jnp.maximum(is_valid.sum(), 1).astype(squares.dtype)
    return jnp.where(is_valid, squares, 0).sum() / count


def distilling(
    model: Model, shared: Shared, optimizer: optax.GradientTransformation
) -> Callable:
    """How a network learns the targets of a round's batches, in training mode.

    Returns:
      learn(variables, images [G, H, W, C], targets [S, b, D], round) -> variables, of
      which leaves that stay with clients may be missing.
    """

    def loss_of(params, stats, images, target, round, step):
        x, is_valid = shared.batch(images, round, step)
        key = jax.random.fold_in(jax.random.key(shared.seed + 1), round)
        network = completed(model, {"params": params, "batch_stats": stats})
        step_key = jax.random.fold_in(key, step)
        _, found, moved = model.features(network, x, True, key=step_key)
        value = feature_distance(found, target, is_valid)
        return value, collections.like(stats, moved)

    gradient = jax.grad(loss_of, has_aux=True)

    def learn(variables: PyTree, images, targets, round) -> PyTree:
        def body(step, carry):
            params, stats, opt_state = carry
            given = images, targets[step], round, step
            grads, stats = gradient(params, stats, *given)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), stats, opt_state

        whole = collections.merged(variables)
        params = whole["params"]
        first = params, whole["batch_stats"], optimizer.init(params)
        params, stats, _ = jax.lax.fori_loop(0, shared.num_batches, body, first)
        learnt = {**whole, "params": params, "batch_stats": stats}
        return collections.cut(learnt, variables)

    return learn


def completed(model: Model, variables: PyTree) -> PyTree:
    """Variables whose missing leaves are 0: those of the last layer, for features."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return {
        name: collections.join(part, laid_out(zeros[name], part))
        for name, part in variables.items()
    }
