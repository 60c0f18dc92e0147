"""Static state of a federated simulation."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import Round
from fedfr_jax.federated.privacy.accountant import Accountant
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.federated.streaming import DeviceData, StreamedData
from fedfr_jax.federated.systems.rounds import Systems
from fedfr_jax.federated.systems.stragglers import Stragglers
from fedfr_jax.types import Algorithm, Cohort, Dataset, PyTree, RoundContext


class Simulation(NamedTuple):
    """Everything of a federated run that is constant over rounds."""

    algorithm: Algorithm
    batching: Batching
    mesh: Mesh
    data: DeviceData | StreamedData  # the table on the mesh
    population: Population
    local_epochs: Callable  # round -> E, or one per client [N]
    cohort_size: int  # K
    clients_per_device: int  # L
    seed: int
    num_partial_sums: int | None  # V of the canonical reduction, None for plain sums
    programs: Round
    key: jax.Array  # [] key of the seed, on the mesh
    stragglers: Stragglers
    hyper: PyTree  # argument of the algorithm's factory in `programs`, on the mesh
    systems: Systems = Systems()
    sampling: Sampling = Sampling()
    accountant: Accountant | None = None  # of the algorithm's privacy
    # `algorithm` without the systems state, see `systems/state.py`
    inner_algorithm: Algorithm | None = None
    steps_per_loop: tuple[int, ...] = ()  # of local training, see `local.run_steps`

    @property
    def device_data(self) -> Dataset | Stream:
        """All examples; a `Dataset` is on every device."""
        return self.data.dataset

    @property
    def num_places(self) -> int:
        """Largest number of clients in a round, over-selection included."""
        cohort_size = self.systems.num_asked(self.cohort_size)
        return self.sampling.max_cohort(self.population.num_clients, cohort_size)

    @property
    def largest(self) -> np.ndarray:
        """Number of examples of the largest clients of a round, descending."""
        return self.population.largest(self.num_places)

    def context(self, cohort: Cohort) -> RoundContext:
        """Inputs of `Algorithm.prepare` for a cohort."""
        return RoundContext(
            dataset=self.device_data,
            population=self.population,
            cohort=cohort,
            batching=self.batching,
            mesh=self.mesh,
        )
