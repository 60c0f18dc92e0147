"""A teacher's embeddings of all images of a source, kept in a file.

`name.npy` holds float16 [T, V, D] in V views: plain, mirrored, and under either mask,
as the row's augment counts them. `name.npy.json` says what they depend on: digests of
the images (with their landmarks, where a mask is drawn) and of the teacher, and the
views' settings.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.drafts import replacing, write_text
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.json_files import read_json
from fedfr_jax.schema import naming
from fedfr_jax.stream import Stream, stream
from fedfr_jax.tasks.data import augment_of
from fedfr_jax.tasks.faces.distilled import KNOWN, Blank, Distill, Teacher, open_distill
from fedfr_jax.tasks.faces.face_images import Recognition, inputs_of
from fedfr_jax.trees import path_name
from fedfr_jax.types import Model, Source

LOOKED_AT = 1024  # images whose pixels are in a digest
CHUNK = 1 << 14  # images between writes
HOW_OFTEN = ("probability", "surface", "keep_clean")  # say nothing of a view's pixels
BELONGS_TO = {
    "images": "this source's images",
    "views": "this row's views",
    "teacher": "this teacher",
}


def digest_of(source: Source) -> str:
    """Tells a source from others: its size, and up to 1024 evenly spread images with
    their landmarks."""
    count = len(source.labels)
    rows = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64))
    found = hashlib.sha256(repr((count, tuple(source.image_shape))).encode())
    for start in range(0, len(rows), 64):
        found.update(np.ascontiguousarray(source.read(rows[start : start + 64])))
    if source.landmarks is not None:
        found.update(np.ascontiguousarray(source.landmarks[rows], np.float32))
    return found.hexdigest()


def digest_of_teacher(teacher: Teacher) -> str:
    """Tells a network's variables from others."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(teacher.variables):
        leaf = np.asarray(leaf)
        found.update(f"{path_name(path)} {leaf.dtype} {leaf.shape}".encode())
        found.update(np.ascontiguousarray(leaf))
    return found.hexdigest()


def views_of(settings, sees: str) -> tuple[Feed, str]:
    """The views that are kept: all of a row's, or those without masks.

    Args:
      settings: with batch_size, flip and augment.

    Returns:
      Them as a feed, and as JSON the settings that an image's views depend on.

    Raises:
      ValueError: when the row's views are not counted, or a mirror follows the masks.
    """
    listed = json.loads(json.dumps(settings.augment))
    names = [entry if isinstance(entry, str) else entry["name"] for entry in listed]
    augment = augment_of(settings.flip, json.dumps(settings.augment))
    if not Feed(1, augment).num_views:
        raise ValueError(
            "distill.cache must come with an augment whose views are counted, such as "
            f"face_mask with fixed=True, got {names}."
        )
    if sees == "same":
        return _views(settings, listed)
    if "face_mask" in names and "mirror" in names[names.index("face_mask") :]:
        raise ValueError(f"augment must have mirror before face_mask, got {names}.")
    others = [x for x, n in zip(listed, names, strict=True) if n != "face_mask"]
    return _views(settings, others)


def _views(settings, listed):
    feed = Feed(settings.batch_size, augment_of(settings.flip, json.dumps(listed)))
    entries = [{"name": x} if isinstance(x, str) else x for x in listed]
    kept = [{k: v for k, v in x.items() if k not in HOW_OFTEN} for x in entries]
    return feed, json.dumps(kept, sort_keys=True)


def write_cache(
    path, source: Source, teacher: Teacher, views: tuple[Feed, str], mesh: Mesh
) -> None:
    """Embed all images of a source in the views; whole or not at all."""
    path, model = pathlib.Path(path), teacher.model
    _check_sidecar(path)
    feed, listed = views
    embed = lambda variables, images: model.apply(variables, images, False)[0]
    run = build_embed(embed, feed, mesh)
    table = stream(inputs_of(source, True), source.labels)
    count = len(source.labels)
    shape = (count, max(feed.num_views, 1), model.embedding_dim)
    with replacing(path, by=str(os.getpid())) as file:
        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, CHUNK):
            rows = np.arange(start, min(start + CHUNK, count), dtype=np.int32)
            found = meshes.fetch(run(teacher.variables, table, rows))[: len(rows)]
            norms = np.maximum(np.linalg.norm(found, axis=2), 1e-12)
            file.write((found / norms[..., None]).astype("<f2").tobytes())
        about = {"views": listed, "teacher": digest_of_teacher(teacher)}
        write_text(sidecar(path), json.dumps({"images": digest_of(source), **about}))


def _check_sidecar(path: pathlib.Path) -> None:
    """Raise ValueError for a sidecar of another cache's, which would be replaced."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        if read_json(sidecar(path)).keys() == BELONGS_TO.keys():
            return
    if sidecar(path).exists():
        raise ValueError(
            f"distill.cache must be a new file, but {sidecar(path)} exists and is no "
            "cache's. Name another file."
        )


def sidecar(path: pathlib.Path) -> pathlib.Path:
    """The file that says what a cache belongs to."""
    return path.with_name(f"{path.name}.json")


def read_cache(
    path,
    source: Source,
    model: Model,
    views: tuple[Feed, str],
    teacher: Teacher | None = None,
) -> np.ndarray:
    """Unit embeddings float16 [T, V, D], mapped from their file.

    Args:
      model: the student.
      teacher: whose embeddings they must be; None asks for nobody's.

    Raises:
      ValueError: for a cache of other images, of another embedding size, whose views
        are not those of the row, or of another teacher.
    """
    feed, listed = views
    path = pathlib.Path(path)
    try:
        kept = np.load(path, mmap_mode="r", allow_pickle=False)
        about = read_json(sidecar(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"distill.cache must be a file of embeddings with its {sidecar(path).name},"
            f" got {type(error).__name__}: {error}."
        ) from error
    wanted = len(source.labels), max(feed.num_views, 1), model.embedding_dim
    if kept.shape != wanted or kept.dtype != np.float16:
        raise ValueError(
            f"{path} must hold float16 (images, views, embedding) {wanted}, got "
            f"{kept.dtype} {kept.shape}."
        )
    known = {"images": digest_of(source), "views": listed}
    if teacher is not None:
        known["teacher"] = digest_of_teacher(teacher)
    for what, own in known.items():
        if about.get(what, "nothing known") != own:
            raise ValueError(
                f"{path} must belong to {BELONGS_TO[what]}, {own}, got "
                f"{about.get(what, 'nothing known')}: make it anew."
            )
    return kept


def with_teacher(
    task: Recognition, told: Mapping, source: Source, model: Model, mesh: Mesh
) -> Recognition:
    """A task whose table has the kept embeddings too, made first where there are none.

    Args:
      told: {section: (its `Distill`, or the settings of one, or None; settings of its
        training)} of pretraining and of all rows.
      model: the student.

    Raises:
      ValueError: as `read_cache`, for two caches, or a missing file without a teacher.
    """
    kept, file = None, None
    p, table = task.partition, task.table
    rows = np.concatenate([p.train, p.global_examples])
    for section, (given, settings) in told.items():
        one = given
        if not isinstance(given, Distill):
            one = open_distill(section, given, model)
        if one is None or one.cache is None:
            continue
        if file not in (None, one.cache):
            raise ValueError(
                f"config.{section}.distill.cache must be the one file of all rows, "
                f"{file}, got {one.cache}."
            )
        with naming(f"config.{section}"):
            kept = _kept(one, views_of(settings, one.sees), source, rows, model, mesh)
        file = one.cache
    if kept is None:
        return task
    targets = {**table.targets, KNOWN: kept}
    if isinstance(table, Stream):
        table = stream(table.read, targets, memory=table.memory, waves=table.waves)
    else:
        table = table._replace(targets=targets)
    return task._replace(table=table)


def _kept(
    one: Distill,
    views: tuple[Feed, str],
    source: Source,
    rows,
    model: Model,
    mesh: Mesh,
) -> np.ndarray:
    """The embeddings of `rows` in a row's file, which is made when it is missing."""
    if isinstance(one.cache, Blank):
        shape = len(rows), max(views[0].num_views, 1), model.embedding_dim
        return np.broadcast_to(np.float16(0), shape)
    if not pathlib.Path(one.cache).is_file():
        if one.teacher is None:
            raise ValueError(
                f"distill.cache must exist or have a teacher, got {one.cache}: there "
                "is no such file."
            )
        write_cache(one.cache, source, one.teacher, views, mesh)
    return read_cache(one.cache, source, model, views, one.teacher)[rows]
