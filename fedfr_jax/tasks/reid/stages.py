"""A config of re-identification as stages: every method from the same first network.

Clients keep their classifier and share the rest (FedPav: Zhuang et al. 2020,
arXiv:2008.11560, algorithm 1), by any algorithm. A central row is trained on the images
of all clients, with a classifier of all their people.
"""

from collections.abc import Mapping

import numpy as np

from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation, check_federation, mesh_of
from fedfr_jax.schema import call
from fedfr_jax.stream import Stream, stream
from fedfr_jax.tasks.data import (
    feed_of,
    open_data,
    preprocessing_of,
    reported,
    streams,
)
from fedfr_jax.tasks.reid import colours
from fedfr_jax.tasks.reid.data import ReidSplit, split_of, used_of
from fedfr_jax.tasks.reid.judge import Judge
from fedfr_jax.tasks.reid.judged import (
    Evaluating,
    Judged,
    evaluation_of,
    judged_of,
)
from fedfr_jax.tasks.reid.local_models import local_models, local_training_of, once
from fedfr_jax.tasks.reid.methods import Parts, clients_model, trainers_of
from fedfr_jax.tasks.reid.pictures import pictures
from fedfr_jax.tasks.reid.public import public_of, shared_of
from fedfr_jax.tasks.reid.report import format_report, report
from fedfr_jax.tasks.start_weights import check_pretrain
from fedfr_jax.tasks.trainers import stage_of
from fedfr_jax.types import (
    Central,
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
    """Re-identification: any algorithm, each method from the same first network.

    Images are read, nothing is trained. What a config may say: `fedfr describe
    sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    federation = call("federation", Federation, settings["federation"])
    check_pretrain(settings)
    evaluating = evaluation_of(settings["evaluation"])
    scenario = dict(settings["partition"])
    public = scenario.pop("public", {})
    source, shared = public_of(public, open_data(settings["data"]))
    split = split_of(scenario, source)
    check_federation(federation, split.num_clients)
    mesh = mesh_of(federation)
    tested = np.concatenate([x for test in split.tests.values() for x in test])
    most = streams(federation, source, (split.train, tested), mesh)
    train = table_of(source, split, most)
    parts = parts_of(settings, federation, source, split, train, mesh)
    shown = federation._replace(augment=colours.without(federation.augment))
    parts = parts._replace(facts=shared_of(public, shared, feed_of(shown)))
    trainers = trainers_of(settings, parts)
    judged = judged_of(source, split, most)
    how = preprocessing_of(settings, source)._replace(mirrored=evaluating.flip)
    evaluators = evaluators_of(settings, evaluating, judged, source, parts, train, how)
    facts = report(split, source)
    return Experiment(
        task=Task(
            dataset=train,
            population=population_of(split),
            evaluators=evaluators,
            **reported(facts, format_report(facts), source.passed_over),
            preprocessing=how,
            is_of_features=True,
            used=used_of(split, source, shared),
        ),
        stages={k: stage_with_classes(of, train, parts) for k, of in trainers.items()},
        mesh=mesh,
        feed=parts.feed,
        federation=federation,
        seed=settings["seed"],
    )


def evaluators_of(
    settings: Mapping,
    evaluating: Evaluating,
    judged: Judged,
    source: Source,
    parts: Parts,
    train: Dataset | Stream,
    how: Preprocessing,
) -> dict[str, Evaluator]:
    """One network, clients' own, what their training makes of them, and pictures."""
    plain, seed = normalization(how), parts.seed
    judge = Judge(judged, parts.mesh, evaluating, plain=plain, seed=seed)
    model = clients_model(settings["model"], parts)
    found, classifier = judge.evaluators, model.blocks[-1]
    num_clients = parts.split.num_clients
    found["personalised"] = once(found["personalised"], num_clients, classifier)
    if evaluating.pictures:
        found["pictures"] = pictures(judge, judged, source.names, evaluating.pictures)
    if evaluating.local:
        found["local"] = local_of_clients(evaluating.local, model, parts, judge, train)
    return found


def parts_of(settings, federation, source, split, train, mesh) -> Parts:
    """What rows are made of, but for the facts of public images."""
    read = lambda rows: train.take(rows).images
    cameras = colours.cameras_of(source, split)
    statistics = colours.kept_statistics(read, cameras)
    told = colours.filled(federation.augment, statistics)
    people = np.unique(source.labels[split.train], return_inverse=True)[1]
    return Parts(
        federation=federation,
        split=split,
        people=people.astype(np.int32),
        image_shape=source.image_shape,
        feed=feed_of(federation._replace(augment=told), drop_last=federation.drop_last),
        statistics=statistics,
        facts={},
        mesh=mesh,
        seed=settings["seed"],
    )


def table_of(
    source: Source, split: ReidSplit, stream_bytes: int | None
) -> Dataset | Stream:
    """Training images by client, with their labels and the number of their camera."""
    targets = {"label": split.labels, "camera": colours.cameras_of(source, split)}
    if stream_bytes is None:
        return Dataset({"image": source.read(split.train)}, targets)
    read = lambda i: source.read(split.train[i])
    return stream(read, targets, memory=stream_bytes)


def population_of(split: ReidSplit) -> Population:
    """What the clients own."""
    return Population(split.offsets.astype(np.int64), split.num_classes)


def stage_with_classes(trainer, train: Dataset | Stream, parts: Parts) -> Stage:
    """The stage of a trainer; a central one is given everybody's people as classes."""
    if isinstance(trainer, Central):
        train = train.with_labels(parts.people)
    return stage_of(trainer, train)


def local_of_clients(
    after: Mapping, model: Model, parts: Parts, judge: Judge, train
) -> Evaluator:
    """The evaluator of config.evaluation.local."""
    algorithm, epochs, identities = local_training_of(after, model)
    if identities:
        algorithm = parts.balanced(algorithm, identities, epochs)
    return local_models(
        *(judge, algorithm, parts.feed, train, population_of(parts.split)),
        mesh=parts.mesh,
        local_epochs=epochs,
        lanes=parts.federation.first_lanes,
        seed=parts.seed,
    )
