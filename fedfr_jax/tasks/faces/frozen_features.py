"""Features of frozen networks, computed once per round, and hard negatives.

Where the views of an example are counted, as with mirroring alone, a frozen network
sees each example in few ways: the features of all are kept, on the server's side by row
of the data set, on the client's side by position in its list of examples. Under an
augmentation whose outcomes are not counted they are computed in the step.

Before a cohort trains, the server computes features of the public examples and of the
cohort's own with the global network, spread over the devices. A public example is a
hard negative of a client when its largest cosine with one of the client's examples
exceeds a threshold (FedFR, Liu et al. 2022, arXiv:2112.12496, section 3.2).
Similarities exist for one chunk of the client's rows at a time, never for all local and
public rows, and a client receives row numbers.

By class instead of by image, a public class is hard when its embedding Phi_g resembles
one of the client's classes, and all its images are taken. Deviation: the official code
(which never calls this) compares Phi_g with the client's class embeddings; here the
mean features of its classes stand for them, as the embeddings stay with the client.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.fedfr import backbone_of
from fedfr_jax.federated.client import cohort_rows
from fedfr_jax.federated.inference import build_embed, build_over_cohort, embed_views
from fedfr_jax.ranges import Cosine, Whole
from fedfr_jax.types import Batch, Client, Prepared, PyTree, RoundContext


class Features(NamedTuple):
    """Frozen features of some spans of the data set in a round: see `row_spans`."""

    values: jax.Array  # [R, F, D] in F views
    first_row: jax.Array  # [S] int32 ascending: the row where a span begins
    shift: jax.Array  # [S] int32: from a span's rows to those of `values`

    def __call__(self, example: jax.Array, view: jax.Array) -> jax.Array:
        """Features [B, D] of rows [B], all within the spans, in views [B] int32."""
        # Unrolled: a loop launches a kernel per turn.
        span_end = jnp.searchsorted(
            self.first_row, example, side="right", method="scan_unrolled"
        )
        return self.values[example + self.shift[span_end - 1], view]


def row_spans(first: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Features.first_row` and `.shift` of spans that begin at table rows `first` [S].

    Args:
      place: [S] where each begins within the features' rows.
    """
    order = np.argsort(first)
    shift = place - first
    return first[order].astype(np.int32), shift[order].astype(np.int32)


class CachedFeatures(NamedTuple):
    """Frozen features, looked up in tables."""

    by_row: Features | None  # of the global network
    by_position: jax.Array  # [P, F, D] of the previous one, in the client's list

    def global_features(self, batch: Batch) -> jax.Array:
        """Features [B, D] of the round's global model."""
        assert self.by_row is not None  # a loss asks for them with such features only
        return self.by_row(batch.row, batch.view_index)

    def previous_features(self, batch: Batch) -> jax.Array:
        """Features [B, D] of the client's previous model."""
        return self.by_position[batch.position, batch.view_index]


class ComputedFeatures(NamedTuple):
    """Frozen features, computed for each batch; same methods as `CachedFeatures`."""

    embed: Callable  # (variables, images [B, H, W, C]) -> [B, D]
    shared: PyTree  # variables of the global network
    previous: PyTree  # of the client's previous one

    def global_features(self, batch: Batch) -> jax.Array:
        """Features [B, D] of the round's global model."""
        return self.embed(self.shared, batch.model_inputs)

    def previous_features(self, batch: Batch) -> jax.Array:
        """Features [B, D] of the client's previous model."""
        return self.embed(self.previous, batch.model_inputs)


def frozen_features(
    embed: Callable, shared: PyTree, previous: PyTree, client: Client
) -> CachedFeatures | ComputedFeatures:
    """Frozen features for a client's loss in a round.

    Args:
      embed: (variables, images [B, H, W, C]) -> [B, D].
      shared, previous: variables of the two networks; those of `shared` are looked up
        in `client.shared` where views are counted, see `prepare_features`.
    """
    if not client.num_views:
        return ComputedFeatures(embed, shared, previous)
    return CachedFeatures(client.shared, position_features(embed, previous, client))


def own_class_means(
    embed: Callable, variables: PyTree, client: Client, num_classes: int
) -> jax.Array:
    """Mean feature [M, D] of each of the client's classes, without augmentation.

    The features are averaged as they come; a class without an example is zero.
    """
    first = client.batch_from(jnp.int32(0), jnp.int32(0))
    shape = jax.eval_shape(embed, variables, first.model_inputs)
    sums = jnp.zeros((num_classes, shape.shape[1]), shape.dtype)

    def body(carry):
        start, sums, counts = carry
        batch = client.batch_from(start, jnp.int32(0))
        is_own = batch.is_valid & ~batch.is_added
        place = jnp.where(is_own, batch.labels, num_classes)  # the others drop out
        ones = jnp.ones(len(place), sums.dtype)
        features = embed(variables, batch.model_inputs)
        sums += jax.ops.segment_sum(features, place, num_classes)
        counts += jax.ops.segment_sum(ones, place, num_classes)
        return start + len(place), sums, counts

    ongoing = lambda carry: carry[0] < client.num_examples
    start = (jnp.int32(0), sums, jnp.zeros(num_classes, sums.dtype))
    _, sums, counts = jax.lax.while_loop(ongoing, body, start)
    return sums / jnp.maximum(counts, 1)[:, None]


def position_features(embed: Callable, variables: PyTree, client: Client) -> jax.Array:
    """Features of the client's examples by position and view, [P, F, D]."""

    @partial(jax.jit, inline=True)  # traced once, for shapes and for the loop
    def views_from(start):
        view = lambda i: client.batch_from(start, i).model_inputs
        return embed_views(embed, variables, view, client.num_views)

    block = jax.eval_shape(views_from, jnp.int32(0))
    values = jnp.zeros((client.max_positions, *block.shape[1:]), block.dtype)

    def body(carry):
        start, values = carry
        put = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return start + block.shape[0], put(values, views_from(start), start)

    count = client.num_examples + client.num_added
    ongoing = lambda carry: carry[0] < count
    return jax.lax.while_loop(ongoing, body, (jnp.int32(0), values))[1]


def class_mean_start(embed: Callable) -> Callable:
    """Build `begin` of `fedfr`: a head of zeros is set to the classes' mean features.

    The branch's weights start as a copy. Over several lanes side by side the means are
    computed in every round, and selected away in all but a client's first.
    """

    def begin(backbone: PyTree, params: PyTree, client: Client) -> PyTree:
        client_params = {
            name: params[name] for name in ("head", "branch") if name in params
        }

        def fresh():
            head = client_params["head"]
            means = own_class_means(embed, backbone, client, len(head))
            new = {**client_params, "head": means.astype(head.dtype)}
            if "branch" in client_params:
                new["branch"] = {**client_params["branch"], "weights": new["head"]}
            return new

        started = jax.lax.cond(
            jnp.any(client_params["head"] != 0), lambda: client_params, fresh
        )
        return {**params, **started}

    return begin


BLOCK_SCORES = 2**23  # similarities held at once, per device


def prepare_features(
    embed: Callable,
    *,
    threshold: Cosine | None,
    capacity: Whole = 0,
    level: Literal["image", "class"] = "image",
) -> Callable:
    """Build `Algorithm.prepare`: frozen features and hard negatives of a cohort.

    Args:
      embed: (backbone variables, images [B, H, W, C]) -> [B, D].
      threshold: cosine above which a public example is hard, strict; None selects
        nothing.
      capacity: most hard negatives of a client, the hardest first; 0 has no limit.
      level: whether an image is hard, or all those of a class.

    Raises:
      ValueError: for an unknown level.
    """

    @cache  # compiled once for each feed and mesh
    def functions(feed, mesh):
        return build_embed(embed, feed, mesh), build_select(mesh, threshold, capacity)

    def prepare(server: PyTree, context: RoundContext) -> Prepared:
        dataset, cohort = context.dataset, context.cohort
        population, feed, mesh = context.population, context.batching, context.mesh
        embed_rows, select = functions(feed, mesh)
        offsets, num_rows = population.offsets, dataset.num_examples
        no_rows = np.zeros((len(cohort.ids), 0), np.int32)
        nothing = Prepared((), no_rows, np.zeros(len(cohort.ids), np.int32))
        is_counted = feed.num_views > 0
        if threshold is None and not is_counted:
            return nothing
        rows, starts, counts = cohort_rows(population, cohort.ids)
        # Without a threshold no client gets a public example.
        public = np.arange(offsets[-1], num_rows if threshold is not None else 0)
        spans = row_spans(
            np.append(offsets[cohort.ids], offsets[-1]), np.append(starts, len(rows))
        )
        needed_rows = np.concatenate([rows, public]).astype(np.int32)
        whole = meshes.replicated(mesh)
        variables = variable_split.whole_variables(server.variables)
        values = embed_rows(backbone_of(variables), dataset, needed_rows)
        values = meshes.put_global(values[: len(needed_rows)], whole)
        features = (
            Features(values, *meshes.put_global(spans, whole)) if is_counted else ()
        )
        if threshold is None:
            return nothing._replace(shared=features)
        compared = values[:, 0]  # plain views
        if level == "class":
            labels = dataset.labels[needed_rows]
            client = client_of_row(counts, len(rows))
            phi = variables["params"]["phi"]
            compared = class_features(compared, client, phi, labels)
        chosen, number = select(compared, starts, counts, len(rows))
        return Prepared(features, chosen + int(offsets[-1]), number)

    return prepare


def client_of_row(counts: np.ndarray, num_rows: int) -> np.ndarray:
    """Index [R] in the cohort of each row's client; K for padding at the end.

    Args:
      counts: [K] rows of each client, which lie one after the other.
    """
    return np.searchsorted(np.cumsum(counts), np.arange(num_rows), side="right")


def class_of_row(client: jax.Array, labels: jax.Array) -> jax.Array:
    """Number the classes of rows [R] from 0, one class per client and label.

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
    """Replace rows [R + G, D] by their class: the mean feature, or Phi_g.

    Args:
      features: [R + G, D] of the cohort's own and the public rows.
      client: [R] int, whose an own row is.
      phi: [M_g, D].
      labels: [R + G] int32, the own class within the client or the public class.
    """
    client_features, public_labels = features[: len(client)], labels[len(client) :]
    owner = class_of_row(client, labels[: len(client)])
    sums = jax.ops.segment_sum(client_features, owner, len(owner))
    counts = jax.ops.segment_sum(
        jnp.ones(len(owner), client_features.dtype), owner, len(owner)
    )
    means = sums / jnp.maximum(counts, 1)[:, None]
    return jnp.concatenate(
        [means[owner], phi[public_labels].astype(client_features.dtype)]
    )


def build_select(mesh: Mesh, threshold: float | None, capacity: int) -> Callable:
    """Build the selection of hard negatives for a cohort, sharded over the devices.

    Returns:
      run(features [R, D], starts [K], counts [K], first_public) ->
      (indices [K, X] int32 into the public rows, ascending, numbers [K] int32).
    """

    def select_client(features, start, count, first_public):
        public = features[first_public:]
        limits = {"threshold": threshold, "capacity": capacity}
        return hard_negatives(features, start, count, public, **limits)

    return build_over_cohort(select_client, mesh)


def hard_negatives(
    features: jax.Array,
    start: jax.Array,
    count: jax.Array,
    public: jax.Array,
    *,
    threshold: float,
    capacity: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Public rows that are similar to one client's rows (hard negatives).

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
        client_rows = unit(features[jnp.minimum(start + row, len(features) - 1)])
        # As the losses' cosines: a GPU's TF32 would move the threshold.
        cosines = jnp.matmul(client_rows, public.T, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where((row < count)[:, None], cosines, -jnp.inf)
        return jnp.maximum(best, scores.max(axis=0))

    floor = jnp.full(len(public), -jnp.inf, public.dtype)
    return jax.lax.fori_loop(0, (count + block - 1) // block, body, floor)
