"""Central training on the public identities: pretraining, and the central rows."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from fedfr_jax.central.class_parallel import rows_per_device
from fedfr_jax.central.class_rows import CLASS_TABLE
from fedfr_jax.central.settings import Training, check_patterns, num_devices
from fedfr_jax.central.statistics import group_mean, group_size
from fedfr_jax.losses.contract import Margin, softmax
from fedfr_jax.models.norm import Pool, pooled
from fedfr_jax.tasks.data import feed_of
from fedfr_jax.tasks.faces.class_softmax import class_parallel_loss
from fedfr_jax.tasks.faces.distilled import Distill, counting, distilled, open_distill
from fedfr_jax.tasks.faces.face_images import Recognition
from fedfr_jax.tasks.faces.gate import gated, has_gate
from fedfr_jax.tasks.faces.loss import backbone_of, face_loss, rule_of
from fedfr_jax.tasks.faces.margin_state import beside
from fedfr_jax.tasks.faces.public import first_variables, without_labels
from fedfr_jax.types import Central, ClassTable, Model, PyTree


def public_training(
    model: Model,
    embed: Callable,
    task: Recognition,
    names: Sequence[str],
    settings: Training,
    mesh: Mesh,
    given: PyTree | None = None,
) -> Central:
    """A margin softmax over the task's public rows.

    Args:
      names: of all identities of the source.
      given: variables of the backbone that it starts from; None draws them.

    Raises:
      ValueError: for a pattern that finds no parameter, or a margin loss that cannot be
        cut over devices.
    """
    first_row = len(task.train_identities)
    if part := (settings.distill or {}).get("unlabelled_from"):
        task = without_labels(task, names, part)
    identities = task.partition.global_identities
    rule = margin_rule(settings)
    num_rows, table = len(identities), None
    if settings.class_parallel:
        num_rows = padded_rows(settings, len(identities), mesh)
        table = ClassTable(CLASS_TABLE, tuple(names[i] for i in identities))
    init = lambda key: first_variables(model, num_rows, key, rule, given)
    params_of = lambda: jax.eval_shape(init, jax.random.key(0))["params"]
    check_patterns(settings, "pretrain", params_of, mesh, f"^{CLASS_TABLE}$")
    told = open_distill("pretrain", settings.distill, model)
    return Central(
        settings=settings,
        dataset=task.table,
        first_row=first_row,
        num_rows=task.table.num_examples - first_row,
        feed=feed_of(settings),
        loss=loss_of(model, rule, settings, mesh, told),
        init=init,
        network=backbone_of,
        network_apply=embed,
        table=table,
        mark=counting(told),
        count_flops=model.count_flops,
        model_config=model.config,
    )


def loss_of(
    model: Model,
    rule: Margin | None,
    settings: Training,
    mesh: Mesh,
    told: Distill | None = None,
) -> Callable:
    """The loss, with all public classes on every device or cut over them.

    Args:
      told: of a teacher, see `open_distill`.

    Raises:
      ValueError: for a margin loss that cannot be cut.
    """
    count = num_devices(settings, mesh)
    size = group_size(settings.batch_norm, count)
    if size > 1:
        model = pooled(model, Pool(size, group_mean(size, count)))
    if rule and rule.state:
        model = beside(model)
    if settings.class_parallel:
        make = cut_loss(rule, settings)
    else:
        make = partial(
            face_loss,
            margin_loss=settings.margin_loss,
            scale=settings.scale,
            margin=settings.margin,
            margin_options=settings.margin_options,
            interclass_threshold=settings.interclass_threshold,
        )
    if told:
        make = partial(distilled, make, told=told)
    if settings.gate_weight and has_gate(model):
        make = partial(gated, make, weight=settings.gate_weight)
    return make(model)


def cut_loss(rule: Margin | None, settings: Training) -> Callable:
    """model -> the loss with classes cut over devices.

    Raises:
      ValueError: for a margin loss that cannot be cut.
    """
    if rule is None or rule.classify is not softmax:
        raise ValueError(
            "margin_loss must be a softmax with class_parallel, got "
            f"{settings.margin_loss!r}."
        )
    return partial(
        class_parallel_loss,
        rule=rule,
        interclass_threshold=settings.interclass_threshold,
        chunk=settings.class_chunk,
        dtype=settings.class_dtype,
    )


def padded_rows(settings: Training, num_classes: int, mesh: Mesh) -> int:
    """Rows of the table of classes on all devices together."""
    count = num_devices(settings, mesh)
    return count * rows_per_device(num_classes, count, settings.class_chunk)


def margin_rule(settings: Training) -> Margin | None:
    """The margin of a central training, None for class_hinge."""
    return rule_of(
        settings.margin_loss, settings.scale, settings.margin, settings.margin_options
    )
