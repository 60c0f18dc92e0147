"""The key `algorithm` of a method: settings of a factory of ALGORITHMS.

A factory's arguments are settings or facts: what a task offers, such as the number of
clients, to a factory that asks for it by an argument without a default. Below the same
key stand the settings of a loss or a term of the loss that the algorithm needs.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.parts import (
    Factory,
    Part,
    collecting,
    key_error,
    named,
    read_section,
)
from fedfr_jax.schema import choice_error, keywords
from fedfr_jax.tasks.contrastive import with_contrastive_loss
from fedfr_jax.types import Algorithm, LocalTraining

# Methods that are settings of another one, which `fedfr describe variants` prints.
VARIANTS = (
    *("fairavg", "fedadagrad", "fedadam", "fedatt", "fedavgm", "fedbabu", "fedbn"),
    *("fedper", "fedyogi", "lg_fedavg", "local"),
)


class Need(NamedTuple):
    """A need: an argument of a factory, or an entry of `Algorithm.needs`."""

    words: str
    tasks: tuple[str, ...] = ()  # that may offer it; (): all
    offer: str = ""  # what makes such a task offer it


CLASS_VECTORS = Need("a parameter with a vector for every class", ("classification",))
PLAIN = ("classification", "segmentation")
NEEDS = {
    "classes": CLASS_VECTORS,
    "class_pull_loss": CLASS_VECTORS,
    "contrastive_loss": Need("a loss that compares networks' features"),
    "equal_features": Need(
        "features that are the same in training and evaluation, unlike a bnneck's",
        (*PLAIN, "reid"),
    ),
    "features": Need(
        "a network that gives features",
        (*PLAIN, "faces", "reid"),
        "Choose another config.model.name",
    ),
    "identities": Need("public identities next to those of clients", ("faces",)),
    "num_classes": Need("one set of classes for all clients", PLAIN),
    "server_classifier": Need("a classifier on the server", (*PLAIN, "reid")),
    "shared": Need("public data", ("reid",), "Set config.partition.public"),
    "spreadout": CLASS_VECTORS,
}
# Arguments of algorithms that a task offers, which are no settings unless they have a
# default.
FACTS = {*NEEDS, "begin", "model", "momentum", "num_clients", "prepare"}
FACTS |= {"initial_previous_model", "reference_features"}
DUMMIES = {"classes": ".", "model": None, "num_classes": 2, "num_clients": 2}
DUMMIES |= {"shared": None, "spreadout": abs}


def check_needs(
    algorithm: str, needs: Collection[str], offers: Collection[str], task: str
) -> None:
    """Raise ValueError for the first need that is not among the task's `offers`."""
    lacking = [name for name in needs if name not in offers]
    if not lacking:
        return
    need = NEEDS.get(lacking[0], Need(lacking[0]))
    advice = f". {need.offer}"
    if not need.offer or task not in need.tasks:
        others = [other for other in need.tasks if other != task]
        do = "does" if len(others) == 1 else "do"
        known = f" ({' and '.join(others)} {do})" if others else ""
        advice = f", which the task {task} does not offer{known}"
    raise ValueError(f"algorithm {algorithm} needs {need.words}{advice}.")


def facts_of(factory: Callable) -> set[str]:
    """Arguments of an algorithm's factory that are facts.

    One with a default of its own is a setting, whatever its name.
    """
    parameters = keywords(factory).items()
    open_defaults = inspect.Parameter.empty, None
    return {k for k, p in parameters if k in FACTS and p.default in open_defaults}


def needs_of(make: Callable[[LocalTraining], Algorithm]) -> tuple[str, ...]:
    """Read `Algorithm.needs` of an algorithm before its loss is known."""
    return make(LocalTraining(loss=None, learning_rate=1.0)).needs


class AlgorithmPart(NamedTuple):
    """An algorithm with the losses and the terms that it may need."""

    part: Part  # waits for the local training and for facts
    task: str
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
        wanted, name = facts_of(self.part.factory), self.part.name
        parameters = keywords(self.part.factory)
        needed = [k for k in wanted if parameters[k].default is inspect.Parameter.empty]
        check_needs(name, sorted(needed), facts, self.task)
        given = select(facts, wanted)

        def make(local: LocalTraining) -> Algorithm:
            return self.part(local, **given)

        needs = needs_of(make)
        check_needs(name, needs, {*facts, *self.losses, *self.terms}, self.task)
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

    @property
    def offers(self) -> set[str]:
        """Needs that the task may fulfil, whatever its data."""
        return {k for k, x in NEEDS.items() if not x.tasks or self.task in x.tasks}

    def known_keys(self, value: Any) -> set[str]:
        """Keys that may stand below `algorithm`, if it has this value."""
        settings = (
            named(value, self.default) if isinstance(value, str | Mapping) else {}
        )
        factory = ALGORITHMS.get(str(settings.get("name")))
        if factory is None:
            return set()
        task_keys = self.task_keys(factory)
        keys = {*keywords(factory)} - facts_of(factory)
        for loss in (*self.losses.values(), *self.terms.values()):
            keys |= {*keywords(loss)}
        return keys | {*(task_keys._fields if task_keys else ())}

    def read(
        self, value: str | Mapping, where: str, mistakes: list[str]
    ) -> AlgorithmPart | None:
        """Read the algorithm; None with a mistake in its name."""
        if not isinstance(value, str | Mapping):
            mistakes.append(f"{where} must be a text or a mapping, got {value!r}.")
            return None
        settings = named(value, self.default)
        name = settings.pop("name")
        if name in VARIANTS and name not in ALGORITHMS:
            mistakes.append(
                f"{where} cannot be {name!r}, which is keys of a method: fedfr "
                f"describe variants {name} prints them."
            )
        elif error := choice_error(where, name, ALGORITHMS):
            mistakes.append(error)
        else:
            return self._read(name, settings, where, mistakes)
        return None

    def _read(self, name, settings, where, mistakes) -> AlgorithmPart:
        factory, facts = ALGORITHMS[name], facts_of(ALGORITHMS[name])
        task_keys = self.task_keys(factory)
        own_keys = task_keys._fields if task_keys else ()
        for key in sorted(facts & settings.keys() - {*own_keys}):
            method = where.removesuffix(".algorithm")
            source = f"{method}.momentum" if key == "momentum" else "the task"
            mistakes.append(
                f"{where} must not set {key}, which {name} takes from {source}, got "
                f"{settings.pop(key)!r}. Remove it."
            )
        own = Factory(factory, 1, hidden=facts, name=name)
        part = own.read(select(settings, own.parameters), where, mistakes)
        needs, is_known = self._needs(part, where, mistakes)
        keys = {*own.parameters, *own_keys}
        if task_keys:
            given = select(settings, own_keys)
            task_keys = read_section(task_keys, given, where, mistakes)

        def read_all(family: Mapping[str, Callable], num_args: int) -> dict[str, Part]:
            parts = {}
            for need in select(family, needs):
                reader = Factory(family[need], num_args)
                given = select(settings, reader.parameters)
                parts[need] = reader.read(given, where, mistakes)
                keys.update(reader.parameters)
            return parts

        losses, terms = read_all(self.losses, 1), read_all(self.terms, 2)
        mistakes += [key_error(where, key, keys) for key in settings if key not in keys]
        has_own_loss = is_known and bool(losses)
        return AlgorithmPart(part, self.task, losses, terms, task_keys, has_own_loss)

    def _needs(
        self, part: Part, where: str, mistakes: list[str]
    ) -> tuple[Collection[str], bool]:
        """(needs of an algorithm, whether they are known): all, where data decide."""
        needs, is_known = (), False
        facts, arguments = facts_of(part.factory), keywords(part.factory)
        asked = {k for k in facts if arguments[k].default is inspect.Parameter.empty}
        given = {**select(DUMMIES, facts), **part.settings}
        with contextlib.suppress(Exception):  # whatever a factory makes of dummies
            needs = needs_of(lambda local: part.factory(local, **given))
            is_known = True
        with collecting(where.removesuffix(".algorithm"), mistakes):
            wanted = [*sorted(asked & NEEDS.keys()), *needs]
            check_needs(part.name, wanted, self.offers, self.task)
        return (needs if is_known else {*self.losses, *self.terms}), is_known


def select(settings: Mapping, keys: Collection[str]) -> dict:
    """The settings of these keys."""
    return {key: value for key, value in settings.items() if key in keys}
