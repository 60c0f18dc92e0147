"""Re-identification: any algorithm, all methods from the same initial model.

Clients keep their classifier and share the rest (FedPav: Zhuang et al. 2020,
arXiv:2008.11560, algorithm 1), by any algorithm. A central method is trained on the
images of all clients, with a classifier of all their people.

The key `personal` of a method is the classifier unless it is set; "." for clients that
train alone.
"""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated.client import Population
from fedfr_jax.models.external_checkpoints import fill_resnet
from fedfr_jax.models.weights import read_weights
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import build_batching, client_batching, open_data
from fedfr_jax.tasks.evaluators import build_finetuning
from fedfr_jax.tasks.experiment import (
    Config,
    Opened,
    TaskSpec,
    Trainer,
    build_experiment,
)
from fedfr_jax.tasks.methods import (
    AlgorithmReader,
    CentralMethod,
    Method,
    MethodReader,
    OnlyLossReader,
)
from fedfr_jax.tasks.model import NetworkReader, StartConfig, build_network, initialized
from fedfr_jax.tasks.reid import data
from fedfr_jax.tasks.reid.data import (
    PartitionConfig,
    ReidSplit,
    build_public_data,
    build_public_images,
    build_split,
    data_usage,
    format_report,
    identity_order,
    report,
    with_identity_batches,
)
from fedfr_jax.tasks.reid.evaluator import (
    EvaluationConfig,
    ReidEvaluator,
    build_evaluation_set,
    cache_first_call,
    local_models,
    retrieval_sheets,
)
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.tasks.trainers import (
    Facts,
    build_local,
    max_epochs,
    network_facts,
    plain_method,
    plain_stage,
)
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
    Evaluator,
    Experiment,
    InputShape,
    Model,
    Preprocessing,
    PyTree,
    Source,
    Stage,
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
    statistics: data.Statistics  # of the cameras


class Networks(NamedTuple):
    """Facts of the clients' network, and of the one with a class for every person."""

    clients: Facts
    central: Facts


class Images(NamedTuple):
    """Training images by client, with labels and camera numbers."""

    train: Dataset | Stream
    stream_bytes: int | None


def reid(settings: Mapping) -> Experiment:
    """Re-identification: any algorithm, all methods from the same initial model.

    Images are read, nothing is trained. What a config may say: `fedfr describe
    sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    return build_experiment(SPEC, settings)


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    federation, public = config.federation, config.partition.public
    source = open_data(config.data)
    data.check_source(source)
    source, public_source = build_public_data(public, source)
    split = build_split(config.partition, source)
    cameras = data.client_cameras(source, split)
    read = lambda rows: source.read(split.train[rows])
    statistics = data.kept_statistics(read, cameras)
    augment = data.fill_statistics(federation.augment, statistics)
    batching = client_batching(federation._replace(augment=augment))
    shown = federation._replace(augment=data.without_statistics(federation.augment))
    people = np.unique(source.labels[split.train], return_inverse=True)[1]
    tested = np.concatenate([x for test in split.tests.values() for x in test])
    facts = report(split, source)
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=Split(
            clients=split,
            people=people.astype(np.int32),
            shared=build_public_images(public, public_source, build_batching(shown)),
            statistics=statistics,
        ),
        population=Population(split.offsets.astype(np.int64), split.num_classes),
        rows=(split.train, tested),
        num_rows=len(split.train),
        batching=batching,
        used=data_usage(split, source, public_source),
        report=facts,
        report_text=format_report(facts),
        is_mirrored=config.evaluation.flip_test,
    )


def build_networks(opened: Opened, network: Part) -> Networks:
    """Facts of the data and the networks, for methods."""
    split = opened.split
    return Networks(
        clients=build_facts(opened, network, int(split.clients.num_classes.max())),
        central=build_facts(opened, network, int(split.people.max()) + 1),
    )


def build_facts(opened: Opened, network: Part, num_classes: int) -> Facts:
    """Facts of a network with `num_classes` identities; evaluators get features."""
    model = build_model(network, opened.source.input_shape, num_classes)
    facts = network_facts(
        opened,
        model,
        offers=opened.split.shared,
        apply=lambda variables, x: model.apply_with_features(variables, x, False)[1],
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
    method: Method | CentralMethod, networks: Networks, opened: Opened, where: str
) -> Trainer:
    """Build the trainer of a method, perhaps with batches of identities."""
    split, identities = opened.split, method.identities_per_batch
    if isinstance(method, CentralMethod):
        augment = data.fill_statistics(method.training.augment, split.statistics)
        training = method.training._replace(augment=augment)
        method = method._replace(training=training)
        trainer = plain_method(method, networks.central, opened, where)
        if identities:
            with naming(where):
                batch = trainer.batching.batch_size
                order = identity_order(split.people, batch, identities)
            trainer = trainer._replace(batch_order=order)
        return trainer
    facts = networks.clients
    classifier = f"params/{facts.model.blocks[-1]}/"
    if method.personal is None:
        method = method._replace(personal=classifier)
    trainer = plain_method(method, facts, opened, where)
    if method.personal == classifier and method.batch_stats != "local":
        # People are found without it, so the server's network is one for everybody.
        trainer = trainer._replace(global_model=trainer.algorithm.global_model)
    if identities:
        with naming(where):
            epochs = max_epochs(method, opened.config.federation)
            algorithm = balanced(trainer.algorithm, opened, identities, epochs)
        trainer = trainer._replace(algorithm=algorithm)
    return trainer


def balanced(algorithm, opened: Opened, identities: int, epochs: int):
    """Balance an algorithm's batches, for rounds of at most `epochs` epochs."""
    options = {"identities": identities, "epochs": epochs, "seed": opened.config.seed}
    split = opened.split.clients
    return with_identity_batches(algorithm, split, opened.batching, **options)


def load(opened: Opened, network, stream_bytes: int | None) -> Images:
    """Load the training images, or stream them."""
    del network
    split, source = opened.split.clients, opened.source
    cameras = data.client_cameras(source, split)
    targets = {"label": split.labels, "camera": cameras}
    if stream_bytes is None:
        train = Dataset({"image": source.read(split.train)}, targets)
    else:
        read = lambda i: source.read(split.train[i])
        train = stream(read, targets, memory=stream_bytes)
    return Images(train, stream_bytes)


def build_stage(opened: Opened, name: str, trainer, networks, images: Images) -> Stage:
    """Stage of a trainer; a central one gets all clients' identities as classes."""
    if isinstance(trainer, CentralTrainer):
        images = images._replace(train=images.train.with_labels(opened.split.people))
    return plain_stage(opened, name, trainer, networks, images)


def build_evaluators(
    opened: Opened, networks: Networks, images: Images, preprocessing: Preprocessing
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
    model = networks.clients.model
    evaluators = evaluator.evaluators
    evaluators["personalized"] = cache_first_call(
        evaluators["personalized"], split.num_clients, model.blocks[-1]
    )
    if evaluation.num_visualized:
        evaluators["pictures"] = retrieval_sheets(
            evaluator, tests, source.names, evaluation.num_visualized
        )
    if local := evaluation.local_training:
        algorithm = build_finetuning(build_local(local.local, local.loss(model)))
        if identities := local.identities_per_batch:
            algorithm = balanced(algorithm, opened, identities, local.epochs)
        evaluators["local"] = local_models(
            evaluator, algorithm, local.epochs, opened, images.train
        )
    return evaluators, ""


SPEC = TaskSpec(
    name="reid",
    sections={
        "partition": PartitionConfig,
        "model": ModelConfig,
        "pretrain": StartConfig,
        "evaluation": EvaluationConfig,
    },
    methods=MethodReader(
        loss=OnlyLossReader(reid_loss),
        algorithm=AlgorithmReader("reid"),
        kinds={"identities_per_batch": Whole},
        defaults=lambda options: {"personal": None},
    ),
    open=open_task,
    network=build_networks,
    method=build_method,
    load=load,
    stage=build_stage,
    evaluators=build_evaluators,
    is_of_features=True,
    has_sweeps=False,
)
