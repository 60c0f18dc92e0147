"""A config of every task that is small enough to build and train in a test."""

import numpy as np

from fedfr_jax.types import GALLERY, QUERY, TRAIN, Masks, Source

PEOPLE, CAMERAS, SHAPE = 10, 2, (8, 8, 3)
IDS = {"num_clients": 2, "ids_per_client": 2, "num_public_ids": 4, "num_unseen_ids": 2}
DEALT = {"name": "iid", "num_clients": 2}
SMALL = {"blocks": (1, 1), "widths": (2, 2)}
ENCODER = {"name": "resnet", "stem": "cifar", **SMALL}
TASKS = {  # sections `model` and `partition`
    "faces": ({"name": "iresnet", **SMALL, "embedding_dim": 8}, IDS),
    "classification": ({"name": "mlp", "hidden_dim": 4}, DEALT),
    "segmentation": ({"encoder": ENCODER, "width": 4}, DEALT),
    "reid": (
        {"depth": 18, "stem": "cifar", **SMALL, "neck_dim": 4},
        {"name": "by_camera"},
    ),
}


def everything() -> Source:
    """A source for every task: people, cameras, masks, training and test images."""
    each = np.meshgrid(*map(np.arange, (PEOPLE, CAMERAS, 4)), indexing="ij")
    person, camera, time = (x.reshape(-1) for x in each)
    draw = np.random.default_rng(0).integers
    images = draw(0, 256, (len(person), *SHAPE)).astype(np.uint8)
    masks = draw(0, 3, (len(person), *SHAPE[:2])).astype(np.uint8)
    tested = np.where(time == 0, QUERY, GALLERY)
    return Source(
        read=lambda rows: images[rows],
        labels=person.astype(np.int32),
        names=tuple(map(str, range(PEOPLE))),
        input_shape=SHAPE,
        cameras=camera.astype(np.int32),
        masks=Masks(lambda rows: masks[rows], ("sky", "road", "car")),
        roles=np.where(person < 8, TRAIN, tested).astype(np.uint8),
    )


def config(task: str, method: dict | None = None, **sections) -> dict:
    """A config with one method, "x"; keys of `sections` join those of the task."""
    model, partition = TASKS[task]
    settings = {
        "task": task,
        "data": {"name": "source_object", "source": everything()},
        "partition": partition,
        "model": model,
        "pretrain": {"batch_size": 16} if task == "faces" else {},
        "federation": {
            "rounds": 1,
            "local_epochs": 1,
            "batch_size": 8,
            "flip_probability": 0.0,
        },
        "evaluation": {},
    }
    for name, keys in sections.items():
        settings[name] = {**settings[name], **keys} if "name" not in keys else keys
    is_central = (method or {}).get("kind") == "central"
    rate = {"batch_size": 8} if is_central else {"learning_rate": 0.1}
    return {**settings, "methods": {"x": {**rate, **(method or {})}}}
