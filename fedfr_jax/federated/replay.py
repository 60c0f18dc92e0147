"""Counterfactual replay: the same rounds again, with some clients left out.

A member of a replay is a run with the cohorts, batches and keys of another one, whose
excluded clients never take part: masks of participation select their slots away, so
that nothing of them is summed, counted or stored, and a round without any client leaves
the server as it was. Members are those of a vmapped sweep with equal seeds.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.model_parallel import placement
from fedfr_jax.federated.rounds import train_calls
from fedfr_jax.federated.simulation import open_store, sweep
from fedfr_jax.federated.state import Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.types import PyTree


class Member(NamedTuple):
    """A member of a replay after its rounds."""

    sim: Simulation  # of the run, with the clients that are excluded
    server: PyTree
    store: Store


class Replayer:
    """Trains the rounds of a run again, `group_size` members at a time."""

    def __init__(
        self, sim: Simulation, server: PyTree, num_rounds: int, group_size: int
    ):
        """Keep the run and its first `server`; trains nothing yet."""
        check_replay(sim)
        self.sim, self.server = without_footprint(sim), server
        self.num_rounds, self.group_size = num_rounds, group_size

    def train(self, excluded: Sequence[np.ndarray]) -> Iterator[Member]:
        """Yield a member for each set of excluded clients, ids [n].

        The last group is filled up with members that are not yielded, so that all are
        one program.
        """
        for first in range(0, len(excluded), self.group_size):
            group = list(excluded[first : first + self.group_size])
            num_missing = self.group_size - len(group)
            members = self._train_group(group + group[-1:] * num_missing)
            yield from members[: len(group)]

    @functools.cached_property
    def runs(self) -> Runs:
        """The members' program."""
        sim, count = self.sim, self.group_size
        return sweep(
            lambda hyper: sim.inner_algorithm,
            sim.batching,
            sim.device_data,
            sim.population,
            sim.settings,
            hypers=[()] * count,
            seeds=[sim.settings.seed] * count,
            mesh=sim.mesh,
            has_shared_slots=sim.inner_algorithm.prepare is None,
        )

    def _train_group(self, excluded: Sequence[np.ndarray]) -> list[Member]:
        sims = [self.sim._replace(excluded=np.asarray(ids)) for ids in excluded]
        stores = [open_store(sim, self.server) for sim in sims]
        stack = lambda x: jnp.broadcast_to(x, (len(sims), *x.shape))
        servers = jax.tree.map(stack, self.server)
        servers = jax.device_put(servers, placement(self.sim.mesh, servers, None))
        runs, ends = self.runs._replace(sims=tuple(sims)), [servers]

        def keep(call):
            ends[:] = [call.servers]

        calls = [(first, first + 1) for first in range(self.num_rounds)]
        train_calls(runs, servers, stores, calls, keep)
        parts = zip(sims, stores, strict=True)
        return [
            Member(sim, runs.member(ends[0], s), store)
            for s, (sim, store) in enumerate(parts)
        ]


def without_footprint(sim: Simulation) -> Simulation:
    """A simulation that counts no energy, which members do not."""
    systems = sim.settings.systems._replace(footprint=None)
    return sim._replace(settings=sim.settings._replace(systems=systems))


def prepares_together(sim: Simulation) -> bool:
    """Whether a round begins with what all clients of its cohort compute."""
    algorithm = sim.inner_algorithm
    return algorithm.prepare is not None and not algorithm.prepare_is_local


def check_replay(sim: Simulation) -> None:
    """Raise ValueError for a run whose members cannot be trained in one program."""
    reasons = {
        "clients that take time or are chosen by loss": sim.settings.systems.has_state,
        "streamed examples": sim.data.is_streamed,
        "a mean over the whole cohort before training": prepares_together(sim),
        f"{jax.process_count()} processes": jax.process_count() > 1,
    }
    for reason, is_there in reasons.items():
        if is_there:
            raise ValueError(
                "a replay needs examples in device memory, one process, and clients "
                "sampled by the seed alone that prepare alone, got "
                f"{reason}. Take another method or settings."
            )
