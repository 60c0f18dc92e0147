"""FedFR's branch of decoupled feature customization, which stays with its client.

A converter, and class weights that start from the client's embeddings, under a loss of
their own (Liu et al. 2022, arXiv:2112.12496, section 3.3).
"""

import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fedfr_jax.losses import CONVERTERS, LOSSES
from fedfr_jax.losses.binary import binary_branch
from fedfr_jax.losses.contract import logits, see
from fedfr_jax.losses.margin import cosine
from fedfr_jax.losses.masks import masked_mean, valid_classes
from fedfr_jax.losses.uniface import uniface
from fedfr_jax.schema import check_keys
from fedfr_jax.tasks.faces.option_ranges import check_numbers

LIKE_FIRST = ("cosface", "cosface_all")  # which have the first term's margin
BRANCHES = ("bce", *LIKE_FIRST, "uniface")


def branch_values_of(
    branch: str | None, options: Mapping | None, margin_loss: str, first: Mapping
) -> Callable | None:
    """(customized [B, D], weights [C, D], bias, labels, mask, batch, key) -> [B].

    Args:
      branch: one of BRANCHES, or None, which has no values.
      options: keywords of the branch's loss.
      margin_loss, first: the name of the first term's margin, and its keywords.

    Raises:
      ValueError: for an unknown option, or one out of range.
    """
    options = {} if options is None else options
    loss = {"bce": binary_branch, "uniface": uniface}.get(branch)
    loss = LOSSES.get(margin_loss) if branch in LIKE_FIRST else loss
    parameters = inspect.signature(loss).parameters.values() if loss else ()
    known = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    check_keys("branch_options", options, known)
    check_numbers("branch_options.", options)
    if branch is None:
        return None
    if branch == "bce":

        def binary(customized, weights, bias, labels, mask, batch, key):
            del batch, key
            return binary_branch(customized, weights, bias, labels, mask, **options)

        return binary
    rule = loss(**options) if branch == "uniface" else loss(**{**first, **options})

    def by_margin(customized, weights, bias, labels, mask, batch, key):
        cosines = cosine(customized, weights)
        seen = see(customized, cosines, labels, batch.is_valid, key)
        found = logits(rule, cosines, labels, seen, {})
        return rule.classify(found, labels, mask, {"bias": bias})

    return by_margin


def branch_loss_of(
    branch: str | None, values_of: Callable | None, converter: str, detach: bool
) -> Callable:
    """(params, features [B, D], phi, batch, labels, key) -> the branch's loss [].

    Args:
      values_of: of `branch_values_of`.
      converter, detach: see `face_loss`.
    """

    def branch_loss(params, features, phi, batch, labels, key):
        shared = jax.lax.stop_gradient if detach else lambda x: x
        customized = CONVERTERS[converter].apply(params["converter"], shared(features))
        weights, bias = params["weights"], params["bias"]
        num_own = len(weights)
        if branch == "cosface_all" and phi is not None:
            weights = jnp.concatenate([weights, shared(phi)])
        mask = valid_classes(num_own, batch.num_classes, len(weights) - num_own)
        values = values_of(customized, weights, bias, labels, mask, batch, key)
        is_other = batch.is_extra & (branch == "cosface")
        return masked_mean(values, batch.is_valid & ~is_other)

    return branch_loss
