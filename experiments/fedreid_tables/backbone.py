"""A pretrained ResNet: central training on identities that no client has.

It stands for the ImageNet weights of the paper.
"""

import pathlib

import numpy as np
from market_parts import part_of

PEOPLE = (0, 120)  # first and end of the training identities that pretrain
EPOCHS = 40
ROW = "merged"


def backbone_config(config):
    """`config`, a case's, as central training on PEOPLE by all cameras."""
    path, size = first_part(config).path, tuple(first_part(config).image_size)
    with config.unlocked():
        config = config.copy_and_resolve_references()
        cameras = (1, 2, 3, 4, 5, 6)
        config.data = part_of(path, size, config.seed, cameras, PEOPLE, (0, 150))
        config.partition = {"name": "by_camera"}
        rate = {"learning_rate": 0.05, "batch_size": 32}
        augment = config.federation.augment
        central = {"kind": "central", "epochs": EPOCHS, **rate, "augment": augment}
        config.methods = {ROW: central}
        config.evaluation = {"num_visualized": 0}
    return config


def first_part(config):
    """Section of the first of a case's parts."""
    return next(iter(config.data.sources.values()))


def with_backbone(config, folder: pathlib.Path):
    """`config` whose model starts from a backbone, trained in `folder` if missing."""
    from fedfr_jax.config.build import build
    from fedfr_jax.models.weights import write_weights
    from fedfr_jax.runs.experiment import run_stages
    from fedfr_jax.runs.stages import load_models

    path = folder / "backbone.npz"
    if not path.exists():
        experiment = build(backbone_config(config))
        run_stages(experiment, folder / "backbone")
        found = load_models(experiment, ROW, folder / "backbone").variables
        shape = experiment.task.dataset.input_shape
        write_weights(path, tensors_of(found, shape, config.model))
    with config.unlocked():
        config.model.weights = str(path)
    return config


def tensors_of(variables, input_shape, model) -> dict[str, np.ndarray]:
    """The ResNet of a `reid` network, {torchvision's name: tensor}.

    Args:
      variables: {"params", "batch_stats"}.
      input_shape: (H, W, C).
      model: section of the network, with blocks and widths.
    """
    from fedfr_jax.models.external_checkpoints import to_torch

    is_trunk = lambda name: name.startswith(("stem", "stage"))
    trunk = {
        collection: {k: v for k, v in leaves.items() if is_trunk(k)}
        for collection, leaves in variables.items()
    }
    fc = {"kernel": np.zeros((model.widths[-1], 1), np.float32)}
    trunk["params"]["fc"] = {**fc, "bias": np.zeros(1, np.float32)}
    settings = {"blocks": model.blocks, "widths": model.widths, "num_classes": 1}
    settings |= {"depth": model.depth, "stem": "imagenet"}  # that of `reid`
    return to_torch("resnet", trunk, input_shape, **settings)
