"""Gradients that algorithms ask for beside those of local steps."""

import functools
from collections.abc import Callable

import jax

from fedfr_jax.federated import collections
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.means import build_mean
from fedfr_jax.federated.model_axis import whole
from fedfr_jax.objective import with_aux
from fedfr_jax.types import Broadcast, Extra, Local, PyTree, RoundContext


def shared_gradient(local: Local) -> Callable:
    """Gradient of a client's loss by what it shares, its own leaves held fixed.

    Returns:
      gradient(variables, batch, key) -> tree like the shared params.
    """
    loss_fn = with_aux(local.loss)

    def gradient(variables, batch, key):
        def loss(params):
            network = collections.merged({**variables, "params": params})
            return loss_fn(whole(network), batch, key)[0]

        return jax.grad(loss)(variables["params"])

    return gradient


def prepare_gradient(local: Local) -> Callable:
    """`Algorithm.prepare` that broadcasts the mean gradient of a cohort's examples.

    Of a server with `variables`, whose shared leaves it is taken by.
    """
    # Compiled once for each feed and mesh.
    build = functools.cache(functools.partial(build_mean, shared_gradient(local)))

    def prepare(server: PyTree, context: RoundContext) -> Extra:
        cohort, run = context.cohort, build(context.feed, context.mesh)
        mean = run(server.variables, context.dataset, context.population, cohort)
        return no_extra(len(cohort.ids))._replace(tables=Broadcast(mean))

    return prepare
