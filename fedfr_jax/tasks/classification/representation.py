"""What the one network's features of the test images are like, beside another's.

The figures of FedMargin (Michieli, Toldo, Ozay 2022, IEEE Internet of Things Journal):
AMM, the mean distance of a class's prototype to the nearest other one; MMD to the
features of a reference, the centrally trained network; mean entropies.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.evaluation.entropy import feature_entropy, softmax_entropy
from fedfr_jax.evaluation.representation import mmd_squared
from fedfr_jax.federated.algorithms.margins import aggregate_mean_margin
from fedfr_jax.federated.algorithms.prototypes import class_means, of_class
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.stream import Stream, placed
from fedfr_jax.types import Dataset, Evaluation, Evaluator, Model, Networks, PyTree

MOST = 1000  # test images that are looked at, evenly spaced


def representation(
    model: Model,
    table: Dataset | Stream,
    mesh: Mesh,
    feed: Feed,
    *,
    reference: PyTree | None = None,
    most: int = MOST,
) -> Evaluator:
    """Evaluator of the one network, nothing where there is none.

    Args:
      model: with features [B, D], of every network that is judged.
      table: the test images and their labels.
      feed: how images are decoded; its batch size is per device.
      reference: variables of the network that MMD is taken to; None leaves it out.
      most: test images that are looked at, which MMD takes the square of.

    Raises:
      ValueError: when the model has no features.
    """
    if model.features is None:
        raise ValueError("model must have features, got one without.")
    look = looker(model, table, mesh, feed, most)
    wanted = None if reference is None else look(reference)[1]

    def evaluate(networks: Networks) -> Evaluation:
        if networks.variables is None:
            return Evaluation()
        labels, features, logits = look(networks.variables)
        everything = np.ones(len(labels), bool)
        means = class_means(features, labels, everything, model.embedding_dim)
        metrics = {
            "amm": float(aggregate_mean_margin(of_class(*means))),
            "softmax_entropy": float(softmax_entropy(logits).mean()),
            "feature_entropy": float(feature_entropy(features).mean()),
        }
        if wanted is not None:
            metrics |= discrepancies(features, wanted)
        return Evaluation(metrics)

    return Evaluator(evaluate)


def discrepancies(features: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """MMD^2 of features [n, D] to those of a reference, in three forms."""
    return {
        "mmd": mmd_squared(features, wanted),
        "mmd_unbiased": mmd_squared(features, wanted, unbiased=True),
        "mmd_linear": mmd_squared(features, wanted, kernel="linear"),
    }


def looker(model: Model, table, mesh: Mesh, feed: Feed, most: int) -> Callable:
    """variables -> (labels [n], features [n, D], logits [n, M]) of test images."""
    held, count = placed(table, mesh), table.num_examples
    rows = np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int32))
    labels = np.asarray(table.labels)[rows]

    def both(variables, images):
        logits, features, _ = model.features(variables, images, False)
        return jnp.concatenate([features, logits], axis=1)

    run = build_embed(jax.jit(both), feed, mesh)

    def look(variables):
        found = meshes.fetch(run(variables, held, rows))[: len(rows), 0]
        size = found.shape[1] - model.embedding_dim
        return labels, found[:, :size], found[:, size:]

    return look
