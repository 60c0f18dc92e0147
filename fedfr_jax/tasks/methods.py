"""What an entry of `config.methods` may say.

`Method` has the keys of a federated method, of any task. What is built from one:
`trainers.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from annotated_types import MinLen

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.ranges import (
    BelowOne,
    ByRound,
    Count,
    NonNegative,
    Pattern,
    Share,
    Whole,
)
from fedfr_jax.schema import call, check_choice, check_keys


class Method(NamedTuple):
    """A federated method: an algorithm, its loss, local training, and what is around.

    `algorithm`, `loss`, `optimizer`, a link of `aggregation` and `attack` are a name of
    their family, or {"name": ..., settings}.
    """

    # Local training: the optimizer is made anew in every round, its momentum 0.
    learning_rate: NonNegative
    # Epochs after which the rate falls to a tenth, within a round: one number, or one
    # for each round, of which the last stays; 0 for never.
    decay_epochs: Whole | Annotated[tuple[Whole, ...], MinLen(1)] = 0
    decay_rounds: tuple[Count, ...] = ()  # rounds from 0 at which it falls for good
    decay_factor: Share = 0.1  # of each of those falls
    optimizer: str | Mapping = "sgd"  # sgd, or a name of optax's such as adam
    momentum: BelowOne = 0.0  # of sgd; others have theirs among their settings
    weight_decay: NonNegative = 0.0  # of sgd, coupled as in PyTorch
    clip_norm: NonNegative = 0.0  # largest norm of a step's gradient; 0 does not clip
    # {regular expression of leaves below params: factor of their steps}, which with sgd
    # is a learning rate of their own; other leaves have factor 1.
    learning_rate_multipliers: Mapping[Pattern, NonNegative] = MappingProxyType({})
    local_epochs: ByRound | None = None  # of a round, instead of the federation's
    algorithm: str | Mapping = ""  # "" for the task's: fedfr for faces, else fedavg
    # Of faces a margin loss of `fedfr describe losses`, cosface unless named, with
    # "scale" 30 and "margin" 0.4 unless they are set. Else settings of the task's loss,
    # see `fedfr describe sections methods.loss.classification`; classification and
    # segmentation take losses on logits by name too.
    loss: str | Mapping = ""
    # Leaves that stay with clients: a regular expression over leaf paths, or one of
    # {"blocks": K_P}, {"all_but_blocks": K_B}, {"batch_norms": True}; "" for nothing.
    personal: Pattern | Mapping = ""
    # Give a new client random personal leaves instead of the initial model's.
    init_per_client: bool = False
    frozen: Pattern | Mapping = ""  # as personal, of params that do not move
    # Epochs of the personal leaves alone at the start of a round, in addition to the
    # round's; with the algorithm fedavg.
    personal_epochs: Whole = 0
    # local: a client's own; random_client: those of one client of the cohort.
    batch_stats: Literal["average", "local", "random_client"] = "average"
    # Links between the clients' updates and their mean, first to last, see
    # `fedfr describe aggregation`.
    aggregation: str | Mapping | Sequence = ()
    # Differential privacy for whole clients: keywords of `ff.private`, of which
    # `clip_norm`, `delta` and `noise_multiplier` or `epsilon` are given.
    privacy: Mapping | None = None
    # Malicious clients: {"name": of `fedfr describe attacks`, "share": of all clients,
    # settings of the attack, perhaps a "seed"}; None: all are honest.
    attack: Mapping | None = None
    # exclude or stop, or {"name": one of them, "max_norm": of the longest update that
    # is not bad, "min_kept": share of a cohort below which the run stops}; None stops
    # at updates that are not finite.
    on_bad_update: str | Mapping | None = None
    # Of faces only: a teacher, see tasks/faces/distillation.py.
    distill: Mapping | None = None
    # Of re-identification only: P of batches of P identities with as many images each;
    # 0: batches as they come.
    identities_per_batch: Whole = 0


LOCAL_KEYS = Method._fields[:9]  # up to learning_rate_multipliers
# Methods that are settings of another one, which `fedfr describe variants` prints.
VARIANTS = (
    *("fairavg", "fedadagrad", "fedadam", "fedatt", "fedavgm", "fedbabu", "fedbn"),
    *("fedper", "fedyogi", "lg_fedavg", "local"),
)
TASK_KEYS = ("distill", "identities_per_batch")  # which a task must offer


def named(part: str | Mapping, default: str = "") -> dict:
    """A named part of a method as {"name": ..., settings}.

    >>> named("fedprox"), named({"mu": 0.1}, "fedprox")
    ({'name': 'fedprox'}, {'name': 'fedprox', 'mu': 0.1})
    """
    settings = dict(part) if isinstance(part, Mapping) else {"name": part or default}
    return {"name": default, **settings}


def algorithm_of(section: str, options: Mapping, default: str) -> tuple[str, dict]:
    """(name of a method's algorithm, its settings).

    Raises:
      ValueError: for an unknown algorithm, or a name of VARIANTS.
    """
    settings = named(options.get("algorithm", default), default)
    name = settings.pop("name")
    if name in VARIANTS and name not in ALGORITHMS:
        raise ValueError(
            f"config.{section}.algorithm cannot be {name!r}, which is keys of a "
            f"method: fedfr describe variants {name} prints them."
        )
    check_choice(f"config.{section}.algorithm", name, sorted(ALGORITHMS))
    return name, settings


def read_method(
    section: str, options: Mapping, offered: Collection[str], below: Collection[str]
) -> Method:
    """Check the keys and values of a method.

    Args:
      section: such as "methods.fedprox".
      offered: the task's among TASK_KEYS.
      below: keys of the method's algorithm.

    Raises:
      ValueError: for an unknown key, or a value that `Method` does not allow.
    """
    known = [x for x in Method._fields if x not in TASK_KEYS or x in offered]
    for key in options:
        if key not in known and key in below:
            raise ValueError(
                f"config.{section} must have keys of {sorted(known)}, got {key!r} (a "
                f"key of the algorithm: algorithm.{key})."
            )
    check_keys(f"config.{section}", options, known)
    return call(section, Method, options)


def refuse_other_loss(keys: Collection[str], loss: str | Mapping) -> None:
    """Raise ValueError for a loss by name, in a task that has one, with these keys."""
    raise ValueError(
        f"loss must be settings of the task's only loss, {sorted(keys)}, got {loss!r}."
    )


def with_numbers(options: Mapping, numbers: Mapping) -> dict:
    """A method with other numbers, whose keys are paths.

    >>> with_numbers({"algorithm": "fedprox"}, {"algorithm.mu": 0.1})
    {'algorithm': {'name': 'fedprox', 'mu': 0.1}}
    """
    changed = dict(options)
    for path, number in numbers.items():
        key, _, inside = path.partition(".")
        part = changed.get(key, {})
        if inside and part is None:
            raise ValueError(f"{path} cannot be set where {key} is None. Set {key}.")
        part = {"name": part} if isinstance(part, str) else part
        changed[key] = with_numbers(part, {inside: number}) if inside else number
    return changed
