"""Distillation from a teacher's embeddings, computed in each step or cached in a file.

L = L_cos + 9 L_d with L_d the squared distance of unit embeddings, so 2 (1 - cosine):
angular distillation (VarGFaceNet, arXiv:1910.04985) as BigFace's authors weigh it. An
image without a label has L_d alone, so that labeled and unlabeled ones share a step:

  L = sum a_i L_cos_i / max(1, sum a_i) + weight * mean L_d_i,  a_i = 1 where labeled,

over the whole batch of central training, however many devices and micro-batches it has.
The same term teaches a client's network, whose own faces may have no labels.

A cache is a .safetensors file of the teacher's embeddings of all images of a source,
float16 [T, V, D] in V views: plain, mirrored, and under either mask, as the method's
augments count them. Its metadata say what they depend on: digests of the images (with
their landmarks, where a mask is drawn) and of the teacher, and the views' settings.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.central.settings import Training
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.federated.settings import Federation
from fedfr_jax.files import replace_file
from fedfr_jax.losses.distillation import angular_distillation
from fedfr_jax.losses.masked_means import COUNTED, masked_mean
from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.parts import Part, choose, section
from fedfr_jax.ranges import NonNegative, Share
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import build_data_augment
from fedfr_jax.tasks.faces.data import FaceData, build_inputs
from fedfr_jax.tasks.model import NetworkReader
from fedfr_jax.trees import by_name
from fedfr_jax.types import Batch, Model, PyTree, Source

KNOWN = "teacher"  # key of the targets with kept embeddings, [V, D] of an example


class DummyTeacher(NamedTuple):
    """Placeholder for a teacher's file in a plan, with all values 0."""


class Teacher(NamedTuple):
    """A trained teacher model."""

    model: Model
    variables: PyTree  # in host memory


@section
class TeacherConfig(NamedTuple):
    """Keys of `distill.teacher`."""

    # A file or the work folder of a run, see `load_weights`
    weights: str | os.PathLike | DummyTeacher
    # Its network, unless the file or folder says it
    model: Annotated[Part | None, NetworkReader()] = None

    def open(self, student: Model) -> Teacher:
        """Load the teacher, for images of the student's shape.

        Raises:
          ValueError: for a teacher that does not fit its file or the student.
        """
        shape, network = student.input_shape, self.model
        if isinstance(self.weights, DummyTeacher):
            model = network(shape) if network else student
            variables = jax.eval_shape(model.init, jax.random.key(0))
            zeros = lambda x: np.broadcast_to(x.dtype.type(0), x.shape)  # no memory
            return Teacher(model, jax.tree.map(zeros, variables))
        weights = load_weights(self.weights)
        with naming(self.weights):
            section = network.section if network else None
            if section is None:
                section, image_shape = detect_model(weights)
                if tuple(image_shape) != tuple(shape):
                    raise ValueError(
                        f"teacher's images must be the student's {tuple(shape)}, got "
                        f"{image_shape}."
                    )
            model = choose("config.distill.teacher.model", MODELS, section, shape)
            if model.embedding_dim != student.embedding_dim:
                raise ValueError(
                    "teacher's embedding_dim must be the student's "
                    f"{student.embedding_dim}, got {model.embedding_dim}."
                )
            return Teacher(model, convert_variables(weights, section, shape))


@section
class Distill(NamedTuple):
    """Keys of `distill`, of a method or of `pretrain`."""

    weight: NonNegative = 9.0  # lambda, of the distance to the teacher's embeddings
    # It runs beside the student in every step and is a constant of the compiled step:
    # for a teacher with gigabytes of weights use a `cache`, which is as exact.
    teacher: TeacherConfig | None = None
    # File of the teacher's embeddings of all images in all views, which are looked up
    # instead of computed; made by the teacher when it is missing.
    cache: str | os.PathLike | DummyTeacher | None = None
    # As the student's images, or without the mask that it sees
    teacher_input: Literal["same", "clean"] = "same"
    # Share of the images, drawn by their rows, that count as unlabeled
    unlabeled_fraction: Share = 0.0
    # Source of a `concat` whose images have no labels, in central training: its public
    # people (whoever each folder is called after) are no classes. Keep it from clients
    # and evaluation by client_ids_from, unseen_ids_from.
    unlabeled_source: str | None = None

    def check(self) -> None:
        """Raise ValueError without any embeddings."""
        if self.teacher is None and self.cache is None:
            raise ValueError("teacher or cache must be set, got neither.")

    def open(self, student: Model, where: str) -> "Distillation":
        """Load the teacher, if there is one.

        Args:
          where: the training is in the config.
        """
        with naming(f"{where}.distill"):
            return Distillation(self, self.teacher and self.teacher.open(student))


class Distillation(NamedTuple):
    """A `Distill` whose teacher is loaded."""

    settings: Distill
    teacher: Teacher | None  # None: its embeddings are in the cache


def with_distillation(
    loss_of: Callable, model: Model, distillation: Distillation
) -> Callable:
    """Add the distance to the teacher to a loss; the student runs once.

    Args:
      loss_of: model -> loss over params with a "backbone"; a mean over valid examples.
      model: the student, over such params.
    """
    settings, teacher = distillation
    teacher_features = with_cached_targets
    if settings.cache is None and teacher is not None:
        teacher_features = with_live_teacher(teacher, settings.teacher_input)

    def loss(variables, batch, key, **round_args):
        features, stats = model.apply(variables, batch.model_inputs, True, key=key)
        known_model = model._replace(apply=lambda *_, **__: (features, stats))
        labeled = labeled_only(batch, settings.unlabeled_fraction)
        total, (stats, metrics) = as_aux_loss(loss_of(known_model))(
            variables, labeled, key, **round_args
        )
        distance = angular_distillation(features, teacher_features(batch))
        value = masked_mean(distance, batch.is_valid)
        metrics = {**metrics, "distillation_loss": value}
        return total + settings.weight * value, (stats, metrics)

    return loss


def labeled_only(batch: Batch, unlabeled: float) -> Batch:
    """Restrict the valid examples of `batch` to those whose labels are used."""
    share = jnp.uint32(round(unlabeled * 2**16))
    is_used = (shuffle_rows(batch.row) >> 16) >= share
    is_used &= batch.labels >= 0
    targets = {**batch.targets, "label": jnp.maximum(batch.labels, 0)}
    return batch._replace(targets=targets, is_valid=batch.is_valid & is_used)


def count_distilled(distill: Distill | None) -> Callable[[Batch], Batch] | None:
    """Build a function that adds the share of used labels to a batch; None if all
    are used.
    """
    if distill is None or not (distill.unlabeled_fraction or distill.unlabeled_source):
        return None

    def counted(batch: Batch) -> Batch:
        is_used = labeled_only(batch, distill.unlabeled_fraction).is_valid
        share = jnp.maximum(is_used.sum(), 1).astype(jnp.float32) / len(is_used)
        share = jnp.broadcast_to(share, is_used.shape)
        return batch._replace(targets={**batch.targets, COUNTED: share})

    return counted


def shuffle_rows(rows: jax.Array) -> jax.Array:
    """Hash rows [B] to uint32 [B] (the last step of MurmurHash3)."""
    bits = rows.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(1)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def with_live_teacher(
    teacher: Teacher, teacher_input: Literal["same", "clean"]
) -> Callable:
    """Build batch -> the teacher's embeddings [B, D], computed in the step."""

    def teach(batch: Batch) -> jax.Array:
        if teacher_input == "same":
            images = batch.images
        elif "clean" in batch.inputs:
            images = batch.inputs["clean"]
        else:
            raise ValueError(
                "distill.teacher_input must be 'same' unless face_mask has "
                "keep_clean=True, got 'clean'."
            )
        return teacher.model.output(teacher.variables, images)

    return teach


def with_cached_targets(batch: Batch) -> jax.Array:
    """Cached embeddings [B, D] of a batch's images, in their views.

    What is kept are the fastest views: of 2 the mirror's, whatever mask is on them.
    """
    embeddings = batch.targets[KNOWN].astype(jnp.float32)  # [B, V, D]
    view = jax.lax.rem(batch.view_index, jnp.int32(embeddings.shape[1]))
    return jnp.take_along_axis(embeddings, view[:, None, None], axis=1)[:, 0]


LOOKED_AT = 1024  # images whose pixels are in a digest
CHUNK = 1 << 14  # images between writes
# Settings of a mask that say nothing of a view's pixels
NUM_CHECKED = ("probability", "surface_fraction", "keep_clean")
BELONGS_TO = {
    "images": "this source's images",
    "views": "this method's views",
    "teacher": "this teacher",
}


def digest_of(source: Source) -> str:
    """Digest of a source: its size and up to 1024 evenly spaced images."""
    count = len(source.labels)
    rows = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64))
    digest = hashlib.sha256(repr((count, tuple(source.input_shape))).encode())
    for start in range(0, len(rows), 64):
        digest.update(np.asarray(source.read(rows[start : start + 64])).tobytes())
    if source.landmarks is not None:
        digest.update(np.asarray(source.landmarks[rows], np.float32).tobytes())
    return digest.hexdigest()


def digest_of_teacher(teacher: Teacher) -> str:
    """Digest of a teacher's variables."""
    digest = hashlib.sha256()
    for name, leaf in by_name(teacher.variables).items():
        leaf = np.asarray(leaf)
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


class Views(NamedTuple):
    """Views of images whose embeddings a cache has."""

    batching: Batching
    listed: str  # as JSON, the settings that an image's views depend on

    @property
    def number(self) -> int:
        """Number of views, V."""
        return max(self.batching.num_views, 1)


def cached_views(settings: Training | Federation, teacher_input: str) -> Views:
    """Views to cache: all of a method's, or those without masks.

    Raises:
      ValueError: when the views are not counted, or a mirror follows the masks.
    """
    augments = [
        {"name": x} if isinstance(x, str) else x
        for x in json.loads(json.dumps(settings.augment))
    ]
    names = [entry["name"] for entry in augments]

    def build(augments):
        return build_data_augment(settings.flip_probability, json.dumps(augments))

    if not Batching(1, build(augments)).num_views:
        raise ValueError(
            "distill.cache needs an augment with a countable number of views, such as "
            f"face_mask with fixed=True, got {names}."
        )
    if teacher_input == "clean":
        after_mask = names[names.index("face_mask") :] if "face_mask" in names else ()
        if "horizontal_flip" in after_mask:
            raise ValueError(
                f"augment must have horizontal_flip before face_mask, got {names}."
            )
        augments = [x for x in augments if x["name"] != "face_mask"]
    listed = [{k: v for k, v in x.items() if k not in NUM_CHECKED} for x in augments]
    batching = Batching(settings.batch_size, build(augments))
    return Views(batching, json.dumps(listed, sort_keys=True))


def write_cache(
    path: str | os.PathLike, source: Source, teacher: Teacher, views: Views, mesh: Mesh
) -> None:
    """Embed all images of a source in the views, and write the cache atomically."""
    model, count = teacher.model, len(source.labels)
    run = build_embed(model.output, views.batching, mesh)
    table = stream(build_inputs(source, True), source.labels)
    shape = [count, views.number, model.embedding_dim]
    array = {"dtype": "F16", "shape": shape}
    array["data_offsets"] = [0, 2 * int(np.prod(shape))]
    about = {
        "images": digest_of(source),
        "views": views.listed,
        "teacher": digest_of_teacher(teacher),
    }
    header = json.dumps({"__metadata__": about, "embeddings": array}).encode()
    with replace_file(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, count, CHUNK):
            rows = np.arange(start, min(start + CHUNK, count), dtype=np.int32)
            features = meshes.fetch(run(teacher.variables, table, rows))[: len(rows)]
            norms = np.maximum(np.linalg.norm(features, axis=2), 1e-12)
            file.write((features / norms[..., None]).astype("<f2").tobytes())


def read_cache(
    path: str | os.PathLike,
    source: Source,
    model: Model,
    views: Views,
    teacher: Teacher | None = None,
) -> np.ndarray:
    """Memory-map the normalized embeddings [T, V, D] float16 of a cache.

    Args:
      model: the student.
      teacher: whose embeddings they must be; None takes any teacher's.

    Raises:
      ValueError: for a cache of other images, of another embedding size, whose views
        are not those of the method, or of another teacher.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 2**20)))
        about, array = header["__metadata__"], header["embeddings"]
        kind, shape = array["dtype"], tuple(array["shape"])
        embeddings = np.memmap(path, "<f2", "r", 8 + size, shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "distill.cache must be a .safetensors file of embeddings, got "
            f"{type(error).__name__}: {error}."
        ) from error
    wanted = len(source.labels), views.number, model.embedding_dim
    if (kind, shape) != ("F16", wanted):
        raise ValueError(
            f"{path} must hold F16 (images, views, embedding) {wanted}, got {kind} "
            f"{shape}."
        )
    expected = {"images": digest_of(source), "views": views.listed}
    if teacher is not None:
        expected["teacher"] = digest_of_teacher(teacher)
    for field, value in expected.items():
        if (known := about.get(field)) != value:
            raise ValueError(
                f"{path} must belong to {BELONGS_TO[field]}, {value}, got {known}. "
                "Delete it to make it again."
            )
    return embeddings


def cache_embeddings(
    task: FaceData,
    distillations: Mapping[str, tuple[Distill | None, Training | Federation]],
    source: Source,
    model: Model,
    mesh: Mesh,
) -> FaceData:
    """Add cached embeddings to a task's table; compute them if missing.

    Args:
      distillations: {section: (its `Distill`, settings of its training)} of pretraining
        and of all methods.
      model: the student.

    Raises:
      ValueError: as `read_cache`, for two caches, or a missing file without a teacher.
    """
    p, table, embeddings, file = task.partition, task.train, None, None
    rows = np.concatenate([p.train.rows, p.public.rows])
    for where, (distill, settings) in distillations.items():
        if distill is None or distill.cache is None:
            continue
        if file not in (None, distill.cache):
            raise ValueError(
                f"config.{where}.distill.cache must be the same file in all methods, "
                f"{file}, got {distill.cache}."
            )
        file = distill.cache
        with naming(f"config.{where}"):
            teacher = distill.open(model, f"config.{where}").teacher
            views = cached_views(settings, distill.teacher_input)
            if isinstance(file, DummyTeacher):
                shape = len(rows), views.number, model.embedding_dim
                embeddings = np.broadcast_to(np.float16(0), shape)
                continue
            if not pathlib.Path(file).is_file():
                if teacher is None:
                    raise ValueError(
                        "distill.cache must exist unless there is a teacher, got "
                        f"{file}, which does not."
                    )
                write_cache(file, source, teacher, views, mesh)
            embeddings = read_cache(file, source, model, views, teacher)[rows]
    if embeddings is None:
        return task
    targets = {**table.targets, KNOWN: embeddings}
    if isinstance(table, Stream):
        table = stream(table.read, targets, memory=table.memory, waves=table.waves)
    else:
        table = table._replace(targets=targets)
    return task._replace(train=table)
