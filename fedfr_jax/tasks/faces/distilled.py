"""A big teacher's embeddings as a further target: BigFace-Distill.

L = L_cos + 9 L_d with L_d the squared distance of unit embeddings, so 2 (1 - cosine):
angular distillation (VarGFaceNet, arXiv:1910.04985) as BigFace's authors weigh it. An
image without a label has L_d alone, so that labelled and unlabelled ones share a step:

  L = sum a_i L_cos_i / max(1, sum a_i) + weight * mean L_d_i,  a_i = 1 where labelled,

over the whole batch of central training, however many devices and micro-batches it has.

The same term teaches a client's network, whose own faces may have no labels.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.losses.distillation import angular_distillation
from fedfr_jax.losses.masks import COUNTED, masked_mean
from fedfr_jax.models import MODELS
from fedfr_jax.models.foreign import network_of, variables_of
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.models.sizes import check_layers
from fedfr_jax.models.weights import Weights
from fedfr_jax.objective import with_aux
from fedfr_jax.schema import (
    call,
    check_choice,
    check_keys,
    check_ranges,
    choose,
    naming,
)
from fedfr_jax.types import Batch, Model, PyTree

SIGHTS = ("same", "clean")
KNOWN = "teacher"  # key of the targets with kept embeddings, [V, D] of an example


class Blank(NamedTuple):
    """Stands for a file of a teacher that a plan does not read: its numbers are 0."""


class Teacher(NamedTuple):
    """A trained network."""

    model: Model
    variables: PyTree  # in host memory


class Distill(NamedTuple):
    """What a row is told of its teacher, once opened."""

    weight: float
    teacher: Teacher | None
    cache: str | Blank | None  # file of embeddings, made if missing
    sees: str  # the student's image, or the one without its mask
    unlabelled: float  # share of the images whose labels are not used
    unlabelled_from: str | None = None  # part of the source that has no labels


def distill(
    model: Model,
    *,
    weight: float = 9.0,
    teacher: Mapping | None = None,
    cache: str | os.PathLike | Blank | None = None,
    sees: str = "same",
    unlabelled: float = 0.0,
    unlabelled_from: str | None = None,
) -> Distill:
    """The key `distill` of a row or of `pretrain`.

    Args:
      model: the student.
      weight: lambda, of the distance to the teacher's embeddings.
      teacher: {"weights": a file or the work folder of a run, see `load_weights`,
        "model": section of its network, which a work folder or a file that tells it
        needs not}; it runs beside the student in every step, and is a constant of the
        compiled step: of a teacher with GB of weights keep a `cache` instead, which is
        as exact, once for every image and view.
      cache: instead of that, or made of it when the file is missing: embeddings of all
        images in all views, see `teacher_cache`.
      sees: "same" as the student, or "clean": without the mask that it sees.
      unlabelled: share of the images, drawn by their rows, that count as unlabelled.
      unlabelled_from: part of a joined source whose images have no labels, in central
        training: its public people (whoever each folder is called after) are no
        classes. Keep it from clients and judging by client_ids_from, unseen_ids_from.

    Raises:
      ValueError: for an option out of range, neither teacher nor cache, or a teacher
        that does not fit its file or the student.
    """
    bounds = {"weight": (0, math.inf), "unlabelled": (0, 1)}
    check_ranges("", {"weight": weight, "unlabelled": unlabelled}, bounds)
    check_choice("sees", sees, SIGHTS)
    if teacher is None and cache is None:
        raise ValueError("teacher or cache must be given, got neither.")
    opened = None if teacher is None else open_teacher(teacher, model)
    if cache is not None and not isinstance(cache, Blank):
        cache = str(cache)
    return Distill(weight, opened, cache, sees, unlabelled, unlabelled_from)


def open_distill(section: str, settings: Mapping | None, model: Model):
    """`distill` of the config's section, or None without it."""
    if settings is None:
        return None
    return call(f"{section}.distill", distill, settings, model)


def open_teacher(settings: Mapping, student: Model) -> Teacher:
    """The network of {"weights", "model"}, for images of the student's shape."""
    check_keys("teacher", settings, ("weights", "model"))
    if "weights" not in settings:
        raise ValueError("teacher must have the key weights, got none.")
    given, shape = settings["weights"], student.image_shape
    check_layers("distill.teacher.model", settings.get("model"))
    if isinstance(given, Blank):
        model = choose("distill.teacher.model", MODELS, settings["model"], shape)
        return Teacher(_like(student, model), _blank(model))
    weights = load_weights(given)
    with naming(given):
        section = settings.get("model") or network_for(weights, shape)
        model = choose("distill.teacher.model", MODELS, section, shape)
        return Teacher(_like(student, model), variables_of(weights, section, shape))


def _like(student: Model, model: Model) -> Model:
    """`model`, whose embeddings must be as long as the student's."""
    if model.embedding_dim != student.embedding_dim:
        raise ValueError(
            "teacher's embedding_dim must be the student's "
            f"{student.embedding_dim}, got {model.embedding_dim}."
        )
    return model


def _blank(model: Model) -> PyTree:
    """Variables that are all 0 and take no memory."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: np.broadcast_to(x.dtype.type(0), x.shape), shapes)


def network_for(weights: Weights, image_shape: tuple[int, ...]) -> Mapping:
    """Section of the network that weights tell, for images of a shape.

    Raises:
      ValueError: when they do not tell it, or it is for other images.
    """
    try:
        section, shape = network_of(weights)
    except ValueError as error:
        raise ValueError(
            f"teacher must have the key model with these weights, got none: {error}"
        ) from error
    if tuple(shape) != tuple(image_shape):
        raise ValueError(
            f"teacher's images must be the student's {tuple(image_shape)}, got {shape}."
        )
    return section


def distilled(loss_of: Callable, model: Model, told: Distill) -> Callable:
    """A loss of `Local` and the distance to the teacher; the student runs once.

    Args:
      loss_of: model -> loss over params with a "backbone"; a mean over valid examples.
      model: the student.
    """
    teach = online(told) if told.cache is None else from_cache

    def loss(variables, batch, key, **round_args):
        backbone = {**variables, "params": variables["params"]["backbone"]}
        features, stats = model.apply(backbone, batch.images, True, key=key)
        known = model._replace(apply=lambda *_, **__: (features, stats))
        seen = only_labelled(batch, told.unlabelled)
        total, (stats, metrics) = with_aux(loss_of(known))(
            variables, seen, key, **round_args
        )
        distance = angular_distillation(features, teach(batch))
        value = masked_mean(distance, batch.is_valid)
        return total + told.weight * value, (stats, {**metrics, "distillation": value})

    return loss


def only_labelled(batch: Batch, unlabelled: float) -> Batch:
    """`batch` in which only examples with a label that is used are valid."""
    share = jnp.uint32(round(unlabelled * 2**16))
    is_used = (stirred(batch.example) >> 16) >= share
    is_used &= batch.labels >= 0
    targets = {**batch.targets, "label": jnp.maximum(batch.labels, 0)}
    return batch._replace(targets=targets, is_valid=batch.is_valid & is_used)


def counting(told: Distill | None) -> Callable[[Batch], Batch] | None:
    """A whole batch -> the same, which knows how many labels it uses; None where all
    images have one. Else each part of the batch would divide by its own number."""
    if told is None or not (told.unlabelled or told.unlabelled_from):
        return None

    def counted(batch: Batch) -> Batch:
        is_used = only_labelled(batch, told.unlabelled).is_valid
        share = jnp.maximum(is_used.sum(), 1).astype(jnp.float32) / len(is_used)
        share = jnp.broadcast_to(share, is_used.shape)
        return batch._replace(targets={**batch.targets, COUNTED: share})

    return counted


def stirred(rows: jax.Array) -> jax.Array:
    """Uint32 [B] that look random, a function of rows [B]: MurmurHash3's last step."""
    bits = rows.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(1)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def online(told: Distill) -> Callable:
    """batch -> the teacher's embeddings [B, D], computed in the step."""

    def teach(batch: Batch) -> jax.Array:
        if told.sees == "clean" and "clean" not in batch.inputs:
            raise ValueError(
                "distill.sees must be same without face_mask's keep_clean, got clean."
            )
        images = batch.inputs["clean"] if told.sees == "clean" else batch.images
        return told.teacher.model.apply(told.teacher.variables, images, False)[0]

    return teach


def from_cache(batch: Batch) -> jax.Array:
    """The kept embeddings [B, D] of a batch's images in the views that it has.

    What is kept are the fastest views: of 2 the mirror's, whatever mask is on them.
    """
    kept = batch.targets[KNOWN].astype(jnp.float32)  # [B, V, D]
    view = jax.lax.rem(batch.view, jnp.int32(kept.shape[1]))
    return jnp.take_along_axis(kept, view[:, None, None], axis=1)[:, 0]
