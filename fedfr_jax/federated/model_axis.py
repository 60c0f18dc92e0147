"""One network over several devices, along the mesh's `model` axis.

What lasts (server, personal rows, momentum, updates, sums over clients) is cut along
one axis of each leaf; a step gathers the parameters, takes a part of the batch on each
device and adds up the gradients (ZeRO-3, Rajbhandari et al. 2020, arXiv:1910.02054,
equal to FSDP). `clients` is cut by hand (shard_map), `model` by XLA from the few
constraints below (GSPMD, Xu et al. 2021, arXiv:2105.04663), so batch statistics are
those of the whole batch.

Clients on other devices take other numbers of steps, so a loop must hold no operation
that waits for all devices. Gathers and sums wait for the client's own devices only; a
collective-permute of XLA:CPU waits for all. It comes with arithmetic on cut channels
or classes, hence everything but the batch is whole where a loss or network is computed.
"""

from collections.abc import Callable

import jax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.types import Model, PyTree

SMALLEST = 2**12  # elements; cutting a smaller leaf costs more than it frees


def places(mesh: Mesh, tree: PyTree, *leading: str | None) -> PyTree:
    """Shardings that cut each large leaf of `tree` (arrays or shape structs).

    Args:
      leading: what cuts the axes before a leaf's own, each None or the mesh's axis.
    """

    def one(x):
        own = _spec(mesh, x.shape[len(leading) :])
        # Not P(None) for P(): a call compiles once for each way to say whole.
        spec = P(*leading, *own) if own or any(leading) else P()
        return NamedSharding(mesh, spec)

    return jax.tree.map(one, tree)


def onto(mesh: Mesh, server: PyTree) -> PyTree:
    """`server` on every client device of the mesh, cut over `model`."""
    return meshes.put(server, places(mesh, server))


def places_of_rows(mesh: Mesh, rows: PyTree, *, is_stacked: bool = False) -> PyTree:
    """Shardings of a segment's personal rows [A, w, L, ...], A over `clients`; of a
    sweep's members [A, S, w, L, ...] where they are stacked."""
    members = [None] if is_stacked else []
    return places(mesh, rows, meshes.CLIENTS, *members, None, None)


def whole(tree: PyTree) -> PyTree:
    """`tree` gathered on every device of its client; itself outside a round's cut."""
    if not _is_cut():
        return tree
    return jax.tree.map(lambda x: with_sharding_constraint(x, P()), tree)


def gathered(model: Model) -> Model:
    """The model, whose variables are whole and whose images are cut where it runs."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            if not _is_cut():
                return function(variables, x, *mode, **key)
            cut = lambda x: with_sharding_constraint(x, P(meshes.MODEL))
            *outputs, stats = function(whole(variables), cut(x), *mode, **key)
            return *map(cut, outputs), whole(stats)

        return call

    features = model.features and wrapped(model.features)
    return model._replace(apply=wrapped(model.apply), features=features)


def held(mesh: Mesh, make: Callable, batch_size: int) -> Callable:
    """`make`: hyper -> Algorithm, its state and its batches cut over `model`.

    The server of the next round lies as that of this one, or the round would be
    compiled again.

    Raises:
      ValueError: when the axis does not divide the batch.
    """
    shards = mesh.shape[meshes.MODEL]
    if shards == 1:
        return make
    if batch_size % shards:
        raise ValueError(
            f"batch_size must be a multiple of the {shards} devices along "
            f"{meshes.MODEL}, got {batch_size}."
        )
    return lambda hyper: _held(mesh, make(hyper))


def _held(mesh, algorithm):
    # Inside the engine's shard_map only `model` is left to cut; where shapes alone are
    # asked for there is no mesh.
    def hold(tree):
        cut = lambda x, spec: with_sharding_constraint(x, spec) if spec else x
        of = lambda x: cut(x, _spec(mesh, x.shape))
        return jax.tree.map(of, tree) if _is_cut() else tree

    def cut_batch(batch):
        cut = lambda x: with_sharding_constraint(x, P(meshes.MODEL)) if x.ndim else x
        return jax.tree.map(cut, batch) if _is_cut() else batch

    def client_update(key, server, personal, client):
        batch, span = client.batch, client.span
        client = client._replace(
            batch=lambda step: cut_batch(batch(step)),
            span=lambda *where: cut_batch(span(*where)),
        )
        output = algorithm.client_update(key, hold(server), hold(personal), client)
        return output._replace(
            update=hold(output.update),
            sums=hold(output.sums),
            personal=hold(output.personal),
            local=hold(output.local),
        )

    def server_update(server, result):
        server = algorithm.server_update(server, result)
        return with_sharding_constraint(server, places(mesh, server))

    return algorithm._replace(client_update=client_update, server_update=server_update)


def _is_cut() -> bool:
    """Whether this is traced in a round on a mesh whose `model` axis has devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape.get(meshes.MODEL, 1) > 1


def _spec(mesh, shape) -> P:
    """`model` on one axis of a large leaf."""
    shards = mesh.shape[meshes.MODEL]
    return meshes.longest_cut(shape, meshes.MODEL, shards, SMALLEST)
