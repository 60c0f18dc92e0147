"""The arguments of a round as shapes, from which it is lowered without any data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.identities import Partition
from fedfr_jax.federated import model_axis
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.settings import Federation
from fedfr_jax.federated.shapes import extra_shapes, on_mesh, placed
from fedfr_jax.feed import Feed
from fedfr_jax.tasks.data import feed_of
from fedfr_jax.tasks.faces.methods import FaceMethod
from fedfr_jax.types import Cohort, Dataset, Extra, Model, PyTree, RoundContext


class RoundShapes(NamedTuple):
    """What a round is handed, with shapes for arrays."""

    feed: Feed
    max_local: int
    cohort_size: int
    server: PyTree
    row: PyTree  # of one client
    extra: Extra
    table: Dataset
    key: jax.ShapeDtypeStruct


def round_shapes(
    model: Model,
    method: FaceMethod,
    partition: Partition,
    federation: Federation,
    mesh: Mesh,
) -> RoundShapes:
    """Shapes of round 0's arguments, placed on the mesh."""
    p, whole = partition, meshes.replicated(mesh)
    feed = feed_of(federation, drop_last=federation.drop_last)
    population = Population(p.train_offsets.astype(np.int64), p.num_classes)
    cohort_size = federation.cohort_size or len(p.num_classes)
    num_rows = len(p.train) + len(p.global_examples)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
    table = Dataset.labelled(
        array((num_rows, *model.image_shape), jnp.uint8), array((num_rows,), jnp.int32)
    )
    key = on_mesh(mesh, jax.eval_shape(jax.random.key, 0))
    phi = array((len(p.global_identities), model.embedding_dim), jnp.float32)
    begin = lambda key, phi: method.algorithm.init(method.start(model.init(key), phi))
    # A key that lies nowhere, as networks are made with: `init` is traced already.
    server = jax.eval_shape(begin, jax.random.key(0), phi)
    server = placed(server, model_axis.places(mesh, server))
    row = jax.eval_shape(method.algorithm.init_personal, key, server)
    extra = on_mesh(mesh, no_extra(cohort_size))
    if method.algorithm.prepare:
        cohort = Cohort(np.arange(cohort_size), 0)
        context = RoundContext(table, population, cohort, feed, mesh)
        extra = extra_shapes(method.algorithm.prepare, server, context)
    return RoundShapes(
        feed=feed,
        max_local=int(np.diff(p.train_offsets).max()),
        cohort_size=cohort_size,
        server=server,
        row=row,
        extra=extra,
        table=table,
        key=key,
    )
