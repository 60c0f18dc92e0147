"""Rounds on features of a frozen prefix, against rounds on images."""

import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fedfr_jax as ff
from fedfr_jax.data.augment import horizontal_flip, pad_and_crop
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated import feature_cache
from fedfr_jax.federated.feature_cache import keep_features
from fedfr_jax.models import MODELS
from fedfr_jax.models.linen import from_linen
from fedfr_jax.tasks.classification import cross_entropy
from fedfr_jax.types import FeatureStorage

SIDE, NUM_CLIENTS, EACH = (8, 8, 3), 4, 6
NETWORK = MODELS["resnet"](SIDE, num_classes=3, blocks=(1, 1), widths=(4, 8))
VARIABLES = NETWORK.init(jax.random.key(0))
PATTERN = "params/(?!stage2|fc)"
SMALL = MODELS["cnn"](SIDE, num_classes=3)
FLIP = Batching(2, horizontal_flip())
NOT_PROBED = 20  # of 100 examples
AUTO, DEVICE, DISK = map(FeatureStorage, ("auto", "device", "disk"))


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_CLIENTS * EACH, *SIDE)).astype(np.float32)
    return ff.FederatedDataset.from_client_ids(
        x, np.arange(len(x)) % 3, np.arange(len(x)) // EACH
    )


def play(model, table, batching, mesh):
    local = ff.LocalTraining(cross_entropy(model), optax.sgd, 0.1)
    clients = data()._replace(dataset=table)
    variables = ff.moving_variables(model, VARIABLES)
    options = {"mesh": mesh, "clients_per_device": 2}
    run = ff.init(
        ff.fedavg(local), clients, variables, batching=batching, batch_size=2, **options
    )
    run, metrics = ff.run_rounds(run, 2)
    return run.variables, metrics[1]["loss"]


@pytest.mark.parametrize(
    ("place", "batching"),
    [
        ("host", FLIP),
        pytest.param("device", Batching(2), marks=pytest.mark.slow),
        pytest.param("device", FLIP, marks=pytest.mark.slow),
        pytest.param("disk", FLIP, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_features_are_those_of_images(place, batching, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, mesh = ff.with_frozen(NETWORK, PATTERN, VARIABLES), ff.make_mesh(2)
    kept = keep_features(model, data().dataset, batching, mesh, FeatureStorage(place))
    assert isinstance(kept.table, Stream) == (place != "device")
    assert place in kept.text
    found = play(model, kept.table, kept.batching, mesh)
    expected = play(model, data().dataset, batching, mesh)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_file_is_read_again_and_not_for_another_base_or_other_images(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh, variables = ff.make_mesh(1), SMALL.init(jax.random.key(0))
    model = ff.with_frozen(SMALL, "params/conv1", variables)

    def kept(images):
        table = ff.FederatedDataset.from_client_ids(
            images, np.zeros(len(images), int), np.zeros(len(images), int)
        ).dataset
        read = keep_features(model, table, Batching(2), mesh, DISK).table
        return read.read(np.arange(len(images)))["features"]

    rng = np.random.default_rng(1)
    images = rng.normal(size=(100, *SIDE)).astype(np.float32)
    first = kept(images)
    (file,) = tmp_path.rglob("*.npy")
    written = file.stat().st_mtime_ns
    np.testing.assert_array_equal(kept(images), first)
    assert file.stat().st_mtime_ns == written
    changed = images.copy()
    changed[NOT_PROBED] += 1
    found = np.abs(kept(changed) - first).max((1, 2))
    assert found[NOT_PROBED] > 1e-3
    assert not np.delete(found, NOT_PROBED).any()
    streamed = stream(lambda rows: images[rows], np.zeros(len(images)))
    for digest in ("a", "b"):  # of what a stream reads
        storage = DISK._replace(images=digest)
        keep_features(model, streamed, Batching(2), mesh, storage)
    file.write_bytes(file.read_bytes()[:100])
    np.testing.assert_array_equal(kept(images), first)
    other = jax.tree.map(lambda x: 1.1 * x, variables)
    model = ff.with_frozen(SMALL, "params/conv1", other)
    assert np.abs(kept(images) - first).max() > 1e-3
    assert len([*tmp_path.rglob("*.npy")]) == 5


def test_a_file_is_named_by_the_preprocessing():
    table = data().dataset
    darker = lambda i, inputs: {"image": inputs["image"] - 0.1}
    other = FLIP.augment._replace(num_views=1, apply_view=darker)
    ways = [Batching(2), Batching(3), FLIP, Batching(2, other)]
    streamed = stream(lambda rows: {"image": images(table)[rows]}, table.targets)
    for examples in (table, streamed):
        names = [feature_cache.digest_examples(examples, way) for way in ways]
        assert names[0] == names[1]
        assert len({*names}) == 3


def images(table):
    return np.asarray(table.inputs["image"])


@pytest.mark.parametrize(
    ("model", "batching", "words"),
    [
        (PATTERN, Batching(2, pad_and_crop(padding=1)), "views that cannot be counted"),
        ("params/fc", Batching(2), "the first layer is trained"),
    ],
)
def test_what_cannot_be_kept_is_said_or_refused(model, batching, words):
    model, mesh = ff.with_frozen(NETWORK, model, VARIABLES), ff.make_mesh(1)
    table = data().dataset
    kept = keep_features(model, table, batching, mesh, AUTO)
    assert kept.table is table
    assert words in kept.text
    with pytest.raises(ValueError, match=f"features must be auto or off.*{words}"):
        keep_features(model, table, batching, mesh, DEVICE)


def test_auto_takes_the_devices_then_the_host_then_images(monkeypatch):
    model, mesh = ff.with_frozen(NETWORK, PATTERN, VARIABLES), ff.make_mesh(1)
    table, found = data().dataset, []
    for device, host in ((2**30, 2**30), (0, 2**30), (0, 0)):
        monkeypatch.setattr(
            feature_cache.meshes, "free_bytes", lambda mesh, n=device: n
        )
        monkeypatch.setattr(feature_cache.meshes, "free_host_bytes", lambda n=host: n)
        found.append(keep_features(model, table, Batching(2), mesh, AUTO))
    kinds = [type(kept.table).__name__ for kept in found]
    assert kinds == ["Dataset", "Stream", "Dataset"]
    assert found[2].table is table
    assert "do not fit" in found[2].text


def test_features_of_streamed_images_are_the_same():
    model, mesh = ff.with_frozen(NETWORK, PATTERN, VARIABLES), ff.make_mesh(1)
    images = data().dataset.images
    streamed = stream(lambda rows: images[rows], data().dataset.labels)
    tables = [
        keep_features(model, table, FLIP, mesh, DEVICE).table
        for table in (streamed, data().dataset)
    ]
    chex.assert_trees_all_close(*(table.inputs for table in tables), rtol=1e-5)


class Swapped(nn.Module):
    """Pixels first, then examples, between a frozen layer and a trained one."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4, name="first")(x.reshape(len(x), -1, 3))
        return nn.Dense(3, name="last")(jnp.swapaxes(x, 0, 1)).mean(0)


def test_features_whose_first_axis_is_not_the_examples_are_not_kept():
    network = from_linen(Swapped(), SIDE, 3)
    model = ff.with_frozen(network, "params/first", network.init(jax.random.key(0)))
    kept = keep_features(model, data().dataset, Batching(2), ff.make_mesh(1), AUTO)
    assert "an example depends on its batch" in kept.text


def test_auto_keeps_as_much_as_its_key_says_and_a_full_disk_is_one_line(
    tmp_path, monkeypatch
):
    model = ff.with_frozen(SMALL, "params/conv1", SMALL.init(jax.random.key(0)))
    keep = lambda storage: keep_features(
        model, data().dataset, Batching(2), ff.make_mesh(1), storage
    )
    size = keep(DEVICE).table.inputs["features"].nbytes / 2**30
    assert "kept: " in keep(AUTO._replace(gib=size)).text
    assert "do not fit" in keep(AUTO._replace(gib=0.99 * size)).text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(ValueError, match="features must fit on the disk of"):
        keep(DISK)
    assert not [*tmp_path.rglob("*.npy")]


def test_planned_features_have_the_shapes_of_computed_ones():
    model = ff.with_frozen(SMALL, "params/conv1", SMALL.init(jax.random.key(0)))
    parts = model, data().dataset, FLIP, ff.make_mesh(1), DEVICE
    planned, found = keep_features(*parts, is_planned=True), keep_features(*parts)
    chex.assert_trees_all_equal_shapes_and_dtypes(planned.table, found.table)
    assert not planned.table.inputs["features"].any()
