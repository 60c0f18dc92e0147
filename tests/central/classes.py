"""A small network before a table of classes, which tests cut over devices."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.central.class_parallel import rows_per_device
from fedfr_jax.central.settings import Training
from fedfr_jax.data.batching import Batching
from fedfr_jax.losses.margin_losses import cosface
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.central_stage import train_central
from fedfr_jax.tasks.faces.loss import on_variables
from fedfr_jax.tasks.faces.public_classes import class_parallel_loss
from fedfr_jax.types import CentralTrainer, Dataset, Model, ShardedClasses

NUM_CLASSES, BATCH, DIM = 70, 48, 64
NAMES = tuple(f"person {i}" for i in range(NUM_CLASSES))


def variables(num_devices=1, width=128, num_classes=NUM_CLASSES):
    """{"params": {"backbone", "phi"}, "batch_stats"}; what a class starts from does not
    depend on the padding behind the last one."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    layers = {"first": 0.1 * draw(12, width), "last": 0.1 * draw(width, DIM)}
    rows = num_devices * rows_per_device(num_classes, num_devices)
    phi = np.random.default_rng(1).normal(size=(200, DIM)).astype(np.float32)[:rows]
    params = {"backbone": {**layers, "bias": draw(DIM)}, "phi": phi}
    return jax.tree.map(jnp.asarray, {"params": params, "batch_stats": {}})


def data():
    """96 images of 2 x 2 pixels, of all classes."""
    random = np.random.default_rng(2)
    images = random.normal(size=(96, 2, 2, 3)).astype(np.float32)
    labels = random.integers(NUM_CLASSES, size=96).astype(np.int32)
    return Dataset.from_arrays(images, labels)


def embed(variables, images, train=False, key=None):
    del train, key
    p, x = variables["params"], images.reshape(len(images), -1)
    hidden = jax.nn.relu(x @ p["first"]) @ p["last"]
    return hidden + p["bias"][None], {}


MODEL = Model(None, embed, (2, 2, 3), DIM)
LOSS = class_parallel_loss(on_variables(MODEL), cosface(scale=8.0, margin=0.2), chunk=4)


def trainer(num_devices, names=NAMES, **settings):
    """A central training of the table."""
    given = {"epochs": 2, "batch_size": BATCH, "class_parallel": True, **settings}
    return CentralTrainer(
        settings=Training(**given),
        dataset=data(),
        first_row=0,
        num_rows=96,
        batching=Batching(BATCH),
        loss=LOSS,
        init=lambda key: variables(num_devices, num_classes=len(names)),
        global_model=lambda variables: variables,
        apply_global=None,
        sharded_classes=ShardedClasses("phi", names),
    )


def train(folder, num_devices, **settings):
    """The variables at the end of a stage under `folder`."""
    mesh = make_mesh(num_devices)
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        return train_central(trainer(num_devices, **settings), mesh, folder, seed=0)


if __name__ == "__main__":  # in a process that has as many devices as it is told
    end = train(pathlib.Path(sys.argv[1]), jax.device_count())
    leaves = {"phi": end["params"]["phi"], **end["params"]["backbone"]}
    np.savez(sys.argv[2], devices=jax.device_count(), **leaves)
