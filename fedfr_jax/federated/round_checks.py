"""Numbers of a round that must be finite: metrics, client states and parameters."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated.engine import IS_FINITE
from fedfr_jax.types import PyTree


def check_metrics(metrics: dict, ids: np.ndarray, round: int) -> dict:
    """Check the metrics {name: [K]} of a cohort `ids` [K] and its updates.

    A loss is taken before its step, so a client's last step can spoil the parameters
    under a finite loss.

    Returns:
      The metrics without `IS_FINITE`.

    Raises:
      FloatingPointError: for the first client with a number that is not finite. Rounds
        count from 1 in messages.
    """
    is_fine = metrics[IS_FINITE] > 0
    metrics = {name: x for name, x in metrics.items() if name != IS_FINITE}
    for name, values in [*metrics.items(), ("update", np.where(is_fine, 0, np.nan))]:
        is_finite = np.isfinite(values)
        if not is_finite.all():
            first = is_finite.argmin()
            origin = f"client {ids[first]} in round {round + 1}"
            check_number(name, values[first], origin)
    return metrics


def check_number(name: str, value: float, origin: str) -> None:
    """Raise FloatingPointError unless the number is finite."""
    if not np.isfinite(value):
        raise FloatingPointError(f"{name} of {origin} must be finite, got {value}")


def check_dropped(
    metrics: Mapping[str, np.ndarray], ids: np.ndarray, round: int, min_kept: float
) -> None:
    """Raise FloatingPointError if too many clients `ids` [K] are excluded.

    Args:
      min_kept: share of the cohort that must not be; nor may all be.
    """
    is_dropped = metrics.get("dropped", np.zeros(len(ids))) > 0
    is_enough = not is_dropped.all() and 1 - is_dropped.mean() >= min_kept
    if is_dropped.any() and not is_enough:
        bad = ids[is_dropped]
        some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        raise FloatingPointError(
            f"updates of round {round + 1} must be finite and within max_norm for at "
            f"least {min_kept:.0%} of the cohort, got bad ones from {len(bad)} of "
            f"{len(ids)} clients ({some})"
        )


def check_rows(rows: PyTree, clients: np.ndarray, round: int) -> None:
    """Raise FloatingPointError if a client's state in `rows` [n, ...] is not finite.

    Args:
      clients: [n] ids, negative for idle slots.
    """
    for name, x in trees.by_name(rows).items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        is_fine = np.isfinite(x).reshape(len(x), -1).all(axis=1) | (clients < 0)
        if not is_fine.all():
            origin = f"client {clients[is_fine.argmin()]} after round {round + 1}"
            check_number(f"personal {name}", np.nan, origin)


def check_state(state: PyTree, origin: str) -> None:
    """Raise if a leaf of `state`, of a server or a training, is not finite."""
    check_finite(is_state_finite(state), origin)


def check_finite(is_finite: bool, origin: str) -> None:
    """`check_state` with a known result."""
    if not is_finite:
        raise FloatingPointError(
            f"parameters after {origin} must be finite, got nan or infinity"
        )


@jax.jit
def is_state_finite(state):
    """Whether all floats of a state are finite: a bool on the devices."""
    return trees.is_finite(trees.joined(state))


@jax.jit
def are_states_finite(states):
    """`is_state_finite` of the stacked states of S members: [S]."""
    return jax.vmap(is_state_finite)(states)
