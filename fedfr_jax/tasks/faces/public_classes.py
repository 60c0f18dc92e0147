"""Public identities: central training on them, and where class embeddings start.

Pretraining and central methods train a margin softmax on the public identities, whose
classes may be split over all devices of the mesh (`class_parallel`).

Loss of the gate of the head moe: L = L_cos + gate_weight * mean BCE(p_i, m_i), p the
gate's share of the expert for masked faces, m_i = 1 where `face_mask` has covered a
pixel. BigFace's authors print no loss of their gate: this one, and its weight of 1, are
ours. With a weight of 0 the gate learns from what its mixture does to the embedding
alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.central.class_parallel import (
    CLASS_TABLE,
    ClassSoftmax,
    SampledClasses,
    class_losses,
    gather_batch,
    rows_per_device,
)
from fedfr_jax.central.settings import Training, check_patterns, num_devices
from fedfr_jax.central.sharding import group_mean, group_size
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.sources.selection import names_from
from fedfr_jax.data.stream import place_examples
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.losses.contract import Margin, MarginInputs, softmax, updated_state
from fedfr_jax.losses.margin import interclass_filter, normalize
from fedfr_jax.losses.masked_means import masked_fraction, masked_mean
from fedfr_jax.models.adapters import deployed_variables
from fedfr_jax.models.norm import StatsGroup, stats_over_group
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import build_batching
from fedfr_jax.tasks.experiment import Opened
from fedfr_jax.tasks.faces.data import FaceData
from fedfr_jax.tasks.faces.distillation import (
    Distillation,
    count_distilled,
    with_distillation,
)
from fedfr_jax.tasks.faces.loss import (
    backbone_of,
    face_loss,
    in_backbone,
    learned,
    numbers_of,
    of_backbone,
    on_variables,
    sampling_key,
    with_margin_state,
    with_numbers,
    with_start,
)
from fedfr_jax.tasks.trainers import adapted_training, with_adapter_calls
from fedfr_jax.types import CentralTrainer, Model, PyTree, ShardedClasses

GATE = "gate"  # among the blocks of a network whose features are a gate's logits
LABEL = "masked"  # key of the targets that `face_mask` leaves


def with_gate_loss(loss_of: Callable, model: Model, weight: float) -> Callable:
    """Add the gate's cross entropy to a loss; the network runs once.

    Without masks in the batches there is no label, and no such term.

    Args:
      loss_of: model -> loss over params with a "backbone".
      model: its `features` are logits [B, 2], plain and masked.
      weight: of the cross-entropy, at least 0.
    """

    def loss(variables, batch, key, **round_args):
        if LABEL not in batch.targets:
            return loss_of(model)(variables, batch, key, **round_args)
        run = model.features(variables, batch.images, True, key=key)
        embedding, logits, stats = run
        known = model._replace(apply=lambda *_, **__: (embedding, stats))
        total, (stats, metrics) = as_aux_loss(loss_of(known))(
            variables, batch, key, **round_args
        )
        label = batch.targets[LABEL].astype(logits.dtype)
        losses = optax.sigmoid_binary_cross_entropy(logits[:, 1] - logits[:, 0], label)
        value = masked_mean(losses, batch.is_valid)
        return total + weight * value, (stats, {**metrics, GATE: value})

    return loss


def class_parallel_loss(
    model: Model,
    rule: Margin,
    *,
    interclass_filtering_threshold: float | None = None,
    chunk: int = 0,
    dtype: Any = None,
) -> Callable:
    """Class-parallel loss over params {"backbone", "phi"}, given a device's classes.

    Equal to `face_loss` without local classes, where a device has all of them: the mean
    over the valid examples.

    Args:
      rule: a softmax; its numbers move by the whole batch.
      interclass_filtering_threshold: see `interclass_filter`.
      chunk, dtype: see `ClassSoftmax`.
    """

    def loss_fn(variables, batch, key, *, held: SampledClasses):
        features, stats = model.apply(variables, batch.images, True, key=key)
        numbers = numbers_of(stats) if rule.state else {}
        valid = gather_batch(batch.is_valid)
        class_softmax = build_class_softmax(
            rule, numbers, sampling_key(key, 1), interclass_filtering_threshold, valid
        )
        class_softmax = class_softmax._replace(chunk=chunk, dtype=dtype)
        losses, (numbers, penalty) = class_losses(
            features, variables["params"]["phi"], batch.labels, held, class_softmax
        )
        # The mean over devices of this is the mean over all valid examples.
        count = jnp.maximum(valid.sum(), 1).astype(losses.dtype)
        loss = jnp.where(batch.is_valid, losses, 0).sum() / count
        loss *= len(valid) // len(losses)
        value = (loss + penalty) * masked_fraction(batch, valid)
        metrics = {"classification_loss": value}
        return value, (with_numbers(stats, numbers), metrics)

    return loss_fn


def build_class_softmax(
    rule: Margin,
    numbers: PyTree,
    key: jax.Array | None = None,
    interclass_filtering_threshold: float | None = None,
    is_valid: jax.Array | None = None,
) -> ClassSoftmax:
    """Build the class-parallel softmax of a margin; also the new margin state and
    penalty.

    Args:
      is_valid: [B] of the whole batch; None: all are.
    """

    def margin(cosine, norm):
        valid = jnp.ones(len(cosine), bool) if is_valid is None else is_valid
        inputs = MarginInputs(cosine, norm, valid, key)
        state = updated_state(rule, numbers, inputs)

        def others(cosines):
            if interclass_filtering_threshold is not None:
                unlabeled = jnp.full(len(cosines), -1, jnp.int32)
                threshold = {"threshold": interclass_filtering_threshold}
                cosines = interclass_filter(cosines, unlabeled, **threshold)
            if rule.others is not None:
                cosines = rule.others(cosines, inputs, state)
            return rule.scale * cosines

        penalty = jnp.zeros(())
        if rule.penalty:
            penalty = masked_mean(rule.penalty(norm), valid)
        return rule.scale * rule.target(inputs, state), others, (state, penalty)

    return ClassSoftmax(margin, normalize)


def public_population(task: FaceData) -> FaceData:
    """Add the clients' training images to the task's public set.

    The clients' classes follow the public ones; training on it is the central upper
    bound of federated training. Evaluation sets stay.
    """
    p = task.partition
    order = np.argsort(p.client_identities)
    place = order[
        np.searchsorted(p.client_identities, p.train_identities, sorter=order)
    ]
    labels = np.array(task.train.labels)
    labels[: len(place)] = len(p.public.identities) + place
    identities = np.concatenate([p.public.identities, p.client_identities])
    return task._replace(
        partition=p._replace(
            public=p.public._replace(identities=identities),
            train=p.train.keep(np.arange(0)),
        ),
        train=task.train.with_labels(labels),
    )


def without_labels(task: FaceData, names: tuple[str, ...], part: str) -> FaceData:
    """Set the labels of a part's public images to -1 in the task.

    Args:
      names: of all identities of the source.

    Raises:
      ValueError: when no public identity is of that part, or all are.
    """
    p, key = task.partition, "config.pretrain.distill.unlabeled_source"
    is_none = names_from(tuple(names[i] for i in p.public.identities), part, key)
    if is_none.all():
        raise ValueError(
            f"{key} must leave some public identities with labels, got {part!r}."
        )
    first, labels = task.first_public, np.array(task.train.labels)
    place = np.where(is_none, -1, np.cumsum(~is_none) - 1).astype(labels.dtype)
    labels[first:] = place[labels[first:]]
    kept = p.public.identities[~is_none]
    return task._replace(
        partition=p._replace(public=p.public._replace(identities=kept)),
        train=task.train.with_labels(labels),
    )


def public_means(
    model: Model, task: FaceData, mesh: Mesh, backbone: PyTree, batch_size: int = 64
) -> jax.Array:
    """Mean feature [M_g, D] of every public class, without flips or normalization."""
    first, labels = task.first_public, task.partition.public.labels
    rows = np.arange(first, first + len(labels), dtype=np.int32)
    table = place_examples(task.train, mesh)
    embedded = build_embed(
        model.output, Batching(batch_size, normalization(task.alignment)), mesh
    )
    features = embedded(backbone, table, rows)
    sums = jax.ops.segment_sum(
        features[: len(rows), 0], labels, len(task.partition.public.identities)
    )
    return sums / np.bincount(labels)[:, None].astype(sums.dtype)


def first_variables(
    model: Model,
    num_public: int,
    key: jax.Array,
    margin: Margin,
    given: PyTree | None = None,
) -> PyTree:
    """Initialize backbone and public class vectors N(0, 0.01^2), without local classes.

    Also what the margin keeps and learns, see `with_margin_state`. A `given` backbone
    takes the place of the fresh one.
    """
    backbone_key, phi_key = jax.random.split(key)
    variables = (
        model.init(backbone_key) if given is None else jax.tree.map(jnp.array, given)
    )
    backbone = with_start(variables, margin)
    dim = model.embedding_dim
    params = {
        "backbone": backbone["params"],
        "phi": 0.01 * jax.random.normal(phi_key, (num_public, dim)),
        "head": None,  # no local classes
        **learned(margin, num_public),
    }
    return {"params": params, "batch_stats": backbone["batch_stats"]}


class FaceFacts(NamedTuple):
    """The backbone, and what the trainings start from."""

    model: Model
    embed: Any  # one object: it names what evaluators compile
    weights: Mapping[str, PyTree] = MappingProxyType({})  # of central ones with `init`


def public_training(
    opened: Opened, at: str, facts: FaceFacts, task: FaceData
) -> CentralTrainer:
    """Build the central training of a margin softmax on the task's public rows.

    Args:
      at: place of the training in the config, see `Config.trainings`.

    Raises:
      ValueError: for a pattern that finds no parameter, or a margin loss that cannot be
        cut over devices.
    """
    mesh, names = opened.mesh, opened.source.names
    settings, where = opened.config.trainings[at], f"config.{at}"
    with naming(where):
        settings, nested, begin = adapted_training(
            settings, in_backbone(facts.model), opened.config.seed, "backbone/"
        )
    model = of_backbone(nested)
    first_row = task.first_public
    if settings.distill and settings.distill.unlabeled_source:
        task = without_labels(task, names, settings.distill.unlabeled_source)
    identities = task.partition.public.identities
    num_rows, table = len(identities), None
    if settings.class_parallel:
        num_rows = padded_rows(settings, len(identities), mesh)
        table = ShardedClasses(CLASS_TABLE, tuple(names[i] for i in identities))
    rule, given = settings.loss(), facts.weights.get(at)
    first = partial(first_variables, facts.model, num_rows)
    init = lambda key: begin(first(key, rule, given))
    params_of = lambda: jax.eval_shape(init, jax.random.key(0))["params"]
    check_patterns(settings, where, params_of, mesh, table)
    distill = settings.distill and settings.distill.open(model, where)

    def global_model(variables):
        return backbone_of(deployed_variables(nested, variables))

    return CentralTrainer(
        settings=settings,
        dataset=task.train,
        first_row=first_row,
        num_rows=task.train.num_examples - first_row,
        batching=build_batching(settings),
        loss=build_public_loss(model, settings, mesh, distill),
        init=init,
        global_model=global_model,
        apply_global=with_adapter_calls(facts.embed, nested),
        sharded_classes=table,
        annotate_batch=count_distilled(settings.distill),
        count_flops=model.count_flops,
        model_config=model.config,
    )


def build_public_loss(
    model: Model,
    settings: Training,
    mesh: Mesh,
    distillation: Distillation | None = None,
) -> Callable:
    """Build the loss, with class vectors replicated or sharded over the devices.

    Args:
      distillation: from a teacher.

    Raises:
      ValueError: for a margin loss that cannot be cut.
    """
    count = num_devices(settings, mesh)
    size = group_size(settings.sync_batch_norm, count)
    if size > 1:
        model = stats_over_group(model, StatsGroup(size, group_mean(size, count)))
    rule = settings.loss()
    if rule.state:
        model = with_margin_state(model)
    threshold = settings.interclass_filtering_threshold
    if not settings.class_parallel:
        make = partial(
            face_loss, loss=settings.loss, interclass_filtering_threshold=threshold
        )
    elif rule.loss is not softmax:
        raise ValueError(
            f"loss must be a softmax with class_parallel, got {settings.loss.name!r}."
        )
    else:
        make = partial(
            class_parallel_loss,
            rule=rule,
            interclass_filtering_threshold=threshold,
            chunk=settings.class_chunk_size,
            dtype=settings.class_dtype,
        )
    if distillation:
        make = partial(with_distillation, make, distillation=distillation)
    if settings.gate_weight and GATE in model.blocks:
        make = partial(with_gate_loss, make, weight=settings.gate_weight)
    return make(on_variables(model))


def padded_rows(settings: Training, num_classes: int, mesh: Mesh) -> int:
    """Number of class vectors on all devices, with padding."""
    count = num_devices(settings, mesh)
    return count * rows_per_device(num_classes, count, settings.class_chunk_size)
