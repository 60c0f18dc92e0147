"""Systems state next to an algorithm's server, so that both are checkpointed.

Arrays on devices have 32 bits: times, which are float64, are stored as pairs of int32.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.types import Algorithm, AnyArray, PyTree


class WithSystems(NamedTuple):
    """An algorithm's server, and the systems state."""

    inner: PyTree
    systems_state: PyTree  # small arrays that the host replaces after every round
    versions: PyTree = ()  # [R, ...] of the inner server, see `asynchronous.py`


class SystemsState(NamedTuple):
    """Systems state after a synchronous round."""

    clock: AnyArray  # [2] int32, see `as_seconds`
    loss: AnyArray  # [N] float32, see `sampling.Known`; [0] without such sampling
    last_round: AnyArray  # [N] int32


def as_seconds(bits: AnyArray) -> np.ndarray:
    """Convert pairs of int32 [..., 2] to float64 [...]."""
    return np.ascontiguousarray(bits, np.int32).view(np.float64)[..., 0]


def as_bits(seconds: AnyArray) -> np.ndarray:
    """The inverse of `as_seconds`."""
    seconds = np.asarray(seconds, np.float64)[..., None]
    return np.ascontiguousarray(seconds).view(np.int32)


def plain_server(server: PyTree) -> PyTree:
    """The algorithm's server, with or without systems state around it."""
    return server.inner if isinstance(server, WithSystems) else server


def with_systems_state(algorithm: Algorithm, num_clients: int) -> Algorithm:
    """Add a synchronous systems state to an algorithm's server.

    Args:
      num_clients: N whose losses are known; 0 keeps the clock alone.
    """

    def init(variables):
        nothing = jnp.full(num_clients, -1, jnp.int32)
        clock = jnp.zeros(2, jnp.int32)
        systems_state = SystemsState(clock, nothing.astype(jnp.float32), nothing)
        return WithSystems(algorithm.init(variables), systems_state)

    return on_inner(algorithm)._replace(init=init)
