"""FedFR: federated face recognition, generic and personalized, each term an option.

Liu et al. 2022, "FedFR: Joint optimization federated framework for generic and
personalized face recognition", arXiv:2112.12496. Clients share the backbone and the
public class embeddings Phi_g; `personal` keeps the class embeddings of their own
identities and the branch of decoupled feature customization. A client's state is the
backbone that it trained last, as in MOON. FedAvg on faces is this algorithm with a loss
of local classes only and no preparation.

Deviations, all options: the official code throws the averaged Phi_g away
(`public_classes_update="frozen"`), and starts the contrastive term from a random
previous network (`initial_previous_model`); here the default averages, and starts from
the global network. The paper weighs clients by their local images
(`weighting="num_examples"`); the default counts the hard negatives too, as the official
code does.

The final adaptation, Yu, Bagdasaryan, Shmatikov 2020, arXiv:2002.04758: after the last
round every client trains the global network on its own examples, and nothing is
aggregated. It is one more round of the engine, so that it resumes, schedules and logs
like any other.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from fedfr_jax import scanned_blocks
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.variable_split import (
    client_output,
    personal_variables,
    split_paths,
    whole_variables,
)
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


@checked
def fedfr(
    local: LocalTraining,
    *,
    reference_features: Callable | None = None,
    prepare: Callable | None = None,
    public_classes_update: Literal["average", "frozen"] = "average",
    initial_previous_model: Callable | None = None,
    weighting: Literal[
        "num_examples", "num_examples+hard_negatives"
    ] = "num_examples+hard_negatives",
    begin: Callable | None = None,
) -> Algorithm:
    """FedFR: average backbone and public classes "phi"; clients keep their backbone.

    Args:
      local: its loss takes the keyword `reference`.
      reference_features: (global backbone variables, the client's previous ones,
        client) -> what the loss gets as `reference`, made once before the client
        trains; None gives it None.
      prepare: see `Algorithm`, or None: of public examples and, for each client, of its
        own alone, as by `prepare_features`.
      public_classes_update: average (the paper) or frozen (the official code).
      initial_previous_model: key -> backbone variables a client starts from as its
        previous one; None takes the global backbone.
      weighting: aggregation weight, "num_examples" of a client (paper) or
        "num_examples+hard_negatives" (official code).
      begin: (backbone variables, params, client) -> the params that the client's round
        starts from; None starts from what there is.
    """
    base, train = fedavg(local), build_local_training(local)

    def init_personal(key, server):
        shared = backbone_of(whole_variables(server.variables))
        if initial_previous_model:
            return scanned_blocks.unstack_like(initial_previous_model(key), shared)
        return shared

    def client_update(key, server, previous, client):
        whole = whole_variables(server.variables)
        shared, reference = backbone_of(whole), None
        if reference_features:
            reference = reference_features(shared, previous, client)
        if begin:
            whole = {**whole, "params": begin(shared, whole["params"], client)}
        start = split_paths(whole, server.variables)
        end, metrics = train(key, start, client, reference=reference)
        number = client.num_examples
        if weighting == "num_examples+hard_negatives":
            number = number + client.num_added
        weight, last = number.astype(jnp.float32), whole_variables(end)
        return client_output(server.variables, end, weight, backbone_of(last), metrics)

    def server_update(server, result):
        new = base.server_update(server, result).variables
        if public_classes_update == "frozen" and "phi" in new["params"]:
            params = {**new["params"], "phi": server.variables["params"]["phi"]}
            new = {**new, "params": params}
        return server._replace(variables=new)

    def personalize(server, previous):
        whole = whole_variables(server.variables)
        params = {**whole["params"], "backbone": previous["params"]}
        return {"params": params, "batch_stats": previous["batch_stats"]}

    return base._replace(
        init_personal=init_personal,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
        prepare=prepare,
        prepare_is_local=prepare is not None,
        needs=("identities",),
    )


def backbone_of(variables: PyTree) -> PyTree:
    """The backbone's variables of a model."""
    return {**variables, "params": variables["params"]["backbone"]}


def build_adaptation(
    algorithm: Algorithm,
    local: LocalTraining,
    *,
    reference_features: Callable | None = None,
) -> Algorithm:
    """Build the final adaptation of a `fedfr` algorithm; the server stays as it is.

    What is around the algorithm keeps the leaf params/head with clients.

    Args:
      local: its loss takes the keywords `reference` and `teacher_head`.
      reference_features: (variables of the teacher, the global network, client) -> what
        the loss gets as `reference`; None has no teacher.
    """
    train = build_local_training(local)

    def client_update(key, server, previous, client):
        del previous
        whole, reference = whole_variables(server.variables), None
        if reference_features:
            reference = reference_features(backbone_of(whole), client)
        # Public classes have no part in it.
        params = {k: x for k, x in whole["params"].items() if k != "phi"}
        given = {"reference": reference, "teacher_head": params["head"]}
        end, metrics = train(key, {**whole, "params": params}, client, **given)
        end = {**end, "params": {**whole["params"], **end["params"]}}
        own = personal_variables(split_paths(end, server.variables))
        # Nothing is sent: an update of zeros.
        output = client_output(
            server.variables,
            server.variables,
            jnp.float32(1),
            backbone_of(end),
            metrics,
        )
        return output._replace(personal_variables=own)

    return algorithm._replace(client_update=client_update, prepare=None)
