"""Data-parallel central training against the same steps on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.central.settings import rate_schedule
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.central import central
from fedfr_jax.stream import stream
from fedfr_jax.types import Dataset
from tests.federated import toys


def centred_loss(variables, batch, key):
    """Linear softmax without batch statistics: a mean over examples."""
    del key
    x = batch.images.reshape(len(batch.images), -1)
    logits = x @ variables["params"]["head"]["kernel"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[:, None], 1)
    return -picked.mean(), (variables["batch_stats"], {})


def train(num_devices, loss_fn, epochs=2, memory=0):
    table, _ = toys.problem()
    table = Dataset.labelled(table.images, np.minimum(table.labels, 2))
    if memory:
        images = table.images
        table = stream(lambda rows: images[rows], table.labels, memory=memory)
    mesh = make_mesh(num_devices)
    trainer = central(
        loss_fn,
        optax.sgd(0.1, momentum=0.9),
        toys.feed(batch_size=8),
        mesh,
        first_row=4,
        num_rows=30,
        seed=0,
    )
    state = trainer.init(toys.norm_variables())
    for epoch in range(epochs):
        state, metrics = trainer.epoch(state, table, jnp.int32(epoch))
    return jax.device_get(state), metrics


def test_devices_together_do_what_one_does():
    one, metrics_one = train(1, centred_loss)
    four, metrics_four = train(4, centred_loss)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, four.variables["params"], one.variables["params"])
    close(metrics_four["loss"], metrics_one["loss"])


def test_batch_statistics_are_each_devices_own():
    one, _ = train(1, toys.norm_loss, epochs=1)
    four, _ = train(4, toys.norm_loss, epochs=1)
    # The mean of parts is the mean of the whole, so the running means agree ...
    mean = lambda s: s.variables["batch_stats"]["mean"]
    np.testing.assert_allclose(mean(four), mean(one), rtol=1e-4, atol=1e-6)
    # ... but each device centred its own part: this is not SyncBN.
    kernel = lambda s: s.variables["params"]["head"]["kernel"]
    assert np.abs(kernel(four) - kernel(one)).max() > 1e-4


@pytest.mark.parametrize(
    "num_devices, steps",
    [
        (1, 1),
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(1, 9, marks=pytest.mark.slow),
        (4, 9),
    ],
)
def test_streamed_images_train_alike(num_devices, steps):
    """Three steps an epoch, in pieces of one, of two, and at once."""
    memory = steps * 2 * (8 // num_devices) * 68
    expected, metrics = train(num_devices, toys.norm_loss)
    actual, streamed = train(num_devices, toys.norm_loss, memory=memory)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, actual, expected)
    jax.tree.map(close, streamed, metrics)


def test_rates_warm_up_and_drop_at_milestones():
    rate = rate_schedule(
        learning_rate=1.0, warmup=0.1, milestones=(0.5, 0.8), total=100
    )
    got = [float(rate(i)) for i in (0, 5, 10, 49, 51, 79, 81)]
    np.testing.assert_allclose(got, [0, 0.5, 1, 1, 0.1, 0.1, 0.01], rtol=1e-6)
    cosine = rate_schedule(learning_rate=1.0, warmup=0.0, milestones=(), total=100)
    np.testing.assert_allclose(float(cosine(50)), 0.5, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [6, 40])
def test_a_batch_that_does_not_fit_is_refused(batch_size):
    with pytest.raises(ValueError, match="pretrain.batch_size must be a multiple of 4"):
        central(
            toys.norm_loss,
            optax.sgd(0.1),
            toys.feed(batch_size=batch_size),
            make_mesh(4),
            first_row=0,
            num_rows=30,
            seed=0,
        )
