"""Mime: MimeLite, whose clients' gradients are corrected to the cohort's.

Karimireddy et al. 2020, arXiv:2008.03606, algorithm 1: a local step takes
grad F(y; B) - grad F(w; B) + G, see mimelite.py. Deviation: G comes from a pass over
the cohort's examples before the round, whose sums depend on the number of devices.
"""

from collections.abc import Callable

import jax

from fedfr_jax.federated.algorithms.gradients import prepare_gradient
from fedfr_jax.federated.algorithms.mimelite import frozen_momentum
from fedfr_jax.federated.algorithms.penalties import corrected, less_of_anchor
from fedfr_jax.federated.local import local_training
from fedfr_jax.types import Algorithm, Local


def mime(
    local: Local,
    *,
    server_momentum: float = 0.9,
    server_rate: float = 1.0,
    weigh: str | Callable = "examples",
) -> Algorithm:
    """Mime; arguments, ranges and errors are those of `mimelite`."""
    train = local_training(corrected(less_of_anchor(local)))

    def push(key, server, client):
        mean, start = client.tables.value, server.variables
        add = lambda g, m: g + server_momentum * m.astype(g.dtype)
        correction = jax.tree.map(add, mean, server.momentum)
        fixed = {"correction": correction, "anchor": start["params"]}
        return train(key, start, client, **fixed)

    algorithm = frozen_momentum(push, local, server_momentum, server_rate, weigh)
    return algorithm._replace(
        prepare=prepare_gradient(local), needs=("server_classifier",)
    )
