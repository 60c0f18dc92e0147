"""What a run is told: its two sections of numbers, and their ranges."""

import functools
import math
from typing import NamedTuple

from fedfr_jax.data.augment import compose, mirror, normalize
from fedfr_jax.federated.client import Feed
from fedfr_jax.federated.engine import REDUCTIONS
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import Augment

TABLES = ("auto", "device", "stream")
AUTO = "auto"


@functools.cache  # a feed is compiled for once
def mirrored(flip: float) -> Augment:
    """Bytes in [-1, 1], mirrored left-right with probability `flip`."""
    return compose(mirror(probability=flip), normalize())


class Pretraining(NamedTuple):
    """Central margin softmax on the public identities."""

    epochs: int = 16
    batch_size: int = 64
    optimizer: str = "sgd"  # a name of OPTIMIZERS
    learning_rate: float = 0.05
    warmup: float = 0.05  # fraction of all steps
    milestones: tuple[float, ...] = ()  # fractions; none: a cosine to 0
    weight_decay: float = 5e-4
    margin_loss: str = "cosface"
    scale: float = 30.0
    margin: float = 0.4
    flip: float = 0.5
    checkpoint_every: int = 1  # epochs


class Federation(NamedTuple):
    """What the federated methods of an experiment share."""

    rounds: int = 20
    cohort_size: int = 0  # 0: all clients
    local_epochs: int | tuple[int, ...] = (10, 8, 6, 4)
    batch_size: int = 64
    drop_last: bool = False
    flip: float = 0.5
    lanes: int | str = 1  # auto: with lowering and devices measured once, and kept
    reduction: str = "sum"  # canonical: same bits on any number of devices
    shards: int = 8  # of the canonical reduction, best a multiple of the devices
    model_shards: int = 1  # devices that hold one network's parameters together
    evaluate_every: int = 0  # rounds between generic evaluations; 0: after the last
    checkpoint_every: int = 1
    table: str = "auto"  # where the examples are: on the device, or a stream to it
    table_gib: float = 1.0  # GiB that streamed examples may take on a device

    @property
    def feed(self) -> Feed:
        """How clients' batches are made of uint8 images."""
        return Feed(self.batch_size, mirrored(self.flip), drop_last=self.drop_last)

    @property
    def first_lanes(self) -> int:
        """Lanes to build a simulation with, before they are measured."""
        return 1 if self.lanes == AUTO else self.lanes

    @property
    def fixed_shards(self) -> int | None:
        """V of the canonical reduction, None for plain sums."""
        return self.shards if self.reduction == "canonical" else None


def check_pretraining(settings: Pretraining, section: str, num_rows: int) -> None:
    """Raise ValueError for a number out of range; `num_rows` public images exist."""
    bounds = {
        "epochs": (0, math.inf),
        "batch_size": (1, num_rows),
        "learning_rate": (0, math.inf),
        "warmup": (0, 1),
        "milestones": (0, 1),
        "weight_decay": (0, math.inf),
        "scale": (0, math.inf),
        "flip": (0, 1),
        "checkpoint_every": (0, math.inf),
    }
    check_ranges(f"config.{section}.", settings._asdict(), bounds)


def check_federation(settings: Federation, num_clients: int) -> None:
    """Raise ValueError for a number out of range."""
    bounds = {
        "rounds": (1, math.inf),
        "cohort_size": (0, num_clients),
        "local_epochs": (0, math.inf),
        "batch_size": (1, math.inf),
        "flip": (0, 1),
        "lanes": (1, math.inf),
        "shards": (1, math.inf),
        "model_shards": (1, math.inf),
        "evaluate_every": (0, math.inf),
        "checkpoint_every": (0, math.inf),
        "table_gib": (2**-20, math.inf),
    }
    for name, known in (("table", TABLES), ("reduction", REDUCTIONS)):
        if (value := settings._asdict()[name]) not in known:
            raise ValueError(
                f"config.federation.{name} must be one of {known}, got {value!r}."
            )
    if isinstance(settings.lanes, str) and settings.lanes != AUTO:
        raise ValueError(
            f"config.federation.lanes must be a number or auto, got {settings.lanes!r}."
        )
    numbers = {**settings._asdict(), "lanes": settings.first_lanes}
    check_ranges("config.federation.", numbers, bounds)
