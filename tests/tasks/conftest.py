"""A small set of images with masks, and a config that trains on it."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

SIZE, NUM_TRAIN, NUM_TEST = (12, 16), 22, 10


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def picture(rng):
    """Stripes of three classes, each of a color of its own under noise, and void."""
    mask = np.full(SIZE, rng.integers(3), np.uint8)
    mask[:, rng.integers(4, 12) :] = rng.integers(3)
    image = rng.integers(0, 80, (*SIZE, 3))
    for number in range(3):
        image[mask == number, number] += 160
    mask[rng.integers(12)] = 255
    return image.astype(np.uint8), mask


@pytest.fixture(scope="session")
def mask_set(tmp_path_factory):
    """A zip of images/ and masks/, with a test part."""
    path = tmp_path_factory.mktemp("stripes") / "stripes.zip"
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(NUM_TRAIN + NUM_TEST):
            image, mask = picture(rng)
            part = "" if i < NUM_TRAIN else "test/"
            archive.writestr(f"images/{part}{i}.png", png(image))
            archive.writestr(f"masks/{part}{i}.png", png(mask))
    return path


@pytest.fixture
def config(mask_set):
    """config(**sections): three clients, a tiny segmenter and FedAvg."""

    def make(**sections):
        return {
            "task": "segmentation",
            "seed": 0,
            "data": {
                "name": "image_masks",
                "path": str(mask_set),
                "classes": ["red", "green", "blue"],
            },
            "partition": {
                "name": "dirichlet",
                "num_clients": 3,
                "alpha": 1.0,
                "min_examples": 4,
            },
            "model": {
                "encoder": {
                    "name": "resnet",
                    "stem": "cifar",
                    "blocks": (1, 1),
                    "widths": (4, 4),
                },
                "width": 4,
            },
            "federation": {
                "rounds": 4,
                "local_epochs": 8,
                "batch_size": 4,
                "flip_probability": 0.5,
                "evaluate_every": 2,
            },
            "evaluation": {"batch_size": 4, "num_visualized": 2},
            "methods": {"fedavg": {"learning_rate": 0.3}},
            **sections,
        }

    return make
