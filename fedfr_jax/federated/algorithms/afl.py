"""Agnostic federated averaging: good on the worst mixture of domains of examples.

Ro et al. 2021, arXiv:2104.02748, algorithm 1, after Mohri et al. 2019,
arXiv:1902.00146. With a_i = l_i / N_i, N_i being the mean number of examples of domain
i in a round's cohort over the last rounds, client k minimizes sum_j a_d(j) loss_j / b_k
with b_k = sum_i a_i n_ki, counts b_k, and sends the mean loss of the received model in
every domain, L_i; then l_i <- l_i exp(rate L_i), normalised. Before the first round
l_i = 1 / D and N_i = 1. Deviations: a batch's loss is scaled to the client's size, so
that it is an estimate of the objective (fedjax adds up the batch); a domain counts as
at least one example; running statistics are averaged plainly.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.domains import by_domain, weighted
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.local import local_training
from fedfr_jax.federated.means import over_examples
from fedfr_jax.objective import with_aux
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import Algorithm, ClientOutput, Local, PyTree


class Server(NamedTuple):
    """Global variables and what is known of the D domains."""

    variables: PyTree
    share: jax.Array  # [D] l, sums to 1
    counts: jax.Array  # [W, D] examples in the cohorts of the last W rounds


def afl(
    local: Local,
    *,
    num_classes: int,
    domain_rate: float = 0.1,
    window: int = 1,
    domain_of: Callable | None = None,
) -> Algorithm:
    """Agnostic averaging.

    Args:
      local: with a loss that is a mean over the batch's valid examples.
      num_classes: D >= 1; the domains are the classes unless `domain_of` is given.
      domain_rate: of the domains' shares, >= 0.
      window: W >= 1, rounds over which domains are counted.
      domain_of: batch -> [B] int32 domain of each example, in [0, D).

    Raises:
      ValueError: when a number is out of its range.
    """
    bounds = {"num_classes": 1, "domain_rate": 0, "window": 1}  # at least
    check_ranges("", locals(), {name: (x, jnp.inf) for name, x in bounds.items()})
    domain_of = domain_of or (lambda batch: batch.labels)
    loss_fn = with_aux(local.loss)
    train = local_training(local._replace(loss=weighted(loss_fn, domain_of)))
    of_domains = by_domain(loss_fn, domain_of, num_classes)

    def client_update(key, server, personal, client):
        received = collections.merged(server.variables)
        shares = over_examples(lambda b: of_domains(received, b, key), client)
        number = client.num_local.astype(shares[1].dtype)
        loss, counts = jax.tree.map(lambda x: x * number, shares)
        alpha = server.share / jnp.maximum(server.counts.mean(0), 1)
        beta = jnp.sum(alpha * counts)
        weights = alpha * number / jnp.maximum(beta, 1e-30)  # 0: no domain has a share
        end, metrics = train(key, server.variables, client, weights=weights)
        change = collections.change(end, server.variables)
        sums = change["batch_stats"], jnp.float32(1), loss, counts
        update, own = {"params": change["params"]}, collections.own(end)
        return ClientOutput(update, beta, personal, metrics, local=own, sums=sums)

    def server_update(server, result):
        stats, clients, loss, counts = result.sums
        mean = {**result.aggregate, "batch_stats": trees.divided(stats, clients)}
        mean_loss = loss / jnp.maximum(counts, 1)
        share = jax.nn.softmax(jnp.log(server.share) + domain_rate * mean_loss)
        counts = jnp.concatenate([server.counts[1:], counts[None]])
        return Server(trees.added(server.variables, mean), share, counts)

    def init(variables):
        counts = jnp.ones((window, num_classes))
        return Server(variables, counts[0] / num_classes, counts)

    return fedavg(local)._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
    )
