"""Adapt every client's network once, alone, after the last federated round.

Yu, Bagdasaryan, Shmatikov 2020, arXiv:2002.04758: each participant starts from the
global network and trains on its own examples only; nothing is aggregated. Played as one
more round of the engine, so that it resumes, schedules and logs like any other.
"""

from collections.abc import Callable

import jax.numpy as jnp

from fedfr_jax.federated.algorithms.fedfr import Personal
from fedfr_jax.federated.features import Frozen, position_features
from fedfr_jax.types import Algorithm, ClientOutput


def adaptation(
    algorithm: Algorithm, train: Callable, *, embed: Callable | None = None
) -> Algorithm:
    """The last round of `algorithm`, a `fedfr(...)` whose clients keep only a head.

    Args:
      train: `local_sgd(...)`; its loss takes the keywords `num_classes`, `frozen` and
        `teacher_head`.
      embed: (backbone variables, images) -> [B, D] of the teacher, the global network;
        None has no teacher.
    """

    def client_update(key, server, personal, client):
        head, frozen = personal.params["head"], None
        if embed:
            taught = position_features(embed, server.backbone, client)
            frozen = Frozen(global_features=None, previous=taught)
        backbone, stats = server.backbone["params"], server.backbone["batch_stats"]
        none = jnp.zeros((0, head.shape[1]), head.dtype)
        params = {"backbone": backbone, "phi": none, "head": head}
        end, metrics = train(
            key,
            {"params": params, "batch_stats": stats},
            client,
            num_classes=client.num_classes,
            frozen=frozen,
            teacher_head=head,
        )
        params, stats = end["params"], end["batch_stats"]
        adapted = {"params": params["backbone"], "batch_stats": stats}
        row = Personal({"head": params["head"]}, adapted)
        return ClientOutput((), jnp.float32(1), row, metrics)

    return algorithm._replace(
        client_update=client_update,
        server_update=lambda server, result: server,
        prepare=None,
    )
