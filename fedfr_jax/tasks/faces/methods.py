"""Methods of face recognition: any algorithm, and FedFR's terms.

Clients train a backbone on a margin softmax over their own classes; class embeddings
and the branch stay with them (`personal`). The server's backbone is the generic
network, what the algorithm deploys at a client the personalized one. FedFR's terms are
for an algorithm that asks for frozen features, as FedFR does: `use_public_data` adds
the global data, `contrastive_weight` the contrastive term, `branch` the decoupled
feature customization; all of them are FedFR. FedFace is FedAvg with `spreadout`, local
training `share=False`; `adaptation` appends the adaptation of Yu et al. to a method
without a branch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.central.settings import Training
from fedfr_jax.data.partition.identity_assignment import IdentityPartition
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedface import fedface
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
    check_values,
    kinds_of,
    naming,
)
from fedfr_jax.tasks.faces.distillation import Distill, open_distill, with_distillation
from fedfr_jax.tasks.faces.final_adaptation import build_face_adaptation
from fedfr_jax.tasks.faces.frozen_features import (
    class_mean_start,
    frozen_features,
    prepare_features,
)
from fedfr_jax.tasks.faces.loss import (
    Branch,
    backbone_of,
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
from fedfr_jax.tasks.options import algorithm_of, keywords
from fedfr_jax.tasks.trainers import MethodContext, federated_trainer
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
ALGORITHM_DEFAULTS = {"contrastive_weight": 5.0}  # of MOON


class FaceTerms(NamedTuple):
    """Keys of a method of faces: four of its margin; FedFR's terms, below `algorithm`.

    The defaults are FedFR's paper's, or the released code's where it says nothing, but
    for `initial_previous_model`, which is ours (the code takes a random network).
    """

    margin_loss: str = "cosface"  # this and the next three: see `face_loss`
    scale: Positive = 30.0
    margin: NonNegative = 0.4
    margin_options: Mapping | None = None
    use_public_data: bool = True  # train on the public classes too, with hard negatives
    hard_negative_threshold: Cosine | None = (
        0.4  # cosine above which they are hard; None: none is
    )
    max_hard_negatives: Whole = 0  # of a client; 0 has no limit
    hard_negative_level: Literal["image", "class"] = (
        "image"  # by image, or by class with all its images
    )
    contrastive_weight: NonNegative = 5.0  # this and the next seven: see `face_loss`
    contrastive_temperature: Positive = 0.5
    branch: Branch | None = "bce"
    branch_weight: NonNegative = 10.0
    branch_options: Mapping | None = None
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
    # a round; None does not. Its options are `steps`, `learning_rate`, `momentum` and
    # `weight_decay` of `spread`.
    spreadout: Cosine | None = None
    spreadout_options: Mapping | None = None
    # `epochs` of a last round, and the keywords of `build_face_adaptation`; None for
    # none.
    adaptation: Mapping | None = None


MARGIN, TERMS = FaceTerms._fields[:4], FaceTerms._fields[4:]
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
    if "margin_loss" in options:
        inherited.pop("margin_options", None)  # of another loss
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
      options: keys of `FaceTerms`, `distill`, and those of every task.
      num_classes: M, the most identities of any client.
      num_clients: of the population.
      num_public: public classes.
      seed: draws attackers.

    Raises:
      ValueError: for an unknown option, one out of range, or options that exclude each
        other.
    """
    algorithm, settings, options = algorithm_of(section, options, "fedfr")
    told = open_distill(section, options.pop("distill", None), model)
    takes_terms = "frozen" in keywords(ALGORITHMS[algorithm])
    is_packed = takes_terms and not options.keys() & NAMED_LEAVES
    known = TERMS if takes_terms else ()
    unset = {} if takes_terms else PLAIN._asdict()
    margin = {key: options.pop(key) for key in MARGIN if key in options}
    given = {key: settings.pop(key) for key in known if key in settings}
    with naming(f"config.{section}"):
        margin = check_values(f"config.{section}.", margin, kinds_of(FaceTerms))
        terms = call(f"{section}.algorithm", FaceTerms, {**unset, **given, **margin})
        _check_exclusions(terms, settings.get("share", True), options)
        options["algorithm"] = {"name": algorithm, **settings}
        rule = build_rule(
            terms.margin_loss, terms.scale, terms.margin, terms.margin_options
        )
        model = on_unpacked(with_margin_state(model) if rule and rule.state else model)
        of = _context(terms, rule, model, told, num_classes, num_clients, num_public)
        of = of._replace(
            keys=MARGIN,
            terms_keys=known,
            algorithm_defaults=ALGORITHM_DEFAULTS,
            defaults=_defaults(options),
            seed=seed,
        )
        of = of._replace(federation=federation)
        if takes_terms:
            offers = _offers(terms, rule, model, is_packed)
            of = of._replace(facts={**of.facts, **offers})
        trainer = federated_trainer(section, options, of)
        algorithm, last = trainer.algorithm, None
        if terms.adaptation is not None:
            # A client's own work after the last round, which the server never sees.
            plain = {k: v for k, v in options.items() if k not in SERVER_KEYS}
            last = last_round(terms.adaptation, section, plain, of, model)
        if apart := spread_apart(terms.spreadout, terms.spreadout_options):
            algorithm = fedface(algorithm, apart, num_clients=num_clients)
    if is_packed:
        algorithm = pack_variables(algorithm, at=BACKBONE)
        last = last and last._replace(
            algorithm=pack_variables(last.algorithm, at=BACKBONE)
        )
    trainer = trainer._replace(
        algorithm=algorithm,
        global_model=lambda server: of.network(algorithm.global_model(server)),
        final_adaptation=last,
    )
    return FaceMethod(
        trainer, terms.init_head_from_class_means and terms.use_public_data, told
    )


def _defaults(options: Mapping) -> Mapping:
    """Defaults of a method; momentum and decay are those of SGD."""
    optimizer = options.get("optimizer", "sgd")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else optimizer
    return {**DEFAULTS, **(SGD if name in ("sgd", None) else {})}


def _context(
    terms: FaceTerms,
    rule: Margin | None,
    model: Model,
    told: Distill | None,
    num_classes: int,
    num_clients: int,
    num_public: int,
) -> MethodContext:
    """Context that faces offer to any algorithm, with params "backbone" and "head"."""
    draw_own = init_local(
        num_classes,
        model.embedding_dim,
        branch=terms.branch,
        converter=terms.converter,
        std=0.0 if terms.init_head_from_class_means else 0.01,
        others=learned(rule, num_classes),
    )
    loss_of = _loss_of(terms, told, num_clients)

    def start(variables: PyTree) -> PyTree:
        own = jax.eval_shape(draw_own, jax.random.key(0))
        own = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), own)
        own |= learned(rule, num_classes)
        params = {"backbone": variables["params"]["backbone"], **own}
        if terms.use_public_data:
            params["phi"] = variables["params"]["phi"]
        return {**with_start(variables, rule), "params": params}

    def draw(key: jax.Array) -> PyTree:
        backbone = model.init(key)
        phi = jnp.zeros((num_public, model.embedding_dim))
        return start(
            {**backbone, "params": {"backbone": backbone["params"], "phi": phi}}
        )

    return MethodContext(
        model=on_variables(model),
        apply=client_features(model, converter=terms.converter),
        initial=lambda: draw(jax.random.key(0)),
        shapes=jax.eval_shape(draw, jax.random.key(0)),
        loss_of=lambda known: loss_of(of_backbone(known)),
        num_rows=0,
        mesh=None,
        facts={"num_clients": num_clients, "model": classifier(model)},
        task="faces",
        prefix="backbone/",
        kept=OWN_CLASSES,
        draw=draw,
        draw_kept=lambda key: {"params": draw_own(key), "batch_stats": {}},
        start=start,
        network=lambda variables: backbone_of(unpack(variables)),
    )


def _loss_of(terms: FaceTerms, told: Distill | None, num_clients: int) -> Callable:
    """Build model -> loss of a client, with distillation if there is a teacher."""
    loss_of = partial(
        face_loss,
        margin_loss=terms.margin_loss,
        scale=terms.scale,
        margin=terms.margin,
        margin_options=terms.margin_options,
        contrastive_weight=terms.contrastive_weight,
        contrastive_temperature=terms.contrastive_temperature,
        branch=terms.branch,
        branch_weight=terms.branch_weight,
        branch_options=terms.branch_options,
        converter=terms.converter,
        detach_branch=terms.detach_branch,
        branch_reweighting=terms.branch_reweighting,
        num_clients=num_clients,
    )
    return partial(with_distillation, loss_of, told=told) if told else loss_of


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
        "frozen": previous_features(embed) if terms.contrastive_weight else None,
        "prepare": prepare,
        "initial_previous_model": drawn
        if terms.initial_previous_model == "random"
        else None,
        "begin": class_mean_start(embed) if terms.init_head_from_class_means else None,
    }


def _check_exclusions(terms: FaceTerms, share: bool, options: Mapping) -> None:
    """Raise ValueError for options that exclude each other."""
    how = options.get("batch_stats", "average")
    is_random = terms.initial_previous_model == "random"
    if not share and is_random:
        raise ValueError(
            "initial_previous_model must be 'global' with share=False, got 'random'."
        )
    for name, value in (
        ("adaptation", terms.adaptation),
        ("spreadout", terms.spreadout),
    ):
        if not share and value is not None:
            raise ValueError(f"share must be True with {name}, got False.")
    if terms.adaptation is not None and terms.branch is not None:
        raise ValueError(f"branch must be None with adaptation, got {terms.branch!r}.")
    if how != "average" and not share:
        raise ValueError(f"share must be True with batch_stats {how}, got False.")
    if how == "local" and (terms.adaptation is not None or is_random):
        raise ValueError(
            "batch_stats must be average or random_client with adaptation, or a "
            "initial_previous_model that "
            "is random, got 'local'."
        )


def spread_apart(margin: float | None, options: Mapping | None) -> Callable | None:
    """Build `spread` of `fedface` for a margin; None without one.

    Raises:
      ValueError: for an option that `spread` does not have, one out of range, or any
        without a margin.
    """
    options = {} if options is None else options
    kinds = {} if margin is None else kinds_of(spread)
    passed = ("weights", "margin", "class_mask")
    kinds = {name: kind for name, kind in kinds.items() if name not in passed}
    options = check_settings("spreadout_options", options, kinds)
    if margin is None:
        return None
    return lambda heads, **mask: spread(heads, margin=margin, **options, **mask)[0]


def last_round(
    settings: Mapping, section: str, options: Mapping, of: MethodContext, model: Model
) -> FinalAdaptation:
    """Build the final adaptation, of `epochs` (default 5), which keeps the server.

    Raises:
      ValueError: for a setting that `build_face_adaptation` does not have, or one out
      of range.
    """
    kinds = {**kinds_of(build_face_adaptation), "epochs": Whole}
    kinds = {k: x for k, x in kinds.items() if k not in ("algorithm", "model")}
    settings = {"epochs": 5, **check_settings("adaptation", settings, kinds)}
    epochs = settings.pop("epochs")
    around = lambda algorithm: build_face_adaptation(algorithm, model, **settings)
    algorithm = federated_trainer(section, options, of, around).algorithm
    still = algorithm._replace(server_update=lambda server, result: server)
    return FinalAdaptation(still, epochs)


def previous_features(embed: Callable) -> Callable:
    """Build `frozen` of `fedfr`: features of the global and the previous model."""
    return partial(frozen_features, embed)


def backbone_features(model: Model) -> Callable:
    """Build (backbone variables, images) -> [B, D] in evaluation mode.

    Traced once for each shape, mesh and setting of JAX, wherever it is called.
    """
    return jax.jit(lambda *arguments: model.apply(*arguments, False)[0], inline=True)
