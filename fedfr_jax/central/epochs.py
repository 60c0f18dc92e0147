"""Epochs of central training on the whole mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.central.batches import (
    EpochOrder,
    build_batch,
    chunk_shapes,
    epoch_chunks,
)
from fedfr_jax.central.settings import build_optimizer, build_step_sharding
from fedfr_jax.central.sharding import (
    StepSharding,
    leaf_sharding,
    shardings,
    state_layout,
)
from fedfr_jax.central.step import State, build_step
from fedfr_jax.types import CentralTrainer


class Epochs(NamedTuple):
    """Compiled epochs: `init` gives a State, `run` trains an epoch from it.

    `init` takes variables, or a function that makes them: it is then compiled with
    sharded outputs, so that no device ever has all of them.
    The data set is a `Dataset` on the mesh or a `Stream`; metrics are {name: float},
    means over the steps. The state that is passed is donated.
    lower(variables, dataset) lowers the program of the first epoch's chunks, from
    shapes; step(state, chunk, number) is one step of it, not compiled, with
    shapes(variables, dataset) as its (state, chunk).
    """

    init: Callable
    run: Callable
    lower: Callable
    step: Callable
    shapes: Callable
    num_steps: int  # per epoch


def build_epochs(
    trainer: CentralTrainer,
    mesh: Mesh,
    seed: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    step_sharding: StepSharding | None = None,
) -> Epochs:
    """Build the trainer's epochs, compiled once for each class sampling rate.

    Args:
      trainer: its batch size is a multiple of the devices, times micro-batches; epochs
        always shuffle, and drop the last, partial batch.
      mesh: of its settings, see `settings.build_mesh`.
      optimizer, step_sharding: instead of those of the settings.
    """
    settings, batching = trainer.settings, trainer.batching
    optimizer = optimizer or build_optimizer(settings, trainer.num_rows)
    step_sharding = step_sharding or build_step_sharding(
        settings, trainer.sharded_classes
    )
    class_rates = settings.class_rates
    order = EpochOrder(
        trainer.first_row,
        trainer.num_rows,
        batching.batch_size,
        mesh.shape[meshes.CLIENTS],
        seed,
        trainer.batch_order,
    )
    batch = build_batch(batching, order, mesh, trainer.annotate_batch)

    def steps_at(rate):
        at_rate = step_sharding._replace(class_rate=rate)
        step = build_step(trainer.loss, optimizer, mesh, at_rate)
        return _chunk_steps(step, batch, order)

    steps = {rate: steps_at(rate) for rate in set(class_rates)}
    trainers = {rate: _chunk_trainer(steps_of) for rate, steps_of in steps.items()}

    def init(variables):
        return _start(variables, optimizer, mesh, step_sharding)

    def program(state, epoch):
        leaf_shardings = (
            jax.tree.map(lambda x: x.sharding, state),
            meshes.replicated(mesh),
        )
        train = trainers[class_rates[min(epoch, len(class_rates) - 1)]]
        # Compiled once: JAX finds the same function of the same shapes and shardings.
        return jax.jit(train, donate_argnums=0, out_shardings=leaf_shardings)

    def shapes(variables, dataset):
        state = state_shapes(variables, optimizer, mesh, step_sharding)
        return state, chunk_shapes(dataset, order, mesh)

    def lower(variables, dataset):
        state, chunk = shapes(variables, dataset)
        return program(state, 0).lower(state, chunk, 0)

    def first_step(state, chunk, number):
        return steps[max(class_rates)](chunk, 0)(number, state)

    def run(state, dataset, epoch):
        train = program(state, epoch)
        chunk_sums: list[dict[str, Any]] = []
        for chunk in epoch_chunks(dataset, order, epoch, mesh):
            state, sums = train(state, chunk, epoch)
            chunk_sums.append(jax.device_get(sums))  # so that at most two chunks exist
        return state, {
            name: float(sum(sums[name] for sums in chunk_sums)) / order.num_steps
            for name in chunk_sums[0]
        }

    return Epochs(init, run, lower, first_step, shapes, order.num_steps)


def _start(variables, optimizer, mesh, step_sharding):
    """Initial state, each leaf sharded by the rules."""
    whole = meshes.replicated(mesh)
    if not step_sharding.rules:
        first: Any = variables() if callable(variables) else variables
        state = State(first, jax.jit(optimizer.init)(first["params"]))
        return meshes.put_global(state, whole)
    leaf_shardings = jax.tree.map(
        lambda x: x.sharding, state_shapes(variables, optimizer, mesh, step_sharding)
    )
    if callable(variables):
        variables = jax.jit(variables, out_shardings=leaf_shardings.variables)()
    else:
        variables = meshes.put_global(variables, leaf_shardings.variables)
    start = jax.jit(optimizer.init, out_shardings=leaf_shardings.opt_state)
    return State(variables, start(variables["params"]))


def state_shapes(variables, optimizer, mesh, step_sharding) -> State:
    """ShapeDtypeStructs of the initial state, with shardings."""
    shapes = jax.eval_shape(variables) if callable(variables) else variables
    layout = leaf_sharding(step_sharding, shapes["params"], mesh)
    opt_state = jax.eval_shape(optimizer.init, shapes["params"])
    state = State(
        {"params": shapes["params"], "batch_stats": shapes["batch_stats"]}, opt_state
    )
    stats = jax.tree.map(lambda _: P(), shapes["batch_stats"])
    specs = State(
        {"params": layout.params, "batch_stats": stats},
        state_layout(optimizer, opt_state, layout.moments, P()),
    )
    return meshes.shapes_at(state, shardings(mesh, specs))


def _chunk_steps(step: Callable, batch: Callable, order: EpochOrder) -> Callable:
    """Build (chunk, epoch) -> train_step(number, state) -> (state, metrics)."""

    def steps_of(chunk, epoch):
        key = order.key(epoch)
        augment_key, loss_key = (jax.random.fold_in(key, i) for i in (2, 0))

        @jax.jit(inline=True)  # traced once, for shapes and for the loop
        def train_step(i, state):
            step_key = jax.random.fold_in(loss_key, i)
            return step(state, batch(chunk, augment_key, i), step_key)

        return train_step

    return steps_of


def _chunk_trainer(steps_of: Callable) -> Callable:
    """Build train(state, chunk, epoch) -> (state, sums of metrics over its steps).

    One call for many steps, because the call costs more than a step of a small network.
    """

    def train(state, chunk, epoch):
        train_step = steps_of(chunk, epoch)

        def body(i, carry):
            state, sums = carry
            state, metrics = train_step(i, state)
            return state, jax.tree.map(jnp.add, sums, metrics)

        _, metrics = jax.eval_shape(train_step, chunk.is_first, state)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
        return jax.lax.fori_loop(chunk.is_first, chunk.is_last, body, (state, sums))

    return train
