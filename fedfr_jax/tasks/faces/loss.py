"""Local objective of a face client: margin softmax, contrastive term, branch.

total = L_cos + contrastive_weight * L_con + w * L_branch, w the weight of `branch`
(FedFR, Liu et al. 2022, arXiv:2112.12496, section 3): a margin softmax over the
client's own classes followed by the public ones, a model-contrastive term against
frozen features, and a branch of decoupled feature customization (section 3.3). The
branch stays with its client: a converter of the embedding, and class weights that start
from the client's class embeddings, under a loss of their own. It sees the client's own
classes, with public images as negatives (bce, uniface) or left out (cosface), or the
public classes too (cosface_all); which of the latter two is the paper's CosFace branch
is not published.

The running state of a margin loss (AdaFace's norms, CurricularFace's t) is among the
running statistics, `batch_stats`, under the name NUMBERS. So what happens to statistics
happens to it: central training averages it over devices, algorithms over clients, or
every client keeps its own (`batch_stats: local`). Every stage starts it anew. What a
loss learns (UniFace's threshold) lies beside the class embeddings, as params/margin,
and stays with a client.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.federated.parameter_packing import PackedVariables, pack, unpack
from fedfr_jax.losses import LOSSES
from fedfr_jax.losses.binary import CONVERTERS, binary_branch
from fedfr_jax.losses.contract import (
    Margin,
    logits,
    margin_inputs,
    softmax,
    updated_state,
)
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.margin import cosine, interclass_filter, repeat_others
from fedfr_jax.losses.margin_losses import cosface, uniface
from fedfr_jax.losses.masked_means import masked_mean, masked_part_mean, valid_classes
from fedfr_jax.parts import Factory, Part, collecting, parse, read, read_name
from fedfr_jax.ranges import Cosine, NonNegative, Positive, Whole
from fedfr_jax.schema import checked, keywords
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

    return model.wrapped(wrapped)


def without_numbers(variables: PyTree) -> PyTree:
    """Variables without the margin's state."""
    stats = variables["batch_stats"]
    own = {name: x for name, x in stats.items() if name != NUMBERS}
    return {**variables, "batch_stats": own}


def with_start(variables: PyTree, margin: Margin) -> PyTree:
    """Add the initial state of a margin to a model's variables."""
    own = without_numbers(variables)
    if not margin.state:
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


def learned(margin: Margin, num_classes: int) -> PyTree:
    """{"margin": initial parameters of the margin}; {} if it has none."""
    start = margin.params(num_classes)
    return {"margin": start} if start else {}


# FedFR's settings, of a loss that does not set them
MARGIN = MappingProxyType({"scale": 30.0, "margin": 0.4})
COSFACE = Part(cosface, MARGIN, "cosface")


class MarginReader:
    """Reader of `loss`: a margin loss by name, cosface unless named, with settings."""

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read a part that gives the `Margin`."""
        family = {k: x for k, x in LOSSES.items() if "margin" in keywords(x)}
        name, settings = read_name(value, "cosface", where, mistakes, family)
        if name is None:
            return None
        reader, own = Factory(family[name], name=name), list[str]()
        usual = {k: x for k, x in MARGIN.items() if k in reader.parameters}
        part = reader.read({**usual, **settings}, where, own)
        if not own:
            with collecting(where, own):
                part()
        mistakes += own
        return part


BRANCH_WEIGHT = 10.0


class Branch(NamedTuple):
    """The key `branch`: a loss of the client's own classes."""

    name: str
    weight: float = BRANCH_WEIGHT
    settings: Mapping[str, Any] = MappingProxyType({})

    def margin(self, first: Part) -> Margin:
        """The branch's margin loss, but of bce.

        A cosface branch has the settings of the `first` term's unless it sets them.
        """
        if self.name == "uniface":
            return uniface(**self.settings)
        settings = {**first.settings, **self.settings}
        return parse(Factory(first.factory), settings, "branch")()

    def values(self, first: Part) -> Callable:
        """Build (customized [B, D], weights [C, D], bias, labels, mask, batch, key) ->
        [B].
        """
        if self.name == "bce":

            def binary(customized, weights, bias, labels, mask, batch, key):
                del batch, key
                own = self.settings
                return binary_branch(customized, weights, bias, labels, mask, **own)

            return binary
        rule = self.margin(first)

        def by_margin(customized, weights, bias, labels, mask, batch, key):
            cosines = cosine(customized, weights)
            inputs = margin_inputs(customized, cosines, labels, batch.is_valid, key)
            outputs = logits(rule, cosines, labels, inputs, {})
            return rule.loss(outputs, labels, mask, {"bias": bias})

        return by_margin


LIKE_FIRST = ("cosface", "cosface_all")  # which have the first term's margin
BRANCHES = {"bce": Factory(binary_branch, num_args=5), "uniface": Factory(uniface)}


class BranchReader:
    """Reader of `branch`: a name, bce unless given, `weight`, settings of its loss.

    Those of a cosface branch are read when the first term's loss is known.
    """

    def read(self, value: Any, where: str, mistakes: list[str]) -> Branch | None:
        """Read the branch."""
        names = (*BRANCHES, *LIKE_FIRST)
        name, settings = read_name(value, "bce", where, mistakes, names)
        if name is None:
            return None
        weight = settings.pop("weight", BRANCH_WEIGHT)
        weight = read(NonNegative, weight, f"{where}.weight", mistakes)
        if name in BRANCHES:
            settings = BRANCHES[name].read(settings, where, mistakes).settings
        return Branch(name, weight, settings)


def build_branch_loss(
    branch: Branch, first: Part, converter: str, detach: bool
) -> Callable:
    """Build (params, features [B, D], phi, batch, labels, key) -> the branch's loss [].

    Args:
      first: loss of the first term.
      converter, detach: see `face_loss`.
    """
    values_of = branch.values(first)

    def branch_loss(params, features, phi, batch, labels, key):
        shared = jax.lax.stop_gradient if detach else lambda x: x
        customized = CONVERTERS[converter].apply(params["converter"], shared(features))
        weights, bias = params["weights"], params["bias"]
        num_own = len(weights)
        if branch.name == "cosface_all" and phi is not None:
            weights = jnp.concatenate([weights, shared(phi)])
        mask = valid_classes(num_own, batch.num_classes, len(weights) - num_own)
        values = values_of(customized, weights, bias, labels, mask, batch, key)
        is_other = batch.is_added & (branch.name == "cosface")
        return masked_mean(values, batch.is_valid & ~is_other)

    return branch_loss


def init_local(
    num_classes: int,
    dim: int,
    *,
    branch: Branch | None,
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
        if branch.name == "uniface":
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
        features, _ = model.apply(variables, images, False)
        if "branch" in variables["params"]:
            params = variables["params"]["branch"]["converter"]
            features = CONVERTERS[converter].apply(params, features)
        return features

    return embed


def on_variables(model: Model) -> Model:
    """Apply the backbone `model` to an algorithm's params {"backbone", ...}."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            backbone = {**variables, "params": variables["params"]["backbone"]}
            return function(backbone, x, *mode, **key)

        return call

    return model.wrapped(wrapped)


def in_backbone(model: Model) -> Model:
    """A backbone whose own params lie below "backbone", as an algorithm's do."""

    def init(key):
        variables = model.init(key)
        return {**variables, "params": {"backbone": variables["params"]}}

    return on_variables(model)._replace(init=init)


def of_backbone(model: Model) -> Model:
    """Inverse of `in_backbone`."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            inside = {**variables, "params": {"backbone": variables["params"]}}
            return function(inside, x, *mode, **key)

        return call

    return model.wrapped(wrapped)._replace(
        init=lambda key: backbone_of(model.init(key))
    )


def with_embeddings(model: Model) -> Model:
    """Let the model's features be its embeddings."""

    def features(*arguments, **key):
        embedding, stats = model.apply(*arguments, **key)
        return embedding, embedding, stats

    return model._replace(apply_with_features=features)


def classifier(model: Model) -> Model:
    """Classifier of a client's classes, with cosines [B, M] as output."""

    def apply(variables, x, train=False, key=None):
        features, stats = model.apply(variables, x, train, key=key)
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
    loss: Part = COSFACE,
    contrastive_weight: NonNegative = 0.0,
    contrastive_temperature: Positive = 0.5,
    branch: Branch | None = None,
    converter: Literal["linear", "bottleneck"] = "linear",
    detach_branch: bool = False,
    branch_reweighting: Literal["corrected", "official"] | None = None,
    num_clients: Whole = 0,
    interclass_filtering_threshold: Cosine | None = None,
) -> Callable:
    """Face loss over params {"backbone", "phi", "head", "branch", "margin"}.

    Args:
      model: of such params, see `on_variables`.
      loss: a margin loss of LOSSES, scale 30 and margin 0.4 unless set. `with_start`
        and `learned` say where what it keeps or learns is found.
      contrastive_weight: 0 leaves the term, and the reference features, out.
      branch: bce (SphereFace2), uniface, cosface (the first term's loss over the own
        classes, own images only), cosface_all (over own and public classes, all
        images); None without a branch. The weight of 10 is for bce, which is divided
        by its scale; the others are as large as the first term. A cosface branch has
        the first term's keywords unless they are given, bce those of `binary_branch`.
      converter: a name of CONVERTERS, between backbone and branch.
      detach_branch: stop the branch's gradient before what clients share: the backbone,
        and the public classes of cosface_all.
      branch_reweighting: None, or repeat logits to imitate the softmax over the classes
        of all `num_clients` (`repeat_others`): corrected, or official, which cuts the
        gradient of L_cos as the released `--reweight_cosface` does.
      interclass_filtering_threshold: cosine above which another class of an example is
        taken for label noise and left out, see `interclass_filter`; None takes all.

    Raises:
      ValueError: for a loss that does not fit the branch or its reweighting, or a
        reweighting without clients.
    """
    rule = loss()
    _check_fit(loss, branch, branch_reweighting, num_clients)
    branch_loss = branch and build_branch_loss(branch, loss, converter, detach_branch)
    first_term = build_first_term(
        rule,
        interclass_filtering_threshold,
        repeats=num_clients - 1 if branch_reweighting else 0,
        is_cut=branch_reweighting == "official",
    )

    def loss_fn(variables, batch, key, *, reference: Any = None):
        params = variables["params"]
        features, stats = model.apply(variables, batch.model_inputs, True, key=key)
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
            numbers=numbers_of(stats) if rule.state else {},
            key=sampling_key(key, 1),
        )
        stats = with_numbers(stats, numbers)
        metrics = {"classification_loss": masked_part_mean(per_example, batch)}
        total = metrics["classification_loss"]
        if contrastive_weight:
            per_example = model_contrastive(
                features,
                reference.global_features(batch),
                reference.previous_features(batch),
                temperature=contrastive_temperature,
            )
            metrics["contrastive_loss"] = masked_mean(per_example, batch.is_valid)
            total += contrastive_weight * metrics["contrastive_loss"]
        if branch and branch_loss:
            metrics["branch_loss"] = branch_loss(
                params["branch"], features, phi, batch, labels, sampling_key(key, 2)
            )
            total += branch.weight * metrics["branch_loss"]
        return total, (stats, metrics)

    return loss_fn


def build_first_term(
    rule: Margin,
    interclass_filtering_threshold: float | None,
    *,
    repeats: int,
    is_cut: bool,
) -> Callable:
    """Build (features, weights, labels, ...) -> (losses [B], margin state).

    Args:
      interclass_filtering_threshold: see `face_loss`.
      repeats: of logits of other classes, 0 without reweighting.
      is_cut: the released reweighting, which cuts the gradient.
    """

    def first_term(features, weights, labels, mask, batch, learned, numbers, key):
        if rule.fixes_classes:
            weights = jax.lax.stop_gradient(weights)
        cosines = cosine(features, weights)
        if interclass_filtering_threshold is not None:
            cosines = interclass_filter(
                cosines, labels, threshold=interclass_filtering_threshold
            )
        inputs = margin_inputs(features, cosines, labels, batch.is_valid, key)
        numbers = updated_state(rule, numbers, inputs)
        scaled_logits = logits(rule, cosines, labels, inputs, numbers)
        if repeats:
            scaled_logits = repeat_others(
                scaled_logits, labels, batch.num_classes, repeats, mask
            )
        if is_cut:
            scaled_logits = jax.lax.stop_gradient(scaled_logits)
        losses = rule.loss(scaled_logits, labels, mask, learned)
        if rule.penalty:
            losses += rule.penalty(inputs.norm)
        return losses, numbers

    return first_term


def sampling_key(key: jax.Array | None, use: int) -> jax.Array | None:
    """PRNG key for one use in a step, next to dropout's."""
    return None if key is None else jax.random.fold_in(key, use)


def _check_fit(
    loss: Part, branch: Branch | None, branch_reweighting: str | None, num_clients: int
) -> None:
    """Raise ValueError for branches and reweighting that need a plain softmax, or
    clients.
    """
    if branch_reweighting and num_clients < 1:
        raise ValueError(
            f"num_clients must be at least 1 with branch_reweighting, got "
            f"{num_clients}."
        )
    rule, name = loss(), branch and branch.name
    is_unfit = name in LIKE_FIRST and not rule.is_plain
    if is_unfit or (branch_reweighting and rule.loss is not softmax):
        raise ValueError(
            "loss must be a softmax without state or parameters with branch "
            f"{name} and branch_reweighting {branch_reweighting}, got {loss.name!r}."
        )
