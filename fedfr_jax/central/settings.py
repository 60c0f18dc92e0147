"""What central training is told, and its ranges."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import optax
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.schema import check_ranges, naming


class Training(NamedTuple):
    """Epochs of a margin softmax, or of whatever loss a task has."""

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
    # Cosine above which another class counts as label noise, see `interclass_filter`.
    interclass_threshold: float | None = None
    flip: float = 0.5
    augment: tuple = ()  # after the mirror, see data/augment
    checkpoint_every: int = 1  # epochs
    distill: Mapping | None = None  # of faces, see tasks/faces/distilled.py


def _sgd(rate, decay: float) -> optax.GradientTransformation:
    """Coupled decay and momentum, as PyTorch has it."""
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, 0.9))


def _adam(rate, decay: float) -> optax.GradientTransformation:
    """Decoupled decay."""
    return optax.adamw(rate, weight_decay=decay)


OPTIMIZERS = {"sgd": _sgd, "adam": _adam}


def optimizer_of(settings: Training, num_rows: int) -> optax.GradientTransformation:
    """The optimizer of a training on `num_rows` examples, with its schedule."""
    rate = rate_schedule(
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        milestones=settings.milestones,
        total=settings.epochs * (num_rows // settings.batch_size),
    )
    return OPTIMIZERS[settings.optimizer](rate, settings.weight_decay)


def rate_schedule(
    *, learning_rate: float, warmup: float, milestones: tuple[float, ...], total: int
) -> optax.Schedule:
    """Linear warm-up, then x0.1 at each milestone, or a cosine to 0 without any.

    `warmup` and `milestones` are fractions of the `total` steps, in [0, 1].
    """
    warm = round(warmup * total)
    if not milestones:
        return optax.warmup_cosine_decay_schedule(0.0, learning_rate, warm, total)
    drops = {round(m * total) - warm: 0.1 for m in milestones}
    after = optax.piecewise_constant_schedule(learning_rate, drops)
    before = optax.linear_schedule(0.0, learning_rate, warm)
    return optax.join_schedules([before, after], [warm])


def check_training(settings: Training, section: str, num_rows: int, mesh: Mesh) -> None:
    """Raise ValueError for a setting out of range; `num_rows` examples exist."""
    if settings.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"config.{section}.optimizer must be one of {sorted(OPTIMIZERS)}, "
            f"got {settings.optimizer!r}."
        )
    bounds = {
        "epochs": (1, math.inf),
        "batch_size": (1, num_rows),
        "learning_rate": (0, math.inf),
        "warmup": (0, 1),
        "milestones": (0, 1),
        "weight_decay": (0, math.inf),
        "scale": (0, math.inf),
        "flip": (0, 1),
        "checkpoint_every": (0, math.inf),
    }
    if settings.interclass_threshold is not None:
        bounds["interclass_threshold"] = (-1, 1)
    check_ranges(f"config.{section}.", settings._asdict(), bounds)
    num_devices = mesh.shape[meshes.CLIENTS]
    if settings.batch_size % num_devices:
        raise ValueError(
            f"config.{section}.batch_size must be a multiple of {num_devices} devices, "
            f"got {settings.batch_size}."
        )
    with naming(f"config.{section}"):  # a warm-up that leaves no step
        optimizer_of(settings, num_rows)
