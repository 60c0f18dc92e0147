"""Cosine distance weight: aggregation weights by change of outputs.

Zhuang et al. 2022, "Optimizing Performance of Federated Person Re-identification",
arXiv:2205.12144, equations 1 and 2, of the ACM MM 2020 article arXiv:2008.11560:

  d_k = 1 - cos(g_k, g_k'),  p_k = d_k / sum_i d_i,  w+ = sum_k p_k w_k

where g_k are logits of one batch by the received network with the client's own
classifier, and g_k' those after training. As in the released code d_k is the mean over
rows of the client's first batch. Deviations: the networks are in evaluation mode unless
`train_mode` is set (in the released code dropout makes d_k noisy), and if no client's
logits change, clients count by their examples.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.types import Algorithm, Client, LocalTraining, Model, PyTree

DISTANCE = "distance"
# Weight of an example, which matters only if all distances are 0.
FALLBACK = 1e-20
TINY = 1e-8  # least length of a row of logits


def cosine_distance(before: jax.Array, after: jax.Array) -> jax.Array:
    """Cosine distance 1 - cos between rows of [B, M] arrays, [B]; 0 for equal rows."""
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), TINY)
    # Half the squared chord: 1 - cos itself is rounding where rows hardly differ.
    return jnp.square(unit(before) - unit(after)).sum(axis=1) / 2


def update_distance(model: Model, *, train_mode: bool = False) -> Callable:
    """Build the distance between a client's logits before and after training.

    Args:
      train_mode: the networks run as in training, with dropout.

    Returns:
      (key, start, end, client) -> d [], of variables before and after training.
    """

    def distance(key, start: PyTree, end: PyTree, client: Client):
        batch = client.batch(jnp.int32(0))

        def logits(variables, key):
            network = variable_split.merge_personal_variables(variables)
            key = key if train_mode else None
            outputs, _ = model.apply(network, batch.model_inputs, train_mode, key=key)
            number = jnp.arange(outputs.shape[1], dtype=jnp.int32)
            return jnp.where((number < client.num_classes)[None], outputs, 0)

        keys = jax.random.split(key)
        distances = cosine_distance(logits(start, keys[0]), logits(end, keys[1]))
        count = jnp.maximum(batch.is_valid.sum(), 1).astype(distances.dtype)
        return jnp.where(batch.is_valid, distances, 0).sum() / count

    return distance


def training_weight(
    weighting: str | Callable, model: Model, train_mode: bool
) -> Callable:
    """Build (key, start, end, client) -> weight [], by distance or by `weight_of`."""
    if weighting != DISTANCE:
        weight = weight_of(weighting)
        return lambda key, start, end, client: weight(client)
    distance = update_distance(model, train_mode=train_mode)

    def weight(key, start, end, client):
        weight = distance(key, start, end, client)
        return weight + FALLBACK * client.num_examples.astype(weight.dtype)

    return weight


def cdw(local: LocalTraining, *, model: Model, train_mode: bool = False) -> Algorithm:
    """FedAvg weighted by the cosine distance of logits.

    Args:
      model: its `apply` gives logits.
      train_mode: see `update_distance`; the released code has it on.
    """
    base, train = fedavg(local), build_local_training(local)
    weight = training_weight(DISTANCE, model, train_mode)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = train(key, start, client)
        share = weight(jax.random.fold_in(key, 1), start, end, client)
        metrics = {**metrics, "cosine_distance": share}
        return variable_split.client_output(start, end, share, personal, metrics)

    return base._replace(client_update=client_update)
