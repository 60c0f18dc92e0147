"""Settings of federated stages."""

from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.augment import Augments
from fedfr_jax.federated.sampling import Sampling, check_sampling
from fedfr_jax.federated.systems.failures import Stragglers, check_stragglers
from fedfr_jax.federated.systems.rounds import Systems
from fedfr_jax.federated.systems.settings import SystemsConfig
from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import SectionReader, raw, section
from fedfr_jax.ranges import BatchSize, BelowOne, ByRound, Count, Positive, Share, Whole
from fedfr_jax.schema import naming
from fedfr_jax.types import FederatedTrainer

AUTO = "auto"


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
    data_placement: Literal["auto", "device", "stream"] = (
        "auto"  # where the examples are: on the device, or a stream to it
    )
    stream_buffer_gib: Positive = 1.0  # GiB that streamed examples may take on a device

    @property
    def straggling(self) -> Stragglers:
        """Stragglers as `build_simulation` takes them."""
        return Stragglers(self.straggler_fraction, self.drop_stragglers)

    def build_systems(self, num_clients: int) -> Systems:
        """Build the clients' systems (devices, availability), empty by default."""
        return self.systems.build(num_clients, self.cohort_size or num_clients)

    def epochs_of(self, trainer: FederatedTrainer) -> int | tuple[int, ...]:
        """Local epochs of a method, or those shared by all methods."""
        method_epochs = trainer.local_epochs
        return self.local_epochs if method_epochs is None else method_epochs

    def options_of(self, trainer: FederatedTrainer, num_clients: int) -> dict:
        """Options of a method's rounds for `build_simulation` and `sweep`."""
        return {
            "cohort_size": self.cohort_size,
            "local_epochs": self.epochs_of(trainer),
            "reproducible_sum": self.reproducible_sum,
            "num_partial_sums": self.num_partial_sums,
            "steps_per_loop": self.steps_per_loop,
            "stragglers": self.straggling,
            "sampling": self.sampling,
            "systems": self.build_systems(num_clients),
        }


def build_mesh(federation: Federation) -> Mesh:
    """Build the mesh of all devices, with `model_shards` of them for each network."""
    with naming("config.federation.model_shards"):
        return make_mesh(num_model_shards=federation.model_shards)


def check_federation(settings: Federation, num_clients: int) -> None:
    """Raise ValueError for settings that do not fit the clients or each other."""
    for name in ("evaluate_every", "checkpoint_every"):
        if settings.rounds_per_call != 1 and settings._asdict()[name] == 1:
            raise ValueError(
                f"config.federation.rounds_per_call must be 1 with {name} 1, as a call "
                f"ends where something is due, got {settings.rounds_per_call}. Set "
                f"{name} to {settings.rounds_per_call}, or 0 for the last round alone."
            )
    with naming("config.federation"):
        min_epochs = int(np.min(settings.local_epochs))
        cohort_size = settings.cohort_size or num_clients
        check_sampling(settings.sampling, num_clients, cohort_size)
        settings.build_systems(num_clients)
        check_stragglers(settings.straggling, min_epochs, cohort_size)
