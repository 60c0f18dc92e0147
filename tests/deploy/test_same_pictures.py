"""A picture file has the same embedding in a run's evaluation and in use."""

import numpy as np
import pytest
from PIL import Image

import fedfr_jax as ff
from fedfr_jax.config.build import build
from fedfr_jax.deploy.face_images import read_images
from fedfr_jax.evaluation.retrieval import (
    IdentityLabels,
    cosines,
    rank_gallery,
    summary,
)
from fedfr_jax.runs.stages import load_models
from fedfr_jax.runs.workdir import stored_config
from fedfr_jax.schema import with_tuples
from fedfr_jax.types import Preprocessing
from tests.deploy.conftest import play

pytestmark = pytest.mark.ci

SIZE = (28, 36)  # W, H of the pictures: no multiple of the network's
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def picture(person, number, size):
    """A person's colors, with noise of the picture's own."""
    rng = np.random.default_rng(person)
    base = rng.integers(256, size=(5, 4, 3))
    noise = np.random.default_rng(99 * person + number).normal(0, 70, base.shape)
    small = Image.fromarray((base + noise).clip(0, 255).astype(np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC)


def names_of(part, people, number, shift=0):
    """[(path below the set, person, camera)]."""
    found = []
    for person in people:
        for i in range(number):
            camera = 1 + (i + shift) % 2
            name = f"{part}/{person:04}_c{camera}s1_{i}{shift}.png"
            found.append((name, person, camera))
    return found


@pytest.fixture(scope="module")
def reid(tmp_path_factory):
    """(folder of a run with ImageNet's statistics, queries, gallery)."""
    path = tmp_path_factory.mktemp("reid")
    queries = names_of("query", range(5, 13), 1)
    gallery = names_of("bounding_box_test", range(5, 13), 3, shift=1)
    for name, person, _ in [
        *names_of("bounding_box_train", range(1, 5), 4),
        *(queries + gallery),
    ]:
        (path / name).parent.mkdir(exist_ok=True)
        number = sum(map(ord, name)) % 97
        picture(person, number, SIZE).save(path / name)
    config = {
        "task": "reid",
        "seed": 0,
        "data": {"name": "market1501", "path": str(path), "image_size": [32, 16]},
        "partition": {"name": "by_camera"},
        "model": {
            **{"name": "reid", "depth": 18, "blocks": [1], "widths": [4]},
            # As many features as there are people: features and logits look alike.
            **{"stem": "cifar", "neck_dim": 4, "dropout": 0.0},
        },
        "federation": {
            **{"rounds": 1, "local_epochs": 1, "batch_size": 4},
            "augment": [{"name": "normalize", "mean": MEAN, "std": STD}],
        },
        "evaluation": {"batch_size": 8, "num_visualized": 0},
        "methods": {"fedavg": {"learning_rate": 0.05}},
    }
    play(config, path / "run")
    return path, queries, gallery


def retrieval(path, queries, gallery, network, recorded):
    """Metrics by the embeddings of picture files."""

    def features(part):
        paths = [path / name for name, *_ in part]
        return read_images(paths, network.input_shape, recorded).embed(network)

    people = lambda part: IdentityLabels(*np.array([row[1:] for row in part]).T)
    scores = cosines(features(queries), features(gallery))
    return summary(
        rank_gallery(scores, people(queries), people(gallery)), ranks=(1, 5, 10)
    )


def test_a_person_is_found_by_embeddings_as_the_run_evaluates_it(reid):
    path, *parts = reid
    experiment = build(with_tuples(stored_config(path / "run")))
    found = load_models(experiment, "fedavg", path / "run")
    wanted = experiment.task.evaluators["generic"].evaluate(found).metrics
    network = ff.load_model(path / "run")
    how = Preprocessing("stretch", "bicubic", mean=MEAN, std=STD, mirrored=True)
    assert network.recorded == how
    got = retrieval(path, *parts, network, network.recorded)
    assert got == pytest.approx(wanted, abs=1e-6) and 0.1 < got["mAP"] < 0.99
    without = network._replace(recorded=None)
    assert retrieval(path, *parts, without, None)["mAP"] != pytest.approx(got["mAP"])
