"""Inference: a model's outputs for rows of a data set, sharded over the devices.

Outputs are computed for each view of an example (such as its mirror image), so that
frozen networks run once per example and not at every step.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import constants
from fedfr_jax import mesh as meshes
from fedfr_jax.convolutions import fast
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.client import client_key, first_personal_key
from fedfr_jax.federated.engine import compiler_options
from fedfr_jax.federated.model_parallel import placement, put_on_mesh
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import DATA_KINDS, SegmentData, place_data
from fedfr_jax.types import Algorithm, AnyArray, PyTree, model_inputs


def build_embed(embed: Callable, batching: Batching, mesh: Mesh) -> Callable:
    """Build the features of a data set's rows, sharded over the client devices.

    Args:
      embed: (variables, images [B, H, W, C]) -> [B, D].
      batching: its batch size, and its augment, in whose views examples are seen: in
        all of them where they are counted, else in the plain one.

    Returns:
      run(variables, table, rows [R] int32) -> [R', F, D] of F views, with R' >= R: the
      tail is padding that keeps blocks whole. `table` is a `Dataset` or a `Stream`.
    """
    cut, embed = P(meshes.CLIENTS), fast(embed)

    def embed_batch(variables, inputs):
        view = lambda i: model_inputs(batching.with_deterministic(i, inputs))
        return embed_views(embed, variables, view, max(batching.num_views, 1))

    def device(variables, block):
        def embed_rows(rows):
            inputs = jax.tree.map(lambda x: x[rows], block.dataset.inputs)
            return embed_batch(variables, inputs)

        values = jax.lax.map(embed_rows, block.rows.reshape(-1, batching.batch_size))
        return values.reshape(-1, *values.shape[2:])

    def over_devices(kind):
        specs = P(), SegmentData(kind.spec, cut)
        sharded = meshes.over_client_devices(mesh, device, specs, cut)
        options = compiler_options(mesh, None)
        compiled = constants.jit(sharded, mesh, placement, compiler_options=options)
        return outside_trace(compiled, jax.jit(sharded))

    compiled = {kind: over_devices(kind) for kind in DATA_KINDS}

    def run(variables, table, rows):
        table, values = place_data(mesh, table), []
        for block in table.blocks(rows, batching.batch_size):
            values.append(compiled[type(table)](variables, block))
            if table.is_streamed:  # two blocks exist, not more
                jax.block_until_ready(values[-1])
        return jnp.concatenate(values) if len(values) > 1 else values[0]

    return run


def build_sums(count_batch: Callable, batching: Batching, mesh: Mesh) -> Callable:
    """Build integer counts over a data set's rows, a batch at a time.

    Args:
      count_batch: (variables, inputs, targets, is_valid [B] bool) -> tree of integer
        arrays, counts of a device's batch of [B, ...] without the invalid examples.
      batching: its batch size, per device, and its augment, whose plain view is taken.

    Returns:
      run(variables, table, rows [R] int32) -> tree of int64 numpy arrays. Of any R it
      runs the same compiled step. `table` is a `Dataset` or a `Stream`.
    """
    count = _build_counts(count_batch, batching, mesh, P())
    whole = mesh.shape[meshes.CLIENTS] * batching.batch_size

    def run(variables, table, rows):
        table, total = place_data(mesh, table), None
        for start in range(0, len(rows), whole):
            here = rows[start : start + whole]
            is_valid = np.arange(whole) < len(here)
            counts = count(variables, table, here, is_valid)
            counts = jax.tree.map(lambda x: x.sum(axis=0), counts)
            total = counts if total is None else jax.tree.map(np.add, total, counts)
        return total

    return run


def build_client_sums(
    count_batch: Callable, batching: Batching, mesh: Mesh
) -> Callable:
    """Build integer counts of every client's model on the client's own rows.

    At a time each client device has the model of another client, the largest first, so
    that devices have similar numbers of batches.

    Args:
      count_batch, batching: as of `build_sums`.

    Returns:
      run(client_variables, table, offsets [N + 1]) -> tree of int64 numpy arrays
      [N, ...], zeros of clients without a row. `client_variables` is that of
      `TrainedModels`, `table` a `Dataset` or a `Stream` of the clients' rows.
    """
    count = _build_counts(count_batch, batching, mesh, P(meshes.CLIENTS))
    num_devices, size = mesh.shape[meshes.CLIENTS], batching.batch_size

    def count_group(variables, table, starts, ends):
        """Sum the counts [A, ...] of rows starts..ends-1 [A] of each device."""
        total = None
        for first in range(0, max(int((ends - starts).max()), 1), size):
            rows = starts[:, None] + np.arange(first, first + size)
            is_valid = rows < ends[:, None]
            rows = np.where(is_valid, rows, 0)
            counts = count(variables, table, rows.reshape(-1), is_valid.reshape(-1))
            total = counts if total is None else jax.tree.map(np.add, total, counts)
        return total

    def run(client_variables, table, offsets):
        table, sizes, groups = place_data(mesh, table), np.diff(offsets), []
        order = np.argsort(-sizes, kind="stable")
        order = order[: max(np.count_nonzero(sizes), 1)]  # one, for the shapes
        for start in range(0, len(order), num_devices):
            clients = order[start : start + num_devices]
            starts = offsets[np.resize(clients, num_devices)]
            ends = starts.copy()
            ends[: len(clients)] += sizes[clients]
            variables = client_variables(np.resize(clients, num_devices))
            groups.append(count_group(variables, table, starts, ends))

        def of_clients(*parts):
            total = np.zeros((len(sizes), *parts[0].shape[1:]), np.int64)
            total[order] = np.concatenate(parts)[: len(order)]
            return total

        return jax.tree.map(of_clients, *groups)

    return run


def _build_counts(
    count_batch: Callable, batching: Batching, mesh: Mesh, spec: P
) -> Callable:
    """Build counts [A, ...] int64, on the host, of a batch of each client device.

    Args:
      spec: of the variables: all devices have the same ones, or each its own of
        [A, ...].

    Returns:
      count(variables, placed table, rows [R <= A * B], is_valid [A * B] bool).
    """
    cut, count_batch = P(meshes.CLIENTS), fast(count_batch)

    def device(variables, block, is_valid):
        if spec == cut:
            variables = jax.tree.map(lambda x: x[0], variables)
        inputs, targets = jax.tree.map(lambda x: x[block.rows], tuple(block.dataset))
        plain_inputs = batching.with_deterministic(jnp.int32(0), inputs)
        counts = count_batch(variables, plain_inputs, targets, is_valid)
        return jax.tree.map(lambda x: x[None], counts)

    def over_devices(kind):
        specs = spec, SegmentData(kind.spec, cut), cut
        return jax.jit(meshes.over_client_devices(mesh, device, specs, cut))

    compiled = {kind: over_devices(kind) for kind in DATA_KINDS}

    def count(variables, table, rows, is_valid):
        is_valid = meshes.put_global(is_valid, meshes.over_clients(mesh))
        (block,) = table.blocks(rows, batching.batch_size)
        counts = meshes.fetch(compiled[type(table)](variables, block, is_valid))
        return jax.tree.map(lambda x: np.asarray(x, np.int64), counts)

    return count


def outside_trace(compiled: Callable, plain: Callable) -> Callable:
    """Call `compiled`, but `plain` within another trace, where JAX takes no options."""

    def call(*arguments):
        leaves = jax.tree.leaves(arguments)
        is_traced = any(isinstance(x, Tracer) for x in leaves)
        return (plain if is_traced else compiled)(*arguments)

    return call


def embed_views(
    embed: Callable, variables: PyTree, view: Callable, num_views: int
) -> jax.Array:
    """Features [B, F, D] of all views, `view: i [] int32 -> images [B, H, W, C]`.

    A loop over the views has the network once, and batches as large as a step's, which
    have kernels in common with it: less to compile than one batch of all views.
    """
    embed_view = lambda i: embed(variables, view(i))
    views = jnp.arange(num_views, dtype=jnp.int32)
    return jnp.moveaxis(jax.lax.map(embed_view, views), 0, 1)


def client_models(
    algorithm: Algorithm, server: PyTree, key: jax.Array, store: Store, mesh: Mesh
) -> tuple[Callable, Callable]:
    """Build client -> its personalized model, and number -> that of an unseen client.

    Both take a client, or clients [A] of which each client device gets the model of
    one, as `TrainedModels.client_variables`.

    Args:
      key: of the run.
    """
    server, key = put_on_mesh(mesh, (server, key))
    functions = algorithm.init_personal, algorithm.personalize

    def personalized(clients, states, is_new):
        arguments = server, key, clients, states
        if np.ndim(clients):
            cut = meshes.over_clients(mesh)
            clients = meshes.put_global(clients.astype(np.int32), cut)
            return _personalize_each(functions, cut, *arguments, is_new)
        if is_new:  # never sampled: what it would start from
            states = _first_state(algorithm.init_personal, server, key, clients)
        return algorithm.personalize(server, states)

    def seen_client(clients):
        return personalized(clients, *load_states(store, clients, mesh))

    def new_client(numbers):
        nobody = load_states(store, np.full_like(numbers, -1), mesh)
        return personalized(store.population + numbers, *nobody)

    return seen_client, new_client


def _first_state(init_personal, server, key, client):
    """State of a client before its first round."""
    return init_personal(first_personal_key(client_key(key, client)), server)


@partial(jax.jit, static_argnums=(0, 1))
def _personalize_each(functions, cut, server, key, clients, states, is_new):
    """Variables [A, ...] of clients [A] with `states` [A, ...], one on each device."""
    init_personal, personalize = functions

    def of_client(client, state, is_new):
        first = _first_state(init_personal, server, key, client)
        state = jax.tree.map(lambda x, y: jnp.where(is_new, x, y), first, state)
        return personalize(server, state)

    variables = jax.vmap(of_client)(clients, states, is_new)
    return jax.lax.with_sharding_constraint(variables, cut)


def load_states(
    store: Store, clients: int | np.ndarray, mesh: Mesh
) -> tuple[PyTree, AnyArray]:
    """Stored states, and which clients have none, of `client_models`' clients."""
    if not np.ndim(clients):
        states, is_new = store.gather(np.array([clients]))
        state = jax.tree.map(lambda x: x[0], states)
        return meshes.put_global(state, meshes.replicated(mesh)), is_new[0]
    here = np.asarray(clients)[meshes.local_shards(mesh)]
    cut, count = meshes.over_clients(mesh), mesh.shape[meshes.CLIENTS]
    readers = store.readers(np.asarray(clients), meshes.process_of_shards(mesh))
    return meshes.put_local(store.gather(here, readers), cut, count)


def build_over_cohort(client_fn: Callable, mesh: Mesh) -> Callable:
    """Build a function of one client over a cohort, sharded over the client devices.

    Args:
      client_fn: (shared, start [] int32, count [] int32, static) -> tree of [...].

    Returns:
      run(shared, starts [K], counts [K], static) -> tree of [K, ...]; `shared` is whole
      on every device, `static` is a number that shapes depend on.
    """
    cut, num_devices = P(meshes.CLIENTS), mesh.shape[meshes.CLIENTS]

    @partial(jax.jit, static_argnames="static")
    def sharded(shared, starts, counts, static):
        def device(shared, starts, counts):
            for_span = lambda span: client_fn(shared, *span, static)
            return jax.lax.map(for_span, (starts, counts))

        split = meshes.over_client_devices(mesh, device, (P(), cut, cut), cut)
        return split(shared, starts, counts)

    def run(shared, starts, counts, static):
        padding = (0, -len(starts) % num_devices)
        spans = [np.pad(x, padding).astype(np.int32) for x in (starts, counts)]
        spans = meshes.put_global(spans, meshes.over_clients(mesh))
        results = sharded(shared, *spans, static=static)
        return jax.tree.map(lambda x: x[: len(starts)], results)

    return run
