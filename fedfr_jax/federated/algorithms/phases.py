"""Local training in phases that move different leaves: heads first, then bodies.

What FedRep (arXiv:2102.07078) and FedPer with fine-tuning (arXiv:1912.00818) add to
FedAvg. FedPer's is `phases=((head, 0), ("", 1))`: an epoch of the head, then all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.local import local_training
from fedfr_jax.types import Client, Local


def phased_training(local: Local, *, phases: tuple[tuple[str, int], ...]) -> Callable:
    """Local training in phases, each with fresh optimizer state.

    Args:
      phases: (regular expression of the leaves that move, first epoch); a phase lasts
        to the next one's first epoch, the last to the round's end.

    Raises:
      ValueError: when first epochs do not rise from 0.
    """
    first = [epoch for _, epoch in phases]
    if first != sorted(set(first)) or first[:1] != [0]:
        raise ValueError(f"phases must start at rising epochs from 0, got {first}.")
    fits = [local_training(local, moves) for moves, _ in phases]

    def train(key, variables, client, **round_args):
        bounds = [first_step(client, epoch) for epoch in first] + [client.num_steps]
        sums = []
        for i, fit in enumerate(fits):
            part = between(client, bounds[i], bounds[i + 1])
            phase_key = jax.random.fold_in(key, i)
            variables, means = fit(phase_key, variables, part, **round_args)
            steps = means.pop("steps")
            weighted = jax.tree.map(lambda x, n=steps: x * n.astype(x.dtype), means)
            sums.append({**weighted, "steps": steps})
        total = jax.tree.map(lambda *x: sum(x), *sums)
        means = trees.divided(total, jnp.maximum(total["steps"], 1))
        return variables, {**means, "steps": total["steps"]}

    return train


def first_step(client: Client, epoch: int) -> jax.Array:
    """First step of `epoch`, at most the number of steps, [] int32."""
    early = lambda step: (step < client.num_steps) & (client.epoch(step) < epoch)
    return jax.lax.while_loop(early, lambda step: step + 1, jnp.int32(0))


def between(client: Client, start: jax.Array, end: jax.Array) -> Client:
    """The client whose steps are [start, end) of `client`'s."""
    return client._replace(
        num_steps=end - start,
        epoch=lambda step: client.epoch(step + start),
        batch=lambda step: client.batch(step + start),
    )
