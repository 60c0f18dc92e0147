"""Build `Systems` from a config: the key `systems` of a federation.

config.federation.systems = {
    "dropout": {"before_training": 0.05},
    "profiles": {"name": "log_normal", "gflops": 1.0},
    "availability": {"name": "csv", "path": "traces.csv"},
    "over_selection": 1.3,
    "sampling": {"name": "oort"},
}
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedfr_jax.federated.systems.asynchronous import fedasync, fedbuff
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
from fedfr_jax.schema import call, choose, naming

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


def build_systems(settings: Mapping, num_clients: int, cohort_size: int) -> Systems:
    """Build and check the `Systems` of a config."""
    return call(SECTION, _systems, settings, num_clients, cohort_size)


def _systems(
    num_clients: int,
    cohort_size: int,
    *,
    dropout: Mapping | None = None,
    profiles: Mapping | None = None,
    availability: Mapping | None = None,
    over_selection: float = 1.0,
    deadline: float = 0.0,
    partial_work: bool = False,
    sampling: Mapping | None = None,
    asynchronous: Mapping | None = None,
) -> Systems:
    def part(name, family, settings, *args) -> Any:
        return settings and choose(f"{SECTION}.{name}", family, settings, *args)

    systems = Systems(
        dropout=call(f"{SECTION}.dropout", Dropout, dropout or {}),
        profiles=part("profiles", PROFILES, profiles, num_clients),
        availability=part("availability", AVAILABILITY, availability, num_clients),
        over_selection=over_selection,
        deadline=deadline,
        partial_work=partial_work,
        sampling=part("sampling", SAMPLING, sampling),
        asynchronous=part("asynchronous", ASYNCHRONOUS, asynchronous),
    )
    with naming(f"config.{SECTION}"):
        check_systems(systems, num_clients, systems.num_counted(cohort_size))
    return systems
