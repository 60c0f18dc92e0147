"""Margins and displacements of prototypes.

The displacement of a set P from a set Q is, per class c, the distance of P_c to Q_c.
The margin of a set P against a set Q is, per class c, the distance of P_c to the
nearest other class of Q minus its distance to Q_c: the hypothesis margin of Crammer et
al. 2002, "Margin analysis of the LVQ algorithm", without its factor 1/2.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.prototypes import TINY, Prototypes
from fedfr_jax.schema import check_choice


def distances(p: jax.Array, q: jax.Array) -> jax.Array:
    """Euclidean distances of p [M, D] and q [M, D], [M, M]."""
    return jnp.linalg.norm(p[:, None] - q[None], axis=-1)


def margins(
    p: Prototypes, q: Prototypes, *, relative: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Margin of each class of p against q, and where it is defined, both [M].

    It is where both have the class, and q another one; 0 elsewhere.

    Args:
      relative: divide by the sum of the two distances, for values in [-1, 1] as in
        generalised LVQ (Sato & Yamada 1995).
    """
    apart = distances(p.mean, q.mean)
    is_other = (q.count > 0)[None] & ~jnp.eye(len(apart), dtype=bool)
    is_defined = (p.count > 0) & (q.count > 0) & is_other.any(1)
    other = jnp.where(is_other, apart, jnp.inf).min(1)
    other = jnp.where(is_defined, other, 0)
    own = jnp.where(is_defined, jnp.diag(apart), 0)
    margin = other - own
    if relative:
        margin = margin / jnp.maximum(other + own, TINY)
    return margin, is_defined


def mean_margin(p: Prototypes, q: Prototypes, *, relative: bool = False) -> jax.Array:
    """Mean of the margins that are defined, []; 0 where none is."""
    margin, is_defined = margins(p, q, relative=relative)
    return margin.sum() / jnp.maximum(is_defined.sum(), 1).astype(margin.dtype)


def mean_displacement(p: Prototypes, q: Prototypes) -> jax.Array:
    """Mean distance of p_c to q_c over the classes that both have, []; 0 for none."""
    is_there = (p.count > 0) & (q.count > 0)
    apart = jnp.where(is_there, jnp.linalg.norm(p.mean - q.mean, axis=-1), 0)
    return apart.sum() / jnp.maximum(is_there.sum(), 1).astype(apart.dtype)


def aggregate_mean_margin(p: Prototypes) -> jax.Array:
    """Mean distance of a prototype to the nearest other one, [] (AMM)."""
    return mean_margin(p, p)


MEASURES = {  # of a client's prototypes against others
    "displacement": mean_displacement,
    "hypothesis": mean_margin,
    "relative": functools.partial(mean_margin, relative=True),
}


def measure_of(name: str) -> Callable:
    """(prototypes, reference) -> [].

    Raises:
      ValueError: for an unknown name.
    """
    check_choice("measure", name, MEASURES)
    return MEASURES[name]
