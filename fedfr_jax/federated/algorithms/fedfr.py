"""FedFR: federated face recognition, generic and personalised, each term an option.

Liu et al. 2022, "FedFR: Joint optimization federated framework for generic and
personalized face recognition", arXiv:2112.12496. Clients share the backbone and the
public class embeddings Phi_g; class embeddings of their own identities, the branch of
decoupled feature customization and the previous local backbone never leave them.
FedAvg on faces is this algorithm with a loss of local classes only and no preparation.

Deviations, all options: the official code throws the averaged Phi_g away
(`phi_update="frozen"`), and starts the contrastive term from a random previous network
(`first_previous`); here the default averages, and starts from the global network. The
paper weighs clients by their local images (`weigh="local"`); the default counts the
hard negatives too, as the official code does.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.federated.local import local_training
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Algorithm, ClientOutput, Local, PyTree

PHI_UPDATES = ("averaged", "frozen")
WEIGHTS = {
    "local": lambda client: client.num_local,
    "local+extra": lambda client: client.num_local + client.num_extra,
}


class Server(NamedTuple):
    """What goes down to every client."""

    backbone: PyTree  # {"params": ..., "batch_stats": ...}
    phi: jax.Array | None  # [M_g, D] public class embeddings, None without any


class Personal(NamedTuple):
    """What stays with a client."""

    params: PyTree  # {"head": [M, D], "branch": ...}
    previous: PyTree  # backbone variables after the client's last local training


def fedfr(
    local: Local,
    *,
    init_local: Callable,
    frozen: Callable | None = None,
    prepare: Callable | None = None,
    phi_update: str = "averaged",
    first_previous: Callable | None = None,
    weigh: str = "local+extra",
    begin: Callable | None = None,
    share: bool = True,
) -> Algorithm:
    """Average backbone and Phi_g; keep head, branch and previous backbone.

    Args:
      local: its loss takes the keyword `frozen`.
      init_local: key -> a new client's `Personal.params`.
      frozen: (global backbone variables, the client's previous ones, client) -> what
        the loss gets as `frozen`, made once before the client trains; None gives it
        None.
      prepare: see `Algorithm`, or None.
      phi_update: averaged (the paper) or frozen (the official code).
      first_previous: key -> backbone variables a client starts from as its previous
        one; None takes the global backbone.
      weigh: aggregation weight, a client's `local` (paper) or `local+extra` (official
        code) number of examples.
      begin: (backbone variables, `Personal.params`, client) -> the parameters that
        the client's round starts from; None starts from its own.
      share: False trains every client alone, from its previous backbone; the server
        stays as it was.

    Raises:
      ValueError: for an unknown option.
    """
    check_choice("phi_update", phi_update, PHI_UPDATES)
    check_choice("weigh", weigh, WEIGHTS)
    train = local_training(local)

    def init(variables):
        return Server(variables["backbone"], variables["phi"])

    def init_personal(key, server):
        local_key, previous_key = jax.random.split(key)
        previous = server.backbone
        if first_previous:
            previous = first_previous(previous_key)
        return Personal(init_local(local_key), previous)

    def client_update(key, server, personal, client):
        base = server.backbone if share else personal.previous
        own = personal.params
        if begin:
            own = begin(base, own, client)
        known = None
        if frozen:
            known = frozen(server.backbone, personal.previous, client)
        shared = {"backbone": base["params"], "phi": server.phi}
        start = {"params": {**shared, **own}, "batch_stats": base["batch_stats"]}
        end, metrics = train(key, start, client, frozen=known)
        own = {name: end["params"][name] for name in own}
        local = {
            "params": end["params"]["backbone"],
            "batch_stats": end["batch_stats"],
        }
        update = jax.tree.map(jnp.subtract, Server(local, end["params"]["phi"]), server)
        weight = WEIGHTS[weigh](client).astype(jnp.float32)
        return ClientOutput(update, weight, Personal(own, local), metrics)

    def server_update(server, result):
        if not share:
            return server
        new = trees.added(server, result.aggregate)
        return new if phi_update == "averaged" else new._replace(phi=server.phi)

    def personalize(server, personal):
        del server
        return {"backbone": personal.previous, **personal.params}

    return Algorithm(
        init=init,
        init_personal=init_personal,
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=personalize,
        network=lambda server: server.backbone,
        prepare=prepare,
        update_like=lambda server: server,
    )
