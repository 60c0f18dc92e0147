"""A step on some rows of the table of classes, and of what the optimizer keeps of them.

Between `rows_of` and `rows_back` the table is as small as the draw, so there is no
gradient of the size of the table, and a row that is not drawn keeps its bits.
"""

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.central.class_parallel import Held
from fedfr_jax.central.class_sampling import drawn, num_drawn, put_back, taken
from fedfr_jax.central.sharding import Layout, Spread, of_state
from fedfr_jax.types import Batch, PyTree

CLASS_TABLE = "phi"  # the parameter of classes, where a task has one
DRAW = 2**31 + 2  # folded into a step's key; devices fold their numbers
CUT = P(meshes.CLIENTS)


def table_of(layout: Layout, params: PyTree) -> jax.Array | None:
    """The leaf with the rule CLASSES, whole or a device's part; None without one."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(layout.is_table), strict=True)
    return next((x for x, is_table in leaves if is_table), None)


def drawn_rows(
    mesh: Mesh, spread: Spread, layout: Layout, params: PyTree, batch: Batch, key
) -> Held | None:
    """The classes of a step, cut over the devices; None: all classes take part."""
    table = table_of(layout, params)
    if table is None or spread.class_rate == 1:
        return None
    num_rows = len(table) // mesh.shape[meshes.CLIENTS]
    count = num_drawn(num_rows, spread.class_rate)

    def of_part(labels, key):
        labels = jax.lax.all_gather(labels, meshes.CLIENTS, tiled=True)
        key = jax.random.fold_in(key, DRAW)
        return drawn(key, labels, spread.num_classes, num_rows, count)

    draw = meshes.over_client_devices(mesh, of_part, (CUT, P()), CUT)
    return draw(batch.labels, key)


def rows_of(
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    whole: tuple[PyTree, PyTree],
    held: Held | None,
) -> tuple[PyTree, PyTree]:
    """(parameters, optimizer's state) with the rows `held` in the place of tables."""
    if held is None:
        return whole
    take = meshes.over_client_devices(mesh, taken, (CUT, CUT), CUT)
    return jax.tree.map(
        lambda x, is_table: take(x, held) if is_table else x,
        whole,
        _tables(optimizer, layout, whole),
    )


def rows_back(
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    whole: tuple[PyTree, PyTree],
    moved: tuple[PyTree, PyTree],
    held: Held | None,
) -> tuple[PyTree, PyTree]:
    """What has `moved`, its rows in their places in the tables of before."""
    if held is None:
        return moved
    put = meshes.over_client_devices(mesh, put_back, (CUT, CUT, CUT), CUT)
    return jax.tree.map(
        lambda x, new, is_table: put(x, new, held) if is_table else new,
        whole,
        moved,
        _tables(optimizer, layout, whole),
    )


def _tables(optimizer, layout, whole):
    """Which leaves of (parameters, optimizer's state) are tables."""
    is_table = layout.is_table
    return is_table, of_state(optimizer, whole[1], is_table, False)
