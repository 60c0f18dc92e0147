"""What functions of one's own return, compared with their contract before training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.aggregation.robust import of_all_updates
from fedfr_jax.types import Aggregator, Summary
from tests.federated.toys import SHAPE, norm_loss, norm_variables

first = lambda tree: jax.tree.map(lambda x: x[:1], tree)


def fedavg():
    return ff.fedavg(ff.LocalTraining(norm_loss, optax.sgd, 0.1))


def returning(change):
    """FedAvg, whose clients return what `change` makes of their output."""
    algorithm = fedavg()

    def client_update(*args):
        return change(algorithm.client_update(*args))

    return algorithm._replace(client_update=client_update)


def behind(**link):
    return ff.with_aggregation(fedavg(), Aggregator(**link))


def rule(combine):
    return ff.with_aggregation(fedavg(), of_all_updates(combine))


def places(updates, weights):
    del weights
    return jax.tree.map(lambda x: jnp.argmax(x, 0), updates)


def unreduced(variables, batch, key):
    return norm_loss(variables, batch, key)[0] * jnp.ones(4)


KINDS = r"must have float32 \(.*\) at '.*', got float32 \(1.*\)"
MISTAKES = {
    "update": (
        lambda: returning(lambda x: x._replace(update=first(x.update))),
        rf"^the update of client_update of .*returning.* {KINDS}",
    ),
    "output": (
        lambda: returning(lambda x: tuple(x)),
        "^client_update of .* must return a ClientOutput, got a tuple",
    ),
    "personal state": (
        lambda: returning(lambda x: x._replace(personal=jnp.ones(3))),
        "^the personal state of client_update .* must have None at '', got float32",
    ),
    "metric": (
        lambda: returning(lambda x: x._replace(metrics={"loss": jnp.ones(3)})),
        r"^loss of client_update of .* must be a number, got \(3,\)",
    ),
    "server": (
        lambda: fedavg()._replace(server_update=lambda server, _: server.variables),
        "^the result of server_update of .* must have .*, got None",
    ),
    "loss": (
        lambda: ff.fedavg(ff.LocalTraining(unreduced, optax.sgd, 0.1)),
        r"^loss must return a mean \[\] of the batch, got \(4,\)",
    ),
    "link's update": (
        lambda: behind(summarize=lambda k, s, u, w: (Summary(first(u), w), {})),
        rf"^the update of summarize of aggregation's link 1 {KINDS}",
    ),
    "link's pair": (
        lambda: behind(summarize=lambda k, s, u, w: Summary(u, w)),
        r"^summarize of .* 1 must return \(Summary, metrics\), got Summary",
    ),
    "link's aggregate": (
        lambda: behind(finish=lambda k, s, total: (first(total.update), s, {})),
        rf"^the aggregate of finish of aggregation's link 1 {KINDS}",
    ),
    "link's three": (
        lambda: behind(finish=lambda k, s, total: (total.update, s)),
        r"^finish of .* must return \(aggregate, state, metrics\), got 2 values",
    ),
    "link": (
        lambda: ff.with_aggregation(fedavg(), ff.aggregation.median),
        "^link 1 of the aggregation must be an Aggregator, got a function",
    ),
    "rule": (
        lambda: rule(lambda updates, weights: updates),
        "^the result of a rule over all updates must have float32",
    ),
    "rule's kind": (
        lambda: rule(places),
        "^the result of a rule over all updates must have float32 .*, got int32",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_breaks_the_contract_is_named_before_a_round_is_compiled(mistake):
    build, message = MISTAKES[mistake]
    client_ids = np.repeat(np.arange(5), 4)
    images = np.ones((20, *SHAPE), np.float32)
    labels = np.zeros(20, np.int32)
    data = ff.FederatedDataset.from_client_ids(images, labels, client_ids=client_ids)
    with pytest.raises(ValueError, match=message):
        run = ff.init(build(), data, norm_variables(), cohort_size=2, batch_size=4)
        ff.run_rounds(run, 1)
