"""Conversion keeps every number, and says what does not fit."""

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import from_torch, to_torch

SHAPE = (30, 44, 3)
SETTINGS = {"widths": (4, 6, 8), "blocks": (1, 4, 2), "embedding_dim": 10}
families = pytest.mark.parametrize("name", ["sphereface", "iresnet"])


def _variables(name):
    model = MODELS[name](SHAPE, **SETTINGS)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    # Every entry another value, so that no permutation goes unnoticed.
    drawn = [rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(structure, drawn)


@families
def test_there_and_back_is_the_identity(name):
    variables = _variables(name)
    state_dict = to_torch(name, variables, SHAPE, **SETTINGS)
    back = from_torch(name, state_dict, SHAPE, **SETTINGS)
    jax.tree.map(np.testing.assert_array_equal, back, variables)


@families
def test_batch_counters_are_dropped(name):
    state_dict = to_torch(name, _variables(name), SHAPE, **SETTINGS)
    state_dict["bn1.num_batches_tracked"] = np.array(7)
    from_torch(name, state_dict, SHAPE, **SETTINGS)


@families
def test_missing_and_unknown_tensors_are_named(name):
    state_dict = to_torch(name, _variables(name), SHAPE, **SETTINGS)
    state_dict["surprise.weight"] = state_dict.pop("layer2.3.conv1.weight")
    with pytest.raises(ValueError, match="layer2.3.conv1.weight.*surprise.weight"):
        from_torch(name, state_dict, SHAPE, **SETTINGS)


@families
def test_tensors_of_another_shape_are_named(name):
    state_dict = to_torch(name, _variables(name), SHAPE, **SETTINGS)
    state_dict["fc.weight"] = state_dict["fc.weight"][:, :-1]
    with pytest.raises(ValueError, match=r"fc.weight \(10, 191\) instead of \(10, 192"):
        from_torch(name, state_dict, SHAPE, **SETTINGS)


def test_a_trained_frozen_scale_is_refused():
    state_dict = to_torch("iresnet", _variables("iresnet"), SHAPE, **SETTINGS)
    state_dict["features.weight"] = 2 * state_dict["features.weight"]
    with pytest.raises(ValueError, match="features.weight must be all ones"):
        from_torch("iresnet", state_dict, SHAPE, **SETTINGS)


def test_variables_of_another_model_are_refused():
    with pytest.raises(ValueError, match="variables must be those of this sphereface"):
        to_torch("sphereface", _variables("iresnet"), SHAPE, **SETTINGS)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="'sphereface', 'iresnet', 'resnet'., got 'cnn'"
    ):
        from_torch("cnn", {}, SHAPE)
