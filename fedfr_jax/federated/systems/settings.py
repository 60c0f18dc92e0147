"""Build `Systems` from a config: the key `systems` of a federation.

config.federation.systems = {
    "dropout": {"before_training": 0.05},
    "profiles": {"name": "log_normal", "gflops": 1.0},
    "availability": {"name": "csv", "path": "traces.csv"},
    "over_selection": 1.3,
    "sampling": {"name": "oort"},
}
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, NamedTuple

from fedfr_jax.federated.systems.asynchronous import Asynchronous, fedasync, fedbuff
from fedfr_jax.federated.systems.devices import (
    Availability,
    Profiles,
    diurnal_availability,
    log_normal_profiles,
    read_availability,
    read_profiles,
)
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.rounds import Systems, check_systems
from fedfr_jax.federated.systems.sampling import Oort, PowerOfChoice
from fedfr_jax.parts import Built, Factory, Member, Part, section
from fedfr_jax.schema import naming

SECTION = "federation.systems"


def profiles_of_file(num_clients: int, *, path: str) -> Profiles:
    """`read_profiles` with the arguments of `log_normal_profiles`."""
    return read_profiles(path, num_clients)


def availability_of_file(num_clients: int, *, path: str) -> Availability:
    """`read_availability` with the arguments of `diurnal_availability`."""
    return read_availability(path, num_clients)


PROFILES: dict[str, Callable] = {
    "log_normal": log_normal_profiles,
    "csv": profiles_of_file,
}
AVAILABILITY: dict[str, Callable] = {
    "diurnal": diurnal_availability,
    "csv": availability_of_file,
}
SAMPLING: dict[str, Callable] = {"power_of_choice": PowerOfChoice, "oort": Oort}
ASYNCHRONOUS: dict[str, Callable] = {"fedbuff": fedbuff, "fedasync": fedasync}


@section
class SystemsConfig(NamedTuple):
    """Keys of config.federation.systems."""

    dropout: Annotated[Dropout, Built(Factory(Dropout))] = MappingProxyType({})  # type: ignore
    profiles: Annotated[Part | None, Member(PROFILES, num_args=1)] = None
    availability: Annotated[Part | None, Member(AVAILABILITY, num_args=1)] = None
    over_selection: float = 1.0
    deadline: float = 0.0
    partial_work: bool = False
    sampling: Annotated[PowerOfChoice | Oort | None, Built(Member(SAMPLING))] = None
    asynchronous: Annotated[Asynchronous | None, Built(Member(ASYNCHRONOUS))] = None

    def build(self, num_clients: int, cohort_size: int) -> Systems:
        """Build and check the `Systems` of so many clients."""
        per_client = {"profiles": self.profiles, "availability": self.availability}
        built = {key: part and part(num_clients) for key, part in per_client.items()}
        systems = Systems(**{**self._asdict(), **built})
        with naming(f"config.{SECTION}"):
            check_systems(systems, num_clients, systems.num_counted(cohort_size))
        return systems
