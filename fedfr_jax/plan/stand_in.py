"""A config's settings without anything that a plan need not read.

Sources are opened as ever but their images are black, and one that is not there is made
up in the size that the set is known to have. Weights and files that networks are judged
on are left out: shapes do not depend on them. A teacher's are blank.
"""

import inspect
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition import ms1m_order
from fedfr_jax.data.sources import open_source
from fedfr_jax.data.sources.images import parse_size
from fedfr_jax.data.sources.join import join_sources
from fedfr_jax.federated.settings import AUTO, TABLES
from fedfr_jax.models import MODELS, conv
from fedfr_jax.tasks.faces.distilled import Blank
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Masks, Source


class Size(NamedTuple):
    """Of a data set, as its authors give it."""

    images: int
    classes: int
    shape: tuple[int, int, int]
    tested: int = 0  # images of its own test part, the last ones
    owners: int = 0  # whom its images come from
    cameras: int = 0  # of re-identification: half of the people are trained on
    masks: int = 0  # classes of pixels


PERSON, FACE = (256, 128, 3), (112, 112, 3)
SIZES = {  # by the name of a source, of a TensorFlow data set or of a folder
    "camvid": Size(701, 3, (180, 240, 3), tested=233, masks=11),
    "celeb_a": Size(202_599, 10_177, (218, 178, 3)),
    "cifar10": Size(60_000, 10, (32, 32, 3), tested=10_000),
    "cifar100": Size(60_000, 100, (32, 32, 3), tested=10_000),
    "emnist/byclass": Size(814_255, 62, (28, 28, 1), tested=116_323),
    "fashion_mnist": Size(70_000, 10, (28, 28, 1), tested=10_000),
    "fei": Size(2_800, 200, (28, 28, 3)),
    "femnist10": Size(131_310, 10, (28, 28, 1)),
    "flickr_aes": Size(6_000, 5, (224, 224, 3), owners=37),
    "lfw": Size(13_233, 5_749, FACE),
    "mnist": Size(70_000, 10, (28, 28, 1), tested=10_000),
    "omniglot": Size(19_280, 964, (28, 28, 1)),
    "orl": Size(400, 40, (112, 92, 1)),
    "oxford_iiit_pet": Size(7_349, 37, (96, 96, 3), tested=3_669, masks=3),
    # Of people: faces, and re-identification.
    "faces_emore": Size(5_822_653, 85_742, FACE),
    "glint360k": Size(17_091_657, 360_232, FACE),
    "ms1m-retinaface-t1": Size(5_179_510, 93_431, FACE),
    "webface42m": Size(42_474_557, 2_059_906, FACE),
    "3dpes": Size(1_011, 192, PERSON, cameras=8),
    "cuhk01": Size(3_884, 971, PERSON, cameras=2),
    "cuhk02": Size(7_264, 1_816, PERSON, cameras=10),
    "cuhk03_np": Size(14_096, 1_467, PERSON, cameras=2),
    "dukemtmc_reid": Size(36_411, 1_404, PERSON, cameras=8),
    "ilids": Size(476, 119, PERSON, cameras=2),
    "market1501": Size(32_668, 1_501, PERSON, cameras=6),
    "market1501_dev": Size(12_936, 751, PERSON, cameras=6),
    "msmt17": Size(126_441, 4_101, PERSON, cameras=15),
    "prid2011": Size(1_134, 385, PERSON, cameras=2),
    "viper": Size(1_264, 632, PERSON, cameras=2),
}
FILES = ("pairs", "search", "templates", "representation")  # keys of config.evaluation
WEIGHTS = ("init", "weights", "init_fc")


def unread(settings: Mapping, say=print) -> dict:
    """The sections of a config (see `build.sections`), ready for its task to build.

    Args:
      say: is told what stands in for what.

    Raises:
      ValueError: for a set that is not there and whose size is not known; else as the
        source.
    """
    partition = dict(settings["partition"])
    partition.pop("max_examples", None)  # what stands in may have more images
    if public := partition.get("public"):
        partition["public"] = {**public}
        if "source" in public:
            source = black(public["source"], {}, say)
            partition["public"]["source"] = {"name": "opened", "source": source}
    source = black(settings["data"], partition, say)
    federation = settings["federation"]
    # A stream reads nothing before it is asked; lanes that are measured are built.
    if federation.get("table", AUTO) in TABLES:
        federation = {**federation, "table": "stream"}
    if federation.get("lanes") == AUTO:
        federation = {**federation, "lanes": 1}
    without = lambda of, keys: {k: v for k, v in of.items() if k not in keys}
    own = lambda of: taught(without(of, WEIGHTS), settings["model"], say)
    methods = {k: own(of) for k, of in settings["methods"].items()}
    return {
        **settings,
        "data": {"name": "opened", "source": source},
        "partition": partition,
        "model": plain(without(settings["model"], WEIGHTS)),
        "pretrain": own(settings["pretrain"]),
        "federation": federation,
        "evaluation": without(settings["evaluation"], FILES),
        "methods": methods,
    }


def taught(row: Mapping, student: Mapping, say) -> Mapping:
    """A row, or `pretrain`, whose teacher is one without numbers, of no file."""
    told = row.get("distill")
    if not isinstance(told, Mapping):
        return row
    told = dict(told)
    if told.get("cache") is not None:
        told = {**told, "cache": Blank(), "teacher": None}
    elif isinstance(teacher := told.get("teacher"), Mapping):
        if not teacher.get("model"):
            say("distill.teacher.model is not told: the student stands in for it.")
        network = {k: v for k, v in student.items() if k not in WEIGHTS}
        network = plain(teacher.get("model") or network)
        told["teacher"] = {**teacher, "weights": Blank(), "model": network}
    return {**row, "distill": told}


def plain(model: Mapping) -> dict:
    """A network's section with XLA's own convolutions, as on anything but a CPU."""
    known = inspect.signature(MODELS.get(model.get("name"), lambda: None)).parameters
    if (
        "implementation" not in known
        or model.get("implementation", conv.AUTO) != conv.AUTO
    ):
        return dict(model)
    return {**model, "implementation": "xla"}


def black(data: Mapping, partition: Mapping, say) -> Source:
    """The source of a section, its images and masks all 0."""
    if data.get("name") == "join" and not is_there(data):
        parts = {k: black(of, partition, say) for k, of in data["parts"].items()}
        return _blackened(join_sources(parts))
    if is_there(data):
        return _blackened(open_source(**data))
    source = made_up(data, partition)
    say(
        f"{_place(data)} is not there: {len(source.labels):,} made-up images of "
        f"{len(source.names):,} classes stand in for it."
    )
    return source


def _blackened(source: Source) -> Source:
    shape, dtype = source.image_shape, source.read(np.arange(0)).dtype
    none = lambda *of: lambda rows: np.broadcast_to(dtype.type(0), (len(rows), *of))
    masks = source.masks
    if masks is not None:
        grey = lambda rows: np.broadcast_to(np.uint8(0), (len(rows), *shape[:2]))
        masks = masks._replace(read=grey)
    return source._replace(read=none(*shape), masks=masks)


def _place(data: Mapping) -> str:
    """What a set that may be missing is called."""
    keys = "path", "data_dir", "dataset", "name"
    return str(next(data[key] for key in keys if data.get(key)))


def is_there(data: Mapping) -> bool:
    """Whether a source's files are; a TensorFlow data set must have been prepared."""
    name = data.get("name")
    if name == "join":
        return all(map(is_there, data["parts"].values()))
    if name in ("tfds", "femnist10"):
        folder = data.get("data_dir") or os.environ.get(
            "TFDS_DATA_DIR", "~/tensorflow_datasets"
        )
        dataset = data.get("dataset", "emnist/byclass")
        return pathlib.Path(folder, dataset).expanduser().is_dir()
    place = data.get("path", data.get("data_dir"))
    return place is None or pathlib.Path(place).exists()


def made_up(data: Mapping, partition: Mapping) -> Source:
    """A source of the size that the section's set is known to have."""
    size = size_of(data)
    labels = _labels(size, partition)
    number, count = np.arange(len(labels)), int(labels.max()) + 1
    height, width = parse_size(data.get("image_size") or size.shape[:2])
    shape = (height, width, data.get("channels") or size.shape[2])
    source = Source(
        read=lambda rows: np.broadcast_to(np.uint8(0), (len(rows), *shape)),
        labels=labels,
        names=tuple(map(str, range(count))),
        image_shape=shape,
        owners=number % size.owners if size.owners else None,
    )
    if data.get("attribute"):  # two classes, and the people own their images
        source = source._replace(labels=labels % 2, names=("0", "1"), owners=labels)
    if size.cameras:
        source = source._replace(
            cameras=1 + number % size.cameras, roles=_roles(labels)
        )
    if size.tested and data.get("test_split", data["name"]):
        source = source._replace(is_test=number >= len(labels) - size.tested)
    if size.masks:
        names = tuple(map(str, range(size.masks)))
        grey = lambda rows: np.broadcast_to(np.uint8(0), (len(rows), height, width))
        source = source._replace(masks=Masks(grey, names))
    return source


def size_of(data: Mapping) -> Size:
    """The known size of a section's set.

    Raises:
      ValueError: where it is not known.
    """
    place = pathlib.Path(str(data.get("path", data.get("data_dir", ""))))
    words = data.get("dataset"), place.stem, place.name, place.parent.name, data["name"]
    for word in words:
        if word in SIZES:
            return SIZES[word]
    raise ValueError(
        f"config.data must be there or one of {sorted(SIZES)}, got {_place(data)!r}."
    )


def _labels(size: Size, partition: Mapping) -> np.ndarray:
    """[T] int32, as many of each class; of faces as many people as a split asks for."""
    if partition.get("name") == "ms1m":
        return ms1m_labels(**partition)
    keys = "num_global_ids", "num_unseen_ids"
    asked = sum(partition.get(key) or 0 for key in keys)
    asked += partition.get("num_clients", 0) * partition.get("ids_per_client", 0)
    if not partition.get("ids_per_client") and not size.cameras:
        return (np.arange(size.images) % size.classes).astype(np.int32)
    count = max(asked, size.classes)
    least = max(partition.get("min_images", 0), partition.get("global_min_images", 0))
    each = max(least, size.images // count, 4)  # some to train on, some to test
    return np.repeat(np.arange(count, dtype=np.int32), each)


def _roles(labels: np.ndarray) -> np.ndarray:
    """The first half of the people train; of each other one image is a query."""
    is_first = np.diff(labels, prepend=-1) > 0
    tested = np.where(is_first, QUERY, GALLERY)
    return np.where(labels < (labels.max() + 1) // 2, TRAIN, tested).astype(np.uint8)


def ms1m_labels(
    *,
    num_clients: int = 40,
    ids_per_client: int = 100,
    num_global_ids: int = 6000,
    num_unseen_ids: int = 0,
    client_images: tuple[int, int] = (100, 110),
    global_images: tuple[int, int] = (60, 80),
    seed: int = 100,
    **others,
) -> np.ndarray:
    """Labels [T] int32 of a set that `ms1m` with these settings can split.

    Every identity has the number of images in the middle of its interval.
    """
    del others
    half = max(num_clients * ids_per_client, num_global_ids + num_unseen_ids)
    order = ms1m_order(np.arange(2 * half), seed=seed)
    counts = np.empty(2 * half, np.int64)
    counts[order[:half]] = sum(client_images) // 2
    counts[order[half:]] = sum(global_images) // 2
    return np.repeat(np.arange(2 * half, dtype=np.int32), counts)
