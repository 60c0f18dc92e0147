"""AFL: agnostic federated averaging, for the worst mixture of domains.

Ro et al. 2021, arXiv:2104.02748, algorithm 1, after Mohri et al. 2019,
arXiv:1902.00146. With a_i = l_i / N_i, N_i being the mean number of examples of domain
i in a round's cohort over the last rounds, client k minimizes sum_j a_d(j) loss_j / b_k
with b_k = sum_i a_i n_ki, counts b_k, and sends the mean loss of the received model in
every domain, L_i; then l_i <- l_i exp(rate L_i), normalized. Before the first round
l_i = 1 / D and N_i = 1. Deviations: a batch's loss is scaled to the client's size, so
that it is an estimate of the objective (fedjax adds up the batch); a domain counts as
at least one example; running statistics are averaged plainly.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import (
    Algorithm,
    LocalTraining,
    PyTree,
    as_aux_loss,
    example_losses,
)


def weight_by_domain(loss_fn: Callable, domain_of: Callable) -> Callable:
    """Mean loss of a batch with examples weighted by their domain's `weights` [D].

    Args:
      loss_fn: (variables, batch, key) -> (mean over the valid examples, aux).
      domain_of: batch -> [B] int32 in [0, D).
    """

    def loss(variables, batch, key, *, weights):
        losses = example_losses(loss_fn, variables, batch, key)
        values = jnp.where(batch.is_valid, losses * weights[domain_of(batch)], 0)
        mean = values.sum() / jnp.maximum(batch.is_valid.sum(), 1).astype(values.dtype)
        return mean, loss_fn(variables, batch, key)[1]

    return loss


def losses_by_domain(
    loss_fn: Callable, domain_of: Callable, num_domains: int
) -> Callable:
    """Sum of losses [D] and number of examples [D] by domain, over the batch size."""

    def sums(variables, batch, key):
        domains = jnp.arange(num_domains, dtype=jnp.int32)
        is_in_domain = domain_of(batch)[:, None] == domains[None]
        is_in_domain &= batch.is_valid[:, None]
        losses = example_losses(loss_fn, variables, batch, key)
        totals = jnp.where(is_in_domain, losses[:, None], 0).sum(0), is_in_domain.sum(0)
        size = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
        return jax.tree.map(lambda x: x.astype(losses.dtype) / size, totals)

    return sums


class Server(NamedTuple):
    """Global variables, domain weights and counts of the D domains."""

    variables: PyTree
    share: jax.Array  # [D] l, sums to 1
    counts: jax.Array  # [W, D] examples in the cohorts of the last W rounds


@checked
def afl(
    local: LocalTraining,
    *,
    num_classes: Count,
    domain_learning_rate: NonNegative = 0.1,
    domain_window_size: Count = 1,
    domain_of: Callable | None = None,
) -> Algorithm:
    """Agnostic federated averaging.

    Args:
      local: with a loss that is a mean over the batch's valid examples.
      num_classes: D >= 1; the domains are the classes unless `domain_of` is given.
      domain_learning_rate: of the domains' shares, >= 0.
      domain_window_size: W >= 1, rounds over which domains are counted.
      domain_of: batch -> [B] int32 domain of each example, in [0, D).
    """
    domain_of = domain_of or (lambda batch: batch.labels)
    loss_fn = as_aux_loss(local.loss)
    train = build_local_training(
        local._replace(loss=weight_by_domain(loss_fn, domain_of))
    )
    domain_losses = losses_by_domain(loss_fn, domain_of, num_classes)

    def client_update(key, server, personal, client):
        received = variable_split.merge_personal_variables(server.variables)
        shares = over_examples(lambda b: domain_losses(received, b, key), client)
        number = client.num_examples.astype(shares[1].dtype)
        loss, counts = jax.tree.map(lambda x: x * number, shares)
        alpha = server.share / jnp.maximum(server.counts.mean(0), 1)
        beta = jnp.sum(alpha * counts)
        weights = alpha * number / jnp.maximum(beta, 1e-30)  # 0: no domain has a share
        end, metrics = train(key, server.variables, client, weights=weights)
        output = variable_split.client_output(
            server.variables, end, beta, personal, metrics
        )
        stats, update = output.update["batch_stats"], output.update["params"]
        sums = stats, jnp.float32(1), loss, counts
        return output._replace(update={"params": update}, sums=sums)

    def server_update(server, result):
        stats, clients, loss, counts = result.sums
        mean = {**result.aggregate, "batch_stats": trees.divide(stats, clients)}
        mean_loss = loss / jnp.maximum(counts, 1)
        share = jax.nn.softmax(jnp.log(server.share) + domain_learning_rate * mean_loss)
        counts = jnp.concatenate([server.counts[1:], counts[None]])
        return Server(trees.add(server.variables, mean), share, counts)

    def init(variables):
        counts = jnp.ones((domain_window_size, num_classes))
        return Server(variables, counts[0] / num_classes, counts)

    return fedavg(local)._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
    )
