"""Personal rows on their way to the store."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import trees
from fedfr_jax.types import PyTree


def check_rows(rows: PyTree, clients: np.ndarray, round: int) -> None:
    """Raise FloatingPointError when a client's row of `rows` [n, ...] has a bad number.

    Args:
      clients: [n] ids, negative where nobody trained.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(rows):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        is_fine = np.isfinite(x).reshape(len(x), -1).all(axis=1) | (clients < 0)
        if not is_fine.all():
            name, client = trees.path_name(path), clients[is_fine.argmin()]
            raise FloatingPointError(
                f"personal {name} of client {client} after round {round} must be "
                "finite, got nan or infinity"
            )
