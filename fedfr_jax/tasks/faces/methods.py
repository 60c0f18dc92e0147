"""Methods of face recognition: any algorithm, FedFR's terms, final adaptation.

Clients train a backbone on a margin softmax over their own classes; class embeddings
and the branch stay with them (`personal`). The server's backbone is the generic
network, what the algorithm deploys at a client the personalized one. FedFR's terms are
for an algorithm that asks for features of the networks of the round before, as FedFR
does: `use_public_data` adds the public data, `contrastive_weight` the contrastive term,
`branch` the decoupled feature customization; all of them are FedFR. FedFace is FedAvg
with `spreadout`, local training `personal="."`.

`adaptation` appends that of Yu, Bagdasaryan, Shmatikov 2020, arXiv:2002.04758, to a
method without a branch. That paper has images of many classes, and the face
version of FedFR's table 2 is not published, so these choices are ours: both start from
the global network and the client's own class embeddings and see its own images only.
Fine-tuning minimizes the margin softmax over the own classes. Distillation compares
the scaled cosines to the own classes, without a margin: the teacher is the frozen
global network with the embeddings that the client had after the last round.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.convolutions import fast
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.algorithms.fedfr import build_adaptation
from fedfr_jax.federated.algorithms.spreadout import fedface
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.parameter_packing import (
    on_unpacked,
    pack_networks,
    pack_variables,
    unpack,
)
from fedfr_jax.federated.settings import Federation
from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.distillation import (
    angular_distillation,
    knowledge_distillation,
    knowledge_distillation_over_elements,
)
from fedfr_jax.losses.margin import cosine
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.losses.spreadout import spread
from fedfr_jax.models.adapters import deployed_variables, with_calls
from fedfr_jax.parts import INLINE, Factory, Part, raw, section
from fedfr_jax.ranges import BelowOne, Cosine, NonNegative, Positive, Share, Whole
from fedfr_jax.schema import checked, keywords, naming
from fedfr_jax.tasks.faces.distillation import Distill, Distillation, with_distillation
from fedfr_jax.tasks.faces.frozen_features import (
    class_mean_start,
    frozen_features,
    prepare_features,
)
from fedfr_jax.tasks.faces.loss import (
    COSFACE,
    Branch,
    BranchReader,
    MarginReader,
    backbone_of,
    classifier,
    client_features,
    face_loss,
    in_backbone,
    init_local,
    learned,
    of_backbone,
    on_variables,
    with_embeddings,
    with_margin_state,
    with_start,
)
from fedfr_jax.tasks.methods import (
    FACE_KEYS,
    AlgorithmReader,
    Method,
    MethodReader,
    with_contrastive_loss,
)
from fedfr_jax.tasks.trainers import Facts, build_federated, cut_network
from fedfr_jax.types import (
    Algorithm,
    FeatureStorage,
    FederatedTrainer,
    FinalAdaptation,
    LocalTraining,
    Model,
    PyTree,
)

DISTILLATIONS = {
    "distill": knowledge_distillation_over_elements,
    "distill_classes": knowledge_distillation,
}


@checked
def build_face_adaptation(
    algorithm: Algorithm,
    model: Model,
    *,
    kind: Literal["finetune", "angular", "distill", "distill_classes"] = "finetune",
    learning_rate: NonNegative = 1e-3,
    momentum: BelowOne = 0.9,
    weight_decay: NonNegative = 5e-4,
    loss: Annotated[Part, MarginReader()] = COSFACE,
    alpha: Share = 0.95,
    temperature: Positive = 6.0,
    weight: NonNegative = 9.0,
) -> Algorithm:
    """Build the adaptation round after the last round of a `fedfr` without branch.

    Args:
      kind: finetune; distill with `alpha` and `temperature` as Yu et al. released it;
        distill_classes, the same with the divergence summed over the classes; or
        angular, fine-tuning plus `weight` times `angular_distillation`.
      learning_rate, momentum, weight_decay: local SGD at a constant rate.
      loss: of fine-tuning, see `face_loss`; distilling uses its scale.
      weight: of the angular term; 9 is BigFace's.
    """
    embed = model.output
    reference = lambda teacher, client: frozen_features(embed, None, teacher, client)
    trained = on_variables(model)
    finetuning = face_loss(trained, loss=loss)
    if kind in DISTILLATIONS:
        client_loss = distillation_loss(
            trained,
            DISTILLATIONS[kind],
            scale=loss().scale,
            alpha=alpha,
            temperature=temperature,
        )
    elif kind == "angular":
        client_loss = angular_loss(trained, finetuning, weight)
    else:
        reference, client_loss = None, _without_teacher(finetuning)
    optimizer = sgd(momentum=momentum, weight_decay=weight_decay)
    local = LocalTraining(client_loss, optimizer, learning_rate)
    return build_adaptation(algorithm, local, reference_features=reference)


@section
class AdaptationConfig(NamedTuple):
    """Keys of `adaptation`."""

    build: Annotated[Part, Factory(build_face_adaptation, num_args=2), INLINE]
    epochs: Whole = 5

    def check(self) -> None:
        """Raise ValueError for a margin loss that keeps or learns numbers."""
        loss = self.build.settings.get("loss", COSFACE)
        if not loss().is_plain:
            raise ValueError(
                "adaptation.loss must be a softmax without state or parameters, got "
                f"{loss.name!r}."
            )


def distillation_loss(
    model: Model,
    distillation: Callable,
    *,
    scale: float,
    alpha: float,
    temperature: float,
) -> Callable:
    """Distillation loss over params {"backbone", "head", "phi" (not used)}."""

    def loss_fn(variables, batch, key, *, reference, teacher_head):
        features, stats = model.apply(variables, batch.model_inputs, True, key=key)
        taught = reference.previous_features(batch)
        values = distillation(
            scale * cosine(features, variables["params"]["head"]),
            scale * cosine(taught, teacher_head),
            batch.labels,
            jnp.arange(len(teacher_head), dtype=jnp.int32) < batch.num_classes,
            alpha=alpha,
            temperature=temperature,
        )
        return masked_mean(values, batch.is_valid), (stats, {})

    return loss_fn


def angular_loss(model: Model, finetuning: Callable, weight: float) -> Callable:
    """Add `weight` times the distance to the teacher's features to a loss."""

    def loss_fn(variables, batch, key, *, reference, teacher_head):
        del teacher_head
        loss, (stats, metrics) = finetuning(variables, batch, key, reference=None)
        features, _ = model.apply(variables, batch.model_inputs, True, key=key)
        taught = reference.previous_features(batch)
        distance = masked_mean(angular_distillation(features, taught), batch.is_valid)
        metrics = {**metrics, "angular_loss": distance}
        return loss + weight * distance, (stats, metrics)

    return loss_fn


def _without_teacher(loss: Callable) -> Callable:
    def loss_fn(variables, batch, key, *, reference, teacher_head):
        del teacher_head
        return loss(variables, batch, key, reference=reference)

    return loss_fn


OWN_CLASSES = "^params/(head$|branch/|margin/)"
BACKBONE = "backbone"  # where it lies among an algorithm's params, packed or not
SGD = {"momentum": 0.9, "weight_decay": 5e-4}
DEFAULTS = {"learning_rate": 1e-3, "decay_epochs": (8, 6, 4, 3)}


@section
class SpreadConfig(NamedTuple):
    """Keys of `spreadout`."""

    spread: Annotated[
        Part, Factory(spread, num_args=1, hidden=("margin", "class_mask")), INLINE
    ]
    threshold: Cosine


@section
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
    branch: Annotated[Branch | None, BranchReader()] = raw("bce")
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
    spreadout: Cosine | SpreadConfig | None = None
    # `epochs` of a last round, and the keywords of `build_face_adaptation`; None for
    # none.
    adaptation: AdaptationConfig | None = None


LOSS_TERMS = [name for name in FaceTerms._fields if name in keywords(face_loss)]
PLAIN = FaceTerms(use_public_data=False, contrastive_weight=0.0, branch=None)


def takes_terms(factory: Callable) -> type | None:
    """`FaceTerms` for a factory of an algorithm that takes them."""
    return FaceTerms if "reference_features" in keywords(factory) else None


def terms_of(method: Method) -> FaceTerms:
    """FedFR's terms of a method, none for other algorithms."""
    return method.algorithm.task_keys or PLAIN


def default_settings(options: Mapping) -> Mapping:
    """Defaults of a method; momentum and decay are those of SGD."""
    optimizer = options.get("optimizer", "sgd")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else optimizer
    return {**DEFAULTS, **(SGD if name in ("sgd", None) else {})}


def check_method(method: Method) -> None:
    """Raise ValueError for keys of a method that exclude each other."""
    terms = terms_of(method)
    is_random = terms.initial_previous_model == "random"
    if terms.adaptation is not None and terms.branch is not None:
        name = terms.branch.name
        raise ValueError(f"branch must be None with adaptation, got {name!r}.")
    is_local = method.batch_stats == "local"
    if is_local and (terms.adaptation is not None or is_random):
        raise ValueError(
            "batch_stats must be average or random_client with adaptation or a random "
            "initial_previous_model, got 'local'."
        )
    if sees_images(method) and method.features not in ("auto", "off"):
        raise ValueError(
            "features must be auto or off with a teacher, which sees the images, got "
            f"{method.features!r}. Give distill a cache."
        )
    # Clients and the network, which come with the data, change no check.
    build_loss(method, teacher=None, num_clients=1)(None)


METHODS = MethodReader(
    loss=MarginReader(),
    algorithm=AlgorithmReader(
        "faces",
        "fedfr",
        terms={
            "contrastive_loss": partial(with_contrastive_loss, contrastive_weight=5.0)
        },
        task_keys=takes_terms,
        offered=("features", "identities"),
    ),
    keys=FACE_KEYS,
    task_kinds={"distill": Distill | None},
    defaults=default_settings,
    check=check_method,
)


class Counts(NamedTuple):
    """Numbers of a population of faces, and how it trains."""

    num_classes: int  # M, the most identities of any client
    federation: Federation
    num_clients: int = 0
    num_public: int = 1  # public classes
    seed: int = 0  # draws attackers


def face_method(
    method: Method, model: Model, counts: Counts, where: str
) -> FederatedTrainer:
    """Build the trainer of a federated face method.

    Args:
      where: the method is in the config.
    """
    terms, rule = terms_of(method), method.loss()
    teacher = method.distill and method.distill.open(model, where)
    has_terms = method.algorithm.task_keys is not None
    is_packed = has_terms and not looks_at_leaves(method)
    with naming(where):
        cut, begin = cut_network(method, in_backbone(model), counts.seed, "backbone/")
    if cut.adapter:
        model = model.wrapped(with_calls(cut.adapter.call))
    whole = with_state(model, rule)
    model = with_state(of_backbone(cut), rule)
    loss = build_loss(method, teacher, counts.num_clients)
    method = method._replace(loss=loss)
    own_classes = classifier(on_variables(model))
    offers = {"num_clients": counts.num_clients, "model": own_classes, "features": True}
    if has_terms:
        offers |= _offers(terms, rule, model, is_packed)
    facts = build_facts(terms, rule, model, counts, offers, begin)
    apply = client_features(on_variables(whole), converter=terms.converter)
    facts = facts._replace(apply=apply)
    with naming(where):
        check_frozen(method, facts.shapes["params"])
        trainer = build_federated(method, facts, where)
        algorithm, last = trainer.algorithm, None
        if terms.adaptation is not None:
            last = final_adaptation(terms.adaptation, method, facts, model, where)
            if algorithm.privacy is not None:  # whose server has the mechanism's state
                last = last._replace(algorithm=on_inner(last.algorithm))
        if terms.spreadout is not None:
            spread_apart = build_spread(terms.spreadout)
            clients = {"num_clients": counts.num_clients}
            algorithm = fedface(algorithm, spread_apart, **clients)
    if is_packed:
        algorithm = pack_variables(algorithm, at=BACKBONE)
        if last is not None:
            packed = pack_variables(last.algorithm, at=BACKBONE)
            last = last._replace(algorithm=packed)
    deployed = lambda server: deployed_variables(cut, algorithm.global_model(server))
    return trainer._replace(
        algorithm=algorithm,
        global_model=lambda server: backbone_of(unpack(deployed(server))),
        apply_global=backbone_features(whole),
        frozen_model=cut if cut.frozen else None,
        features=FeatureStorage() if sees_images(method) else trainer.features,
        final_adaptation=last,
    )


def sees_images(method: Method) -> bool:
    """Whether a teacher runs beside the network."""
    return bool(method.distill) and method.distill.cache is None


def with_state(model: Model, rule: Margin) -> Model:
    """A backbone whose statistics may hold a margin's state, packed or not."""
    return on_unpacked(with_margin_state(model) if rule.state else model)


def check_frozen(method: Method, params: PyTree) -> None:
    """Raise ValueError for frozen leaves that are none of the network's."""
    if not isinstance(method.frozen, str) or not method.frozen:
        return
    others = {name: x for name, x in params.items() if name != BACKBONE}
    found = trees.matching(method.frozen, min_leaves=0)({"params": others})
    if any(jax.tree.leaves(found)):
        raise ValueError(
            "frozen must match leaves of params/backbone alone, got "
            f"{method.frozen!r}. Give others a factor of 0 in "
            "learning_rate_multipliers."
        )


def looks_at_leaves(method: Method) -> bool:
    """Whether a key looks at the leaves of a backbone, which then is not packed."""
    return bool(
        method.aggregation
        or method.init_per_client
        or method.personal_epochs
        or method.learning_rate_multipliers
        or method.personal
        or method.frozen
        or method.adapter
        or method.optimizer.name != "sgd"
    )


def build_facts(
    terms: FaceTerms,
    rule: Margin,
    model: Model,
    counts: Counts,
    offers: Mapping[str, Any],
    begin: Callable[[PyTree], PyTree] = lambda variables: variables,
) -> Facts:
    """Facts for any algorithm on faces, with params "backbone" and "head".

    Args:
      begin: of `cut_network`.
    """
    num_classes, num_public = counts.num_classes, counts.num_public
    draw_own = init_local(
        num_classes,
        model.embedding_dim,
        branch=terms.branch,
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

    def start_whole(variables: PyTree) -> PyTree:
        moving = begin(variables)
        params = {**variables["params"], **moving["params"]}
        return start({**moving, "params": params})

    def draw(key: jax.Array) -> PyTree:
        variables = model.init(key)
        phi = jnp.zeros((num_public, model.embedding_dim))
        params = {"backbone": variables["params"], "phi": phi}
        return start({**variables, "params": params})

    return Facts(
        model=with_embeddings(on_variables(model)),
        apply=client_features(on_variables(model), converter=terms.converter),
        initial=lambda: draw(jax.random.key(0)),
        shapes=jax.eval_shape(draw, jax.random.key(0)),
        federation=counts.federation,
        num_clients=counts.num_clients,
        seed=counts.seed,
        offers=offers,
        prefix="backbone/",
        kept=OWN_CLASSES,
        draw=draw,
        draw_kept=lambda key: {"params": draw_own(key), "batch_stats": {}},
        start=start_whole,
    )


def build_loss(
    method: Method, teacher: Distillation | None, num_clients: int
) -> Callable:
    """Build model -> loss of a client, with distillation if there is a teacher."""
    terms = terms_of(method)._asdict()
    own = {name: terms[name] for name in LOSS_TERMS}
    loss_of = partial(face_loss, loss=method.loss, num_clients=num_clients, **own)
    if teacher:
        loss_of = partial(with_distillation, loss_of, distillation=teacher)
    return loss_of


def _offers(terms: FaceTerms, rule: Margin, model: Model, is_packed: bool) -> dict:
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
        "reference_features": partial(frozen_features, embed)
        if terms.contrastive_weight
        else None,
        "prepare": prepare,
        "initial_previous_model": drawn
        if terms.initial_previous_model == "random"
        else None,
        "begin": class_mean_start(embed) if terms.init_head_from_class_means else None,
    }


def build_spread(spreadout: float | SpreadConfig) -> Callable:
    """Build `spread` of `fedface` from the key `spreadout`."""
    if not isinstance(spreadout, SpreadConfig):
        spreadout = SpreadConfig(Part(spread), spreadout)
    apart, threshold = spreadout
    return lambda heads, **mask: apart(heads, margin=threshold, **mask)[0]


def final_adaptation(
    adaptation: AdaptationConfig, method: Method, facts: Facts, model: Model, where: str
) -> FinalAdaptation:
    """Build the final adaptation, which keeps the server."""
    # A client's own work after the last round, which the server never sees.
    method = method._replace(privacy=None, attack=None, on_bad_update=None)
    around = lambda algorithm: adaptation.build(algorithm, model)
    algorithm = build_federated(method, facts, where, around).algorithm
    still = algorithm._replace(server_update=lambda server, result: server)
    return FinalAdaptation(still, adaptation.epochs)


def backbone_features(model: Model) -> Callable:
    """Build (backbone variables, images) -> [B, D] in evaluation mode.

    Traced once for each shape, mesh and setting of JAX, wherever it is called.
    """
    embed = fast(model.output)
    # A traced jit would keep the frozen leaves of the program that it was traced in.
    return embed if model.frozen else jax.jit(embed, inline=True)
