"""Any federated algorithm on faces, judged beside FedFR by the same protocols.

The algorithm trains the backbone on a margin softmax over each client's own classes;
class embeddings stay with the client (`personal`), as in the FedAvg row of FedFR's
tables, which `algorithm: fedavg` equals. The server's backbone is the generic network,
what the algorithm deploys at a client the personalised one.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.federated.algorithms.statistics import with_statistics
from fedfr_jax.losses import margin_of
from fedfr_jax.losses.contract import Margin, logits, moved, see
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
from fedfr_jax.types import Algorithm, Local, Model, PyTree

EMBEDDINGS = "the class embeddings that stay with clients"
UNFIT = {  # algorithms that cannot train faces here, and what they would need
    "afl": "classes that all clients share",
    "cdw": "logits of the network itself: its task is reid",
    "fedaws": EMBEDDINGS,
    "feddane": EMBEDDINGS,
    "fedmargin": "class prototypes that all clients share",
    "finch": "public images without labels: its task is reid",
    "kd": "public images without labels: its task is reid",
    "mime": EMBEDDINGS,
    "moon": "a loss of its own: leave it out and give contrastive_weight",
}


def classical_faces(
    model: Model,
    make: Callable[[Local], Algorithm],
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
    distill: Distill | None = None,
) -> FaceMethod:
    """An algorithm as a row of the result.

    Args:
      make: local -> algorithm, over params {"backbone", "head": [M, D]}.
      num_classes: M, the most identities of any client.
      learning_rate, decay_epochs, momentum, weight_decay, clip_norm: local SGD of
        backbone and class embeddings, see `local_of`.
      freeze: see `with_frozen`.
      batch_stats: average, local or first, see `with_statistics`.
      margin_loss, scale, margin, margin_options: see `margin_of`.
      distill: the server's teacher of clients' networks, see `distilled`, or None.

    Raises:
      ValueError: for an unknown margin loss or an option out of range.
    """
    check_numbers("", locals())  # every argument that has a range
    rule = margin_of(margin_loss, scale=scale, margin=margin, options=margin_options)
    loss_of = lambda model: own_classes_loss(model, rule)
    local = local_of(
        distilled(loss_of, model, distill) if distill else loss_of(model),
        learning_rate=learning_rate,
        decay_epochs=decay_epochs,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    local = with_frozen(local, model, freeze)
    own = learned(rule, num_classes)
    dim = model.embedding_dim
    draw_own = init_local(num_classes, dim, branch=None, others=own)

    def start(backbone: PyTree, phi: jax.Array) -> PyTree:
        del phi  # no public classes
        head = jnp.zeros((num_classes, model.embedding_dim))
        params = {"backbone": backbone["params"], "head": head, **own}
        return {**with_start(backbone, rule), "params": params}

    algorithm = personal(
        with_statistics(make(local), batch_stats),
        "^params/(head$|margin/)",
        draw=lambda key: {"params": draw_own(key), "batch_stats": {}},
    )
    return FaceMethod(
        algorithm,
        start,
        lambda variables, images: model.apply(backbone_of(variables), images, False)[0],
        generic=lambda server: backbone_of(algorithm.network(server)),
        distill=distill,
    )


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
