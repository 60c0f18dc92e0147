"""Evaluation of classification: global, personalized, unseen clients, fine-tuned.

Generic: one network on all test images. Personalized: each client's network on the
client's test images; the mean is over clients, whatever their sizes, as FedPer plots it
(Arivazhagan et al. 2019, arXiv:1912.00818, section 4), beside its spread.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.federated.local import trainable
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.parts import INLINE, section
from fedfr_jax.ranges import BatchSize, Count, Pattern, Share
from fedfr_jax.schema import naming
from fedfr_jax.tasks.classification.loss import cross_entropy
from fedfr_jax.tasks.config import Opened
from fedfr_jax.tasks.evaluators import RepresentationConfig, with_target
from fedfr_jax.tasks.finetuning import build_finetuning, finetune_clients
from fedfr_jax.tasks.methods import LocalReader, Method
from fedfr_jax.tasks.trainers import Facts, build_local
from fedfr_jax.types import (
    Dataset,
    Evaluation,
    Evaluator,
    Preprocessing,
    PyTree,
    TrainedModels,
    is_image,
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


@section
class FinetuneConfig(NamedTuple):
    """Keys of config.evaluation.finetune."""

    local: Annotated[Method, LocalReader(), INLINE]
    epochs: Count = 1
    trainable: Pattern = ""

    def check(self) -> None:
        """Raise ValueError in a run whose processes have some clients each."""
        if jax.process_count() > 1:
            raise ValueError("fine-tuning cannot be evaluated in a multi-process run.")


@section
class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: BatchSize = 64  # test images at once on a device
    target_accuracy: Share | None = None  # the table names the first round that has it
    # Every client's network is judged after training on the client's images as well:
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
        evaluators |= accuracy.evaluators if not group else _unseen(accuracy)
        if evaluation.finetune is not None:
            tune = _build_finetuning(evaluation.finetune, opened, facts, clients)
            name = f"{group}_finetuned".strip("_")
            evaluators[name] = _finetuned(accuracy, tune, is_unseen=bool(group))
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
    algorithm, config = build_finetuning(local, finetune.trainable), opened.config
    simulations = []

    def tune(networks: TrainedModels) -> TrainedModels:
        if not simulations:
            sim = build_simulation(
                algorithm,
                opened.batching,
                clients.train,
                clients.population,
                mesh=opened.mesh,
                local_epochs=finetune.epochs,
                clients_per_device=config.federation.clients_per_device,
                seed=config.seed,
            )
            simulations.append(sim)
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
