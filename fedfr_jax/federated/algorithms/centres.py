"""FedAvg whose server keeps a centre of changes, from which clients see their own."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.types import Algorithm, PyTree


class Server(NamedTuple):
    """FedAvg's server, and the centre: the last round's step, like the params."""

    inner: PyTree
    center: PyTree


def centred(base: Algorithm, sent: Callable, moved: Callable) -> Algorithm:
    """`base` with steps of the server to a centre, which starts at no change.

    Args:
      base: `fedavg(...)`.
      sent: (output of `base`, its change of params minus the centre) -> output.
      moved: (leaf of the centre, of the mean of what was sent) -> of the new centre.
    """

    def init(variables):
        return Server(base.init(variables), optax.tree.zeros_like(variables["params"]))

    def client_update(key, server, personal, client):
        output = base.client_update(key, server.inner, personal, client)
        change = output.update["params"]
        return sent(output, jax.tree.map(jnp.subtract, change, server.center))

    def server_update(server, result):
        move = lambda v, x: moved(v, x.astype(v.dtype))
        center = jax.tree.map(move, server.center, result.aggregate["params"])
        whole = result._replace(aggregate={**result.aggregate, "params": center})
        return Server(base.server_update(server.inner, whole), center)

    return base._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=lambda server, row: base.personalize(server.inner, row),
        network=lambda server: base.network(server.inner),
    )
