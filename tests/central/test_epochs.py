"""Data-parallel central training against a plain loop, and on other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.central.batches import EpochOrder
from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import Training, scaled_learning_rate
from fedfr_jax.data.permutation import permute_on_host
from fedfr_jax.data.stream import stream
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Batch, CentralTrainer, Dataset
from tests.federated import toys

FIRST_ROW, NUM_ROWS, BATCH = 4, 30, 8
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def problem():
    """The toys' examples, of three classes."""
    table, _ = toys.problem()
    return Dataset.from_arrays(table.images, np.minimum(table.labels, 2))


def epochs_of(loss_fn, num_devices, batch_size=BATCH):
    trainer = CentralTrainer(
        settings=Training(batch_size=batch_size),
        dataset=None,
        first_row=FIRST_ROW,
        num_rows=NUM_ROWS,
        batching=toys.feed(batch_size=batch_size),
        loss=loss_fn,
        init=None,
        global_model=None,
        apply_global=None,
    )
    return build_epochs(trainer, make_mesh(num_devices), 0, optimizer=OPTIMIZER)


def train(num_devices, loss_fn, epochs=2, memory=0):
    table = problem()
    if memory:
        images = table.images
        table = stream(lambda rows: images[rows], table.labels, memory=memory)
    trainer = epochs_of(loss_fn, num_devices)
    state = trainer.init(toys.norm_variables())
    for epoch in range(epochs):
        state, metrics = trainer.run(state, table, epoch)
    return jax.device_get(state), metrics


def parts_of(epoch, step, num_devices):
    """Each device's part of a batch, made of the permutation and the feed alone."""
    order = EpochOrder(FIRST_ROW, NUM_ROWS, BATCH, num_devices, seed=0)
    shuffled = permute_on_host(order.word(epoch), np.arange(NUM_ROWS), NUM_ROWS)
    rows = FIRST_ROW + shuffled[step * BATCH : (step + 1) * BATCH]
    inputs, targets, view = toys.feed().augment_batch(
        jax.random.fold_in(order.key(epoch), 2),
        jnp.int32(step),
        jnp.arange(BATCH, dtype=jnp.int32),
        *jax.tree.map(lambda x: jnp.asarray(x[rows]), tuple(problem())),
    )
    valid, none = np.ones(BATCH, bool), np.zeros(BATCH, np.int32)
    whole = Batch(inputs, targets, none, valid, valid, rows, rows, view)
    parts = np.split(np.arange(BATCH), num_devices)
    return [jax.tree.map(lambda x, part=part: x[part], whole) for part in parts]


def test_epochs_are_those_of_a_plain_loop(num_devices=4):
    def loss(params, stats, batch):
        variables = {"params": params, "batch_stats": stats}
        return toys.norm_loss(variables, batch, None)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    params, stats = toys.norm_variables().values()
    opt_state, losses = OPTIMIZER.init(params), []
    for epoch in range(2):
        for step in range(NUM_ROWS // BATCH):
            parts = parts_of(epoch, step, num_devices)
            found = [gradient(params, stats, part) for part in parts]
            mean = jax.tree.map(lambda *x: sum(x) / num_devices, *found)
            (value, (stats, _)), grads = mean
            updates, opt_state = OPTIMIZER.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            losses.append(value)
    state, metrics = train(num_devices, toys.norm_loss)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, state.variables, {"params": params, "batch_stats": stats})
    close(metrics["loss"], np.mean(losses[3:]))


def test_an_epoch_takes_rows_once_in_another_order():
    order = EpochOrder(FIRST_ROW, NUM_ROWS, BATCH, 2, seed=0)
    taken = [order.rows(order.word(epoch), 0, 3).ravel() for epoch in range(2)]
    for rows in taken:
        assert len(set(rows)) == 24 and set(rows) < {*range(4, 34)}
    assert taken[0].tolist() != taken[1].tolist()
    # A piece in the middle is read alone; behind the end there is a row of the epoch.
    later = order.rows(order.word(0), 2, 2)
    whole = order.rows(order.word(0), 0, 3)
    np.testing.assert_array_equal(later[:, 0], whole[:, 2])
    assert set(later[:, 1].ravel()) < {*range(4, 34)}


def test_batch_statistics_are_each_devices_own():
    one, _ = train(1, toys.norm_loss, epochs=1)
    four, _ = train(4, toys.norm_loss, epochs=1)
    # The mean of parts is the mean of the whole, so the running means agree ...
    mean = lambda s: s.variables["batch_stats"]["mean"]
    np.testing.assert_allclose(mean(four), mean(one), rtol=1e-4, atol=1e-6)
    # ... but each device centered its own part: this is not SyncBN.
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


def test_rates_are_those_of_two_strong_re_identification_codes(golden):
    """BoT's by whole epochs; fast-reid's by steps, whose drops wait for the warm-up."""
    arrays, steps = golden("reid_more"), 202
    at = lambda rate, step: [float(rate(e * steps + step)) for e in range(120)]
    given = {"epochs": 120, "batch_size": 1, "learning_rate": 3.5e-4}
    bot = Training(
        **given,
        **{
            "schedule_unit": "epoch",
            "warmup_fraction": 10 / 120,
            "warmup_start_factor": 0.01,
        },
        milestones=(40 / 120, 70 / 120),
    )
    rate = scaled_learning_rate(bot, steps)
    for step in (0, 100, steps - 1):
        np.testing.assert_allclose(
            at(rate, step), arrays["lr_bot_epoch1_120"], rtol=1e-5
        )
    warmup = 2000 / (120 * steps)
    fast = Training(
        **given,
        warmup_fraction=warmup,
        warmup_start_factor=0.1,
        milestones=(49 / 120, 99 / 120),
    )
    for step, name in ((0, "first"), (steps - 1, "last")):
        wanted = arrays[f"lr_fastreid_market_epoch_{name}"]
        np.testing.assert_allclose(
            at(scaled_learning_rate(fast, steps), step), wanted, rtol=1e-5
        )
