"""The network of a config, tried before anything is trained."""

import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.tasks.network import network_of

SHAPE = (4, 4, 1)


def test_a_network_that_cannot_run_is_refused_with_its_settings(monkeypatch):
    def broken(*given):
        raise TypeError("no such axis")

    made = MODELS["mlp"](SHAPE, num_classes=3)._replace(apply=broken, features=None)
    monkeypatch.setitem(MODELS, "broken", lambda image_shape: made)
    message = "config.model must be usable as .*'broken'.*got TypeError: no such axis"
    with pytest.raises(ValueError, match=message):
        network_of({"name": "broken"}, SHAPE)
