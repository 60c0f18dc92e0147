"""FedReID's algorithms: weights by change of outputs, distillation on public images.

Zhuang et al. 2020, arXiv:2008.11560, and 2022, "Optimizing Performance of Federated
Person Re-identification", arXiv:2205.12144. Public images are what the server and every
client have. They are passed to a round in `Prepared.shared`, so that they are not
constants of the compiled program. Their order and augmentation are a function of (seed,
round, step): in a round all networks see the same batches.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax import trees
from fedfr_jax.convolutions import fast
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.permutation import permute
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import build_local_training, sgd
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.ranges import BelowOne, Count, NonNegative
from fedfr_jax.scanned_blocks import unstack_like
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, Client, LocalTraining, Model, PyTree

DistanceWeighting = Literal["distance", "num_examples", "uniform"] | Callable
# Weight of an example, which matters only if all distances are 0.
FALLBACK = 1e-20
TINY = 1e-8  # least length of a row of logits or features


def unit_rows(x: jax.Array) -> jax.Array:
    """Rows of x [B, D] at unit length; 0 stays."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), TINY)


def cosine_distance(before: jax.Array, after: jax.Array) -> jax.Array:
    """Cosine distance 1 - cos between rows of [B, M] arrays, [B]; 0 for equal rows."""
    # Half the squared chord: 1 - cos itself is rounding where rows hardly differ.
    return jnp.square(unit_rows(before) - unit_rows(after)).sum(axis=1) / 2


def training_weight(weighting: DistanceWeighting, model: Model) -> Callable:
    """Build (start, end, client) -> weight [], by distance or by `weight_of`.

    The distance of a client's logits before and after its training, of its first batch,
    by networks in evaluation mode.
    """
    if weighting != "distance":
        weight = weight_of(weighting)
        return lambda start, end, client: weight(client)

    def distance(start: PyTree, end: PyTree, client: Client):
        batch = client.batch(jnp.int32(0))

        def logits(variables):
            network = variable_split.whole_variables(variables)
            outputs, _ = fast(model.apply)(network, batch.model_inputs, False)
            number = jnp.arange(outputs.shape[1], dtype=jnp.int32)
            return jnp.where((number < client.num_classes)[None], outputs, 0)

        apart = cosine_distance(logits(start), logits(end))
        weight = masked_mean(apart, batch.is_valid)
        return weight + FALLBACK * client.num_examples.astype(weight.dtype)

    return distance


def cdw(local: LocalTraining, *, model: Model) -> Algorithm:
    """Cosine distance weight: FedAvg weighted by the change of a client's logits.

    arXiv:2205.12144, equations 1 and 2:

      d_k = 1 - cos(g_k, g_k'),  p_k = d_k / sum_i d_i,  w+ = sum_k p_k w_k

    where g_k are logits of one batch by the received network with the client's own
    classifier, and g_k' those after training. As in the released code d_k is the mean
    over rows of the client's first batch. Deviations: the networks are in evaluation
    mode (in the released code dropout makes d_k noisy), and if no client's logits
    change, clients count by their examples.

    Args:
      model: its `apply` gives logits.
    """
    base, train = fedavg(local), build_local_training(local)
    weight = training_weight("distance", model)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = train(key, start, client)
        share = weight(start, end, client)
        metrics = {**metrics, "cosine_distance": share}
        return variable_split.client_output(start, end, share, personal, metrics)

    return base._replace(client_update=client_update)


class PublicImages(NamedTuple):
    """The images, and how batches are made of them."""

    images: np.ndarray  # [G, H, W, C] as stored, on the host
    batching: Batching  # its batch size is b
    seed: int = 0

    @property
    def num_batches(self) -> int:
        """Number of batches in a pass; the last one is padded from the start."""
        return -(-len(self.images) // self.batching.batch_size)

    def batch(self, images, round, step) -> tuple[jax.Array, jax.Array]:
        """Batch of a step: (augmented images [b, H, W, C], whether each is valid [b]).

        Args:
          images: [G, H, W, C] on the device.
          round, step: [] int32, the step in [0, S).
        """
        key = jax.random.fold_in(jax.random.key(self.seed), round)
        order_key, augment_key = jax.random.split(key)
        word = jax.random.bits(order_key, dtype=jnp.uint32)
        images = jnp.asarray(images)
        count = len(images)
        number = jnp.arange(self.batching.batch_size, dtype=jnp.int32)
        place = step * self.batching.batch_size + number
        row = permute(word, jax.lax.rem(place, jnp.int32(count)), jnp.int32(count))
        stored = {"image": images[row]}, {"label": jnp.zeros_like(row)}
        inputs, _, _ = self.batching.augment_batch(augment_key, step, number, *stored)
        return inputs["image"], place < count

    def prepare(self, server, context):
        """Pass the images to the clients of a round, as `Algorithm.prepare`."""
        del server
        return empty_prepared(len(context.cohort.ids))._replace(shared=self.images)


def features_of_images(
    model: Model, shared: PublicImages, *, normalize: bool = False
) -> Callable:
    """Build (variables, images [G, H, W, C], round, step) -> features [b, D].

    Args:
      normalize: features at unit length.
    """
    look = fast(model.features)

    def features(variables: PyTree, images, round, step):
        x, _ = shared.batch(images, round, step)
        _, values, _ = look(variables, x, False)
        return unit_rows(values) if normalize else values

    return features


def feature_distance(student: jax.Array, target: jax.Array, is_valid: jax.Array):
    """Mean squared difference [] of student and target [b, D] over valid rows [b]."""
    return masked_mean(jnp.square(student - target).mean(axis=1), is_valid)


def build_distillation(
    model: Model, shared: PublicImages, optimizer: optax.GradientTransformation
) -> Callable:
    """Build the SGD pass that fits a model's features to the targets, in training mode.

    Returns:
      learn(variables, images [G, H, W, C], targets [S, b, D], round) -> variables, of
      which leaves that stay with clients may be missing.
    """

    def fill(variables):
        """Fill missing leaves of variables by 0: those of the last layer."""
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return {
            name: trees.join(part, unstack_like(zeros[name], part))
            for name, part in variables.items()
        }

    def loss_of(params, stats, images, target, round, step):
        x, is_valid = shared.batch(images, round, step)
        key = jax.random.fold_in(jax.random.key(shared.seed + 1), round)
        network = fill({"params": params, "batch_stats": stats})
        step_key = jax.random.fold_in(key, step)
        run = fast(model.features)
        _, features, moved = run(network, x, True, key=step_key)
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

        whole = variable_split.whole_variables(variables)
        params = whole["params"]
        first = params, whole["batch_stats"], optimizer.init(params)
        params, stats, _ = jax.lax.fori_loop(0, shared.num_batches, body, first)
        learned = {**whole, "params": params, "batch_stats": stats}
        return variable_split.split_paths(learned, variables)

    return learn


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
    weighting: DistanceWeighting = "num_examples",
) -> Algorithm:
    """FedAvg; then the server distills from its clients' mean features.

    arXiv:2205.12144, algorithm 3. What is learned from is not said there; this is the
    released code: the mean over clients of their networks' features, at unit length or
    as they are, by mean squared error, in one pass of SGD over the shared images. The
    features of a round's clients are summed as they end, so no two clients' networks
    are in memory at once. The pass refreshes running statistics, but where every client
    keeps its own. Deviation: teachers run in evaluation mode, where the released code
    leaves their dropout on.

    Args:
      model: with `features`, of [b, D].
      shared: the images.
      distill_every: rounds between distillations, the first after so many.
      normalize: targets are means of features at unit length; the server's are not.
      distill_learning_rate, distill_momentum, distill_weight_decay: of the server's
        SGD, with Nesterov's momentum.
      weighting: distance, see `cdw`, or as of `fedavg`.
    """
    base, train = fedavg(local), build_local_training(local)
    weight = training_weight(weighting, model)
    look = features_of_images(model, shared, normalize=normalize)
    is_due = lambda round: jax.lax.rem(round + 1, jnp.int32(distill_every)) == 0
    optimizer = sgd(
        momentum=distill_momentum, weight_decay=distill_weight_decay, nesterov=True
    )(distill_learning_rate)
    learn = build_distillation(model, shared, optimizer)

    def taught(end, client):
        """Features [S, b, D] of a client's model; zeros without distillation."""

        def all_steps():
            network = variable_split.whole_variables(end)
            see = lambda step: look(network, client.shared, client.round, step)
            return jax.lax.map(see, jnp.arange(shared.num_batches, dtype=jnp.int32))

        shapes = jax.eval_shape(all_steps)
        nothing = lambda: jnp.zeros(shapes.shape, shapes.dtype)
        return jax.lax.cond(is_due(client.round), all_steps, nothing)

    def client_update(key, server, personal, client):
        start = server.variables
        end, metrics = train(key, start, client)
        features = taught(end, client)
        sums = features, jnp.ones((), features.dtype)
        share = weight(start, end, client)
        return variable_split.client_output(
            start, end, share, personal, metrics, sums=sums
        )

    def server_update(server, result):
        features, number = result.sums
        target, server = features / number, base.server_update(server, result)
        start = server.variables
        if result.personal_variables:
            start = variable_split.with_personal(start, result.personal_variables)
        learned = lambda: learn(start, result.shared, target, result.round)
        variables = jax.lax.cond(is_due(result.round), learned, lambda: start)
        return server._replace(variables=variables)

    return base._replace(
        client_update=client_update,
        server_update=server_update,
        prepare=shared.prepare,
        prepare_is_local=True,
        needs=("equal_features",),
    )
