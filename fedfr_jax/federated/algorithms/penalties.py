"""Terms that methods add to a client's loss: proximal terms, gradient corrections.

All wrap a client's training and take their tree as a keyword of the loss. Leaves that
stay with a client, which the tree lacks, are neither pulled nor pushed. A push is in
the gradient alone: the loss that is reported stays that of the examples.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.dataset_means import build_dataset_mean
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.model_parallel import unshard
from fedfr_jax.types import (
    LocalTraining,
    Prepared,
    PyTree,
    RoundContext,
    as_aux_loss,
)


def cohort_gradient(local: LocalTraining) -> Callable:
    """Build the gradient of a client's loss with respect to its shared parameters.

    Returns:
      gradient(variables, batch, key) -> tree like the shared params.
    """
    loss_fn = as_aux_loss(local.loss)

    def gradient(variables, batch, key):
        def loss(params):
            network = variable_split.merge_personal_variables(
                {**variables, "params": params}
            )
            return loss_fn(unshard(network), batch, key)[0]

        return jax.grad(loss)(variables["params"])

    return gradient


def prepare_gradient(local: LocalTraining) -> Callable:
    """Build an `Algorithm.prepare` that broadcasts the cohort's mean gradient.

    Of a server with `variables`, whose shared leaves it is taken by.
    """
    # Compiled once for each feed and mesh.
    build = functools.cache(
        functools.partial(build_dataset_mean, cohort_gradient(local))
    )

    def prepare(server: PyTree, context: RoundContext) -> Prepared:
        cohort, run = context.cohort, build(context.batching, context.mesh)
        mean = run(server.variables, context.dataset, context.population, cohort)
        return empty_prepared(len(cohort.ids))._replace(shared=mean)

    return prepare


def proximal(local: LocalTraining, strength: float) -> LocalTraining:
    """Add strength / 2 ||params - anchor||^2 to the loss; `anchor`: shared params.

    `pull` [], another keyword of the loss, is a client's own factor of the strength.

    The gradient gains `strength * (params - anchor)`: FedProx, arXiv:1812.06127,
    equation 2; Ditto and pFedMe pull a personal model alike.
    """
    loss_fn = as_aux_loss(local.loss)

    def loss_near(variables, batch, key, *, anchor, pull=1.0, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = variable_split.select_like(anchor, variables["params"])
        apart = jax.tree.map(jnp.subtract, params, anchor)
        distance = jnp.asarray(optax.tree.norm(apart, squared=True))
        penalty = 0.5 * strength * pull * distance.astype(loss.dtype)
        return loss + penalty, aux

    return local._replace(loss=loss_near)


def with_correction(local: LocalTraining) -> LocalTraining:
    """Add <correction, params> to the loss, whose gradient is the correction.

    SCAFFOLD's `c - c_k`, FedDANE's `mean gradient - own gradient`.
    """
    loss_fn = as_aux_loss(local.loss)

    def loss_plus(variables, batch, key, *, correction, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = variable_split.select_like(correction, variables["params"])
        return loss + _with_drift(correction, params).astype(loss.dtype), aux

    return local._replace(loss=loss_plus)


def minus_anchor(local: LocalTraining) -> LocalTraining:
    """Subtract the batch's gradient at `anchor`: Mime's variance reduction.

    `anchor` is like the shared params. The gradient is of the same batch under the same
    key, and held fixed.
    """
    loss_fn, gradient = as_aux_loss(local.loss), cohort_gradient(local)

    def loss_less(variables, batch, key, *, anchor, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        personal = variable_split.drop_like(anchor, variables["params"])
        start = {**variables, "params": variable_split.join(anchor, personal)}
        at_anchor = jax.lax.stop_gradient(gradient(start, batch, key))
        at_anchor = variable_split.select_like(anchor, at_anchor)
        params = variable_split.select_like(anchor, variables["params"])
        return loss - _with_drift(at_anchor, params).astype(loss.dtype), aux

    return local._replace(loss=loss_less)


def _with_drift(direction, params) -> jax.Array:
    """Return 0 with gradient `direction` with respect to `params`."""
    product = jnp.asarray(optax.tree.vdot(direction, params))
    return product - jax.lax.stop_gradient(product)
