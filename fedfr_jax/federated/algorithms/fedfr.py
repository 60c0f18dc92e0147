"""FedFR: federated face recognition, generic and personalised, each term an option.

Liu et al. 2022, "FedFR: Joint optimization federated framework for generic and
personalized face recognition", arXiv:2112.12496. Clients share the backbone and the
public class embeddings Phi_g; `personal` keeps the class embeddings of their own
identities and the branch of decoupled feature customization. A client's state is the
backbone that it trained last, as in MOON. FedAvg on faces is this algorithm with a loss
of local classes only and no preparation.

Deviations, all options: the official code throws the averaged Phi_g away
(`phi_update="frozen"`), and starts the contrastive term from a random previous network
(`first_previous`); here the default averages, and starts from the global network. The
paper weighs clients by their local images (`weigh="local"`); the default counts the
hard negatives too, as the official code does.
"""

from collections.abc import Callable

import jax.numpy as jnp

from fedfr_jax import stacks
from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.local import local_training
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Algorithm, Client, ClientOutput, Local, PyTree

PHI_UPDATES = ("averaged", "frozen")
WEIGHTS = {
    "local": lambda client: client.num_local,
    "local+extra": lambda client: client.num_local + client.num_extra,
}


def fedfr(
    local: Local,
    *,
    frozen: Callable | None = None,
    prepare: Callable | None = None,
    phi_update: str = "averaged",
    first_previous: Callable | None = None,
    weigh: str = "local+extra",
    begin: Callable | None = None,
    share: bool = True,
) -> Algorithm:
    """Average backbone and Phi_g, params "backbone" and "phi"; keep the last backbone.

    Args:
      local: its loss takes the keyword `frozen`.
      frozen: (global backbone variables, the client's previous ones, client) -> what
        the loss gets as `frozen`, made once before the client trains; None gives it
        None.
      prepare: see `Algorithm`, or None.
      phi_update: averaged (the paper) or frozen (the official code).
      first_previous: key -> backbone variables a client starts from as its previous
        one; None takes the global backbone.
      weigh: aggregation weight, a client's `local` (paper) or `local+extra` (official
        code) number of examples.
      begin: (backbone variables, params, client) -> the params that the client's round
        starts from; None starts from what there is.
      share: False trains every client alone, from its previous backbone; the server
        stays as it was.

    Raises:
      ValueError: for an unknown option.
    """
    check_choice("phi_update", phi_update, PHI_UPDATES)
    check_choice("weigh", weigh, WEIGHTS)
    base, train = fedavg(local), local_training(local)

    def init_personal(key, server):
        shared = backbone_of(collections.merged(server.variables))
        if first_previous:
            return stacks.laid_out(first_previous(key), shared)
        return shared

    def start_of(variables: PyTree, previous: PyTree, client: Client) -> PyTree:
        whole = collections.merged(variables)
        whole = whole if share else with_backbone(whole, previous)
        if begin:
            params = begin(backbone_of(whole), whole["params"], client)
            whole = {**whole, "params": params}
        return collections.cut(whole, variables)

    def client_update(key, server, previous, client):
        known = None
        if frozen:
            shared = backbone_of(collections.merged(server.variables))
            known = frozen(shared, previous, client)
        start = start_of(server.variables, previous, client)
        end, metrics = train(key, start, client, frozen=known)
        return ClientOutput(
            update=collections.change(end, server.variables),
            weight=WEIGHTS[weigh](client).astype(jnp.float32),
            personal=backbone_of(collections.merged(end)),
            metrics=metrics,
            local=collections.own(end),
        )

    def server_update(server, result):
        if not share:
            return server
        new = base.server_update(server, result).variables
        if phi_update == "frozen" and "phi" in new["params"]:
            params = {**new["params"], "phi": server.variables["params"]["phi"]}
            new = {**new, "params": params}
        return server._replace(variables=new)

    def personalize(server, previous):
        return with_backbone(collections.merged(server.variables), previous)

    return base._replace(
        init_personal=init_personal,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
        prepare=prepare,
        needs=("identities",),
    )


def backbone_of(variables: PyTree) -> PyTree:
    """The backbone's variables among a network's."""
    return {**variables, "params": variables["params"]["backbone"]}


def with_backbone(variables: PyTree, backbone: PyTree) -> PyTree:
    """A network's variables with another backbone."""
    params = {**variables["params"], "backbone": backbone["params"]}
    return {"params": params, "batch_stats": backbone["batch_stats"]}
