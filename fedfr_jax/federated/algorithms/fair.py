"""Fair averaging, by the clients' losses of the received model: q-FedAvg and AFL."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.aux_loss import as_aux_loss, example_losses
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training, check_rate, learning_rate_at
from fedfr_jax.federated.variable_split import client_output, whole_variables
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import checked, is_traced
from fedfr_jax.types import Algorithm, LocalTraining, PyTree

TINY = 1e-10


def params_alone(output, *sums):
    """Output that sends params as its update; statistics are averaged plainly."""
    stats, params = output.update["batch_stats"], output.update["params"]
    sums = stats, jnp.float32(1), *sums
    return output._replace(update={"params": params}, sums=sums)


@checked
def qfedavg(local: LocalTraining, *, q: NonNegative) -> Algorithm:
    """q-FedAvg: fair federated averaging, weighted by loss.

    Li et al. 2020, "Fair resource allocation in federated learning", arXiv:1905.10497,
    algorithm 2: w+ = w - sum F_k^q Delta_k / sum h_k with Delta_k = L (w - w_k) and
    h_k = q F_k^(q-1) ||Delta_k||^2 + L F_k^q, F_k the loss of the received model over
    all of the client's examples. Deviations: 1e-10 is added to F_k, as in the authors'
    code; running statistics are averaged with equal weights.

    Args:
      local: with a loss that is a mean over the batch's valid examples; 1 / L is its
        learning rate in a round's first step, which must be positive.
      q: larger is fairer; 0 is FedAvg with equal weights.
    """
    check_rate(local)
    assert (rate := local.learning_rate) is not None
    first = rate(jnp.int32(0), jnp.int32(0)) if callable(rate) else rate
    if not is_traced(first) and not first > 0:
        raise ValueError(f"learning_rate must be positive in qfedavg, got {first}.")
    base, train = fedavg(local), build_local_training(local)
    loss_fn = as_aux_loss(local.loss)

    def client_update(key, server, personal, client):
        start = server.variables
        received = whole_variables(start)
        loss_of = lambda batch: loss_fn(received, batch, key)[0]
        loss = over_examples(loss_of, client) + TINY
        end, metrics = train(key, start, client)
        weight = loss**q
        metrics = {**metrics, "initial_loss": loss}
        output = client_output(start, end, weight, personal, metrics)
        smoothness = 1 / learning_rate_at(local, client, jnp.int32(0))
        gradient = optax.tree.scale(smoothness, output.update["params"])
        length = jnp.asarray(optax.tree.norm(gradient, squared=True)).astype(loss.dtype)
        bound = q * loss ** (q - 1) * length + smoothness * weight
        return params_alone(output, smoothness * weight, bound)

    def server_update(server, result):
        stats, count, weights, bound = result.sums
        params = optax.tree.scale(weights / bound, result.aggregate["params"])
        mean = {"params": params, "batch_stats": trees.divide(stats, count)}
        return base.server_update(server, result._replace(aggregate=mean))

    return base._replace(client_update=client_update, server_update=server_update)


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
    """AFL: agnostic federated averaging, for the worst mixture of domains.

    Ro et al. 2021, arXiv:2104.02748, algorithm 1, after Mohri et al. 2019,
    arXiv:1902.00146. With a_i = l_i / N_i, N_i being the mean number of examples of
    domain i in a round's cohort over the last rounds, client k minimizes sum_j a_d(j)
    loss_j / b_k with b_k = sum_i a_i n_ki, counts b_k, and sends the mean loss of the
    received model in every domain, L_i; then l_i <- l_i exp(rate L_i), normalized.
    Before the first round l_i = 1 / D and N_i = 1. Deviations: a batch's loss is scaled
    to the client's size, so that it is an estimate of the objective (fedjax adds up the
    batch); a domain counts as at least one example; running statistics are averaged
    plainly.

    Args:
      local: with a loss that is a mean over the batch's valid examples.
      num_classes: D; the domains are the classes unless `domain_of` is given.
      domain_learning_rate: of the domains' shares.
      domain_window_size: W, rounds over which domains are counted.
      domain_of: batch -> [B] int32 domain of each example, in [0, D).
    """
    domain_of = domain_of or (lambda batch: batch.labels)
    loss_fn = as_aux_loss(local.loss)

    def weighted_loss(variables, batch, key, *, weights):
        """Mean loss of a batch with examples weighted by their domain's weights [D]."""
        losses = example_losses(loss_fn, variables, batch, key)
        values = jnp.where(batch.is_valid, losses * weights[domain_of(batch)], 0)
        mean = values.sum() / jnp.maximum(batch.is_valid.sum(), 1).astype(values.dtype)
        return mean, loss_fn(variables, batch, key)[1]

    def by_domain(variables, batch, key):
        """Sums of losses [D] and of examples [D] by domain, over the batch size."""
        domains = jnp.arange(num_classes, dtype=jnp.int32)
        is_in_domain = domain_of(batch)[:, None] == domains[None]
        is_in_domain &= batch.is_valid[:, None]
        losses = example_losses(loss_fn, variables, batch, key)
        totals = jnp.where(is_in_domain, losses[:, None], 0).sum(0), is_in_domain.sum(0)
        size = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
        return jax.tree.map(lambda x: x.astype(losses.dtype) / size, totals)

    train = build_local_training(local._replace(loss=weighted_loss))

    def client_update(key, server, personal, client):
        start = server.variables
        received = whole_variables(start)
        shares = over_examples(lambda batch: by_domain(received, batch, key), client)
        number = client.num_examples.astype(shares[1].dtype)
        loss, counts = jax.tree.map(lambda x: x * number, shares)
        alpha = server.share / jnp.maximum(server.counts.mean(0), 1)
        beta = jnp.sum(alpha * counts)
        weights = alpha * number / jnp.maximum(beta, 1e-30)  # 0: no domain has a share
        end, metrics = train(key, start, client, weights=weights)
        output = client_output(start, end, beta, personal, metrics)
        return params_alone(output, loss, counts)

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
        init=init, client_update=client_update, server_update=server_update
    )
