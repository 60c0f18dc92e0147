"""A config of classification as stages: every method from the same first network."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from fedfr_jax.data.partition import ClientSplit, class_report, format_class_report
from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.federated.algorithms.phases import head_first
from fedfr_jax.federated.algorithms.statistics import with_statistics
from fedfr_jax.federated.frozen import frozen
from fedfr_jax.federated.local import moving
from fedfr_jax.federated.model_axis import gathered
from fedfr_jax.federated.settings import AUTO, Federation, check_federation
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.models.projection import with_projection
from fedfr_jax.schema import call, check_ranges, choose, naming
from fedfr_jax.stream import Stream
from fedfr_jax.tasks.classification.central import central_row
from fedfr_jax.tasks.classification.data import clients_of, parts_of
from fedfr_jax.tasks.classification.evaluators import judge_of
from fedfr_jax.tasks.classification.leaves import frozen_pattern, leaves_of
from fedfr_jax.tasks.classification.loss import LOSSES_OF, cross_entropy
from fedfr_jax.tasks.data import feed_of, open_data, other_lowerings, streams
from fedfr_jax.tasks.options import algorithm_maker, keywords, local_of
from fedfr_jax.trees import matching
from fedfr_jax.types import (
    Central,
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

# Keys of a method that are neither its algorithm's, its loss's nor of training.
OWN = ("personal", "draw", "frozen", "finetune_epochs", "batch_stats")


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
    parts, unseen = parts_of(settings["partition"], source)
    num_clients = len(parts.train_offsets) - 1
    check_federation(federation, num_clients)
    mesh = make_mesh(num_model_shards=federation.model_shards)
    shared = shared_of(settings, source)
    trainers = trainers_of(settings, shared, parts, mesh)
    if federation.lanes == AUTO:
        trainers = with_lowered(trainers, settings, source, parts, mesh)
    judge = judge_of(settings["evaluation"], shared.model, shared.first)
    rows = parts.train, parts.test, unseen.train, unseen.test
    most = streams(federation, source, rows, mesh)
    is_images = len(source.image_shape) == 3
    drop_last = federation.drop_last
    feed = feed_of(federation, drop_last=drop_last, is_images=is_images)
    clients = clients_of(source, parts, most)
    others = clients_of(source, unseen, most) if len(unseen.train) else None
    lanes, seed = federation.first_lanes, settings["seed"]
    facts = class_report(parts, source.labels, source.names)
    if others:
        facts["unseen clients"] = len(unseen.train_offsets) - 1
    return Experiment(
        task=Task(
            dataset=clients.train,
            population=clients.population,
            evaluators=judge(clients, others, mesh, feed, lanes=lanes, seed=seed),
            facts=facts,
            text=format_class_report(facts),
        ),
        stages={
            name: stage_of(trainer, clients.train) for name, trainer in trainers.items()
        },
        mesh=mesh,
        feed=feed,
        federation=federation,
        seed=seed,
        remake=lambda row, numbers: trainer_of(
            row, {**settings["methods"][row], **numbers}, *shared, num_clients
        ),
    )


def stage_of(trainer: Federated | Central, train: Dataset | Stream) -> Stage:
    """The stage of a trainer; a central one is given everybody's images."""
    if isinstance(trainer, Central):
        trainer = trainer._replace(dataset=train)
    return Stage(trainer)


class Shared(NamedTuple):
    """What all rows of a config have in common."""

    model: Model
    apply: Callable  # (variables, images [B, ...]) -> logits [B, M], compiled
    first: PyTree  # the variables that they start from


def shared_of(settings: Mapping, source: Source) -> Shared:
    """The config's network and its first variables."""
    model = classifier(settings["model"], source)
    apply = jax.jit(lambda variables, images: model.apply(variables, images, False)[0])
    return Shared(model, apply, model.init(jax.random.key(settings["seed"])))


def trainers_of(
    settings: Mapping, shared: Shared, parts: ClientSplit, mesh: Mesh
) -> dict[str, Federated | Central]:
    """{row: trainer} of config.methods, all on one network."""
    num_clients, trainers = len(parts.train_offsets) - 1, {}
    for name, options in settings["methods"].items():
        kind = options.get("kind", "federated")
        if kind == "central":
            made = central_row(name, options, *shared, len(parts.train), mesh)
        elif kind == "federated":
            made = trainer_of(name, options, *shared, num_clients)
        else:
            raise ValueError(
                f"config.methods.{name}.kind must be federated or central, got "
                f"{kind!r}."
            )
        trainers[name] = made
    return trainers


def with_lowered(
    trainers: Mapping[str, Federated | Central],
    settings: Mapping,
    source: Source,
    parts: ClientSplit,
    mesh: Mesh,
) -> dict[str, Federated | Central]:
    """Federated trainers beside themselves on networks that compute otherwise."""
    lowered = {}
    for lowering in other_lowerings(settings["model"]):
        model = {**settings["model"], "lowering": lowering}
        shared = shared_of({**settings, "model": model}, source)
        lowered[lowering] = trainers_of(settings, shared, parts, mesh)
    return {
        name: trainer
        if isinstance(trainer, Central)
        else trainer._replace(lowered={k: of[name] for k, of in lowered.items()})
        for name, trainer in trainers.items()
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
      finetune_epochs: epochs of the personal leaves alone at the start of a round,
        beside those of the federation, see `head_first`; 0 for none.
      batch_stats: average, local or first, see `with_statistics`.
      label_smoothing, and other keywords of the row's loss: see `loss.py`.
    """
    section, options = f"methods.{name}", dict(options)
    options.pop("kind", None)
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
            "model": model,
        }
        make, rest = algorithm_maker(section, algorithm, options, others, facts)
        own = {key: rest.pop(key) for key in OWN if key in rest}
        terms = {key: rest.pop(key) for key in keywords(make_loss) if key in rest}
        where = leaves_of(model, own.get("personal", ""))
        local = call(section, local_of, rest, call(section, make_loss, terms, model))
        local = with_frozen(local, model, own.get("frozen", ""), first)
        if epochs := own.get("finetune_epochs", 0):
            local = finetuning_first(local, where, epochs, algorithm, first)
        made = make(local)
        statistics = own.get("batch_stats", "average")
        made = with_statistics(made, statistics)
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


def finetuning_first(local, where: str, epochs: int, algorithm: str, first: PyTree):
    """Local training that begins with epochs of the personal leaves alone.

    Raises:
      ValueError: without such leaves, for a number of epochs out of range, or an
        algorithm that looks into a client's training.
    """
    check_ranges("", {"finetune_epochs": epochs}, {"finetune_epochs": (0, math.inf)})
    if algorithm != "fedavg":
        raise ValueError(
            f"finetune_epochs must go with the algorithm fedavg, got {algorithm!r}."
        )
    if not where:
        raise ValueError("finetune_epochs must go with personal leaves, got none.")
    jax.eval_shape(lambda params: moving(where, params)[0], first["params"])
    return head_first(local, head=where, epochs=epochs)


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
