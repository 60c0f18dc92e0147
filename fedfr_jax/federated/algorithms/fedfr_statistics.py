"""FedFR's running statistics: averaged, kept by clients or of one client of a round.

The same choice as `statistics.with_statistics`, for `fedfr`, whose clients keep a whole
network, `Personal.previous`, and so their own statistics already.
"""

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.fedfr import Server
from fedfr_jax.federated.algorithms.statistics import STATISTICS
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Algorithm, PyTree

STATS = "batch_stats"


def fedfr_statistics(algorithm: Algorithm, how: str) -> Algorithm:
    """`fedfr(...)` with running statistics averaged, kept by clients or of one of them.

    Args:
      how: average (as `fedfr` does), local (a client goes on from its own, and the
        server's network stays with those that it started from; the contrastive term's
        global network has the client's where it is not computed once a round) or first
        (the server takes those of the client who `is_first`, drawn in every round).

    Raises:
      ValueError: for another word.
    """
    check_choice("batch_stats", how, STATISTICS)
    return {"average": lambda a: a, "local": _local, "first": _first}[how](algorithm)


def _local(algorithm):
    def client_update(key, server, row, client):
        seen = _with_stats(server, row.previous[STATS])
        output = algorithm.client_update(key, seen, row, client)
        return output._replace(update=_without_change(output.update))

    return algorithm._replace(client_update=client_update)


def _first(algorithm):
    def client_update(key, server, row, client):
        output = algorithm.client_update(key, server, row, client)
        change = output.update.backbone[STATS]
        none = jax.tree.map(jnp.zeros_like, change)
        sent = trees.where(client.is_first, change, none)
        update = _without_change(output.update)
        return output._replace(update=update, sums=(output.sums, sent))

    def server_update(server, result):
        inner, first = result.sums
        server = algorithm.server_update(server, result._replace(sums=inner))
        return _with_stats(server, trees.added(server.backbone[STATS], first))

    return algorithm._replace(client_update=client_update, server_update=server_update)


def _with_stats(server: Server, stats: PyTree) -> Server:
    return server._replace(backbone={**server.backbone, STATS: stats})


def _without_change(update: Server) -> Server:
    """A client's update that leaves the server's statistics as they are."""
    return _with_stats(update, jax.tree.map(jnp.zeros_like, update.backbone[STATS]))
