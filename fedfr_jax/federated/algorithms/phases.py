"""Local training in phases that move different parameters: FedRep, FedPer's tuning.

FedRep's phases divide a round's epochs, FedPer's head trains before them.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import Count
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, Client, LocalTraining


@checked
def fedrep(
    local: LocalTraining,
    *,
    head: str,
    head_epochs: Count,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """FedRep: train the head for `head_epochs`, then the shared body.

    Collins et al. 2021, arXiv:2102.07078, algorithm 1. Only the body is averaged.
    Deviation: clients are weighted by examples, as in the authors' code; the paper's
    count equally.

    Args:
      head: regular expression over leaf paths such as `params/head`, not of all params.
      head_epochs: fewer than the epochs of any round, of which the body has the others.
      weighting: see `fedavg`.
    """
    body = f"^(?!.*(?:{head}))"
    train = phased_training(local, phases=((head, 0), (body, head_epochs)))
    algorithm = with_personal_layers(fedavg(train, weighting=weighting), head)

    def init(variables):
        _, is_head = scanned_blocks.split_stacks(variables, trees.matching(head))
        if all(jax.tree.leaves(is_head["params"])):
            raise ValueError(
                f"head must leave some params to the body, got {head!r}, which matches "
                "all."
            )
        return algorithm.init(variables)

    def check_epochs(min_epochs):
        if head_epochs >= min_epochs:
            raise ValueError(
                f"head_epochs must be below the {min_epochs} local epochs of a round, "
                f"so that the body trains, got {head_epochs}."
            )

    return algorithm._replace(init=init, check_epochs=check_epochs)


def phased_training(
    local: LocalTraining, *, phases: tuple[tuple[str, int], ...]
) -> Callable:
    """Build local training in phases, each with a new optimizer state.

    Args:
      phases: (regular expression of the leaves that move, first epoch), ascending
        from 0; a phase lasts to the next one's first epoch, the last to the round's
        end.
    """
    fits = [build_local_training(local, moves) for moves, _ in phases]

    def parts(client):
        starts = [epoch * client.steps_per_epoch for _, epoch in phases]
        starts = [jnp.minimum(start, client.num_steps) for start in starts]
        bounds = itertools.pairwise([*starts, client.num_steps])
        return [from_step(client, start, end - start) for start, end in bounds]

    return alternate(fits, parts)


def head_first(local: LocalTraining, *, head: str, epochs: int) -> Callable:
    """Build local training that first trains the head for `epochs`, then everything.

    FedPer's fine-tuning, arXiv:1912.00818: a client's own layers meet the base that it
    was just sent, whose running statistics move in these epochs too.

    Args:
      head: regular expression of the leaves that move first.
      epochs: >= 1, in addition to those of the round.
    """
    fits = [build_local_training(local, moves) for moves in (head, "")]

    def parts(client):
        steps = jnp.where(client.num_steps > 0, epochs * client.steps_per_epoch, 0)
        # The round's own epochs are counted from 0, on the batches after the head's.
        later = from_step(client, steps, client.num_steps)
        later = later._replace(step_to_epoch=client.step_to_epoch)
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


def from_step(client: Client, start: jax.Array, num_steps: jax.Array) -> Client:
    """Client that takes its steps from `start` on."""
    return client._replace(
        num_steps=num_steps,
        step_to_epoch=lambda step: client.step_to_epoch(step + start),
        batch=lambda step: client.batch(step + start),
    )
