"""Needs of algorithms, and the error for a task that does not offer one."""

import inspect
from collections.abc import Callable, Collection
from typing import NamedTuple

from fedfr_jax.types import Algorithm, LocalTraining


class Need(NamedTuple):
    """A need: an argument of a factory, or an entry of `Algorithm.needs`."""

    words: str
    tasks: tuple[str, ...] = ()  # that may offer it
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


def takes_fact(parameter: inspect.Parameter) -> bool:
    """Whether an argument of a factory may be a fact of the task.

    One with a default of its own is a setting, whatever its name.
    """
    return parameter.default is parameter.empty or parameter.default is None


def needs_of(make: Callable[[LocalTraining], Algorithm]) -> tuple[str, ...]:
    """Read `Algorithm.needs` of an algorithm before its loss is known."""
    return make(LocalTraining(loss=None, learning_rate=1.0)).needs


def check_needs(
    section: str,
    algorithm: str,
    needs: Collection[str],
    offers: Collection[str],
    task: str,
) -> None:
    """Raise ValueError for the first need that is not among the task's `offers`.

    Args:
      section: of the config, such as "methods.kd".
    """
    lacking = [name for name in needs if name not in offers]
    if not lacking:
        return
    need = NEEDS.get(lacking[0], Need(lacking[0]))
    raise ValueError(
        f"config.{section}: algorithm {algorithm} needs {need.words}"
        f"{_advice(need, task)}."
    )


def _advice(need: Need, task: str) -> str:
    """How to offer a need, or which tasks offer it."""
    if need.offer and task in need.tasks:
        return f". {need.offer}"
    others = [other for other in need.tasks if other != task]
    do = "does" if len(others) == 1 else "do"
    known = f" ({' and '.join(others)} {do})" if others else ""
    return f", which the task {task} does not offer{known}"
