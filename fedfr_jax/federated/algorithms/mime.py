"""Mime and MimeLite: clients step with the server's momentum.

Karimireddy et al. 2020, arXiv:2008.03606, algorithm 1 with heavy-ball momentum:
y <- y - eta (g + b m), and after the round m <- G + b m with G = sum p_k grad F_k(w).
MimeLite takes g = grad F(y; B), Mime g = grad F(y; B) - grad F(w; B) + G. The momentum
is not normalized, as in fedjax; the paper's has (1 - b) g + b m. Deviations: running
statistics are averaged plainly; Mime's G comes from a pass over the cohort's examples
before the round, whose sums depend on the number of devices.
"""

from typing import NamedTuple

import jax
import optax

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import (
    cohort_gradient,
    minus_anchor,
    prepare_gradient,
    with_correction,
)
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import BelowOne, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


class Server(NamedTuple):
    """Global variables and the momentum m of their params."""

    variables: PyTree
    momentum: PyTree


@checked
def mimelite(
    local: LocalTraining,
    *,
    server_momentum: BelowOne = 0.9,
    server_learning_rate: NonNegative = 1.0,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """MimeLite: local steps with the server's momentum.

    Args:
      local: plain SGD, with a loss that is a mean over the batch's valid examples.
      server_momentum: b in [0, 1).
      server_learning_rate: eta_s >= 0, on params.
      weighting: see `fedavg`.
    """
    train = build_local_training(with_correction(local))

    def push(key, server, client):
        correction = optax.tree.scale(server_momentum, server.momentum)
        return train(key, server.variables, client, correction=correction)

    return frozen_momentum(
        push, local, server_momentum, server_learning_rate, weighting
    )


def frozen_momentum(
    push, local, momentum, server_learning_rate, weighting
) -> Algorithm:
    """Build Mime or MimeLite; `push(key, server, client)` trains a client."""
    gradient, weight = cohort_gradient(local), weight_of(weighting)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = push(key, server, client)

        def batch_gradient(batch):
            return gradient(start, batch, key)

        client_gradient = over_examples(batch_gradient, client)
        output = variable_split.client_output(
            start, end, weight(client), personal, metrics
        )
        return output._replace(update=(output.update, client_gradient))

    def server_update(server, result):
        change, mean = result.aggregate
        params = optax.tree.scale(server_learning_rate, change["params"])
        move = lambda m, g: g.astype(m.dtype) + momentum * m
        variables = trees.add(server.variables, {**change, "params": params})
        return Server(variables, jax.tree.map(move, server.momentum, mean))

    return fedavg(local)._replace(
        init=lambda x: Server(x, optax.tree.zeros_like(x["params"])),
        client_update=client_update,
        server_update=server_update,
        update_like=lambda server: (
            variable_split.shared(server.variables),
            server.momentum,
        ),
    )


@checked
def mime(
    local: LocalTraining,
    *,
    server_momentum: BelowOne = 0.9,
    server_learning_rate: NonNegative = 1.0,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Mime: MimeLite with gradients corrected to the cohort's, same arguments."""
    train = build_local_training(with_correction(minus_anchor(local)))

    def push(key, server, client):
        mean, start = client.shared, server.variables
        add = lambda g, m: g + server_momentum * m.astype(g.dtype)
        correction = jax.tree.map(add, mean, server.momentum)
        fixed = {"correction": correction, "anchor": start["params"]}
        return train(key, start, client, **fixed)

    algorithm = frozen_momentum(
        push, local, server_momentum, server_learning_rate, weighting
    )
    return algorithm._replace(
        prepare=prepare_gradient(local), needs=("server_classifier",)
    )
