"""Keys of a method besides those of its algorithm: personal, frozen, batch_stats,
...
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax

from fedfr_jax.federated.aggregation import build_links, with_aggregation
from fedfr_jax.federated.algorithms.batch_stats import (
    check_batch_stats,
    with_batch_stats,
)
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.algorithms.phases import head_first
from fedfr_jax.federated.local import freeze_leaves, trainable
from fedfr_jax.ranges import ByRound, Whole
from fedfr_jax.schema import check_values, kinds_of
from fedfr_jax.tasks.leaves import frozen_pattern, leaves_of
from fedfr_jax.trees import matching
from fedfr_jax.types import Algorithm, LocalTraining, Model, PyTree


class Own(NamedTuple):
    """Keys of any federated method, besides those of algorithm, loss and `local_of`."""

    # Leaves that stay with clients: a regular expression over leaf paths, or one of
    # {"blocks": K_P}, {"all_but_blocks": K_B}, {"batch_norms": True}; "" for nothing.
    personal: str | Mapping = ""
    init_per_client: bool = (
        False  # a new client's personal leaves, instead of the first network's
    )
    frozen: str | Mapping = ""  # as personal, of params that do not move
    # Of the personal leaves alone at the start of a round, beside the federation's;
    # with fedavg.
    personal_epochs: Whole = 0
    batch_stats: Literal["average", "local", "random_client"] = (
        "average"  # local or first, see `with_batch_stats`
    )
    # Links between the clients' updates and their mean, first to last: names, or
    # {"name": ..., settings}, see `fedfr describe aggregation`.
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
    # Of a round, instead of the federation's.
    local_epochs: ByRound | None = None


OWN = Own._fields


def own_of(section: str, options: dict) -> dict:
    """Take the keys `OWN` of a method out of its options.

    Raises:
      ValueError: for a value of another kind than `Own` says.
    """
    own = {key: options.pop(key) for key in OWN if key in options}
    own = check_values(f"config.{section}.", own, kinds_of(Own))
    links = build_links(f"{section}.aggregation", own.get("aggregation", ()))
    return {**own, "aggregation": links}


class Start(NamedTuple):
    """Initial model of an algorithm, and the paths of its params."""

    model: Model
    shapes: PyTree  # of the variables
    draw: Callable  # key -> variables
    at: str = ""  # where the network's params lie, such as "backbone/"
    kept: str = ""  # pattern of leaves that stay with clients whatever a row says


def composed(
    algorithm: str,
    make: Callable[[LocalTraining], Algorithm],
    local: LocalTraining,
    own: Mapping,
    of: Start,
) -> Algorithm:
    """Build the algorithm `make(local)` with the keys `own` of a method.

    Raises:
      ValueError: for a wrong value, or a pattern that finds no leaf.
    """
    where = leaves_of(of.model, own.get("personal", ""), of.at)
    if own.get("init_per_client") and not where:
        raise ValueError("init_per_client needs personal leaves. Set `personal`.")
    local = with_frozen(local, own.get("frozen", ""), of)
    if epochs := own.get("personal_epochs", 0):
        local = finetuning_first(local, where, epochs, algorithm, of)
    how = own.get("batch_stats", "average")
    made = with_batch_stats(make(local), how)
    if how != "average":
        check_batch_stats(of.shapes)  # some of which may be personal
    made = with_aggregation(made, *own.get("aggregation", ()))
    return with_personal_layers(
        made, where, init_per_client=of.draw if own.get("init_per_client") else None
    )


def with_frozen(local: LocalTraining, given: str | Mapping, of: Start) -> LocalTraining:
    """Freeze the leaves that the key `frozen` selects.

    Raises:
      ValueError: when it selects no leaf.
    """
    pattern = frozen_pattern(of.model, given, of.at)
    if not pattern:
        return local
    matching(pattern)({"params": of.shapes["params"]})
    return freeze_leaves(local, pattern)


def finetuning_first(
    local: LocalTraining, where: str | Callable, epochs: int, algorithm: str, of: Start
) -> Callable:
    """Local training that starts with epochs of the personal leaves alone.

    Raises:
      ValueError: without such leaves, for a number of epochs out of range, or an
        algorithm that looks into a client's training.
    """
    if algorithm != "fedavg":
        raise ValueError(
            f"personal_epochs needs the algorithm fedavg, got {algorithm!r}."
        )
    if not isinstance(where, str):
        raise ValueError(
            "personal must select blocks or leaves by pattern with personal_epochs, "
            "got batch_norms. Set e.g. personal={'blocks': 1}."
        )
    head = "|".join(f"(?:{part})" for part in (where, of.kept) if part)
    if not head:
        raise ValueError(
            "personal_epochs needs personal leaves. Set e.g. personal={'blocks': 1}."
        )
    jax.eval_shape(lambda params: trainable(head, params)[0], of.shapes["params"])
    return head_first(local, head=head, epochs=epochs)
