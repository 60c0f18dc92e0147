"""APFL: learned mixture of a personal and the global model.

Deng et al. 2020, arXiv:2003.13461, algorithm 1 and equation 10. Each step moves y on
F(y), then v and alpha on F(v_bar), v_bar = alpha v + (1 - alpha) y with the new y; the
gradient for alpha is <v - y, grad F(v_bar)>, and alpha is clipped to [0, 1]. Only y is
averaged. Deviations: weights are mixed, as the paper says (the authors' code mixes
outputs), and alpha moves in every step with the same optimizer; deployment mixes v
with the server's newest model; batch normalization has its own statistics for v_bar.
"""

import jax
import jax.numpy as jnp

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.server_optimizers import ServerOptimizer
from fedfr_jax.federated.local import NO_STEP, init_state, local_step, run_steps
from fedfr_jax.ranges import Share
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


def mix(personal: PyTree, other: PyTree) -> PyTree:
    """Mix alpha v + (1 - alpha) y, of own {"v", "alpha"} and other = y.

    Leaves that y lacks, because they stay with the client, are those of v.
    """

    def blend(y, v):
        if y is None:
            return v
        alpha = personal["alpha"].astype(v.dtype)
        return alpha * v + (1 - alpha) * y

    return jax.tree.map(blend, other, personal["v"], is_leaf=lambda x: x is None)


@checked
def apfl(
    local: LocalTraining,
    *,
    alpha: Share = 0.5,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg of y; v and alpha stay with the client.

    Args:
      alpha: a new client's share of its own model.
      server_optimizer, weighting: see `fedavg`.
    """
    base = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    weight = weight_of(weighting)

    def mixed_loss(variables, batch, key, *, other):
        mixed = {**variables, "params": mix(variables["params"], other)}
        return local.loss(mixed, batch, key)

    mixed = local._replace(loss=mixed_loss)
    step_global, step_own = local_step(local), local_step(mixed)

    def init_personal(key, server):
        start = variable_split.received_variables(key, server)
        share = jnp.full((), alpha, jnp.result_type(float))
        return {**start, "params": {"v": start["params"], "alpha": share}}

    def client_update(key, server, personal, client):
        start = server.variables

        def body(step, carry):
            y, v = carry
            batch, step_key = client.batch(step), jax.random.fold_in(key, step)
            y, metrics = step_global(step_key, y, client, batch, step)
            other = variable_split.select_like(start["params"], y.variables["params"])
            v, own_metrics = step_own(step_key, v, client, batch, step, other=other)
            own = v.variables["params"]
            own = {**own, "alpha": jnp.clip(own["alpha"], 0, 1)}
            v = v._replace(variables={**v.variables, "params": own})
            metrics = {**metrics, "personal_loss": own_metrics["loss"]}
            return (y, v), {**metrics, "alpha": own["alpha"]}

        received = variable_split.merge_personal_variables(start)
        own_key = jax.random.fold_in(key, NO_STEP)
        y = init_state(key, local, received, client)
        v = init_state(own_key, mixed, personal, client)
        (y, v), metrics = run_steps(body, (y, v), client)
        end = variable_split.split_paths(y.variables, start)
        return variable_split.client_output(
            start, end, weight(client), v.variables, metrics
        )

    def personalize(server, personal):
        params = mix(personal["params"], server.variables["params"])
        return {**personal, "params": params}

    return base._replace(
        init_personal=init_personal,
        client_update=client_update,
        personalize=personalize,
    )
