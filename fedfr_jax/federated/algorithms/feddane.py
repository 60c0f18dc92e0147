"""FedDANE: local gradients corrected by the cohort's mean gradient, and held near.

Li et al. 2019, arXiv:2001.01920, algorithm 2: clients minimize F_k(y) + <g - grad
F_k(w), y> + mu / 2 ||y - w||^2 with g the mean of the cohort's gradients at w.
Deviations: both phases see the same clients and g is weighted by examples, as in the
authors' code; g comes from one pass over all of the cohort's examples. It is a sum over
devices before the round: its last bits depend on their number, whatever `reduction`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import corrected, proximal
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.local import local_training
from fedfr_jax.federated.means import build_mean, over_examples
from fedfr_jax.federated.model_axis import whole
from fedfr_jax.objective import with_aux
from fedfr_jax.types import Algorithm, Extra, Local, PyTree, RoundContext


def feddane(
    local: Local, *, strength: float, weigh: str | Callable = "examples"
) -> Algorithm:
    """Federated Newton-type averaging.

    Args:
      local: with a loss that is a mean over the batch's valid examples.
      strength: mu >= 0.
      weigh: see `fedavg`.
    """
    fit = local_training(corrected(proximal(local, strength)))
    loss_fn = with_aux(local.loss)

    def gradient(variables, batch, key):
        """Of the shared parameters, a client's own ones held fixed."""

        def loss(params):
            network = collections.merged({**variables, "params": params})
            return loss_fn(whole(network), batch, key)[0]

        return jax.grad(loss)(variables["params"])

    def train(key, variables, client):
        own = over_examples(lambda batch: gradient(variables, batch, key), client)
        correction = jax.tree.map(jnp.subtract, client.tables, own)
        anchor = variables["params"]
        return fit(key, variables, client, anchor=anchor, correction=correction)

    # Compiled once for each feed and mesh.
    mean_gradient = functools.cache(functools.partial(build_mean, gradient))

    def prepare(server: PyTree, context: RoundContext) -> Extra:
        cohort, run = context.cohort, mean_gradient(context.feed, context.mesh)
        mean = run(server.variables, context.dataset, context.population, cohort)
        return no_extra(len(cohort.ids))._replace(tables=mean)

    return fedavg(train, weigh=weigh)._replace(prepare=prepare)
