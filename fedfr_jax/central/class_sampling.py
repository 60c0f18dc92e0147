"""Some classes of a step: every label's own and a keyed choice of others (PartialFC).

An et al. 2022, arXiv:2203.15565, section 3. Each device draws among its own classes,
so all have the same number of rows; the rows that are not drawn stay as they are, with
what the optimizer keeps for them. Deviation: labels come on top of the chosen number
of classes, not out of it, because a compiled step has as many rows every time.
"""

import math

import jax
import jax.numpy as jnp

from fedfr_jax import mesh as meshes
from fedfr_jax.central.class_parallel import Held
from fedfr_jax.permutation import permute


def num_drawn(num_rows: int, rate: float) -> int:
    """Classes that each device draws of its `num_rows`, at a rate in (0, 1]."""
    return min(math.ceil(rate * num_rows), num_rows)


def drawn(
    key: jax.Array, labels: jax.Array, num_classes: int, num_rows: int, count: int
) -> Held:
    """`count` of a device's classes and those of its labels, `count` + B rows.

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
    others = permute(word, number, jnp.maximum(num_real, 1))
    place = jnp.concatenate([others, labels - start])
    is_own = (place >= 0) & (place < num_real)
    # Of a class that is there more than once the last row counts.
    rows = jnp.arange(len(place), dtype=jnp.int32)
    row = jnp.full(num_rows, -1, jnp.int32)
    row = row.at[jnp.where(is_own, place, num_rows)].max(rows, mode="drop")
    is_last = is_own & (row[jnp.clip(place, 0, num_rows - 1)] == rows)
    return Held(jnp.where(is_last, start + place, -1), row)


def taken(table: jax.Array, held: Held) -> jax.Array:
    """Rows [R, ...] of a device's table [c, ...]; any row where none counts."""
    return table[jnp.minimum(_place(held), len(table) - 1)]


def put_back(table: jax.Array, rows: jax.Array, held: Held) -> jax.Array:
    """The table with the rows that count in their places."""
    return table.at[_place(held)].set(rows, mode="drop")


def _place(held):
    """Place of each row in the device's table, behind its end where none counts."""
    start = jax.lax.axis_index(meshes.CLIENTS) * len(held.row)
    return jnp.where(held.ids >= 0, held.ids - start, len(held.row))
