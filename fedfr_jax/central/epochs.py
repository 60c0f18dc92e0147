"""Epochs of central training of one network over the whole mesh."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.central.batches import Order, build_batch, pieces
from fedfr_jax.central.step import State, build_step
from fedfr_jax.feed import Feed


class Epochs(NamedTuple):
    """init(variables) -> State; run(state, table, epoch) -> (state, metrics).

    The table is a `Dataset` on the mesh or a `Stream`; metrics are {name: float}, means
    over the steps. The state that is handed over is used up.
    """

    init: Callable
    run: Callable
    num_steps: int  # per epoch


def build_epochs(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    feed: Feed,
    mesh: Mesh,
    *,
    first_row: int,
    num_rows: int,
    seed: int,
    lists: Callable | None = None,
) -> Epochs:
    """Compile-once epochs over table rows first_row:first_row + num_rows.

    Args:
      loss_fn: as of `Local`; `optimizer` includes its learning rate.
      lists: the order of an epoch, see `Central.order`.
      feed: batch_size is the total over devices and a multiple of their number; always
        shuffles, and drops the last, partial batch.

    Raises:
      ValueError: when the batch does not divide, or exceeds the rows.
    """
    num_devices = mesh.shape[meshes.CLIENTS]
    if feed.batch_size % num_devices or not 0 < feed.batch_size <= num_rows:
        raise ValueError(
            f"pretrain.batch_size must be a multiple of {num_devices} devices and at "
            f"most the {num_rows} images, got {feed.batch_size}."
        )
    order = Order(first_row, num_rows, feed.batch_size, num_devices, seed, lists)
    step = build_step(loss_fn, optimizer, mesh)
    train = _piece_trainer(step, build_batch(feed, order, mesh), order, mesh)

    def init(variables):
        state = State(variables, optimizer.init(variables["params"]))
        return meshes.put(state, meshes.replicated(mesh))

    def run(state, table, epoch):
        found = []
        for piece in pieces(table, order, epoch, mesh):
            state, sums = train(state, piece, epoch)
            found.append(jax.device_get(sums))  # waits: two pieces exist, not more
        return state, {
            name: float(sum(sums[name] for sums in found)) / order.num_steps
            for name in found[0]
        }

    return Epochs(init, run, order.num_steps)


def _piece_trainer(
    step: Callable, batch: Callable, order: Order, mesh: Mesh
) -> Callable:
    """train(state, piece, epoch) -> (state, sums of the metrics over its steps).

    One call for many steps: a call costs a tiny network more than a step.
    """

    def train(state, piece, epoch):
        key = order.key(epoch)
        augment_key, loss_key = (jax.random.fold_in(key, i) for i in (2, 0))

        @jax.jit(inline=True)  # traced once, for shapes and for the loop
        def one(i, state):
            step_key = jax.random.fold_in(loss_key, i)
            return step(state, batch(piece, augment_key, i), step_key)

        def body(i, carry):
            state, sums = carry
            state, metrics = one(i, state)
            return state, jax.tree.map(jnp.add, sums, metrics)

        _, metrics = jax.eval_shape(one, piece.first, state)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
        return jax.lax.fori_loop(piece.first, piece.last, body, (state, sums))

    whole = meshes.replicated(mesh)
    return jax.jit(train, donate_argnums=0, out_shardings=whole)
