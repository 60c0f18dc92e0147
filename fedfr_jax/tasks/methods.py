"""An entry of `config.methods`, as settings that are checked before any data.

`Method` has the keys of a federated method, of any task; `MethodReader` is what a task
makes of them. What is built from one: `trainers.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import MinLen

from fedfr_jax.central.settings import Training
from fedfr_jax.federated.aggregation import AGGREGATORS, with_update_checks
from fedfr_jax.federated.attacks import ATTACKS
from fedfr_jax.federated.attacks.contract import Attack
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.privacy import banded_noise, blt_noise, skellam_noise
from fedfr_jax.federated.privacy.mechanism import Privacy
from fedfr_jax.parts import (
    INLINE,
    Built,
    Factory,
    Member,
    Part,
    Several,
    collecting,
    key_error,
    named,
    read,
    read_section,
    section,
)
from fedfr_jax.ranges import (
    BelowOne,
    ByRound,
    Count,
    NonNegative,
    Pattern,
    Seed,
    Share,
    Whole,
)
from fedfr_jax.schema import choice_error
from fedfr_jax.tasks.algorithms import AlgorithmPart, AlgorithmReader
from fedfr_jax.types import Aggregator

EMPTY: Mapping = MappingProxyType({})


@section
class Blocks(NamedTuple):
    """Leaves of the first or last blocks of a network; one key is set."""

    blocks: Whole | None = None  # the top K, of which 1 is the head
    all_but_blocks: Count | None = None  # the others

    def check(self) -> None:
        """Raise ValueError unless exactly one key is set."""
        check_one(self)


@section
class Leaves(NamedTuple):
    """Leaves of a network; one key is set."""

    blocks: Whole | None = None  # as of `Blocks`
    all_but_blocks: Count | None = None
    batch_norms: bool | None = None  # all of every batch norm

    def check(self) -> None:
        """Raise ValueError unless exactly one key is set."""
        check_one(self)


def check_one(leaves: Blocks | Leaves) -> None:
    """Raise ValueError unless exactly one field is set."""
    values = {key: x for key, x in leaves._asdict().items() if x is not None}
    if len(values) != 1:
        keys = leaves._fields
        raise ValueError(f"leaves must have exactly one key of {keys}, got {values}.")


class OptimizerReader:
    """Reader of `optimizer`: sgd, or a name of optax's, with its settings."""

    def read(self, value: str | Mapping, where: str, mistakes: list[str]) -> Part:
        """Read a part that waits for the rate; sgd for momentum and decay."""
        settings = named(value, "sgd")
        name = settings.pop("name")
        if name == "sgd":
            later = "momentum", "weight_decay"
            return Factory(sgd, later=later, name=name).read(settings, where, mistakes)
        factory = getattr(optax, name, None) if isinstance(name, str) else None
        known = set(inspect.signature(factory).parameters if callable(factory) else ())
        if "learning_rate" not in known:  # not an optimizer
            rule = "must be the name of an optax optimizer"
            mistakes.append(f"{where} {rule}, got {name!r}.")
            return Part(sgd)
        known -= {"learning_rate"}
        wrong = [key_error(where, key, known) for key in settings if key not in known]
        mistakes += wrong
        part = Part(factory, settings, name, where)
        if not wrong:
            with collecting(where, mistakes):
                _check_optimizer(part)
        return part


def _check_optimizer(part: Part) -> None:
    """Raise ValueError unless it moves a number: optax looks at few of its settings."""
    number = jax.ShapeDtypeStruct((), jnp.result_type(float))
    try:
        optimizer = part.factory(0.1, **part.settings)
        jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x), number)
    except Exception as error:
        raise ValueError(
            f"optimizer {part.name} cannot be built with the settings "
            f"{dict(part.settings)}: {error}."
        ) from error


CORRELATED = MappingProxyType({"banded": banded_noise, "blt": blt_noise})
NOISE = MappingProxyType({**CORRELATED, "skellam": skellam_noise})
OF_ROUNDS = ("cohort_size", "noise")  # what rounds decide of `Privacy`


@section
class PrivacyConfig(NamedTuple):
    """Keys of a method's `privacy`, those of `ff.private` but for its cohort."""

    mechanism: Annotated[
        Part, Factory(Privacy, later=("noise_multiplier",), hidden=OF_ROUNDS), INLINE
    ]
    # banded, blt or skellam; None is independent in each round.
    noise: Annotated[Part | None, Member(NOISE, later=("rounds",))] = None

    def check(self) -> None:
        """Raise ValueError without anything that says how much noise there is."""
        if not {"epsilon", "noise_multiplier"} & self.mechanism.settings.keys():
            raise ValueError("epsilon or noise_multiplier must be set, got neither.")


@section
class AttackConfig(NamedTuple):
    """Keys of a method's `attack`."""

    attack: Annotated[Attack, Built(Member(ATTACKS)), INLINE]
    share: BelowOne  # of all clients
    seed: Seed | None = None  # the config's unless it is set


UPDATE_CHECKS = {"exclude": with_update_checks, "stop": with_update_checks}


@section
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
    optimizer: Annotated[Part, OptimizerReader()] = "sgd"  # or a name of optax's
    momentum: BelowOne = 0.0  # of sgd; others have theirs among their settings
    weight_decay: NonNegative = 0.0  # of sgd, coupled as in PyTorch
    clip_norm: NonNegative = 0.0  # largest norm of a step's gradient; 0 does not clip
    # {regular expression of leaves below params: factor of their steps}, which with sgd
    # is a learning rate of their own; other leaves have factor 1.
    learning_rate_multipliers: Mapping[Pattern, NonNegative] = MappingProxyType({})
    local_epochs: ByRound | None = None  # of a round, instead of the federation's
    algorithm: AlgorithmPart = ""  # "" for the task's: fedfr for faces, else fedavg
    # Of faces a margin loss of `fedfr describe losses`, cosface unless named, with
    # "scale" 30 and "margin" 0.4 unless they are set. Else settings of the task's loss,
    # see `fedfr describe sections methods.loss.classification`; classification and
    # segmentation take losses on logits by name too.
    loss: Callable = ""
    # Leaves that stay with clients: a regular expression over leaf paths, or one of
    # {"blocks": K_P}, {"all_but_blocks": K_B}, {"batch_norms": True}; "" for nothing.
    personal: Pattern | Leaves | None = ""
    # Give a new client random personal leaves instead of the initial model's.
    init_per_client: bool = False
    frozen: Pattern | Blocks = ""  # as personal, of params that do not move
    # Epochs of the personal leaves alone at the start of a round, in addition to the
    # round's; with the algorithm fedavg.
    personal_epochs: Whole = 0
    # local: a client's own; random_client: those of one client of the cohort.
    batch_stats: Literal["average", "local", "random_client"] = "average"
    # Links between the clients' updates and their mean, first to last, see
    # `fedfr describe aggregation`.
    aggregation: Annotated[
        tuple[Aggregator, ...], Several(Built(Member(AGGREGATORS)))
    ] = ()
    # Differential privacy for whole clients: keywords of `ff.private`, of which
    # `clip_norm`, `delta` and `noise_multiplier` or `epsilon` are given.
    privacy: PrivacyConfig | None = None
    # Malicious clients: {"name": of `fedfr describe attacks`, "share": of all clients,
    # settings of the attack, perhaps a "seed"}; None: all are honest.
    attack: AttackConfig | None = None
    # exclude or stop, or {"name": one of them, "max_norm": of the longest update that
    # is not bad, "min_kept": share of a cohort below which the run stops}; None stops
    # at updates that are not finite.
    on_bad_update: Annotated[Part | None, Member(UPDATE_CHECKS, num_args=2)] = None
    # Of faces only: a teacher, see tasks/faces/distillation.py.
    distill: Any = None
    # Of re-identification only: P of batches of P identities with as many images each;
    # 0: batches as they come.
    identities_per_batch: Whole = 0

    def check(self) -> None:
        """Raise ValueError for keys that exclude each other."""
        for key in ("momentum", "weight_decay"):
            value = self._asdict()[key]
            if value and self.optimizer.name != "sgd":
                raise ValueError(
                    f"{key} must be set inside `optimizer` for {self.optimizer.name}, "
                    f"got {value} outside."
                )
        if self.init_per_client and not self.personal:
            raise ValueError("init_per_client needs personal leaves. Set `personal`.")
        if not self.personal_epochs or self.algorithm is None:
            return
        name = self.algorithm.part.name
        if name != "fedavg":
            raise ValueError(
                f"personal_epochs needs the algorithm fedavg, got {name!r}."
            )
        if isinstance(self.personal, Leaves) and self.personal.batch_norms:
            raise ValueError(
                "personal must select blocks or leaves by pattern with "
                "personal_epochs, got batch_norms. Set e.g. personal={'blocks': 1}."
            )


LOCAL_KEYS = Method._fields[:9]  # up to learning_rate_multipliers


class LocalReader:
    """Reader of a section that has the keys LOCAL_KEYS of a method."""

    def read(self, value: Mapping, where: str, mistakes: list[str]) -> Method | None:
        """Read a method that is nothing but local training."""
        others = dict.fromkeys(set(Method._fields) - {*LOCAL_KEYS})
        return read_section(Method, value, where, mistakes, others)


class CentralMethod(NamedTuple):
    """A central method: one network on the training images of all clients."""

    training: Training  # whose `loss` is that of the task, as of `Method`
    identities_per_batch: int = 0


# Keys of `Training` that are of faces only.
FACE_ONLY_KEYS = (
    *("class_chunk_size", "class_dtype", "class_parallel", "class_sample_rate"),
    *("distill", "gate_weight", "init", "interclass_filtering_threshold"),
    "sync_batch_norm",
)


class MethodReader(NamedTuple):
    """Reader of an entry of config.methods, in a task."""

    loss: Any  # reader of the key `loss`: model -> loss of `LocalTraining`
    algorithm: AlgorithmReader
    # Kinds of further keys, which the task knows
    kinds: Mapping[str, Any] = EMPTY
    central_kinds: Mapping[str, Any] = MappingProxyType(dict.fromkeys(FACE_ONLY_KEYS))
    # Settings of a method -> those that it has unless they are set
    defaults: Callable[[Mapping], Mapping] = lambda options: {}
    check: Callable[[Method], None] = lambda method: None

    def read(self, value: Any, where: str, mistakes: list[str]) -> Any:
        """Read a `Method`, or a `CentralMethod` where `kind` says so."""
        if not isinstance(value, Mapping):
            mistakes.append(f"{where} must be a mapping, got {value!r}.")
            return None
        options = dict(value)
        kind = options.pop("kind", "federated")
        if error := choice_error(f"{where}.kind", kind, ("federated", "central")):
            mistakes.append(error)
        elif kind == "central":
            return self._read_central(options, where, mistakes)
        else:
            return self._read_federated(options, where, mistakes)

    def _read_central(self, options: dict, where: str, mistakes: list[str]):
        key, identities = "identities_per_batch", 0
        if key in self.kinds and key in options:
            kind, value = self.kinds[key], options.pop(key)
            identities = read(kind, value, f"{where}.{key}", mistakes)
        kinds = {"loss": self.loss, **self.central_kinds}
        training = read_section(Training, options, where, mistakes, kinds)
        return CentralMethod(training, identities)

    def _read_federated(self, options: dict, where: str, mistakes: list[str]):
        own: list[str] = []
        kinds = {"distill": None, "identities_per_batch": None, **self.kinds}
        kinds |= {"algorithm": self.algorithm, "loss": self.loss}
        options = {**self.defaults(options), **options}
        below = self.algorithm.known_keys(options.get("algorithm", ""))
        for key in [key for key in options if key not in Method._fields]:
            if key in below:
                del options[key]
                more = f" (a key of the algorithm: algorithm.{key})"
                own.append(key_error(where, key, Method._fields, more))
        method = read_section(Method, options, where, own, kinds)
        if method is not None:
            if method.algorithm.has_own_loss and options.get("loss"):
                own.append(
                    f"{where}.loss cannot be set with the algorithm "
                    f"{method.algorithm.part.name}, which has its own, got "
                    f"{options['loss']!r}."
                )
            with collecting(where, own):
                self.check(method)
        mistakes += own
        return method


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
