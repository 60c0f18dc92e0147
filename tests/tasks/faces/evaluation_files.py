"""Shared by tests of evaluation sets: numbered images, and files that hold them."""

import io
import pickle

import jax.numpy as jnp
import numpy as np
from PIL import Image

from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import parse
from fedfr_jax.tasks.faces.evaluation_sets import FilesReader
from fedfr_jax.tasks.faces.evaluator import EvaluationConfig, FaceEvaluator

SHAPE = (4, 4, 1)
SMALL = {"batch_size": 16, "fars": (0.1,), "fpirs": (0.5,)}
META = {
    "media": "ijbc_face_tid_mid.txt",
    "landmarks": "ijbc_name_5pts_score.txt",
    "pairs": "ijbc_template_pair_label.txt",
    "gallery": "ijbc_1N_gallery_G1.csv",
    "probes": "ijbc_1N_probe_mixed.csv",
}


def evaluator_of(task, devices=1, **settings):
    """The evaluator that config.evaluation describes."""
    config = parse(EvaluationConfig, settings, "config.evaluation")
    return FaceEvaluator(task, make_mesh(devices), config)


def opened(factory, image_shape=SHAPE, **settings):
    """The evaluation set that a key of config.evaluation describes."""
    return parse(FilesReader(factory), settings, "config.evaluation.set")(image_shape)


def numbered(rows):
    """Images [n, 4, 4, 1] that `looked_up` knows the number of; their left is white."""
    rows = np.asarray(rows)
    images = np.zeros((len(rows), *SHAPE), np.uint8)
    images[:, 0, :, 0], images[:, 1, :, 0] = rows[:, None] // 256, rows[:, None] % 256
    images[:, 2:, :2] = 255
    return images


def looked_up(features, x):
    """Features [B, D] of numbered images, from features [V, T, D], V - 1 mirrored."""
    pixels = jnp.round((x[..., 0] + 1) * 127.5).astype(jnp.int32)
    row = jnp.minimum(pixels[:, 0, 0] * 256 + pixels[:, 1, 0], features.shape[1] - 1)
    view = jnp.where(pixels[:, 2, 0] == 0, features.shape[0] - 1, 0)
    return features[view, row]


def png(image):
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "png")
    return file.getvalue()


def write_release(path, images, listed, points, pairs, galleries, probes):
    """A folder as IJB-C is released: `listed` are rows of (template, medium)."""
    (path / "loose_crop").mkdir(parents=True)
    (path / "meta").mkdir()
    names = [f"{row + 1}.png" for row in range(len(images))]
    for name, image in zip(names, images, strict=True):
        (path / "loose_crop" / name).write_bytes(png(image))

    def write(name, rows, separator=" ", header=""):
        lines = [separator.join(str(word) for word in row) for row in rows]
        text = "\n".join([header, *lines] if header else lines)
        (path / "meta" / name).write_text(text + "\n")

    named = lambda rows: [(n, *r) for n, r in zip(names, rows, strict=True)]
    write("ijbc_face_tid_mid.txt", named(listed))
    write("ijbc_name_5pts_score.txt", named(points))
    write("ijbc_template_pair_label.txt", pairs)
    header = "TEMPLATE_ID,SUBJECT_ID,FILENAME"
    files = {"gallery_G1": galleries[0], "gallery_G2": galleries[1]}
    for name, rows in {**files, "probe_mixed": probes}.items():
        rows = [(*row, "img/1.png") for row in rows]
        write(f"ijbc_1N_{name}.csv", rows, ",", header)


def write_bin(path, is_same):
    images = [png(image) for image in numbered(range(2 * len(is_same)))]
    path.write_bytes(pickle.dumps((images, [bool(x) for x in is_same])))
    return path
