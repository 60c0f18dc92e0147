"""Data digest: what is kept of a stage's images, and what has changed in them."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources import open_source, selection
from fedfr_jax.runs import data_digest
from fedfr_jax.types import DataUsage, UsedRows


def picture(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three people of three pictures; all files have the same number of bytes."""
    for shade, who in enumerate("abc"):
        for number in range(3):
            picture(tmp_path / "set" / who / f"{number}.bmp", 10 * shade + number)
    return tmp_path / "set"


def used(path, first=("a", "b")):
    """Client 0 trains on the first of two people and client 1 on the second; the
    third image of each is tested, person c is public."""
    source = open_source("folder", path=path, image_size=4)
    number = {name: i for i, name in enumerate(source.names)}
    train, test = [], []
    for who in first:
        rows = np.flatnonzero(source.labels == number[who])
        train += rows[:2].tolist()
        test += rows[2:].tolist()
    client = np.repeat([0, 1], 2)
    public = np.flatnonzero(source.labels == number.get("c", -1))
    parts = {
        "train": UsedRows(
            np.array(train), client[: len(train)], client[: len(train)] * 0
        ),
        "test": UsedRows(np.array(test), np.repeat([0, 1], len(test) // 2)),
        "public": UsedRows(public),
    }
    return DataUsage(source, parts)


def what(before, now):
    digests = [data_digest.digest_of(one) for one in (before, now)]
    return data_digest.difference(*digests)


def test_the_contents_of_a_set_are_read_once(folder, monkeypatch):
    """However often a run compares its data."""
    usage, read = used(folder), []
    crc32 = selection.zlib.crc32
    fake = SimpleNamespace(crc32=lambda *x: read.append(1) or crc32(*x))
    monkeypatch.setattr(selection, "zlib", fake)
    first, second = data_digest.digest_of(usage), data_digest.digest_of(usage)
    assert data_digest.difference(first, second) == "" and len(read) == 9


def test_a_digest_is_the_same_after_its_file_and_somewhere_else(folder, tmp_path):
    kept = data_digest.digest_of(used(folder))
    data_digest.write(kept, tmp_path / "data.npz")
    moved = folder.rename(tmp_path / "elsewhere")
    found = data_digest.read(tmp_path / "data.npz")
    assert found.names.tolist() == kept.names.tolist() and len(kept.names) == 9
    assert kept.uses.tolist() == ["train", "train", "test"] * 2 + ["public"] * 3
    assert kept.clients.tolist() == [0] * 3 + [1] * 3 + [-1] * 3
    assert data_digest.difference(found, data_digest.digest_of(used(moved))) == ""


def test_one_more_image_and_one_that_is_gone_are_named(folder):
    before = used(folder)
    kept = data_digest.digest_of(before)
    picture(folder / "c" / "9.bmp", 99)
    (folder / "c" / "0.bmp").unlink()
    now = data_digest.digest_of(used(folder))
    found = data_digest.difference(kept, now)
    assert found == "2 images differ: c/9.bmp is new; c/0.bmp is gone"


def test_people_whose_folders_are_swapped_have_other_contents(folder):
    """Names and sizes are what they were."""
    kept = data_digest.digest_of(used(folder))
    for one, other in (("a", "x"), ("b", "a"), ("x", "b")):
        (folder / one).rename(folder / other)
    found = data_digest.difference(kept, data_digest.digest_of(used(folder)))
    words = "6 images differ: a/0.bmp was train of a at client 0 as number 0, 102 bytes"
    assert found.startswith(words) and found.endswith("; ...")


def test_people_who_change_their_clients_have_another_use(folder):
    found = what(used(folder), used(folder, first=("b", "a")))
    assert found.startswith("6 images differ: a/0.bmp was train of a at client 0 as ")
    assert " and is train of a at client 1 as number 0, " in found


def test_an_image_under_another_label_is_relabeled(tmp_path):
    images = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4)
    digests = []
    for labels in ([5, 5, 5, 8, 8, 8], [5, 5, 8, 8, 8, 8]):
        np.savez(tmp_path / "set.npz", images=images, labels=labels)
        source = open_source("arrays", path=tmp_path / "set.npz")
        digests.append(data_digest.digest_source(source))
    found = data_digest.difference(*digests)
    assert found.startswith("1 images differ: image 2 was image of 5, ")
    assert " and is image of 8, " in found


def test_drawn_images_are_called_after_their_rows_and_are_not_drawn():
    source = open_source("synthetic_faces", num_identities=2, images_per_identity=2)
    source = source._replace(read=None)
    digest = data_digest.digest_source(source)
    assert digest.names.tolist() == ["image 0", "image 1", "image 2", "image 3"]
    assert digest.identities.tolist() == ["id000000"] * 2 + ["id000001"] * 2


def test_parts_of_a_join_keep_their_names_and_contents(folder, tmp_path):
    images = np.arange(4 * 48, dtype=np.uint8).reshape(4, 4, 4, 3)
    np.savez(tmp_path / "set.npz", images=images, labels=[0, 0, 1, 1])
    parts = {
        "drawn": {"name": "arrays", "path": tmp_path / "set.npz"},
        "mine": {"name": "folder", "path": folder, "image_size": 4},
    }
    first = data_digest.digest_source(open_source("concat", sources=parts))
    assert first.names[3:5].tolist() == ["drawn/image 3", "mine/a/0.bmp"]
    picture(folder / "a" / "0.bmp", 200)
    found = data_digest.difference(
        first, data_digest.digest_source(open_source("concat", sources=parts))
    )
    assert found.startswith("1 images differ: mine/a/0.bmp was image of mine/a, ")


@pytest.mark.parametrize("text", [b"PK\3\4 nothing", b"nothing"])
def test_a_damaged_file_is_named(text, tmp_path):
    """NumPy's advice on files that are no archive, to unpickle them, is left out."""
    (tmp_path / "data.npz").write_bytes(text)
    with pytest.raises(
        ValueError, match=r"data\.npz must be an undamaged .*file \(\w+\)\. Restore"
    ):
        data_digest.read(tmp_path / "data.npz")
