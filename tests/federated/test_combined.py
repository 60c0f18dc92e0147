"""Networks cut over devices, with lanes, streams, canonical sums and sweeps."""

import functools

import jax
import numpy as np
import pytest

from fedfr_jax.federated import model_parallel
from tests.federated import test_sweep as sweeps
from tests.federated.test_stream import build, run
from tests.federated.test_sweep import start_sweep
from tests.federated.toys import assert_close, digest

pytestmark = pytest.mark.ci

CANONICAL = {"reproducible_sum": True, "num_partial_sums": 4}
STREAM = {"streamed": {"waves": 1}}


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    """The toys' leaves are small: cut them too."""
    monkeypatch.setattr(model_parallel, "SMALLEST", 16)


@functools.cache
def whole(name):
    """Server, rows and metrics of the plain run, one device to a network."""
    return run(*build(name, (2, 1), cohort_size=5))


@pytest.mark.parametrize(
    "name, options",
    [
        ("fedavg", {"lanes": 2, **STREAM, **CANONICAL}),
        pytest.param("fedavg", {"lanes": 2}, marks=pytest.mark.slow),
        pytest.param(
            "fedfr",
            {"lanes": 2, **STREAM, **CANONICAL},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_a_cut_network_learns_what_a_whole_one_does(name, options):
    sim, server = build(name, (2, 2), cohort_size=5, **options)
    leaves = jax.tree.leaves(server)
    assert any(not leaf.sharding.is_fully_replicated for leaf in leaves)
    ours, rows, metrics = run(sim, server)
    expected, expected_rows, expected_metrics = whole(name)
    assert_close(ours, expected)
    assert_close(rows, expected_rows)
    for got, wanted in zip(metrics, expected_metrics, strict=True):
        np.testing.assert_array_equal(got[2], wanted[2])
        assert_close(got[1], wanted[1])


def test_a_single_client_device_trains_a_cut_network():
    ours, rows, _ = run(*build("fedavg", (1, 2), cohort_size=5))
    assert_close((ours, rows), whole("fedavg")[:2])


@pytest.mark.slow
@pytest.mark.usefixtures("run_level")
def test_canonical_bits_of_a_cut_network_do_not_depend_on_the_client_devices():
    """The parts of a network do change its last bits: they cut its batches."""
    found = [run(*build("fedavg", (n, 2), cohort_size=5, **CANONICAL)) for n in (1, 4)]
    assert len({digest(state[:2]) for state in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        ("fedavg", {**STREAM, **CANONICAL}),
        ("fedfr", {}),
        ("fedfr", STREAM),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_a_sweep_of_cut_networks_equals_separate_runs_of_whole_ones(name, options):
    runs = sweeps.build(name, (2, 2), **options)
    servers, _ = start_sweep(runs, sweeps.TOYS[name][1]())
    leaves = jax.tree.leaves(servers)
    assert any(not leaf.sharding.is_fully_replicated for leaf in leaves)
    assert_close(sweeps.play_sweeps(runs, name), sweeps.alone(name))
    if name == "fedavg":
        # A stream whose memory holds it all has one segment.
        programs = runs.programs
        assert programs.run_whole.num_compiled() + programs.run.num_compiled() == 1
