"""Adapt every client's network once, alone, after the last federated round.

Yu, Bagdasaryan, Shmatikov 2020, arXiv:2002.04758: each participant starts from the
global network and trains on its own examples only; nothing is aggregated. Played as one
more round of the engine, so that it resumes, schedules and logs like any other.
"""

from collections.abc import Callable

import jax.numpy as jnp

from fedfr_jax.federated.algorithms.fedfr import Personal
from fedfr_jax.federated.local import local_training
from fedfr_jax.types import Algorithm, ClientOutput, Local


def adaptation(
    algorithm: Algorithm, local: Local, *, frozen: Callable | None = None
) -> Algorithm:
    """The last round of `algorithm`, a `fedfr(...)` whose clients keep only a head.

    Args:
      local: its loss takes the keywords `frozen` and `teacher_head`.
      frozen: (variables of the teacher, the global network, client) -> what the loss
        gets as `frozen`; None has no teacher.
    """

    train = local_training(local)

    def client_update(key, server, personal, client):
        head = personal.params["head"]
        shared = algorithm.network(server)
        taught = frozen(shared, client) if frozen else None
        backbone, stats = shared["params"], shared["batch_stats"]
        none = jnp.zeros((0, head.shape[1]), head.dtype)
        params = {"backbone": backbone, "phi": none, "head": head}
        end, metrics = train(
            key,
            {"params": params, "batch_stats": stats},
            client,
            frozen=taught,
            teacher_head=head,
        )
        params, stats = end["params"], end["batch_stats"]
        adapted = {"params": params["backbone"], "batch_stats": stats}
        row = Personal({"head": params["head"]}, adapted)
        return ClientOutput((), jnp.float32(1), row, metrics)

    return algorithm._replace(
        client_update=client_update,
        aggregator=None,
        server_update=lambda server, result: server,
        prepare=None,
    )
