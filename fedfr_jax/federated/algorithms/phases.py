"""Local training in phases that update different parameters.

What FedRep (arXiv:2102.07078) and FedPer with fine-tuning (arXiv:1912.00818) add to
FedAvg: FedRep's phases divide a round's epochs, FedPer's head trains before them.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.types import Client, LocalTraining


def phased_training(
    local: LocalTraining, *, phases: tuple[tuple[str, int], ...]
) -> Callable:
    """Build local training in phases, each with a new optimizer state.

    Args:
      phases: (regular expression of the leaves that move, first epoch), ascending
        from 0; a phase lasts to the next one's first epoch, the last to the round's
        end.
    """
    first = [epoch for _, epoch in phases]
    fits = [build_local_training(local, moves) for moves, _ in phases]

    def parts(client):
        bounds = [first_step(client, epoch) for epoch in first] + [client.num_steps]
        return [steps_between(client, *ends) for ends in itertools.pairwise(bounds)]

    return alternate(fits, parts)


def head_first(local: LocalTraining, *, head: str, epochs: int) -> Callable:
    """Build local training that first trains the head for `epochs`, then everything.

    FedPer's fine-tuning: a client's own layers meet the base that it was just sent.
    The base's running statistics move in these epochs too, as it is in training.

    Args:
      head: regular expression of the leaves that move first.
      epochs: >= 1, in addition to those of the round.
    """
    fits = [build_local_training(local, moves) for moves in (head, "")]

    def parts(client):
        endless = client._replace(num_steps=jnp.int32(2**31 - 1))
        steps = first_step(endless, epochs)
        steps = jnp.where(client.num_steps > 0, steps, 0)
        # The round's own epochs are counted from 0, on the batches after the head's.
        later = client._replace(batch=lambda step: client.batch(step + steps))
        return client._replace(num_steps=steps), later

    return alternate(fits, parts)


def alternate(fits: Sequence[Callable], parts: Callable) -> Callable:
    """Build local training that runs several local trainings in sequence.

    Args:
      fits: as `build_local_training` gives them.
      parts: client -> the client that each of them trains.
    """

    def train(key, variables, client, **round_args):
        sums = []
        for i, (fit, part) in enumerate(zip(fits, parts(client), strict=True)):
            phase_key = jax.random.fold_in(key, i)
            variables, means = fit(phase_key, variables, part, **round_args)
            steps = means.pop("steps")
            weighted = jax.tree.map(lambda x, n=steps: x * n.astype(x.dtype), means)
            sums.append({**weighted, "steps": steps})
        total = jax.tree.map(lambda *x: sum(x), *sums)
        means = trees.divide(total, jnp.maximum(total["steps"], 1))
        return variables, {**means, "steps": total["steps"]}

    return train


def first_step(client: Client, epoch: int) -> jax.Array:
    """First step of `epoch`, at most the number of steps, [] int32.

    By bisection, a loop of known length in which no GPU asks the host.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + ((high - low) >> 1)
        is_early = (middle < high) & (client.step_to_epoch(middle) < epoch)
        low = jnp.where(is_early, middle + 1, low)
        return low, jnp.where(is_early, high, middle)

    bounds = jnp.int32(0), jnp.int32(client.num_steps)
    return jax.lax.fori_loop(0, 31, halve, bounds)[0]


def steps_between(client: Client, start: jax.Array, end: jax.Array) -> Client:
    """Client restricted to the steps [start, end)."""
    return client._replace(
        num_steps=end - start,
        step_to_epoch=lambda step: client.step_to_epoch(step + start),
        batch=lambda step: client.batch(step + start),
    )
