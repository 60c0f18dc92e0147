"""What the server computes for a cohort before it trains: features and hard negatives.

Features of the public examples and of the cohort's own are computed once per round with
the global network, spread over the devices. A public example is a hard negative of a
client when its largest cosine with one of the client's examples exceeds a threshold
(FedFR, Liu et al. 2022, arXiv:2112.12496, section 3.2). Similarities exist one block of
the client's rows at a time, never local x public, and a client receives row numbers.

By class instead of by image, a public class is hard when its embedding Phi_g resembles
one of the client's classes, and all its images are taken. Deviation: the official code
(which never calls this) compares Phi_g with the client's class embeddings; here the
mean features of its classes stand for them, as the embeddings stay with the client.
"""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.fedfr import backbone_of
from fedfr_jax.federated.client import cohort_rows
from fedfr_jax.federated.outputs import build_embed, build_over_cohort
from fedfr_jax.schema import check_choice
from fedfr_jax.tasks.faces.features import Features, spans_of
from fedfr_jax.types import Extra, PyTree, RoundContext

LEVELS = ("image", "class")
BLOCK_SCORES = 2**23  # similarities held at once, per device


def prepare_features(
    embed: Callable,
    *,
    threshold: float | None,
    capacity: int = 0,
    level: str = "image",
) -> Callable:
    """An `Algorithm.prepare`: frozen features and hard negatives of a cohort.

    Args:
      embed: (backbone variables, images [B, H, W, C]) -> [B, D].
      threshold: cosine above which a public example is hard, strict; None selects
        nothing.
      capacity: most hard negatives of a client, the hardest first; 0 has no limit.
      level: whether an image is hard, or all those of a class.

    Raises:
      ValueError: for an unknown level.
    """
    check_choice("hard_negatives", level, LEVELS)

    @cache  # compiled once for each feed and mesh
    def functions(feed, mesh):
        return build_embed(embed, feed, mesh), build_select(mesh, threshold, capacity)

    def prepare(server: PyTree, context: RoundContext) -> Extra:
        dataset, cohort = context.dataset, context.cohort
        population, feed, mesh = context.population, context.feed, context.mesh
        embed_rows, select = functions(feed, mesh)
        offsets, num_rows = population.offsets, dataset.num_examples
        no_rows = np.zeros((len(cohort.ids), 0), np.int32)
        nothing = Extra((), no_rows, np.zeros(len(cohort.ids), np.int32))
        is_counted = feed.num_views > 0
        if threshold is None and not is_counted:
            return nothing
        rows, starts, counts = cohort_rows(population, cohort.ids)
        # Without a threshold nobody is handed a public example.
        public = np.arange(offsets[-1], num_rows if threshold is not None else 0)
        spans = spans_of(
            np.append(offsets[cohort.ids], offsets[-1]), np.append(starts, len(rows))
        )
        wanted = np.concatenate([rows, public]).astype(np.int32)
        whole = meshes.replicated(mesh)
        variables = collections.merged(server.variables)
        values = embed_rows(backbone_of(variables), dataset, wanted)
        values = meshes.put(values[: len(wanted)], whole)
        features = Features(values, *meshes.put(spans, whole)) if is_counted else ()
        if threshold is None:
            return nothing._replace(tables=features)
        compared = values[:, 0]  # plain views
        if level == "class":
            labels = dataset.labels[wanted]
            client = client_of_row(counts, len(rows))
            phi = variables["params"]["phi"]
            compared = class_features(compared, client, phi, labels)
        chosen, number = select(compared, starts, counts, len(rows))
        return Extra(features, chosen + int(offsets[-1]), number)

    return prepare


def client_of_row(counts: np.ndarray, num_rows: int) -> np.ndarray:
    """Place in the cohort [R] of whom a row is; K for the padding that comes last.

    Args:
      counts: [K] rows of each client, which lie one after the other.
    """
    return np.searchsorted(np.cumsum(counts), np.arange(num_rows), side="right")


def class_of_row(client: jax.Array, labels: jax.Array) -> jax.Array:
    """Classes of rows [R], numbered from 0: those of a client and a label are one.

    Args:
      client, labels: [R] int.
    """
    order = jnp.lexsort((labels, client))
    client, labels = client[order], labels[order]
    is_other = (client[1:] != client[:-1]) | (labels[1:] != labels[:-1])
    number = jnp.cumsum(is_other, dtype=jnp.int32)
    return jnp.zeros(len(order), jnp.int32).at[order[1:]].set(number)


@jax.jit
def class_features(features, client, phi, labels) -> jax.Array:
    """Rows [R + G, D] that stand for their class: own mean feature, or Phi_g.

    Args:
      features: [R + G, D] of the cohort's own and the public rows.
      client: [R] int, whose an own row is.
      phi: [M_g, D].
      labels: [R + G] int32, the own class within the client or the public class.
    """
    own, public_labels = features[: len(client)], labels[len(client) :]
    owner = class_of_row(client, labels[: len(client)])
    sums = jax.ops.segment_sum(own, owner, len(owner))
    counts = jax.ops.segment_sum(jnp.ones(len(owner), own.dtype), owner, len(owner))
    means = sums / jnp.maximum(counts, 1)[:, None]
    return jnp.concatenate([means[owner], phi[public_labels].astype(own.dtype)])


def build_select(mesh: Mesh, threshold: float | None, capacity: int) -> Callable:
    """Hard negatives of every client of a cohort, clients cut over the devices.

    Returns:
      run(features [R, D], starts [K], counts [K], first_public) ->
      (indices [K, X] int32 into the public rows, ascending, numbers [K] int32).
    """

    def one(features, start, count, first_public):
        public = features[first_public:]
        limits = {"threshold": threshold, "capacity": capacity}
        return hard_negatives(features, start, count, public, **limits)

    return build_over_cohort(one, mesh)


def hard_negatives(
    features: jax.Array,
    start: jax.Array,
    count: jax.Array,
    public: jax.Array,
    *,
    threshold: float,
    capacity: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Public rows that one client's own rows resemble.

    Args:
      features: [R, D]; the client's own rows are start:start + count.
      public: [G, D]. Neither needs unit norm.
      threshold: cosine in [-1, 1], strict.
      capacity: X, most rows to return, the most similar and of equals the first; 0
        for G.

    Returns:
      (indices [X] int32 ascending, 0 beyond the number; number [] int32).
    """
    num_public = len(public)
    similarity = max_similarity(features, start, count, public)
    is_hard = similarity > threshold
    capacity = min(capacity or num_public, num_public)
    if capacity < num_public:
        # By place, not by similarity: equals of the weakest may be more than fit.
        _, hardest = jax.lax.top_k(similarity, capacity)
        is_hard &= jnp.zeros_like(is_hard).at[hardest].set(True)
    (indices,) = jnp.nonzero(is_hard, size=capacity, fill_value=0)
    return indices.astype(jnp.int32), is_hard.sum().astype(jnp.int32)


def max_similarity(features, start, count, public) -> jax.Array:
    """Largest cosine of each public row [G] with rows start:start + count."""
    block = min(max(BLOCK_SCORES // max(len(public), 1), 8), len(features))
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    public = unit(public)

    def body(i, best):
        row = i * block + jnp.arange(block, dtype=jnp.int32)
        own = unit(features[jnp.minimum(start + row, len(features) - 1)])
        # As the losses' cosines: a GPU's TF32 would move the threshold.
        cosines = jnp.matmul(own, public.T, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where((row < count)[:, None], cosines, -jnp.inf)
        return jnp.maximum(best, scores.max(axis=0))

    floor = jnp.full(len(public), -jnp.inf, public.dtype)
    return jax.lax.fori_loop(0, (count + block - 1) // block, body, floor)
