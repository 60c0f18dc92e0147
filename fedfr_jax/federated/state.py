"""A federated simulation: all that is constant over its rounds."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.client import Population, SharedSlots, share_slots
from fedfr_jax.federated.engine import Round
from fedfr_jax.federated.privacy.accountant import Accountant
from fedfr_jax.federated.schedule import Schedule
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.streaming import DeviceData, StreamedData
from fedfr_jax.federated.systems.devices import Work
from fedfr_jax.types import (
    Algorithm,
    AnyArray,
    Cohort,
    Dataset,
    Prepared,
    PyTree,
    RoundContext,
)


class Simulation(NamedTuple):
    """Everything of a federated run that is constant over rounds."""

    algorithm: Algorithm
    batching: Batching
    mesh: Mesh
    data: DeviceData | StreamedData  # all examples, on the mesh
    population: Population
    settings: Settings  # its cohort_size is K
    programs: Round
    key: jax.Array  # [] key of the seed, on the mesh
    hyper: PyTree  # argument of the algorithm's factory in `programs`, on the mesh
    steps_per_loop: tuple[int, ...]  # of local training, see `local.run_steps`
    accountant: Accountant | None  # of the algorithm's privacy
    # `algorithm` without the systems state, see `systems/state.py`
    inner_algorithm: Algorithm
    work: Work = Work(0, 0, 0, 0)  # of a client, counted if rounds take time
    # [n] ids of clients that are in cohorts and never take part; None: no such clients
    excluded: np.ndarray | None = None

    @property
    def device_data(self) -> Dataset | Stream:
        """All examples; a `Dataset` is on every device."""
        return self.data.dataset

    @property
    def num_places(self) -> int:
        """Largest number of clients in a round, over-selection included."""
        return len(self.population.sizes_descending)

    @property
    def idle_lanes(self) -> str:
        """What to do about lanes that no round has clients for; "" for none."""
        lanes = self.settings.clients_per_device
        most = -(-self.num_places // self.mesh.shape[meshes.CLIENTS])
        if lanes <= most:
            return ""
        return (
            f"clients_per_device is {lanes}, but a round has {most} clients for each "
            f"device: the other lanes compute nothing. Set it to {most}."
        )

    @property
    def largest(self) -> np.ndarray:
        """Number of examples of the largest clients of a round, descending."""
        return self.population.sizes_descending

    @property
    def runs(self) -> "Runs":
        """The simulation alone, as runs of one program."""
        return Runs((self,), self.programs, self.key, self.hyper)

    def context(self, cohort: Cohort) -> RoundContext:
        """Inputs of `Algorithm.prepare` for a cohort."""
        return RoundContext(
            dataset=self.device_data,
            population=self.population,
            cohort=cohort,
            batching=self.batching,
            mesh=self.mesh,
        )


class Runs(NamedTuple):
    """Runs of one program: a single one, or the S members of a sweep.

    Arrays of a sweep's members have an axis [S], those of a single run have none.
    Members that share their slots train the same clients with one key and the same
    server's preparation, which then have none either.
    """

    sims: tuple[Simulation, ...]  # each alone
    programs: Round  # of all
    key: jax.Array  # [S] keys of the seeds, [] if shared
    hyper: PyTree  # leaves [S]
    build_member: Callable | None = None  # of a sweep: hyper -> Algorithm
    has_shared_slots: bool = False

    @property
    def is_sweep(self) -> bool:
        """Whether arrays have an axis of members."""
        return self.build_member is not None

    def join(self, trees: Sequence[PyTree], axis: int = 0) -> PyTree:
        """Stack host arrays of all runs along a new axis of members."""
        if not self.is_sweep:
            (tree,) = trees
            return tree
        return jax.tree.map(lambda *x: np.stack(x, axis), *trees)

    def join_slots(self, slots: Sequence[np.ndarray], axis: int) -> SharedSlots | Any:
        """Join packed slots of all runs, with an axis of members where they differ."""
        if self.has_shared_slots:
            return share_slots(slots, axis)
        return self.join(slots, axis)

    def join_extras(self, extras: Sequence[Prepared]) -> Prepared:
        """Join what servers have prepared for a round."""
        return extras[0] if self.has_shared_slots else self.join(extras)

    def member(self, tree: PyTree, s: int, axis: int = 0) -> PyTree:
        """Part of run s in arrays of all."""
        if not self.is_sweep:
            return tree
        return jax.tree.map(lambda x: x[(slice(None),) * axis + (s,)], tree)


class RoundLog(NamedTuple):
    """Results of one round, of the K clients whose update was received."""

    ids: np.ndarray  # [K] int64, in the order of all other arrays
    metrics: dict[str, np.ndarray]  # {name: [K]}
    num_added: AnyArray  # [K] int32 examples added by the server
    schedule: Schedule
    # {name: number} of the round: absent clients, epsilon, simulated time
    counts: Mapping[str, float] = MappingProxyType({})
