"""Dummy inputs for planning: black images, no weights.

Sources are opened but their images are black, and a missing one is replaced by fake
data in the known size of the set. Weights, also of teachers, and evaluation files are
left out, since shapes do not depend on them.
"""

import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedfr_jax.config.build import sections
from fedfr_jax.data.partition import ms1m_order
from fedfr_jax.data.sources import open_source
from fedfr_jax.data.sources.decoding import parse_size
from fedfr_jax.data.sources.selection import concat_sources
from fedfr_jax.federated.settings import AUTO
from fedfr_jax.tasks import TASKS
from fedfr_jax.tasks.experiment import build_experiment
from fedfr_jax.tasks.faces.distillation import DummyTeacher
from fedfr_jax.types import (
    GALLERY,
    QUERY,
    TRAIN,
    Experiment,
    Masks,
    Source,
    is_image,
)


class KnownSize(NamedTuple):
    """Published size of a data set."""

    images: int
    classes: int
    shape: tuple[int, int, int]
    num_test: int = 0  # images of its test split, the last ones
    num_clients: int = 0  # that the set names
    cameras: int = 0  # of re-identification; half of the people are for training
    masks: int = 0  # pixel classes


PERSON, FACE = (256, 128, 3), (112, 112, 3)
SIZES = {  # by the name of a source, of a TensorFlow data set or of a folder
    "camvid": KnownSize(701, 3, (180, 240, 3), num_test=233, masks=11),
    "celeb_a": KnownSize(202_599, 10_177, (218, 178, 3)),
    "cifar10": KnownSize(60_000, 10, (32, 32, 3), num_test=10_000),
    "cifar100": KnownSize(60_000, 100, (32, 32, 3), num_test=10_000),
    "emnist/byclass": KnownSize(814_255, 62, (28, 28, 1), num_test=116_323),
    "fashion_mnist": KnownSize(70_000, 10, (28, 28, 1), num_test=10_000),
    "fei": KnownSize(2_800, 200, (28, 28, 3)),
    "femnist10": KnownSize(131_310, 10, (28, 28, 1)),
    "flickr_aes": KnownSize(6_000, 5, (224, 224, 3), num_clients=37),
    "lfw": KnownSize(13_233, 5_749, FACE),
    "mnist": KnownSize(70_000, 10, (28, 28, 1), num_test=10_000),
    "omniglot": KnownSize(19_280, 964, (28, 28, 1)),
    "orl": KnownSize(400, 40, (112, 92, 1)),
    "oxford_iiit_pet": KnownSize(7_349, 37, (96, 96, 3), num_test=3_669, masks=3),
    # Of people: faces, and re-identification.
    "faces_emore": KnownSize(5_822_653, 85_742, FACE),
    "glint360k": KnownSize(17_091_657, 360_232, FACE),
    "ms1m-retinaface-t1": KnownSize(5_179_510, 93_431, FACE),
    "webface42m": KnownSize(42_474_557, 2_059_906, FACE),
    "3dpes": KnownSize(1_011, 192, PERSON, cameras=8),
    "cuhk01": KnownSize(3_884, 971, PERSON, cameras=2),
    "cuhk02": KnownSize(7_264, 1_816, PERSON, cameras=10),
    "cuhk03_np": KnownSize(14_096, 1_467, PERSON, cameras=2),
    "dukemtmc_reid": KnownSize(36_411, 1_404, PERSON, cameras=8),
    "ilids": KnownSize(476, 119, PERSON, cameras=2),
    "market1501": KnownSize(32_668, 1_501, PERSON, cameras=6),
    "market1501_dev": KnownSize(12_936, 751, PERSON, cameras=6),
    "msmt17": KnownSize(126_441, 4_101, PERSON, cameras=15),
    "prid2011": KnownSize(1_134, 385, PERSON, cameras=2),
    "viper": KnownSize(1_264, 632, PERSON, cameras=2),
}
# Keys of config.evaluation that need files.
FILES = ("pairs", "identification", "templates", "representation")
WEIGHTS = ("init", "weights")


def blind_experiment(config: Any, *, is_placed: bool = False) -> Experiment:
    """Build a config's experiment with dummy inputs in place of files.

    A line is printed about each replacement.

    Args:
      config: ConfigDict or mapping.
      is_placed: whether the examples are where the config says; else they are a stream,
        of which nothing is read.
    """
    settings = without_files(sections(config))
    federation = settings["federation"]
    placement = federation.get("data_placement", AUTO)
    if is_placed or placement not in (AUTO, "device"):  # a wrong one is an error
        return build_experiment(TASKS[settings["task"]], settings)
    settings["federation"] = {**federation, "data_placement": "stream"}
    experiment = build_experiment(TASKS[settings["task"]], settings)
    federation = experiment.federation._replace(data_placement=placement)
    return experiment._replace(federation=federation)


def without_files(settings: Mapping) -> dict:
    """Replace what needs files in a config's sections, for a task to build."""
    partition = dict(settings["partition"])
    partition.pop("max_examples", None)  # its replacement may have more images
    if public := partition.get("public"):
        partition["public"] = {**public}
        if "source" in public:
            source = dummy_images(public["source"], {})
            partition["public"]["source"] = {"name": "source_object", "source": source}
    source = dummy_images(settings["data"], partition)

    def without_weights(section):
        section = drop(section, WEIGHTS)
        return with_dummy_teachers(section, settings["model"])

    return {
        **settings,
        "data": {"name": "source_object", "source": source},
        "partition": partition,
        "model": drop(settings["model"], WEIGHTS),
        "pretrain": without_weights(settings["pretrain"]),
        "evaluation": drop(settings["evaluation"], FILES),
        "methods": {k: without_weights(x) for k, x in settings["methods"].items()},
    }


def drop(section: Mapping, keys: Collection[str]) -> dict:
    """Copy a section without some keys."""
    return {k: v for k, v in section.items() if k not in keys}


def with_dummy_teachers(section: Mapping, student: Mapping) -> Mapping:
    """Replace the teacher of a method, or of `pretrain`, by one without weights.

    A teacher whose network only its run knows is like the student.
    """
    if not isinstance(section, Mapping):
        return section
    distill = section.get("distill")
    if not isinstance(distill, Mapping):
        return section
    distill = dict(distill)
    if distill.get("cache") is not None:
        distill = {**distill, "cache": DummyTeacher(), "teacher": None}
    elif isinstance(teacher := distill.get("teacher"), Mapping):
        network = teacher.get("model") or drop(student, WEIGHTS)
        distill["teacher"] = {**teacher, "weights": DummyTeacher(), "model": network}
    return {**section, "distill": distill}


def dummy_images(data: Mapping, partition: Mapping) -> Source:
    """Open the section's source with all images and masks 0."""
    if data.get("name") == "concat" and not is_there(data):
        sources = data["sources"].items()
        sources = {k: dummy_images(x, partition) for k, x in sources}
        return _replace_images(concat_sources(sources))
    if is_there(data):
        return _replace_images(open_source(**data))
    source = fake_source(data, partition)
    print(
        f"{_location(data)} is not there: {len(source.labels):,} made-up images of "
        f"{len(source.names):,} classes are used instead."
    )
    return source


def _replace_images(source: Source) -> Source:
    if not is_image(source.input_shape):
        return source
    shape, dtype = source.input_shape, source.read(np.arange(0)).dtype
    masks = source.masks
    if masks is not None:
        masks = masks._replace(read=read_zeros(np.uint8(0), shape[:2]))
    return source._replace(read=read_zeros(dtype.type(0), shape), masks=masks)


def read_zeros(zero: np.generic, shape: tuple) -> Callable[[np.ndarray], np.ndarray]:
    """Build rows [n] -> zeros [n, *shape], which take no memory."""
    return lambda rows: np.broadcast_to(zero, (len(rows), *shape))


def _location(data: Mapping) -> str:
    """Name of a data set that may be missing."""
    keys = "path", "data_dir", "dataset", "name"
    return str(next(data[key] for key in keys if data.get(key)))


def is_there(data: Mapping) -> bool:
    """Whether a source's files exist; a TensorFlow data set must be prepared."""
    name = data.get("name")
    if name == "concat":
        return all(map(is_there, data["sources"].values()))
    if name in ("tfds", "femnist10"):
        folder = data.get("data_dir") or os.environ.get(
            "TFDS_DATA_DIR", "~/tensorflow_datasets"
        )
        dataset = data.get("dataset", "emnist/byclass")
        return pathlib.Path(folder, dataset).expanduser().is_dir()
    path = data.get("path", data.get("data_dir"))
    return path is None or pathlib.Path(path).exists()


def fake_source(data: Mapping, partition: Mapping) -> Source:
    """Build a fake source with the known size of the section's set."""
    size = known_size(data)
    labels = _labels(size, partition)
    number, count = np.arange(len(labels)), int(labels.max()) + 1
    height, width = parse_size(data.get("image_size") or size.shape[:2])
    shape = (height, width, data.get("channels") or size.shape[2])
    source = Source(
        read=read_zeros(np.uint8(0), shape),
        labels=labels,
        names=tuple(map(str, range(count))),
        input_shape=shape,
        client_ids=number % size.num_clients if size.num_clients else None,
    )
    if data.get("attribute"):  # two classes, and a client per person
        source = source._replace(labels=labels % 2, names=("0", "1"), client_ids=labels)
    if size.cameras:
        source = source._replace(
            cameras=1 + number % size.cameras, roles=_roles(labels)
        )
    if size.num_test and data.get("test_split", data["name"]):
        source = source._replace(is_test=number >= len(labels) - size.num_test)
    if size.masks:
        names = tuple(map(str, range(size.masks)))
        masks = Masks(read_zeros(np.uint8(0), shape[:2]), names)
        source = source._replace(masks=masks)
    return source


def known_size(data: Mapping) -> KnownSize:
    """Look up the known size of the section's set."""
    path = pathlib.Path(str(data.get("path", data.get("data_dir", ""))))
    names = data.get("dataset"), path.stem, path.name, path.parent.name, data["name"]
    for name in names:
        if name in SIZES:
            return SIZES[name]
    raise ValueError(
        f"config.data must exist on disk or be one of {sorted(SIZES)}, got "
        f"{_location(data)!r}."
    )


def _labels(size: KnownSize, partition: Mapping) -> np.ndarray:
    """Labels [T] int32, equally many per class; of faces as many as needed."""
    if partition.get("name") == "ms1m":
        return ms1m_labels(**partition)
    keys = "num_public_ids", "num_unseen_ids"
    num_needed = sum(partition.get(key) or 0 for key in keys)
    num_needed += partition.get("num_clients", 0) * partition.get("ids_per_client", 0)
    if not partition.get("ids_per_client") and not size.cameras:
        return (np.arange(size.images) % size.classes).astype(np.int32)
    count = max(num_needed, size.classes)
    limits = partition.get("min_images", 0), partition.get("public_min_images", 0)
    images_each = max(*limits, size.images // count, 4)  # for training and for tests
    return np.repeat(np.arange(count, dtype=np.int32), images_each)


def _roles(labels: np.ndarray) -> np.ndarray:
    """Roles: half of the people train; one image of each other person is a query."""
    is_first = np.diff(labels, prepend=-1) > 0
    tested = np.where(is_first, QUERY, GALLERY)
    return np.where(labels < (labels.max() + 1) // 2, TRAIN, tested).astype(np.uint8)


def ms1m_labels(
    *,
    num_clients: int = 40,
    ids_per_client: int = 100,
    num_public_ids: int = 6000,
    num_unseen_ids: int = 0,
    client_images: tuple[int, int] = (100, 110),
    public_images: tuple[int, int] = (60, 80),
    seed: int = 100,
    **unused,
) -> np.ndarray:
    """Labels [T] int32 of a fake set that `ms1m` can split with these settings.

    Every identity has the number of images in the middle of its interval.
    """
    del unused
    half = max(num_clients * ids_per_client, num_public_ids + num_unseen_ids)
    order = ms1m_order(np.arange(2 * half), seed=seed)
    counts = np.empty(2 * half, np.int64)
    counts[order[:half]] = sum(client_images) // 2
    counts[order[half:]] = sum(public_images) // 2
    return np.repeat(np.arange(2 * half, dtype=np.int32), counts)
