"""Verify, enroll and identify as a user meets them."""

import sys
import threading
import types
import zipfile

import jax
import numpy as np
import pytest
from PIL import Image

import fedfr_jax as ff
from fedfr_jax.cli.main import main
from fedfr_jax.cli.trained import identities_of_files
from fedfr_jax.data.align import arcface_template
from fedfr_jax.deploy import face_images
from fedfr_jax.deploy import gallery as deployed
from fedfr_jax.deploy.export import torch_arrays
from fedfr_jax.deploy.face_images import read_images
from fedfr_jax.deploy.gallery import (
    Gallery,
    enroll_features,
    enroll_images,
    read_gallery,
    search,
    unit_length,
    write_gallery,
)
from fedfr_jax.deploy.trained_model import TrainedModel
from fedfr_jax.models.weights import read_weights, write_weights


@pytest.fixture(scope="module")
def network(run, tmp_path_factory):
    """The run's network as a file that knows its calibration."""
    path = tmp_path_factory.mktemp("network") / "network.safetensors"
    words = [f"--weights={run}", "--method=pretrained", f"--output={path}"]
    assert main(["export", *words]) == 0
    return path


@pytest.fixture(scope="module")
def people(faces, tmp_path_factory):
    """A folder of three people with two pictures each, of 24 x 12 pixels."""
    folder, arrays = tmp_path_factory.mktemp("people"), np.load(faces)
    for person in range(3):
        (folder / f"p{person}").mkdir()
        for i in range(2):
            image = np.pad(arrays["images"][6 * person + i], ((6, 6), (0, 0), (0, 0)))
            Image.fromarray(image).save(folder / f"p{person}" / f"{i}.png")
    return folder


def knn(probes, rows, most, metric):
    """What FAISS gives, where it is not installed."""
    assert metric == "inner product"
    places = np.argsort(-(probes @ rows.T), axis=1)[:, :most]
    return np.take_along_axis(probes @ rows.T, places, axis=1), places


FAISS = types.SimpleNamespace(knn=knn, METRIC_INNER_PRODUCT="inner product")


def test_a_picture_is_its_own_person_and_a_gallery_names_him(
    network, people, tmp_path, capsys, monkeypatch
):
    most = []
    embed = TrainedModel.embed
    count = lambda self, images: most.append(len(images)) or embed(self, images)
    monkeypatch.setattr(TrainedModel, "embed", count)
    monkeypatch.setattr(face_images, "CHUNK_SIZE", 4)
    same = [str(people / "p0" / "0.png")] * 2
    assert main(["verify", f"--weights={network}", "--far=0.1", *same]) == 0
    says = capsys.readouterr().out
    assert "as in training, pictures are stretched to 12 x 12 pixels" in says
    assert "one person: cosine 1.0000" in says and "(false accept rate 0.1)" in says
    assert main(["verify", f"--weights={network}", *same]) == 0
    smallest = "the smallest that the 360 pairs of two people"  # 5 with 6 images each
    assert f"(false accept rate 0.00278, {smallest}" in capsys.readouterr().out
    assert main(["verify", f"--weights={network}", "--far=0.001", *same]) == 2
    assert "FAR must be at least" in capsys.readouterr().err
    gallery = tmp_path / "gallery.npz"
    flags = [f"--weights={network}", f"--gallery={gallery}"]
    assert main(["enroll", *flags, str(people)]) == 0
    assert main(["enroll", *flags, str(people / "p1" / "0.png")]) == 0
    assert list(read_gallery(gallery).names) == ["p0", "p1", "p2", "0"]
    capsys.readouterr()
    probe = str(people / "p1" / "0.png")
    assert main(["identify", *flags, "--far=0.1", probe]) == 0
    assert f"{probe}: 0 1.0000" in capsys.readouterr().out
    assert main(["identify", *flags, "--threshold=1.1", probe]) == 0
    assert "nobody (nearest 0 1.0000)" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "faiss", FAISS)
    assert main(["identify", *flags, "--search_backend=faiss", "--far=0.1", probe]) == 0
    assert f"{probe}: 0 1.0000" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "faiss", None)  # not installed
    assert main(["identify", *flags, "--search_backend=faiss", "--far=0.1", probe]) == 2
    assert "pip install 'fedfr_jax[search]'" in capsys.readouterr().err
    features = tmp_path / "features.npz"
    words = [f"--weights={network}", f"--output={features}", str(people)]
    assert main(["embed", *words]) == 0
    found = np.load(features)
    assert found["features"].shape == (6, 8) and found["names"][2] == "p1/0.png"
    assert max(most) == 4  # pictures in memory at once, of six
    opened = ff.load_model(network)
    alone = read_images([probe], opened.input_shape, opened.recorded).read([0])
    alone = opened.embed(alone)
    np.testing.assert_allclose(found["features"][2], alone[0], rtol=1e-4, atol=1e-5)


def test_a_zip_with_one_folder_around_all_holds_people_whose_names_are_escaped(
    network, people, tmp_path, capsys
):
    path, evil = tmp_path / "people.zip", "\x1b[2Jp2"
    with zipfile.ZipFile(path, "w") as archive:
        for file in people.rglob("*.png"):
            name = f"set/{file.relative_to(people)}".replace("p2", evil)
            archive.write(file, name)
            archive.write(file, f"set/p0/@eaDir/{file.parent.name}{file.name}")
    gallery = tmp_path / "gallery.npz"
    flags = [f"--weights={network}", f"--gallery={gallery}"]
    assert main(["enroll", *flags, str(path)]) == 0
    said = capsys.readouterr().out
    assert "6 in @eaDir (first set/p0/@eaDir/p00.png)" in said
    assert "3 people, 3 of them new or again: \\x1b[2Jp2, p0, p1\n" in said
    assert sorted(read_gallery(gallery).names) == [evil, "p0", "p1"]
    assert main(["identify", *flags, "--far=0.1", "--top_k=3", str(path)]) == 0
    assert main(["identify", *flags, "--threshold=1.1", str(path)]) == 0
    assert main(["enroll", *flags, str(tmp_path / evil)]) == 2
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "\\x1b[2Jp2/1.png: " in said.out


def test_a_person_is_the_folder_that_an_image_is_in():
    of = lambda *names: identities_of_files(names, is_in_folder=True)
    found = of("a/ann/1.png", "a/bob/1.png", "b/cy/1.png", "di.png")
    assert found == ["ann", "bob", "cy", "di"]
    assert of("train/ann/1.png", "val/ann/2.png", "val/bo/1.png")[1:] == ["ann", "bo"]
    assert of("set/ann/1.png") == ["ann"] and of("x/y/1.png", "x/y/2.png") == ["y", "y"]
    assert of("people/Val/1.png", "people/Bo/1.png") == ["Val", "Bo"]
    for names, rule in (
        (["train/1.png", "val/1.png"], "got train/1.png: train is a split"),
        (["set/Test/1.png", "set/Train/1.png"], "got set/Test/1.png: Test is a split"),
        (["a/ann/1.png", "b/ann/2.png"], "got a/ann/1.png and b/ann/2.png"),
        (["ann/1.png", "ann/old/2.png"], "got both ann/1.png and ann/old/2.png"),
        (["ann/x/old/2.png", "ann/1.png"], "got both ann/1.png and ann/x/old/2.png"),
    ):
        with pytest.raises(ValueError, match=rule):
            of(*names)


def test_foreign_weights_are_converted_or_name_what_does_not_fit(
    network, tmp_path, capsys
):
    torch, back = tmp_path / "network.npz", tmp_path / "back.safetensors"
    write_weights(torch, torch_arrays(ff.load_model(network)))
    assert main(["convert", f"--input={torch}", f"--output={back}"]) == 0
    found, wanted = (read_weights(path).arrays for path in (back, network))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    model = '{"name": "iresnet", "blocks": [1], "widths": [6]}'
    words = [f"--input={torch}", f"--output={back}", f"--model={model}"]
    capsys.readouterr()
    assert main(["convert", *words, "--input_shape=12,12,3"]) == 2
    rule = "weights must fit the network: bn1.bias must be (6,), got (4,)"
    assert rule in capsys.readouterr().err


def test_mistakes_are_one_line(network, people, run, tmp_path, capsys):
    gallery = tmp_path / "gallery.npz"
    other = Gallery(np.array(["a"]), np.full((1, 9), 1 / 3, np.float32), "0" * 16, "")
    write_gallery(other, gallery)
    text = tmp_path / "text.png"
    text.write_text("no picture")
    picture, to = str(people / "p0" / "0.png"), f"--gallery={gallery}"
    of = f"--weights={network}"
    for words, says in [
        (["verify", of, picture, str(text)], "text.png must be a whole 8-bit image"),
        (["verify", of, picture], "images must be two files"),
        (["verify", of, "--far=1e-9", picture, picture], "another --far"),
        (["identify", of, "--gallery=no.npz", picture], "no.npz must be there"),
        (["verify", of, "--threshold=nan", picture, picture], "--threshold must be a"),
        (["verify", of, f"--images={picture}"], "(give images without a flag)"),
        (["verify", of, f"--treshold={picture}"], "(did you mean --threshold?)"),
        (["verify", picture, picture], "needs --weights=PATH"),
        (["identify", of, to, picture], "got one by 0000000000000000. Enroll again"),
        (["identify", of, f"--gallery={network}", picture], "network.safetensors"),
        (["embed", of, "--output=x.npz", f"{tmp_path}/none"], "images must be files"),
        (["export", of, "--client=1", "--output=x.onnx"], "with method or client"),
        (["export", of, "--output=x.tflite"], "file must end in one of"),
        (["convert", f"--input={text}", "--output=x.npz"], "file with suffix"),
    ]:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 2, (words, error)


def crowd():
    """A gallery of 50 people, and 7 probes of any length."""
    rng = np.random.default_rng(0)
    known, probes = (rng.standard_normal((n, 4), np.float32) for n in (50, 7))
    return Gallery(np.arange(50).astype(str), unit_length(known), "", ""), 3 * probes


def fake_network(fingerprint="0" * 16):
    return types.SimpleNamespace(fingerprint=fingerprint, roc=None, metadata={})


def test_a_name_that_is_enrolled_again_has_its_new_vector(tmp_path):
    path, network = tmp_path / "gallery.npz", fake_network()
    x, y = np.float32([[3, 0]]), np.float32([[0, 5]])
    enroll_images(network, ["Ada", "Bo"], np.concatenate([x, x]), path)
    enroll_images(network, ["Ada"], y, path)
    found = read_gallery(path)
    vectors = dict(zip(found.names, found.features.tolist(), strict=True))
    assert vectors == {"Ada": [0, 1], "Bo": [1, 0]} and len(found.names) == 2
    with pytest.raises(ValueError, match="Enroll again"):
        enroll_images(fake_network("1" * 16), ["Cy"], x, path)


def test_who_enrolls_at_the_same_time_loses_nobody(tmp_path, monkeypatch):
    """The first waits with what it has read until the second is on its way."""
    path, begun = tmp_path / "gallery.npz", threading.Event()
    write_gallery(Gallery(np.array(["Ada"]), np.float32([[1, 0]]), "0" * 16, ""), path)
    add = lambda name: enroll_images(fake_network(), [name], np.float32([[0, 1]]), path)
    second = threading.Thread(target=add, args=("Cy",))

    def slow(*given):
        if not begun.is_set():
            begun.set()
            second.start()
            second.join(0.2)  # it does not end: it waits
            assert second.is_alive()
        return enroll_features(*given)

    monkeypatch.setattr(deployed, "enroll_features", slow)
    add("Bo")
    second.join()
    assert sorted(read_gallery(path).names) == ["Ada", "Bo", "Cy"]


def test_a_file_that_is_no_gallery_is_refused(tmp_path):
    path = tmp_path / "gallery.npz"
    whole = Gallery(np.array(["Ada"]), np.float32([[1, 0]]), "0", "")
    write_gallery(whole, path)
    assert read_gallery(path).names == ["Ada"]
    np.savez(path, names=whole.names, features=whole.features)
    with pytest.raises(ValueError, match="gallery.npz.*gallery must have .*'names'"):
        read_gallery(path)


def test_search_is_exact(monkeypatch):
    monkeypatch.setattr(deployed, "CHUNK_SIZE", 100)  # two probes at once
    gallery, probes = crowd()
    places, cosines = search(gallery, probes, 3)
    wanted = unit_length(probes) @ gallery.features.T
    np.testing.assert_array_equal(places, np.argsort(-wanted, axis=1)[:, :3])
    np.testing.assert_allclose(cosines, np.sort(wanted)[:, :-4:-1], rtol=1e-6)


def spot_face(path, points):
    """A picture with a bright spot at each landmark."""
    image = np.zeros((300, 260, 3), np.uint8)
    for x, y in points.round().astype(int):
        image[y - 4 : y + 5, x - 4 : x + 5] = 255
    Image.fromarray(image).save(path)


def template_seen(images):
    """How bright aligned faces [n, 112, 112, 3] are at the template's points."""
    x, y = arcface_template((112, 112)).round().astype(int).T
    return images[:, y, x].min()


def test_faces_are_aligned_by_landmarks_or_a_detector(tmp_path, monkeypatch):
    turned = np.array([[0.9, -0.6], [0.6, 0.9]], np.float32) * 1.5
    points = arcface_template((112, 112)) @ turned.T + np.array([100, 20], np.float32)
    path = tmp_path / "face.png"
    spot_face(path, points)
    columns = [f"{axis}{i}" for i in range(1, 6) for axis in "xy"]
    row = ",".join(map(str, points.reshape(-1)))
    csv = tmp_path / "landmarks.csv"
    csv.write_text(f"name,{','.join(columns)}\n{path},{row}\n")
    shape = (112, 112, 3)
    found = read_images([path], shape, landmarks=csv)
    assert template_seen(found.read([0])) > 200 and "aligned by" in found.alignment

    class Detector:  # two faces as OpenCV's YuNet gives them; the second is surer
        @staticmethod
        def create(model, config, size):
            return Detector()

        def setInputSize(self, size):
            self.size = size

        def detect(self, image):
            assert image.shape == (300, 260, 3) and self.size == (260, 300)
            faces = np.zeros((2, 15), np.float32)
            faces[1, 4:14], faces[:, 14] = points.reshape(-1), (0.5, 0.9)
            return 1, faces

    monkeypatch.setitem(
        sys.modules, "cv2", types.SimpleNamespace(FaceDetectorYN=Detector)
    )
    found = read_images([path], shape, detector=csv)
    assert template_seen(found.read([0])) > 200
    with pytest.raises(ValueError, match="cannot be used with a detector"):
        read_images([path], shape, detector=csv, landmarks=csv)
