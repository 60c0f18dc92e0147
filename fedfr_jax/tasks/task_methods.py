"""Declaration of a task's methods: losses, defaults and keys, before any data."""

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedfr_jax.central.settings import Training
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.schema import call, keyword_kinds, keywords
from fedfr_jax.tasks.contrastive import with_contrastive_loss
from fedfr_jax.tasks.methods import Method, named, read_method, refuse_other_loss
from fedfr_jax.tasks.needs import NEEDS, takes_fact
from fedfr_jax.types import Model

# Keys of `Training` that are of faces only.
FACE_ONLY_KEYS = (
    *("class_chunk_size", "class_dtype", "class_parallel", "class_sample_rate"),
    *("distill", "gate_weight", "init", "interclass_filtering_threshold"),
    "sync_batch_norm",
)
CENTRAL_KEYS = tuple(key for key in Training._fields if key not in FACE_ONLY_KEYS)
EMPTY = MappingProxyType({})


class TaskMethods(NamedTuple):
    """A task's methods: their losses, defaults and keys, for any data."""

    task: str  # its name
    # (model, *, settings, which are keys of a method below `loss`) -> loss of
    # `LocalTraining`
    loss_of: Callable
    loss_name: str = ""  # of `loss_of` in a config, where it has others beside it
    # {"name" of LOSSES, settings} -> (model) -> loss; None: the task has one loss
    other_losses: Callable | None = None
    other_loss_kinds: Mapping[str, Any] = EMPTY  # of keys that the task adds to those
    # Checks the key `loss`; None: it is settings of `loss_of`, or a loss of LOSSES.
    read_loss: Callable | None = None
    # {need of an algorithm: (model, *, keys below `algorithm`) -> loss in its place}
    losses: Mapping[str, Callable] = EMPTY
    # {need: (loss_of, model, *, keys below `algorithm`) -> loss with a term more}
    terms: Mapping[str, Callable] = MappingProxyType(
        {"contrastive_loss": with_contrastive_loss}
    )
    algorithm: str = "fedavg"  # unless a method names one
    # factory of an algorithm -> {key of it that the task itself reads: annotation}
    terms_of: Callable = lambda factory: {}
    algorithm_defaults: Mapping = EMPTY  # of keys that an algorithm knows
    defaults: Mapping = EMPTY  # of keys of a federated method
    keys: Collection[str] = ()  # of TASK_KEYS of a method, those that the task knows
    central_keys: Collection[str] = CENTRAL_KEYS


# Arguments of algorithms that a task offers, which are no settings unless they have a
# default, see `takes_fact`.
OFFERED = {*NEEDS, "begin", "model", "momentum", "num_clients", "prepare"}
OFFERED |= {"initial_previous_model", "reference_features"}


def settings_of(task: TaskMethods, name: str) -> dict[str, Any]:
    """{setting of an algorithm, its own or one that the task reads: annotation}."""
    kinds, facts = keyword_kinds(ALGORITHMS[name]), facts_of(name)
    kinds = {key: x for key, x in kinds.items() if key not in facts}
    return {**kinds, **task.terms_of(ALGORITHMS[name])}


def facts_of(name: str, offered: Collection[str] = OFFERED) -> set[str]:
    """Arguments of an algorithm that are among the facts that a task offers."""
    arguments = keywords(ALGORITHMS[name]).items()
    return {key for key, x in arguments if key in offered and takes_fact(x)}


def check_no_facts(section: str, name: str, settings: Mapping) -> None:
    """Raise ValueError for a setting of an algorithm that is a fact of the task."""
    for key in sorted(facts_of(name) & settings.keys()):
        source = f"config.{section}.momentum" if key == "momentum" else "the task"
        raise ValueError(
            f"config.{section}.algorithm must not set {key}, which {name} takes from "
            f"{source}, got {settings[key]!r}. Remove it."
        )


def read_federated(
    section: str, options: Mapping, name: str, task: TaskMethods
) -> Method:
    """Read a federated method, whose algorithm has this name, see `read_method`."""
    below = {*settings_of(task, name)}
    for factory in (*task.losses.values(), *task.terms.values()):
        below |= keywords(factory).keys()
    return read_method(section, {**task.defaults, **options}, task.keys, below)


def loss_of_method(
    section: str, loss: str | Mapping, task: TaskMethods
) -> Callable[[Model], Callable]:
    """Build model -> loss of a client from the key `loss` of a method."""
    settings = named(loss, task.loss_name)
    if settings["name"] == task.loss_name:
        del settings["name"]
        return functools.partial(call, f"{section}.loss", task.loss_of, settings)
    if task.other_losses is None:
        refuse_other_loss(keywords(task.loss_of), loss)
    return task.other_losses(settings)
