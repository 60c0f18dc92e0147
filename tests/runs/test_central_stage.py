"""A central stage that is killed goes on to the same bits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import manifest
from fedfr_jax.central.settings import Training
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.central_stage import train_central
from fedfr_jax.runs.checkpoint import checkpoint_numbers
from fedfr_jax.runs.trackers import open_sinks
from fedfr_jax.types import CentralTrainer, Dataset
from tests.federated import toys


def trainer(num_reads):
    """Four epochs of three pieces; the reader dies after `num_reads` of them."""
    table, reads = toys.problem()[0], []

    def read(rows):
        reads.append(rows)
        if len(reads) > num_reads:
            raise KeyboardInterrupt
        return table.images[rows]

    return CentralTrainer(
        settings=Training(epochs=4, batch_size=8),
        dataset=stream(read, np.minimum(table.labels, 2), memory=2 * 4 * 68),
        first_row=4,
        num_rows=30,
        batching=toys.feed(batch_size=8),
        loss=toys.norm_loss,
        init=lambda key: toys.norm_variables(),
        global_model=lambda variables: variables,
        apply_global=None,
    )


def spoiled(is_loss_bad):
    """Whose second epoch ends with a bad number: the loss, or its slope alone."""
    rng, begun = np.random.default_rng(0), []
    images = rng.normal(size=(17, *toys.SHAPE)).astype(np.float32)
    labels = np.append(np.arange(16) % 2, 2).astype(np.int32)

    def order(name, steps):  # class 2 waits for the last step of the second epoch
        begun.append(name)
        places = np.arange(steps * 8, dtype=np.int32).reshape(steps, 8) % 16
        if len(begun) == 2:
            places[-1] = 16
        return places

    def loss(variables, batch, key):
        value, aux = toys.norm_loss(variables, batch, key)
        is_bad, zero = (batch.labels == 2).any(), 0 * variables["params"]["scale"].sum()
        value += jnp.sqrt(jnp.where(is_bad, zero, 1 + zero))  # steep at 0
        return jnp.where(is_bad & is_loss_bad, jnp.nan, value), aux

    dataset = Dataset.from_arrays(images, labels)
    given = trainer(10**6)._replace(dataset=dataset, first_row=0, num_rows=17)
    return given._replace(batching=Batching(8), loss=loss, batch_order=order)


@pytest.mark.parametrize(
    "is_loss_bad, what",
    [(True, "loss of epoch 2"), (False, "parameters after epoch 2")],
)
def test_an_epoch_with_a_bad_number_is_not_kept(is_loss_bad, what, tmp_path):
    folder = tmp_path / "pretrained"
    message = f"{what} must be finite, .*checkpoint 1 is good.*--overwrite=pretrained"
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(FloatingPointError, match=message),
    ):
        with open_sinks(folder, 4, 0) as sinks:
            train_central(
                spoiled(is_loss_bad), make_mesh(1), folder, seed=3, sinks=sinks
            )
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_killed_stage_resumes_to_the_same_bits(tmp_path):
    def train(name, num_reads):
        with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
            folder = tmp_path / name
            first = max(checkpoint_numbers(folder), default=0)
            with open_sinks(folder, 4, first) as sinks:
                return train_central(
                    trainer(num_reads), make_mesh(2), folder, seed=3, sinks=sinks
                )

    often = 10**6
    whole = train("whole", often)
    with pytest.raises(KeyboardInterrupt):  # within the third epoch
        train("killed", 1 + 2 * 6 + 2)
    resumed = train("killed", often)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    logs = (tmp_path / x / "metrics.jsonl" for x in ("whole", "killed"))
    rows = [[json.loads(x) for x in log.read_text().splitlines()] for log in logs]
    keep = lambda row: {k: x for k, x in row.items() if not k.endswith("_per_second")}
    assert [*map(keep, rows[0])] == [*map(keep, rows[1])]
    log = tmp_path / "killed" / "metrics.jsonl"
    assert manifest.read_covered(log) == log.read_bytes()
    assert "metrics.jsonl" in manifest.read(log.parent)
