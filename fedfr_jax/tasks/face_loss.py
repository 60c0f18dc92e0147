"""The local objective of FedFR, each term an option.

total = L_cos + contrastive_weight * L_con + branch_weight * L_branch (Liu et al. 2022,
arXiv:2112.12496, section 3): a margin softmax over the client's own classes followed by
the public ones, a model-contrastive term against frozen features, and a branch of
decoupled feature customization that sees the client's own classes only.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.losses import CONVERTERS, LOSSES
from fedfr_jax.losses.binary import binary_branch
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.margin import cosine, repeat_others, softmax_cross_entropy
from fedfr_jax.types import Model, PyTree

BRANCHES = ("bce", "cosface")
REWEIGHTS = ("mended", "official")


def masked_mean(values: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Mean [] of values [B] over the valid ones; 0 when none is."""
    count = jnp.maximum(is_valid.sum(), 1).astype(values.dtype)
    return jnp.where(is_valid, values, 0).sum() / count


def init_local(
    num_classes: int,
    dim: int,
    *,
    branch: str | None,
    converter: str = "linear",
    std: float = 0.01,
) -> Callable:
    """key -> {"head": [M, D], "branch": {...}} of a new client.

    Head rows are N(0, std^2); the branch starts from a copy of them, zero biases and
    the converter's own start (the identity when linear).
    """

    def init(key):
        head_key, converter_key = jax.random.split(key)
        head = std * jax.random.normal(head_key, (num_classes, dim))
        if branch is None:
            return {"head": head}
        return {
            "head": head,
            "branch": {
                "converter": CONVERTERS[converter].init(converter_key, dim),
                "weights": head,
                "bias": jnp.zeros(num_classes),
            },
        }

    return init


def personal_features(model: Model, *, converter: str = "linear") -> Callable:
    """(variables of `Algorithm.personalize`, images) -> [B, D] the client would use."""

    def embed(variables: PyTree, images: jax.Array) -> jax.Array:
        features, _ = model.apply(variables["backbone"], images, False)
        if "branch" in variables:
            params = variables["branch"]["converter"]
            features = CONVERTERS[converter].apply(params, features)
        return features

    return embed


def face_loss(
    model: Model,
    *,
    margin_loss: str = "cosface",
    scale: float = 30.0,
    margin: float = 0.4,
    contrastive_weight: float = 0.0,
    temperature: float = 0.5,
    branch: str | None = None,
    branch_weight: float = 10.0,
    converter: str = "linear",
    detach_branch: bool = False,
    reweight: str | None = None,
    num_clients: int = 0,
) -> Callable:
    """Loss of `local_sgd` over params {"backbone", "phi", "head", "branch"}.

    Args:
      margin_loss: a name of LOSSES, with its `scale` and `margin`.
      contrastive_weight: 0 leaves the term, and the frozen features, out.
      branch: bce (SphereFace2), cosface (over the own classes, own images only), or
        None without a branch.
      converter: a name of CONVERTERS, between backbone and branch.
      detach_branch: stop the branch's gradient before the backbone.
      reweight: None, or repeat logits to imitate the softmax over the classes of all
        `num_clients` (`repeat_others`): mended, or official, which cuts the gradient of
        L_cos as the released `--reweight_cosface` does.

    Raises:
      ValueError: for an unknown margin loss, branch, converter or reweight.
    """
    _check_name("margin_loss", margin_loss, LOSSES)
    _check_name("branch", branch, (None, *BRANCHES))
    _check_name("converter", converter, CONVERTERS)
    _check_name("reweight", reweight, (None, *REWEIGHTS))
    logits_of = LOSSES[margin_loss]

    def branch_loss(params, features, batch, labels, class_mask):
        features = jax.lax.stop_gradient(features) if detach_branch else features
        customized = CONVERTERS[converter].apply(params["converter"], features)
        if branch == "bce":
            values = binary_branch(
                customized, params["weights"], params["bias"], labels, class_mask
            )
            return masked_mean(values, batch.is_valid)
        logits = logits_of(
            cosine(customized, params["weights"]), labels, scale=scale, margin=margin
        )
        values = softmax_cross_entropy(logits, labels, class_mask)
        return masked_mean(values, batch.is_valid & ~batch.is_extra)

    def loss_fn(variables, batch, key, *, num_classes, frozen):
        del key
        params, stats = variables["params"], variables["batch_stats"]
        backbone = {"params": params["backbone"], "batch_stats": stats}
        features, stats = model.apply(backbone, batch.images, True)
        head, phi = (
            params["head"],
            params["phi"],
        )  # None where there are no such classes
        weights = jnp.concatenate([x for x in (head, phi) if x is not None])
        num_own = 0 if head is None else len(head)  # padded to the largest client's
        own_mask = jnp.arange(num_own, dtype=jnp.int32) < num_classes
        mask = jnp.concatenate([own_mask, jnp.ones(len(weights) - num_own, bool)])
        labels = jnp.where(batch.is_extra, num_own + batch.labels, batch.labels)
        logits = logits_of(
            cosine(features, weights), labels, scale=scale, margin=margin
        )
        if reweight:
            logits = repeat_others(logits, labels, num_classes, num_clients - 1, mask)
        if reweight == "official":
            logits = jax.lax.stop_gradient(logits)
        per_example = softmax_cross_entropy(logits, labels, mask)
        metrics = {"classification": masked_mean(per_example, batch.is_valid)}
        total = metrics["classification"]
        if contrastive_weight:
            per_example = model_contrastive(
                features,
                frozen.global_features(batch.example, batch.is_flipped),
                frozen.previous_features(batch.position, batch.is_flipped),
                temperature=temperature,
            )
            metrics["contrastive"] = masked_mean(per_example, batch.is_valid)
            total += contrastive_weight * metrics["contrastive"]
        if branch:
            value = branch_loss(params["branch"], features, batch, labels, own_mask)
            metrics["branch"] = value
            total += branch_weight * value
        return total, (stats, metrics)

    return loss_fn


def _check_name(what, name, known):
    if name not in known:
        raise ValueError(f"{what} must be one of {list(known)}, got {name!r}.")
