"""MimeLite: clients step with the server's momentum, frozen for a round.

Karimireddy et al. 2020, arXiv:2008.03606, algorithm 1 with heavy-ball momentum:
y <- y - eta (g + b m), and after the round m <- G + b m with G = sum p_k grad F_k(w).
MimeLite takes g = grad F(y; B); mime.py corrects it. The momentum is not normalised, as
in fedjax; the paper's has (1 - b) g + b m. Deviation: running statistics are averaged
plainly.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated import collections
from fedfr_jax.federated.aggregation.mean import weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.gradients import shared_gradient
from fedfr_jax.federated.algorithms.penalties import corrected
from fedfr_jax.federated.local import local_training
from fedfr_jax.federated.means import over_examples
from fedfr_jax.schema import BELOW_ONE, check_ranges
from fedfr_jax.types import Algorithm, ClientOutput, Local, PyTree


class Server(NamedTuple):
    """Global variables and the momentum m, which is like their params."""

    variables: PyTree
    momentum: PyTree


def mimelite(
    local: Local,
    *,
    server_momentum: float = 0.9,
    server_rate: float = 1.0,
    weigh: str | Callable = "examples",
) -> Algorithm:
    """MimeLite: local steps with the server's momentum.

    Args:
      local: plain SGD, with a loss that is a mean over the batch's valid examples.
      server_momentum: b in [0, 1).
      server_rate: eta_s >= 0, on params.
      weigh: see `fedavg`.

    Raises:
      ValueError: when a number is out of its range.
    """
    train = local_training(corrected(local))

    def push(key, server, client):
        correction = optax.tree.scale(server_momentum, server.momentum)
        return train(key, server.variables, client, correction=correction)

    return frozen_momentum(push, local, server_momentum, server_rate, weigh)


def frozen_momentum(push, local, momentum, server_rate, weigh) -> Algorithm:
    """Of Mime too: `push(key, server, client)` trains, the server moves m."""
    values = {"server_momentum": momentum, "server_rate": server_rate}
    bounds = {"server_momentum": BELOW_ONE, "server_rate": (0, jnp.inf)}
    check_ranges("", values, bounds)
    gradient, weight = shared_gradient(local), weight_of(weigh)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = push(key, server, client)
        own = over_examples(lambda batch: gradient(start, batch, key), client)
        update, leaves = (collections.change(end, start), own), collections.own(end)
        return ClientOutput(update, weight(client), personal, metrics, local=leaves)

    def server_update(server, result):
        change, mean = result.aggregate
        change = {**change, "params": optax.tree.scale(server_rate, change["params"])}
        move = lambda m, g: g.astype(m.dtype) + momentum * m
        variables = trees.added(server.variables, change)
        return Server(variables, jax.tree.map(move, server.momentum, mean))

    return fedavg(local)._replace(
        init=lambda x: Server(x, optax.tree.zeros_like(x["params"])),
        client_update=client_update,
        server_update=server_update,
        update_like=lambda server: (
            collections.shared(server.variables),
            server.momentum,
        ),
    )
