"""One-shot classifiers: the last layer in closed form, of the clients' statistics.

All other layers are frozen. A client sends the share of each class c among its
examples, the mean of their features x, and that of x x'. Weighted by examples, the mean
over clients is that of all examples, whoever has them. Of it follow shares p_c, class
means m_c and a covariance S, and of these the layer x' W + b:

  means     the nearest class mean: W_c = m_c, b_c = -|m_c|^2 / 2.
            Legate et al. 2023, arXiv:2306.03937 (FedNCM), which compares directions.
  gaussian  normal classes with one covariance, S within classes: W_c = S^-1 m_c,
            b_c = log p_c - m_c' S^-1 m_c / 2.
            Guan et al. 2025, arXiv:2503.06962 (FedCGS).
  ridge     least squares of the one-hot labels, S of all examples, m their mean:
            W_c = p_c S^-1 (m_c - m), b_c = p_c - m' W_c.
            Fanì et al. 2024, arXiv:2406.01116 (Fed3R), which has no intercept.

Deviations: S is divided by the examples, not one fewer; S + r I is inverted, where r is
a share of the mean eigenvalue of S, and eigenvalues below 0, which noise may cause,
count as 0.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax import trees
from fedfr_jax.convolutions import fast
from fedfr_jax.federated.aggregation.mean import (
    Weighting,
    to_float32,
    weight_of,
    weighted_mean,
)
from fedfr_jax.federated.algorithms.prototypes import class_features, class_means
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.ranges import Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import (
    Algorithm,
    Batch,
    ClientOutput,
    LocalTraining,
    Model,
    PyTree,
)

TINY = 1e-30
NEVER = -1e9  # bias of a class without examples
matmul = functools.partial(jnp.matmul, precision="highest")


class Server(NamedTuple):
    """The classifier, and the statistics of the rounds so far, by weight."""

    variables: PyTree
    # counts [M], features [M, D], and but for means `moments` [D (D + 1) / 2], the
    # upper triangle
    total: dict[str, jax.Array]


@checked
def one_shot(
    local: LocalTraining | None = None,
    *,
    model: Model,
    classifier: Literal["gaussian", "means", "ridge"] = "gaussian",
    regularization: Positive = 0.01,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Replace a classifier by that of all clients' feature statistics; see the module.

    One round with all clients is enough. A further round adds the statistics of its
    cohort; the same clients again change nothing. A client's metric `loss` is the cross
    entropy of the classifier that it received.

    Args:
      local: not used, as nothing is trained by steps.
      model: of `with_frozen`, over the kernel [D, M] and the bias [M] of its last
        layer; its features [B, D] are what the layer takes.
      regularization: r over the mean eigenvalue of S; not of means.
      weighting: see `fedavg`; the sums are those of all examples with num_examples.
    """
    del local
    weight, solve = weight_of(weighting), CLASSIFIERS[classifier]

    def init(variables):
        classes, dim = check_layer(model, variables)
        total = {"counts": jnp.zeros(classes), "features": jnp.zeros((classes, dim))}
        if classifier != "means":
            total["moments"] = jnp.zeros(dim * (dim + 1) // 2)
        return Server(variables, total)

    def client_update(key, server, personal, client):
        del key

        def values(batch):
            found, loss = statistics(model, server.variables, batch)
            return {name: found[name] for name in server.total}, loss

        update, loss = over_examples(values, client)
        steps = client.steps_per_epoch.astype(jnp.float32)
        metrics = {"loss": loss, "steps": steps}
        return ClientOutput(update, weight(client), personal, metrics)

    def server_update(server, result):
        number = result.weights.sum()
        add = lambda old, x: old + number * x.astype(old.dtype)
        total = jax.tree.map(add, server.total, result.aggregate)
        kernel, bias = solve(*moments_of(total), regularization)
        is_there = total["counts"] > 0
        layer = {
            "kernel": jnp.where(is_there[None], kernel, 0),
            "bias": jnp.where(is_there, bias, NEVER),
        }
        replace = lambda path, x: layer[path[-1].key].astype(x.dtype)
        variables = jax.tree_util.tree_map_with_path(replace, server.variables)
        return Server(variables, total)

    return Algorithm(
        init=init,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=lambda server, personal: server.variables,
        global_model=lambda server: server.variables,
        needs=("classes", "features"),
        update_like=lambda server: server.total,
    )


def check_layer(model: Model, variables: PyTree) -> tuple[int, int]:
    """Number of classes M and of features D of the layer that is all that moves.

    Raises:
      ValueError: when other leaves move, or the layer is not linear in the features.
    """
    leaves = trees.by_name(variables)
    layer = next(iter(leaves), "").rpartition("/")[0]
    if leaves.keys() != {f"{layer}/bias", f"{layer}/kernel"}:
        raise ValueError(
            "one_shot must have one layer that is not frozen, its kernel and its bias, "
            f"got {trees.count(variables)} numbers in {[*leaves][:4]}. Freeze all but "
            "the classifier: frozen={'all_but_blocks': 1}."
        )
    shape, features = leaves[f"{layer}/kernel"].shape, class_features(model).shape
    if features != (1, *shape[:-1]) or len(shape) != 2:
        raise ValueError(
            "config.model must end in a linear layer of its features for one_shot, got "
            f"features {features[1:]} and the kernel {shape} of {layer}. Choose "
            "another config.model.name."
        )
    return shape[1], shape[0]


def statistics(
    model: Model, variables: PyTree, batch: Batch
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Means over a batch's valid examples: (statistics, cross entropy [])."""
    logits, x, _ = fast(model.features)(variables, batch.model_inputs, False)
    x, is_valid = to_float32(x), batch.is_valid
    features, counts = class_means(x, batch.labels, is_valid, logits.shape[1])
    rows = jnp.where(is_valid[:, None], x, 0)
    square = matmul(rows.T, rows) / jnp.maximum(is_valid.sum(), 1).astype(x.dtype)
    moments = square[np.triu_indices(len(square))]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        to_float32(logits), batch.labels
    )
    found = {"counts": counts, "features": features, "moments": moments}
    return found, masked_mean(losses, is_valid)


def moments_of(total: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shares p [M], class means m [M, D] and the mean of x x' [D, D], of sums."""
    counts, sums = jnp.maximum(total["counts"], 0), total["features"]
    number = jnp.maximum(counts.sum(), TINY)
    means = sums / jnp.where(counts > 0, counts, 1)[:, None]
    means = jnp.where(counts[:, None] > 0, means, 0)
    size = sums.shape[1]
    square = jnp.zeros((size, size), sums.dtype)
    if "moments" in total:
        upper = square.at[np.triu_indices(size)].set(total["moments"] / number)
        square = upper + jnp.triu(upper, 1).T
    return counts / number, means, square


def class_mean_layer(share, means, square, regularization):
    """Kernel [D, M] and bias [M] of the nearest class mean."""
    del share, square, regularization
    return means.T, -jnp.square(means).sum(1) / 2


def gaussian_layer(share, means, square, regularization):
    """Kernel [D, M] and bias [M] of normal classes with one covariance."""
    between = share * jnp.square(means).sum(1)  # of which noise may make too much
    share_of_all = jnp.minimum(1, jnp.trace(square) / jnp.maximum(between, TINY))
    within = square - matmul(means.T * (share * share_of_all)[None], means)
    kernel = solve_regularized(within, means.T, regularization)
    log_share = jnp.log(jnp.maximum(share, TINY))
    return kernel, log_share - (means.T * kernel).sum(0) / 2


def ridge_layer(share, means, square, regularization):
    """Kernel [D, M] and bias [M] of least squares of the one-hot labels."""
    mean = matmul(share, means)
    right = (share[:, None] * (means - mean[None])).T
    covariance = square - jnp.outer(mean, mean)
    kernel = solve_regularized(covariance, right, regularization)
    return kernel, share - matmul(mean, kernel)


CLASSIFIERS = {
    "gaussian": gaussian_layer,
    "means": class_mean_layer,
    "ridge": ridge_layer,
}


def solve_regularized(
    matrix: jax.Array, right: jax.Array, regularization: float
) -> jax.Array:
    """(S + r I)^-1 `right` [D, M] of a symmetric matrix S [D, D]; see the module."""
    values, vectors = jnp.linalg.eigh(matrix)
    values = jnp.maximum(values, 0)
    values = jnp.maximum(values + regularization * values.mean(), TINY)
    return matmul(vectors, matmul(vectors.T, right) / values[:, None])
