"""Class-parallel margin softmax: sharded classes, PartialFC sampling, sparse updates.

The loss of an example is log(1 + exp(L - t)): t is the logit of its own class, L the
logarithm of the sum of exp over all other classes. Each device sums over the classes
whose rows it has, a chunk at a time (online softmax, Milakov and Gimelshein 2018,
arXiv:1805.02867), for the examples of all devices; the backward pass computes a chunk's
logits again. Deng et al. 2019, arXiv:1801.07698, section 2.3 (parallel acceleration);
An et al. 2022, arXiv:2203.15565. Deviation: the released codes bound a probability from
below by 1e-30, and so a loss from above by 69.08; here nothing is bounded.

The functions of the loss run on one device of a shard_map over the mesh, and are
differentiated there: gradients of rows are summed over all examples, and those of
features are on the device of the example.

PartialFC (An et al. 2022, arXiv:2203.15565, section 3): each device samples among its
classes, so all have the same number of rows; class vectors that are not sampled stay
unchanged, and so does their optimizer state. Deviation: the labels of a batch are added
to the sampled classes, not among their number, so that the number of rows is constant.

Sparse updates: between `gather_classes` and `scatter_classes` the class matrix has the
sampled rows only, so there is no gradient of the size of the matrix, and a row that is
not sampled keeps its bits.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.central.sharding import LeafSharding, StepSharding
from fedfr_jax.data.permutation import permute
from fedfr_jax.types import PyTree

LOWEST_LOGIT = -1e38  # a logit whose exp is 0


class SampledClasses(NamedTuple):
    """Classes whose vectors a device uses in a step."""

    ids: jax.Array  # [R] int32 class of each row, -1 for a row that does not count
    row: jax.Array  # [c] int32 row of each class that is the device's own, -1: none


class ClassSoftmax(NamedTuple):
    """Margin loss and numerics of the class-parallel softmax.

    `margin(cosine, norm)`, of [B] cosines with the example's class and [B] lengths of
    the features, gives (t [B], logits_of, aux): logits_of maps cosines [B, m] with some
    classes to logits, of which the entry of the example's class is not used.
    """

    margin: Callable
    unit: Callable  # vectors [..., D] -> vectors of length 1
    chunk: int = 0  # classes whose logits exist at once on a device; 0: all
    dtype: Any = None  # of the cosines' factors; None: float32, exact on accelerators


def rows_per_device(num_classes: int, num_devices: int, chunk: int = 0) -> int:
    """Number of rows per device, padded to full chunks."""
    rows = -(-num_classes // num_devices)
    chunk = min(chunk or rows, rows)
    return -(-rows // chunk) * chunk


def all_rows(num_classes: int, num_rows: int) -> SampledClasses:
    """All classes of a device, of `num_rows` rows each."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    ids = jax.lax.axis_index(meshes.CLIENTS) * num_rows + rows
    is_class = ids < num_classes
    return SampledClasses(jnp.where(is_class, ids, -1), jnp.where(is_class, rows, -1))


def gather_batch(x: jax.Array) -> jax.Array:
    """All-gather a device's [b, ...] to the whole batch [B, ...]."""
    return jax.lax.all_gather(x, meshes.CLIENTS, tiled=True)


def class_losses(
    features: jax.Array,
    rows: jax.Array,
    labels: jax.Array,
    sampled: SampledClasses,
    softmax: ClassSoftmax,
) -> tuple[jax.Array, Any]:
    """Cross entropy of a device's examples against the classes of all devices.

    Args:
      features: [b, D] of the device's part of the batch.
      rows: [R, D] embeddings of the classes `sampled`, any length.
      labels: [b] int32 in [0, M) over all devices. The loss of any other, such as -1,
        is undefined.

    Returns:
      (losses [b], not bounded, aux of `softmax.margin`).
    """
    chex.assert_rank([features, rows, labels], [2, 2, 1])
    gathered = gather_batch(features.astype(jnp.float32))
    labels = gather_batch(labels)
    unit = softmax.unit(gathered)
    # Not the root of a sum of squares, which overflows for an untrained network.
    norm = jnp.sum(gathered * jax.lax.stop_gradient(unit), axis=1)
    rows, class_rows = _with_sampled(rows, _local_row(labels, sampled))
    cosine = _target_cosine(unit, softmax.unit(class_rows), labels, sampled)
    target, logits_of, aux = softmax.margin(cosine, norm)
    rest = _log_sum_of_others(unit, rows, labels, sampled.ids, logits_of, softmax)
    first = jax.lax.axis_index(meshes.CLIENTS) * len(features)
    losses = jax.nn.softplus(rest - target)
    return jax.lax.dynamic_slice_in_dim(losses, first, len(features)), aux


def _local_index(labels, sampled):
    """Index of each label among the device's classes, and whether it is one of them."""
    index = labels - jax.lax.axis_index(meshes.CLIENTS) * len(sampled.row)
    is_own = (index >= 0) & (index < len(sampled.row))
    return jnp.clip(index, 0, len(sampled.row) - 1), is_own


def _local_row(labels, sampled):
    """Row of each label; 0 if another device has it."""
    index, is_own = _local_index(labels, sampled)
    return jnp.where(is_own, jnp.maximum(sampled.row[index], 0), 0)


def _target_cosine(unit, class_rows, labels, sampled):
    """Cosine of every example with its class, [B], the same on all devices."""
    index, is_own = _local_index(labels, sampled)
    is_there = is_own & (sampled.row[index] >= 0)
    cosine = jnp.where(is_there, jnp.sum(unit * class_rows, axis=1), 0)
    return jax.lax.psum(cosine, meshes.CLIENTS)


@jax.custom_vjp
def _with_sampled(rows, index):
    """Return (rows, rows[index]); the gradients of both are added in one array."""
    return rows, rows[index]


def _with_sampled_backward(index, cotangents):
    whole, picked = cotangents
    return whole.at[index].add(picked), None


_with_sampled.defvjp(
    lambda rows, index: (_with_sampled(rows, index), index), _with_sampled_backward
)


def _log_sum_of_others(unit, rows, labels, ids, logits_of, softmax):
    """Logarithm of the sum of exp(logit) over all classes but the label, [B]."""

    def add_chunk(carry, chunk):
        largest, total = carry
        rows, ids = chunk
        logits = logits_of(_cosines(unit, softmax.unit(rows), softmax.dtype))
        counts = (ids >= 0)[None] & (ids[None] != labels[:, None])
        logits = jnp.where(counts, logits, LOWEST_LOGIT)
        top = jnp.maximum(largest, jax.lax.stop_gradient(logits.max(1)))
        total = total * jnp.exp(largest - top) + jnp.exp(logits - top[:, None]).sum(1)
        return (top, total), None

    start = jnp.full(len(unit), LOWEST_LOGIT), jnp.zeros(len(unit))
    chunk = softmax.chunk or len(rows)
    if chunk >= len(rows):
        (largest, total), _ = add_chunk(start, (rows, ids))
    else:
        chunks = _chunks(rows, chunk, 0), _chunks(ids, chunk, -1)
        body = jax.checkpoint(add_chunk, prevent_cse=False)
        (largest, total), _ = jax.lax.scan(body, start, chunks)
    top = jax.lax.pmax(jax.lax.stop_gradient(largest), meshes.CLIENTS)
    total = jax.lax.psum(total * jnp.exp(largest - top), meshes.CLIENTS)
    return top + jnp.log(total)  # about LOWEST when there is one class


def _cosines(unit, rows, dtype):
    """Cosines [B, m] float32; products of a narrower dtype are summed in float32."""
    if dtype is None:
        return jnp.matmul(unit, rows.T, precision=jax.lax.Precision.HIGHEST)
    unit, rows = unit.astype(dtype), rows.astype(dtype)
    return jnp.matmul(unit, rows.T, preferred_element_type=jnp.float32)


def _chunks(x, size, fill):
    """Reshape to [n, size, ...], padded; no copy if chunks are full already."""
    missing = -len(x) % size
    if missing:
        x = jnp.concatenate([x, jnp.full((missing, *x.shape[1:]), fill, x.dtype)])
    return x.reshape(-1, size, *x.shape[1:])


def num_sampled(num_rows: int, rate: float) -> int:
    """Number of classes that each device samples from its `num_rows` at a rate."""
    return min(math.ceil(rate * num_rows), num_rows)


def sample_classes(
    key: jax.Array, labels: jax.Array, num_classes: int, num_rows: int, count: int
) -> SampledClasses:
    """Sample `count` of a device's classes and add those in the batch: `count` + B.

    Args:
      key: the same on all devices.
      labels: [B] int32 of the whole batch.
      num_rows: classes that are the device's own, some of padding.
    """
    device = jax.lax.axis_index(meshes.CLIENTS)
    start = device * num_rows
    num_real = jnp.clip(num_classes - start, 0, num_rows)
    word = jax.random.bits(jax.random.fold_in(key, device), dtype=jnp.uint32)
    number = jnp.arange(count, dtype=jnp.int32)
    sampled = permute(word, number, jnp.maximum(num_real, 1))
    index = jnp.concatenate([sampled, labels - start])
    is_own = (index >= 0) & (index < num_real)
    # Of a class with several rows the last one counts.
    rows = jnp.arange(len(index), dtype=jnp.int32)
    row = jnp.full(num_rows, -1, jnp.int32)
    row = row.at[jnp.where(is_own, index, num_rows)].max(rows, mode="drop")
    is_last = is_own & (row[jnp.clip(index, 0, num_rows - 1)] == rows)
    return SampledClasses(jnp.where(is_last, start + index, -1), row)


def gather_classes(matrix: jax.Array, sampled: SampledClasses) -> jax.Array:
    """Rows [R, ...] of a device's class matrix [c, ...]; any for invalid entries."""
    return matrix[jnp.minimum(_sampled_index(sampled), len(matrix) - 1)]


def scatter_classes(
    matrix: jax.Array, rows: jax.Array, sampled: SampledClasses
) -> jax.Array:
    """Write the valid rows back to their indices of the class matrix."""
    return matrix.at[_sampled_index(sampled)].set(rows, mode="drop")


def _sampled_index(sampled):
    """Index of each row in the device's class matrix; past its end for invalid rows."""
    start = jax.lax.axis_index(meshes.CLIENTS) * len(sampled.row)
    return jnp.where(sampled.ids >= 0, sampled.ids - start, len(sampled.row))


CLASS_TABLE = "phi"  # the parameter of classes, where a task has one
SAMPLED = 2**31 + 2  # folded into a step's key; devices fold their numbers
CUT = P(meshes.CLIENTS)


def class_matrix(layout: LeafSharding, params: PyTree) -> jax.Array | None:
    """The leaf with the rule CLASSES, global or a device's shard; None without one."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(layout.is_table), strict=True)
    return next((x for x, is_table in leaves if is_table), None)


def sampled_rows(
    mesh: Mesh,
    step_sharding: StepSharding,
    layout: LeafSharding,
    params: PyTree,
    labels: jax.Array,
    key: jax.Array,
) -> SampledClasses | None:
    """Sample the classes of a step, sharded over the devices; None if all take part."""
    matrix = class_matrix(layout, params)
    if matrix is None or step_sharding.class_rate == 1:
        return None
    num_rows = len(matrix) // mesh.shape[meshes.CLIENTS]
    count = num_sampled(num_rows, step_sharding.class_rate)

    def on_device(labels, key):
        labels = jax.lax.all_gather(labels, meshes.CLIENTS, tiled=True)
        key = jax.random.fold_in(key, SAMPLED)
        return sample_classes(key, labels, step_sharding.num_classes, num_rows, count)

    draw = meshes.over_client_devices(mesh, on_device, (CUT, P()), CUT)
    return draw(labels, key)


def map_tables(
    mesh: Mesh,
    function: Callable,
    is_table: PyTree,
    sampled: SampledClasses | None,
    *trees: PyTree,
) -> PyTree:
    """Apply `gather_classes` or `scatter_classes` to the class matrices of trees.

    Args:
      is_table: mask of the leaves that are class matrices.
      sampled: None if all classes take part: then nothing is gathered or scattered.

    Returns:
      a tree with the other leaves of the last one of `trees`.
    """
    if sampled is None:
        return trees[-1]
    specs = (CUT,) * (len(trees) + 1)
    change = meshes.over_client_devices(mesh, function, specs, CUT)
    return jax.tree.map(
        lambda is_table, *x: change(*x, sampled) if is_table else x[-1],
        is_table,
        *trees,
    )
