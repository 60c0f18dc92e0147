"""One step of training on the whole mesh: an ordinary jitted step over the mesh.

The batch is cut over the devices, and what `sharding` says of the state. Each device
computes the loss, gradients and batch statistics of its own part, and their means move
the state: a batch that XLA cuts by itself would turn BatchNorm into SyncBN.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.central import sharding
from fedfr_jax.central.batches import CUT
from fedfr_jax.central.class_parallel import all_rows
from fedfr_jax.central.class_rows import drawn_rows, rows_back, rows_of, table_of
from fedfr_jax.central.micro_batches import accumulated
from fedfr_jax.central.sharding import Layout, Spread, layout_of
from fedfr_jax.objective import with_aux
from fedfr_jax.types import PyTree


class State(NamedTuple):
    """What a step moves."""

    variables: PyTree  # {"params", "batch_stats"}
    opt_state: PyTree


def build_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    spread: Spread,
) -> Callable:
    """step(state, batch, key) -> (state, metrics with the `loss` before the step).

    Args:
      loss_fn: as of `Local`; draws with a key of its own on each device. With a table
        of classes it is given `held` and the rows of one device.
      optimizer: with its learning rate.
    """

    def step(state: State, batch, key):
        layout = layout_of(spread.rules, state.variables["params"], mesh)
        tables = state.variables["params"], state.opt_state
        held = drawn_rows(mesh, spread, layout, tables[0], batch, key)
        params, opt_state = rows_of(mesh, optimizer, layout, tables, held)
        gradients = mean_gradients(loss_fn, mesh, layout, spread)
        given = {**state.variables, "params": params}
        grads, stats, metrics = gradients(given, batch, key, held)
        moved = _moved(optimizer, mesh, layout, grads, opt_state, params)
        params, opt_state = rows_back(mesh, optimizer, layout, tables, moved, held)
        return State({"params": params, "batch_stats": stats}, opt_state), metrics

    return step


def _moved(optimizer, mesh, layout, grads, opt_state, params):
    """(parameters, optimizer's state) after a step, each device moving its own part."""
    if layout.is_whole:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    cut = lambda tree: sharding.laid(mesh, tree, layout.moments)
    grads, params = cut(grads), cut(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    specs = sharding.of_state(optimizer, opt_state, layout.moments, P())
    params = sharding.laid(mesh, optax.apply_updates(params, updates), layout.params)
    return params, sharding.laid(mesh, opt_state, specs)


def mean_gradients(
    loss_fn: Callable, mesh: Mesh, layout: Layout, spread: Spread
) -> Callable:
    """(variables, batch, key, held) -> (gradients, statistics, metrics), means over
    devices, of all their micro-batches.

    Args:
      loss_fn: as of `Local`.
      layout: of the parameters, whose gradients lie as it says.
    """
    loss_fn, num_devices = with_aux(loss_fn), mesh.shape[meshes.CLIENTS]
    dtype = spread.reduce_dtype

    def of_part(variables, batch, key, held):
        key = jax.random.fold_in(key, jax.lax.axis_index(meshes.CLIENTS))
        table = table_of(layout, variables["params"])
        more = {}
        if table is not None:
            more["held"] = held or all_rows(spread.num_classes, len(table))

        def loss_of(params, stats, batch, key):
            params = sharding.whole(params, layout, dtype)
            given = {**variables, "params": params, "batch_stats": stats}
            return loss_fn(given, batch, key, **more)

        grads, stats, metrics = accumulated(
            jax.value_and_grad(loss_of, has_aux=True),
            variables,
            batch,
            key,
            spread.micro_batches,
        )
        grads = sharding.summed(mesh, grads, layout, dtype)
        sums = grads, *meshes.sum_over_clients(mesh, (stats, metrics))
        return jax.tree.map(lambda x: x / num_devices, sums)

    stored = {"params": layout.params, "batch_stats": P()}
    specs = (stored, CUT, P(), P(meshes.CLIENTS)), (layout.grads, P(), P())
    return meshes.over_client_devices(mesh, of_part, *specs)
