"""Small whole sets of every format, for damage: files, and how they are read."""

import io
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.arrays import arrays, omniglot
from fedfr_jax.data.sources.folder import folder, lfw
from fedfr_jax.data.sources.packed import pack, packed
from fedfr_jax.data.sources.pairs import bin_pairs
from fedfr_jax.data.sources.recordio import Record, recordio
from fedfr_jax.types import Pairs, Source
from tests.data.recordio_files import write_face_set, write_recordio

LABELS = np.repeat(np.arange(3), 3)
POINTS = "name,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5\n"
FACE = "2,2,5,2,3.5,4,2.5,6,4.5,6"


class Small(NamedTuple):
    """A set in a folder, the files of it that are damaged, and its reader."""

    write: Callable[[pathlib.Path], None]
    files: tuple[str, ...]
    read: Callable[[pathlib.Path], Source]
    is_summed: bool = False  # every byte has a checksum: damaged is refused or the same


def pictures() -> np.ndarray:
    """Nine images of noise, [9, 8, 8, 3] uint8."""
    return np.random.default_rng(0).integers(256, size=(9, 8, 8, 3), dtype=np.uint8)


def encoded(kind: str) -> list[bytes]:
    """The nine images as files."""
    files = []
    for picture in pictures():
        file = io.BytesIO()
        Image.fromarray(picture).save(file, kind)
        files.append(file.getvalue())
    return files


def named(kind: str) -> dict[str, bytes]:
    """Three people's images by path, as LFW names them."""
    people = ("Ann", "Bo", "Cy")
    names = [f"{people[c]}/{people[c]}_000{i % 3 + 1}" for i, c in enumerate(LABELS)]
    return {f"{n}.{kind}": x for n, x in zip(names, encoded(kind), strict=True)}


def _folder(path):
    for name, data in named("png").items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def _zip(path):
    with zipfile.ZipFile(path / "set.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in named("bmp").items():
            archive.writestr(name, data)


def _lfw(path):
    _folder(path)
    rows = [f"{name},{FACE}\n" for name in named("png")]
    (path / "landmarks.csv").write_text(POINTS + "".join(rows))
    fold = "Ann\t1\t2\nBo\t1\t3\nAnn\t1\tBo\t1\nBo\t2\tCy\t3\n"
    (path / "pairsDevTrain.txt").write_text("2\n" + fold)


def _classic(path):
    write_face_set(path / "train.rec", encoded("jpeg"), LABELS, image_size=(8, 8))


def _im2rec(path):
    rows = enumerate(zip(LABELS, encoded("jpeg"), strict=True))
    write_recordio(path / "train.rec", [Record(float(c), x, i) for i, (c, x) in rows])


def _vectors(path):
    rows = enumerate(encoded("jpeg"))
    records = [Record(np.array([i, 0.5, -1]), x, i) for i, x in rows]
    write_recordio(path / "train.rec", records)


def _npz(path):
    write = lambda name, save: save(
        path / name, images=pictures(), labels=LABELS, cameras=LABELS, test=LABELS > 1
    )
    write("plain.npz", np.savez)
    write("deflated.npz", np.savez_compressed)


def _read_npz(name):
    return lambda path: arrays(path / name, cameras="cameras", is_test="test")


def _omniglot(path):
    images = pictures()[..., 0].reshape(3, 3, 8, 8) > 128
    labels = np.repeat(np.arange(3)[:, None], 3, axis=1)
    np.savez(path / "images_background.npz", images=images, labels=labels)
    rows = [f"{c},{c},Greek,c{c}\n" for c in range(3)]
    text = "label,global_id,alphabet,character\n" + "".join(rows)
    (path / "classes.csv").write_text(text)


def _bin(path):
    images = encoded("jpeg")[:8]
    (path / "set.bin").write_bytes(pickle.dumps((images, [True, False] * 2)))
    arrays = [np.frombuffer(x, np.uint8) for x in images]
    (path / "arrays.bin").write_bytes(pickle.dumps((arrays, np.arange(4) % 2 == 0)))


def _packed(path):
    pairs = Pairs(np.array([[0, 1], [2, 5]], np.int32), np.array([True, False]))
    source = Source(
        lambda rows: pictures()[rows],
        LABELS.astype(np.int32),
        ("a", "b", "c"),
        (8, 8, 3),
        landmarks=np.random.default_rng(1).normal(size=(9, 5, 2)).astype(np.float32),
        cameras=LABELS.astype(np.int32),
        pairs=pairs,
        is_test=LABELS == 2,
    )
    pack(source, path, max_file_bytes=4 * 192)


PARTS = ("labels", "landmarks", "cameras", "is_test", "pairs", "is_same")
SETS = {
    "folder": Small(_folder, ("Ann/Ann_0001.png", "Bo/Bo_0002.png"),
                    lambda path: folder(path, image_size=8)),
    "zip": Small(_zip, ("set.zip",), lambda path: folder(path / "set.zip",
                 image_size=8)),
    "lfw": Small(_lfw, ("landmarks.csv", "pairsDevTrain.txt"),
                 lambda path: lfw(path, image_size=8)),
    "rec": Small(_classic, ("train.rec", "train.idx", "property"), recordio),
    "im2rec": Small(_im2rec, ("train.rec", "train.idx"), recordio),
    "vectors": Small(_vectors, ("train.rec", "train.idx"), recordio),
    "npz": Small(_npz, ("plain.npz",), _read_npz("plain.npz"), is_summed=True),
    "npz deflated": Small(_npz, ("deflated.npz",), _read_npz("deflated.npz"),
                          is_summed=True),
    "omniglot": Small(_omniglot, ("images_background.npz", "classes.csv"),
                      lambda path: omniglot(path, image_size=8)),
    "bin": Small(_bin, ("set.bin",), lambda path: bin_pairs(path / "set.bin",
                 image_size=8)),
    "bin of arrays": Small(_bin, ("arrays.bin",), lambda path: bin_pairs(
        path / "arrays.bin", image_size=8)),
    "packed": Small(_packed, ("manifest.json", "index.json", "names.json",
                              *(f"{x}.npy" for x in PARTS)), packed, is_summed=True),
    "packed images": Small(_packed, ("images-00001.npy", "images-00002.npy"), packed),
}  # fmt: skip
