"""Small sets of classes, masks, re-identification, ratings, lists and weights.

As `small_sets`, whose kinds of files most of them share. A reader that gives no
`Source` is put around one whose names are a digest of what was read.
"""

import hashlib
import pathlib
import zipfile

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.arrays import cifar100
from fedfr_jax.data.sources.flickr_aes import RATINGS, flickr_aes
from fedfr_jax.data.sources.folder import image_classes
from fedfr_jax.data.sources.pairs import listed_pairs
from fedfr_jax.data.sources.reid import cuhk03_np, market1501, msmt17, reid_csv
from fedfr_jax.data.sources.segmentation import CAMVID, camvid, image_masks
from fedfr_jax.data.sources.table import table
from fedfr_jax.models.weights import read_weights, write_weights
from fedfr_jax.tasks.faces.evaluation_sets import template_set
from fedfr_jax.types import Source
from tests.faults.small_sets import LABELS, Small, encoded, pictures

SHAPE = (8, 8, 3)
PARTS = ("bounding_box_train", "query", "bounding_box_test")
# People 1 to 3 with three images each by three cameras; the last person is tested.
NAMES = [f"{c + 1:04}_c{i % 3 + 1}s1_{i:02}.png" for i, c in enumerate(LABELS)]
WHERE = [PARTS[0]] * 6 + [PARTS[1]] + [PARTS[2]] * 2
MSMT17 = [f"{c:04}/{c:04}_000_{i % 3 + 1:02}_a.png" for i, c in enumerate(LABELS)]


def put(path: pathlib.Path, names, kind="png") -> None:
    """Write the nine images under names."""
    for name, data in zip(names, encoded(kind), strict=False):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def zipped(path: pathlib.Path, names) -> None:
    """Write the nine images into an archive."""
    with zipfile.ZipFile(path / "set.zip", "w") as archive:
        for name, data in zip(names, encoded("png"), strict=True):
            archive.writestr(name, data)


def around(read, words) -> Source:
    """A source of nine images that `read` gives, named by a digest of `words`."""
    digest = hashlib.sha256(repr(words).encode()).hexdigest()
    return Source(read, LABELS.astype(np.int32), (digest, "b", "c"), SHAPE)


def _classes(path):
    part = lambda i: "test" if i % 3 == 2 else "train"
    put(path, [f"{part(i)}/{c}/{i}.png" for i, c in enumerate(LABELS)])


def _two_parts(path):
    images, labels = pictures(), LABELS % 3
    train = {"train_images": images[:6], "train_labels": labels[:6]}
    np.savez(path / "set.npz", **train, test_images=images[6:], test_labels=labels[6:])


def _put_masks(path, folders, count):
    rng = np.random.default_rng(2)
    for folder in folders:
        path_of = path / folder
        path_of.mkdir(parents=True)
        for i in range(2):
            numbers = rng.integers(count, size=(8, 8)).astype(np.uint8)
            Image.fromarray(numbers).save(path_of / f"seq_{folder[:2]}{i}.png")


def _camvid(path):
    put(path, [f"{part}/seq_{part[:2]}{i}.png" for part in ("train", "test")
               for i in range(2)])  # fmt: skip
    _put_masks(path, ("trainannot", "testannot"), len(CAMVID) + 1)


def _masks(path):
    put(path, [f"images/seq_ma{i}.png" for i in range(2)])
    _put_masks(path, ("masks",), 3)


def _market(path):
    zipped(path, [f"{part}/{name}" for part, name in zip(WHERE, NAMES, strict=True)])


def _cuhk03(path):
    rows = zip(WHERE, NAMES, strict=True)
    zipped(path, [f"detected/{part}/{name}" for part, name in rows])


def _msmt17(path):
    put(path, [f"{'train' if i < 6 else 'test'}/{x}" for i, x in enumerate(MSMT17)])
    parts = {"train": (0, 5), "val": (5, 6), "query": (6, 7), "gallery": (7, 9)}
    for part, (begin, end) in parts.items():
        rows = [f"{MSMT17[i]} {LABELS[i]}\n" for i in range(begin, end)]
        (path / f"list_{part}.txt").write_text("".join(rows))


def _reid_csv(path):
    put(path, NAMES)
    split = ["train"] * 6 + ["query"] + ["gallery"] * 2
    rows = zip(NAMES, LABELS, split, strict=True)
    text = [f"{x},{c},{i % 3},{part}\n" for i, (x, c, part) in enumerate(rows)]
    (path / "split.csv").write_text("file,identity,camera,split\n" + "".join(text))


def _table(path):
    rows = [f"{i},{'ab'[i % 2]},{i % 3}\n" for i in range(9)]
    (path / "table.csv").write_text("size,kind,label\n" + "".join(rows))


def _as_bytes(source):
    """The bytes of a table's numbers, as images are compared."""
    count = len(source.labels)
    rows = np.concatenate([*source.read(np.arange(count)).values()], axis=1)
    images = rows.view(np.uint8).reshape(count, -1, 1, 1)
    shape = images.shape[1:]
    return source._replace(read=lambda i: images[i], input_shape=shape)


def _flickr(path):
    names = [f"farm{i}.png" for i in range(9)]
    put(path / "40K", names)
    rows = [f"A{w}, {x}, {i % 5 + 1}\n" for w in range(3) for i, x in enumerate(names)]
    (path / RATINGS).write_text("worker, imagePair, score\n" + "".join(rows))


def _pairs(path):
    put(path, NAMES)
    rows = [(0, 1, 1), (3, 4, "same"), (0, 3, 0), (2, 8, "different")]
    lines = [f"{NAMES[a]}\t{NAMES[b]}\t{word}\n" for a, b, word in rows]
    (path / "pairs.txt").write_text("# first second same\n" + "".join(lines))


def _templates(path):
    put(path / "loose_crop", NAMES)
    rows = enumerate(zip(NAMES, LABELS, strict=True))
    media = [f"{x} {10 + i // 2} {i}\n" for i, (x, _) in rows]
    points = [f"{x} 2 2 5 2 3.5 4 2.5 6 4.5 6 0.9\n" for x in NAMES]
    pairs = [f"{a} {b} {int(a % 2 == b % 2)}\n" for a in (10, 11) for b in (12, 13)]
    header = "TEMPLATE_ID,SUBJECT_ID,FILENAME\n"
    subjects = lambda ids: header + "".join(f"{i},{i % 2},x.png\n" for i in ids)
    for name, text in (
        ("media.txt", "".join(media)),
        ("points.txt", "".join(points)),
        ("pairs.txt", "".join(pairs)),
        ("gallery.csv", subjects((10, 11))),
        ("probes.csv", subjects((12, 13, 14))),
    ):
        (path / name).write_text(text)


def _read_templates(path):
    files = {"media": "media.txt", "landmarks": "points.txt", "pairs": "pairs.txt"}
    lists = {"gallery": "gallery.csv", "probes": "probes.csv", "fpirs": 0.1}
    found = template_set((112, 112, 3), path=path, **files, **lists)
    return around(
        lambda rows: found.source.read(rows)[:, :8, :8], len(found.source.labels)
    )


def _weights(path):
    arrays = {"conv/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    arrays["fc.bias"] = np.array([1, 2, 3], np.int64)
    for suffix in ("npz", "safetensors"):
        write_weights(path / f"set.{suffix}", arrays)


def _read_weights(name):
    def read(path):
        found = read_weights(path / name).arrays
        words = [(k, x.shape, x.dtype, x.tobytes()) for k, x in sorted(found.items())]
        return around(lambda rows: pictures()[rows], words)

    return read


RELEASE = ("media.txt", "points.txt", "pairs.txt", "gallery.csv", "probes.csv")
SETS = {
    "classes": Small(_classes, ("train/0/0.png", "test/2/8.png"), image_classes),
    "two parts": Small(_two_parts, ("set.npz",), cifar100, is_summed=True),
    "camvid": Small(_camvid, ("train/seq_tr0.png", "trainannot/seq_tr0.png",
                    "testannot/seq_te1.png"), camvid),
    "masks": Small(_masks, ("images/seq_ma0.png", "masks/seq_ma1.png"),
                   lambda path: image_masks(path, classes=("a", "b", "c"))),
    "market1501": Small(_market, ("set.zip",), lambda path: market1501(
        path / "set.zip", image_size=8)),
    "cuhk03": Small(_cuhk03, ("set.zip",), lambda path: cuhk03_np(
        path / "set.zip", image_size=8)),
    "msmt17": Small(_msmt17, ("list_train.txt", "list_query.txt", "list_gallery.txt"),
                    lambda path: msmt17(path, image_size=8)),
    "reid csv": Small(_reid_csv, ("split.csv",), lambda path: reid_csv(
        path / "split.csv", image_size=8)),
    "table": Small(_table, ("table.csv",), lambda path: _as_bytes(table(
        path / "table.csv", label="label"))),
    "flickr_aes": Small(_flickr, (RATINGS,), lambda path: flickr_aes(
        path, image_size=8, min_ratings=5, min_per_score=1)),
    "listed pairs": Small(_pairs, ("pairs.txt",), lambda path: listed_pairs(
        path, pairs=path / "pairs.txt", image_size=8)),
    "templates": Small(_templates, RELEASE, _read_templates),
    "weights npz": Small(_weights, ("set.npz",), _read_weights("set.npz")),
    "safetensors": Small(_weights, ("set.safetensors",),
                         _read_weights("set.safetensors")),
}  # fmt: skip
