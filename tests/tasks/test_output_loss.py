"""A registered loss of outputs is found by its name, and nothing else is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import softmax

from fedfr_jax.losses import LOSSES
from fedfr_jax.parts import parse
from fedfr_jax.tasks.methods import LossReader

CLASSES = 3


def focal(*, gamma: float = 2.0):
    """Lin et al. 2017: cross-entropy times (1 - p)^gamma."""

    def loss(outputs, targets):
        values = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return values * (1 - jnp.exp(-values)) ** gamma

    return loss


def read(settings):
    """The loss on outputs that a config names."""
    kept = LossReader(focal, lambda model, loss: loss)
    model = SimpleNamespace(embedding_dim=CLASSES)
    return parse(kept, settings, "config.loss")(model)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """`focal`, until the test has ended."""
    monkeypatch.setitem(LOSSES, "focal", focal)


def test_a_loss_goes_by_its_name_and_takes_settings():
    outputs = np.random.default_rng(0).normal(size=(2, 4, CLASSES)).astype(np.float32)
    targets = np.arange(8).reshape(2, 4) % CLASSES
    p = np.take_along_axis(softmax(outputs, axis=-1), targets[..., None], -1)[..., 0]
    for settings, gamma in (({}, 2.0), ({"gamma": 0.5}, 0.5)):
        loss = read({"name": "focal", **settings})
        values = jax.jit(loss)(outputs, targets)
        np.testing.assert_allclose(values, -((1 - p) ** gamma) * np.log(p), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"name": "fokal"}, r"loss.name must be .*'focal'.*\], got 'fokal'"),
        (
            {"name": "cosface"},
            "loss on logits, got 'cosface', a margin loss on cosines, which",
        ),
        ({"name": "focal", "gama": 1.0}, "loss must have keys of .*did you mean gamma"),
        ({"name": "focal", "gamma": "x"}, "loss.gamma must be a finite number, got"),
        ({"name": "needs"}, "loss needs the key gamma"),
        (
            {"name": "mean"},
            r"must return one value per example.* for two, got \(\)",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(settings, rule, monkeypatch):
    mean = lambda: lambda outputs, targets: focal()(outputs, targets).mean()
    monkeypatch.setitem(LOSSES, "mean", mean)
    monkeypatch.setitem(LOSSES, "needs", lambda *, gamma: focal(gamma=gamma))
    with pytest.raises(ValueError, match=rule):
        read(settings)
