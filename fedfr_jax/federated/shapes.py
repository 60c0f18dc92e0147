"""A round's arguments as shapes: what it is lowered from before there are any.

What clients are handed depends on what the server selects for them; the shapes do not.
So the first round is compiled on a thread of its own while the server prepares the
first cohort.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import model_axis
from fedfr_jax.federated.client import Slots
from fedfr_jax.federated.compiling import lowered
from fedfr_jax.federated.memory import check_memory
from fedfr_jax.federated.schedule import schedule
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.mesh import shapes_at as placed
from fedfr_jax.types import Cohort, Extra, PyTree, RoundContext


@contextlib.contextmanager
def compiled_beside(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> Iterator[None]:
    """Compile the round of `sim` while the block prepares `cohort`.

    Only for the first block, which ends when both are done, even if it fails. Nothing
    is compiled where the server prepares nothing or what JAX cannot trace, for a
    stream, whose shapes are known as it is read, and in a run of several processes.
    What the compiler refuses fails again, and is told, when the round is called.

    Raises:
      MemoryError: when a round cannot fit, see `check_memory`.
    """
    arguments = _arguments(sim, server, store, cohort)
    if arguments is None:
        yield
        return
    check_memory(sim, server, arguments[1])
    sim.programs.whole.is_begun = True
    # Before the preparation, for this takes longest and XLA's passes a single core.
    program = lowered(sim.programs.whole, *arguments)
    with ThreadPoolExecutor(1, "compile") as thread:
        thread.submit(program.compile)
        yield


def _arguments(sim, server, store, cohort):
    """`round_arguments` of a round that is to be compiled here, else None."""
    is_known = sim.programs.whole.is_begun or sim.source.is_streamed
    if is_known or not sim.algorithm.prepare or jax.process_count() > 1:
        return None
    try:
        extra = extra_shapes(sim.algorithm.prepare, server, sim.context(cohort))
    except jax.errors.JAXTypeError:  # it asks for values
        sim.programs.whole.is_begun = True
        return None
    return round_arguments(
        sim.mesh,
        cohort_size=len(cohort.ids),
        lanes=sim.lanes,
        shards=sim.shards,
        server=server,
        row=store.template,
        extra=extra,
        table=sim.table,
        key=sim.key,
        hyper=sim.hyper,
    )


def extra_shapes(prepare: Callable, server: PyTree, context: RoundContext) -> Extra:
    """What `prepare` hands to a cohort's clients, as shapes on the mesh.

    Args:
      prepare: of an `Algorithm`.
      server: arrays or shapes, like the resident data set of `context`.
    """

    def of_arrays(server, dataset):
        return prepare(server, context._replace(dataset=dataset))

    extra = jax.eval_shape(of_arrays, server, context.dataset)
    return on_mesh(context.mesh, extra)


def on_mesh(mesh: Mesh, tree: PyTree) -> PyTree:
    """Shape structs of `tree`, whole on every device."""
    whole = meshes.replicated(mesh)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    return jax.tree.map(struct, tree)


def round_arguments(
    mesh: Mesh,
    *,
    cohort_size: int,
    lanes: int,
    shards: int | None,
    server: PyTree,
    row: PyTree,
    extra: Extra,
    table: PyTree,
    key: jax.Array,
    hyper: PyTree = (),
) -> tuple:
    """What `engine.Round.whole` is called with, for `lower`.

    Args:
      cohort_size, lanes, shards: K, L and V (None: a shard per device).
      row: one client's personal state, arrays or shapes.
      server, extra, table, key, hyper: as the round gets them, arrays or placed shapes.

    Returns:
      (server, rows, slots, order, table, shared), shapes of rows and slots
      [A, w, L, ...], of order [K] and of the round.
    """
    devices = mesh.shape[meshes.CLIENTS]
    plan = schedule(
        np.ones(cohort_size, np.int64), num_devices=devices, lanes=lanes, shards=shards
    )
    waves = plan.slots.size // (devices * lanes)
    laid = lambda x: jax.ShapeDtypeStruct((devices, waves, lanes, *x.shape), x.dtype)
    rows = jax.tree.map(laid, row)
    slots = laid(jax.ShapeDtypeStruct((len(Slots._fields),), jnp.int32))
    order = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    extra = extra._replace(num_examples=())  # the slots say it
    return (
        server,
        placed(rows, model_axis.places_of_rows(mesh, rows)),
        placed(slots, meshes.over_clients(mesh)),
        on_mesh(mesh, order),
        table,
        (extra, on_mesh(mesh, number), key, hyper),
    )
