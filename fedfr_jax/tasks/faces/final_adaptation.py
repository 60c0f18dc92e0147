"""Final adaptation of face clients: fine-tuning or distillation.

Yu, Bagdasaryan, Shmatikov 2020, arXiv:2002.04758, for images of many classes; the face
version of FedFR's table 2 is not published, so these choices are ours: both start from
the global network and the client's own class embeddings and see its own images only.
Fine-tuning minimizes the margin softmax over the own classes. Distillation compares
the scaled cosines to the own classes, without a margin: the teacher is the frozen
global network with the embeddings that the client had after the last round.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp

from fedfr_jax.federated.algorithms.fedfr import build_adaptation
from fedfr_jax.federated.local import sgd
from fedfr_jax.losses.distillation import (
    angular_distillation,
    knowledge_distillation,
    knowledge_distillation_over_elements,
)
from fedfr_jax.losses.margin import cosine
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.parts import INLINE, Factory, Part, section
from fedfr_jax.ranges import BelowOne, NonNegative, Positive, Share, Whole
from fedfr_jax.schema import checked, naming
from fedfr_jax.tasks.faces.frozen_features import frozen_features
from fedfr_jax.tasks.faces.loss import build_rule, face_loss, margin_settings
from fedfr_jax.types import Algorithm, LocalTraining, Model

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
    loss: str | Mapping = "cosface",
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
    embed = lambda variables, images: model.apply(variables, images, False)[0]
    reference = lambda teacher, client: frozen_features(embed, None, teacher, client)
    finetuning = face_loss(model, loss=loss)
    if kind in DISTILLATIONS:
        client_loss = distillation_loss(
            model,
            DISTILLATIONS[kind],
            scale=margin_settings(loss)["scale"],
            alpha=alpha,
            temperature=temperature,
        )
    elif kind == "angular":
        client_loss = angular_loss(model, finetuning, weight)
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
        loss = self.build.settings.get("loss", "cosface")
        with naming("adaptation"):
            rule = build_rule(loss)
        if rule and not rule.is_plain:
            raise ValueError(
                "adaptation.loss must be a softmax without state or parameters, got "
                f"{loss!r}."
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
        params = variables["params"]
        backbone = {**variables, "params": params["backbone"]}
        features, stats = model.apply(backbone, batch.images, True, key=key)
        taught = reference.previous_features(batch)
        values = distillation(
            scale * cosine(features, params["head"]),
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
        backbone = {**variables, "params": variables["params"]["backbone"]}
        features, _ = model.apply(backbone, batch.images, True, key=key)
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
