"""The blocks that FedPer keeps."""

import functools

import jax
import pytest

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.personal import top_blocks
from fedfr_jax.models import MODELS

pytestmark = pytest.mark.ci

SHAPE = (32, 32, 3)


@functools.cache
def _shapes(name, shape=SHAPE, **settings):
    """(model, shapes of its variables)."""
    model = MODELS[name](shape, **settings)
    return model, jax.eval_shape(model.init, jax.random.key(0))


# What FedPer's K_P keeps: the classifier, then the last blocks (its section 4.2).
KEPT = {
    "resnet": ({"depth": 34}, ("fc", *(f"stage4/block{j}" for j in (3, 2, 1)))),
    "mobilenet": ({}, ("fc", "block13", "block12", "block11")),
}


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("name", KEPT)
def test_personal_blocks_are_counted_as_fedper_counts_them(name, count):
    settings, kept = KEPT[name]
    model, variables = _shapes(name, num_classes=10, **settings)
    pattern = top_blocks(model.blocks, count)
    if count == 0:
        assert pattern == ""  # FedAvg
        return
    mask = trees.by_name(trees.matching(pattern)(variables))
    prefixes = tuple(f"{k}/{unit}/" for k in variables for unit in kept[:count])
    for path, is_kept in mask.items():
        assert is_kept == path.startswith(prefixes)
    assert sum(mask.values()) >= 2 * count
