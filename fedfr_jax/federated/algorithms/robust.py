"""Robust aggregation: something that faulty clients cannot move in place of the mean.

What `combining.py` has is no sum over clients, so every client's change is kept: K
models of memory. Clients count equally, but for a geometric median that is told to
weigh them. For what streams see `weiszfeld.py` and `clipping.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.aggregators import dropping, from_all
from fedfr_jax.federated.algorithms.combining import median
from fedfr_jax.federated.algorithms.distances import masked
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.types import Algorithm, Local


def robust(local: Local, *, combine: Callable | None = None) -> Algorithm:
    """FedAvg with its mean of the clients' changes replaced.

    Args:
      combine: (changes, a tree of [K, ...], examples [K]) -> tree of [...], such as one
        that a member of COMBINES makes, whatever the tree; None is the median. Params
        and running statistics are combined each for themselves. The change of a client
        that has nan or infinity anywhere is nan in both, see `dropping`.

    Raises:
      ValueError: by `check_cohort`, for fewer clients than `combine` works with.
    """
    combined = combine or median()

    def each(changes, examples):
        changes = masked(examples > 0, changes, jnp.nan)
        of = lambda x: combined(x, examples) if jax.tree.leaves(x) else x
        return {name: of(x) for name, x in changes.items()}

    def check_cohort(number):
        changes = {"change": jax.ShapeDtypeStruct((number, 1), jnp.float32)}
        examples = jax.ShapeDtypeStruct((number,), jnp.float32)
        jax.eval_shape(combined, changes, examples)

    return from_all(dropping(fedavg(local)), each)._replace(check_cohort=check_cohort)
