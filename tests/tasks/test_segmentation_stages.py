"""A small experiment from a config: what it trains, shows, and refuses."""

import json
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from fedfr_jax.config.build import build, parse
from fedfr_jax.data.augment import normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.experiment import evaluate_experiment, run_experiment
from fedfr_jax.runs.stages import load_models
from fedfr_jax.tasks.data import open_data, split_classes
from fedfr_jax.tasks.evaluators import build_feature_fn
from fedfr_jax.tasks.segmentation import build_segmenter, with_masks
from fedfr_jax.types import IGNORE_INDEX, Evaluation, Evaluator

pytestmark = pytest.mark.ci

RATE = {"learning_rate": 0.3}
METHODS = {
    "fedavg": RATE,
    "head": {**RATE, "personal": {"blocks": 1}},
    "central": {"kind": "central", "epochs": 20, "batch_size": 8, **RATE},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def finished(config, folder, plots):
    """(experiment, its folder, its numbers), trained by the first who asks."""
    given = config(methods=METHODS)
    given["federation"] |= {"evaluate_every": 4}  # once, at the end
    experiment = build(given)
    done = folder / "summary.json"
    if not done.exists():
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            run_experiment(experiment, folder)
    return experiment, folder, json.loads(done.read_text())["methods"]


@pytest.mark.slow
def test_every_row_learns_and_is_judged_where_it_has_a_network(finished):
    experiment, folder, found = finished
    assert found["fedavg"]["generic"]["mIoU"] > 0.8
    assert found["central"]["generic"]["mIoU"] > 0.4  # one class everywhere: < 0.3
    assert not found["head"]["generic"] and found["head"]["personalized"]["mIoU"] > 0.8
    assert found["head"]["iou"].keys() == {"red", "green", "blue"}
    again = evaluate_experiment(experiment, folder)["methods"]
    assert again == found
    rows = (folder / "fedavg" / "metrics.jsonl").read_text().splitlines()
    assert "generic/mIoU" in json.loads(rows[-1]) and "iou/red" not in rows[-1]


def test_a_run_says_which_files_of_its_data_it_does_not_read(config, tmp_path):
    given = config()
    path = shutil.copy(given["data"]["path"], tmp_path / "more.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("images/notes", b"of nobody")
        archive.writestr("other/x.png", b"unread")
    given["data"]["path"] = str(path)
    task = build(given).task
    said = f"passed over in {path}: 1 of the images (first "
    said += "other/x.png), 1 without a suffix (first images/notes)"
    assert task.data_report_text.endswith(f"\n{said}") and task.data_report[
        "passed_over"
    ] == [said]
    assert "passed_over" not in build(config()).task.data_report


@pytest.mark.slow
def test_pictures_of_every_row_are_drawn(finished):
    _, folder, _ = finished
    paths = sorted((folder / "pictures").glob("*.png"))
    assert [path.name for path in paths] == [
        f"{name}_pictures_test_images.png" for name in sorted(METHODS)
    ]
    for path in paths:
        pixels = np.asarray(Image.open(path))[..., :3].reshape(-1, 3)
        assert (pixels == [128, 0, 0]).all(1).mean() > 0.01  # class 1 of the palette
    assert (folder / "rounds.png").exists()


def test_features_of_pixels_are_those_of_the_map_that_are_not_void(config):
    given = config(evaluation={"num_visualized": 0, "target_miou": 0.5})
    evaluators = build(given).task.evaluators
    assert all(of.targets == {"mIoU": 0.5} for of in evaluators.values())
    parsed = parse(given)
    source = open_data(parsed.data)
    test = with_masks(
        source, split_classes(parsed.partition, source)[0].test.rows, None
    )
    num_classes = len(source.masks.class_names)
    model = build_segmenter(parsed.model.network, source.input_shape, num_classes)
    variables = jax.jit(model.init)(jax.random.key(0))
    look = lambda table, most: build_feature_fn(
        model, table, make_mesh(1), Batching(4, normalize()), most
    )
    images = np.float32(test.images) / np.float32(127.5) - 1
    truth = test.targets["mask"][:, ::2, ::2]  # the map is half as large
    run = jax.jit(lambda x: model.apply_with_features(x, images, False))
    logits, features, _ = map(np.asarray, run(variables))
    expected = [truth, features, logits[:, ::2, ::2]]
    for found, wanted in zip(look(test, 10**6)(variables), expected, strict=True):
        wanted = wanted[truth != IGNORE_INDEX]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    labels, some, _ = look(test, 60)(variables)  # 20 pixels of each of three images
    assert 30 < len(labels) == len(some) <= 60
    of = lambda mask: test._replace(targets={**test.targets, "mask": mask})
    shape = test.targets["mask"].shape
    columns = np.broadcast_to(np.arange(shape[2], dtype=np.uint8) % 3, shape)
    # Not of one column alone
    assert set(look(of(columns), 60)(variables)[0]) == {0, 1, 2}
    with pytest.raises(
        ValueError, match="needs at least 2 test images or pixels .* got 0"
    ):
        look(of(np.full(shape, IGNORE_INDEX, np.uint8)), 60)


@pytest.mark.slow
def test_another_run_is_a_reference_by_its_folder(config, finished):
    """Its config may leave out the name of the network, as this one does."""
    experiment, folder, _ = finished
    (folder / "config.json").write_text(json.dumps(config(methods=METHODS)))
    told = {"reference": str(folder)}
    beside = build(config(evaluation={"num_visualized": 0, "representation": told}))
    central = load_models(experiment, "central", folder)  # the last row
    found = beside.task.evaluators["representation"].evaluate(central).metrics
    assert abs(found["mmd"]) < 1e-6 < found["amm"]


def test_a_round_is_a_plain_loop_over_clients(config, tmp_path):
    """Whole clients as batches, so that no order matters; some clients are padded."""
    given = config()
    given["federation"] = {
        "rounds": 1,
        "local_epochs": 3,
        "batch_size": 22,
        "flip_probability": 0.0,
    }
    given["model"] |= {"norm": "group", "norm_groups": 2}
    given["partition"] |= {"num_clients": 2}
    given["methods"] = {"fedavg": {**RATE, "momentum": 0.9}}
    experiment, kept = build(given), []
    keep = Evaluator(lambda networks: kept.append(networks.variables) or Evaluation())
    task = experiment.task._replace(evaluators={"keep": keep})
    run_experiment(experiment._replace(task=task), tmp_path)
    start = experiment.stages["fedavg"].trainer.init_variables(None)
    apply = experiment.stages["fedavg"].trainer.apply
    expected = plain_round(apply, start, task.dataset, task.population.offsets)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4),
        kept[-1]["params"],
        expected,
    )


def plain_round(apply, start, dataset, offsets):
    """Parameters after a round of FedAvg, written again without the library's loss."""
    optimizer, sizes, total = optax.sgd(0.3, momentum=0.9), np.diff(offsets), None
    assert len(set(sizes)) > 1

    @jax.jit
    @jax.grad
    def gradient(params, images, mask):
        logits = apply({"params": params, "batch_stats": {}}, images)
        log_p = jax.nn.log_softmax(logits)
        parts = [jnp.where(mask == c, log_p[..., c], 0).sum() for c in range(3)]
        return -sum(parts) / (mask != IGNORE_INDEX).sum().astype(jnp.float32)

    for low, high in zip(offsets[:-1], offsets[1:], strict=True):
        images = dataset.images[low:high].astype(np.float32) / 127.5 - 1
        mask = dataset.targets["mask"][low:high].astype(np.int32)
        params = start["params"]
        state = optimizer.init(params)
        for _ in range(3):
            grads = gradient(params, jnp.asarray(images), mask)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        part = optax.tree.scale(float((high - low) / sizes.sum()), params)
        total = part if total is None else optax.tree.add(total, part)
    return total


def augmented(feed, images, mask):
    """A batch as a step of training sees it."""

    @jax.jit
    def run(number, images, mask):
        given = jax.random.key(1), 0, number, {"image": images}, {"mask": mask}
        return feed.augment_batch(*given)[:2]

    return run(np.arange(len(images), dtype=np.int32), images, mask)


def test_augmentations_of_the_config_move_the_mask_with_the_image(config):
    crop = {"name": "pad_and_crop", "padding": 3, "fill": 0}
    given = config()
    given["federation"] |= {"flip_probability": 1.0, "augment": (crop,)}
    feed = build(given).batching
    mask = np.random.default_rng(0).integers(0, 3, (2, 12, 16), np.uint8)
    images = np.repeat(20 * mask[..., None] + 10, 3, axis=-1).astype(np.uint8)
    inputs, targets = augmented(feed, images, mask)
    values = np.rint((np.asarray(inputs["image"]) + 1) * 127.5)[..., 1]
    moved = np.asarray(targets["mask"])
    assert (moved == IGNORE_INDEX).any() and moved.dtype == np.uint8
    np.testing.assert_array_equal(
        values, np.where(moved == IGNORE_INDEX, 0, 20 * moved + 10)
    )
    assert (moved[:, 3:-3, 3:-3] != mask[:, 3:-3, 3:-3]).any()


def test_facts_and_targets_are_of_images_and_of_pixels(config):
    task = build(config()).task
    assert task.data_report["images"] == {"train": 22, "test": 10}
    assert task.data_report["pixel_classes"] == ["red", "green", "blue"]
    assert task.dataset.targets["mask"].shape == (22, 12, 16)
    counts = np.array(task.data_report["table"]["train"])
    labels = task.dataset.labels
    assert counts.sum(0).tolist() == np.bincount(labels).tolist()
    np.testing.assert_array_equal(counts.sum(1), np.diff(task.population.offsets))
