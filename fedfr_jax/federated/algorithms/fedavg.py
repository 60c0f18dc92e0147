"""FedAvg, with any local training and server optimizer.

McMahan et al. 2017, arXiv:1602.05629, algorithm 1. `server_optimizer` on the negated
mean change gives the FedOpt family (Reddi et al. 2021, arXiv:2003.00295); running
statistics are averaged plainly whatever the optimizer. What stays with the clients is
said around it: see `personal`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of, weighted_mean
from fedfr_jax.federated.algorithms.server_optimizers import ServerOptimizer
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.optimizer_keys import with_raw_keys
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


class Server(NamedTuple):
    """Global variables, and the server optimizer's state."""

    variables: PyTree
    opt_state: PyTree


@checked
def fedavg(
    local: LocalTraining,
    *,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Federated averaging.

    Args:
      local: a client's training, or a function like what `build_local_training` gives.
      server_optimizer: acts on minus the mean change; None adds the change. In Python
        any of optax's: `optax.sgd(rate or schedule, momentum=0.9)` is FedAvgM. In a
        config {"name": ..., settings}, see `fedfr describe server_optimizers`.
      weighting: num_examples, uniform, or client -> weight [].
    """
    train, weight = build_local_training(local), weight_of(weighting)
    optimizer = with_raw_keys(server_optimizer or optax.identity())

    def init(variables):
        return Server(variables, optimizer.init(variables["params"]))

    def client_update(key, server, personal, client):
        end, metrics = train(key, server.variables, client)
        return client_output(server.variables, end, weight(client), personal, metrics)

    def server_update(server, result):
        change, opt_state = result.aggregate, server.opt_state
        if server_optimizer:
            descent = jax.tree.map(jnp.negative, change["params"])
            params = server.variables["params"]
            step, opt_state = optimizer.update(descent, opt_state, params)
            change = {**change, "params": step}
        return Server(trees.add(server.variables, change), opt_state)

    return Algorithm(
        init=init,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=lambda server, personal: server.variables,
        global_model=lambda server: server.variables,
    )
