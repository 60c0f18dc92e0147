"""FedDANE: local gradients corrected by the cohort's mean gradient, and held near.

Li et al. 2019, arXiv:2001.01920, algorithm 2: clients minimize F_k(y) + <g - grad
F_k(w), y> + mu / 2 ||y - w||^2 with g the mean of the cohort's gradients at w.
Deviations: both phases see the same clients and g is weighted by examples, as in the
authors' code; g comes from one pass over all of the cohort's examples.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax.federated.algorithms.fedavg import by_examples, fedavg
from fedfr_jax.federated.algorithms.local import local_sgd, over_examples
from fedfr_jax.federated.algorithms.penalties import corrected, proximal
from fedfr_jax.federated.client import Slots, client_view
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.hard_negatives import cohort_rows
from fedfr_jax.federated.stream import resident
from fedfr_jax.types import Algorithm, Client, Extra, PyTree


def feddane(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
    *,
    strength: float,
    weigh: Callable = by_examples,
) -> Algorithm:
    """Federated Newton-type averaging.

    Args:
      loss_fn, optimizer, learning_rate: see `local_sgd`; the loss is a mean over the
        batch's valid examples.
      strength: mu >= 0.
    """
    corrected_loss = corrected(proximal(loss_fn, strength))
    fit = local_sgd(corrected_loss, optimizer, learning_rate)

    def gradient(key, variables, client):
        def of_batch(batch):
            loss = lambda params: loss_fn({**variables, "params": params}, batch, key)
            return jax.grad(lambda params: loss(params)[0])(variables["params"])

        return over_examples(of_batch, client)

    def train(key, variables, client):
        own = gradient(key, variables, client)
        correction = jax.tree.map(jnp.subtract, client.tables, own)
        anchor = variables["params"]
        return fit(key, variables, client, anchor=anchor, correction=correction)

    compiled = {}

    def prepare(server: PyTree, sim, cohort) -> Extra:
        if not compiled:

            def mean(variables, *union):
                client = union_view(sim.feed, *union)
                return gradient(jax.random.key(client.round), variables, client)

            compiled["mean"] = jax.jit(mean)
        rows, _, counts = cohort_rows(sim.population, cohort.ids)
        mean = compiled["mean"](
            server.variables,
            rows.astype(np.int32),
            np.int32(counts.sum()),
            resident(sim.table, "feddane"),
            np.int32(cohort.round),
        )
        return no_extra(len(cohort.ids))._replace(tables=mean)

    return fedavg(train, weigh=weigh)._replace(prepare=prepare)


def union_view(feed, rows, count, table, round) -> Client:
    """One client that owns the first `count` [] of the table's `rows` [R]."""
    zero = jnp.int32(0)
    nothing = Slots(*[zero] * len(Slots._fields))
    slot = nothing._replace(offset=rows[0], num_extra=count)
    extra = Extra(tables=(), examples=rows[None], num_examples=count[None])
    return client_view(feed, 0, jax.random.key(0), slot, extra, table, round)
