"""The frozen leaves of a stage: named by their digest, and in no checkpoint."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import manifest, trees
from fedfr_jax import mesh as meshes
from fedfr_jax.federated.feature_cache import digest_leaves, keep_features
from fedfr_jax.types import FederatedTrainer

FILE = "frozen.json"


def check_base(trainer: FederatedTrainer, folder: pathlib.Path, is_new: bool) -> None:
    """Record the frozen leaves of a new stage, or compare those of a trained one.

    Raises:
      ValueError: when the stage was trained on other ones.
    """
    if trainer.frozen_model is None:
        return
    path, found = folder / FILE, digest_leaves(trainer.frozen_model.frozen.value)
    if is_new:
        if meshes.is_first_process():
            manifest.write_object(path, {"sha256": found})
        return
    if (stored := manifest.read_object(path).get("sha256")) != found:
        raise ValueError(
            f"{path}: the frozen leaves must be those that the stage was trained with, "
            f"{str(stored)[:12]}, got {found[:12]}. Restore the weights that it starts "
            "from, or train in another --workdir."
        )


def with_features(
    trainer: FederatedTrainer, dataset, batching, mesh: Mesh, folder: pathlib.Path
) -> tuple:
    """Data set and batching of a stage: features of its frozen first layers, if any."""
    if trainer.frozen_model is None:
        return dataset, batching
    model = trainer.frozen_model
    kept = keep_features(model, dataset, batching, mesh, trainer.features)
    if meshes.is_first_process():
        print(f"{folder.name}: {kept.text}", flush=True)
    return kept.table, kept.batching


def with_base(trainer: FederatedTrainer, mesh: Mesh, of_client: Callable) -> Callable:
    """Build client -> all variables of its model, of `of_client`: those that move.

    Clients [A] of the devices give [A, ...], as `TrainedModels.client_variables`.
    """
    if trainer.frozen_model is None:
        return of_client
    frozen, copies = trainer.frozen_model.frozen.value, {}

    def whole(client):
        count = np.size(client)
        if np.ndim(client) and count not in copies:
            cut = meshes.over_clients(mesh)
            repeat = lambda x: np.broadcast_to(x, (count, *np.shape(x)))
            copies[count] = meshes.put_global(jax.tree.map(repeat, frozen), cut)
        return trees.join(of_client(client), copies.get(count, frozen))

    return whole
