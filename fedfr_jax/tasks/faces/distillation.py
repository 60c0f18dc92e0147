"""Distillation from a teacher's embeddings, computed in each step or cached in a file.

L = L_cos + 9 L_d with L_d the squared distance of unit embeddings, so 2 (1 - cosine):
angular distillation (VarGFaceNet, arXiv:1910.04985) as BigFace's authors weigh it. An
image without a label has L_d alone, so that labeled and unlabeled ones share a step:

  L = sum a_i L_cos_i / max(1, sum a_i) + weight * mean L_d_i,  a_i = 1 where labeled,

over the whole batch of central training, however many devices and micro-batches it has.
The same term teaches a client's network, whose own faces may have no labels.

A cache has the teacher's embeddings of all images of a source. `name.npy` holds float16
[T, V, D] in V views: plain, mirrored, and under either mask, as the method's augments
count them. `name.npy.json` says what they depend on: digests of the images (with their
landmarks, where a mask is drawn) and of the teacher, and the views' settings.
"""

import contextlib
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
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.files import replace_file, write_text
from fedfr_jax.json_files import read_json
from fedfr_jax.losses.distillation import angular_distillation
from fedfr_jax.losses.masked_means import COUNTED, masked_mean
from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.models.weights import Weights
from fedfr_jax.parts import Part, choose, section
from fedfr_jax.ranges import NonNegative, Share
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import build_data_augment
from fedfr_jax.tasks.faces.data import FaceData, build_inputs
from fedfr_jax.tasks.model import NetworkReader
from fedfr_jax.trees import path_name
from fedfr_jax.types import Batch, Model, PyTree, Source, as_aux_loss

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


@section
class Distill(NamedTuple):
    """Keys of `distill`, of a method or of `pretrain`; `open` loads the teacher."""

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
    # and judging by client_ids_from, unseen_ids_from.
    unlabeled_source: str | None = None

    def check(self) -> None:
        """Raise ValueError without any embeddings."""
        if self.teacher is None and self.cache is None:
            raise ValueError("teacher or cache must be set, got neither.")

    def open(self, student: Model, where: str) -> "Distill":
        """Load the teacher, as a `Teacher`.

        Args:
          where: the training is in the config.

        Raises:
          ValueError: for a teacher that does not fit its file or the student.
        """
        with naming(f"{where}.distill"):
            teacher = self.teacher and open_teacher(self.teacher, student)
        return self._replace(teacher=teacher)


def open_teacher(config: TeacherConfig, student: Model) -> Teacher:
    """Load a teacher, for images of the student's shape."""
    source, shape, network = config.weights, student.input_shape, config.model
    if isinstance(source, DummyTeacher):
        model = network(shape)
        return Teacher(_like(student, model), _dummy_teacher(model))
    weights = load_weights(source)
    with naming(source):
        section = network.section if network else network_for(weights, shape)
        model = choose("config.distill.teacher.model", MODELS, section, shape)
        model = _like(student, model)
        return Teacher(model, convert_variables(weights, section, shape))


def _like(student: Model, model: Model) -> Model:
    """Return the teacher; raise ValueError unless its embedding_dim is the
    student's.
    """
    if model.embedding_dim != student.embedding_dim:
        raise ValueError(
            "teacher's embedding_dim must be the student's "
            f"{student.embedding_dim}, got {model.embedding_dim}."
        )
    return model


def _dummy_teacher(model: Model) -> PyTree:
    """Variables that are all 0 and take no memory."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: np.broadcast_to(x.dtype.type(0), x.shape), shapes)


def network_for(weights: Weights, input_shape: tuple[int, ...]) -> Mapping:
    """Config section of the model of weights, for images of a given shape.

    Raises:
      ValueError: when they do not tell it, or it is for other images.
    """
    try:
        section, shape = detect_model(weights)
    except ValueError as error:
        raise ValueError(
            f"teacher needs the key model for these weights: {error}"
        ) from error
    if tuple(shape) != tuple(input_shape):
        raise ValueError(
            f"teacher's images must be the student's {tuple(input_shape)}, got {shape}."
        )
    return section


def with_distillation(loss_of: Callable, model: Model, distill: Distill) -> Callable:
    """Add the distance to the teacher to a loss; the student runs once.

    Args:
      loss_of: model -> loss over params with a "backbone"; a mean over valid examples.
      model: the student.
    """
    teacher_features = (
        with_live_teacher(distill) if distill.cache is None else with_cached_targets
    )

    def loss(variables, batch, key, **round_args):
        backbone = {**variables, "params": variables["params"]["backbone"]}
        features, stats = model.apply(backbone, batch.images, True, key=key)
        known_model = model._replace(apply=lambda *_, **__: (features, stats))
        labeled = labeled_only(batch, distill.unlabeled_fraction)
        total, (stats, metrics) = as_aux_loss(loss_of(known_model))(
            variables, labeled, key, **round_args
        )
        distance = angular_distillation(features, teacher_features(batch))
        value = masked_mean(distance, batch.is_valid)
        return total + distill.weight * value, (
            stats,
            {**metrics, "distillation_loss": value},
        )

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


def with_live_teacher(distill: Distill) -> Callable:
    """Build batch -> the teacher's embeddings [B, D], computed in the step."""

    def teach(batch: Batch) -> jax.Array:
        if distill.teacher_input == "clean" and "clean" not in batch.inputs:
            raise ValueError(
                "distill.teacher_input must be 'same' unless face_mask has "
                "keep_clean=True, got 'clean'."
            )
        images = (
            batch.inputs["clean"] if distill.teacher_input == "clean" else batch.images
        )
        return distill.teacher.model.apply(distill.teacher.variables, images, False)[0]

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
NUM_CHECKED = (
    "probability",
    "surface_fraction",
    "keep_clean",
)  # say nothing of a view's pixels
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
        digest.update(np.ascontiguousarray(source.read(rows[start : start + 64])))
    if source.landmarks is not None:
        digest.update(np.ascontiguousarray(source.landmarks[rows], np.float32))
    return digest.hexdigest()


def digest_of_teacher(teacher: Teacher) -> str:
    """Digest of a teacher's variables."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(teacher.variables):
        leaf = np.asarray(leaf)
        digest.update(f"{path_name(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()


def cached_views(settings, teacher_input: str) -> tuple[Batching, str]:
    """Views to cache: all of a method's, or those without masks.

    Args:
      settings: with batch_size, flip and augment.

    Returns:
      Them as a feed, and as JSON the settings that an image's views depend on.

    Raises:
      ValueError: when the views are not counted, or a mirror follows the masks.
    """
    augments = json.loads(json.dumps(settings.augment))
    names = [entry if isinstance(entry, str) else entry["name"] for entry in augments]
    augment = build_data_augment(
        settings.flip_probability, json.dumps(settings.augment)
    )
    if not Batching(1, augment).num_views:
        raise ValueError(
            "distill.cache needs an augment with a countable number of views, such as "
            f"face_mask with fixed=True, got {names}."
        )
    if teacher_input == "same":
        return _views(settings, augments)
    if "face_mask" in names and "horizontal_flip" in names[names.index("face_mask") :]:
        raise ValueError(
            f"augment must have horizontal_flip before face_mask, got {names}."
        )
    without_masks = [
        x for x, n in zip(augments, names, strict=True) if n != "face_mask"
    ]
    return _views(settings, without_masks)


def _views(settings, augments):
    feed = Batching(
        settings.batch_size,
        build_data_augment(settings.flip_probability, json.dumps(augments)),
    )
    entries = [{"name": x} if isinstance(x, str) else x for x in augments]
    view_settings = [
        {k: v for k, v in x.items() if k not in NUM_CHECKED} for x in entries
    ]
    return feed, json.dumps(view_settings, sort_keys=True)


def write_cache(
    path, source: Source, teacher: Teacher, views: tuple[Batching, str], mesh: Mesh
) -> None:
    """Embed all images of a source in the views, and write the cache atomically."""
    path, model = pathlib.Path(path), teacher.model
    _check_sidecar(path)
    feed, listed = views
    embed = lambda variables, images: model.apply(variables, images, False)[0]
    run = build_embed(embed, feed, mesh)
    table = stream(build_inputs(source, True), source.labels)
    count = len(source.labels)
    shape = (count, max(feed.num_views, 1), model.embedding_dim)
    with replace_file(path) as file:
        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, CHUNK):
            rows = np.arange(start, min(start + CHUNK, count), dtype=np.int32)
            features = meshes.fetch(run(teacher.variables, table, rows))[: len(rows)]
            norms = np.maximum(np.linalg.norm(features, axis=2), 1e-12)
            file.write((features / norms[..., None]).astype("<f2").tobytes())
        about = {"views": listed, "teacher": digest_of_teacher(teacher)}
        write_text(sidecar(path), json.dumps({"images": digest_of(source), **about}))


def _check_sidecar(path: pathlib.Path) -> None:
    """Raise ValueError if the sidecar file exists but is not a cache's."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        if read_json(sidecar(path)).keys() == BELONGS_TO.keys():
            return
    if sidecar(path).exists():
        raise ValueError(
            f"distill.cache must be a new file, but {sidecar(path)} exists and is no "
            "cache's. Name another file."
        )


def sidecar(path: pathlib.Path) -> pathlib.Path:
    """Path of the file that records what a cache belongs to."""
    return path.with_name(f"{path.name}.json")


def read_cache(
    path,
    source: Source,
    model: Model,
    views: tuple[Batching, str],
    teacher: Teacher | None = None,
) -> np.ndarray:
    """Memory-map the normalized embeddings [T, V, D] float16 of a cache.

    Args:
      model: the student.
      teacher: whose embeddings they must be; None asks for nobody's.

    Raises:
      ValueError: for a cache of other images, of another embedding size, whose views
        are not those of the method, or of another teacher.
    """
    feed, listed = views
    path = pathlib.Path(path)
    try:
        embeddings = np.load(path, mmap_mode="r", allow_pickle=False)
        about = read_json(sidecar(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"distill.cache must be a file of embeddings with its {sidecar(path).name},"
            f" got {type(error).__name__}: {error}."
        ) from error
    shape = len(source.labels), max(feed.num_views, 1), model.embedding_dim
    if embeddings.shape != shape or embeddings.dtype != np.float16:
        raise ValueError(
            f"{path} must hold float16 (images, views, embedding) {shape}, got "
            f"{embeddings.dtype} {embeddings.shape}."
        )
    expected = {"images": digest_of(source), "views": listed}
    if teacher is not None:
        expected["teacher"] = digest_of_teacher(teacher)
    for field, value in expected.items():
        if about.get(field, "nothing known") != value:
            raise ValueError(
                f"{path} must belong to {BELONGS_TO[field]}, {value}, got "
                f"{about.get(field, 'nothing known')}. Delete it to make it again."
            )
    return embeddings


def cache_embeddings(
    task: FaceData, distillations: Mapping, source: Source, model: Model, mesh: Mesh
) -> FaceData:
    """Add cached embeddings to a task's table; compute them if missing.

    Args:
      distillations: {section: (its `Distill` or None, settings of its training)} of
        pretraining and of all methods.
      model: the student.

    Raises:
      ValueError: as `read_cache`, for two caches, or a missing file without a teacher.
    """
    embeddings, file = None, None
    p, table = task.partition, task.table
    rows = np.concatenate([p.train, p.public_examples])
    for where, (distill, settings) in distillations.items():
        if distill is None or distill.cache is None:
            continue
        if file not in (None, distill.cache):
            raise ValueError(
                f"config.{where}.distill.cache must be the same file in all methods, "
                f"{file}, got {distill.cache}."
            )
        with naming(f"config.{where}"):
            embeddings = _cached_embeddings(
                distill.open(model, f"config.{where}"),
                cached_views(settings, distill.teacher_input),
                source,
                rows,
                model,
                mesh,
            )
        file = distill.cache
    if embeddings is None:
        return task
    targets = {**table.targets, KNOWN: embeddings}
    if isinstance(table, Stream):
        table = stream(table.read, targets, memory=table.memory, waves=table.waves)
    else:
        table = table._replace(targets=targets)
    return task._replace(table=table)


def _cached_embeddings(
    distill: Distill,
    views: tuple[Batching, str],
    source: Source,
    rows,
    model: Model,
    mesh: Mesh,
) -> np.ndarray:
    """Embeddings of `rows` from a cache, which is made if it is missing."""
    if isinstance(distill.cache, DummyTeacher):
        shape = len(rows), max(views[0].num_views, 1), model.embedding_dim
        return np.broadcast_to(np.float16(0), shape)
    if not pathlib.Path(distill.cache).is_file():
        if distill.teacher is None:
            raise ValueError(
                "distill.cache must exist unless there is a teacher, got "
                f"{distill.cache}, which does not."
            )
        write_cache(distill.cache, source, distill.teacher, views, mesh)
    return read_cache(distill.cache, source, model, views, distill.teacher)[rows]
