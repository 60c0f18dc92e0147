"""Evaluators of any task: representation metrics, fine-tuned clients, targets.

Representation metrics of FedMargin (Michieli, Toldo, Ozay 2022, IEEE Internet of Things
Journal), for features of images or of pixels: AMM, the mean distance of a class's
prototype to the nearest other one; MMD to the features of a reference, the centrally
trained network; mean entropies.

Fine-tuning of every client's model on its own examples is a round of the engine without
aggregation: clients are scheduled over devices and lanes, and streamed, as in any
other round.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.distributed import num_cores
from fedfr_jax.evaluation.mmd import mmd_squared
from fedfr_jax.evaluation.segmentation import feature_entropy, softmax_entropy
from fedfr_jax.federated.algorithms.prototypes import (
    aggregate_mean_margin,
    class_features,
    class_means,
    nearest_prototype,
    prototype_of_class,
)
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.inference import build_embed, load_states
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.state import Simulation
from fedfr_jax.models.external_checkpoints import fitted
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.parts import section
from fedfr_jax.ranges import MAX
from fedfr_jax.schema import naming
from fedfr_jax.tasks.experiment import Opened
from fedfr_jax.types import (
    Algorithm,
    ClientOutput,
    Cohort,
    Dataset,
    Evaluation,
    Evaluator,
    LocalTraining,
    Model,
    PyTree,
    TrainedModels,
)

MAX_WORKERS = 8  # threads that evaluate clients, each with a matrix of scores
OF_IMAGE = 20  # pixels of an image, where there are enough images
SECTION = "config.evaluation.representation"


@section
class RepresentationConfig(NamedTuple):
    """Keys of config.evaluation.representation."""

    max_images: Annotated[int, Interval(ge=2, le=MAX)] = 1000  # that are looked at
    # Work folder of a run such as a central one, to whose last row's network MMD is
    # taken.
    reference: str | os.PathLike | None = None

    def build(
        self,
        model: Model,
        first: PyTree,
        table: Dataset | Stream,
        mesh: Mesh,
        batching: Batching,
    ) -> Evaluator:
        """Build the evaluator.

        Args:
          first: variables of the model, arrays or shapes.

        Raises:
          ValueError: for a model without features, or a reference of another network.
        """
        reference = self.reference
        if reference is not None:
            with naming(f"{SECTION}.reference"):
                reference = fitted(load_weights(reference).arrays, first)
        limits = {"reference": reference, "max_images": self.max_images}
        return representation(model, table, mesh, batching, **limits)


def representation(
    model: Model,
    table: Dataset | Stream,
    mesh: Mesh,
    feed: Batching,
    *,
    reference: PyTree | None = None,
    max_images: int = 1000,
) -> Evaluator:
    """Evaluate the global model's features of test images; empty without one.

    Args:
      model: with features, of every evaluated network.
      table: the test images and their labels or masks.
      feed: how images are decoded; its batch size is per device.
      reference: variables of the network that MMD is taken to; None leaves it out.
      max_images: features that are looked at, which MMD takes the square of.

    Raises:
      ValueError: when the images are void.
    """
    compute_features = build_feature_fn(model, table, mesh, feed, max_images)
    # Not before they are needed.
    reference_features = functools.cache(lambda: compute_features(reference)[1])

    @jax.jit
    def numbers(labels, features, logits):
        everything = jnp.ones(len(labels), bool)
        means = class_means(features, labels, everything, model.embedding_dim)
        return {
            "amm": aggregate_mean_margin(prototype_of_class(*means)),
            "softmax_entropy": softmax_entropy(logits).mean(),
            "feature_entropy": feature_entropy(features).mean(),
        }

    def evaluate(models: TrainedModels) -> Evaluation:
        if models.variables is None:
            return Evaluation()
        labels, features, logits = compute_features(models.variables)
        values = numbers(labels, features, logits)
        metrics = {name: float(value) for name, value in values.items()}
        if reference is not None:
            metrics |= discrepancies(features, reference_features())
        return Evaluation(metrics)

    return Evaluator(evaluate)


def discrepancies(
    features: np.ndarray, reference_features: np.ndarray
) -> dict[str, float]:
    """Squared MMD of features [n, D] to those of a reference, in three forms.

    Nothing where features are all alike or no numbers: the radial kernel has no width.
    """
    spread = np.ptp(np.concatenate([features, reference_features]), axis=0).max()
    if not 0 < spread < math.inf:
        return {}
    return {
        "mmd": mmd_squared(features, reference_features),
        "mmd_unbiased": mmd_squared(features, reference_features, unbiased=True),
        "mmd_linear": mmd_squared(features, reference_features, kernel="linear"),
    }


def build_feature_fn(
    model: Model, table, mesh: Mesh, feed: Batching, max_features: int
) -> Callable:
    """Build variables -> (labels [n], features [n, D], logits [n, M]) of test images.

    Of features of images there is one for each of `max_images` images, evenly spaced.
    Of features of pixels there are OF_IMAGE of an image or more, the same places in
    each image, drawn once; those that are void are left out.

    Raises:
      ValueError: when fewer than two are not void.
    """
    shape = class_features(model).shape  # [1, D], or [1, h, w, D]
    pixels, count = math.prod(shape[1:-1]), table.num_examples
    num_images = min(max(max_features // min(pixels, OF_IMAGE), 1), count)
    rows = np.linspace(0, count - 1, num_images).astype(np.int32)
    each = min(max_features // num_images, pixels)
    positions = np.sort(np.random.default_rng(0).permutation(pixels)[:each])

    def chosen(x):
        """Select values [B, ...] per image, or per pixel, as [B * each, ...]."""
        x = nearest_prototype(x, shape)
        channels = x.shape[len(shape) - 1 :]
        return x.reshape(len(x), pixels, *channels)[:, positions].reshape(-1, *channels)

    truth = np.asarray(table.targets.get("mask", table.targets["label"]))[rows]
    labels = np.asarray(jax.jit(chosen)(truth.astype(np.int32)))
    is_known = (labels >= 0) & (labels < model.embedding_dim)
    if is_known.sum() < 2:
        raise ValueError(
            f"{SECTION} needs at least 2 test images or pixels with a valid (non-void) "
            f"label, got {is_known.sum()} of {len(labels)}."
        )

    features_fn = model.features

    def outputs(variables, images):
        logits, features, _ = features_fn(variables, images, False)
        found = jnp.concatenate([chosen(features), chosen(logits)], axis=1)
        return found.reshape(len(images), -1)

    embed = build_embed(jax.jit(outputs), feed, mesh)
    examples = place_examples(table, mesh)

    def compute_features(variables):
        found = meshes.fetch(embed(variables, examples, rows))[: len(rows), 0]
        found = found.reshape(len(labels), -1)[is_known]
        return labels[is_known], found[:, : shape[-1]], found[:, shape[-1] :]

    return compute_features


def with_target(
    evaluators: Mapping[str, Evaluator], metric: str, target: float | None
) -> dict[str, Evaluator]:
    """Set the target of a metric in the evaluators that have it; None for no target."""
    targets = {} if target is None else {metric: target}
    return {
        name: evaluator._replace(targets=targets)
        for name, evaluator in evaluators.items()
    }


def build_finetuning(local: LocalTraining, trainable_pattern: str = "") -> Algorithm:
    """Build an algorithm whose personal state is a client's fine-tuned model.

    Args:
      trainable_pattern: regular expression of the leaves that are trained, "" for all.
    """
    train = build_local_training(local, trainable_pattern)

    def client_update(key, server, row, client):
        del server
        end, metrics = train(key, row, client)
        return ClientOutput((), jnp.float32(1), end, metrics)

    return Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: server,
        client_update=client_update,
        aggregator=None,
        server_update=lambda server, result: server,
        personalize=lambda server, row: row,
    )


def build_finetuned_models(
    algorithm: Algorithm,
    epochs: int,
    opened: Opened,
    train: Dataset | Stream,
    population: Population,
) -> Callable[[TrainedModels], TrainedModels]:
    """Build models -> clients' models after fine-tuning, set up at the first call.

    Args:
      algorithm: of `build_finetuning`.
      train: the clients' examples.
    """
    _check_adapters_merge(opened.config.methods)

    @functools.cache
    def simulation() -> Simulation:
        return build_simulation(
            algorithm,
            opened.batching,
            train,
            population,
            Settings(
                local_epochs=epochs,
                clients_per_device=opened.config.federation.clients_per_device,
                seed=opened.config.seed,
            ),
            mesh=opened.mesh,
        )

    return lambda models: finetune_clients(simulation(), models)


def _check_adapters_merge(methods: Mapping[str, Any]) -> None:
    """Raise ValueError for an adapter that is no part of the network's own leaves."""
    for name, method in methods.items():
        if (config := method.adapter) is not None and config.adapter.merge is None:
            raise ValueError(
                f"config.methods.{name}.adapter must be lora, bias or head, which are "
                "merged into the network, for the fine-tuning of config.evaluation, "
                "got another. Change one of the two."
            )


def evaluate_clients(
    num_clients: int, embed: Callable[[int], tuple], evaluate: Callable
) -> list[dict[str, float]]:
    """Evaluate every client, spread over the processes and the cores of each.

    The devices embed the next client meanwhile.

    Args:
      embed: client -> arguments of `evaluate`; all processes call it for all clients.
      evaluate: arguments -> numbers of a client, with the same names for each client.

    Returns:
      The numbers of each client, in every process.
    """
    here, count = jax.process_index(), jax.process_count()
    mine = range(here, num_clients, count) or range(1)  # one, for the names
    workers = min(num_cores(), MAX_WORKERS)
    running: dict[int, Future] = {}
    with ThreadPoolExecutor(workers, "evaluation") as pool:
        for client in range(num_clients):
            inputs = embed(client)
            if client in mine:
                if len(running) >= 2 * workers:  # so many inputs are in memory
                    running[client - 2 * workers * count].result()
                running[client] = pool.submit(evaluate, *inputs)
        found = {client: future.result() for client, future in running.items()}
    return _on_all_processes(found, num_clients)


def _on_all_processes(
    found: Mapping[int, Mapping[str, float]], num_clients: int
) -> list[dict[str, float]]:
    """Numbers of all clients, of which this process has some, with the same bits."""
    names, count = [*next(iter(found.values()))], jax.process_count()
    table = np.zeros((num_clients, len(names)))
    for client, numbers in found.items():
        table[client] = [numbers[name] for name in names]
    if count > 1:  # as integers: JAX has no 64-bit numbers
        parts = meshes.gather_processes(table.view(np.uint32))
        parts = parts.reshape(count, num_clients, -1).view(np.float64)
        clients = np.arange(num_clients)
        table = parts[clients % count, clients]
    return [dict(zip(names, row.tolist(), strict=True)) for row in table]


def client_model(models: TrainedModels, client: int) -> tuple[Callable, PyTree]:
    """(function, variables) of the model that a client uses: its own, or the global."""
    if models.client_variables is None:
        return models.apply, models.variables
    return models.client_apply, models.client_variables(client)


def worst_decile(values: np.ndarray) -> np.floating:
    """Mean of the worst tenth of values [n], at least of one."""
    return np.sort(values)[: max(len(values) // 10, 1)].mean()


STATISTICS = {"std": np.std, "min": np.min, "max": np.max, "worst_decile": worst_decile}


def over_clients(
    per_client: Mapping[str, np.ndarray], metric: str, statistics: Sequence[str]
) -> Evaluation:
    """Means of metrics [N] over clients without nan, and statistics of one of them.

    Nothing, where none is left: no client has a test image.
    """
    known = {name: values[~np.isnan(values)] for name, values in per_client.items()}
    metrics = {}
    if len(known[metric]):
        metrics = {name: float(values.mean()) for name, values in known.items()}
        for name in statistics:
            metrics[f"{metric}_{name}"] = float(STATISTICS[name](known[metric]))
    return Evaluation(metrics, per_client)


def check_one_process() -> None:
    """Raise ValueError in a run whose processes have some clients each."""
    if jax.process_count() > 1:
        raise ValueError("fine-tuning cannot be evaluated in a multi-process run.")


def finetune_clients(sim: Simulation, models: TrainedModels) -> TrainedModels:
    """Fine-tune `models` in one round of a simulation of `build_finetuning`.

    All of them are kept on disk, in a temporary folder.
    """
    num_clients = sim.population.num_clients
    client_variables = models.client_variables
    first = models.variables if client_variables is None else client_variables(0)
    server = start_simulation(sim, first)
    store = open_store(sim, server)
    if client_variables is not None:
        for client in range(num_clients):
            row = meshes.fetch(client_variables(client))
            row = jax.tree.map(lambda x: np.asarray(x)[None], row)
            store.scatter(np.array([client]), row, 0)
    # All clients, whatever the round: its number only names what they draw.
    server, _ = run_cohort(sim, server, store, Cohort(np.arange(num_clients), 1))

    def finetuned(clients):
        return load_states(store, clients, sim.mesh)[0]

    return models._replace(variables=None, client_variables=finetuned)
