"""Means over a cohort's examples, and FedDANE, which is made of one."""

import functools

import jax
import numpy as np
import pytest

from fedfr_jax.data.stream import place_examples, stream
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.algorithms.corrections import feddane
from fedfr_jax.federated.dataset_means import build_dataset_mean
from fedfr_jax.federated.local import sgd, step_decay
from fedfr_jax.federated.simulation import start_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort, LocalTraining
from tests.federated import toys
from tests.federated.test_stream import run
from tests.federated.toys import Reader, assert_close

pytestmark = pytest.mark.ci

IDS = np.array([0, 1, 2, 4])  # 24 examples, of 33 at most
ROW_BYTES = 4 * 16 + 4
BATCHES = {n: 2 * n * 4 * ROW_BYTES for n in (1, 2)}  # memory of two blocks of n


COHORTS = {"whole": IDS, "padded": np.array([0, 2, 3, 4])}
MEMORY = (None, BATCHES[1], BATCHES[2], 2**30)
QUICK = {("whole", 1, None), ("padded", 2, None), ("padded", 1, BATCHES[1])}
QUICK |= {("whole", 2, BATCHES[1]), ("padded", 2, BATCHES[2]), ("padded", 2, 2**30)}


@pytest.mark.parametrize(
    "name, devices, memory", toys.others_are_slow(QUICK, COHORTS, (1, 2), MEMORY)
)
def test_a_mean_over_a_cohort_counts_each_example_once(name, devices, memory):
    """With a last batch that is padded by the cohort's own first rows."""
    ids, (table, population) = COHORTS[name], toys.problem()
    mesh, images = make_mesh(devices), table.images
    offsets = population.offsets
    rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in ids])
    if memory:
        table = stream(Reader(images), table.labels, memory=memory)

    def value(scale, batch, key):
        del key
        valid = batch.is_valid[:, None, None, None]
        count = batch.is_valid.sum().astype(np.float32)
        own = jax.numpy.where(valid, batch.images, 0).sum(0) / count
        return scale * own, scale * batch.images.mean(0), batch.labels.mean()

    mean = build_dataset_mean(value, toys.feed(), mesh)
    found = mean(np.float32(2), place_examples(table, mesh), population, Cohort(ids, 0))
    padded = np.resize(rows, -(-len(rows) // 4) * 4)
    weight = np.clip(len(rows) - np.arange(0, len(padded), 4), 0, 4)
    of_batches = images[padded].reshape(-1, 4, *toys.SHAPE).mean(1)
    assert_close(found[0], 2 * images[rows].mean(0))
    assert_close(found[1], 2 * np.average(of_batches, axis=0, weights=weight))
    labels = toys.problem()[0].labels[padded].reshape(-1, 4).mean(1)
    assert_close(found[2], np.average(labels, weights=weight))


def build(mesh, *, memory=None, **options):
    table, _ = toys.problem()
    if memory:
        table = stream(Reader(table.images), table.labels, memory=memory, waves=1)
    local = LocalTraining(toys.norm_loss, sgd(momentum=0.9), step_decay(0.05, every=2))
    settings = {"local_epochs": (3, 2), "cohort_size": 4, "seed": 7, **options}
    sim = toys.build(feddane(local, mu=0.1), table=table, mesh=mesh, **settings)
    return sim, start_simulation(sim, toys.norm_variables())


@functools.cache
def expected():
    return run(*build((1, 1)))


@pytest.mark.parametrize(
    "mesh, options",
    [
        pytest.param((1, 1), {"memory": BATCHES[2]}, marks=pytest.mark.slow),
        ((2, 1), {"memory": BATCHES[1], "clients_per_device": 2}),
        ((1, 2), {}),
        pytest.param((2, 2), {"memory": 2**30}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_feddane_streams_and_is_cut(monkeypatch, mesh, options):
    monkeypatch.setattr(model_parallel, "SMALLEST", 16)
    found = run(*build(mesh, **options))
    assert_close(found, expected())
