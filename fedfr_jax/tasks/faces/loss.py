"""Loss of a face client, with optional terms; margin state; FedFR's branch.

The running state of a margin loss (AdaFace's norms, CurricularFace's t) is among the
running statistics, `batch_stats`, under the name NUMBERS. So what happens to statistics
happens to them: central training averages them over devices, algorithms over clients,
or every client keeps its own (`batch_stats: local`). Every stage starts them anew. What
it learns (UniFace's threshold) lies beside the class embeddings, as params/margin, and
stays with a client.

FedFR's branch of decoupled feature customization, which stays with its client.

A converter, and class weights that start from the client's embeddings, under a loss of
their own (Liu et al. 2022, arXiv:2112.12496, section 3.3).

The local objective of FedFR, each term an option.

total = L_cos + contrastive_weight * L_con + branch_weight * L_branch (Liu et al. 2022,
arXiv:2112.12496, section 3): a margin softmax over the client's own classes followed by
the public ones, a model-contrastive term against frozen features, and a branch of
decoupled feature customization. It sees the client's own classes, with public images as
negatives (bce, uniface) or left out (cosface), or the public classes too (cosface_all);
which of the latter two is the paper's CosFace branch is not published.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp

from fedfr_jax.federated.parameter_packing import PackedVariables, pack, unpack
from fedfr_jax.losses import CONVERTERS, LOSSES, build_margin
from fedfr_jax.losses.binary import binary_branch
from fedfr_jax.losses.contract import (
    Margin,
    logits,
    margin_inputs,
    softmax,
    updated_state,
)
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.margin import cosine, interclass_filter, repeat_others
from fedfr_jax.losses.margin_losses import uniface
from fedfr_jax.losses.masked_means import masked_mean, masked_part_mean, valid_classes
from fedfr_jax.losses.spreadout import class_hinge
from fedfr_jax.ranges import Cosine, NonNegative, Positive, Whole
from fedfr_jax.schema import check_choice, check_keys, check_settings, checked
from fedfr_jax.tasks.options import keywords
from fedfr_jax.types import Model, PyTree

NUMBERS = "margin_loss"  # no block of a network has this name


def with_margin_state(model: Model) -> Model:
    """Wrap a model so that its statistics may hold a margin's state."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            stats = variables["batch_stats"]
            *outputs, new = function(without_numbers(variables), x, *mode, **key)
            kept = {NUMBERS: stats[NUMBERS]} if NUMBERS in stats else {}
            return *outputs, {**new, **kept}

        return call

    features = model.apply_with_features and wrapped(model.apply_with_features)
    return model._replace(apply=wrapped(model.apply), apply_with_features=features)


def without_numbers(variables: PyTree) -> PyTree:
    """Variables without the margin's state."""
    stats = variables["batch_stats"]
    own = {name: x for name, x in stats.items() if name != NUMBERS}
    return {**variables, "batch_stats": own}


def with_start(variables: PyTree, margin: Margin | None) -> PyTree:
    """Add the initial state of a margin to a model's variables."""
    own = without_numbers(variables)
    if margin is None or not margin.state:
        return own
    stats = {**own["batch_stats"], NUMBERS: margin.start()}
    return {**own, "batch_stats": stats}


def numbers_of(stats: PyTree) -> PyTree:
    """Margin state {name: []} among statistics, packed or not."""
    return unpack(stats).get(NUMBERS, {})


def with_numbers(stats: PyTree, numbers: PyTree) -> PyTree:
    """Replace the margin state in statistics, packed if they were."""
    if not numbers:
        return stats
    named = {**unpack(stats), NUMBERS: numbers}
    return pack(named) if isinstance(stats, PackedVariables) else named


def learned(margin: Margin | None, num_classes: int) -> PyTree:
    """{"margin": initial parameters of the margin}; {} if it has none."""
    start = margin.params(num_classes) if margin else {}
    return {"margin": start} if start else {}


LIKE_FIRST = ("cosface", "cosface_all")  # which have the first term's margin
Branch = Literal["bce", "cosface", "cosface_all", "uniface"]


def compute_branch_values(
    branch: str | None, options: Mapping | None, margin_loss: str, first: Mapping
) -> Callable | None:
    """Build (customized [B, D], weights [C, D], bias, labels, mask, batch, key) -> [B].

    Args:
      branch: a Branch, or None, which has no values.
      options: keywords of the branch's loss.
      margin_loss, first: the name of the first term's margin, and its keywords.

    Raises:
      ValueError: for an unknown option, or one out of range.
    """
    options = {} if options is None else options
    loss = {"bce": binary_branch, "uniface": uniface}.get(branch)
    loss = LOSSES.get(margin_loss) if branch in LIKE_FIRST else loss
    kinds = {k: x.annotation for k, x in keywords(loss).items()} if loss else {}
    options = check_settings("branch_options", options, kinds)
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
        seen = margin_inputs(customized, cosines, labels, batch.is_valid, key)
        found = logits(rule, cosines, labels, seen, {})
        return rule.loss(found, labels, mask, {"bias": bias})

    return by_margin


def build_branch_loss(
    branch: str | None, values_of: Callable | None, converter: str, detach: bool
) -> Callable:
    """Build (params, features [B, D], phi, batch, labels, key) -> the branch's loss [].

    Args:
      values_of: of `compute_branch_values`.
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
        is_other = batch.is_added & (branch == "cosface")
        return masked_mean(values, batch.is_valid & ~is_other)

    return branch_loss


HINGE = "class_hinge"  # beside the names of LOSSES


def init_local(
    num_classes: int,
    dim: int,
    *,
    branch: str | None,
    converter: str = "linear",
    std: float = 0.01,
    others: Mapping = MappingProxyType({}),
) -> Callable:
    """Build key -> {"head": [M, D], "branch": {...}, **others} of a new client.

    Head rows are N(0, std^2); the branch starts from a copy of them, zero biases (a
    uniface branch from UniFace's one threshold) and the converter's own start (the
    identity when linear).
    """

    def init(key):
        head_key, converter_key = jax.random.split(key)
        head = std * jax.random.normal(head_key, (num_classes, dim))
        if branch is None:
            return {"head": head, **others}
        bias = jnp.zeros(num_classes)
        if branch == "uniface":
            bias = uniface().params(num_classes)["bias"]
        return {
            "head": head,
            "branch": {
                "converter": CONVERTERS[converter].init(converter_key, dim),
                "weights": head,
                "bias": bias,
            },
            **others,
        }

    return init


def client_features(model: Model, *, converter: str = "linear") -> Callable:
    """Build (variables of `Algorithm.personalize`, images) -> features [B, D]."""

    def embed(variables: PyTree, images: jax.Array) -> jax.Array:
        features, _ = on_variables(model).apply(variables, images)
        if "branch" in variables["params"]:
            params = variables["params"]["branch"]["converter"]
            features = CONVERTERS[converter].apply(params, features)
        return features

    return embed


def on_variables(model: Model) -> Model:
    """Apply the backbone `model` to an algorithm's params {"backbone", ...}."""

    def apply(variables, x, train=False, **key):
        backbone = {**variables, "params": variables["params"]["backbone"]}
        return model.apply(backbone, x, train, **key)

    def features(variables, x, train=False, **key):
        embedding, stats = apply(variables, x, train, **key)
        return embedding, embedding, stats

    return model._replace(apply=apply, apply_with_features=features)


def of_backbone(model: Model) -> Model:
    """Inverse of `on_variables`."""

    def apply(backbone, x, train=False, **key):
        variables = {**backbone, "params": {"backbone": backbone["params"]}}
        return model.apply(variables, x, train, **key)

    return model._replace(apply=apply)


def classifier(model: Model) -> Model:
    """Classifier of a client's classes, with cosines [B, M] as output."""

    def apply(variables, x, train=False, key=None):
        features, stats = on_variables(model).apply(variables, x, train, key=key)
        return cosine(features, variables["params"]["head"]), stats

    return model._replace(apply=apply)


def backbone_of(variables: PyTree) -> PyTree:
    """The backbone's variables among trained variables."""
    own = without_numbers(variables)
    return {**own, "params": variables["params"]["backbone"]}


@checked
def face_loss(
    model: Model,
    *,
    margin_loss: str = "cosface",
    scale: Positive = 30.0,
    margin: NonNegative = 0.4,
    margin_options: Mapping | None = None,
    contrastive_weight: NonNegative = 0.0,
    contrastive_temperature: Positive = 0.5,
    branch: Branch | None = None,
    branch_weight: NonNegative = 10.0,
    branch_options: Mapping | None = None,
    converter: Literal["linear", "bottleneck"] = "linear",
    detach_branch: bool = False,
    branch_reweighting: Literal["corrected", "official"] | None = None,
    num_clients: Whole = 0,
    interclass_filtering_threshold: Cosine | None = None,
) -> Callable:
    """Face loss over params {"backbone", "phi", "head", "branch", "margin"}.

    Args:
      margin_loss: a name of LOSSES, with its `scale`, `margin` and further keywords in
        `margin_options`; or class_hinge, FedFace's pull towards class embeddings that
        stay as they are, to a cosine of 1 - `margin`. `margin_state` says where what
        the loss keeps or learns is found.
      contrastive_weight: 0 leaves the term, and the frozen features, out.
      branch: bce (SphereFace2), uniface, cosface (`margin_loss` over the own classes,
        own images only), cosface_all (over own and public classes, all images), or None
        without a branch.
      branch_weight: 10 is for bce, which is divided by its scale; the others are as
        large as the first term.
      branch_options: keywords of the branch's loss: `scale`, `margin`, `t` and
        `positive_weight` of `binary_branch`; those of `uniface`; those of `margin_loss`
        for a cosface branch, which has the first term's unless given.
      converter: a name of CONVERTERS, between backbone and branch.
      detach_branch: stop the branch's gradient before what clients share: the backbone,
        and the public classes of cosface_all.
      branch_reweighting: None, or repeat logits to imitate the softmax over the classes
      of all
        `num_clients` (`repeat_others`): corrected, or official, which cuts the gradient
        of L_cos as the released `--reweight_cosface` does.
      interclass_filtering_threshold: cosine above which another class of an example is
      taken for
        label noise and left out, see `interclass_filter`; None takes all.

    Raises:
      ValueError: for an unknown margin loss or option of the branch, one out of range,
        or a reweighting without clients.
    """
    _check_names(margin_loss, branch_reweighting, num_clients)
    rule = build_rule(margin_loss, scale, margin, margin_options)
    _check_rule(rule, margin_loss, branch, branch_reweighting)
    first = {"scale": scale, "margin": margin, **(margin_options or {})}
    branch_values = compute_branch_values(branch, branch_options, margin_loss, first)
    branch_loss = build_branch_loss(branch, branch_values, converter, detach_branch)
    repeats = num_clients - 1 if branch_reweighting else 0
    is_cut = branch_reweighting == "official"
    first_term = get_first_term(
        rule, margin, interclass_filtering_threshold, repeats, is_cut
    )

    def loss_fn(variables, batch, key, *, frozen=None):
        params, stats = variables["params"], variables["batch_stats"]
        backbone = {"params": params["backbone"], "batch_stats": stats}
        features, stats = model.apply(backbone, batch.images, True, key=key)
        head, phi = params["head"], params.get("phi")  # None without such classes
        weights = jnp.concatenate([x for x in (head, phi) if x is not None])
        num_own = 0 if head is None else len(head)  # padded to the largest client's
        mask = valid_classes(num_own, batch.num_classes, len(weights) - num_own)
        labels = jnp.where(batch.is_added, num_own + batch.labels, batch.labels)
        per_example, numbers = first_term(
            features,
            weights,
            labels,
            mask,
            batch,
            learned=params.get("margin", {}),
            numbers=numbers_of(stats) if rule and rule.state else {},
            key=sampling_key(key, 1),
        )
        stats = with_numbers(stats, numbers)
        metrics = {"classification_loss": masked_part_mean(per_example, batch)}
        total = metrics["classification_loss"]
        if contrastive_weight:
            per_example = model_contrastive(
                features,
                frozen.global_features(batch),
                frozen.previous_features(batch),
                temperature=contrastive_temperature,
            )
            metrics["contrastive_loss"] = masked_mean(per_example, batch.is_valid)
            total += contrastive_weight * metrics["contrastive_loss"]
        if branch:
            metrics["branch_loss"] = branch_loss(
                params["branch"], features, phi, batch, labels, sampling_key(key, 2)
            )
            total += branch_weight * metrics["branch_loss"]
        return total, (stats, metrics)

    return loss_fn


def get_first_term(
    rule: Margin | None,
    margin: float,
    interclass_filtering_threshold: float | None,
    repeats: int,
    is_cut: bool,
) -> Callable:
    """Build (features, weights, labels, ...) -> (losses [B], margin state).

    Args:
      rule: of the softmax, or None for class_hinge, to a cosine of 1 - `margin`.
      interclass_filtering_threshold: see `face_loss`.
      repeats: of logits of other classes, 0 without reweighting.
      is_cut: the released reweighting, which cuts the gradient.
    """

    def first_term(features, weights, labels, mask, batch, learned, numbers, key):
        if rule is None:
            own = jax.lax.stop_gradient(weights)[labels]
            return class_hinge(features, own, target=1.0 - margin), numbers
        cosines = cosine(features, weights)
        if interclass_filtering_threshold is not None:
            cosines = interclass_filter(
                cosines, labels, threshold=interclass_filtering_threshold
            )
        seen = margin_inputs(features, cosines, labels, batch.is_valid, key)
        numbers = updated_state(rule, numbers, seen)
        found = logits(rule, cosines, labels, seen, numbers)
        if repeats:
            found = repeat_others(found, labels, batch.num_classes, repeats, mask)
        if is_cut:
            found = jax.lax.stop_gradient(found)
        losses = rule.loss(found, labels, mask, learned)
        if rule.penalty:
            losses += rule.penalty(seen.norm)
        return losses, numbers

    return first_term


def build_rule(
    name: str, scale: float, margin: float, options: Mapping | None
) -> Margin | None:
    """Build the margin loss that a config names; None for class_hinge.

    Raises:
      ValueError: for an unknown name or option, or one out of range.
    """
    if name == HINGE:
        check_keys("margin_options", options or {}, ())
        return None
    return build_margin(name, scale=scale, margin=margin, options=options)


def sampling_key(key: jax.Array | None, use: int) -> jax.Array | None:
    """PRNG key for one use in a step, next to dropout's."""
    return None if key is None else jax.random.fold_in(key, use)


def _check_names(margin_loss, branch_reweighting, num_clients):
    check_choice("margin_loss", margin_loss, (*LOSSES, HINGE))
    if branch_reweighting and num_clients < 1:
        raise ValueError(
            f"num_clients must be at least 1 with branch_reweighting, got "
            f"{num_clients}."
        )


def _check_rule(rule, margin_loss, branch, branch_reweighting):
    """Raise ValueError for branches and reweighting that need a plain softmax."""
    is_softmax = rule is not None and rule.loss is softmax
    is_unfit = branch in LIKE_FIRST and not (rule and rule.is_plain)
    if (branch_reweighting and not is_softmax) or is_unfit:
        raise ValueError(
            "margin_loss must be a softmax without state or parameters with branch "
            f"{branch} and branch_reweighting {branch_reweighting}, got "
            f"{margin_loss!r}."
        )
