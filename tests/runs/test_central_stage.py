"""A central stage that is killed goes on to the same bits."""

import jax
import numpy as np
import pytest

from fedfr_jax.central.settings import Training
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.central_stage import train_central
from fedfr_jax.stream import stream
from fedfr_jax.types import Central
from tests.federated import toys


def trainer(num_reads):
    """Four epochs of three pieces; the reader dies after `num_reads` of them."""
    table, reads = toys.problem()[0], []

    def read(rows):
        reads.append(rows)
        if len(reads) > num_reads:
            raise KeyboardInterrupt
        return table.images[rows]

    return Central(
        settings=Training(epochs=4, batch_size=8),
        dataset=stream(read, np.minimum(table.labels, 2), memory=2 * 4 * 68),
        first_row=4,
        num_rows=30,
        feed=toys.feed(batch_size=8),
        loss=toys.norm_loss,
        init=lambda key: toys.norm_variables(),
        network=lambda variables: variables,
        network_apply=None,
    )


def test_a_killed_stage_resumes_to_the_same_bits(tmp_path):
    def train(name, num_reads):
        with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
            folder = tmp_path / name
            return train_central(trainer(num_reads), make_mesh(2), folder, seed=3)

    often = 10**6
    whole = train("whole", often)
    with pytest.raises(KeyboardInterrupt):  # within the third epoch
        train("killed", 1 + 2 * 6 + 2)
    resumed = train("killed", often)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    lines = [(tmp_path / x / "metrics.jsonl").read_text() for x in ("whole", "killed")]
    assert lines[0] == lines[1]
