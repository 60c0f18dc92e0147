"""Central training of one network over the whole mesh, data parallel.

The examples are those of one client that owns them all: every device trains on its part
of each batch, and gradients are averaged. Batch statistics are each device's own, then
averaged (not SyncBN).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import Feed, Slots, Table, client_view
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.types import PyTree

CENTRAL = 2**31 + 1  # folded into the seed; clients fold their ids, below 2^31


class State(NamedTuple):
    """State of central training after some epochs."""

    variables: PyTree
    opt_state: PyTree


class Central(NamedTuple):
    """init(variables) -> State; epoch(state, table, epoch) -> (state, metrics)."""

    init: Callable
    epoch: Callable
    num_steps: int  # per epoch


def rate_schedule(
    *, learning_rate: float, warmup: float, milestones: tuple[float, ...], total: int
) -> optax.Schedule:
    """Linear warm-up, then x0.1 at each milestone, or a cosine to 0 without any.

    `warmup` and `milestones` are fractions of the `total` steps, in [0, 1].
    """
    warm = round(warmup * total)
    if not milestones:
        return optax.warmup_cosine_decay_schedule(0.0, learning_rate, warm, total)
    drops = {round(m * total) - warm: 0.1 for m in milestones}
    after = optax.piecewise_constant_schedule(learning_rate, drops)
    before = optax.linear_schedule(0.0, learning_rate, warm)
    return optax.join_schedules([before, after], [warm])


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
      loss_fn: as for `local_sgd`; `optimizer` includes its learning rate.
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
    feed = feed._replace(drop_last=True)
    num_steps = feed.steps_per_epoch(num_rows)
    slot = Slots(-1, 0, False, first_row, num_rows, 0, 0, num_steps)
    slot = jax.tree.map(jnp.asarray, slot)

    def device(state: State, table: Table, epoch, key):
        key = jax.random.fold_in(key, epoch)
        shard = (jax.lax.axis_index(meshes.CLIENTS), num_devices)
        extra = no_extra(1)
        client = client_view(feed, 0, key, slot, extra, table, epoch, shard=shard)

        def step(i, carry):
            state, sums = carry
            (loss, (stats, metrics)), grads = evaluate(client, key, state.variables, i)
            average = lambda tree: jax.lax.pmean(tree, meshes.CLIENTS)
            grads, stats = average((grads, stats))
            params = state.variables["params"]
            updates, opt_state = optimizer.update(grads, state.opt_state, params)
            params = optax.apply_updates(params, updates)
            state = State({"params": params, "batch_stats": stats}, opt_state)
            return state, jax.tree.map(jnp.add, sums, {"loss": loss, **metrics})

        (loss, (_, metrics)), _ = jax.eval_shape(
            lambda v: evaluate(client, key, v, jnp.int32(0)), state.variables
        )
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), {"loss": loss, **metrics}
        )
        state, sums = jax.lax.fori_loop(0, num_steps, step, (state, zeros))
        means = jax.tree.map(lambda x: x / num_steps, sums)
        return state, jax.lax.pmean(means, meshes.CLIENTS)

    def evaluate(client, key, variables, i):
        loss = lambda params: loss_fn(
            {**variables, "params": params},
            client.batch(i),
            jax.random.fold_in(jax.random.fold_in(key, 0), i),
            num_classes=jnp.int32(0),
            frozen=None,
        )
        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    run = jax.jit(
        jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(P(), P(), P(), P()),
            out_specs=P(),
            axis_names={meshes.CLIENTS},
            check_vma=False,
        ),
        donate_argnums=0,
    )
    # An argument, not a constant: the programs of all seeds are one in the cache.
    key = jax.random.fold_in(jax.random.key(seed), CENTRAL)
    key = jax.device_put(key, meshes.replicated(mesh))
    epoch = lambda state, table, number: run(state, table, number, key)
    init = lambda variables: State(variables, optimizer.init(variables["params"]))
    return Central(init, epoch, num_steps)
