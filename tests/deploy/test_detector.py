"""Raw photographs: landmarks by a detector, and what training makes of them."""

import json

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.cli import prepare
from fedfr_jax.configs import base
from fedfr_jax.data.align import arcface_template
from fedfr_jax.data.sources.folder import folder
from fedfr_jax.deploy.detector import most_certain_faces
from fedfr_jax.deploy.face_images import list_files, read_images
from fedfr_jax.types import Preprocessing

POINTS = arcface_template((112, 112)) * 0.5 + np.array([20, 10], np.float32)


def stub(path):
    """Finds as many faces as the first pixel says, the first where the spots are."""
    assert path == "yunet.onnx"

    def detect(image):
        count = int(np.asarray(image)[0, 0, 0])
        return np.stack([POINTS + 3 * i for i in range(count)] or [POINTS])[:count]

    return detect


@pytest.fixture
def photographs(tmp_path):
    """Four people with two photographs each, with a spot at each landmark.

    One shows two faces, one none.
    """
    for person in range(4):
        for number in range(2):
            image = np.zeros((90, 100, 3), np.uint8)
            for x, y in POINTS.round().astype(int):
                image[y - 1 : y + 2, x - 1 : x + 2] = 255
            image[0, 0] = {(1, 0): 0, (2, 1): 2}.get((person, number), 1)
            path = tmp_path / "people" / f"p{person}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return tmp_path / "people"


def test_landmarks_of_raw_photographs_make_a_training_set(
    photographs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(prepare, "yunet", stub)
    config = base.get_config()
    config.data = {"name": "folder", "path": str(photographs), "image_size": 112}
    config.partition = {"name": "iid", "num_clients": 1}
    csv = tmp_path / "faces.csv"
    csv_flags = {"detector": "yunet.onnx", "landmarks": str(csv)}
    prepare.prepare(config, workdir=str(tmp_path), **csv_flags)
    found = json.loads((tmp_path / "data.json").read_text())["data"]
    says = capsys.readouterr().out
    assert f"{csv}: landmarks of 7 images" in says
    assert "no face, left out of training: 1 (p1/0.png)" in says
    assert "several faces, the surest is taken: 1 (p2/1.png)" in says
    assert (found["images"], found["identities"]) == (7, 4) and found["landmarks"]
    source = folder(photographs, image_size=112, landmarks=csv, align=True)
    x, y = arcface_template((112, 112)).round().astype(int).T
    assert (source.read(np.arange(7))[:, y, x, 0] > 200).all()
    assert np.bincount(source.labels).tolist() == [2, 1, 2, 2]
    how, shape = Preprocessing("stretch", alignment="arcface"), (112, 112, 3)
    paths = [photographs / "p0"]
    with pytest.raises(ValueError, match="faces.csv must have landmarks for every"):
        read_images(paths, shape, how, landmarks=csv)
    with pytest.raises(
        ValueError, match="faces.csv must have landmarks of every .*p1/0"
    ):
        read_images([photographs], shape, how, landmarks=csv)


def test_a_picture_without_a_face_is_named(photographs):
    files = list_files([photographs])
    with pytest.raises(ValueError, match="YuNet cannot find a face in .*p1/0.png"):
        most_certain_faces(files, stub("yunet.onnx"), "YuNet")
    shown = files._replace(names=["p0/0.png", "p2/1.png"])
    points = most_certain_faces(shown, stub("yunet.onnx"), "YuNet")
    np.testing.assert_allclose(points, [POINTS, POINTS])
