"""Knowledge distillation on public images, after averaging.

Zhuang et al. 2020, arXiv:2008.11560, and 2022, arXiv:2205.12144, algorithm 3. What is
learned from is not said there; this is the released code: the mean over clients of
their networks' features, at unit length or as they are, by mean squared error, in one
pass of SGD over the shared images. The features of a round's clients are summed as they
end, so no two clients' networks are held at once. The pass refreshes running
statistics, but where every client keeps its own. Deviation: teachers run in evaluation
mode unless asked, where the released code leaves their dropout on.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.cdw import training_weight
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.public_data import (
    PublicImages,
    check_public_images,
    features_of_images,
)
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import build_local_training, sgd
from fedfr_jax.ranges import BelowOne, Count, NonNegative
from fedfr_jax.scanned_blocks import unstack_like
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, Model, PyTree


def feature_distance(student: jax.Array, target: jax.Array, is_valid: jax.Array):
    """Mean squared difference [] of student and target [b, D] over valid rows [b]."""
    squares = jnp.square(student - target).mean(axis=1)
    count = jnp.maximum(is_valid.sum(), 1).astype(squares.dtype)
    return jnp.where(is_valid, squares, 0).sum() / count


def build_distillation(
    model: Model, shared: PublicImages, optimizer: optax.GradientTransformation
) -> Callable:
    """Build the SGD pass that fits a model's features to the targets, in training mode.

    Returns:
      learn(variables, images [G, H, W, C], targets [S, b, D], round) -> variables, of
      which leaves that stay with clients may be missing.
    """

    def loss_of(params, stats, images, target, round, step):
        x, is_valid = shared.batch(images, round, step)
        key = jax.random.fold_in(jax.random.key(shared.seed + 1), round)
        network = fill_features(model, {"params": params, "batch_stats": stats})
        step_key = jax.random.fold_in(key, step)
        _, features, moved = model.apply_with_features(network, x, True, key=step_key)
        value = feature_distance(features, target, is_valid)
        return value, variable_split.select_like(stats, moved)

    gradient = jax.grad(loss_of, has_aux=True)

    def learn(variables: PyTree, images, targets, round) -> PyTree:
        def body(step, carry):
            params, stats, opt_state = carry
            inputs = images, targets[step], round, step
            grads, stats = gradient(params, stats, *inputs)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), stats, opt_state

        whole = variable_split.merge_personal_variables(variables)
        params = whole["params"]
        first = params, whole["batch_stats"], optimizer.init(params)
        params, stats, _ = jax.lax.fori_loop(0, shared.num_batches, body, first)
        learned = {**whole, "params": params, "batch_stats": stats}
        return variable_split.split_paths(learned, variables)

    return learn


def fill_features(model: Model, variables: PyTree) -> PyTree:
    """Fill missing leaves of variables by 0: those of the last layer."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return {
        name: variable_split.join(part, unstack_like(zeros[name], part))
        for name, part in variables.items()
    }


@checked
def kd(
    local: LocalTraining,
    *,
    model: Model,
    shared: PublicImages,
    distill_every: Count = 10,
    normalize: bool = True,
    distill_learning_rate: NonNegative = 5e-4,
    distill_momentum: BelowOne = 0.9,
    distill_weight_decay: NonNegative = 5e-4,
    weighting: Literal["distance", "num_examples", "uniform"]
    | Callable = "num_examples",
    train_mode: bool = False,
) -> Algorithm:
    """FedAvg; then the server distills from its clients' mean features.

    Args:
      model: with `features`, of [b, D].
      shared: the images.
      distill_every: rounds between distillations, the first after so many.
      normalize: targets are means of features at unit length; the server's are not.
      distill_learning_rate, distill_momentum, distill_weight_decay: of the server's
      SGD, with Nesterov's momentum.
      weighting: distance, see `cdw`, or as of `fedavg`.
      train_mode: teachers, and networks that are weighed, run as in training.
    """
    check_public_images(model, shared)
    base, train = fedavg(local), build_local_training(local)
    weight = training_weight(weighting, model, train_mode)
    look = features_of_images(model, shared, train_mode=train_mode, normalize=normalize)
    is_due = lambda round: jax.lax.rem(round + 1, jnp.int32(distill_every)) == 0
    optimizer = sgd(
        momentum=distill_momentum, weight_decay=distill_weight_decay, nesterov=True
    )(distill_learning_rate)
    learn = build_distillation(model, shared, optimizer)

    def prepare(server, context):
        del server
        return empty_prepared(len(context.cohort.ids))._replace(shared=shared.images)

    def taught(key, end, client):
        """Features [S, b, D] of a client's model; zeros without distillation."""

        def all_steps():
            number = jnp.arange(shared.num_batches, dtype=jnp.int32)
            network = variable_split.merge_personal_variables(end)
            inputs = network, client.shared, client.round
            return jax.lax.map(lambda i: look(*inputs, i, key), number)

        shapes = jax.eval_shape(all_steps)
        nothing = lambda: jnp.zeros(shapes.shape, shapes.dtype)
        return jax.lax.cond(is_due(client.round), all_steps, nothing)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = train(key, start, client)
        weight_key, teach_key = (jax.random.fold_in(key, i) for i in (1, 2))
        share = weight(weight_key, start, end, client)
        features = taught(teach_key, end, client)
        sums = features, jnp.ones((), features.dtype)
        return variable_split.client_output(
            start, end, share, personal, metrics, sums=sums
        )

    def server_update(server, result):
        features, number = result.sums
        target, server = features / number, base.server_update(server, result)
        start = server.variables
        if result.personal_variables:
            start = variable_split.merge_personal(start, result.personal_variables)
        learned = lambda: learn(start, result.shared, target, result.round)
        variables = jax.lax.cond(is_due(result.round), learned, lambda: start)
        return server._replace(variables=variables)

    return base._replace(
        client_update=client_update,
        server_update=server_update,
        prepare=prepare,
        prepare_is_local=True,
        needs=() if train_mode else ("equal_features",),
    )
