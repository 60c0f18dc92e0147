"""Local training of a client: steps, and layer-wise optimizers.

Layer-wise optimizers wrap `LocalTraining.optimizer`: rate -> optax transformation.

The loop is a `while_loop` on the client's step count; vmapped over lanes it runs as
long as the longest lane, and finished lanes keep parameters, momentum and running
statistics because their carry is selected.

On a GPU the host evaluates the condition of such a loop in every iteration. There an
iteration is a loop of a fixed number of steps: a long one while the longest lane has as
many steps left, then short ones. Steps after a client's last are selected away, so that
results have the same bits.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.custom_batching import custom_vmap

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.convolutions import value_and_grad
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.model_parallel import unshard
from fedfr_jax.ranges import BelowOne, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Client, LocalTraining, PyTree

NO_STEP = 2**32 - 1  # folded into a key where steps are, whose numbers are smaller


def by_block(make: Callable) -> Callable:
    """Wrap an optimizer so that it treats stacked blocks one by one.

    For optimizers that take a norm, or another number, of each leaf, as LARS does.
    """

    def at(rate):
        inner = make(rate)

        def init(params):
            return inner.init(scanned_blocks.by_block_name(params))

        def update(updates, state, params=None):
            steps, state = inner.update(
                scanned_blocks.by_block_name(updates),
                state,
                scanned_blocks.by_block_name(params),
            )
            return scanned_blocks.unstack_like(steps, updates), state

        return optax.GradientTransformation(init, update)

    return at


def layer_wise(make: Callable, factors: Mapping[str, float]) -> Callable:
    """Scale the steps of an optimizer by `factors` per leaf, see `trees.scaling`."""
    return lambda rate: optax.chain(make(rate), trees.scaling(factors))


class LoopState(NamedTuple):
    """Carry of the local loop."""

    step: jax.Array  # [] int32
    carry: PyTree
    sums: PyTree  # {metric: []} summed over the steps so far


class TrainState(NamedTuple):
    """State of local training: variables without "local", and optimizer state."""

    variables: PyTree
    opt_state: PyTree


@checked
def sgd(
    *,
    momentum: BelowOne = 0.0,
    weight_decay: NonNegative = 0.0,
    nesterov: bool = False,
    weight_decay_mask: str = "",
) -> Callable:
    """PyTorch's SGD as `LocalTraining.optimizer`: coupled decay, momentum, rate.

    Args:
      momentum: in [0, 1).
      weight_decay: >= 0.
      weight_decay_mask: regular expression of the leaves that decay, such as "kernel$",
        by weight_decay / 2 times their squared norm in the loss; "" is all.
    """
    mask = trees.matching(weight_decay_mask) if weight_decay_mask else None

    def at(rate):
        decay = optax.add_decayed_weights(weight_decay, mask)
        steps = [decay] if weight_decay else []
        return optax.chain(*steps, optax.sgd(rate, momentum or None, nesterov))

    return at


def step_decay(rate: float, *, every: tuple[int, ...] | int = 0, factor: float = 0.1):
    """Learning rate of (round, epoch): `rate * factor ** (epoch // every[round])`.

    `every` is in epochs; a tuple gives one period per round and its last entry stays;
    0 means constant. The schedule restarts in every round (FedFR, client side).
    """
    periods = (every,) if isinstance(every, int) else tuple(every)

    def learning_rate(round, epoch):
        period = jnp.asarray(periods, jnp.int32)[jnp.minimum(round, len(periods) - 1)]
        epoch = jnp.asarray(epoch, jnp.int32)
        drops = jnp.where(period > 0, jax.lax.div(epoch, jnp.maximum(period, 1)), 0)
        return rate * factor ** drops.astype(jnp.result_type(float))

    return learning_rate


def round_decay(
    learning_rate: Callable, *, rounds: tuple[int, ...], factor: float
) -> Callable:
    """Multiply `learning_rate` of (round, epoch) by `factor` at each of `rounds`."""

    def falling(round, epoch):
        reached = (round >= jnp.asarray(rounds, jnp.int32)).sum(dtype=jnp.int32)
        rate = learning_rate(round, epoch)
        return rate * factor ** reached.astype(rate.dtype)

    return falling if rounds else learning_rate


SCHEDULE = (
    "Give LocalTraining(loss, optax.sgd, lambda round, epoch: schedule(round)), where "
    "round and epoch count from 0."
)


def check_local(local: LocalTraining) -> None:
    """Raise ValueError unless the learning rate fits the optimizer."""
    rate, has_own = local.learning_rate, not callable(local.optimizer)
    if has_own and rate is not None:
        raise ValueError(
            "learning_rate must be None for an optimizer with its own rate, got "
            f"{rate}. Pass optax.sgd instead of optax.sgd(0.1)."
        )
    if not has_own:
        check_rate(local)
    if callable(rate):
        try:
            inspect.signature(rate).bind(0, 0)
        except TypeError:
            raise ValueError(
                "learning_rate must be a number or a function of (round, epoch), got "
                f"a function of other arguments. {SCHEDULE}"
            ) from None


def check_rate(local: LocalTraining | Callable) -> None:
    """Raise ValueError if `local` has no learning rate, for algorithms that need it.

    A function is a training that knows its own.
    """
    if not callable(local) and local.learning_rate is None:
        raise ValueError(
            "learning_rate must be set for an optimizer that is a function of the "
            "rate, such as optax.sgd, and for an algorithm that uses it, got None."
        )


def check_state(local: LocalTraining, state: PyTree) -> None:
    """Raise ValueError if an optimizer's `state` has a learning rate of its own.

    An optax schedule counts steps in the state, which is a new one in every round; and
    a rate in the state stays that of the first step.
    """
    kinds = optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState
    is_node = lambda x: isinstance(x, kinds)
    changes = callable(local.optimizer) and callable(local.learning_rate)
    for node in filter(is_node, jax.tree.leaves(state, is_leaf=is_node)):
        is_rate_kept = isinstance(node, kinds[1]) and not node.hyperparams_states
        if not is_rate_kept:
            raise ValueError(
                "optimizer must have a constant rate within a round, got an optax "
                f"schedule, which would restart in every round. {SCHEDULE}"
            )
        if changes and "learning_rate" in node.hyperparams:
            raise ValueError(
                "optimizer must take a new rate at every step, got "
                "optax.inject_hyperparams, whose state keeps the first. Pass the "
                "factory inside, such as optax.sgd."
            )


def fold_in_keys(state: PyTree, key: jax.Array) -> PyTree:
    """Make every random key in an optimizer's state depend on `key` too.

    A client's optimizer starts anew in every round: from a seed alone, as of
    `optax.add_noise`, it would draw the same numbers for all clients in all rounds.
    """

    def fold(x):
        is_raw = isinstance(x, jax.Array) and (x.dtype, x.shape) == (jnp.uint32, (2,))
        is_key = is_raw or is_typed_key(x)
        return jax.random.fold_in(x, jax.random.bits(key)) if is_key else x

    return jax.tree.map(fold, state)


def with_raw_keys(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Wrap an optimizer so that keys in its state are numbers, which can be stored."""

    def to_numbers(x):
        return jax.random.key_data(x) if is_typed_key(x) else x

    def to_key(like, x):
        if not is_typed_key(like):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))

    def init(params):
        return jax.tree.map(to_numbers, optimizer.init(params))

    def update(updates, state, params: Any = None):
        typed = jax.tree.map(to_key, optimizer.init(params), state)
        steps, state = optimizer.update(updates, typed, params)
        return steps, jax.tree.map(to_numbers, state)

    return optax.GradientTransformation(init, update)


def is_typed_key(x: jax.Array) -> bool:
    """Whether it is a key of `jax.random.key`."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def learning_rate_at(
    local: LocalTraining, client: Client, step: jax.Array
) -> jax.Array:
    """Learning rate [] of a client's step."""
    rate = local.learning_rate
    if callable(rate):
        rate = rate(client.round, client.step_to_epoch(step))
    return jnp.asarray(rate, jnp.result_type(float))


def optimizer_at(local: LocalTraining, params: PyTree, rate: Callable):
    """Optimizer for one step; `rate: () -> []` is only called if it is needed."""
    if not callable(local.optimizer):
        return local.optimizer
    leaves = jax.tree.leaves(params)
    dtype = leaves[0].dtype if leaves else jnp.result_type(float)
    return local.optimizer(rate().astype(dtype))


def init_state(
    key: jax.Array, local: LocalTraining, variables: PyTree, client: Client
) -> TrainState:
    """Initial training state: `variables` without "local", a new optimizer state.

    Args:
      key: of the local training; random keys in the optimizer's state depend on it.
    """
    params, first = variables["params"], jnp.int32(0)
    rate = lambda: learning_rate_at(local, client, first)
    state = optimizer_at(local, params, rate).init(params)
    check_state(local, state)
    return TrainState(variables, fold_in_keys(state, jax.random.fold_in(key, NO_STEP)))


def local_step(local: LocalTraining, moves: str = "") -> Callable:
    """Build one step: take(key, iterate, client, batch, step, **round_args).

    Args:
      moves: regular expression over leaf paths such as `params/head`; the others are
        frozen and cost no gradient and no optimizer state; "" moves all.

    Returns:
      take -> (iterate, metrics), the metrics with the `loss` before the step.
    """
    check_local(local)
    loss_fn = as_aux_loss(local.loss)

    def take(key, iterate: TrainState, client, batch, step, **round_args):
        variables = iterate.variables
        params, frozen = trainable(moves, variables["params"])

        def all_params(params):
            joined = trees.join(params, frozen)
            return scanned_blocks.unstack_like(joined, variables["params"])

        def loss_of(params):
            network = {**variables, "params": all_params(params)}
            return loss_fn(unshard(network), batch, key, **round_args)

        (loss, aux), grads = value_and_grad(loss_of)(params)
        stats, metrics = aux
        rate = lambda: learning_rate_at(local, client, step)
        optimizer = optimizer_at(local, params, rate)
        updates, opt_state = optimizer.update(grads, iterate.opt_state, params)
        params = optax.apply_updates(params, updates)
        variables = {"params": all_params(params), "batch_stats": stats}
        return TrainState(variables, opt_state), {"loss": loss, **metrics}

    return take


def trainable(moves: str, params: PyTree) -> tuple[PyTree, PyTree]:
    """Leaves of `params` that match `moves`, and the others; None elsewhere.

    A stack of blocks that matches in part is cut.
    """
    if not moves:
        return params, jax.tree.map(lambda _: None, params)
    tree, mask = scanned_blocks.split_stacks({"params": params}, trees.matching(moves))
    return trees.split(mask["params"], tree["params"])


def build_local_training(local: LocalTraining | Callable, moves: str = "") -> Callable:
    """Build the training of one client for `client.num_steps` steps.

    Args:
      local: the client's training; a function is returned as it is.
      moves: see `local_step`.

    Returns:
      train(key, variables, client, **round_args) -> (variables, metrics): means over
      steps (0 for a client without a step), and `steps`.
    """
    if callable(local):
        return local
    take = local_step(local, moves)

    def train(key: jax.Array, variables: PyTree, client: Client, **round_args):
        def body(step, iterate):
            step_key, batch = jax.random.fold_in(key, step), client.batch(step)
            return take(step_key, iterate, client, batch, step, **round_args)

        start = variable_split.whole_variables(variables)
        moved, _ = trainable(moves, start["params"])
        first = init_state(key, local, {**start, "params": moved}, client)
        end, metrics = run_steps(body, TrainState(start, first.opt_state), client)
        return variable_split.split_paths(end.variables, variables), metrics

    return train


def run_steps(body: Callable, carry: PyTree, client: Client) -> tuple[PyTree, PyTree]:
    """Fold `body: (step [], carry) -> (carry, metrics)` over the client's own steps.

    They are in loops of `client.steps_per_loop` steps, whose length the compiler knows.

    Returns:
      (carry, metrics): means over steps (0 for a client without a step), and `steps`.
    """

    body = jax.jit(body, inline=True)  # traced once, for shapes and for the loop

    def advance(progress: LoopState) -> LoopState:
        carry, metrics = body(progress.step, progress.carry)
        sums = jax.tree.map(jnp.add, progress.sums, metrics)
        return LoopState(progress.step + 1, carry, sums)

    _, metrics = jax.eval_shape(body, jnp.int32(0), carry)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
    ongoing = lambda progress: progress.step < client.num_steps
    start = LoopState(jnp.int32(0), carry, sums)

    def advance_ongoing(_, progress: LoopState) -> LoopState:
        return trees.where(ongoing(progress), advance(progress), progress)

    if client.steps_per_loop:
        end = in_counted_loops(advance_ongoing, start, client)
    else:
        end = jax.lax.while_loop(ongoing, advance, start)
    means = trees.divide(end.sums, jnp.maximum(end.step, 1))
    return end.carry, {**means, "steps": end.step.astype(jnp.float32)}


@custom_vmap
def max_lane_steps(num_steps: jax.Array) -> jax.Array:
    """Largest number of steps [] of all lanes, the same in each of them."""
    return num_steps


@max_lane_steps.def_vmap
def _max_over_lanes(num_lanes, is_batched, num_steps):
    del num_lanes, is_batched
    return num_steps.max(0), False


def in_counted_loops(advance: Callable, progress: PyTree, client: Client) -> PyTree:
    """Run `advance: (_, progress) -> progress` until the longest lane has ended.

    Loops of each length of `client.steps_per_loop`, descending, run the steps that the
    longer ones have left; the shortest ones run the rest, and up to their length more.
    """
    max_steps = max_lane_steps(client.num_steps)
    state = jnp.int32(0), progress
    for length in client.steps_per_loop:
        min_left = 1 if length == client.steps_per_loop[-1] else length
        is_due = lambda state, min_left=min_left: max_steps - state[0] >= min_left

        def turn(state, length=length):
            done, progress = state
            return done + length, jax.lax.fori_loop(0, length, advance, progress)

        state = jax.lax.while_loop(is_due, turn, state)
    return state[1]


def total_rate(local: LocalTraining, client: Client) -> jax.Array:
    """Sum of the learning rates over the client's steps, []."""
    rate = lambda step: learning_rate_at(local, client, step)
    zero = jnp.zeros((), jax.eval_shape(rate, jnp.int32(0)).dtype)
    total, _ = run_steps(lambda step, sum: (sum + rate(step), {}), zero, client)
    return total
