"""The public identities: everybody's training set, and where class embeddings start."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.sources.join import names_from
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.losses.contract import Margin
from fedfr_jax.stream import placed
from fedfr_jax.tasks.faces.face_images import Recognition
from fedfr_jax.tasks.faces.margin_state import learned, with_start
from fedfr_jax.types import Model, PyTree


def everyone(task: Recognition) -> Recognition:
    """The task whose public set holds the clients' training images too.

    The clients' classes follow the public ones; training on it is the central upper
    bound of federated training. What is judged stays.
    """
    p = task.partition
    own = p.client_identities
    order = np.argsort(own)
    place = order[np.searchsorted(own, task.train_identities, sorter=order)]
    labels = np.array(task.table.labels)
    labels[: len(place)] = len(p.global_identities) + place
    identities = np.concatenate([p.global_identities, own])
    return task._replace(
        partition=p._replace(global_identities=identities),
        table=task.table.with_labels(labels),
        train_identities=task.train_identities[:0],
    )


def without_labels(task: Recognition, names: Sequence[str], part: str) -> Recognition:
    """The task whose public people of a part of the source are no classes: the labels
    of their images are -1.

    Args:
      names: of all identities of the source.

    Raises:
      ValueError: when no public identity is of that part, or all are.
    """
    p, key = task.partition, "config.pretrain.distill.unlabelled_from"
    is_none = names_from(tuple(names[i] for i in p.global_identities), part, key)
    if is_none.all():
        raise ValueError(f"{key} must leave public people with labels, got {part!r}.")
    first, labels = len(task.train_identities), np.array(task.table.labels)
    place = np.where(is_none, -1, np.cumsum(~is_none) - 1).astype(labels.dtype)
    labels[first:] = place[labels[first:]]
    return task._replace(
        partition=p._replace(global_identities=p.global_identities[~is_none]),
        table=task.table.with_labels(labels),
    )


def public_means(
    model: Model, task: Recognition, mesh: Mesh, backbone: PyTree, batch_size: int = 64
) -> jax.Array:
    """Mean feature of every public class, unflipped, as they come, [M_g, D]."""
    embed = lambda variables, images: model.apply(variables, images, False)[0]
    first, labels = len(task.train_identities), task.partition.global_labels
    rows = np.arange(first, first + len(labels), dtype=np.int32)
    table = placed(task.table, mesh)
    embedded = build_embed(embed, Feed(batch_size, normalization(task.how)), mesh)
    features = embedded(backbone, table, rows)
    sums = jax.ops.segment_sum(
        features[: len(rows), 0], labels, len(task.partition.global_identities)
    )
    return sums / np.bincount(labels)[:, None].astype(sums.dtype)


def first_variables(
    model: Model,
    num_public: int,
    key: jax.Array,
    margin: Margin | None = None,
    given: PyTree | None = None,
) -> PyTree:
    """Fresh backbone, public class embeddings N(0, 0.01^2), and no local class.

    Also what the margin keeps and learns, see `margin_state`. A `given` backbone takes
    the place of the fresh one.
    """
    backbone_key, phi_key = jax.random.split(key)
    fresh = (
        model.init(backbone_key) if given is None else jax.tree.map(jnp.array, given)
    )
    backbone = with_start(fresh, margin)
    dim = model.embedding_dim
    params = {
        "backbone": backbone["params"],
        "phi": 0.01 * jax.random.normal(phi_key, (num_public, dim)),
        "head": None,  # no local classes
        **learned(margin, num_public),
    }
    return {"params": params, "batch_stats": backbone["batch_stats"]}
