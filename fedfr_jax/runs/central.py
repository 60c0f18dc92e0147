"""Central training of one network over the whole mesh, data parallel.

The examples are those of one client that owns them all: every device trains on its part
of each batch, and gradients are averaged. Batch statistics are each device's own, then
averaged (not SyncBN). Of a `Stream` the steps of an epoch are taken in pieces: the next
ones' images are read and copied while the devices train.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import Slots, all_rows, client_view, window
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.waves import zeros_of
from fedfr_jax.feed import Feed
from fedfr_jax.objective import with_aux
from fedfr_jax.stream import Stream, ahead, on_own_devices
from fedfr_jax.types import Dataset, PyTree

CENTRAL = 2**31 + 1  # folded into the seed; clients fold their ids, below 2^31


class State(NamedTuple):
    """State of central training after some epochs."""

    variables: PyTree
    opt_state: PyTree


class Central(NamedTuple):
    """init(variables) -> State; epoch(state, table, epoch) -> (state, metrics).

    The table is a `Dataset` or a `Stream`; the state that is handed over is used up.
    """

    init: Callable
    epoch: Callable
    num_steps: int  # per epoch


def central(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    feed: Feed,
    mesh: Mesh,
    *,
    first_row: int,
    num_rows: int,
    seed: int,
) -> Central:
    """Compile-once epochs over table rows first_row:first_row + num_rows.

    Args:
      loss_fn: as of `Local`; `optimizer` includes its learning rate.
      feed: batch_size is the total over devices and a multiple of their number.

    Raises:
      ValueError: when the batch does not divide, or exceeds the rows.
    """
    num_devices = mesh.shape[meshes.CLIENTS]
    if feed.batch_size % num_devices or not 0 < feed.batch_size <= num_rows:
        raise ValueError(
            f"pretrain.batch_size must be a multiple of {num_devices} devices and at "
            f"most the {num_rows} images, got {feed.batch_size}."
        )
    feed, loss_fn = feed._replace(drop_last=True), with_aux(loss_fn)
    num_steps = feed.steps_per_epoch(num_rows)
    slot = Slots(-1, 0, False, first_row, num_rows, 0, 0, num_steps)
    slot = jax.tree.map(jnp.int32, slot)

    def view(feed, held, epoch, index):
        stage = jax.random.fold_in(jax.random.key(seed), CENTRAL)
        key, shard = jax.random.fold_in(stage, epoch), (index, num_devices)
        extra = no_extra(1)
        return key, client_view(feed, 0, key, slot, extra, held, epoch, shard=shard)

    def evaluate(held, epoch, index, variables, i):
        key, client = view(feed, held, epoch, index)
        loss = lambda params: loss_fn(
            {**variables, "params": params},
            client.batch(i),
            jax.random.fold_in(jax.random.fold_in(key, 0), i),
        )
        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    def zeros(variables, table, epoch):
        first = jnp.int32(0)
        of = lambda v: evaluate(all_rows(table), epoch, first, v, first)
        (loss, (_, metrics)), _ = jax.eval_shape(of, variables)
        return zeros_of({"loss": loss, **metrics})

    def take(state, sums, held_at, epoch, first, last):
        index = jax.lax.axis_index(meshes.CLIENTS)

        def step(i, carry):
            state, sums = carry
            (loss, (stats, metrics)), grads = evaluate(
                held_at(i), epoch, index, state.variables, i
            )
            average = lambda tree: jax.lax.pmean(tree, meshes.CLIENTS)
            grads, stats = average((grads, stats))
            params = state.variables["params"]
            updates, opt_state = optimizer.update(grads, state.opt_state, params)
            params = optax.apply_updates(params, updates)
            state = State({"params": params, "batch_stats": stats}, opt_state)
            return state, jax.tree.map(jnp.add, sums, {"loss": loss, **metrics})

        return jax.lax.fori_loop(first, last, step, (state, sums))

    def rows(epoch, index, i):
        only_order, nothing = feed._replace(augment=None), all_rows(Dataset({}, {}))
        return view(only_order, nothing, epoch, index)[1].batch(i).example

    steps = Steps(take, zeros, rows, num_steps, feed.batch_size // num_devices)
    whole, streamed = _whole(steps, mesh), _streamed(steps, mesh)

    def epoch(state, table, epoch):
        run = streamed if isinstance(table, Stream) else whole
        return run(state, table, epoch)

    init = lambda variables: State(variables, optimizer.init(variables["params"]))
    return Central(init, epoch, num_steps)


class Steps(NamedTuple):
    """The steps of an epoch on one device, and what they read."""

    # take(state, sums, i -> `Held`, epoch, first, last) -> (state, sums)
    take: Callable
    zeros: Callable  # (variables, table, epoch) -> sums before the first step
    rows: Callable  # (epoch, place along `clients`, i) -> rows [part] of step i
    num_steps: int
    part: int  # of a batch, on each device

    def mean(self, sums):
        """Metrics of an epoch from each device's sums over its steps."""
        means = jax.tree.map(lambda x: x / self.num_steps, sums)
        return jax.lax.pmean(means, meshes.CLIENTS)


def _over_devices(function, mesh, in_specs, out_specs, **options):
    return jax.jit(
        meshes.over_client_devices(mesh, function, in_specs, out_specs),
        **options,
    )


def _whole(steps: Steps, mesh: Mesh) -> Callable:
    """An epoch as one call: run(state, `Dataset`, epoch)."""

    def device(state, table, epoch):
        sums = steps.zeros(state.variables, table, epoch)
        state, sums = steps.take(
            state, sums, lambda i: all_rows(table), epoch, 0, steps.num_steps
        )
        return state, steps.mean(sums)

    return _over_devices(device, mesh, (P(), P(), P()), P(), donate_argnums=0)


def _streamed(steps: Steps, mesh: Mesh) -> Callable:
    """An epoch piece by piece: run(state, `Stream`, epoch)."""
    cut, part, num_devices = P(meshes.CLIENTS), steps.part, mesh.shape[meshes.CLIENTS]
    # Each device's sums stay its own until the end, as one row each.
    row = lambda tree: jax.tree.map(lambda x: x[None], tree)
    own = lambda tree: jax.tree.map(lambda x: x[0], tree)

    def piece(state, sums, table, epoch, first, last):
        at = lambda i: window(table, (i - first) * part)
        state, sums = steps.take(state, own(sums), at, epoch, first, last)
        return state, row(sums)

    specs = P(), cut, cut, P(), P(), P()
    piece = _over_devices(piece, mesh, specs, (P(), cut), donate_argnums=(0, 1))
    begin = lambda *args: row(steps.zeros(*args))
    begin = _over_devices(begin, mesh, (P(), cut, P()), cut)
    end = _over_devices(lambda sums: steps.mean(own(sums)), mesh, cut, P())

    @jax.jit
    def order(epoch):
        each = jax.vmap(jax.vmap(steps.rows, (None, None, 0)), (None, 0, None))
        count = lambda n: jnp.arange(n, dtype=jnp.int32)
        rows = each(epoch, count(num_devices), count(steps.num_steps))
        return rows.reshape(num_devices, -1)  # [A, S * part], as each device takes them

    def run(state, table, epoch):
        fits = table.memory // (2 * table.row_bytes * part)
        size = max(min(fits, steps.num_steps), 1)
        rows = np.asarray(order(epoch))
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % (size * part))))
        rows = rows.reshape(num_devices, -1, size * part)
        load = lambda i: on_own_devices(mesh, lambda a: table.take(rows[a, i]))
        sums = None
        for i, images in enumerate(ahead(load, rows.shape[1], [])):
            if sums is None:
                sums = begin(state.variables, images, epoch)
            first, last = i * size, min((i + 1) * size, steps.num_steps)
            numbers = epoch, jnp.int32(first), jnp.int32(last)
            state, sums = piece(state, sums, images, *numbers)
            jax.block_until_ready(sums)  # two pieces exist, not more
        return state, end(sums)

    return run
