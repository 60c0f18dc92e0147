"""Settings of rounds, and of the federated stages of an experiment."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import MinLen
from jax.sharding import Mesh

from fedfr_jax.data.augment import Augments
from fedfr_jax.federated.sampling import Sampling, check_sampling
from fedfr_jax.federated.systems.failures import Stragglers, check_stragglers
from fedfr_jax.federated.systems.settings import Systems, SystemsConfig, check_systems
from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import SectionReader, raw, section
from fedfr_jax.ranges import (
    BatchSize,
    BelowOne,
    ByRound,
    Count,
    Positive,
    Seed,
    Share,
    Whole,
)
from fedfr_jax.schema import naming
from fedfr_jax.types import FederatedTrainer

AUTO = "auto"


class Settings(NamedTuple):
    """How rounds are run."""

    cohort_size: Whole = 0  # K in [1, N]; 0: all clients in every round
    # Passes over a client's examples. A tuple gives one number per round and its last
    # entry stays; a function of the round gives a number, or one per client [N].
    local_epochs: Whole | Annotated[tuple[Whole, ...], MinLen(1)] | Callable = 1
    clients_per_device: Count = 1  # L, trained in parallel on a device
    seed: Seed = 0
    # Whether sums over clients have the same bits on any number of devices and in any
    # order of the cohort. clients_per_device still matters, and FedDANE's gradients are
    # added up before the round, device by device.
    reproducible_sum: bool = False
    # V of reproducible sums, best a multiple of every number of devices that will be
    # used: a cohort has places for K rounded up to V x clients_per_device, and a device
    # holds V / devices of the sums.
    num_partial_sums: Count = 8
    stragglers: Stragglers = Stragglers()
    systems: Systems = Systems()
    sampling: Sampling = Sampling()
    # Local steps of loops whose length the compiler knows: a length, or several in
    # descending order, 1 for none; "auto" chooses them on GPUs.
    steps_per_loop: Count | tuple[Count, ...] | Literal["auto"] = AUTO

    @property
    def partial_sums(self) -> int | None:
        """V, None for sums of which each device has one."""
        return self.num_partial_sums if self.reproducible_sum else None

    def epochs(self, round: int) -> int | np.ndarray:
        """Passes over a client's examples in a round: a number, or one per client."""
        if callable(self.local_epochs):
            return self.local_epochs(round)
        epochs = np.atleast_1d(self.local_epochs).tolist()
        return epochs[min(round, len(epochs) - 1)]


@section
class Federation(NamedTuple):
    """Settings shared by the federated methods of an experiment."""

    rounds: Count = 20
    cohort_size: Whole = 0  # 0: all clients
    # How a cohort is drawn: shuffle, fixed, poisson or cyclic, or {"name": ..., ...}.
    sampling: Annotated[Sampling, SectionReader(Sampling, by_name=True)] = raw(
        "shuffle"
    )
    # Clients that fail, take time or are not always there, see docs/how-to/systems.md.
    systems: SystemsConfig = MappingProxyType({})  # type: ignore
    local_epochs: ByRound = (10, 8, 6, 4)
    straggler_fraction: BelowOne = 0.0  # share of a cohort that trains for fewer epochs
    drop_stragglers: bool = False  # they are left out, as original FedAvg does
    batch_size: BatchSize = 64
    drop_last: bool = False
    flip_probability: Share = 0.5
    augment: Augments = ()  # after the mirror, see data/augment
    clients_per_device: Count = 1
    # Local steps of loops whose length the compiler knows, such as (8, 1); 1: none;
    # auto: on GPUs.
    steps_per_loop: Count | tuple[Count, ...] | Literal["auto"] = AUTO
    reproducible_sum: bool = False  # same bits on any number of devices
    num_partial_sums: Count = 8  # of reproducible sums, best a multiple of the devices
    model_shards: Count = 1  # devices that hold one network's parameters together
    # At most, without the host. Pays where a round is shorter than the host's work
    # around it, not where it is mostly personal rows: docs/explanation/engine.md.
    rounds_per_call: Count = 1
    evaluate_every: Whole = 0  # rounds between generic evaluations; 0: after the last
    checkpoint_every: Whole = 1
    # Rounds between those with every client's numbers in clients.jsonl; others, and
    # with 0 all, have their distribution over the cohort.
    log_clients_every: Whole = 1
    data_placement: Literal["auto", "device", "stream"] = (
        "auto"  # where the examples are: on the device, or a stream to it
    )
    stream_buffer_gib: Positive = 1.0  # GiB that streamed examples may take on a device

    def check(self) -> None:
        """Raise ValueError for keys that exclude each other."""
        for name in ("evaluate_every", "checkpoint_every"):
            if self.rounds_per_call != 1 and self._asdict()[name] == 1:
                raise ValueError(
                    f"config.federation.rounds_per_call must be 1 with {name} 1, as a "
                    "call ends where something is due, got "
                    f"{self.rounds_per_call}. Set {name} to {self.rounds_per_call}, "
                    "or 0 for the last round alone."
                )

    @property
    def straggling(self) -> Stragglers:
        """Stragglers of a round."""
        return Stragglers(self.straggler_fraction, self.drop_stragglers)

    def epochs_of(self, trainer: FederatedTrainer) -> int | tuple[int, ...]:
        """Local epochs of a method, or those shared by all methods."""
        method_epochs = trainer.local_epochs
        return self.local_epochs if method_epochs is None else method_epochs

    def rounds_of(
        self, trainer: FederatedTrainer, num_clients: int, seed: int
    ) -> Settings:
        """Settings of a method's rounds."""
        settings = self.rounds_with(num_clients, seed)
        return settings._replace(local_epochs=self.epochs_of(trainer))

    def rounds_with(self, num_clients: int, seed: int = 0) -> Settings:
        """Settings of rounds with so many clients."""
        return Settings(
            cohort_size=self.cohort_size,
            local_epochs=self.local_epochs,
            clients_per_device=self.clients_per_device,
            seed=seed,
            reproducible_sum=self.reproducible_sum,
            num_partial_sums=self.num_partial_sums,
            stragglers=self.straggling,
            systems=self.systems.build(num_clients),
            sampling=self.sampling,
            steps_per_loop=self.steps_per_loop,
        )


def build_mesh(federation: Federation) -> Mesh:
    """Build the mesh of all devices, with `model_shards` of them for each network."""
    with naming("config.federation.model_shards"):
        return make_mesh(num_model_shards=federation.model_shards)


def check_federation(federation: Federation, num_clients: int) -> None:
    """Raise ValueError for settings that so many clients cannot have."""
    with naming("config.federation"):
        check_rounds(federation.rounds_with(num_clients), num_clients)


def check_rounds(settings: Settings, num_clients: int) -> Settings:
    """Check that so many clients can have such rounds; return the settings with K."""
    systems, stragglers = settings.systems, settings.stragglers
    cohort_size = systems.num_counted(settings.cohort_size or num_clients)
    check_sampling(settings.sampling, num_clients, cohort_size)
    check_systems(systems, num_clients, cohort_size)
    if not callable(settings.local_epochs):
        check_stragglers(stragglers, int(np.min(settings.local_epochs)), cohort_size)
    return settings._replace(cohort_size=cohort_size)
