"""Knowledge distillation on shared unlabelled images, after the average.

Zhuang et al. 2020, arXiv:2008.11560, and 2022, arXiv:2205.12144, algorithm 3. What is
learnt from is not said there; this is the released code: the mean over clients of their
networks' features, at unit length or as they are, by mean squared error, in one pass of
SGD over the shared images. The features of a round's clients are summed as they end, so
no two clients' networks are held at once. The pass refreshes running statistics, but
where every client keeps its own. Deviation: teachers run in evaluation mode unless
asked, where the released code leaves their dropout on.
"""

import math

import jax
import jax.numpy as jnp

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.cdw import training_weight
from fedfr_jax.federated.algorithms.distilling import distilling
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.shared_images import (
    Shared,
    check_shared,
    features_on,
)
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.local import local_training, sgd
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import Algorithm, ClientOutput, Local, Model


def kd(
    local: Local,
    *,
    model: Model,
    shared: Shared,
    every: int = 10,
    normalize: bool = True,
    rate: float = 5e-4,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    weigh: str = "examples",
    train_mode: bool = False,
) -> Algorithm:
    """FedAvg whose server learns from its clients' mean features.

    Args:
      model: with `features`, of [b, D].
      shared: the images.
      every: rounds between distillations, the first after so many.
      normalize: targets are means of features at unit length; the server's are not.
      rate, momentum, weight_decay: of the server's SGD, with Nesterov's momentum.
      weigh: distance, see `cdw`, or as of `fedavg`.
      train_mode: teachers, and networks that are weighed, run as in training.

    Raises:
      ValueError: for a number out of its range, or images that do not fit.
    """
    some = (0, math.inf)
    bounds = {"every": (1, math.inf), "rate": some, "weight_decay": some}
    check_ranges("", locals(), bounds)  # momentum's are of `sgd`
    check_shared(model, shared)
    base, train = fedavg(local), local_training(local)
    weight = training_weight(weigh, model, train_mode)
    look = features_on(model, shared, train_mode=train_mode, normalize=normalize)
    is_due = lambda round: jax.lax.rem(round + 1, jnp.int32(every)) == 0
    optimizer = sgd(momentum=momentum, weight_decay=weight_decay, nesterov=True)(rate)
    learn = distilling(model, shared, optimizer)

    def prepare(server, context):
        del server
        return no_extra(len(context.cohort.ids))._replace(tables=shared.images)

    def taught(key, end, client):
        """Features [S, b, D] of the client's network; zeros in other rounds."""

        def all_steps():
            number = jnp.arange(shared.num_batches, dtype=jnp.int32)
            network, given = collections.merged(end), (client.tables, client.round)
            return jax.lax.map(lambda i: look(network, *given, i, key), number)

        found = jax.eval_shape(all_steps)
        nothing = lambda: jnp.zeros(found.shape, found.dtype)
        return jax.lax.cond(is_due(client.round), all_steps, nothing)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = train(key, start, client)
        weight_key, teach_key = (jax.random.fold_in(key, i) for i in (1, 2))
        share = weight(weight_key, start, end, client)
        features = taught(teach_key, end, client)
        return ClientOutput(
            update=collections.change(end, start),
            weight=share,
            personal=personal,
            metrics=metrics,
            local=collections.own(end),
            sums=(features, jnp.ones((), features.dtype)),
        )

    def server_update(server, result):
        features, number = result.sums
        target, server = features / number, base.server_update(server, result)
        start = server.variables
        if result.own:
            start = collections.with_own(start, result.own)
        learnt = lambda: learn(start, result.tables, target, result.round)
        variables = jax.lax.cond(is_due(result.round), learnt, lambda: start)
        return server._replace(variables=variables)

    return base._replace(
        client_update=client_update,
        server_update=server_update,
        prepare=prepare,
        needs=() if train_mode else ("equal_features",),
    )
