"""The frozen leaves of a stage: named by their digest, and in no checkpoint."""

import hashlib
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import manifest, trees
from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.feature_cache import Kept, digest_leaves, keep_features
from fedfr_jax.models.adapters import deployed_variables
from fedfr_jax.runs import data_digest
from fedfr_jax.scanned_blocks import unstack_like
from fedfr_jax.types import Dataset, Experiment, FederatedTrainer, PyTree

FILE = "frozen.json"


def check_base(trainer: FederatedTrainer, folder: pathlib.Path, is_new: bool) -> None:
    """Record the frozen leaves of a new stage, or compare those of a trained one.

    Leaves that are drawn differ in their last bits between platforms: where the digest
    does, leaves are compared by sketches.

    Raises:
      ValueError: when the stage was trained on other ones.
    """
    if trainer.frozen_model is None:
        return
    path, frozen = folder / FILE, trainer.frozen_model.frozen.value
    found = {"sha256": digest_leaves(frozen), "sketch": _sketch(frozen)}
    if is_new:
        if meshes.is_first_process():
            manifest.write_object(path, found)
        return
    stored = manifest.read_object(path)
    if stored.get("sha256") == found["sha256"]:
        return
    before, now = stored.get("sketch", {}), found["sketch"]
    other = [name for name, x in now.items() if not _are_near(x, before.get(name))]
    if other or before.keys() != now.keys():
        raise ValueError(
            f"{path}: the frozen leaves must be those that the stage was trained with, "
            f"got others ({', '.join(other[:2])}). Restore the weights that it starts "
            "from, or train in another --workdir."
        )


def _sketch(frozen: PyTree) -> dict[str, list[float]]:
    """Of each leaf: sum of its numbers in random signs / sqrt(n), root mean square."""

    def sketch(leaf):
        x = np.asarray(leaf, np.float64).ravel()
        signs = 2 * np.random.default_rng(0).integers(2, size=x.size, dtype=np.int8) - 1
        return [float(x @ signs) / np.sqrt(x.size), float(np.sqrt(np.mean(x * x)))]

    return {name: sketch(leaf) for name, leaf in trees.by_name(frozen).items()}


def _are_near(now: list[float], stored: list[float] | None) -> bool:
    """Whether leaves of these sketches differ in their last bits alone."""
    return stored is not None and np.allclose(now, stored, rtol=0, atol=1e-5 * now[1])


def with_features(
    experiment: Experiment,
    trainer: FederatedTrainer,
    dataset: Dataset | Stream,
    folder: pathlib.Path,
) -> tuple[Dataset | Stream, Batching]:
    """Data set and batching of a stage: features of its frozen first layers, if any."""
    if trainer.frozen_model is None:
        return dataset, experiment.batching
    storage = trainer.features
    if storage.place == "disk":
        read = data_digest.digest_task(experiment.task) or ()
        images = hashlib.sha256(b"".join(x.tobytes() for x in read)).hexdigest()
        storage = storage._replace(images=images)
    kept = _kept(experiment, trainer, dataset, storage)
    if meshes.is_first_process():
        print(f"{folder.name}: {kept.text}", flush=True)
    return place_examples(kept.table, experiment.mesh), kept.batching


def planned_features(
    experiment: Experiment, trainer: FederatedTrainer, dataset: Dataset | Stream
) -> tuple[Dataset | Stream, Batching]:
    """As `with_features`, of shapes; auto, which a run decides, is images."""
    if trainer.frozen_model is None or trainer.features.place == "auto":
        return dataset, experiment.batching
    kept = _kept(experiment, trainer, dataset, trainer.features, is_planned=True)
    return kept.table, kept.batching


def _kept(experiment, trainer, dataset, storage, **options) -> Kept:
    model, batching = trainer.frozen_model, experiment.batching
    return keep_features(model, dataset, batching, experiment.mesh, storage, **options)


def with_base(trainer: FederatedTrainer, mesh: Mesh, of_client: Callable) -> Callable:
    """Build client -> all variables of its model, of `of_client`: those that move.

    An adapter is merged into one client's. Clients [A] of the devices give [A, ...], as
    `TrainedModels.client_variables`.
    """
    if (model := trainer.frozen_model) is None:
        return of_client
    frozen, copies = model.frozen.value, {}

    def whole(client):
        moving, count = of_client(client), np.size(client)
        if not np.ndim(client):
            return deployed_variables(model, moving)
        base = unstack_like(frozen, moving)  # of leaves without an axis of clients
        if count not in copies:
            cut = meshes.over_clients(mesh)
            repeat = lambda x: np.broadcast_to(x, (count, *np.shape(x)))
            copies[count] = meshes.put_global(jax.tree.map(repeat, base), cut)
        return trees.join(moving, copies[count])

    return whole
