"""Classification: any algorithm, all methods from the same initial model.

Evaluated generic: one network on all test images. Personalized: each client's network
on the client's test images; the mean is over clients, whatever their sizes, as FedPer
plots it (Arivazhagan et al. 2019, arXiv:1912.00818, section 4), beside its deviation.
"""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import (
    PARTITIONS,
    ClientPartition,
    class_report,
    format_class_report,
)
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.inference import build_client_sums, build_embed
from fedfr_jax.federated.local import trainable
from fedfr_jax.losses.margin import normalize
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import BatchSize, BelowOne, Cosine, Count, Pattern, Share, Whole
from fedfr_jax.schema import checked, naming
from fedfr_jax.tasks.data import (
    PartitionReader,
    build_dataset,
    build_population,
    client_batching,
    data_usage,
    open_data,
    split_classes,
)
from fedfr_jax.tasks.evaluators import (
    RepresentationConfig,
    build_finetuned_models,
    build_finetuning,
    check_one_process,
    over_clients,
    with_target,
)
from fedfr_jax.tasks.experiment import Config, Opened, TaskSpec
from fedfr_jax.tasks.methods import (
    CLASS_KEYS,
    LOCAL,
    OFFERS,
    AlgorithmReader,
    LossReader,
    Method,
    MethodReader,
)
from fedfr_jax.tasks.model import (
    ClassifierConfig,
    StartConfig,
    build_network,
    initialized,
)
from fedfr_jax.tasks.trainers import (
    Facts,
    build_local,
    network_facts,
    plain_method,
)
from fedfr_jax.types import (
    Batch,
    Dataset,
    Evaluation,
    Evaluator,
    Model,
    Preprocessing,
    PyTree,
    TrainedModels,
    is_image,
    model_inputs,
)


@checked
def cross_entropy(model: Model, *, label_smoothing: BelowOne = 0.0) -> Callable:
    """Softmax cross entropy over the batch's valid examples, as `LocalTraining.loss`.

    Args:
      model: gives logits [B, M].
      label_smoothing: share of every label that is spread over all classes, in [0, 1).
    """
    return mean_loss(model, partial(with_smoothing, label_smoothing=label_smoothing))


def mean_loss(model: Model, values_of: Callable) -> Callable:
    """Build a client's loss from values of examples.

    Args:
      values_of: (logits [B, M], labels [B]) -> [B].
    """

    def loss_fn(variables, batch, key):
        logits, stats = model.apply(variables, batch.model_inputs, True, key=key)
        value, accuracy = with_metrics(logits, batch, values_of)
        return value, (stats, {"accuracy": accuracy})

    return loss_fn


def with_smoothing(
    logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> jax.Array:
    """Cross-entropy [B] of logits [B, M]."""
    target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    target = optax.smooth_labels(target, label_smoothing)
    return optax.softmax_cross_entropy(logits, target)


def with_metrics(
    logits: jax.Array, batch: Batch, values_of: Callable = with_smoothing
) -> tuple[jax.Array, jax.Array]:
    """(mean loss [], accuracy []) of logits [B, M], in float32 or more."""
    if jnp.finfo(logits.dtype).bits < 32:
        logits = logits.astype(jnp.float32)
    values = values_of(logits, batch.labels)
    is_right = logits.argmax(axis=1) == batch.labels
    accuracy = masked_mean(is_right.astype(values.dtype), batch.is_valid)
    return masked_mean(values, batch.is_valid), accuracy


@checked
def class_pull(model: Model, *, target_cosine: Cosine = 0.9) -> Callable:
    """FedAwS's loss: pulls features to the class vector of their label.

    Args:
      model: its last block is a linear classifier, whose kernel [D, M] has the rows.
      target_cosine: cosine from which the loss is zero, in [-1, 1].

    Returns:
      loss(variables, batch, key) -> (mean [], (batch_stats, {"accuracy": []})).

    Raises:
      ValueError: when the network has no features, or ends in something else, such as
        a PyTorch module's [M, D].
    """
    features_fn, last = model.features, (model.blocks or ("",))[-1]
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    if "kernel" not in params.get(last, ()):
        name = (model.config or {}).get("name", "one of your own")
        raise ValueError(
            "config.model must end in a linear layer with a kernel [D, M] for this "
            f"algorithm, got {name}. Choose another config.model.name."
        )

    def loss_fn(variables, batch, key):
        inputs = batch.model_inputs
        logits, seen, stats = features_fn(variables, inputs, True, key=key)
        rows = variables["params"][last]["kernel"].T
        own = normalize(rows[batch.labels])
        cosine = jnp.sum(normalize(seen) * own, axis=-1)
        values = jnp.square(jax.nn.relu(target_cosine - cosine))
        accuracy = with_metrics(logits, batch)[1]
        value = masked_mean(values, batch.is_valid)
        return value, (stats, {"accuracy": accuracy})

    return loss_fn


class Accuracy:
    """Evaluator of accuracy; compiled once per model function.

    Args:
      table: the clients' test images, grouped, with their labels.
      offsets: [N + 1] of each client's among them.
      feed: how images are decoded; its batch size is per device.
    """

    def __init__(
        self, table: Dataset | Stream, offsets: np.ndarray, mesh: Mesh, feed: Batching
    ):
        self._table, self._offsets = place_examples(table, mesh), offsets
        self._labels, self._feed, self._mesh = np.asarray(table.labels), feed, mesh

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic and personalized."""
        return {
            "generic": Evaluator(self.generic),
            "personalized": Evaluator(self.personalized),
        }

    def generic(self, models: TrainedModels) -> Evaluation:
        """Evaluate the global model on all test images; empty without one."""
        if models.variables is None:
            return Evaluation()
        is_right = self._is_right(models.apply, models.variables, self._all())
        return Evaluation({"accuracy": float(is_right.mean())})

    def personalized(self, models: TrainedModels) -> Evaluation:
        """Evaluate every client's model on its test images; clients without any are
        skipped.
        """
        bounds = list(zip(self._offsets[:-1], self._offsets[1:], strict=True))
        if models.client_variables is None:
            right = self._is_right(models.apply, models.variables, self._all())
            num_right = np.array([right[low:high].sum() for low, high in bounds])
        else:
            count = _build_count(models.client_apply, self._feed, self._mesh)
            num_right = count(models.client_variables, self._table, self._offsets)
        sizes = np.diff(self._offsets).astype(float)
        accuracy = num_right / np.where(sizes > 0, sizes, np.nan)
        return over_clients(
            {"accuracy": accuracy}, "accuracy", ("std", "min", "max", "worst_decile")
        )

    def _all(self):
        return np.arange(len(self._labels))

    def _is_right(self, apply: Callable, variables: PyTree, rows: np.ndarray):
        """Whether each of table rows [n] is classified correctly, [n] bool."""
        predict = _build_predictions(apply, self._feed, self._mesh)
        predicted = predict(variables, self._table, rows.astype(np.int32))
        return meshes.fetch(predicted)[: len(rows), 0, 0] == self._labels[rows]


# Kept beyond an evaluator: `ff.evaluate` builds one at every call.
@functools.lru_cache(maxsize=8)
def _build_predictions(apply: Callable, feed: Batching, mesh: Mesh) -> Callable:
    """`build_embed` of the most likely class, [R', 1, 1]."""
    best = jax.jit(lambda v, x: apply(v, x).argmax(1, keepdims=True))
    return build_embed(best, feed, mesh)


@functools.lru_cache(maxsize=8)
def _build_count(apply: Callable, feed: Batching, mesh: Mesh) -> Callable:
    """`build_client_sums` of the examples that are classified correctly."""

    def count(variables, inputs, targets, is_valid):
        predicted = apply(variables, model_inputs(inputs)).argmax(axis=1)
        return jnp.sum(is_valid & (predicted == targets["label"]))

    return build_client_sums(jax.jit(count), feed, mesh)


@section
class FinetuneConfig(NamedTuple):
    """Keys of config.evaluation.finetune."""

    local: Annotated[Method, LOCAL, INLINE]
    epochs: Count = 1
    trainable: Pattern = ""

    def check(self) -> None:
        """Raise ValueError in a run whose processes have some clients each."""
        check_one_process()


@section
class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: BatchSize = 64  # test images at once on a device
    target_accuracy: Share | None = None  # the table names the first round that has it
    # Every client's network is evaluated after training on the client's images as well:
    # a method's LOCAL_KEYS, `epochs` and `trainable`, a pattern of leaves that train.
    finetune: FinetuneConfig | None = None
    # AMM of the one network's features of `most` test images; with a `reference`, the
    # work folder of a run such as a central one, MMD to its last row's network.
    representation: RepresentationConfig | None = None


class Clients(NamedTuple):
    """Training and test images of clients, with the offsets of each."""

    train: Dataset | Stream
    population: Population  # of the training images
    test: Dataset | Stream
    test_offsets: np.ndarray  # [N + 1]


class Images(NamedTuple):
    """Images of a split's clients, and of unseen ones."""

    clients: Clients
    unseen: Clients | None

    @property
    def train(self) -> Dataset | Stream:
        """Training images of the clients."""
        return self.clients.train


def build_evaluators(
    opened: Opened, facts: Facts, images: Images, preprocessing: Preprocessing
) -> tuple[dict[str, Evaluator], str]:
    """Build the evaluators of config.evaluation."""
    evaluation, model = opened.config.evaluation, facts.model
    is_images = is_image(opened.source.input_shape)
    augment = normalization(preprocessing) if is_images else None
    batching = Batching(evaluation.batch_size, augment)
    groups = {"": images.clients, "unseen": images.unseen}
    evaluators = {}
    for group, clients in groups.items():
        if clients is None:
            continue
        accuracy = Accuracy(clients.test, clients.test_offsets, opened.mesh, batching)
        as_new = (of_new_clients,) if group else ()
        if not group:
            evaluators |= accuracy.evaluators
        else:
            evaluators[group] = Evaluator(evaluate_after(accuracy, *as_new))
        if evaluation.finetune is not None:
            tune = _build_finetuning(evaluation.finetune, opened, facts, clients)
            evaluate = evaluate_after(accuracy, *as_new, tune)
            name = f"{group}_finetuned".strip("_")
            evaluators[name] = Evaluator(evaluate, during_training=False)
    if evaluation.representation is not None:
        evaluators["representation"] = evaluation.representation.build(
            model, facts.shapes, images.clients.test, opened.mesh, batching
        )
    return with_target(evaluators, "accuracy", evaluation.target_accuracy), ""


def _build_finetuning(
    finetune: FinetuneConfig, opened: Opened, facts: Facts, clients: Clients
) -> Callable:
    """Build models -> models after fine-tuning; set up at its first call."""
    with naming("config.evaluation.finetune.trainable"):
        params = facts.shapes["params"]
        jax.eval_shape(lambda params: trainable(finetune.trainable, params)[0], params)
    local = build_local(finetune.local, cross_entropy(facts.model))
    return build_finetuned_models(
        build_finetuning(local, finetune.trainable),
        finetune.epochs,
        opened,
        clients.train,
        clients.population,
    )


def of_new_clients(models: TrainedModels) -> TrainedModels:
    """Models of the clients that never took part."""
    if models.client_variables is None:
        return models
    return models._replace(variables=None, client_variables=models.new_client_variables)


def evaluate_after(accuracy: Accuracy, *steps: Callable) -> Callable:
    """Build the personalized evaluation of what steps make of models."""

    def evaluate(models: TrainedModels) -> Evaluation:
        for step in steps:
            models = step(models)
        return accuracy.personalized(models)

    return evaluate


@section
class PartitionConfig(NamedTuple):
    """Keys of config.partition."""

    partition: Annotated[Part, PartitionReader(PARTITIONS, "iid"), INLINE]
    unseen_clients: Whole = 0  # that no round sees; they are evaluated apart


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    source = open_data(config.data)
    parts, unseen = split_classes(
        config.partition.partition, source, config.partition.unseen_clients
    )
    facts = class_report(parts, source.names)
    if config.partition.unseen_clients:
        facts["unseen clients"] = config.partition.unseen_clients
    is_images = is_image(source.input_shape)
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=(parts, unseen),
        population=build_population(parts, parts.num_classes),
        batching=client_batching(config.federation, is_images=is_images),
        used=data_usage(source, parts, unseen),
        report=facts,
        report_text=format_class_report(facts),
        classes=source.names,
    )


def build_facts(opened: Opened, network: Part) -> Facts:
    """Facts of the data and the network, for methods."""
    config, source = opened.config, opened.source
    model = classifier(
        network, source.input_shape, len(source.names), config.model.projection
    )
    top = model.blocks[-1] if model.blocks else "classifier"
    facts = network_facts(
        opened,
        model,
        offers={
            "num_classes": model.embedding_dim,
            "classes": f"^params/{top}/kernel$",
            "spreadout": spreadout_sum,
        },
    )
    return initialized(facts, config.pretrain)


def load(opened: Opened, facts, stream_bytes: int | None) -> Images:
    """Load the images of all clients, on the host or streamed."""
    del facts

    def load_clients(parts: ClientPartition) -> Clients:
        return Clients(
            train=build_dataset(opened.source, parts.train.rows, stream_bytes),
            population=build_population(parts, parts.num_classes),
            test=build_dataset(opened.source, parts.test.rows, stream_bytes),
            test_offsets=parts.test.offsets,
        )

    clients, unseen = opened.split
    has_unseen = unseen.num_clients > 0
    return Images(load_clients(clients), load_clients(unseen) if has_unseen else None)


def classifier(
    network: Part, input_shape, num_classes: int, projection: int | None = None
) -> Model:
    """Build the config's model with a logit for every class.

    Raises:
      ValueError: for a network whose output is of another size.
    """
    parameters = inspect.signature(network.factory).parameters
    key = "num_classes" if "num_classes" in parameters else "embedding_dim"
    if key in parameters:
        network = network.with_settings(**{key: num_classes, **network.settings})
    model = build_network(network, input_shape, projection).model
    if model.embedding_dim != num_classes:
        raise ValueError(
            f"config.model.{key} must be the {num_classes} classes of the data, got "
            f"{model.embedding_dim}."
        )
    return model


SPEC = TaskSpec(
    name="classification",
    summary="Classification: any algorithm, all methods from the same initial model.",
    sections={
        "partition": PartitionConfig,
        "model": ClassifierConfig,
        "pretrain": StartConfig,
        "evaluation": EvaluationConfig,
    },
    methods=MethodReader(
        loss=LossReader(cross_entropy, mean_loss),
        algorithm=AlgorithmReader(
            "classification",
            losses={"class_pull_loss": class_pull},
            offered=(*OFFERS, "classes", "num_classes", "spreadout"),
        ),
        keys=CLASS_KEYS,
    ),
    open=open_task,
    facts=build_facts,
    method=plain_method,
    load=load,
    evaluators=build_evaluators,
)
