"""SCAFFOLD: control variates against client drift.

Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1 with option II. The correction
`c - c_k` enters as a linear term of the loss. Deviations: under a learning rate that
changes within a round, tau_k eta is the sum of the rates; running statistics are
averaged plainly, whatever the server's rate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import uniform
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import with_correction
from fedfr_jax.federated.local import build_local_training, total_rate
from fedfr_jax.federated.rates import check_rate
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


class Server(NamedTuple):
    """Global variables and the mean control variate."""

    variables: PyTree
    control: PyTree


@checked
def scaffold(
    local: LocalTraining, *, num_clients: Count, server_learning_rate: NonNegative = 1.0
) -> Algorithm:
    """Stochastic controlled averaging; clients have equal weight.

    Args:
      local: plain SGD, which the method is defined for: momentum would make the control
        more than the mean gradient.
      num_clients: N >= 1; the server's control moves by K / N of the mean gain.
      server_learning_rate: eta_g >= 0, on params.
    """
    check_rate(local)
    train = build_local_training(with_correction(local))
    subtract = lambda x, y: jax.tree.map(jnp.subtract, x, y)

    def init(variables):
        return Server(variables, optax.tree.zeros_like(variables["params"]))

    def init_personal(key, server):
        del key
        return optax.tree.zeros_like(server.control)

    def client_update(key, server, control, client):
        correction = subtract(server.control, control)
        end, metrics = train(key, server.variables, client, correction=correction)
        output = variable_split.client_output(
            server.variables, end, uniform(client), control, metrics
        )
        change, travel = output.update, total_rate(local, client)

        def gain_of(moved, mean_control):  # c_k+ - c_k; none for who took no step
            gradient = -moved / jnp.where(travel > 0, travel, 1).astype(moved.dtype)
            return jnp.where(travel > 0, gradient - mean_control, 0)

        gain = jax.tree.map(gain_of, change["params"], server.control)
        new_control = jax.tree.map(jnp.add, control, gain)
        return output._replace(update=(change, gain), personal=new_control)

    def server_update(server, result):
        change, gain = result.aggregate
        params = optax.tree.scale(server_learning_rate, change["params"])
        variables = trees.add(server.variables, {**change, "params": params})
        share = result.num_received / num_clients
        move = lambda c, g: c + share * g.astype(c.dtype)
        return Server(variables, jax.tree.map(move, server.control, gain))

    return fedavg(local)._replace(
        init=init,
        init_personal=init_personal,
        client_update=client_update,
        server_update=server_update,
        update_like=lambda server: (
            variable_split.shared(server.variables),
            server.control,
        ),
        built_for=(("scaffold", num_clients),),
    )
