"""Every client's network after some epochs on its own training images, alone.

Played as a round of the engine in which nothing is aggregated, so that clients are
scheduled over devices and lanes, and streamed, like in any other.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.local import local_training
from fedfr_jax.federated.simulation import Simulation, open_store, play_cohort, start
from fedfr_jax.types import Algorithm, ClientOutput, Cohort, Local, Networks


def finetuning(local: Local, moves: str = "") -> Algorithm:
    """A client's row is its network; one that has none starts from the server's.

    Args:
      moves: regular expression of the leaves that are trained, "" for all.
    """
    train = local_training(local, moves)

    def client_update(key, server, row, client):
        del server
        end, metrics = train(key, row, client)
        return ClientOutput((), jnp.float32(1), end, metrics)

    return Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: server,
        client_update=client_update,
        aggregator=None,
        server_update=lambda server, result: server,
        personalize=lambda server, row: row,
    )


def finetuned(sim: Simulation, networks: Networks) -> Networks:
    """What `networks` become in one round of a simulation of `finetuning`.

    All of them are kept on disk, in a temporary folder.
    """
    num_clients, of_client = sim.population.num_clients, networks.of_client
    first = networks.variables if of_client is None else of_client(0)
    server = start(sim, first)
    store = open_store(sim, server)
    if of_client is not None:
        for client in range(num_clients):
            row = meshes.fetch(of_client(client))
            row = jax.tree.map(lambda x: np.asarray(x)[None], row)
            store.scatter(np.array([client]), row, 0)
    # All clients, whatever the round: its number only names what they draw.
    server, _ = play_cohort(sim, server, store, Cohort(np.arange(num_clients), 1))

    def after(client):
        rows, _ = store.gather(np.array([client]))
        row = jax.tree.map(lambda x: x[0], rows)
        return meshes.put(row, meshes.replicated(sim.mesh))

    return networks._replace(variables=None, of_client=after)
