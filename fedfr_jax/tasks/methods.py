"""An entry of `config.methods`, as settings that are checked before any data.

`Method` has the keys of a federated method, of any task; `MethodReader` is what a task
makes of them. What is built from one: `trainers.py`.

`algorithm` are settings of a factory of ALGORITHMS. Its arguments are settings or
facts: what a task offers, such as the number of clients, to a factory that asks for it
by an argument without a default. Below the same key stand the settings of a loss or a
term of the loss that the algorithm needs.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import MinLen

from fedfr_jax.central.settings import Training
from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.federated.aggregation.clip import with_update_checks
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.attacks import ATTACKS, Attack
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.privacy import banded_noise, blt_noise, skellam_noise
from fedfr_jax.federated.privacy.mechanism import Privacy
from fedfr_jax.losses import LOSSES
from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.models.adapters import ADAPTERS, LORA, Adapter
from fedfr_jax.parts import (
    INLINE,
    Built,
    Factory,
    Member,
    Part,
    SectionReader,
    Several,
    collecting,
    key_error,
    named,
    raw,
    read_name,
    read_section,
    section,
)
from fedfr_jax.ranges import (
    BelowOne,
    ByRound,
    Count,
    NonNegative,
    Pattern,
    Positive,
    PositiveShare,
    Seed,
    Share,
    Whole,
)
from fedfr_jax.schema import checked, choice_error, keywords
from fedfr_jax.types import (
    Aggregator,
    Algorithm,
    FeaturePlace,
    LocalTraining,
    Model,
)


@checked
def with_contrastive_loss(
    loss_of: Callable,
    model: Model,
    *,
    contrastive_weight: NonNegative = 1.0,
    contrastive_temperature: Positive = 0.5,
) -> Callable:
    """Add weight * `model_contrastive` of the model's features to a method's loss.

    Features of pixels are averaged over an image; they are those of the network's
    projection where it has one. The network runs once: the loss gets its outputs.
    The two models that are held fixed run as in evaluation, as in the authors' code.

    Args:
      loss_of: (model) -> loss of a row, which runs the model on the batch's images in
        training and no other way.
      contrastive_weight: mu >= 0, 5 for CIFAR-10 in the paper and 1 for CIFAR-100.
      contrastive_temperature: > 0.

    Returns:
      loss(variables, batch, key, *, received, previous), whose last two are variables.

    Raises:
      ValueError: when the network has no features.
    """
    features_fn = model.features
    loss_of(model)  # raises for wrong settings before training

    def loss_fn(variables, batch, key, *, received, previous):
        inputs = batch.model_inputs
        output, features, stats = features_fn(variables, inputs, True, key=key)
        known_model = model._replace(
            apply=lambda *_, **__: (output, stats),
            apply_with_features=lambda *_, **__: (output, features, stats),
        )
        value, (stats, metrics) = loss_of(known_model)(variables, batch, key)
        fixed = [features_fn(other, inputs, False)[1] for other in (received, previous)]
        terms = model_contrastive(
            *map(_embed_images, (features, *fixed)), temperature=contrastive_temperature
        )
        term = masked_mean(terms, batch.is_valid)
        total = value + contrastive_weight * term
        return total, (stats, {**metrics, "contrastive_loss": term})

    return loss_fn


def _embed_images(features: jax.Array) -> jax.Array:
    """Features [B, D] of [B, ..., D]: the mean over pixels, if any."""
    return features.reshape(len(features), -1, features.shape[-1]).mean(axis=1)


def with_server_optimizer(name: str) -> tuple[dict, str]:
    """FedAvg whose server takes the steps of an optimizer."""
    optimizer = {"name": name, "learning_rate": 0.1}
    settings = {"algorithm": {"name": "fedavg", "server_optimizer": optimizer}}
    return settings, "The server steps along the mean change (arXiv:2003.00295)."


SERVER_STEPS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
UNIFORM = {"name": "fedavg", "weighting": "uniform"}
# Methods that are settings of another: (keys besides learning_rate, description), as of
# `fedfr describe variants`.
VARIANTS: dict[str, tuple[dict, str]] = {
    "fairavg": ({"algorithm": UNIFORM}, "FedAvg whose clients count alike."),
    "fedper": (
        {"personal": {"blocks": 1}, "init_per_client": True},
        "The last K_P blocks stay with clients (arXiv:1912.00818).",
    ),
    "lg_fedavg": (
        {"personal": {"all_but_blocks": 2}, "algorithm": UNIFORM},
        "All but the last blocks stay with clients (arXiv:2001.01523).",
    ),
    "fedbn": (
        {"personal": {"batch_norms": True}},
        "Batch norms stay with clients (arXiv:2102.07623).",
    ),
    "fedbabu": (
        {"frozen": {"blocks": 1}},
        "The head keeps its initial values; fine-tuned afterwards (arXiv:2106.06042).",
    ),
    "fedatt": (
        {"aggregation": "attention", "algorithm": UNIFORM},
        "Per tensor, clients that moved farther count more (arXiv:1812.07108).",
    ),
    "local": ({"personal": "."}, "Clients share nothing: everything is personal."),
    **{name: with_server_optimizer(name) for name in SERVER_STEPS},
}


# Words for what a task may offer: arguments of factories, and `Algorithm.needs`.
CLASS_VECTORS = "a parameter with a vector for every class, as of classification"
NEEDS = {
    "classes": CLASS_VECTORS,
    "class_pull_loss": CLASS_VECTORS,
    "contrastive_loss": "a loss that compares networks' features",
    "equal_features": "features that are the same in training and evaluation, unlike a "
    "bnneck's",
    "features": "a network that gives features",
    "identities": "public identities next to those of clients, as of faces",
    "num_classes": "one set of classes for all clients",
    "server_classifier": "a classifier on the server",
    "shared": "public data, as of re-identification",
    "spreadout": CLASS_VECTORS,
}
# What makes a task offer it, where it may
ADVICE = {
    "features": "Choose another config.model.name",
    "shared": "Set config.partition.public",
}
OFFERS = ("equal_features", "features", "server_classifier")  # of `network_facts`
# Arguments of algorithms that a task offers, which are no settings unless they have a
# default.
FACTS = {*NEEDS, "begin", "model", "momentum", "num_clients", "prepare"}
FACTS |= {"initial_previous_model", "reference_features"}
DUMMIES = {"classes": ".", "model": None, "num_classes": 2, "num_clients": 2}
DUMMIES |= {"shared": None, "spreadout": abs}


def is_required(parameter: inspect.Parameter) -> bool:
    """Whether an argument has no default."""
    return parameter.default is parameter.empty


def needs_of(make: Callable[[LocalTraining], Algorithm]) -> tuple[str, ...]:
    """Read `Algorithm.needs` of an algorithm before its loss is known."""
    return make(LocalTraining(loss=lambda *arguments: 0.0, learning_rate=1.0)).needs


class Offers(NamedTuple):
    """What a task may offer to algorithms."""

    task: str
    names: Collection[str]

    def check(self, algorithm: str, needs: Collection[str], offered: Collection[str]):
        """Raise ValueError for the first need that is not `offered`."""
        lacking = next((name for name in needs if name not in offered), None)
        if lacking is None:
            return
        advice = f", which the task {self.task} does not offer"
        if lacking in ADVICE and lacking in self.names:
            advice = f". {ADVICE[lacking]}"
        words = NEEDS.get(lacking, lacking)
        raise ValueError(f"algorithm {algorithm} needs {words}{advice}.")

    def facts_of(self, factory: Callable) -> dict[str, inspect.Parameter]:
        """Arguments of an algorithm's factory that are facts.

        One with a default of its own is a setting, whatever its name.
        """
        facts = {*FACTS, *self.names}
        return {
            name: parameter
            for name, parameter in keywords(factory).items()
            if name in facts and (is_required(parameter) or parameter.default is None)
        }


class AlgorithmPart(NamedTuple):
    """An algorithm with the losses and the terms that it may need."""

    part: Part  # waits for the local training and for facts
    offers: Offers
    losses: Mapping[str, Part]  # {need: model -> loss, in place of the method's}
    terms: Mapping[str, Part]  # {need: (loss of a model, model) -> loss with a term}
    task_keys: Any = None  # those that the task itself reads
    has_own_loss: bool = False  # as far as that is known before any data

    def build(
        self, loss_of: Callable, facts: Mapping[str, Any]
    ) -> tuple[Callable[[LocalTraining], Algorithm], Callable]:
        """The algorithm but for its local training, and model -> loss of a client.

        Args:
          loss_of: model -> loss of the method.
          facts: what the task offers to factories that ask for it by an argument.
        """
        wanted, name = self.offers.facts_of(self.part.factory), self.part.name
        needed = sorted(k for k, parameter in wanted.items() if is_required(parameter))
        self.offers.check(name, needed, facts)
        given = select(facts, wanted)

        def make(local: LocalTraining) -> Algorithm:
            return self.part(local, **given)

        needs = needs_of(make)
        self.offers.check(name, needs, {*facts, *self.losses, *self.terms})
        for loss in select(self.losses, needs).values():
            loss_of = loss
        for term in select(self.terms, needs).values():
            loss_of = functools.partial(term, loss_of)
        return make, loss_of


class AlgorithmReader(NamedTuple):
    """Reader of the key `algorithm`, in a task."""

    task: str  # its name
    default: str = "fedavg"
    # {need of an algorithm: (model, *, settings) -> loss in place of the method's}
    losses: Mapping[str, Callable] = MappingProxyType({})
    # {need: (loss of a model, model, *, settings) -> loss with a term more}
    terms: Mapping[str, Callable] = MappingProxyType(
        {"contrastive_loss": with_contrastive_loss}
    )
    # factory of an algorithm -> section of the keys that the task itself reads
    task_keys: Callable[[Callable], type | None] = lambda factory: None
    # Names of what its `Facts.offers` may have
    offered: Collection[str] = OFFERS

    @property
    def offers(self) -> Offers:
        """What the task may offer: values, losses and terms."""
        return Offers(self.task, {*self.offered, *self.losses, *self.terms})

    def known_keys(self, value: Any) -> set[str]:
        """Keys that may stand below `algorithm`, if it has this value."""
        is_part = isinstance(value, str | Mapping)
        name = named(value, self.default)["name"] if is_part else None
        if not isinstance(name, str) or name not in ALGORITHMS:
            return set()
        factory = ALGORITHMS[name]
        keys = keywords(factory).keys() - self.offers.facts_of(factory)
        for loss in (*self.losses.values(), *self.terms.values()):
            keys |= keywords(loss).keys()
        return keys | {*self._task_fields(factory)}

    def _task_fields(self, factory: Callable) -> tuple[str, ...]:
        section = self.task_keys(factory)
        return section._fields if section else ()

    def read(
        self, value: str | Mapping, where: str, mistakes: list[str]
    ) -> AlgorithmPart | None:
        """Read the algorithm; None with a mistake in its name."""
        if isinstance(value, str | Mapping):
            name = named(value, self.default)["name"]
            if name in VARIANTS and name not in ALGORITHMS:
                mistakes.append(
                    f"{where} cannot be {name!r}, which is keys of a method: fedfr "
                    f"describe variants {name} prints them."
                )
                return None
        name, settings = read_name(value, self.default, where, mistakes, ALGORITHMS)
        return None if name is None else self._read(name, settings, where, mistakes)

    def _read(self, name, settings, where, mistakes) -> AlgorithmPart:
        factory, facts = ALGORITHMS[name], self.offers.facts_of(ALGORITHMS[name])
        own_keys = self._task_fields(factory)
        for key in sorted(facts.keys() & settings.keys() - {*own_keys}):
            method = where.removesuffix(".algorithm")
            source = f"{method}.momentum" if key == "momentum" else "the task"
            mistakes.append(
                f"{where} must not set {key}, which {name} takes from {source}, got "
                f"{settings.pop(key)!r}. Remove it."
            )
        known = {*own_keys}

        def read(factory, num_args, hidden=(), name=""):
            reader = Factory(factory, num_args, hidden=hidden, name=name)
            known.update(reader.parameters)
            return reader.read(select(settings, reader.parameters), where, mistakes)

        part, task_keys = read(factory, 1, facts, name), self.task_keys(factory)
        if task_keys:
            own = select(settings, own_keys)
            task_keys = read_section(task_keys, own, where, mistakes)
        needs = self._needs(part, where, mistakes)
        needed = {*self.losses, *self.terms} if needs is None else needs
        losses = {k: read(x, 1) for k, x in select(self.losses, needed).items()}
        terms = {k: read(x, 2) for k, x in select(self.terms, needed).items()}
        for key in settings.keys() - known:
            mistakes.append(key_error(where, key, known))
        has_own_loss = needs is not None and bool(losses)
        return AlgorithmPart(part, self.offers, losses, terms, task_keys, has_own_loss)

    def _needs(
        self, part: Part, where: str, mistakes: list[str]
    ) -> tuple[str, ...] | None:
        """Needs of an algorithm; None where they depend on the data."""
        needs, facts = None, self.offers.facts_of(part.factory)
        given = {**select(DUMMIES, facts), **part.settings}
        with contextlib.suppress(Exception):  # whatever a factory makes of dummies
            needs = needs_of(lambda local: part.factory(local, **given))
        with collecting(where.removesuffix(".algorithm"), mistakes):
            asked = (k for k, parameter in facts.items() if is_required(parameter))
            wanted = [*sorted(NEEDS.keys() & asked), *(needs or ())]
            self.offers.check(part.name, wanted, self.offers.names)
        return needs


def select(settings: Mapping, keys: Collection[str]) -> dict:
    """The settings of these keys."""
    return {key: value for key, value in settings.items() if key in keys}


OWN = "cross_entropy"  # beside the names of LOSSES


class LossReader(NamedTuple):
    """Reader of `loss`: the task's cross entropy, or a loss of LOSSES on logits."""

    own: Callable  # (model, *, ...) -> loss of a client
    mean: Callable  # (model, loss on outputs, *, ...) -> loss of a client

    def read(
        self, value: Any, where: str, mistakes: list[str]
    ) -> Callable[[Model], Callable] | None:
        """Read model -> loss of a client."""
        known = (OWN, *LOSSES)
        name, settings = read_name(value, OWN, where, mistakes, known)
        if name == OWN:
            return Factory(self.own, 1, name=OWN).read(settings, where, mistakes)
        if name is None:
            return None
        own = {k: settings.pop(k) for k in keywords(self.mean) if k in settings}
        mean = Factory(self.mean, 2).read(own, where, mistakes)
        values_of = Built(Factory(LOSSES[name])).read(settings, where, mistakes)
        if isinstance(values_of, Margin):
            mistakes.append(
                f"{where} must be a loss on logits, got {name!r}, a margin loss on "
                "cosines, which the task faces takes."
            )
            return None

        def loss_of(model: Model) -> Callable:
            outputs = jax.ShapeDtypeStruct((2, model.embedding_dim), jnp.float32)
            targets = jax.ShapeDtypeStruct((2,), jnp.int32)
            shape = jnp.shape(jax.eval_shape(values_of, outputs, targets))
            if shape != (2,):
                raise ValueError(
                    "loss must return one value per example, shape (2,) for two, got "
                    f"{shape} from {name!r}."
                )
            return mean(model, values_of)

        return loss_of


class OnlyLossReader(NamedTuple):
    """Reader of `loss` in a task that has one: settings of it."""

    own: Callable  # (model, *, ...) -> loss of a client

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read model -> loss of a client."""
        if isinstance(value, Mapping) and "name" not in value or value == "":
            return Factory(self.own, 1).read(value or {}, where, mistakes)
        keys = sorted(keywords(self.own))
        rule = f"must be settings of the task's only loss, {keys}"
        mistakes.append(f"{where} {rule}, got {value!r}.")
        return None


EMPTY: Mapping = MappingProxyType({})


@section
class Leaves(NamedTuple):
    """Leaves of a network; one key is set."""

    blocks: Whole | None = None  # of the top K blocks, of which 1 is the head
    all_but_blocks: Count | None = None  # of the others
    batch_norms: bool | None = None  # all of every batch norm

    def check(self) -> None:
        """Raise ValueError unless exactly one field is set."""
        values = {key: x for key, x in self._asdict().items() if x is not None}
        if len(values) != 1:
            keys = self._fields
            raise ValueError(
                f"leaves must have exactly one key of {keys}, got {values}."
            )


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
        if not callable(factory) or "learning_rate" not in known:  # not an optimizer
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


# Of each client, or pairs (share of the clients, theirs)
ClientRanks = Annotated[tuple[Count | tuple[PositiveShare, Count], ...], MinLen(1)]
ClientShares = tuple[PositiveShare | tuple[PositiveShare, PositiveShare], ...]


@section
class AdapterConfig(NamedTuple):
    """Keys of a method's `adapter`."""

    adapter: Annotated[Adapter, Built(Member(ADAPTERS)), INLINE]
    # Pattern of other leaves that move; None: the model's last block, "" none.
    head: Pattern | None = None
    # Of lora: the mean of A and of B, or that of the products A B.
    average: Literal["factors", "products"] = "factors"
    # Of lora: the rank of each client, or pairs (share of the clients, rank) by which
    # each draws its own; None: all have that of the adapter.
    ranks: ClientRanks | None = None

    def check(self) -> None:
        """Raise ValueError for ranks and a mean that the adapter cannot have."""
        if self.ranks is None and self.average == "factors":
            return
        if self.adapter.moves != LORA:
            raise ValueError(
                "ranks and average=products need the adapter lora with train_a=True, "
                "got another."
            )
        if self.ranks is None:
            return
        if self.average == "products":
            raise ValueError("average must be factors with ranks, got 'products'.")
        largest = max(x[1] if isinstance(x, tuple) else x for x in self.ranks)
        if largest > self.adapter.rank:
            raise ValueError(
                f"ranks must be at most rank, {self.adapter.rank}, got {largest}."
            )


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
    optimizer: Annotated[Part, OptimizerReader()] = raw("sgd")  # or a name of optax's
    momentum: BelowOne = 0.0  # of sgd; others have theirs among their settings
    weight_decay: NonNegative = 0.0  # of sgd, coupled as in PyTorch
    clip_norm: NonNegative = 0.0  # largest norm of a step's gradient; 0 does not clip
    # {regular expression of leaves below params: factor of their steps}, which with sgd
    # is a learning rate of their own; other leaves have factor 1.
    learning_rate_multipliers: Mapping[Pattern, NonNegative] = MappingProxyType({})
    local_epochs: ByRound | None = None  # of a round, instead of the federation's
    # "" for the task's: fedfr for faces, else fedavg
    algorithm: AlgorithmPart = raw("")
    # Of faces a margin loss of `fedfr describe losses`, cosface unless named, with
    # "scale" 30 and "margin" 0.4 unless they are set. Else settings of the task's loss,
    # see `fedfr describe sections methods.loss.classification`; classification and
    # segmentation take losses on logits by name too.
    loss: Any = ""
    # Leaves that stay with clients: a regular expression over leaf paths, or one of
    # {"blocks": K_P}, {"all_but_blocks": K_B}, {"batch_norms": True}; "" for nothing.
    personal: Pattern | Leaves | None = ""
    # Give a new client random personal leaves instead of the initial model's.
    init_per_client: bool = False
    # As personal but for batch norms, of params that do not move: clients share them
    # and send nothing of them. Batch norms among them are in evaluation.
    frozen: Pattern | Leaves = ""
    # {"name": of `fedfr describe adapters`, its settings, perhaps "head": pattern}: all
    # but the adapter and the head is frozen. Of lora also "average": "factors", the
    # mean of A and of B, or "products", and "ranks": as `widths`, of each client.
    adapter: AdapterConfig | None = None
    # Of classification only: the share of each client of the channels of every hidden
    # layer, or pairs (share of the clients, share of the channels); None: all.
    widths: ClientShares | None = None
    # Where features of the frozen first layers are kept, computed once per example:
    # device, host or disk; off: they run in every step; auto: where they fit.
    features: FeaturePlace = "auto"
    # GiB that features may take with auto; None: a quarter of what is free there.
    features_gib: Positive | None = None
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
        if self.init_per_client and self.personal == "":
            raise ValueError("init_per_client needs personal leaves. Set `personal`.")
        if self.personal_epochs and (name := self.algorithm.part.name) != "fedavg":
            raise ValueError(
                f"personal_epochs needs the algorithm fedavg, got {name!r}."
            )
        if self.widths is not None and (self.frozen or self.adapter):
            raise ValueError(
                "widths cannot be set with frozen leaves or an adapter. Remove one."
            )
        if self.features_gib is not None and self.features != "auto":
            raise ValueError(
                f"features_gib needs features='auto', got {self.features!r}. Remove it."
            )
        if self.privacy and (self.widths or self.adapter and self.adapter.ranks):
            raise ValueError(
                "privacy cannot be set with widths or adapter.ranks, whose means are "
                "over those clients that have a number. Remove one of them."
            )
        by_blocks: dict[str, Any] = {"frozen": self.frozen}
        if self.personal_epochs:
            by_blocks["personal"] = self.personal
        for key, leaves in by_blocks.items():
            if isinstance(leaves, Leaves) and leaves.batch_norms is not None:
                more = " with personal_epochs" if key == "personal" else ""
                raise ValueError(
                    f"{key} must select blocks or leaves by pattern{more}, got "
                    f"batch_norms. Set e.g. {key}={{'blocks': 1}}."
                )


LOCAL_KEYS = Method._fields[:9]  # up to learning_rate_multipliers
# Reader of a method that is nothing but local training
LOCAL = SectionReader(Method, dict.fromkeys({*Method._fields} - {*LOCAL_KEYS}))
# Fields of `Method` and of `Training` that are keys of some tasks only
FACE_KEYS = (
    *("class_chunk_size", "class_dtype", "class_parallel", "class_sample_rate"),
    *("distill", "gate_weight", "init", "interclass_filtering_threshold"),
    "sync_batch_norm",
)
REID_KEYS = ("identities_per_batch",)
CLASS_KEYS = ("widths",)


class MethodReader(NamedTuple):
    """Reader of an entry of config.methods, in a task."""

    loss: Any  # reader of the key `loss`: model -> loss of `LocalTraining`
    algorithm: AlgorithmReader
    keys: Collection[str] = ()  # of FACE_KEYS, REID_KEYS, CLASS_KEYS: the task's
    task_kinds: Mapping[str, Any] = EMPTY  # of fields whose kinds only the task knows
    # Settings of a method -> those that it has unless they are set
    defaults: Callable[[Mapping], Mapping] = lambda options: {}
    check: Callable[[Method], None] = lambda method: None

    @property
    def central(self) -> SectionReader:
        """Reader of a central training."""
        others = {*FACE_KEYS, *REID_KEYS, *CLASS_KEYS} - {*self.keys}
        own = {"loss": self.loss, "adapter": AdapterConfig | None, **self.task_kinds}
        return SectionReader(Training, {**dict.fromkeys(others), **own})

    def read(self, value: Any, where: str, mistakes: list[str]) -> Any:
        """Read a `Method`, or a `Training` where `kind` says central."""
        if not isinstance(value, Mapping):
            mistakes.append(f"{where} must be a mapping, got {value!r}.")
            return None
        options = dict(value)
        kind = options.pop("kind", "federated")
        if error := choice_error(f"{where}.kind", kind, ("federated", "central")):
            mistakes.append(error)
        elif kind == "central":
            return self.central.read(options, where, mistakes)
        else:
            return self._read_federated(options, where, mistakes)

    def _read_federated(
        self, options: dict, where: str, mistakes: list[str]
    ) -> Method | None:
        own: list[str] = []
        kinds = {**self.central.kinds, "algorithm": self.algorithm}
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
