"""Adapt every client's network once, alone, after the last federated round.

Yu, Bagdasaryan, Shmatikov 2020, arXiv:2002.04758: each participant starts from the
global network and trains on its own examples only; nothing is aggregated. Played as one
more round of the engine, so that it resumes, schedules and logs like any other.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.fedfr import backbone_of
from fedfr_jax.federated.local import local_training
from fedfr_jax.types import Algorithm, ClientOutput, Local


def adaptation(
    algorithm: Algorithm, local: Local, *, frozen: Callable | None = None
) -> Algorithm:
    """The last round of `algorithm`, a `fedfr(...)`, but for a server that stays.

    What is around the algorithm keeps the leaf params/head with clients.

    Args:
      local: its loss takes the keywords `frozen` and `teacher_head`.
      frozen: (variables of the teacher, the global network, client) -> what the loss
        gets as `frozen`; None has no teacher.
    """
    train = local_training(local)

    def client_update(key, server, previous, client):
        del previous
        whole = collections.merged(server.variables)
        shared = backbone_of(whole)
        # Public classes have no part in it.
        params = {k: x for k, x in whole["params"].items() if k != "phi"}
        end, metrics = train(
            key,
            {**whole, "params": params},
            client,
            frozen=frozen(shared, client) if frozen else None,
            teacher_head=params["head"],
        )
        end = {**end, "params": {**whole["params"], **end["params"]}}
        own = collections.own(collections.cut(end, server.variables))
        nothing = jax.tree.map(jnp.zeros_like, collections.shared(server.variables))
        one = jnp.float32(1)
        return ClientOutput(nothing, one, backbone_of(end), metrics, local=own)

    return algorithm._replace(client_update=client_update, prepare=None)
