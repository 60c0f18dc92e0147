"""One step of data parallel training: an ordinary jitted step over the mesh.

The state is whole on every device and the batch is cut over them. Each device computes
the loss, gradients and batch statistics of its own part, and their means move the
state: a batch that XLA cuts by itself would turn BatchNorm into SyncBN.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.central.batches import CUT
from fedfr_jax.objective import with_aux
from fedfr_jax.types import PyTree


class State(NamedTuple):
    """What a step moves."""

    variables: PyTree  # {"params", "batch_stats"}
    opt_state: PyTree


def build_step(
    loss_fn: Callable, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable:
    """step(state, batch, key) -> (state, metrics with the `loss` before the step).

    Args:
      loss_fn: as of `Local`; draws with a key of its own on each device.
      optimizer: with its learning rate.
    """
    gradients = mean_gradients(loss_fn, mesh)

    def step(state: State, batch, key):
        grads, stats, metrics = gradients(state.variables, batch, key)
        params = state.variables["params"]
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        return State({"params": params, "batch_stats": stats}, opt_state), metrics

    return step


def mean_gradients(loss_fn: Callable, mesh: Mesh) -> Callable:
    """(variables, batch, key) -> (gradients, statistics, metrics), means over devices.

    Args:
      loss_fn: as of `Local`.
    """
    loss_fn, num_devices = with_aux(loss_fn), mesh.shape[meshes.CLIENTS]

    def of_part(variables, batch, key):
        key = jax.random.fold_in(key, jax.lax.axis_index(meshes.CLIENTS))
        loss_of = lambda params: loss_fn({**variables, "params": params}, batch, key)
        found, grads = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
        loss, (stats, metrics) = found
        sums = meshes.sum_over_clients(mesh, (grads, stats, {"loss": loss, **metrics}))
        return jax.tree.map(lambda x: x / num_devices, sums)

    return meshes.over_client_devices(mesh, of_part, (P(), CUT, P()), P())
