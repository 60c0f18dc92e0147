"""TensorFlow Datasets: a stand-in with its calls, and the real package if installed."""

import importlib.util
import inspect
import io
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from fedfr_jax.data.align import ARCFACE_TEMPLATE
from fedfr_jax.data.sources.tfds import LAYOUTS, POINTS, femnist10, tfds
from tests.data.files import png


@pytest.fixture
def stub(monkeypatch):
    """Install a module that serves given examples as TFDS serves encoded ones."""

    def install(examples, shape, names=None, tests=None):
        module = mock.MagicMock()
        module.decode.SkipDecoding.return_value = "skip"
        builder = module.builder.return_value
        builder.info.features = {
            "image": SimpleNamespace(shape=shape),
            "label": SimpleNamespace(names=names),
        }
        builder.as_data_source.side_effect = lambda split, decoders: (
            tests if split == "test" and tests else examples
        )
        monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
        return module

    return install


def examples_of(images, labels):
    """Images [n, H, W] or [n, H, W, 3], encoded, with their labels."""
    rows = zip(images, labels, strict=True)
    return [{"image": png(image), "label": int(label)} for image, label in rows]


def test_classes_keep_their_names_and_images_stay_encoded(stub):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    examples = examples_of(images, (2, 0, 2))
    module = stub(examples, (8, 8, 3), names=["cat", "dog", "fox"])
    source = tfds("cifar10", "test", data_dir="d")
    opened = {"data_dir": "d", "file_format": "array_record"}
    module.builder.assert_called_once_with("cifar10", **opened)
    builder = module.builder.return_value
    builder.download_and_prepare.assert_called_once()
    encoded = {"split": "test", "decoders": {"image": "skip"}}
    builder.as_data_source.assert_called_once_with(**encoded)
    assert source.names == ("cat", "dog", "fox")
    assert source.labels.tolist() == [2, 0, 2] and source.labels.dtype == np.int32
    np.testing.assert_array_equal(source.read(np.array([2, 1])), images[[2, 1]])
    assert tfds("cifar10", image_size=4, channels=1).input_shape == (4, 4, 1)


def test_pets_have_masks_of_their_image(stub):
    rng = np.random.default_rng(0)
    masks = [rng.integers(1, 4, size, np.uint8) for size in ((6, 4), (5, 7))]
    examples = examples_of([np.zeros((*x.shape, 3)) for x in masks], range(2))
    for example, mask in zip(examples, masks, strict=True):
        example["segmentation_mask"] = png(mask)
    module = stub(examples, (None, None, 3), names=["Abyssinian", "pug"])
    source = tfds("oxford_iiit_pet", image_size=(6, 4))
    encoded = {"image": "skip", "segmentation_mask": "skip"}
    served = module.builder.return_value.as_data_source
    served.assert_called_once_with(split="train", decoders=encoded)
    assert source.names == ("Abyssinian", "pug")
    assert source.masks.class_names == ("pet", "background", "border")
    found = source.masks.read(np.array([1, 0]))
    np.testing.assert_array_equal(found[1], masks[0] - 1)
    assert found.shape == (2, 6, 4) and set(np.unique(found)) <= {0, 1, 2}
    with pytest.raises(ValueError, match="image_size must be set for oxford_iiit"):
        tfds("oxford_iiit_pet")
    examples[0]["segmentation_mask"] = png(masks[0] * 0)
    with pytest.raises(ValueError, match="the mask of .* train example 0 must have"):
        tfds("oxford_iiit_pet", image_size=(6, 4))


def test_the_test_split_follows_with_is_test(stub):
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4), np.uint8)
    examples = examples_of(images, (1, 0, 1, 0, 0))
    stub(examples[:3], (4, 4, 1), names=["a", "b"], tests=examples[3:])
    source = tfds("emnist/balanced", test_split="test")
    assert source.labels.tolist() == [1, 0, 1, 0, 0]
    assert source.is_test.tolist() == [False, False, False, True, True]
    upright = images.transpose(0, 2, 1)[..., None]
    order = np.array([4, 0, 3, 2])
    np.testing.assert_array_equal(source.read(order), upright[order])
    assert tfds("mnist").is_test is None
    kept = tfds("mnist", test_split="test", min_images=2)
    assert kept.is_test.tolist() == source.is_test.tolist()


def celebrities(numbers, points=((1, 1),) * 5, **attributes):
    """Examples of celeb_a: their identities, and whether they have the attributes."""
    at = {f"{p}_{axis}": int(v) for p, xy in zip(POINTS, points, strict=True)
          for axis, v in zip("xy", xy, strict=True)}  # fmt: skip
    examples = examples_of(np.zeros((len(numbers), 218, 178, 3)), numbers)
    for i, example in enumerate(examples):
        example |= {
            "identity": {"Identity_No": example.pop("label")},
            "landmarks": at,
            "attributes": {name: has[i] for name, has in attributes.items()},
        }
    return examples


def test_celeb_a_has_identities_and_landmarks(stub):
    points = np.round(ARCFACE_TEMPLATE * 1.1 + 20).astype(int)
    stub(celebrities((2880, 17, 2880, 4), points), (218, 178, 3))
    source = tfds("celeb_a")
    assert source.names == ("4", "17", "2880")
    assert source.labels.tolist() == [2, 1, 2, 0]
    np.testing.assert_allclose(source.landmarks[0], points)
    aligned = tfds("celeb_a", image_size=112, align=True)
    np.testing.assert_allclose(aligned.landmarks[0], ARCFACE_TEMPLATE, atol=1.0)
    assert aligned.read(np.array([0])).shape == (1, 112, 112, 3)
    with pytest.raises(ValueError, match="0 of 3 identities remain"):
        tfds("celeb_a", min_images=3)


def test_celeb_a_by_an_attribute_belongs_to_the_people(stub):
    smiling = [True, False, False, True, False, True]
    attributes = {"Smiling": smiling, "Young": [True] * 6}
    stub(celebrities((9, 4, 9, 2, 4, 9), **attributes), (218, 178, 3))
    source = tfds("celeb_a", attribute="Smiling", min_images=2, image_size=8)
    assert source.names == ("not Smiling", "Smiling")
    assert source.labels.tolist() == [1, 0, 0, 0, 1]  # 2 has one image only
    assert source.client_ids.tolist() == [2, 1, 2, 1, 2]
    assert source.read(np.array([4])).shape == (1, 8, 8, 3)
    with pytest.raises(ValueError, match="one of .'Smiling', 'Young'., got 'Bald'"):
        tfds("celeb_a", attribute="Bald")
    with pytest.raises(ValueError, match="got Young, the same"):
        tfds("celeb_a", attribute="Young")
    with pytest.raises(ValueError, match="min_images must be at least 0, got -1"):
        tfds("celeb_a", attribute="Smiling", min_images=-1)
    with pytest.raises(ValueError, match="align and attribute must be unset for mnist"):
        tfds("mnist", attribute="Young")


def test_femnist10_is_the_first_small_letters_from_a_to_j(stub):
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 4), np.uint8)
    labels = np.tile([36, 3, *range(45, 35, -1), 46, 11], 3)[:40]
    examples = examples_of(images, labels)
    stub(examples, (4, 4, 1), names=[str(i) for i in range(62)])
    source = femnist10(images_per_class=2)
    assert source.names == tuple("abcdefghij")
    assert np.bincount(source.labels).tolist() == [2] * 10
    first_j = int(np.argmax(labels == 45))
    place = int(np.argmax(source.labels == 9))
    got = source.read(np.array([place]))[0, ..., 0]
    np.testing.assert_array_equal(got, images[first_j].T)
    stub(examples[:5], (4, 4, 1), names=[str(i) for i in range(62)])
    with pytest.raises(ValueError, match="images of a to j"):
        femnist10()


def test_omniglot_turns_to_white_ink_and_emnist_upright(stub):
    paper = np.full((4, 4, 3), 255, np.uint8)
    paper[1, 2] = 0
    stub(examples_of([paper], [0]), (4, 4, 3), names=["0"])
    ink = tfds("omniglot", channels=1).read(np.array([0]))[0, ..., 0]
    assert ink[1, 2] == 255 and ink.sum() == 255
    lying = np.arange(16, dtype=np.uint8).reshape(4, 4)
    stub(examples_of([lying], [0]), (4, 4, 1), names=["0"])
    upright = tfds("emnist/balanced").read(np.array([0]))[0, ..., 0]
    np.testing.assert_array_equal(upright, lying.T)


def test_what_cannot_be_served_is_refused(stub, monkeypatch):
    with pytest.raises(ValueError, match="one of .'celeb_a', .*got 'imagenet'"):
        tfds("imagenet")
    with pytest.raises(ValueError, match="align and attribute must be unset for lfw"):
        tfds("lfw", align=True)
    stub([{"image": b"cut", "label": 0}], (4, 4, 3), names=["a"])
    with pytest.raises(ValueError, match="mnist train example 0 must be a whole 8-bit"):
        tfds("mnist").read(np.array([0]))
    served = stub([], (4, 4, 3)).builder.return_value.as_data_source
    served.side_effect = NotImplementedError("stored as tfrecord.")
    with pytest.raises(ValueError, match="prepared as array_record.*NotImplemented"):
        tfds("mnist")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'fedfr_jax\[tfds\]'"):
        tfds("mnist")


needs_tfds = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_datasets") is None,
    reason="tensorflow-datasets is not installed",
)


@needs_tfds
@pytest.mark.filterwarnings("ignore")
def test_the_real_package_has_the_calls_and_features(tmp_path):
    import tensorflow_datasets as real

    builder_class = real.core.DatasetBuilder
    source = inspect.signature(builder_class.as_data_source).parameters
    assert {"split", "decoders"} <= set(source)
    assert callable(real.decode.SkipDecoding)
    for name, layout in LAYOUTS.items():
        info = real.builder(name, data_dir=tmp_path, file_format="array_record").info
        assert len(info.features["image"].shape) == 3
        feature = info.features
        for key in layout.label:
            feature = feature[key]
        assert isinstance(feature, real.features.ClassLabel) == layout.is_class
        if layout.masks:
            assert info.features["segmentation_mask"].shape[-1] == 1
        assert layout.is_celeb_a == ("attributes" in info.features)
        if layout.is_celeb_a:
            wanted = {f"{p}_{axis}" for p in POINTS for axis in "xy"}
            assert wanted == set(info.features["landmarks"])


@needs_tfds
@pytest.mark.filterwarnings("ignore")
def test_a_really_prepared_set_is_read_without_tensorflow(tmp_path, monkeypatch):
    import importlib.resources.abc

    # tensorflow-datasets 4.9 imports this name when it writes, and does not install it.
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
    import tensorflow_datasets as real

    images = np.random.default_rng(0).integers(0, 256, (6, 250, 250, 3), np.uint8)

    def generate(self, downloads):
        rows = enumerate(images)
        return {
            "train": (
                (i, {"label": f"p{i // 2}", "image": io.BytesIO(png(image))})
                for i, image in rows
            )
        }

    builder = real.builder("lfw", data_dir=tmp_path, file_format="array_record")
    monkeypatch.setattr(type(builder), "_split_generators", generate)
    builder.download_and_prepare()
    before = set(sys.modules)
    source = tfds("lfw", data_dir=tmp_path)
    assert source.names == ("p0", "p1", "p2")
    found = source.read(np.arange(6))
    for name, image in zip(source.labels, found, strict=True):
        assert any((image == images[i]).all() for i in (2 * name, 2 * name + 1))
    assert "tensorflow" not in set(sys.modules) - before
