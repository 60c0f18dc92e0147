"""The public identities: everybody's training set, and where class embeddings start."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training
from fedfr_jax.data.augment import normalize
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.stream import placed
from fedfr_jax.tasks.data import feed_of
from fedfr_jax.tasks.faces.classical import backbone_of
from fedfr_jax.tasks.faces.distilled import distilled, open_distill
from fedfr_jax.tasks.faces.loss import face_loss
from fedfr_jax.tasks.faces.recognition import Recognition
from fedfr_jax.types import Central, Model, PyTree


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


def public_means(
    model: Model, task: Recognition, mesh: Mesh, backbone: PyTree, batch_size: int = 64
) -> jax.Array:
    """Mean feature of every public class, unflipped, as they come, [M_g, D]."""
    embed = lambda variables, images: model.apply(variables, images, False)[0]
    first, labels = len(task.train_identities), task.partition.global_labels
    rows = np.arange(first, first + len(labels), dtype=np.int32)
    table = placed(task.table, mesh)
    embedded = build_embed(embed, Feed(batch_size, normalize()), mesh)
    features = embedded(backbone, table, rows)
    sums = jax.ops.segment_sum(
        features[: len(rows), 0], labels, len(task.partition.global_identities)
    )
    return sums / np.bincount(labels)[:, None].astype(sums.dtype)


def first_variables(model: Model, num_public: int, key: jax.Array) -> PyTree:
    """Fresh backbone, public class embeddings N(0, 0.01^2), and no local class."""
    backbone_key, phi_key = jax.random.split(key)
    backbone = model.init(backbone_key)
    dim = model.embedding_dim
    params = {
        "backbone": backbone["params"],
        "phi": 0.01 * jax.random.normal(phi_key, (num_public, dim)),
        "head": None,  # no local classes
    }
    return {"params": params, "batch_stats": backbone["batch_stats"]}


def public_training(
    model: Model, embed: Callable, task: Recognition, settings: Training
) -> Central:
    """A margin softmax over the task's public rows."""
    first_row = len(task.train_identities)
    num_public = len(task.partition.global_identities)
    loss_of = partial(
        face_loss,
        margin_loss=settings.margin_loss,
        scale=settings.scale,
        margin=settings.margin,
        interclass_threshold=settings.interclass_threshold,
    )
    told = open_distill("pretrain", settings.distill, model)
    return Central(
        settings=settings,
        dataset=task.table,
        first_row=first_row,
        num_rows=task.table.num_examples - first_row,
        feed=feed_of(settings),
        loss=distilled(loss_of, model, told) if told else loss_of(model),
        init=lambda key: first_variables(model, num_public, key),
        network=backbone_of,
        network_apply=embed,
    )
