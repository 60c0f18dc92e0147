"""Leaves that training does not move, such as the head of FedBABU."""

from fedfr_jax import trees
from fedfr_jax.types import Local


def frozen(local: Local, pattern: str) -> Local:
    """`local` whose steps leave the params that `pattern` finds where they are.

    Args:
      local: its optimizer is a function of the rate.
      pattern: regular expression over leaf paths such as `params/head`, which need not
        be among those that a phase of training moves.
    """
    at = lambda rate: trees.still(local.optimizer(rate), pattern, least=0)
    return local._replace(optimizer=at)
