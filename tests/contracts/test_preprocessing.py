"""A picture file is the same numbers to a config's evaluation and to every command.

Shipped configs, with data, split, network and rows in small.
"""

import io
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from fedfr_jax.config.build import build, plain
from fedfr_jax.config.files import find, load
from fedfr_jax.deploy.face_images import read_images
from fedfr_jax.deploy.trained_model import TrainedModel
from fedfr_jax.schema import with_tuples
from fedfr_jax.tasks.data import build_preprocessing
from fedfr_jax.tasks.faces import evaluator as evaluator_module
from fedfr_jax.tasks.reid import evaluator as reid_judge
from fedfr_jax.types import Preprocessing, Source, TrainedModels
from tests.data.recordio_files import write_face_set

pytestmark = pytest.mark.ci

SIZE = (15, 22)  # H, W of the stored pictures, which no network has
POINTS = np.array([[7, 4], [13, 4], [10, 7], [8, 10], [12, 10]], float)
IMAGENET = (123.675, 116.28, 103.53)
NETWORK = {"name": "iresnet", "blocks": (1,), "widths": (2,), "embedding_dim": 3}
RESNET = {"depth": 18, "blocks": (1,), "widths": (2,)}
MODELS = {
    "faces": {**NETWORK, "head": "GAP"},
    "classification": {"name": "mlp", "hidden_dim": 2},
    "segmentation": {"width": 2, "encoder": {"name": "resnet", **RESNET}},
    "reid": {"name": "reid", **RESNET, "neck_dim": 4},
}
PEOPLE = {"num_clients": 2, "ids_per_client": 2, "num_public_ids": 2}
PARTITIONS = {
    "faces": {**PEOPLE, "num_unseen_ids": 2},
    "classification": {"name": "iid", "num_clients": 2},
    "segmentation": {"name": "iid", "num_clients": 1},
    "reid": {"name": "by_camera"},
}
ROW = {
    "faces": {
        "algorithm": {
            "name": "fedfr",
            "use_public_data": False,
            "contrastive_weight": 0.0,
            "branch": None,
        }
    }
}


def picture(number, channels=3):
    """A picture of noise, smooth enough to survive JPEG."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(256, size=(3, 4, 3), dtype=np.uint8))
    mode = {1: "L", 3: "RGB"}[channels]
    return small.resize(SIZE[::-1], Image.Resampling.BICUBIC).convert(mode)


def put(folder, names, channels=3):
    """Write one picture under each name; returns the paths."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number, channels).save(folder / name)
    return [folder / name for name in names]


def lfw(folder, data):
    names = [f"{p}/{p}_{i:04}.png" for p in "abcdefgh" for i in (1, 2, 3, 4)]
    numbers = ",".join(map(str, POINTS.reshape(-1)))
    columns = ",".join(f"x{i},y{i}" for i in range(1, 6))
    rows = "".join(f"{name},{numbers}\n" for name in names)
    (folder / "landmarks.csv").write_text(f"name,{columns}\n{rows}")
    paths = put(folder, names)
    rows = "".join(f"{path},{numbers}\n" for path in paths)
    (folder / "paths.csv").write_text(f"name,{columns}\n{rows}")
    return {**data, "data_dir": folder, "pairs": None}, paths


def recordio(folder, data):
    paths, encoded = [], []
    for number in range(32):
        file = io.BytesIO()
        picture(number).save(file, "jpeg")
        encoded.append(file.getvalue())
        paths.append(folder / f"{number}.jpg")
        paths[-1].write_bytes(encoded[-1])
    write_face_set(folder / "train.rec", encoded, np.arange(32) // 4)
    return {**data, "path": folder / "train.rec"}, paths


def omniglot(folder, data):
    rng = np.random.default_rng(0)
    images = rng.integers(2, size=(8, 4, *SIZE)).astype(bool)
    np.savez(
        folder / "images_background.npz",
        images=images,
        labels=np.arange(8)[:, None].repeat(4, axis=1),
    )
    rows = "".join(f"{i},{i},Greek,c{i}\n" for i in range(8))
    header = "label,global_id,alphabet,character\n"
    (folder / "classes.csv").write_text(header + rows)
    paths = [folder / f"{i}.png" for i in range(32)]
    for path, image in zip(paths, images.reshape(-1, *SIZE), strict=True):
        Image.fromarray(image).save(path)
    return {**data, "data_dir": folder}, paths


def cifar10(folder, data):
    parts = {"train": range(5), "test": range(5, 6)}
    names = [f"{p}/{c}/{i}.png" for p, of in parts.items() for c in "ab" for i in of]
    return {**data, "data_dir": folder, "image_size": 8}, put(folder, names)


def mnist(folder, data):
    paths = put(folder, [f"{i}.png" for i in range(12)], channels=1)
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    labels, is_test = np.arange(12) % 2, np.arange(12) >= 8
    np.savez(folder / "x.npz", images=images, labels=labels, official_test=is_test)
    return {**data, "data_dir": folder, "image_size": 8}, paths


def flickr_aes(folder, data):
    paths = put(folder / "40K", [f"{i}.png" for i in range(10)])
    rows = [f"A{w}, {i}.png, {i % 5 + 1}\n" for w in range(2) for i in range(10)]
    text = "worker, imagePair, score\n" + "".join(rows)
    (folder / "FLICKR-AES_image_labeled_by_each_worker.csv").write_text(text)
    least = {"min_ratings": 10, "min_per_score": 2, "image_size": 8}
    return {**data, "data_dir": folder, **least}, paths


def camvid(folder, data):
    names = [f"{part}/s_{part}{i}.png" for part in ("train", "test") for i in range(9)]
    for number, name in enumerate(names):
        path = folder / name.replace("/", "annot/")
        path.parent.mkdir(parents=True, exist_ok=True)
        mask = np.random.default_rng(number).integers(11, size=SIZE)
        Image.fromarray(mask.astype(np.uint8)).save(path)
    data = {k: v for k, v in data.items() if k in ("name", "labels", "background")}
    return {**data, "data_dir": folder, "image_size": (8, 12)}, put(folder, names)


def market1501(folder, data):
    parts = {"bounding_box_train": (1, 2), "query": (3, 4), "bounding_box_test": (3, 4)}
    names = [
        f"{part}/{p:04}_c{1 + (i + (part == 'query')) % 2}s1_{i}.png"
        for part, people in parts.items()
        for p in people
        for i in range(4 if part != "query" else 1)
    ]
    return {"name": "market1501", "path": folder, "image_size": (32, 16)}, put(
        folder, names
    )


def join(folder, data):
    del data
    parts, paths = {}, []
    for name in ("duke", "market"):
        parts[name], more = market1501(folder / name, {})
        paths += more
    return {"name": "concat", "sources": parts}, paths


class Case(NamedTuple):
    """A shipped config, and what is known of its record."""

    config: str
    write: Callable
    expected: dict


CASES = [
    Case("fedfr/lfw", lfw, {"alignment": "arcface"}),
    Case("bigface/r50_93k", recordio, {"resize": "stretch", "mean": 127.5}),
    Case("central/omniglot", omniglot, {"inverted": True, "mirrored": False}),
    Case("fedper/figures", cifar10, {"kernel": "bilinear"}),
    Case("classification/mnist", mnist, {"inverted": False}),
    Case("fedper/flickr_aes", flickr_aes, {"resize": "stretch"}),
    Case("fedmargin/table_camvid", camvid, {"mirrored": False}),
    Case("fedreid/tables", market1501, {"kernel": "bicubic", "mirrored": True}),
    Case("fedreid/strong_center", market1501, {"mean": IMAGENET}),
    Case("fedreid/paper", join, {"mean": IMAGENET, "mirrored": True}),
]


def shrunk(case: Case, folder: pathlib.Path):
    """(experiment of a shipped config on few small pictures, their paths)."""
    config = plain(load(find(case.config)))
    task = config["task"]
    data, paths = case.write(folder, config["data"])
    methods = {
        name: {
            **{k: v for k, v in row.items() if k == "augment"},
            **{"kind": "central", "batch_size": 8},
        }
        for name, row in config["methods"].items()
        if row.get("kind") == "central"
    }
    if len(methods) < len(config["methods"]) or not methods:
        methods["fedavg"] = ROW.get(task, {"learning_rate": 0.1})
    kept = lambda section, *keys: {
        k: v for k, v in config[section].items() if k in keys
    }
    partition, small = PARTITIONS[task], {"batch_size": 8} if task == "faces" else {}
    if data["name"] == "concat":
        partition = {"name": "by_dataset"}
    settings = {
        **config,
        "data": data,
        "partition": partition,
        "model": MODELS[task],
        "pretrain": {**kept("pretrain", "augment", "flip_probability"), **small},
        "federation": {
            **kept("federation", "augment", "flip_probability"),
            "batch_size": 2,
        },
        "evaluation": {**kept("evaluation", "flip_test"), "batch_size": 8},
        "methods": methods,
    }
    return build(with_tuples(settings)), paths


def seeing(seen: list, output: Callable) -> Callable:
    """`build_embed` that keeps the images which a network would see, and compiles
    nothing; `output` makes the network's of them."""

    def build(embed, feed, mesh):
        del mesh

        def run(variables, table, rows):
            inputs = {"image": jnp.asarray(np.asarray(table.images)[rows])}
            views = [
                np.asarray(feed.with_deterministic(jnp.int32(i), inputs)["image"])
                for i in range(max(feed.num_views, 1))
            ]
            seen.extend(image for view in views for image in view)
            return output(embed, variables, views)

        return run

    return build


def flat(images: np.ndarray, size: int = 16) -> np.ndarray:
    """The first numbers of each image [n, ...], [n, size]."""
    return np.asarray(images).reshape(len(images), -1)[:, :size]


def embedded(embed, variables, views):
    """Of one network or another: numbers of the images, or one class for all."""
    kind = jax.eval_shape(embed, variables, views[0])
    if kind.dtype == np.float32:
        return np.stack([flat(view) for view in views], axis=1)
    shape = len(views[0]), len(views), *kind.shape[1:]
    return np.zeros(shape, kind.dtype)


def counted(*_):
    """Of a confusion matrix, whatever the network says."""
    return np.eye(11, dtype=np.int64)


BUILDERS = (
    (evaluator_module, "build_embed", embedded),
    (sys.modules["fedfr_jax.tasks.classification"], "build_embed", embedded),
    (reid_judge, "build_embed", embedded),
    (sys.modules["fedfr_jax.tasks.segmentation"], "build_sums", counted),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config)
def test_evaluation_and_commands_see_the_same_numbers(case, tmp_path, monkeypatch):
    experiment, paths = shrunk(case, tmp_path)
    how = experiment.task.preprocessing
    assert how._asdict().items() >= case.expected.items()
    input_shape = tuple(experiment.task.dataset.input_shape)
    evaluated, embedded = [], []
    for module, name, output in BUILDERS:
        monkeypatch.setattr(module, name, seeing(evaluated, output))
    network = lambda variables, images: images.reshape(len(images), -1)[:, :16]
    evaluator = experiment.task.evaluators["generic"]
    evaluator.evaluate(TrainedModels(0, network, None, network))

    def apply(variables, images):
        embedded.extend(np.asarray(images))
        return flat(images)

    landmarks = tmp_path / "paths.csv"
    landmarks = landmarks if landmarks.exists() else None
    images = read_images(paths, input_shape, how, landmarks=landmarks)
    images = images.read(np.arange(len(paths)))
    features = TrainedModel(apply, None, input_shape, recorded=how).embed(images)
    assert len(evaluated) and input_shape[:2] != SIZE
    assert len(embedded) == (1 + how.mirrored) * len(paths)
    known = np.stack(embedded).reshape(len(embedded), -1)
    for image in evaluated:
        nearest = np.abs(known - image.reshape(-1)).max(axis=1).min()
        assert nearest < 1e-5, nearest
    scaled = (images - np.float64(how.mean)) / np.float64(how.std)
    views = [scaled, scaled[:, :, ::-1]] if how.mirrored else [scaled]
    np.testing.assert_allclose(features, sum(map(flat, views)), atol=1e-5)


def test_trainings_that_scale_pixels_differently_are_refused():
    source = Source(None, None, (), (8, 8, 3))
    imagenet = ({"name": "normalize", "mean": IMAGENET},)
    augments = {"federation.augment": imagenet, "methods.b.augment": ()}
    with pytest.raises(ValueError, match="config.methods.b.augment must normalize"):
        build_preprocessing(augments, source)
    augments["methods.b.augment"] = ("horizontal_flip", *imagenet)
    assert build_preprocessing(augments, source) == Preprocessing(mean=IMAGENET)
