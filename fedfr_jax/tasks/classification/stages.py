"""A config of classification as stages: every method from the same first network."""

import inspect
import math
from collections.abc import Mapping

import jax
import numpy as np

from fedfr_jax.data.augment import normalize
from fedfr_jax.data.partition import ClientSplit, class_report, format_class_report
from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.federated.algorithms.statistics import with_statistics
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.local import frozen
from fedfr_jax.federated.model_axis import gathered
from fedfr_jax.federated.settings import AUTO, Federation, check_federation
from fedfr_jax.feed import Feed
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.models.projection import with_projection
from fedfr_jax.schema import call, check_keys, check_ranges, choose, naming
from fedfr_jax.stream import stream
from fedfr_jax.tasks.classification.accuracy import Accuracy, with_target
from fedfr_jax.tasks.classification.leaves import frozen_pattern, leaves_of
from fedfr_jax.tasks.classification.loss import LOSSES_OF, cross_entropy
from fedfr_jax.tasks.data import (
    feed_of,
    open_data,
    other_lowerings,
    split,
    streams,
)
from fedfr_jax.tasks.options import algorithm_maker, keywords, local_of
from fedfr_jax.trees import matching
from fedfr_jax.types import (
    Dataset,
    Experiment,
    Federated,
    Local,
    Model,
    PyTree,
    Source,
    Stage,
    Task,
)

OWN = ("personal", "draw", "frozen", "batch_stats")  # keys of a method


def classification(settings: Mapping) -> Experiment:
    """Classification: any algorithm, each method from the same first network.

    Images are read, nothing is trained.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    federation = call("federation", Federation, settings["federation"])
    if settings.get("pretrain"):
        given = sorted(settings["pretrain"])
        raise ValueError(f"config.pretrain must be empty with this task, got {given}.")
    source = open_data(settings["data"])
    parts = split({"name": "iid", **settings["partition"]}, source)
    if not isinstance(parts, ClientSplit):
        name = settings["partition"]["name"]
        raise ValueError(f"config.partition.name must split classes, got {name!r}.")
    if not len(parts.test):
        raise ValueError("config.partition must leave test images, got none.")
    num_clients = len(parts.train_offsets) - 1
    check_federation(federation, num_clients)
    mesh = make_mesh(num_model_shards=federation.model_shards)
    trainers = trainers_of(settings, source, num_clients)
    if federation.lanes == AUTO:
        for lowering in other_lowerings(settings["model"]):
            model = {**settings["model"], "lowering": lowering}
            others = trainers_of({**settings, "model": model}, source, num_clients)
            for name, trainer in trainers.items():
                lowered = {**trainer.lowered, lowering: others[name]}
                trainers[name] = trainer._replace(lowered=lowered)
    most = streams(federation, source, (parts.train, parts.test), mesh)
    feed = feed_of(federation, drop_last=federation.drop_last)
    known = ("batch_size", "target_accuracy")
    check_keys("config.evaluation", settings["evaluation"], known)
    evaluation = {"batch_size": 64, **settings["evaluation"]}
    bounds = {"batch_size": (1, math.inf), "target_accuracy": (0, 1)}
    check_ranges("config.evaluation.", evaluation, {k: bounds[k] for k in evaluation})
    judged = Feed(evaluation["batch_size"], normalize())
    test = table_of(source, parts.test, most)
    facts = class_report(parts, source.labels, source.names)
    return Experiment(
        task=Task(
            dataset=table_of(source, parts.train, most),
            population=Population(
                parts.train_offsets.astype(np.int64),
                np.full(num_clients, parts.num_classes, np.int32),
            ),
            evaluators=with_target(
                Accuracy(test, parts.test_offsets, mesh, judged).evaluators,
                evaluation.get("target_accuracy"),
            ),
            facts=facts,
            text=format_class_report(facts),
        ),
        stages={name: Stage(trainer) for name, trainer in trainers.items()},
        mesh=mesh,
        feed=feed,
        federation=federation,
        seed=settings["seed"],
    )


def table_of(source: Source, rows: np.ndarray, stream_bytes: int | None):
    """Images and labels of source rows [n], on the host or streamed from the source."""
    labels = source.labels[rows].astype(np.int32)
    if stream_bytes is None:
        return Dataset.labelled(source.read(rows), labels)
    return stream(lambda i: source.read(rows[i]), labels, memory=stream_bytes)


def trainers_of(
    settings: Mapping, source: Source, num_clients: int
) -> dict[str, Federated]:
    """{row: trainer} of config.methods, all on one network."""
    model = classifier(settings["model"], source)
    apply = jax.jit(lambda variables, images: model.apply(variables, images, False)[0])
    first = model.init(jax.random.key(settings["seed"]))
    return {
        name: trainer_of(name, options, model, apply, first, num_clients)
        for name, options in settings["methods"].items()
    }


def classifier(settings: Mapping, source: Source) -> Model:
    """The config's network with a logit for every class of the source.

    Its key `projection` puts two layers before the last, see `with_projection`.

    Raises:
      ValueError: for an unknown network, or one whose output is of another size.
    """
    settings, num_classes = dict(settings), len(source.names)
    added = {key: settings.pop(key) for key in ("projection",) if key in settings}
    known = inspect.signature(MODELS.get(settings.get("name"), lambda: None)).parameters
    key = "num_classes" if "num_classes" in known else "embedding_dim"
    if key in known:
        settings.setdefault(key, num_classes)
    model = choose("model", MODELS, settings, source.image_shape)
    if model.embedding_dim != num_classes:
        raise ValueError(
            f"config.model.{key} must be the {num_classes} classes of the data, got "
            f"{model.embedding_dim}."
        )
    if added:
        model = call("model", with_projection, added, model)
    return gathered(model)


def trainer_of(name, options, model, apply, first, num_clients) -> Federated:
    """A row of config.methods: an `algorithm`, a client's training, what is personal.

    Keys beside those of the algorithm's factory and of `local_of`:
      personal: regular expression over leaf paths, or one of `leaves_of`, such as
        {"blocks": K_P}; "" for nothing.
      draw: True draws a new client's personal leaves, instead of the first network's.
      frozen: the same, of params that do not move, as FedBABU's head.
      batch_stats: average, local or first, see `with_statistics`.
      label_smoothing, and other keywords of the row's loss: see `loss.py`.
    """
    section, options = f"methods.{name}", dict(options)
    algorithm = options.pop("algorithm", "fedavg")
    with naming(f"config.{section}"):
        make_loss = LOSSES_OF.get(algorithm, cross_entropy)
        others = {*keywords(local_of), *keywords(make_loss), *OWN}
        top = model.blocks[-1] if model.blocks else "classifier"
        facts = {
            "num_clients": num_clients,
            "num_classes": model.embedding_dim,
            "classes": f"^params/{top}/kernel$",
            "spreadout": spreadout_sum,
        }
        make, rest = algorithm_maker(section, algorithm, options, others, facts)
        own = {key: rest.pop(key) for key in OWN if key in rest}
        terms = {key: rest.pop(key) for key in keywords(make_loss) if key in rest}
        local = call(section, local_of, rest, call(section, make_loss, terms, model))
        made = make(with_frozen(local, model, own.get("frozen", ""), first))
        statistics = own.get("batch_stats", "average")
        made = with_statistics(made, statistics)
        where = leaves_of(model, own.get("personal", ""))
        if own.get("draw") and not where:
            raise ValueError("draw must go with personal leaves, got none.")
        made = personal(made, where, draw=model.init if own.get("draw") else None)
        jax.eval_shape(made.init, first)  # a pattern must match: before any compile
    return Federated(
        algorithm=made,
        start=lambda variables: first,
        apply=apply,
        network=None if where or statistics == "local" else made.network,
        network_apply=apply,
    )


def with_frozen(
    local: Local, model: Model, given: str | Mapping, first: PyTree
) -> Local:
    """`local` that does not move what the key `frozen` selects of `first`, if anything.

    Raises:
      ValueError: when it selects no leaf.
    """
    pattern = frozen_pattern(model, given)
    if not pattern:
        return local
    matching(pattern)({"params": first["params"]})
    return frozen(local, pattern)
