"""Model parallelism: one network on several devices, along the mesh axis `model`.

All state (server, client states, momentum, updates, sums over clients) is sharded along
one axis of each leaf; a step gathers the parameters, takes a shard of the batch on each
device and sums the gradients (ZeRO-3, Rajbhandari et al. 2020, arXiv:1910.02054,
equal to FSDP). `clients` is cut by hand (shard_map), `model` by XLA from the few
constraints below (GSPMD, Xu et al. 2021, arXiv:2105.04663), so batch statistics are
those of the whole batch.

Clients on other devices take other numbers of steps, so a loop must have no operation
that waits for all devices. Gathers and sums wait for the client's own devices only, but
a collective-permute of XLA:CPU waits for all. XLA inserts it for arithmetic on sharded
channels or classes, hence only the batch is sharded where losses and networks are
computed.
"""

from collections.abc import Callable

import jax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.types import Model, PyTree

SMALLEST = 2**12  # elements; cutting a smaller leaf costs more than it frees


def placement(mesh: Mesh, tree: PyTree, *leading: str | None) -> PyTree:
    """Shardings over `model` for each large leaf of `tree`, arrays or shapes.

    Args:
      leading: mesh axes of the axes before a leaf's own, or None.
    """

    def leaf_sharding(x):
        spec = _spec(mesh, x.shape[len(leading) :])
        # P() and P(None) are equivalent, but a call would compile for each of them.
        spec = P(*leading, *spec) if spec or any(leading) else P()
        return NamedSharding(mesh, spec)

    return jax.tree.map(leaf_sharding, tree)


def put_on_mesh(mesh: Mesh, server: PyTree) -> PyTree:
    """Put `server` on every client device of the mesh, sharded over `model`."""
    return meshes.put_global(server, placement(mesh, server))


def row_placement(mesh: Mesh, rows: PyTree, *, is_stacked: bool = False) -> PyTree:
    """Shardings of a segment's client states [A, w, L, ...], A over `clients`.

    A sweep's have a member axis, [A, S, w, L, ...].
    """
    members = [None] if is_stacked else []
    return placement(mesh, rows, meshes.CLIENTS, *members, None, None)


def unshard(tree: PyTree) -> PyTree:
    """Gather `tree` on every device of its client; unchanged if nothing is sharded."""
    if not _is_sharded():
        return tree
    return jax.tree.map(lambda x: with_sharding_constraint(x, P()), tree)


def gather(model: Model) -> Model:
    """Wrap a model so that its variables are gathered and its batch is sharded."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            if not _is_sharded():
                return function(variables, x, *mode, **key)
            cut = lambda x: with_sharding_constraint(x, P(meshes.MODEL))
            *outputs, stats = function(unshard(variables), cut(x), *mode, **key)
            return *map(cut, outputs), unshard(stats)

        return call

    return model.wrapped(wrapped)


def shard_leaves(mesh: Mesh, make: Callable, batch_size: int) -> Callable:
    """Shard an algorithm's state and batches over `model`; make: hyper -> Algorithm.

    The server after a round has the sharding of the one before, or the next round would
    be compiled again.
    """
    shards = mesh.shape[meshes.MODEL]
    if shards == 1:
        return make
    if batch_size % shards:
        raise ValueError(
            f"batch_size must be a multiple of the {shards} devices along "
            f"{meshes.MODEL}, got {batch_size}."
        )
    return lambda hyper: _shard_leaf(mesh, make(hyper))


def _shard_leaf(mesh, algorithm):
    # Inside the engine's shard_map only `model` is left to shard; `eval_shape` has no
    # mesh.
    def constrain(tree):
        def leaf(x):
            spec = _spec(mesh, x.shape)
            return with_sharding_constraint(x, spec) if spec else x

        return jax.tree.map(leaf, tree) if _is_sharded() else tree

    def shard_batch(batch):
        def leaf(x):
            return with_sharding_constraint(x, P(meshes.MODEL)) if x.ndim else x

        return jax.tree.map(leaf, batch) if _is_sharded() else batch

    def client_update(key, server, personal, client):
        batch, batch_from = client.batch, client.batch_from
        client = client._replace(
            batch=lambda step: shard_batch(batch(step)),
            batch_from=lambda start, view: shard_batch(batch_from(start, view)),
        )
        server, personal = constrain((server, personal))
        output = algorithm.client_update(key, server, personal, client)
        return output._replace(
            update=constrain(output.update),
            sums=constrain(output.sums),
            personal=constrain(output.personal),
            personal_variables=constrain(output.personal_variables),
        )

    def server_update(server, result):
        server = algorithm.server_update(server, result)
        return with_sharding_constraint(server, placement(mesh, server))

    return algorithm._replace(client_update=client_update, server_update=server_update)


def _is_sharded() -> bool:
    """Whether a round is traced on a mesh with several devices along `model`."""
    return meshes.num_model_shards() > 1


def _spec(mesh, shape) -> P:
    """PartitionSpec with `model` on one axis of a large leaf."""
    shards = mesh.shape[meshes.MODEL]
    return meshes.longest_sharded_axis(shape, meshes.MODEL, shards, SMALLEST)
