"""Small federated problems that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.algorithms.local import local_sgd, sgd, step_decay
from fedfr_jax.federated.client import Feed, Population, Table
from fedfr_jax.federated.hard_negatives import prepare_features
from fedfr_jax.tasks.face_loss import face_loss, init_local
from fedfr_jax.types import Model

SIZES = np.array([5, 9, 3, 12, 7])  # examples of each client
CLASSES = np.array([2, 3, 2, 3, 1])  # classes of each client
NUM_PUBLIC, PUBLIC_CLASSES = 20, 4
SHAPE = (4, 4, 1)
DIM = 6


def decode(images, is_flipped):
    return jnp.where(is_flipped[:, None, None, None], images[:, :, ::-1], images)


def problem(seed=0):
    """Table and population of five clients and a public set."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(SIZES.sum() + NUM_PUBLIC, *SHAPE)).astype(np.float32)
    labels = [rng.integers(m, size=n) for m, n in zip(CLASSES, SIZES, strict=True)]
    labels.append(rng.integers(PUBLIC_CLASSES, size=NUM_PUBLIC))
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    return (
        Table(images, np.concatenate(labels).astype(np.int32)),
        Population(offsets, CLASSES.astype(np.int32)),
    )


def feed(**options):
    return Feed(**{"batch_size": 4, "decode": decode, "flip": 0.5, **options})


def norm_variables():
    """A linear classifier behind a batch norm, in the shape the algorithms expect."""
    kernel = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
    return {
        "params": {"head": {"kernel": jnp.asarray(kernel)}, "scale": jnp.ones(16)},
        "batch_stats": {"mean": jnp.zeros(16)},
    }


def norm_loss(variables, batch, key):
    """Softmax cross-entropy; the running mean moves in every step."""
    del key
    p = variables["params"]
    x = batch.images.reshape(len(batch.images), -1)
    count = jnp.maximum(batch.is_valid.sum(), 1).astype(x.dtype)
    mean = jnp.where(batch.is_valid[:, None], x, 0).sum(0) / count
    logits = ((x - mean[None]) * p["scale"][None]) @ p["head"]["kernel"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[:, None], 1)
    loss = -jnp.where(batch.is_valid, picked[:, 0], 0).sum() / count
    stats = {"mean": 0.9 * variables["batch_stats"]["mean"] + 0.1 * mean}
    return loss, (stats, {})


def fedavg_toy(**options):
    """(algorithm, variables to start from)."""
    train = local_sgd(
        norm_loss, sgd(momentum=0.9, weight_decay=1e-3), step_decay(0.1, every=2)
    )
    return fedavg(train, **options), norm_variables()


def linear_model():
    def apply(variables, x, train):
        del train
        kernel = variables["params"]["kernel"]
        return x.reshape(len(x), -1) @ kernel, variables["batch_stats"]

    def init(key):
        kernel = jax.random.normal(key, (16, DIM))
        return {"params": {"kernel": kernel}, "batch_stats": {}}

    return Model(init, apply, SHAPE, DIM)


def fedfr_toy(**options):
    """FedFR whole on a linear backbone: (algorithm, variables to start from)."""
    model = linear_model()
    loss = face_loss(model, contrastive_weight=5.0, branch="bce")
    train = local_sgd(
        loss, sgd(momentum=0.9, weight_decay=5e-4), step_decay(0.01, every=2)
    )
    embed = lambda variables, x: model.apply(variables, x, False)[0]
    algorithm = fedfr(
        train,
        init_local(3, DIM, branch="bce"),
        embed=embed,
        prepare=prepare_features(embed, threshold=0.6),
        **options,
    )
    phi = jax.random.normal(jax.random.key(2), (PUBLIC_CLASSES, DIM))
    return algorithm, {"backbone": model.init(jax.random.key(1)), "phi": phi}


TOYS = {"fedavg": fedavg_toy, "fedfr": fedfr_toy}
