"""The rows of FedFR's tables as settings of few pieces.

A method is a set of switches of `federated_faces`: FedAvg has none, `public` adds the
global data, `contrastive_weight` the contrastive term, `branch` the decoupled feature
customization; all of them are FedFR.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.algorithms.local import local_sgd, sgd, step_decay
from fedfr_jax.federated.hard_negatives import prepare_features
from fedfr_jax.tasks.face_loss import face_loss, init_local, personal_features
from fedfr_jax.types import Algorithm, Model, PyTree


class FaceMethod(NamedTuple):
    """An algorithm, what it starts from, and what a client deploys."""

    algorithm: Algorithm
    start: Callable  # (backbone variables, phi [M_g, D]) -> variables for `init`
    embed: Callable  # (variables of `personalize`, images) -> [B, D]


def federated_faces(
    model: Model,
    *,
    num_classes: int,
    learning_rate: float = 1e-3,
    decay_epochs: int | tuple[int, ...] = (8, 6, 4, 3),
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    scale: float = 30.0,
    margin: float = 0.4,
    margin_loss: str = "cosface",
    public: bool = True,
    threshold: float | None = 0.4,
    max_hard_negatives: int = 0,
    contrastive_weight: float = 5.0,
    temperature: float = 0.5,
    branch: str | None = "bce",
    branch_weight: float = 10.0,
    converter: str = "linear",
    detach_branch: bool = False,
    phi_update: str = "averaged",
    first_previous: str = "global",
    weigh: str = "local+extra",
) -> FaceMethod:
    """FedFR with every term an option; the defaults are the paper's.

    Args:
      num_classes: M, the most identities of any client.
      learning_rate, decay_epochs, momentum, weight_decay: local SGD; the rate drops
        by ten every `decay_epochs` epochs of a round and starts afresh in the next.
      public: train on the public classes too, with hard negatives above the cosine
        `threshold` (None: on none) and at most `max_hard_negatives` per client (0: no
        limit).
      contrastive_weight, branch, ...: see `face_loss`.
      phi_update, weigh: see `fedfr`.
      first_previous: global or random, the previous network of a new client.

    Raises:
      ValueError: for an unknown option.
    """
    if first_previous not in ("global", "random"):
        raise ValueError(
            f"first_previous must be global or random, got {first_previous!r}."
        )
    loss = face_loss(
        model,
        margin_loss=margin_loss,
        scale=scale,
        margin=margin,
        contrastive_weight=contrastive_weight,
        temperature=temperature,
        branch=branch,
        branch_weight=branch_weight,
        converter=converter,
        detach_branch=detach_branch,
    )
    optimizer = sgd(momentum=momentum, weight_decay=weight_decay)
    threshold = threshold if public else None
    embed = backbone_features(model)
    prepare = None
    if contrastive_weight or threshold is not None:
        prepare = prepare_features(
            embed, threshold=threshold, capacity=max_hard_negatives
        )
    algorithm = fedfr(
        local_sgd(loss, optimizer, step_decay(learning_rate, every=decay_epochs)),
        init_local(
            num_classes, model.embedding_dim, branch=branch, converter=converter
        ),
        embed=embed if contrastive_weight else None,
        prepare=prepare,
        phi_update=phi_update,
        first_previous=model.init if first_previous == "random" else None,
        weigh=weigh,
    )

    def start(backbone: PyTree, phi: jax.Array) -> PyTree:
        phi = phi if public else jnp.zeros((0, model.embedding_dim), phi.dtype)
        return {"backbone": backbone, "phi": phi}

    return FaceMethod(algorithm, start, personal_features(model, converter=converter))


def backbone_features(model: Model) -> Callable:
    """(backbone variables, images) -> [B, D] in evaluation mode."""
    return lambda variables, images: model.apply(variables, images, False)[0]
