"""Methods of face recognition: any algorithm, and FedFR's terms.

Clients train a backbone on a margin softmax over their own classes; class embeddings
and the branch stay with them (`personal`). The server's backbone is the generic
network, what the algorithm deploys at a client the personalized one. FedFR's terms are
for an algorithm that asks for features of the networks of the round before, as FedFR
does: `use_public_data` adds the global data, `contrastive_weight` the contrastive term,
`branch` the decoupled feature customization; all of them are FedFR. FedFace is FedAvg
with `spreadout`, local training `personal="."`; `adaptation` appends the adaptation of
Yu et al. to a method without a branch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.central.settings import Training
from fedfr_jax.data.partition.identities import IdentityPartition
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.spreadout import fedface
from fedfr_jax.federated.parameter_packing import (
    on_unpacked,
    pack_networks,
    pack_variables,
    unpack,
)
from fedfr_jax.federated.settings import Federation
from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.spreadout import spread
from fedfr_jax.ranges import Cosine, NonNegative, Positive, Whole
from fedfr_jax.schema import (
    call,
    check_choice,
    check_settings,
    keywords,
    kinds_of,
    naming,
)
from fedfr_jax.tasks.faces.distillation import Distill, open_distill, with_distillation
from fedfr_jax.tasks.faces.final_adaptation import (
    build_face_adaptation,
    read_adaptation,
)
from fedfr_jax.tasks.faces.frozen_features import (
    class_mean_start,
    frozen_features,
    prepare_features,
)
from fedfr_jax.tasks.faces.loss import (
    backbone_of,
    branch_settings,
    build_rule,
    classifier,
    client_features,
    face_loss,
    init_local,
    learned,
    of_backbone,
    on_variables,
    with_margin_state,
    with_start,
)
from fedfr_jax.tasks.method_context import MethodContext
from fedfr_jax.tasks.methods import algorithm_of
from fedfr_jax.tasks.task_methods import TaskMethods
from fedfr_jax.tasks.trainers import federated_trainer
from fedfr_jax.types import FederatedTrainer, FinalAdaptation, Model, PyTree

OWN_CLASSES = "^params/(head$|branch/|margin/)"
BACKBONE = "backbone"  # where it lies among an algorithm's params, packed or not
# Keys that look at the leaves of a backbone, which then is not packed.
NAMED_LEAVES = {"aggregation", "init_per_client", "personal_epochs", "optimizer"}
NAMED_LEAVES |= {"learning_rate_multipliers", "personal"}
SGD = {"momentum": 0.9, "weight_decay": 5e-4}
DEFAULTS = {
    "learning_rate": 1e-3,
    "decay_epochs": (8, 6, 4, 3),
}


class FaceTerms(NamedTuple):
    """FedFR's terms, keys of a method below `algorithm`.

    The defaults are FedFR's paper's, or the released code's where it says nothing, but
    for `initial_previous_model`, which is ours (the code takes a random network).
    """

    use_public_data: bool = True  # train on the public classes too, with hard negatives
    hard_negative_threshold: Cosine | None = (
        0.4  # cosine above which they are hard; None: none is
    )
    max_hard_negatives: Whole = 0  # of a client; 0 has no limit
    hard_negative_level: Literal["image", "class"] = (
        "image"  # by image, or by class with all its images
    )
    contrastive_weight: NonNegative = 5.0  # this and the next five: see `face_loss`
    contrastive_temperature: Positive = 0.5
    branch: str | Mapping | None = "bce"
    converter: Literal["linear", "bottleneck"] = "linear"
    detach_branch: bool = False
    branch_reweighting: Literal["corrected", "official"] | None = None
    initial_previous_model: Literal["global", "random"] = (
        "global"  # or random, the previous network of a new client
    )
    # Start all class embeddings from mean features of the pretrained network, not from
    # N(0, 0.01^2) and the pretrained head.
    init_head_from_class_means: bool = False
    # Cosine above which the server pushes the classes of a cohort's clients apart after
    # a round, or {"threshold": it, and `steps`, `learning_rate`, `momentum` and
    # `weight_decay` of `spread`}; None does not.
    spreadout: Cosine | Mapping | None = None
    # `epochs` of a last round, and the keywords of `build_face_adaptation`; None for
    # none.
    adaptation: Mapping | None = None


LOSS_TERMS = [name for name in FaceTerms._fields if name in keywords(face_loss)]
PLAIN = FaceTerms(use_public_data=False, contrastive_weight=0.0, branch=None)


# Keys of a method that are about what the server is sent.
SERVER_KEYS = ("privacy", "attack", "on_bad_update")


class FaceMethod(NamedTuple):
    """A federated method, before images are loaded."""

    trainer: FederatedTrainer
    init_head_from_class_means: bool = (
        False  # start it from the public classes' mean features
    )
    distill: Distill | None = None  # its teacher


def kinds_of_terms(factory: Callable) -> Mapping:
    """{key of `FaceTerms`: annotation} for an algorithm that takes them, else {}."""
    return kinds_of(FaceTerms) if "reference_features" in keywords(factory) else {}


METHODS = TaskMethods(
    task="faces",
    loss_of=face_loss,
    read_loss=build_rule,
    algorithm="fedfr",
    terms_of=kinds_of_terms,
    algorithm_defaults={"contrastive_weight": 5.0},  # of MOON
    defaults=DEFAULTS,
    keys=("distill",),
    central_keys=Training._fields,
)


def read_terms(section: str, options: Mapping) -> tuple[FaceTerms, dict]:
    """(FedFR's terms of a method, its key `algorithm` without them), checked.

    Raises:
      ValueError: for a term, or a setting of one, that is unknown or out of range, or
        terms that exclude each other or the method's loss.
    """
    name, settings = algorithm_of(section, options, "fedfr")
    kinds = kinds_of_terms(ALGORITHMS[name])
    terms = {} if kinds else PLAIN._asdict()
    terms |= {key: settings.pop(key) for key in kinds if key in settings}
    with naming(f"config.{section}"):
        terms = call(f"{section}.algorithm", FaceTerms, terms)
        _check_exclusions(terms, options)
        # Clients and the network, which come with the data, change no check.
        _loss_of(terms, options.get("loss", ""), teacher=None, num_clients=1)(None)
        build_spread(terms.spreadout)
        if terms.adaptation is not None:
            read_adaptation(terms.adaptation)
    return terms, {"name": name, **settings}


def methods_of(settings: Mapping, model: Model, partition: IdentityPartition) -> dict:
    """Build {name: method} of config.methods."""
    return {
        name: build_method(
            name,
            options,
            settings["pretrain"],
            model,
            partition,
            Federation(**settings["federation"]),
            settings.get("seed", 0),
        )
        for name, options in settings["methods"].items()
    }


def build_method(
    name: str,
    options: Mapping,
    pretraining: Mapping,
    model: Model,
    partition: IdentityPartition,
    federation: Federation = Federation(),  # noqa: B008 (a constant)
    seed: int = 0,
) -> FaceMethod | Training:
    """Build a method: `kind` federated (the default), or central on all images.

    A central one takes the keys of `pretrain` that it does not set itself.
    """
    section, options = f"methods.{name}", dict(options)
    kind = options.pop("kind", "federated")
    check_choice(f"config.{section}.kind", kind, ("federated", "central"))
    if kind == "federated":
        counts = {
            "num_classes": int(partition.num_classes.max()),
            "num_clients": len(partition.num_classes),
            "num_public": len(partition.public_identities),
        }
        return face_method(section, options, model, federation, seed=seed, **counts)
    inherited = dict(pretraining)
    return call(section, Training, {**inherited, **options})


def face_method(
    section: str,
    options: Mapping,
    model: Model,
    federation: Federation = Federation(),  # noqa: B008 (a constant)
    *,
    num_classes: int,
    num_clients: int = 0,
    num_public: int = 1,
    seed: int = 0,
) -> FaceMethod:
    """Build a federated face method, FedFR unless `algorithm` is set.

    Args:
      options: keys of `Method`, with `FaceTerms` below `algorithm`.
      num_classes: M, the most identities of any client.
      num_clients: of the population.
      num_public: public classes.
      seed: draws attackers.

    Raises:
      ValueError: for an unknown option, one out of range, or options that exclude each
        other.
    """
    terms, algorithm = read_terms(section, options)
    options = {**options, "algorithm": algorithm}
    teacher = open_distill(section, options.pop("distill", None), model)
    loss = options.pop("loss", "")
    rule = build_rule(loss)
    takes_terms = bool(kinds_of_terms(ALGORITHMS[algorithm["name"]]))
    is_packed = takes_terms and not options.keys() & NAMED_LEAVES
    model = on_unpacked(with_margin_state(model) if rule and rule.state else model)
    loss_of = _loss_of(terms, loss, teacher, num_clients)
    task = METHODS._replace(
        loss_of=lambda model: loss_of(of_backbone(model)), defaults=_defaults(options)
    )
    context = _context(task, terms, rule, model, num_classes, num_public)
    facts = {"num_clients": num_clients, "model": classifier(model)}
    if takes_terms:
        facts |= _offers(terms, rule, model, is_packed)
    context = context._replace(facts=facts, federation=federation, seed=seed)
    with naming(f"config.{section}"):
        trainer = federated_trainer(section, options, context)
        algorithm, last = trainer.algorithm, None
        if terms.adaptation is not None:
            # A client's own work after the last round, which the server never sees.
            plain = {k: v for k, v in options.items() if k not in SERVER_KEYS}
            last = last_round(terms.adaptation, section, plain, context, model)
            if algorithm.privacy is not None:  # whose server has the mechanism's state
                last = last._replace(algorithm=on_inner(last.algorithm))
        if spread_apart := build_spread(terms.spreadout):
            algorithm = fedface(algorithm, spread_apart, num_clients=num_clients)
    if is_packed:
        algorithm = pack_variables(algorithm, at=BACKBONE)
        last = last and last._replace(
            algorithm=pack_variables(last.algorithm, at=BACKBONE)
        )
    trainer = trainer._replace(
        algorithm=algorithm,
        global_model=lambda server: context.network(algorithm.global_model(server)),
        final_adaptation=last,
    )
    return FaceMethod(
        trainer, terms.init_head_from_class_means and terms.use_public_data, teacher
    )


def _defaults(options: Mapping) -> Mapping:
    """Defaults of a method; momentum and decay are those of SGD."""
    optimizer = options.get("optimizer", "sgd")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else optimizer
    return {**DEFAULTS, **(SGD if name in ("sgd", None) else {})}


def _context(
    task: TaskMethods,
    terms: FaceTerms,
    rule: Margin | None,
    model: Model,
    num_classes: int,
    num_public: int,
) -> MethodContext:
    """Context that faces offer to any algorithm, with params "backbone" and "head"."""
    draw_own = init_local(
        num_classes,
        model.embedding_dim,
        branch=branch_settings(terms.branch)["name"],
        converter=terms.converter,
        std=0.0 if terms.init_head_from_class_means else 0.01,
        others=learned(rule, num_classes),
    )

    def start(variables: PyTree) -> PyTree:
        own = jax.eval_shape(draw_own, jax.random.key(0))
        own = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), own)
        own |= learned(rule, num_classes)
        params = {"backbone": variables["params"]["backbone"], **own}
        if terms.use_public_data:
            params["phi"] = variables["params"]["phi"]
        return {**with_start(variables, rule), "params": params}

    def draw(key: jax.Array) -> PyTree:
        variables = model.init(key)
        phi = jnp.zeros((num_public, model.embedding_dim))
        params = {"backbone": variables["params"], "phi": phi}
        return start({**variables, "params": params})

    return MethodContext(
        task=task,
        model=on_variables(model),
        apply=client_features(model, converter=terms.converter),
        initial=lambda: draw(jax.random.key(0)),
        shapes=jax.eval_shape(draw, jax.random.key(0)),
        num_rows=0,
        mesh=None,
        facts={},
        prefix="backbone/",
        kept=OWN_CLASSES,
        draw=draw,
        draw_kept=lambda key: {"params": draw_own(key), "batch_stats": {}},
        start=start,
        network=lambda variables: backbone_of(unpack(variables)),
    )


def _loss_of(
    terms: FaceTerms, loss: str | Mapping, teacher: Distill | None, num_clients: int
) -> Callable:
    """Build model -> loss of a client, with distillation if there is a teacher."""
    own = {k: v for k, v in terms._asdict().items() if k in LOSS_TERMS}
    loss_of = partial(face_loss, loss=loss, num_clients=num_clients, **own)
    return partial(with_distillation, loss_of, distill=teacher) if teacher else loss_of


def _offers(
    terms: FaceTerms, rule: Margin | None, model: Model, is_packed: bool
) -> dict:
    """Functions that FedFR needs from the task."""
    embed = backbone_features(model)
    threshold = terms.hard_negative_threshold if terms.use_public_data else None
    prepare = None
    if terms.contrastive_weight or threshold is not None:
        prepare = prepare_features(
            embed,
            threshold=threshold,
            capacity=terms.max_hard_negatives,
            level=terms.hard_negative_level,
        )

    def drawn(key: jax.Array) -> PyTree:
        network = with_start(model.init(key), rule)
        return pack_networks(network) if is_packed else network

    return {
        "identities": True,
        "reference_features": previous_features(embed)
        if terms.contrastive_weight
        else None,
        "prepare": prepare,
        "initial_previous_model": drawn
        if terms.initial_previous_model == "random"
        else None,
        "begin": class_mean_start(embed) if terms.init_head_from_class_means else None,
    }


def _check_exclusions(terms: FaceTerms, options: Mapping) -> None:
    """Raise ValueError for options that exclude each other."""
    is_random = terms.initial_previous_model == "random"
    if terms.adaptation is not None and terms.branch is not None:
        raise ValueError(f"branch must be None with adaptation, got {terms.branch!r}.")
    is_local = options.get("batch_stats", "average") == "local"
    if is_local and (terms.adaptation is not None or is_random):
        raise ValueError(
            "batch_stats must be average or random_client with adaptation or a random "
            "initial_previous_model, got 'local'."
        )


def build_spread(spreadout: float | Mapping | None) -> Callable | None:
    """Build `spread` of `fedface` from the key `spreadout`; None without one.

    Raises:
      ValueError: for an option that `spread` does not have, or one out of range.
    """
    if spreadout is None:
        return None
    is_number = not isinstance(spreadout, Mapping)
    settings = {"threshold": spreadout} if is_number else dict(spreadout)
    kinds = {"threshold": Cosine, **kinds_of(spread)}
    for name in ("weights", "margin", "class_mask"):
        del kinds[name]
    settings = check_settings("spreadout", settings, kinds)
    if "threshold" not in settings:
        raise ValueError("spreadout needs the key threshold, the cosine.")
    settings["margin"] = settings.pop("threshold")
    return lambda heads, **mask: spread(heads, **settings, **mask)[0]


def last_round(
    settings: Mapping,
    section: str,
    options: Mapping,
    context: MethodContext,
    model: Model,
) -> FinalAdaptation:
    """Build the final adaptation, which keeps the server, see `read_adaptation`."""
    epochs, settings = read_adaptation(settings)
    around = lambda algorithm: build_face_adaptation(algorithm, model, **settings)
    algorithm = federated_trainer(section, options, context, around).algorithm
    still = algorithm._replace(server_update=lambda server, result: server)
    return FinalAdaptation(still, epochs)


def previous_features(embed: Callable) -> Callable:
    """Build `reference_features` of `fedfr`, of the global and the previous model."""
    return partial(frozen_features, embed)


def backbone_features(model: Model) -> Callable:
    """Build (backbone variables, images) -> [B, D] in evaluation mode.

    Traced once for each shape, mesh and setting of JAX, wherever it is called.
    """
    return jax.jit(lambda *arguments: model.apply(*arguments, False)[0], inline=True)
