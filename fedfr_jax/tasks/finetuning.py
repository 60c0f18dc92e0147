"""Fine-tuning of every client's model on its own examples.

It is a round of the engine without aggregation, so that clients are scheduled over
devices and lanes, and streamed, as in any other round.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.simulation import (
    Simulation,
    open_store,
    run_cohort,
    start_simulation,
)
from fedfr_jax.types import (
    Algorithm,
    ClientOutput,
    Cohort,
    LocalTraining,
    TrainedModels,
)


def build_finetuning(local: LocalTraining, trainable_pattern: str = "") -> Algorithm:
    """Build an algorithm whose personal state is a client's fine-tuned model.

    Args:
      trainable_pattern: regular expression of the leaves that are trained, "" for all.
    """
    train = build_local_training(local, trainable_pattern)

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


def finetune_clients(sim: Simulation, networks: TrainedModels) -> TrainedModels:
    """Fine-tune `networks` in one round of a simulation of `build_finetuning`.

    All of them are kept on disk, in a temporary folder.
    """
    num_clients = sim.population.num_clients
    client_variables = networks.client_variables
    first = networks.variables if client_variables is None else client_variables(0)
    server = start_simulation(sim, first)
    store = open_store(sim, server)
    if client_variables is not None:
        for client in range(num_clients):
            row = meshes.fetch(client_variables(client))
            row = jax.tree.map(lambda x: np.asarray(x)[None], row)
            store.scatter(np.array([client]), row, 0)
    # All clients, whatever the round: its number only names what they draw.
    server, _ = run_cohort(sim, server, store, Cohort(np.arange(num_clients), 1))

    def finetuned(client):
        rows, _ = store.gather(np.array([client]))
        row = jax.tree.map(lambda x: x[0], rows)
        return meshes.put_global(row, meshes.replicated(sim.mesh))

    return networks._replace(variables=None, client_variables=finetuned)
