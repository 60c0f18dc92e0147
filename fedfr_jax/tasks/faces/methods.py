"""The rows of FedFR's tables as settings of few pieces.

A method is a set of switches of `federated_faces`: FedAvg has none, `public` adds the
global data, `contrastive_weight` the contrastive term, `branch` the decoupled feature
customization; all of them are FedFR. MOON is FedAvg with the contrastive term, FedFace
FedAvg with `spreadout`, local training `share=False`; `adapt` appends the adaptation of
Yu et al. to any method without a branch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax

from fedfr_jax.federated.aggregation import with_aggregation
from fedfr_jax.federated.algorithms.fedface import fedface
from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.algorithms.fedfr_statistics import fedfr_statistics
from fedfr_jax.federated.packing import on_packed, pack_networks, packed
from fedfr_jax.losses.spreadout import spread
from fedfr_jax.schema import check_choice, check_keys
from fedfr_jax.tasks.faces.adaptation import adapted
from fedfr_jax.tasks.faces.distilled import Distill, distilled
from fedfr_jax.tasks.faces.features import (
    class_mean_start,
    frozen_features,
)
from fedfr_jax.tasks.faces.given_weights import with_frozen
from fedfr_jax.tasks.faces.hard_negatives import prepare_features
from fedfr_jax.tasks.faces.loss import (
    face_loss,
    init_local,
    personal_features,
    rule_of,
)
from fedfr_jax.tasks.faces.margin_state import (
    beside,
    learned,
    with_start,
    without_numbers,
)
from fedfr_jax.tasks.faces.option_ranges import check_numbers
from fedfr_jax.tasks.options import local_of
from fedfr_jax.types import Aggregator, Algorithm, LastRound, Model, PyTree


class FaceMethod(NamedTuple):
    """An algorithm, what it starts from, and what a client deploys."""

    algorithm: Algorithm
    start: Callable  # (backbone variables, phi [M_g, D]) -> variables for `init`
    embed: Callable  # (variables of `personalize`, images) -> [B, D]
    last_round: LastRound | None = None
    init_fc: bool = False  # hand `start` the public classes' mean features as phi
    generic: Callable = lambda server: server.backbone  # -> the judged network
    local_epochs: int | tuple[int, ...] | None = None  # None: the federation's
    distill: Distill | None = None  # its teacher
    # The same on networks with other implementations of convolutions.
    implementations: Mapping[str, "FaceMethod"] = MappingProxyType({})


def federated_faces(
    model: Model,
    *,
    num_classes: int,
    learning_rate: float = 1e-3,
    decay_epochs: int | tuple[int, ...] = (8, 6, 4, 3),
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    clip_norm: float = 0.0,
    freeze: str = "",
    batch_stats: str = "average",
    scale: float = 30.0,
    margin: float = 0.4,
    margin_loss: str = "cosface",
    margin_options: Mapping | None = None,
    public: bool = True,
    threshold: float | None = 0.4,
    max_hard_negatives: int = 0,
    contrastive_weight: float = 5.0,
    temperature: float = 0.5,
    branch: str | None = "bce",
    branch_weight: float = 10.0,
    branch_options: Mapping | None = None,
    converter: str = "linear",
    detach_branch: bool = False,
    reweight: str | None = None,
    phi_update: str = "averaged",
    first_previous: str = "global",
    weigh: str = "local+extra",
    hard_negatives: str = "image",
    init_fc: bool = False,
    share: bool = True,
    spreadout: float | None = None,
    spreadout_options: Mapping | None = None,
    num_clients: int = 0,
    adapt: Mapping | None = None,
    distill: Distill | None = None,
    links: Sequence[Aggregator] = (),
) -> FaceMethod:
    """FedFR with every term an option.

    The defaults are the paper's, or the released code's where it says nothing, but for
    two: `weigh` is the released code's (the paper weighs clients by their local images
    alone), and `first_previous` is ours (the code takes a random network).

    Args:
      num_classes: M, the most identities of any client.
      learning_rate, decay_epochs, momentum, weight_decay, clip_norm: local SGD, see
        `local_of`; the rate drops by ten every `decay_epochs` epochs of a round and
        starts afresh in the next.
      freeze: see `with_frozen`.
      batch_stats: average, local or first, see `fedfr_statistics`.
      public: train on the public classes too, with hard negatives above the cosine
        `threshold` (None: on none) and at most `max_hard_negatives` per client (0: no
        limit).
      margin_loss, scale, margin, margin_options, contrastive_weight, branch, ...: see
        `face_loss`.
      phi_update, weigh: see `fedfr`.
      first_previous: global or random, the previous network of a new client.
      hard_negatives: by image, or by class with all its images.
      init_fc: start all class embeddings from mean features of the pretrained network,
        not from N(0, 0.01^2) and the pretrained head.
      share: False trains every client alone; its judged network is its own.
      spreadout: cosine above which the server pushes the classes of all clients of the
        cohort apart after a round; None does not.
      spreadout_options: `steps`, `learning_rate`, `momentum` and `weight_decay` of
        `spread`.
      num_clients: of the population, for `spreadout` and `reweight`.
      adapt: `epochs` of a last round, and the keywords of `adapted`; None for none.
      distill: the server's teacher of clients' networks, see `distilled`, or None.
      links: of the aggregation, see `with_aggregation`.

    Raises:
      ValueError: for an unknown option, one out of range, or options that exclude each
        other.
    """
    check_numbers("", locals())  # every argument that has a range
    _check_exclusions(share, first_previous, branch, adapt, spreadout)
    _check_statistics(batch_stats, share, first_previous, adapt)
    rule = rule_of(margin_loss, scale, margin, margin_options)
    model = on_packed(beside(model) if rule and rule.state else model)
    loss_of = partial(
        face_loss,
        margin_loss=margin_loss,
        scale=scale,
        margin=margin,
        margin_options=margin_options,
        contrastive_weight=contrastive_weight,
        temperature=temperature,
        branch=branch,
        branch_weight=branch_weight,
        branch_options=branch_options,
        converter=converter,
        detach_branch=detach_branch,
        reweight=reweight,
        num_clients=num_clients,
    )
    local = local_of(
        distilled(loss_of, model, distill) if distill else loss_of(model),
        learning_rate=learning_rate,
        decay_epochs=decay_epochs,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    local = with_frozen(local, model, freeze)
    threshold = threshold if public else None
    embed = backbone_features(model)
    prepare = None
    if contrastive_weight or threshold is not None:
        prepare = prepare_features(
            embed,
            threshold=threshold,
            capacity=max_hard_negatives,
            level=hard_negatives,
        )
    # Links see the network's own leaves.
    pack = (lambda tree: tree) if links else pack_networks
    random_previous = lambda key: pack(with_start(model.init(key), rule))
    algorithm = fedfr(
        local,
        init_local=init_local(
            num_classes,
            model.embedding_dim,
            branch=branch,
            converter=converter,
            std=0.0 if init_fc else 0.01,
            others=learned(rule, num_classes),
        ),
        frozen=previous_features(embed) if contrastive_weight else None,
        prepare=prepare,
        phi_update=phi_update,
        first_previous=random_previous if first_previous == "random" else None,
        weigh=weigh,
        begin=class_mean_start(embed) if init_fc else None,
        share=share,
    )
    algorithm = fedfr_statistics(algorithm, batch_stats)
    apart = spread_apart(spreadout, spreadout_options)
    if apart:
        algorithm = fedface(algorithm, apart, num_clients=num_clients)
    algorithm = with_aggregation(algorithm, *links) if links else packed(algorithm)

    def start(backbone: PyTree, phi: jax.Array) -> PyTree:
        phi = phi if public else None
        return {"backbone": with_start(backbone, rule), "phi": phi}

    return FaceMethod(
        algorithm,
        start,
        personal_features(model, converter=converter),
        last_round=None if adapt is None else last_round(algorithm, model, adapt),
        init_fc=init_fc and public,
        generic=lambda server: without_numbers(algorithm.network(server)),
        distill=distill,
    )


def _check_exclusions(share, first_previous, branch, adapt, spreadout):
    """Raise ValueError for options that exclude each other."""
    check_choice("first_previous", first_previous, ("global", "random"))
    if not share and first_previous == "random":
        raise ValueError("first_previous must be global with share=False, got random.")
    for name, value in (("adapt", adapt), ("spreadout", spreadout)):
        if not share and value is not None:
            raise ValueError(f"share must be True with {name}, got False.")
    if adapt is not None and branch is not None:
        raise ValueError(f"branch must be None with adapt, got {branch!r}.")


def _check_statistics(batch_stats, share, first_previous, adapt):
    """What clients' own statistics, or those of the first one, exclude."""
    if batch_stats == "average":
        return
    if not share:
        raise ValueError(
            f"share must be True with batch_stats {batch_stats}, got False."
        )
    if batch_stats == "local" and (adapt is not None or first_previous != "global"):
        raise ValueError(
            "batch_stats must be average or first with adapt, or a first_previous that "
            "is random, got 'local'."
        )


def spread_apart(margin: float | None, options: Mapping | None) -> Callable | None:
    """`spread` of `fedface` at a margin, None without one.

    Raises:
      ValueError: for an option that `spread` does not have, one out of range, or any
        without a margin.
    """
    options = {} if options is None else options
    known = set() if margin is None else set(inspect.signature(spread).parameters)
    known -= {"weights", "margin", "class_mask"}
    check_keys("spreadout_options", options, known)
    check_numbers("spreadout_options.", options)
    if margin is None:
        return None
    return lambda heads, **mask: spread(heads, margin=margin, **options, **mask)[0]


def last_round(algorithm: Algorithm, model: Model, settings: Mapping) -> LastRound:
    """`epochs` (5 unless given) of `adapted(algorithm, model, **settings)`.

    Raises:
      ValueError: for a setting that `adapted` does not have, or one out of range.
    """
    known = {"epochs", *inspect.signature(adapted).parameters}
    check_keys("adapt", settings, known - {"algorithm", "model"})
    settings = {"epochs": 5, **settings}
    check_numbers("adapt.", settings)
    epochs = settings.pop("epochs")
    return LastRound(adapted(algorithm, model, **settings), epochs)


def previous_features(embed: Callable) -> Callable:
    """`frozen` of `fedfr`: features of the global and the client's previous network."""
    return partial(frozen_features, embed)


def backbone_features(model: Model) -> Callable:
    """(backbone variables, images) -> [B, D] in evaluation mode.

    Traced once for each shape, mesh and setting of JAX, wherever it is called.
    """
    return jax.jit(lambda *arguments: model.apply(*arguments, False)[0], inline=True)
