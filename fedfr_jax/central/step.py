"""One step of central training on the mesh, with gradient accumulation.

Batch statistics are those of a micro-batch (ghost batch normalization, Hoffer et al.
2017, arXiv:1705.08741); each one updates the running statistics.

The batch is sharded over the devices, the state by the rules of `sharding`. Each device
computes the loss, gradients and batch statistics of its shard, and their means update
the state: automatic sharding by XLA would turn BatchNorm into SyncBN.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.central import sharding
from fedfr_jax.central.batches import TO_SHARD
from fedfr_jax.central.class_parallel import (
    all_rows,
    class_matrix,
    gather_classes,
    map_tables,
    sampled_rows,
    scatter_classes,
)
from fedfr_jax.central.sharding import LeafSharding, StepSharding, leaf_sharding
from fedfr_jax.types import Batch, PyTree


def accumulate_gradients(
    gradient: Callable, variables: PyTree, batch: Batch, key: jax.Array, count: int
) -> tuple[PyTree, PyTree, PyTree]:
    """Mean gradients, statistics and metrics (with the loss) over micro-batches.

    Args:
      gradient: (params, stats, batch, key) -> ((loss, (stats, metrics)), gradients).
      batch: of a device; `count` divides its size.
    """
    params, stats = variables["params"], variables["batch_stats"]
    if count == 1:
        (loss, (stats, metrics)), grads = gradient(params, stats, batch, key)
        return grads, stats, {"loss": loss, **metrics}

    def add_part(carry, part):
        sums, stats = carry
        number, batch = part
        part_key = jax.random.fold_in(key, number)
        (loss, (stats, metrics)), grads = gradient(params, stats, batch, part_key)
        return (jax.tree.map(jnp.add, sums, grads), stats), {"loss": loss, **metrics}

    zeros = lambda x: jnp.zeros(x.shape, trees.sum_dtype(x.dtype))
    start = jax.tree.map(zeros, params), stats
    parts = jnp.arange(count, dtype=jnp.int32), _micro_batches(batch, count)
    (sums, stats), metrics = jax.lax.scan(add_part, start, parts)
    grads = jax.tree.map(lambda x: x / count, sums)
    return grads, stats, jax.tree.map(lambda x: x.mean(0), metrics)


def _micro_batches(batch, count):
    """Reshape to [count, B / count, ...]; repeat values without example axis."""

    def split(tree, spec):
        if not any(spec):
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)

    return Batch(*map(split, batch, TO_SHARD))


class State(NamedTuple):
    """Training state: variables and optimizer state."""

    variables: PyTree  # {"params", "batch_stats"}
    opt_state: PyTree


def build_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    step_sharding: StepSharding,
) -> Callable:
    """Build step(state, batch, key) -> (state, metrics with the `loss` before it).

    Args:
      loss_fn: as of `LocalTraining`, with a different key on each device. With a
        class matrix it takes the keyword `held`, `SampledClasses` of the device's rows.
      optimizer: with its learning rate.
    """

    def step(state: State, batch, key):
        layout = leaf_sharding(step_sharding, state.variables["params"], mesh)
        whole = state.variables["params"], state.opt_state
        is_table = (
            layout.is_table,
            sharding.state_layout(optimizer, state.opt_state, layout.is_table, False),
        )
        sampled = sampled_rows(mesh, step_sharding, layout, whole[0], batch.labels, key)
        params, opt_state = map_tables(mesh, gather_classes, is_table, sampled, whole)
        gradients = mean_gradients(loss_fn, mesh, layout, step_sharding)
        variables = {**state.variables, "params": params}
        grads, stats, metrics = gradients(variables, batch, key, sampled)
        moved = _apply_gradients(optimizer, mesh, layout, grads, opt_state, params)
        params, opt_state = map_tables(
            mesh, scatter_classes, is_table, sampled, whole, moved
        )
        return State({"params": params, "batch_stats": stats}, opt_state), metrics

    return step


def _apply_gradients(optimizer, mesh, layout, grads, opt_state, params):
    """Update parameters and optimizer state, each device its shard."""
    if layout.is_whole:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    cut = lambda tree: sharding.constrain(mesh, tree, layout.moments)
    grads, params = cut(grads), cut(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    specs = sharding.state_layout(optimizer, opt_state, layout.moments, P())
    params = sharding.constrain(
        mesh, optax.apply_updates(params, updates), layout.params
    )
    return params, sharding.constrain(mesh, opt_state, specs)


def mean_gradients(
    loss_fn: Callable, mesh: Mesh, layout: LeafSharding, step_sharding: StepSharding
) -> Callable:
    """Build the mean gradients over devices and micro-batches.

    It maps (variables, batch, key, sampled) to (gradients, statistics, metrics).

    Args:
      loss_fn: as of `LocalTraining`.
      layout: sharding of the parameters and their gradients.
    """
    loss_fn, num_devices = as_aux_loss(loss_fn), mesh.shape[meshes.CLIENTS]
    dtype = step_sharding.reduce_dtype

    def of_part(variables, batch, key, sampled):
        key = jax.random.fold_in(key, jax.lax.axis_index(meshes.CLIENTS))
        matrix = class_matrix(layout, variables["params"])
        loss_args = {}
        if matrix is not None:
            loss_args["held"] = sampled or all_rows(
                step_sharding.num_classes, len(matrix)
            )

        def loss_of(params, stats, batch, key):
            params = sharding.unshard(params, layout, step_sharding)
            network = {**variables, "params": params, "batch_stats": stats}
            return loss_fn(network, batch, key, **loss_args)

        def gradient(*arguments):
            loss, grads = jax.value_and_grad(loss_of, has_aux=True)(*arguments)
            return loss, jax.tree.map(lambda dx, x: dx.astype(x.dtype), grads, own)

        own = variables["params"]
        copies = sharding.gather_copies(own, layout, step_sharding.gather_dtype)
        grads, stats, metrics = accumulate_gradients(
            gradient,
            {**variables, "params": copies},
            batch,
            key,
            step_sharding.micro_batches,
        )
        grads = sharding.reduce_gradients(mesh, grads, layout, dtype)
        sums = grads, *meshes.sum_over_clients(mesh, (stats, metrics))
        return jax.tree.map(lambda x: x / num_devices, sums)

    stored = {"params": layout.params, "batch_stats": P()}
    specs = (stored, TO_SHARD, P(), P(meshes.CLIENTS)), (layout.grads, P(), P())
    return meshes.over_client_devices(mesh, of_part, *specs)
