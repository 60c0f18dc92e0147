"""Stages of a re-identification config.

Clients keep their classifier and share the rest (FedPav: Zhuang et al. 2020,
arXiv:2008.11560, algorithm 1), by any algorithm. A central row is trained on the images
of all clients, with a classifier of all their people.
"""

from collections.abc import Mapping

import numpy as np

from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation, build_mesh, check_federation
from fedfr_jax.models import MODELS
from fedfr_jax.schema import call, kinds_of
from fedfr_jax.tasks.data import (
    build_batching,
    build_preprocessing,
    open_data,
    should_stream,
    with_report,
)
from fedfr_jax.tasks.early_checks import (
    check_each_key,
    check_member,
    check_methods,
    check_together,
)
from fedfr_jax.tasks.model import with_name
from fedfr_jax.tasks.reid import data
from fedfr_jax.tasks.reid.data import (
    SCENARIOS,
    ReidSplit,
    build_split,
    data_usage,
    format_report,
    report,
)
from fedfr_jax.tasks.reid.evaluator import (
    EvaluationConfig,
    EvaluationSet,
    ReidEvaluator,
    build_client_training,
    build_evaluation_set,
    cache_first_call,
    local_models,
)
from fedfr_jax.tasks.reid.methods import (
    METHODS,
    Parts,
    clients_model,
    trainers_of,
)
from fedfr_jax.tasks.reid.public_data import (
    PublicDataConfig,
    build_public_data,
    build_public_images,
)
from fedfr_jax.tasks.reid.retrieval_page import retrieval_sheets
from fedfr_jax.tasks.start_weights import KEYS
from fedfr_jax.tasks.trainers import stage_of
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
    Evaluator,
    Experiment,
    Model,
    Preprocessing,
    Source,
    Stage,
    Task,
)


def reid(settings: Mapping) -> Experiment:
    """Re-identification: any algorithm, all methods from the same initial model.

    Images are read, nothing is trained. What a config may say: `fedfr describe
    sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    federation = call("federation", Federation, settings["federation"])
    evaluation = call("evaluation", EvaluationConfig, settings["evaluation"])
    check_config(settings)
    scenario = dict(settings["partition"])
    public = scenario.pop("public", {})
    source, shared = build_public_data(public, open_data(settings["data"]))
    split = build_split(scenario, source)
    check_federation(federation, split.num_clients)
    mesh = build_mesh(federation)
    tested = np.concatenate([x for test in split.tests.values() for x in test])
    stream_bytes = should_stream(federation, source, (split.train, tested), mesh)
    train = build_dataset(source, split, stream_bytes)
    parts = build_parts(settings, federation, source, split, train, mesh)
    shown = federation._replace(augment=data.without_statistics(federation.augment))
    parts = parts._replace(
        facts=build_public_images(public, shared, build_batching(shown))
    )
    trainers = trainers_of(settings, parts)
    evaluation_set = build_evaluation_set(source, split, stream_bytes)
    preprocessing = build_preprocessing(settings, source)._replace(
        mirrored=evaluation.flip_test
    )
    evaluators = build_evaluators(
        settings, evaluation, evaluation_set, source, parts, train, preprocessing
    )
    facts = report(split, source)
    return Experiment(
        task=Task(
            dataset=train,
            population=build_population(split),
            evaluators=evaluators,
            **with_report(facts, format_report(facts), source.passed_over),
            preprocessing=preprocessing,
            is_of_features=True,
            used=data_usage(split, source, shared),
        ),
        stages={k: stage_with_classes(of, train, parts) for k, of in trainers.items()},
        mesh=mesh,
        batching=parts.feed,
        federation=federation,
        seed=settings["seed"],
    )


def check_config(settings: Mapping) -> None:
    """Raise ValueError for a wrong key, kind or number, before data is opened."""
    network = with_name("reid", settings["model"])
    check_member("model", MODELS, network, ("weights", "dtype"))
    scenarios, partition = {**PARTITIONS, **SCENARIOS}, settings["partition"]
    public, kinds = partition.get("public", {}), kinds_of(PublicDataConfig)
    others = "public", "held_out_domains"
    check_together(
        lambda: check_member("partition", scenarios, partition, others),
        lambda: check_each_key("partition.public", public, kinds),
        lambda: check_each_key("pretrain", settings["pretrain"], KEYS),
    )
    check_methods(METHODS, settings["methods"])


def build_evaluators(
    settings: Mapping,
    evaluation: EvaluationConfig,
    evaluation_set: EvaluationSet,
    source: Source,
    parts: Parts,
    train: Dataset | Stream,
    preprocessing: Preprocessing,
) -> dict[str, Evaluator]:
    """Build the evaluators: global, personalized, after local training, and images."""
    preprocess, seed = normalization(preprocessing), parts.seed
    evaluator = ReidEvaluator(
        evaluation_set, parts.mesh, evaluation, plain=preprocess, seed=seed
    )
    model = clients_model(settings["model"], parts)
    evaluators, classifier = evaluator.evaluators, model.blocks[-1]
    num_clients = parts.split.num_clients
    evaluators["personalized"] = cache_first_call(
        evaluators["personalized"], num_clients, classifier
    )
    if evaluation.num_visualized:
        evaluators["pictures"] = retrieval_sheets(
            evaluator, evaluation_set, source.names, evaluation.num_visualized
        )
    if evaluation.local_training:
        evaluators["local"] = client_training(
            evaluation.local_training, model, parts, evaluator, train
        )
    return evaluators


def build_parts(settings, federation, source, split, train, mesh) -> Parts:
    """Build what methods need, except public images."""
    read = lambda rows: train.take(rows).images
    cameras = data.client_cameras(source, split)
    statistics = data.kept_statistics(read, cameras)
    augment = data.fill_statistics(federation.augment, statistics)
    people = np.unique(source.labels[split.train], return_inverse=True)[1]
    return Parts(
        federation=federation,
        split=split,
        people=people.astype(np.int32),
        input_shape=source.input_shape,
        feed=build_batching(
            federation._replace(augment=augment), drop_last=federation.drop_last
        ),
        statistics=statistics,
        facts={},
        mesh=mesh,
        seed=settings["seed"],
    )


def build_dataset(
    source: Source, split: ReidSplit, stream_bytes: int | None
) -> Dataset | Stream:
    """Training images by client, with labels and camera numbers."""
    targets = {"label": split.labels, "camera": data.client_cameras(source, split)}
    if stream_bytes is None:
        return Dataset({"image": source.read(split.train)}, targets)
    read = lambda i: source.read(split.train[i])
    return stream(read, targets, memory=stream_bytes)


def build_population(split: ReidSplit) -> Population:
    """Population of the clients."""
    return Population(split.offsets.astype(np.int64), split.num_classes)


def stage_with_classes(trainer, train: Dataset | Stream, parts: Parts) -> Stage:
    """Stage of a trainer; a central one gets all clients' identities as classes."""
    if isinstance(trainer, CentralTrainer):
        train = train.with_labels(parts.people)
    return stage_of(trainer, train)


def client_training(
    settings: Mapping, model: Model, parts: Parts, evaluator: ReidEvaluator, train
) -> Evaluator:
    """Build the evaluator of config.evaluation.local_training."""
    algorithm, epochs, identities = build_client_training(settings, model)
    if identities:
        algorithm = parts.balanced(algorithm, identities, epochs)
    return local_models(
        *(evaluator, algorithm, parts.feed, train, build_population(parts.split)),
        mesh=parts.mesh,
        local_epochs=epochs,
        clients_per_device=parts.federation.clients_per_device,
        seed=parts.seed,
    )
