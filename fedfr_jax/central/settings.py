"""Settings of central training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import optax
from annotated_types import MinLen
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.central.optimizers import OPTIMIZERS
from fedfr_jax.central.sharding import (
    CLASSES,
    Rule,
    StepSharding,
    group_size,
    leaf_sharding,
)
from fedfr_jax.data.augment import Augments
from fedfr_jax.parts import section
from fedfr_jax.ranges import (
    Cosine,
    Count,
    NonNegative,
    Pattern,
    PositiveShare,
    Share,
    Whole,
)
from fedfr_jax.schema import naming
from fedfr_jax.types import ShardedClasses


@section
class Training(NamedTuple):
    """Settings of central training, with a margin softmax or a task's loss."""

    epochs: Whole = 16
    batch_size: Count = 64
    optimizer: Literal["adam", "adam_coupled", "lars", "sgd"] = "sgd"
    learning_rate: NonNegative = 0.05
    warmup_fraction: Share = 0.05  # fraction of all steps
    warmup_start_factor: Share = 0.0  # share of the rate that the warm-up starts from
    milestones: tuple[Share, ...] = ()  # fractions; none: a cosine to 0
    # "epoch": a rate stays for an epoch, that of its end, as where schedulers are moved
    # on at the start of every epoch.
    schedule_unit: Literal["step", "epoch"] = "step"
    weight_decay: NonNegative = 5e-4
    # {regular expression of leaves below params: factor of their steps}
    learning_rate_multipliers: Mapping[Pattern, NonNegative] | None = None
    # Largest norm of a step's gradient, that of leaves which do not move too; 0 does
    # not clip.
    clip_norm: NonNegative = 0.0
    # A name, or {"name": ..., settings}: of faces a margin loss, with "scale" 30 and
    # "margin" 0.4 unless they are set; else as the key `loss` of a federated method.
    loss: Any = ""
    # Cosine above which another class counts as label noise, see `interclass_filter`.
    interclass_filtering_threshold: Cosine | None = None
    flip_probability: Share = 0.5
    augment: Augments = ()  # after the mirror, see data/augment
    checkpoint_every: Whole = 1  # epochs
    # Images that `learning_rate` is for (linear scaling); 0: any
    base_batch_size: Whole = 0
    # Parts of each device's batch, one after another
    gradient_accumulation_steps: Count = 1
    # Devices whose parts of a batch share their statistics: False (its own), a number
    # of devices next to each other, or True (all).
    sync_batch_norm: bool | Count = False
    # Ordered pairs (pattern of paths, rule), over all devices.
    sharding: tuple[tuple[Pattern, Rule], ...] = ()
    # Of gradients while devices add them up
    reduce_dtype: Literal["bfloat16"] | None = None
    # Of parameters with the rules zero2 and zero3 while devices gather them, for
    # networks that compute in it. The optimizer moves float32, each device its part.
    gather_dtype: Literal["bfloat16"] | None = None
    class_parallel: bool = False  # classes cut over all devices, see `class_parallel`
    # Classes whose logits exist at once on a device; 0: all
    class_chunk_size: Whole = 0
    # Of the factors of cosines; None: float32
    class_dtype: Literal["bfloat16"] | None = None
    # Share of the classes in each step, for all epochs or one by one (the last stays).
    class_sample_rate: (
        PositiveShare | Annotated[tuple[PositiveShare, ...], MinLen(1)]
    ) = 1.0
    # What the network starts from: a file of weights, or the work folder of a run. Rows
    # of classes come from checkpoints alone, see runs/central_stage.py.
    init: Any = None
    # Regular expression over paths of leaves such as params/backbone/stem/conv/kernel:
    # those stay. Running statistics move all the same.
    frozen: Pattern = ""
    # As of a `Method`: all but it and the head is frozen, as by the key `frozen`.
    adapter: Any = None
    distill: Any = None  # of faces, see tasks/faces/distillation.py
    # Of the head moe with masks, see tasks/faces/public_classes.py
    gate_weight: NonNegative = 1.0
    identities_per_batch: Whole = 0  # of re-identification only, as of a `Method`

    @property
    def class_rates(self) -> tuple[float, ...]:
        """Class sampling rates of the first epochs; the last one stays."""
        rate = self.class_sample_rate
        return tuple(rate) if isinstance(rate, Sequence) else (rate,)


def build_optimizer(settings: Training, num_rows: int) -> optax.GradientTransformation:
    """Build the optimizer with its schedule, for training on `num_rows` examples."""
    rate = scaled_learning_rate(settings, num_rows)
    optimizer = OPTIMIZERS[settings.optimizer](rate, settings.weight_decay)
    if settings.learning_rate_multipliers:
        optimizer = optax.chain(
            optimizer, trees.scaling(settings.learning_rate_multipliers)
        )
    if settings.clip_norm:
        clip = optax.clip_by_global_norm(settings.clip_norm)
        optimizer = optax.chain(clip, optimizer)
    if not settings.frozen:
        return optimizer
    return trees.freeze(optimizer, settings.frozen)


def scaled_learning_rate(settings: Training, num_rows: int) -> optax.Schedule:
    """Learning rate per step, scaled to the batch size, for `num_rows` examples."""
    rate = settings.learning_rate
    if settings.base_batch_size:  # Goyal et al. 2017, arXiv:1706.02677, section 2.1
        rate *= settings.batch_size / settings.base_batch_size
    steps = max(num_rows // settings.batch_size, 1)  # of an epoch
    if settings.schedule_unit == "step":
        return build_schedule(settings, rate, max(settings.epochs * steps, 1))
    schedule = build_schedule(settings, rate, max(settings.epochs, 1))

    def epoch_schedule(step):
        return schedule(step // steps + 1)  # epochs are counted from 1

    return epoch_schedule


def build_schedule(settings: Training, rate: float, total: int) -> optax.Schedule:
    """Linear warm-up, then x0.1 at each milestone, or a cosine to 0 without any.

    Args:
      total: steps, of which the settings are fractions.
    """
    warm, begin = round(settings.warmup_fraction * total), settings.warmup_start_factor
    begin *= rate
    if not settings.milestones:
        if warm >= total:
            raise ValueError(
                f"warmup_fraction must leave at least one of the {total} steps to the "
                f"cosine after it, got {settings.warmup_fraction}."
            )
        return optax.warmup_cosine_decay_schedule(begin, rate, warm, total)
    drops = {round(m * total) - warm: 0.1 for m in settings.milestones}
    drops_schedule = optax.piecewise_constant_schedule(rate, drops)
    warmup = optax.linear_schedule(begin, rate, warm)
    return optax.join_schedules([warmup, drops_schedule], [warm])


@contextlib.contextmanager
def explain_memory(settings: Training) -> Iterator[None]:
    """Name the settings that help where a device runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not meshes.is_out_of_memory(error):
            raise
        advice = "a smaller batch_size or more gradient_accumulation_steps"
        if not settings.class_parallel:
            advice = f"class_parallel=True, {advice}"
        elif not settings.class_chunk_size:
            advice = f"a class_chunk_size, {advice}"
        raise ValueError(
            "central training must fit the devices' memory, got "
            f"batch_size={settings.batch_size} and gradient_accumulation_steps="
            f"{settings.gradient_accumulation_steps}: set {advice}. `fedfr plan` says "
            "what fits."
        ) from error


def build_mesh(settings: Training, mesh: Mesh) -> Mesh:
    """Mesh of a training, flattened where the network or classes are sharded."""
    is_cut = settings.class_parallel or settings.sharding
    return meshes.flatten_mesh(mesh) if is_cut else mesh


def num_devices(settings: Training, mesh: Mesh) -> int:
    """Number of devices that each have a shard of a batch."""
    return build_mesh(settings, mesh).shape[meshes.CLIENTS]


def build_step_sharding(
    settings: Training, classes: ShardedClasses | None
) -> StepSharding:
    """Build the sharding of a step over the mesh.

    Args:
      classes: the class matrix, with class_parallel.
    """
    class_rule, names = (), ()
    if settings.class_parallel and classes:
        class_rule, names = ((f"^{classes.path}$", CLASSES),), classes.names
    return StepSharding(
        rules=(*class_rule, *settings.sharding),
        micro_batches=settings.gradient_accumulation_steps,
        reduce_dtype=settings.reduce_dtype,
        gather_dtype=settings.gather_dtype,
        num_classes=len(names),
    )


def check_training(settings: Training, where: str, num_rows: int, mesh: Mesh) -> None:
    """Raise ValueError unless the settings fit the examples and the mesh."""
    if not settings.epochs and settings.init is None:
        raise ValueError(f"{where}.epochs must be at least 1, got 0.")
    if settings.batch_size > num_rows:
        raise ValueError(
            f"{where}.batch_size must be at most {num_rows}, the number of "
            f"examples, got {settings.batch_size}."
        )
    count = num_devices(settings, mesh)
    parts = count * settings.gradient_accumulation_steps
    if settings.batch_size % parts:
        raise ValueError(
            f"{where}.batch_size must be a multiple of {parts} (devices x "
            f"micro-batches), got {settings.batch_size}."
        )
    rules = [rule for _, rule in settings.sharding]
    if settings.gather_dtype and not {"zero2", "zero3"} & {*rules}:
        raise ValueError(
            f"{where}.gather_dtype needs {where}.sharding with the rule zero2 or "
            f"zero3, got {settings.gather_dtype!r} with {rules}."
        )
    _check_class_parallel(settings, where)
    with naming(where):
        group_size(settings.sync_batch_norm, count)
        build_optimizer(settings, num_rows)


def check_patterns(
    settings: Training,
    where: str,
    params_of: Callable,
    mesh: Mesh,
    classes: ShardedClasses | None = None,
) -> None:
    """Raise ValueError for a pattern in the settings that matches no parameter.

    Args:
      params_of: () -> parameters, arrays or shape structs; not called without patterns.
      classes: as of `build_step_sharding`.
    """
    step_sharding = build_step_sharding(settings, classes)
    if not (
        step_sharding.rules or settings.learning_rate_multipliers or settings.frozen
    ):
        return
    params = params_of()
    for pattern in settings.learning_rate_multipliers or {}:
        with naming(f"{where}.learning_rate_multipliers"):
            trees.matching(pattern)(params)
    with naming(f"{where}.sharding"):
        leaf_sharding(step_sharding, params, build_mesh(settings, mesh))
    if settings.frozen:
        with naming(f"{where}.frozen"):
            trees.freeze(optax.identity(), settings.frozen).init(params)


def _check_class_parallel(settings, where):
    """Raise ValueError for what needs class_parallel, without it."""
    if settings.class_parallel:
        return
    for name in ("class_chunk_size", "class_dtype", "class_sample_rate"):
        if (value := settings._asdict()[name]) != Training._field_defaults[name]:
            raise ValueError(
                f"{where}.{name} needs class_parallel=True, got {value!r} without it."
            )
