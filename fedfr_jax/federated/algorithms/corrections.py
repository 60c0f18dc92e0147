"""Corrected gradients: SCAFFOLD, FedDANE, Mime and MimeLite.

Clients step along their gradient plus a direction that the server gives them. It enters
as a linear term of the loss without a value: the loss that is reported stays that of
the examples. Leaves that stay with a client, which the direction lacks, are not pushed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting, uniform, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.proximal import proximal
from fedfr_jax.federated.dataset_means import build_dataset_mean, over_examples
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import build_local_training, check_rate, total_rate
from fedfr_jax.federated.model_parallel import unshard
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.ranges import BelowOne, Count, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


def shared_gradient(local: LocalTraining) -> Callable:
    """Build (variables, batch, key) -> gradient of the loss for the shared params."""
    loss_fn = as_aux_loss(local.loss)

    def gradient(variables, batch, key):
        def loss(params):
            moved = {**variables, "params": params}
            whole = variable_split.whole_variables(moved)
            return loss_fn(unshard(whole), batch, key)[0]

        return jax.grad(loss)(variables["params"])

    return gradient


def client_gradient(gradient: Callable, variables: PyTree, key, client) -> PyTree:
    """Mean of a `shared_gradient` over all examples of a client."""
    return over_examples(lambda batch: gradient(variables, batch, key), client)


def prepare_gradient(local: LocalTraining) -> Callable:
    """Build an `Algorithm.prepare` that broadcasts the cohort's mean gradient."""
    gradient = shared_gradient(local)
    # Compiled once for each feed and mesh.
    build = functools.cache(functools.partial(build_dataset_mean, gradient))

    def prepare(server, context):
        cohort, run = context.cohort, build(context.batching, context.mesh)
        mean = run(server.variables, context.dataset, context.population, cohort)
        return empty_prepared(len(cohort.ids))._replace(shared=mean)

    return prepare


def with_correction(local: LocalTraining) -> LocalTraining:
    """Add `correction`, a keyword of the loss like shared params, to the gradient."""
    loss_fn = as_aux_loss(local.loss)

    def loss_plus(variables, batch, key, *, correction, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = variable_split.select_like(correction, variables["params"])
        return loss + _slope(correction, params).astype(loss.dtype), aux

    return local._replace(loss=loss_plus)


def minus_anchor(local: LocalTraining) -> LocalTraining:
    """Subtract the batch's gradient at `anchor`: Mime's variance reduction.

    `anchor`, a keyword of the loss, is like the shared params. The gradient is of the
    same batch under the same key, and is constant.
    """
    loss_fn, gradient = as_aux_loss(local.loss), shared_gradient(local)

    def loss_less(variables, batch, key, *, anchor, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        personal = variable_split.drop_like(anchor, variables["params"])
        start = {**variables, "params": trees.join(anchor, personal)}
        at_anchor = jax.lax.stop_gradient(gradient(start, batch, key))
        at_anchor = variable_split.select_like(anchor, at_anchor)
        params = variable_split.select_like(anchor, variables["params"])
        return loss - _slope(at_anchor, params).astype(loss.dtype), aux

    return local._replace(loss=loss_less)


def _slope(direction, params) -> jax.Array:
    """Return 0 with gradient `direction` with respect to `params`."""
    product = jnp.asarray(optax.tree.vdot(direction, params))
    return product - jax.lax.stop_gradient(product)


@checked
def feddane(
    local: LocalTraining, *, mu: NonNegative, weighting: Weighting = "num_examples"
) -> Algorithm:
    """FedDANE: proximal training, corrected to the cohort's gradient.

    Li et al. 2019, arXiv:2001.01920, algorithm 2: clients minimize F_k(y) + <g - grad
    F_k(w), y> + mu / 2 ||y - w||^2 with g the mean of the cohort's gradients at w.
    Deviations: both phases see the same clients and g is weighted by examples, as in
    the authors' code; g comes from one pass over all of the cohort's examples. It is a
    sum over devices before the round: its last bits depend on their number.

    Args:
      local: with a loss that is a mean over the batch's valid examples.
      weighting: see `fedavg`.
    """
    fit = build_local_training(with_correction(proximal(local, mu)))
    gradient = shared_gradient(local)

    def train(key, variables, client):
        own = client_gradient(gradient, variables, key, client)
        correction = jax.tree.map(jnp.subtract, client.shared, own)
        anchor = variables["params"]
        return fit(key, variables, client, anchor=anchor, correction=correction)

    return fedavg(train, weighting=weighting)._replace(
        prepare=prepare_gradient(local), needs=("server_classifier",)
    )


class Server(NamedTuple):
    """Global variables, and what clients step along besides their gradients."""

    variables: PyTree
    direction: PyTree  # SCAFFOLD's control variate c, Mime's momentum m; like params


def directed(
    local: LocalTraining, client_update: Callable, new_direction: Callable, rate: float
) -> Algorithm:
    """Build an algorithm whose clients send (update, their part of the direction).

    Args:
      new_direction: (direction, mean of the parts, result) -> direction.
      rate: of the server, on params; running statistics are averaged plainly.
    """

    def init(variables):
        return Server(variables, optax.tree.zeros_like(variables["params"]))

    def server_update(server, result):
        change, part = result.aggregate
        params = optax.tree.scale(rate, change["params"])
        variables = trees.add(server.variables, {**change, "params": params})
        return Server(variables, new_direction(server.direction, part, result))

    def update_like(server):
        return variable_split.shared(server.variables), server.direction

    return fedavg(local)._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
        update_like=update_like,
    )


@checked
def scaffold(
    local: LocalTraining, *, num_clients: Count, server_learning_rate: NonNegative = 1.0
) -> Algorithm:
    """SCAFFOLD: control variates against client drift; clients have equal weight.

    Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1 with option II: the
    correction is c - c_k. Deviation: under a learning rate that changes within a round,
    tau_k eta is the sum of the rates.

    Args:
      local: plain SGD, which the method is defined for: momentum would make the control
        more than the mean gradient.
      num_clients: N; the server's control moves by K / N of the mean gain.
      server_learning_rate: eta_g, on params.
    """
    check_rate(local)
    train = build_local_training(with_correction(local))

    def client_update(key, server, control, client):
        start = server.variables
        correction = jax.tree.map(jnp.subtract, server.direction, control)
        end, metrics = train(key, start, client, correction=correction)
        output = client_output(start, end, uniform(client), control, metrics)
        travel = total_rate(local, client)

        def gain_of(moved, mean_control):  # c_k+ - c_k; none for who took no step
            gradient = -moved / jnp.where(travel > 0, travel, 1).astype(moved.dtype)
            return jnp.where(travel > 0, gradient - mean_control, 0)

        gain = jax.tree.map(gain_of, output.update["params"], server.direction)
        control = jax.tree.map(jnp.add, control, gain)
        return output._replace(update=(output.update, gain), personal=control)

    def new_control(control, gain, result):
        share = result.num_received / num_clients
        move = lambda c, g: c + share * g.astype(c.dtype)
        return jax.tree.map(move, control, gain)

    return directed(local, client_update, new_control, server_learning_rate)._replace(
        init_personal=lambda key, server: optax.tree.zeros_like(server.direction),
        built_for=(("scaffold", num_clients),),
    )


@checked
def mimelite(
    local: LocalTraining,
    *,
    server_momentum: BelowOne = 0.9,
    server_learning_rate: NonNegative = 1.0,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """MimeLite: clients step with the server's momentum.

    Karimireddy et al. 2020, arXiv:2008.03606, algorithm 1 with heavy-ball momentum:
    y <- y - eta (grad F(y; B) + b m), and after the round m <- G + b m with G = sum p_k
    grad F_k(w). The momentum is not normalized, as in fedjax; the paper's has (1 - b) g
    + b m.

    Args:
      local: plain SGD, with a loss that is a mean over the batch's valid examples.
      server_momentum: b.
      server_learning_rate: eta_s, on params.
      weighting: see `fedavg`.
    """
    train = build_local_training(with_correction(local))

    def push(key, server, client):
        correction = optax.tree.scale(server_momentum, server.direction)
        return train(key, server.variables, client, correction=correction)

    return build_mime(push, local, server_momentum, server_learning_rate, weighting)


@checked
def mime(
    local: LocalTraining,
    *,
    server_momentum: BelowOne = 0.9,
    server_learning_rate: NonNegative = 1.0,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Mime: `mimelite` with gradients corrected to the cohort's, same arguments.

    Clients step along grad F(y; B) - grad F(w; B) + G + b m. G comes from a pass over
    the cohort's examples before the round, whose sums depend on the number of devices.
    """
    train = build_local_training(with_correction(minus_anchor(local)))

    def push(key, server, client):
        start = server.variables
        add = lambda g, m: g + server_momentum * m.astype(g.dtype)
        correction = jax.tree.map(add, client.shared, server.direction)
        fixed = {"correction": correction, "anchor": start["params"]}
        return train(key, start, client, **fixed)

    return build_mime(
        push, local, server_momentum, server_learning_rate, weighting
    )._replace(prepare=prepare_gradient(local), needs=("server_classifier",))


def build_mime(push, local, momentum, rate, weighting) -> Algorithm:
    """Build Mime or MimeLite; `push(key, server, client)` trains a client."""
    gradient, weight = shared_gradient(local), weight_of(weighting)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = push(key, server, client)
        own = client_gradient(gradient, start, key, client)
        output = client_output(start, end, weight(client), personal, metrics)
        return output._replace(update=(output.update, own))

    def new_momentum(momentum_now, mean, result):
        del result
        move = lambda m, g: g.astype(m.dtype) + momentum * m
        return jax.tree.map(move, momentum_now, mean)

    return directed(local, client_update, new_momentum, rate)
