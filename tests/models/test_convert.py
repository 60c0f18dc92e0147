"""Conversion keeps every number, and says what does not fit."""

import functools
import types

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import from_torch, to_torch

SHAPE = (30, 44, 3)
SETTINGS = {"widths": (4, 6), "blocks": (1, 4), "embedding_dim": 10}
families = pytest.mark.parametrize("name", ["sphereface", "iresnet"])


@functools.cache
def _variables(name):
    model = MODELS[name](SHAPE, **SETTINGS)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    # Every entry another value, so that no permutation goes unnoticed.
    drawn = [rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(structure, drawn)


@functools.cache
def _state_dict(name):
    return types.MappingProxyType(to_torch(name, _variables(name), SHAPE, **SETTINGS))


@families
def test_there_and_back_is_the_identity_and_batch_counters_are_dropped(name):
    state_dict = {**_state_dict(name), "bn1.num_batches_tracked": np.array(7)}
    back = from_torch(name, state_dict, SHAPE, **SETTINGS)
    jax.tree.map(np.testing.assert_array_equal, back, _variables(name))


@families
def test_missing_and_unknown_tensors_are_named(name):
    state_dict = {**_state_dict(name)}
    state_dict["surprise.weight"] = state_dict.pop("layer2.3.conv1.weight")
    with pytest.raises(ValueError, match="layer2.3.conv1.weight.*surprise.weight"):
        from_torch(name, state_dict, SHAPE, **SETTINGS)


def test_tensors_of_another_shape_are_named():
    weight = _state_dict("sphereface")["fc.weight"][:, :-1]
    state_dict = {**_state_dict("sphereface"), "fc.weight": weight}
    with pytest.raises(ValueError, match=r"fc.weight \(10, 527\) instead of \(10, 528"):
        from_torch("sphereface", state_dict, SHAPE, **SETTINGS)


def test_a_trained_frozen_scale_is_refused():
    scale = 2 * _state_dict("iresnet")["features.weight"]
    state_dict = {**_state_dict("iresnet"), "features.weight": scale}
    with pytest.raises(ValueError, match="features.weight must be all ones"):
        from_torch("iresnet", state_dict, SHAPE, **SETTINGS)
