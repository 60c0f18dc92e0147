"""Central pretraining on the public identities: where every method starts from."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import normalize
from fedfr_jax.federated.client import Feed
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.federated.stream import placed
from fedfr_jax.runs import loop
from fedfr_jax.runs.central import Central, central, rate_schedule
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.settings import Pretraining, mirrored
from fedfr_jax.runs.sinks import open_sinks
from fedfr_jax.tasks.faces.loss import face_loss
from fedfr_jax.tasks.faces.recognition import Recognition
from fedfr_jax.types import Model, PyTree

FIRST_WEIGHTS = 2**31  # folded into the seed; clients fold their ids, below 2^31

OPTIMIZERS = {
    # Coupled decay and momentum, as PyTorch has it; decoupled decay.
    "sgd": lambda rate, decay: optax.chain(
        sgd(momentum=0.9, weight_decay=decay), optax.scale_by_learning_rate(rate)
    ),
    "adam": lambda rate, decay: optax.adamw(rate, weight_decay=decay),
}


def build_trainer(
    model: Model, task: Recognition, mesh: Mesh, settings: Pretraining, seed: int
) -> Central:
    """Epochs of margin softmax over the task's public rows."""
    first_row = len(task.train_identities)
    num_rows = len(task.table.labels) - first_row
    rate = rate_schedule(
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        milestones=settings.milestones,
        total=settings.epochs * (num_rows // settings.batch_size),
    )
    if settings.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"pretrain.optimizer must be one of {sorted(OPTIMIZERS)}, "
            f"got {settings.optimizer!r}."
        )
    optimizer = OPTIMIZERS[settings.optimizer](rate, settings.weight_decay)
    loss = face_loss(
        model,
        margin_loss=settings.margin_loss,
        scale=settings.scale,
        margin=settings.margin,
    )
    return central(
        loss,
        optimizer,
        Feed(settings.batch_size, mirrored(settings.flip)),
        mesh,
        first_row=first_row,
        num_rows=num_rows,
        seed=seed,
    )


def pretrain(
    model: Model,
    task: Recognition,
    mesh: Mesh,
    settings: Pretraining,
    folder: pathlib.Path,
    *,
    seed: int,
) -> PyTree:
    """Train, or go on, under `folder`: -> {"backbone": variables, "phi": [M_g, D]}."""
    trainer = build_trainer(model, task, mesh, settings, seed)
    num_public = len(task.partition.global_identities)
    state = trainer.init(first_variables(model, num_public, seed))
    state = meshes.put(state, meshes.replicated(mesh))
    checkpointer = Checkpointer(folder / "checkpoints")
    first, state = checkpointer.restore(state) or (0, state)
    if first < settings.epochs:
        table = placed(task.table, mesh)
        every = settings.checkpoint_every
        with open_sinks(folder, "pretraining", settings.epochs, first) as sinks:
            for epoch in range(first, settings.epochs):
                state, metrics = trainer.epoch(state, table, jnp.int32(epoch))
                scalars = {name: float(value) for name, value in metrics.items()}
                loop.check_scalars(scalars, f"epoch {epoch}", checkpointer)
                loop.check_state(state, f"epoch {epoch}", checkpointer)
                for sink in sinks:
                    sink(epoch, scalars)
                if loop.is_due(every, epoch, settings.epochs - 1):
                    checkpointer.save(epoch + 1, state)
    checkpointer.close()
    params, stats = state.variables["params"], state.variables["batch_stats"]
    backbone = {"params": params["backbone"], "batch_stats": stats}
    return {"backbone": backbone, "phi": params["phi"]}


def everyone(task: Recognition) -> Recognition:
    """The task whose public set holds the clients' training images too.

    The clients' classes follow the public ones; training on it is the central upper
    bound of federated training. What is judged stays.
    """
    p = task.partition
    own = np.concatenate(p.identities)
    order = np.argsort(own)
    place = order[np.searchsorted(own, task.train_identities, sorter=order)]
    labels = np.array(task.table.labels)
    labels[: len(place)] = len(p.global_identities) + place
    identities = np.concatenate([p.global_identities, own])
    return task._replace(
        partition=p._replace(global_identities=identities),
        table=task.table._replace(targets={**task.table.targets, "label": labels}),
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
    features = build_embed(embed, Feed(batch_size, normalize()), mesh)(
        backbone, table, rows
    )
    sums = jax.ops.segment_sum(
        features[: len(rows), 0], labels, len(task.partition.global_identities)
    )
    return sums / np.bincount(labels)[:, None].astype(sums.dtype)


def first_variables(model: Model, num_public: int, seed: int) -> PyTree:
    """Fresh backbone, public class embeddings N(0, 0.01^2), and no local class."""
    start = jax.random.fold_in(jax.random.key(seed), FIRST_WEIGHTS)
    backbone_key, phi_key = jax.random.split(start)
    backbone = model.init(backbone_key)
    dim = model.embedding_dim
    params = {
        "backbone": backbone["params"],
        "phi": 0.01 * jax.random.normal(phi_key, (num_public, dim)),
        "head": None,  # no local classes
    }
    return {"params": params, "batch_stats": backbone["batch_stats"]}
