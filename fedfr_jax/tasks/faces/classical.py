"""Any federated algorithm on faces, judged beside FedFR by the same evaluators.

The algorithm trains the backbone on a margin softmax over each client's own classes;
class embeddings stay with the client (`personal`), as in the FedAvg row of FedFR's
tables, which `algorithm: fedavg` equals. The server's backbone is the generic network,
what the algorithm deploys at a client the personalised one. Where a row keeps some of
the backbone with clients too, the generic one has those of a new client.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.losses import margin_of
from fedfr_jax.losses.contract import Margin, logits, moved, see
from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.margin import cosine
from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.tasks.faces.distilled import Distill, distilled
from fedfr_jax.tasks.faces.given_weights import with_frozen
from fedfr_jax.tasks.faces.loss import draw_key, init_local
from fedfr_jax.tasks.faces.margin_state import (
    learned,
    numbers_of,
    with_numbers,
    with_start,
    without_numbers,
)
from fedfr_jax.tasks.faces.methods import FaceMethod
from fedfr_jax.tasks.faces.option_ranges import check_numbers
from fedfr_jax.tasks.options import local_of
from fedfr_jax.tasks.row_keys import Start, composed
from fedfr_jax.types import Algorithm, Local, Model, PyTree

OWN_CLASSES = "^params/(head$|margin/)"


def classical_faces(
    model: Model,
    make: Callable[[Local], Algorithm],
    *,
    algorithm: str,
    terms: Sequence[Callable] = (),
    own: Mapping = MappingProxyType({}),
    num_classes: int,
    learning_rate: float = 1e-3,
    decay_epochs: int | tuple[int, ...] = (8, 6, 4, 3),
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    clip_norm: float = 0.0,
    optimizer: str | Mapping = "sgd",
    layer_rates: Mapping = MappingProxyType({}),
    freeze: str = "",
    scale: float = 30.0,
    margin: float = 0.4,
    margin_loss: str = "cosface",
    margin_options: Mapping | None = None,
    distill: Distill | None = None,
) -> FaceMethod:
    """An algorithm as a row of the result.

    Args:
      make: local -> algorithm, over params {"backbone", "head": [M, D]}.
      algorithm: its name.
      terms: (model -> loss, model) -> loss: around the row's loss.
      own: keys of `row_keys`, whose patterns are of paths such as
        params/backbone/stem/conv/kernel; blocks and batch norms are the backbone's.
      num_classes: M, the most identities of any client.
      learning_rate, decay_epochs, momentum, weight_decay, clip_norm, optimizer,
        layer_rates: steps of backbone and class embeddings, see `local_of`.
      freeze: see `with_frozen`; `frozen` among `own` is the word of every task.
      margin_loss, scale, margin, margin_options: see `margin_of`.
      distill: the server's teacher of clients' networks, see `distilled`, or None.

    Raises:
      ValueError: for an unknown margin loss or an option out of range.
    """
    check_numbers("", locals())  # every argument that has a range
    rule = margin_of(margin_loss, scale=scale, margin=margin, options=margin_options)
    loss_of = lambda model: own_classes_loss(model, rule)
    if distill:
        loss_of = partial(distilled, loss_of, told=distill)
    for term in terms:
        loss_of = partial(term, loss_of)
    local = local_of(
        loss_of(model),
        learning_rate=learning_rate,
        decay_epochs=decay_epochs,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        optimizer=optimizer,
        layer_rates=layer_rates,
    )
    local = with_frozen(local, model, freeze)
    learns = learned(rule, num_classes)
    dim = model.embedding_dim
    draw_own = init_local(num_classes, dim, branch=None, others=learns)

    def start(backbone: PyTree, phi: jax.Array) -> PyTree:
        del phi  # no public classes
        head = jnp.zeros((num_classes, model.embedding_dim))
        params = {"backbone": backbone["params"], "head": head, **learns}
        return {**with_start(backbone, rule), "params": params}

    draw = lambda key: start(model.init(key), None)
    shapes = jax.eval_shape(draw, jax.random.key(0))
    of = Start(model, shapes, draw, at="backbone/", kept=OWN_CLASSES)
    made = personal(
        composed(algorithm, make, local, own, of),
        OWN_CLASSES,
        draw=lambda key: {"params": draw_own(key), "batch_stats": {}},
    )
    # Patterns must match: before any compile.
    jax.eval_shape(made.init, shapes)
    jax.eval_shape(lambda x: local.optimizer(0.1).init(x), shapes["params"])
    return FaceMethod(
        made,
        start,
        lambda variables, images: model.apply(backbone_of(variables), images, False)[0],
        generic=lambda server: backbone_of(made.network(server)),
        distill=distill,
    )


def contrastive(
    loss_of: Callable,
    model: Model,
    *,
    contrastive_weight: float = 5.0,
    temperature: float = 0.5,
) -> Callable:
    """Loss of the algorithm moon: the row's own, and weight * `model_contrastive`.

    Args:
      loss_of: model -> loss over params with a "backbone".
      contrastive_weight: mu >= 0.
      temperature: > 0.
    """
    check_numbers("", locals())

    def loss_fn(variables, batch, key, *, received, previous):
        backbone = backbone_of(variables)
        features, stats = model.apply(backbone, batch.images, True, key=key)
        known = model._replace(apply=lambda *_, **__: (features, stats))
        total, (stats, metrics) = loss_of(known)(variables, batch, key)
        seen = lambda fixed: model.apply(backbone_of(fixed), batch.images, False)[0]
        terms = model_contrastive(
            features, seen(received), seen(previous), temperature=temperature
        )
        term = masked_mean(terms, batch.is_valid)
        metrics = {**metrics, "contrastive": term}
        return total + contrastive_weight * term, (stats, metrics)

    return loss_fn


TERMS = {"contrastive_loss": contrastive}  # around the row's loss, by its need


def classifier(model: Model) -> Model:
    """The network with a logit for every class of the client: cosines [B, M]."""

    def apply(variables, x, train=False, key=None):
        features, stats = model.apply(backbone_of(variables), x, train, key=key)
        return cosine(features, variables["params"]["head"]), stats

    return model._replace(apply=apply)


def backbone_of(variables: PyTree) -> PyTree:
    """The backbone's variables among those that an algorithm trains."""
    own = without_numbers(variables)
    return {**own, "params": variables["params"]["backbone"]}


def own_classes_loss(model: Model, rule: Margin) -> Callable:
    """Loss of `Local` over params {"backbone", "head": [M, D], perhaps "margin"}."""

    def loss_fn(variables, batch, key):
        params, numbers = variables["params"], numbers_of(variables["batch_stats"])
        backbone = backbone_of(variables)
        features, stats = model.apply(backbone, batch.images, True, key=key)
        head = params["head"]
        mask = jnp.arange(len(head), dtype=jnp.int32) < batch.num_classes
        cosines = cosine(features, head)
        draw = draw_key(key, 1)
        seen = see(features, cosines, batch.labels, batch.is_valid, draw)
        numbers = moved(rule, numbers, seen)
        found = logits(rule, cosines, batch.labels, seen, numbers)
        learned = params.get("margin", {})
        losses = rule.classify(found, batch.labels, mask, learned)
        if rule.penalty:
            losses += rule.penalty(seen.norm)
        value = masked_mean(losses, batch.is_valid)
        return value, (with_numbers(stats, numbers), {"classification": value})

    return loss_fn
