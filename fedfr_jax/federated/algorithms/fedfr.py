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

import jax
import jax.numpy as jnp

from fedfr_jax import scanned_blocks
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, Client, ClientOutput, LocalTraining, PyTree

WEIGHTS = {
    "num_examples": lambda client: client.num_examples,
    "num_examples+hard_negatives": lambda client: (
        client.num_examples + client.num_added
    ),
}


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
        shared = backbone_of(variable_split.merge_personal_variables(server.variables))
        if initial_previous_model:
            return scanned_blocks.unstack_like(initial_previous_model(key), shared)
        return shared

    def start_of(variables: PyTree, client: Client) -> PyTree:
        whole = variable_split.merge_personal_variables(variables)
        if begin:
            params = begin(backbone_of(whole), whole["params"], client)
            whole = {**whole, "params": params}
        return variable_split.split_paths(whole, variables)

    def client_update(key, server, previous, client):
        reference = None
        if reference_features:
            shared = backbone_of(
                variable_split.merge_personal_variables(server.variables)
            )
            reference = reference_features(shared, previous, client)
        start = start_of(server.variables, client)
        end, metrics = train(key, start, client, reference=reference)
        weight = WEIGHTS[weighting](client).astype(jnp.float32)
        last = backbone_of(variable_split.merge_personal_variables(end))
        return variable_split.client_output(
            server.variables, end, weight, last, metrics
        )

    def server_update(server, result):
        new = base.server_update(server, result).variables
        if public_classes_update == "frozen" and "phi" in new["params"]:
            params = {**new["params"], "phi": server.variables["params"]["phi"]}
            new = {**new, "params": params}
        return server._replace(variables=new)

    def personalize(server, previous):
        return with_backbone(
            variable_split.merge_personal_variables(server.variables), previous
        )

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


def with_backbone(variables: PyTree, backbone: PyTree) -> PyTree:
    """Replace the backbone in a model's variables."""
    params = {**variables["params"], "backbone": backbone["params"]}
    return {"params": params, "batch_stats": backbone["batch_stats"]}


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
        whole = variable_split.merge_personal_variables(server.variables)
        shared = backbone_of(whole)
        # Public classes have no part in it.
        params = {k: x for k, x in whole["params"].items() if k != "phi"}
        end, metrics = train(
            key,
            {**whole, "params": params},
            client,
            reference=reference_features(shared, client)
            if reference_features
            else None,
            teacher_head=params["head"],
        )
        end = {**end, "params": {**whole["params"], **end["params"]}}
        personal = variable_split.personal_variables(
            variable_split.split_paths(end, server.variables)
        )
        shared_variables = variable_split.shared(server.variables)
        return ClientOutput(
            update=jax.tree.map(jnp.zeros_like, shared_variables),
            weight=jnp.float32(1),
            personal=backbone_of(end),
            metrics=metrics,
            personal_variables=personal,
        )

    return algorithm._replace(client_update=client_update, prepare=None)
