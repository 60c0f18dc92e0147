"""Checks of a client's optimizer and learning rate."""

import inspect
from collections.abc import Callable

import jax
import optax

from fedfr_jax.types import LocalTraining, PyTree

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
    if not has_own and rate is None:
        raise ValueError(
            "learning_rate must be set for an optimizer that is a function of the "
            "rate, such as optax.sgd, got None."
        )
    if callable(rate) and not _takes_two(rate):
        raise ValueError(
            "learning_rate must be a number or a function of (round, epoch), got a "
            f"function of other arguments. {SCHEDULE}"
        )


def _takes_two(function: Callable) -> bool:
    try:
        inspect.signature(function).bind(0, 0)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def check_rate(local: LocalTraining) -> None:
    """Raise ValueError if `local` has no learning rate, for algorithms that need it.

    A function is a training that knows its own.
    """
    if not callable(local) and local.learning_rate is None:
        raise ValueError(
            "learning_rate must be set for this algorithm, which uses it, with an "
            "optimizer that is a function of the rate, such as optax.sgd, got None."
        )


def check_state(local: LocalTraining, state: PyTree) -> None:
    """Raise ValueError if an optimizer's `state` has a learning rate of its own.

    An optax schedule counts steps in the state, which is a new one in every round; and
    a rate in the state stays that of the first step.
    """
    is_injected = lambda x: isinstance(x, optax.InjectStatefulHyperparamsState)
    is_node = lambda x: isinstance(x, optax.ScaleByScheduleState) or is_injected(x)
    nodes = [x for x in jax.tree.leaves(state, is_leaf=is_node) if is_node(x)]
    if any(not is_injected(x) or x.hyperparams_states for x in nodes):
        raise ValueError(
            "optimizer must have a constant rate within a round, got an optax "
            f"schedule, which would restart in every round. {SCHEDULE}"
        )
    changes = callable(local.optimizer) and callable(local.learning_rate)
    if changes and any("learning_rate" in x.hyperparams for x in nodes):
        raise ValueError(
            "optimizer must take a new rate at every step, got "
            "optax.inject_hyperparams, whose state keeps the first. Pass the factory "
            "inside, such as optax.sgd."
        )
