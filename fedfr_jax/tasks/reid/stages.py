"""Re-identification: any algorithm, all methods from the same initial model.

Clients keep their classifier and share the rest (FedPav: Zhuang et al. 2020,
arXiv:2008.11560, algorithm 1), by any algorithm. A central method is trained on the
images of all clients, with a classifier of all their people.

The key `personal` of a method is the classifier unless it is set; "." for clients that
train alone.
"""

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training
from fedfr_jax.data.augment.photometric import compute_statistics
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.algorithms.fedreid import PublicImages
from fedfr_jax.federated.algorithms.host_batches import with_host_batches
from fedfr_jax.federated.client import Population
from fedfr_jax.models.adapters import deployed_variables
from fedfr_jax.models.external_checkpoints import fill_resnet
from fedfr_jax.models.weights import read_weights
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import (
    build_batching,
    build_dataset,
    client_batching,
    open_data,
)
from fedfr_jax.tasks.evaluators import build_finetuned_models, build_finetuning
from fedfr_jax.tasks.experiment import (
    Config,
    Opened,
    TaskSpec,
    Trainer,
    plain_stage,
)
from fedfr_jax.tasks.methods import (
    OFFERS,
    REID_KEYS,
    AlgorithmReader,
    Method,
    MethodReader,
    OnlyLossReader,
)
from fedfr_jax.tasks.model import NetworkReader, StartConfig, build_network, initialized
from fedfr_jax.tasks.reid.data import (
    STATISTICS,
    PartitionConfig,
    ReidSplit,
    augment_name,
    batch_sizes,
    build_public_data,
    build_split,
    data_usage,
    fill_statistics,
    format_report,
    identity_batches,
    report,
)
from fedfr_jax.tasks.reid.evaluator import (
    EvaluationConfig,
    ReidEvaluator,
    build_evaluation_set,
    evaluate_equals_once,
    retrieval_sheets,
)
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.tasks.trainers import (
    Facts,
    build_central,
    build_federated,
    build_local,
    max_epochs,
    network_facts,
)
from fedfr_jax.types import (
    Algorithm,
    CentralTrainer,
    Dataset,
    Evaluation,
    Evaluator,
    InputShape,
    Model,
    Preprocessing,
    PyTree,
    Source,
    Stage,
    TrainedModels,
)


@section
class ModelConfig(NamedTuple):
    """Keys of config.model."""

    network: Annotated[Part, NetworkReader("reid"), INLINE]
    weights: str = ""  # of a ResNet of torchvision's


class Split(NamedTuple):
    """A scenario with what methods need of its images."""

    clients: ReidSplit
    people: np.ndarray  # [n] int32 number of each training image's person, of all
    shared: dict  # {"shared": PublicImages} where there are public images
    # () -> means and standard deviations of the cameras' channels
    statistics: Callable[[], tuple]


class ReidFacts(NamedTuple):
    """Facts of the clients' network, and of the one with a class for every person."""

    clients: Facts
    central: Facts


class Images(NamedTuple):
    """Training images by client, with labels and camera numbers."""

    train: Dataset | Stream
    stream_bytes: int | None


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    federation, public = config.federation, config.partition.public
    source, public_source = build_public_data(public, open_data(config.data))
    split = build_split(config.partition, source)
    read = lambda rows: source.read(split.train.rows[rows])
    statistics = functools.cache(lambda: compute_statistics(read, split.cameras))
    augment = fill_statistics(federation.augment, statistics)
    batching = client_batching(federation._replace(augment=augment))
    shared = {}
    if public_source is not None:  # without cameras, and so their statistics
        augment = [x for x in federation.augment if augment_name(x) != STATISTICS]
        shown = build_batching(federation._replace(augment=tuple(augment)))
        images = public_source.read(np.arange(len(public_source.labels)))
        shown = shown._replace(batch_size=public.batch_size)
        shared["shared"] = PublicImages(images, shown)
    people = np.unique(source.labels[split.train.rows], return_inverse=True)[1]
    facts = report(split, source)
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=Split(
            clients=split,
            people=people.astype(np.int32),
            shared=shared,
            statistics=statistics,
        ),
        population=Population(split.train.offsets, split.num_classes),
        batching=batching,
        used=data_usage(split, source, public_source),
        report=facts,
        report_text=format_report(facts),
        is_mirrored=config.evaluation.flip_test,
    )


def build_task_facts(opened: Opened, network: Part) -> ReidFacts:
    """Facts of the data and the models, for methods."""
    split = opened.split
    return ReidFacts(
        clients=build_facts(opened, network, int(split.clients.num_classes.max())),
        central=build_facts(opened, network, int(split.people.max()) + 1),
    )


def build_facts(opened: Opened, network: Part, num_classes: int) -> Facts:
    """Facts of a network with `num_classes` identities; evaluators get features."""
    model = build_model(network, opened.source.input_shape, num_classes)
    features_fn = model.features
    facts = network_facts(
        opened,
        model,
        offers=opened.split.shared,
        apply=lambda variables, x: features_fn(variables, x, False)[1],
    )
    neck = facts.shapes["params"].get("neck", {})
    if neck and "fc" not in neck:  # a bnneck
        offers = {k: v for k, v in facts.offers.items() if k != "equal_features"}
        facts = facts._replace(offers=offers)
    if path := opened.config.model.weights:
        loaded = pretrained(facts.initial(), path)
        facts = facts._replace(initial=lambda: loaded)
    return initialized(facts, opened.config.pretrain)


def build_model(network: Part, input_shape: InputShape, num_classes: int) -> Model:
    """Build the config's model with `num_classes` identities.

    Raises:
      ValueError: for a network without features, or of another output.
    """
    network = network.with_settings(num_classes=num_classes)
    model, logits, features = build_network(network, input_shape)
    if logits.shape != (1, num_classes) or features is None or features.ndim != 2:
        raise ValueError(
            "config.model must have features and a logit for every identity, got "
            f"{network.name!r}."
        )
    return model


def pretrained(variables: PyTree, path: str) -> PyTree:
    """Load torchvision's ResNet weights into variables.

    Args:
      path: the .pth of a torchvision ResNet, or its tensors under the same names as
        .safetensors or .npz.

    Raises:
      ValueError: naming the file, when its tensors do not fit.
    """
    with naming(path):
        loaded = fill_resnet(variables, read_weights(path).arrays)
    return jax.tree.map(jnp.asarray, loaded)


def build_method(
    method: Method | Training, facts: ReidFacts, opened: Opened, where: str
) -> Trainer:
    """Build the trainer of a method, perhaps with batches of identities."""
    split: Split = opened.split
    if isinstance(method, Training):
        augment = fill_statistics(method.augment, split.statistics)
        training = method._replace(augment=augment)
        central = build_central(training, facts.central, opened, where)
        if identities := method.identities_per_batch:
            with naming(where):
                order = identity_order(split.people, training.batch_size, identities)
            central = central._replace(batch_order=order)
        return central
    classifier = f"params/{facts.clients.model.blocks[-1]}/"
    if method.personal is None:
        method = method._replace(personal=classifier)
    trainer = build_federated(method, facts.clients, where)
    if method.personal == classifier and method.batch_stats != "local":
        # People are found without it, so the server's network is one for all clients.
        global_model = trainer.algorithm.global_model
        whole = functools.partial(
            deployed_variables, trainer.frozen_model or facts.clients.model
        )
        trainer = trainer._replace(global_model=lambda x: whole(global_model(x)))
    if identities := method.identities_per_batch:
        with naming(where):
            epochs = max_epochs(method, opened.config.federation)
            algorithm = balanced(trainer.algorithm, opened, identities, epochs)
        trainer = trainer._replace(algorithm=algorithm)
    return trainer


def balanced(
    algorithm: Algorithm, opened: Opened, identities: int, epochs: int
) -> Algorithm:
    """Let an algorithm's clients train on batches balanced over identities.

    An epoch has as many batches as any epoch of the clients, of pass after pass.

    Args:
      epochs: most local epochs of a round.

    Raises:
      ValueError: naming the client, for one with fewer identities than a batch.
    """
    split, batching = opened.split.clients, opened.batching
    of_client = np.split(split.train.labels, split.train.offsets[1:-1])
    owners = dict(zip(split.client_names, of_client, strict=True))
    sizes = batch_sizes(batching.batch_size, identities, owners)
    largest = int(split.train.sizes.max())
    count = max(int(batching.steps_per_epoch(largest)) * epochs, 1)

    def order(client, round):
        rng = np.random.default_rng((opened.config.seed, client, round))
        return identity_batches(of_client[client], rng, sizes, count)

    return with_host_batches(algorithm, order)


def identity_order(labels: np.ndarray, batch_size: int, identities: int) -> Callable:
    """Build `CentralTrainer.batch_order` of balanced batches.

    On several devices a triplet is of the rows of one device, whose part of the batch
    is of whole groups where it is a multiple of Q.

    Args:
      labels: [n] of all training images.
    """
    sizes = batch_sizes(batch_size, identities, {"the data": labels})

    def order(word, steps):
        return identity_batches(labels, np.random.default_rng(word), sizes, steps)

    return order


def load(opened: Opened, facts, stream_bytes: int | None) -> Images:
    """Load the training images, or stream them."""
    del facts
    split, source = opened.split.clients, opened.source
    targets = {"label": split.train.labels, "camera": split.cameras}
    train = build_dataset(source, split.train.rows, stream_bytes, **targets)
    return Images(train, stream_bytes)


def build_stage(opened: Opened, name: str, trainer, facts, images: Images) -> Stage:
    """Stage of a trainer; a central one gets all clients' identities as classes."""
    if isinstance(trainer, CentralTrainer):
        images = images._replace(train=images.train.with_labels(opened.split.people))
    return plain_stage(opened, name, trainer, facts, images)


def build_evaluators(
    opened: Opened, facts: ReidFacts, images: Images, preprocessing: Preprocessing
) -> tuple[dict[str, Evaluator], str]:
    """Build the evaluators: global, personalized, after local training, and images."""
    evaluation, split = opened.config.evaluation, opened.split.clients
    source: Source = opened.source
    tests = build_evaluation_set(source, split, images.stream_bytes)
    evaluator = ReidEvaluator(
        tests,
        opened.mesh,
        evaluation,
        plain=normalization(preprocessing),
        seed=opened.config.seed,
    )
    model = facts.clients.model
    evaluators = evaluator.evaluators
    evaluators["personalized"] = evaluate_equals_once(
        evaluators["personalized"], len(split.client_names), model.blocks[-1]
    )
    if evaluation.num_visualized:
        evaluators["pictures"] = retrieval_sheets(
            evaluator, tests, source.names, evaluation.num_visualized
        )
    if local := evaluation.local_training:
        algorithm = build_finetuning(build_local(local.local, local.loss(model)))
        if identities := local.identities_per_batch:
            algorithm = balanced(algorithm, opened, identities, local.epochs)
        given = local.epochs, opened, images.train, opened.population
        tune = build_finetuned_models(algorithm, *given)

        def after_training(models: TrainedModels) -> Evaluation:
            if models.client_variables is None:  # central: no client's classifier
                return Evaluation()
            return evaluator.personalized(tune(models))

        evaluators["local"] = Evaluator(after_training, during_training=False)
    return evaluators, ""


SPEC = TaskSpec(
    name="reid",
    summary="Re-identification: any algorithm, all methods from the same model.",
    sections={
        "partition": PartitionConfig,
        "model": ModelConfig,
        "pretrain": StartConfig,
        "evaluation": EvaluationConfig,
    },
    methods=MethodReader(
        loss=OnlyLossReader(reid_loss),
        algorithm=AlgorithmReader("reid", offered=(*OFFERS, "shared")),
        keys=REID_KEYS,
        defaults=lambda options: {"personal": None},
    ),
    open=open_task,
    facts=build_task_facts,
    method=build_method,
    load=load,
    stage=build_stage,
    evaluators=build_evaluators,
    is_of_features=True,
    has_sweeps=False,
)
