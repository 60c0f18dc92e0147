"""FedAvg, and every method that differs from it only in what stays with the client.

McMahan et al. 2017, arXiv:1602.05629, algorithm 1. `personal` names the leaves that are
neither sent nor averaged: the classifier gives FedPer, the batch norms FedBN, nothing
FedAvg, everything local training. `server_optimizer` on the negated mean change gives
the FedOpt family (Reddi et al. 2021, arXiv:2003.00295); running statistics are
averaged plainly whatever the optimizer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.aggregators import weighted_mean
from fedfr_jax.types import Algorithm, ClientOutput, PyTree


class Server(NamedTuple):
    """Global variables, and the server optimizer's state over the parameters."""

    variables: PyTree
    opt_state: PyTree


def by_examples(client) -> jax.Array:
    """Aggregation weight n_k: the client's own examples."""
    return client.num_local.astype(jnp.float32)


def fedavg(
    train: Callable,
    *,
    personal: str = "",
    server_optimizer: optax.GradientTransformation | None = None,
    weigh: Callable = by_examples,
) -> Algorithm:
    """Federated averaging of the leaves that are not personal.

    Args:
      train: `local_sgd(...)`.
      personal: regular expression over leaf paths such as `params/head`; "" for none.
      server_optimizer: acts on minus the mean change; None adds the change.
      weigh: client -> weight [].

    Raises:
      ValueError: when `personal` matches no leaf.
    """

    def mask(variables):
        if not personal:
            return jax.tree.map(lambda _: False, variables)
        return trees.matching(personal)(variables)

    def split(variables, own):
        """The personal (own=True) or the shared leaves; None stands for the others."""
        return jax.tree.map(
            lambda is_own, x: x if is_own == own else None, mask(variables), variables
        )

    def merge(variables, rows):
        return jax.tree.map(
            lambda is_own, x, row: row if is_own else x,
            mask(variables),
            variables,
            rows,
        )

    def init(variables):
        optimizer = server_optimizer or optax.identity()
        return Server(variables, optimizer.init(split(variables, False)["params"]))

    def init_personal(key, server):
        del key
        return split(server.variables, True)

    def client_update(key, server, rows, client):
        start = merge(server.variables, rows)
        end, metrics = train(key, start, client)
        change = jax.tree.map(jnp.subtract, split(end, False), split(start, False))
        return ClientOutput(change, weigh(client), split(end, True), metrics)

    def server_update(server, result):
        change, opt_state = result.aggregate, server.opt_state
        if server_optimizer:
            descent = jax.tree.map(jnp.negative, change["params"])
            params = split(server.variables, False)["params"]
            step, opt_state = server_optimizer.update(descent, opt_state, params)
            change = {**change, "params": step}
        variables = jax.tree.map(
            lambda is_own, x, d: x if is_own else (x + d.astype(x.dtype)),
            mask(server.variables),
            server.variables,
            change,
        )
        return Server(variables, opt_state)

    def personalize(server, rows):
        return merge(server.variables, rows)

    return Algorithm(
        init=init,
        init_personal=init_personal,
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=personalize,
    )
