"""Unlearning by subtraction: remove what clients have sent, then train without them.

The first step of Wu, Zhu and Mitra 2022 (arXiv:2201.09441): from the last global model
the clients' weighted updates of all rounds are subtracted. They repair it by
distillation; here rounds without the clients do, as in FedEraser (Liu et al. 2021,
IWQoS, section III). The updates need no storage: the run is trained again, with the
same numbers, and they are added up where they are computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import on_inner, zero_update
from fedfr_jax.federated.aggregation.mean import weighted
from fedfr_jax.federated.rounds import train_calls
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.state import Simulation
from fedfr_jax.types import MEAN, Algorithm, PyTree


class Recorded(NamedTuple):
    """A server, and the sum over rounds of weighted updates of some clients."""

    inner: PyTree
    clients: jax.Array  # [N] bool, those that are recorded: numbers, so that one
    # program serves all clients
    moved: PyTree  # like a client's update, sum of w_k / W times the update
    total: PyTree  # the same of all clients


def recording(algorithm: Algorithm, num_clients: int) -> Algorithm:
    """Record in the server what its `clients` have moved the mean by."""

    def init(variables):
        server = algorithm.init(variables)
        nothing = zero_update(algorithm, server)
        return Recorded(server, jnp.zeros(num_clients, bool), nothing, nothing)

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server.inner, personal, client)
        every = weighted(output.update, output.weight)
        nothing = jax.tree.map(jnp.zeros_like, every)
        sent = trees.where(server.clients[client.id], every, nothing)
        return output._replace(sums=(output.sums, sent, every, output.weight))

    def server_update(server, result):
        sums, sent, every, weight = result.sums
        return server._replace(
            inner=algorithm.server_update(server.inner, result._replace(sums=sums)),
            moved=trees.add(server.moved, trees.divide(sent, weight)),
            total=trees.add(server.total, trees.divide(every, weight)),
        )

    return on_inner(algorithm)._replace(
        init=init, client_update=client_update, server_update=server_update
    )


class Subtraction:
    """The first rounds of a run, trained again to subtract what clients have sent."""

    def __init__(self, sim: Simulation, variables: PyTree, num_rounds: int):
        """Keep the run and its global model's first `variables`; trains nothing yet.

        Raises:
          ValueError: for clients that send more than one plain change of the model.
        """
        check_unlearning(sim, variables)
        self._sim, self._variables, self._num_rounds = sim, variables, num_rounds
        self.recorder = build_simulation(
            recording(sim.inner_algorithm, sim.population.num_clients),
            sim.batching,
            sim.device_data,
            sim.population,
            sim.settings,
            mesh=sim.mesh,
        )

    def check(self) -> None:
        """Raise ValueError for a server that does not add the plain mean.

        Two rounds are enough: momentum shows in the second.
        """
        self._train(np.zeros(0, np.int64), min(self._num_rounds, 2))

    def without(self, ids: np.ndarray) -> PyTree:
        """Train the rounds, subtract the updates of the clients `ids` [n]: a server.

        Raises:
          ValueError: for a server that is more than a mean of clients' updates.
        """
        return self._train(ids, self._num_rounds)

    def _train(self, ids: np.ndarray, num_rounds: int) -> PyTree:
        start = start_simulation(self.recorder, self._variables)
        server, ends = start._replace(clients=start.clients.at[ids].set(True)), []
        calls = [(first, first + 1) for first in range(num_rounds)]
        keep = lambda call: ends.__setitem__(slice(None), [call.servers])
        stores = [open_store(self.recorder, server)]
        train_calls(self.recorder.runs, server, stores, calls, keep)
        (end,) = ends
        algorithm, sim = self._sim.inner_algorithm, self._sim
        whole = algorithm.global_model(end.inner)
        check_plain(algorithm, start_simulation(sim, self._variables), whole, end.total)
        return start_simulation(sim, jax.tree.map(jnp.subtract, whole, end.moved))


def check_plain(
    algorithm: Algorithm, start: PyTree, end: PyTree, total: PyTree
) -> None:
    """Raise ValueError for a server that moved by more or less than clients' means.

    Args:
      start: server before the first round.
      end: global model after the last.
      total: sum of the rounds' means of updates.
    """
    expected = trees.add(algorithm.global_model(start), total)
    gap = trees.norm(jax.tree.map(jnp.subtract, end, expected))
    if not gap <= 1e-3 * trees.norm(total) + 1e-6 * trees.norm(end):
        raise ValueError(
            "unlearning by subtraction needs a server that adds the mean of updates as "
            f"it is, got {algorithm}, which ends elsewhere: links change updates, or a "
            "server optimizer or rate changes the step. Use the exact replay alone."
        )


def check_unlearning(sim: Simulation, variables: PyTree) -> None:
    """Raise ValueError unless clients send one plain change of the global model."""
    if reason := why_not_plain(sim.inner_algorithm, variables):
        raise ValueError(
            "unlearning by subtraction needs clients that send one change of the "
            f"global model, for its mean, got {sim.inner_algorithm} with {reason}. Use "
            "the exact replay alone."
        )


def why_not_plain(algorithm: Algorithm, variables: PyTree) -> str:
    """Why updates are not plain changes of the global model, "" if they are."""
    server = jax.eval_shape(algorithm.init, variables)
    personal = jax.eval_shape(algorithm.init_personal, jax.random.key(0), server)
    aggregator = algorithm.aggregator
    if algorithm.privacy is not None:
        return "private updates"
    if jax.tree.leaves(personal):
        return "states of clients"
    if aggregator is None or not (aggregator.role == MEAN or aggregator.has_plain_mean):
        return "an aggregation without a plain mean"
    model = jax.eval_shape(algorithm.global_model, server)
    update = jax.eval_shape(lambda x: zero_update(algorithm, x), server)
    if jax.tree.structure(model) != jax.tree.structure(update):
        return "updates unlike the global model"
    return ""
