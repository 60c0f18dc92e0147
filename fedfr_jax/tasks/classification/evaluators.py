"""Evaluation of classification: global, personalized, unseen clients, fine-tuned.

Generic: one network on all test images. Personalized: each client's network on the
client's test images; the mean is over clients, whatever their sizes, as FedPer plots it
(Arivazhagan et al. 2019, arXiv:1912.00818, section 4), beside its spread.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import ClientPartition
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.federated.local import trainable
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.ranges import BatchSize, Count, Pattern, Share
from fedfr_jax.schema import call, naming
from fedfr_jax.tasks.classification.loss import cross_entropy
from fedfr_jax.tasks.data import build_dataset, build_population, split_classes
from fedfr_jax.tasks.evaluators import check_settings, representation, with_target
from fedfr_jax.tasks.finetuning import build_finetuning, finetune_clients
from fedfr_jax.tasks.local_training import local_from_settings
from fedfr_jax.types import (
    Augment,
    Dataset,
    Evaluation,
    Evaluator,
    Model,
    PyTree,
    Source,
    TrainedModels,
)


class Clients(NamedTuple):
    """Training and test images of clients, with the offsets of each."""

    train: Dataset | Stream
    population: Population  # of the training images
    test: Dataset | Stream
    test_offsets: np.ndarray  # [N + 1]


def split_clients(
    settings: Mapping, source: Source
) -> tuple[ClientPartition, ClientPartition]:
    """Split by the config's partition: (clients of the federation, unseen clients).

    Args:
      settings: config.partition, see `split_classes`; `unseen_clients` of the clients
        that it makes are left out.
    """
    settings = dict(settings)
    num_unseen = settings.pop("unseen_clients", 0)
    return split_classes(settings, source, num_unseen)


def build_clients(
    source: Source, parts: ClientPartition, stream_bytes: int | None
) -> Clients:
    """Load the images of a split's clients, on the host or streamed from the source."""
    return Clients(
        train=build_dataset(source, parts.train, stream_bytes),
        population=build_population(parts, parts.num_classes),
        test=build_dataset(source, parts.test, stream_bytes),
        test_offsets=parts.test_offsets,
    )


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
        self._labels = np.asarray(table.labels)
        self._mesh, self._feed, self._compiled = mesh, feed, {}

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic and personalized."""
        return {
            "generic": Evaluator(self.generic),
            "personalized": Evaluator(self.personalized),
        }

    def generic(self, networks: TrainedModels) -> Evaluation:
        """Evaluate the global model on all test images; empty without one."""
        if networks.variables is None:
            return Evaluation()
        is_right = self._is_right(networks.apply, networks.variables, self._all())
        return Evaluation({"accuracy": float(is_right.mean())})

    def personalized(self, networks: TrainedModels) -> Evaluation:
        """Evaluate every client's model on its test images; clients without any are
        skipped.
        """
        bounds = list(zip(self._offsets[:-1], self._offsets[1:], strict=True))
        if networks.client_variables is None:
            right = self._is_right(networks.apply, networks.variables, self._all())
            parts = [right[low:high] for low, high in bounds]
        else:
            parts = [
                self._is_right(
                    networks.client_apply,
                    networks.client_variables(client),
                    np.arange(low, high),
                )
                if high > low
                else np.zeros(0)
                for client, (low, high) in enumerate(bounds)
            ]
        per_client = np.array([x.mean() if len(x) else np.nan for x in parts])
        return Evaluation(accuracy_summary(per_client), {"accuracy": per_client})

    def _all(self):
        return np.arange(len(self._labels))

    def _is_right(self, apply: Callable, variables: PyTree, rows: np.ndarray):
        """Whether each of table rows [n] is classified correctly, [n] bool."""
        if apply not in self._compiled:
            best = jax.jit(lambda v, x: apply(v, x).argmax(1, keepdims=True))
            self._compiled[apply] = build_embed(best, self._feed, self._mesh)
        predicted = self._compiled[apply](variables, self._table, rows.astype(np.int32))
        return meshes.fetch(predicted)[: len(rows), 0, 0] == self._labels[rows]


def accuracy_summary(values: np.ndarray) -> dict[str, float]:
    """Mean, deviation, extremes and worst decile of values [N], without nan.

    Nothing, where none is left: no client has a test image.
    """
    accuracies = np.sort(values[~np.isnan(values)])
    if not len(accuracies):
        return {}
    tenth = accuracies[: max(len(accuracies) // 10, 1)]
    return {
        "accuracy": float(accuracies.mean()),
        "accuracy_std": float(accuracies.std()),
        "accuracy_min": float(accuracies[0]),
        "accuracy_max": float(accuracies[-1]),
        "accuracy_worst_decile": float(tenth.mean()),
    }


class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: BatchSize = 64  # test images at once on a device
    target_accuracy: Share | None = None  # the table names the first round that has it
    # Every client's network is judged after training on the client's images as well:
    # a method's LOCAL_KEYS, `epochs` and `trainable`, a pattern of leaves that train.
    finetune: Mapping | None = None
    # AMM of the one network's features of `most` test images; with a `reference`, the
    # work folder of a run such as a central one, MMD to its last row's network.
    representation: Mapping | None = None


class FinetuneConfig(NamedTuple):
    """Keys of config.evaluation.finetune, besides LOCAL_KEYS of a method."""

    epochs: Count = 1
    trainable: Pattern = ""


def build_evaluators(
    settings: Mapping, model: Model, first: PyTree, preprocess: Augment | None
) -> Callable:
    """Build the evaluators of config.evaluation, checked, from the images.

    Args:
      settings: keys of `EvaluationConfig`.
      first: variables of the model, arrays or shapes.
      preprocess: what happens to an image before the network sees it.

    Returns:
      build(clients, unseen or None, mesh, feed, **options) -> {name: Evaluator}; feed
      and options are those of a client's training.

    Raises:
      ValueError: for an unknown key, or a value out of its range.
    """
    evaluation = call("evaluation", EvaluationConfig, settings)
    prepared = None
    if evaluation.finetune is not None:
        prepared = _finetuning(evaluation.finetune, model, first)
    representation_settings = check_settings(evaluation.representation, model, first)
    batching = Batching(evaluation.batch_size, preprocess)

    def build(clients, unseen, mesh, feed, **options):
        groups = {"": clients} if unseen is None else {"": clients, "unseen": unseen}
        evaluators = {}
        for group, group_clients in groups.items():
            accuracy = Accuracy(
                group_clients.test, group_clients.test_offsets, mesh, batching
            )
            evaluators |= accuracy.evaluators if not group else _unseen(accuracy)
            if prepared:
                name = f"{group}_finetuned".strip("_")
                tune = _evaluate_after(prepared, group_clients, mesh, feed, **options)
                evaluators[name] = _finetuned(accuracy, tune, is_unseen=bool(group))
        if representation_settings is not None:
            evaluators["representation"] = representation(
                model, clients.test, mesh, batching, **representation_settings
            )
        return with_target(evaluators, "accuracy", evaluation.target_accuracy)

    return build


def _finetuning(settings, model, first) -> tuple:
    """Build (algorithm, epochs) of config.evaluation.finetune."""
    section = "evaluation.finetune"
    if jax.process_count() > 1:  # each would have the rows of some clients only
        raise ValueError(
            f"config.{section} cannot be used in a multi-process run, got "
            f"{dict(settings)}."
        )
    finetune_settings = {
        k: v for k, v in settings.items() if k in FinetuneConfig._fields
    }
    epochs, trainable_pattern = call(section, FinetuneConfig, finetune_settings)
    local_settings = {k: v for k, v in settings.items() if k not in finetune_settings}
    local = local_from_settings(section, local_settings, cross_entropy(model))
    with naming(f"config.{section}.trainable"):
        jax.eval_shape(
            lambda params: trainable(trainable_pattern, params)[0], first["params"]
        )
    return build_finetuning(local, trainable_pattern), epochs


def _evaluate_after(
    prepared, clients: Clients, mesh: Mesh, feed: Batching, **options
) -> Callable:
    """Build models -> models after fine-tuning; set up at its first call."""
    algorithm, epochs = prepared
    simulations = []

    def tune(networks: TrainedModels) -> TrainedModels:
        if not simulations:
            data = clients.train, clients.population
            given = {"mesh": mesh, "local_epochs": epochs, **options}
            simulations.append(build_simulation(algorithm, feed, *data, **given))
        return finetune_clients(simulations[0], networks)

    return tune


def _evaluate_new(networks: TrainedModels) -> TrainedModels:
    """Models of the clients that never took part."""
    if networks.client_variables is None:
        return networks
    return networks._replace(
        variables=None, client_variables=networks.new_client_variables
    )


def _unseen(accuracy: Accuracy) -> dict[str, Evaluator]:
    def evaluate(networks: TrainedModels) -> Evaluation:
        return accuracy.personalized(_evaluate_new(networks))

    return {"unseen": Evaluator(evaluate)}


def _finetuned(accuracy: Accuracy, tune: Callable, *, is_unseen: bool) -> Evaluator:
    def evaluate(networks: TrainedModels) -> Evaluation:
        networks = _evaluate_new(networks) if is_unseen else networks
        return accuracy.personalized(tune(networks))

    return Evaluator(evaluate, during_training=False)
