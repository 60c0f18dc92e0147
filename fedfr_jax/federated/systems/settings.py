"""Systems: clients that fail, take time or are not always there, and their config.

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

import numpy as np

from fedfr_jax.federated.systems import fedscale
from fedfr_jax.federated.systems.asynchronous import (
    Asynchronous,
    check_asynchronous,
    fedasync,
    fedbuff,
)
from fedfr_jax.federated.systems.devices import (
    Availability,
    Profiles,
    diurnal_availability,
    log_normal_profiles,
    read_availability,
    read_profiles,
)
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.footprint import Footprint, footprint
from fedfr_jax.federated.systems.sampling import (
    Oort,
    PowerOfChoice,
    check_sampling,
    round_up,
)
from fedfr_jax.parts import Built, Factory, Member, Part, section
from fedfr_jax.ranges import NonNegative, Positive
from fedfr_jax.schema import check_fields

NEED_TIME = ("availability", "over_selection", "deadline", "asynchronous")
NEED_ROUNDS = ("over_selection", "deadline", "sampling")


class Systems(NamedTuple):
    """Failures and durations of clients; none by default."""

    dropout: Dropout = Dropout()
    profiles: Profiles | None = None  # None: rounds take no time
    availability: Availability | None = None  # None: always
    over_selection: float = 1.0  # clients that are asked, over those that are used
    deadline: NonNegative = 0.0  # seconds until a round ends; 0: when all have arrived
    # Whether late clients send an update of fewer steps instead of none.
    partial_work: bool = False
    sampling: PowerOfChoice | Oort | None = None  # None: all clients alike
    asynchronous: Asynchronous | None = None  # None: in rounds
    footprint: Footprint | None = None  # None: energy is not counted

    @property
    def has_state(self) -> bool:
        """Whether a round depends on earlier rounds."""
        return self.profiles is not None or self.sampling is not None

    @property
    def has_participation(self) -> bool:
        """Whether clients of a cohort may be missing in a round."""
        return self.has_state or self.dropout != Dropout()

    def num_counted(self, cohort_size: int) -> int:
        """Number of updates in a server step; the buffer size if asynchronous."""
        return self.asynchronous.buffer_size if self.asynchronous else cohort_size

    def num_asked(self, cohort_size: int) -> int:
        """Number of clients asked in a round, of whom `cohort_size` are used."""
        return round_up(self.over_selection * cohort_size)


def check_systems(systems: Systems, num_clients: int, cohort_size: int) -> None:
    """Raise ValueError for settings that exclude each other or are out of range."""
    check_fields("dropout.", systems.dropout)
    check_fields("systems.", systems)
    defaults = Systems()._asdict()
    used = [name for name, x in systems._asdict().items() if x != defaults[name]]
    for name in used:
        if name in NEED_TIME and systems.profiles is None:
            raise ValueError(f"systems.{name} needs systems.profiles, got None.")
        if name in NEED_ROUNDS and systems.asynchronous:
            raise ValueError(
                f"systems.{name} needs synchronous rounds, got systems.asynchronous."
            )
    if systems.partial_work and not systems.deadline:
        raise ValueError("systems.partial_work needs systems.deadline, got none.")
    upper = num_clients / cohort_size
    if not 1 <= systems.over_selection <= upper:
        raise ValueError(
            f"systems.over_selection must be in [1, {upper:g}], so that at most "
            f"{num_clients} clients are asked, got {systems.over_selection}."
        )
    both = {"profiles": systems.profiles, "availability": systems.availability}
    for name, devices in both.items():
        if devices is not None and devices.num_clients != num_clients:
            raise ValueError(
                f"systems.{name} must have {num_clients} clients, got "
                f"{devices.num_clients}."
            )
    counted = np.size(systems.footprint.joules_per_gflop) if systems.footprint else 1
    if counted not in (1, num_clients):
        raise ValueError(
            f"systems.footprint must have {num_clients} clients, got {counted}."
        )
    check_sampling(systems.sampling, systems.num_asked(cohort_size))
    if systems.asynchronous is not None:
        check_asynchronous(systems.asynchronous, num_clients)


def profiles_of_file(num_clients: int, *, path: str) -> Profiles:
    """`read_profiles` with the arguments of `log_normal_profiles`."""
    return read_profiles(path, num_clients)


def availability_of_file(num_clients: int, *, path: str) -> Availability:
    """`read_availability` with the arguments of `diurnal_availability`."""
    return read_availability(path, num_clients)


def profiles_of_fedscale(
    num_clients: int, *, path: str, forward_gflops: Positive
) -> Profiles:
    """`fedscale.read_profiles` with the arguments of `log_normal_profiles`."""
    return fedscale.read_profiles(path, num_clients, forward_gflops=forward_gflops)


def availability_of_fedscale(num_clients: int, *, path: str) -> Availability:
    """`fedscale.read_availability` with the arguments of `diurnal_availability`."""
    return fedscale.read_availability(path, num_clients)


PROFILES: dict[str, Callable] = {
    "log_normal": log_normal_profiles,
    "csv": profiles_of_file,
    "fedscale": profiles_of_fedscale,
}
AVAILABILITY: dict[str, Callable] = {
    "diurnal": diurnal_availability,
    "csv": availability_of_file,
    "fedscale": availability_of_fedscale,
}
SAMPLING: dict[str, Callable] = {"power_of_choice": PowerOfChoice, "oort": Oort}
ASYNCHRONOUS: dict[str, Callable] = {"fedbuff": fedbuff, "fedasync": fedasync}
FOOTPRINT = Factory(footprint, num_args=1)


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
    # Energy, CO2 and money of clients' rounds; {} with the defaults of `ff.footprint`.
    footprint: Annotated[Part | None, FOOTPRINT] = None

    def build(self, num_clients: int) -> Systems:
        """Build the systems of so many clients."""
        per_client = {
            "profiles": self.profiles,
            "availability": self.availability,
            "footprint": self.footprint,
        }
        built = {key: part and part(num_clients) for key, part in per_client.items()}
        return Systems(**{**self._asdict(), **built})
