"""Margin softmax with its classes cut over all devices, and never all there at once.

The loss of an example is log(1 + exp(L - t)): t is the logit of its own class, L the
logarithm of the sum of exp over all other classes. Each device sums over the classes
whose rows it holds, a chunk at a time (online softmax, Milakov and Gimelshein 2018,
arXiv:1805.02867), for the examples of all devices; the backward pass computes a chunk's
logits again. Deng et al. 2019, arXiv:1801.07698, section 2.3 (parallel acceleration);
An et al. 2022, arXiv:2203.15565.

Deviation: the released codes bound a probability from below by 1e-30, and so a loss
from above by 69.08; here nothing is bounded.

All functions run on one device of a shard_map over the mesh, and are differentiated
there: the gradient of a row is whole, that of a feature has come back to its device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedfr_jax import mesh as meshes

LOWEST = -1e38  # a logit whose exp is 0


class Held(NamedTuple):
    """Which classes a device has rows of in a step."""

    ids: jax.Array  # [R] int32 class of each row, -1 for a row that does not count
    row: jax.Array  # [c] int32 row of each class that is the device's own, -1: none


class Softmax(NamedTuple):
    """What a margin loss tells the softmax.

    `margin(cosine, norm)`, of [B] cosines with the own class and [B] lengths of the
    features, gives (t [B], others, aux): others maps cosines [B, m] with some classes
    to their logits, where the entry of the own class is not used.
    """

    margin: Callable
    unit: Callable  # vectors [..., D] -> vectors of length 1
    chunk: int = 0  # classes whose logits exist at once on a device; 0: all
    dtype: Any = None  # of the cosines' factors; None: float32, exact on accelerators


def rows_per_device(num_classes: int, num_devices: int, chunk: int = 0) -> int:
    """c: rows that each device keeps, the last ones of padding; whole chunks."""
    rows = -(-num_classes // num_devices)
    chunk = min(chunk or rows, rows)
    return -(-rows // chunk) * chunk


def all_rows(num_classes: int, num_rows: int) -> Held:
    """A device holds the rows of all `num_rows` classes that are its own."""
    own = jnp.arange(num_rows, dtype=jnp.int32)
    ids = jax.lax.axis_index(meshes.CLIENTS) * num_rows + own
    is_class = ids < num_classes
    return Held(jnp.where(is_class, ids, -1), jnp.where(is_class, own, -1))


def of_all(x: jax.Array) -> jax.Array:
    """[B, ...] of the whole batch, of a device's own examples [b, ...]."""
    return jax.lax.all_gather(x, meshes.CLIENTS, tiled=True)


def class_losses(
    features: jax.Array, rows: jax.Array, labels: jax.Array, held: Held, of: Softmax
) -> tuple[jax.Array, Any]:
    """Cross entropy of a device's own examples against the classes of all devices.

    Args:
      features: [b, D] of the device's part of the batch.
      rows: [R, D] embeddings of the classes `held`, any length.
      labels: [b] int32 in [0, M), as all devices count; each must be held by one. Any
        other, such as -1, has no class: its loss must not count.

    Returns:
      (losses [b], not bounded, what `of.margin` gives beside the logits).
    """
    chex.assert_rank([features, rows, labels], [2, 2, 1])
    everybody, labels = of_all(features.astype(jnp.float32)), of_all(labels)
    unit = of.unit(everybody)
    # Not the root of a square, which overflows for the features of a new network.
    norm = jnp.sum(everybody * jax.lax.stop_gradient(unit), axis=1)
    rows, own = _with_taken(rows, _row_of(labels, held))
    cosine = _own_cosine(unit, of.unit(own), labels, held)
    target, others, aux = of.margin(cosine, norm)
    rest = _log_sum_of_others(unit, rows, labels, held.ids, others, of)
    first = jax.lax.axis_index(meshes.CLIENTS) * len(features)
    losses = jax.nn.softplus(rest - target)
    return jax.lax.dynamic_slice_in_dim(losses, first, len(features)), aux


def _place(labels, held):
    """Each label's place among the device's own classes, and whether it is one."""
    place = labels - jax.lax.axis_index(meshes.CLIENTS) * len(held.row)
    return jnp.clip(place, 0, len(held.row) - 1), (
        (place >= 0) & (place < len(held.row))
    )


def _row_of(labels, held):
    """Row of each label, 0 for one that another device holds."""
    place, is_own = _place(labels, held)
    return jnp.where(is_own, jnp.maximum(held.row[place], 0), 0)


def _own_cosine(unit, own, labels, held):
    """Cosine of every example with its own class, [B], the same on all devices."""
    place, is_own = _place(labels, held)
    is_held = is_own & (held.row[place] >= 0)
    found = jnp.where(is_held, jnp.sum(unit * own, axis=1), 0)
    return jax.lax.psum(found, meshes.CLIENTS)


@jax.custom_vjp
def _with_taken(rows, index):
    """(rows, rows[index]); the gradient of the latter is added to that of the former
    in place, where two uses of `rows` would make two arrays of its size."""
    return rows, rows[index]


def _with_taken_backward(index, cotangents):
    whole, taken = cotangents
    return whole.at[index].add(taken), None


_with_taken.defvjp(
    lambda rows, index: (_with_taken(rows, index), index), _with_taken_backward
)


def _log_sum_of_others(unit, rows, labels, ids, others, of):
    """log of the sum of exp(logit) over all classes but the own one, [B]."""

    def one(carry, chunk):
        most, total = carry
        rows, ids = chunk
        logits = others(_cosines(unit, of.unit(rows), of.dtype))
        counts = (ids >= 0)[None] & (ids[None] != labels[:, None])
        logits = jnp.where(counts, logits, LOWEST)
        top = jnp.maximum(most, jax.lax.stop_gradient(logits.max(1)))
        total = total * jnp.exp(most - top) + jnp.exp(logits - top[:, None]).sum(1)
        return (top, total), None

    start = jnp.full(len(unit), LOWEST), jnp.zeros(len(unit))
    chunk = of.chunk or len(rows)
    if chunk >= len(rows):
        (most, total), _ = one(start, (rows, ids))
    else:
        chunks = _chunks(rows, chunk, 0), _chunks(ids, chunk, -1)
        again = jax.checkpoint(one, prevent_cse=False)
        (most, total), _ = jax.lax.scan(again, start, chunks)
    top = jax.lax.pmax(jax.lax.stop_gradient(most), meshes.CLIENTS)
    total = jax.lax.psum(total * jnp.exp(most - top), meshes.CLIENTS)
    return top + jnp.log(total)  # about LOWEST when there is one class


def _cosines(unit, rows, dtype):
    """[B, m] float32; products of a narrower dtype are summed in float32 too."""
    if dtype is None:
        return jnp.matmul(unit, rows.T, precision=jax.lax.Precision.HIGHEST)
    unit, rows = unit.astype(dtype), rows.astype(dtype)
    return jnp.matmul(unit, rows.T, preferred_element_type=jnp.float32)


def _chunks(x, size, fill):
    """[n, size, ...], filled up; a table of whole chunks is not copied."""
    missing = -len(x) % size
    if missing:
        x = jnp.concatenate([x, jnp.full((missing, *x.shape[1:]), fill, x.dtype)])
    return x.reshape(-1, size, *x.shape[1:])
