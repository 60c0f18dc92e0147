"""S runs in one compiled round equal S separate runs."""

import jax
import numpy as np
import pytest

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.local import local_sgd, sgd, step_decay
from fedfr_jax.federated.simulation import open_store, play, start
from fedfr_jax.federated.sweep import member, play_sweep, start_sweep, sweep
from fedfr_jax.mesh import make_mesh
from tests.federated import toys
from tests.federated.test_engine import assert_close

HYPERS = [{"rate": 0.1}, {"rate": 0.02}, {"rate": 0.1}]
SEEDS = [7, 7, 8]


def make(hyper):
    train = local_sgd(
        toys.norm_loss, sgd(momentum=0.9), step_decay(hyper["rate"], every=2)
    )
    return fedavg(train, personal="head")


def build(mesh, **options):
    members = {"hypers": HYPERS, "seeds": SEEDS, **options}
    return sweep(
        make,
        toys.feed(),
        *toys.problem(),
        mesh=mesh,
        cohort_size=3,
        local_epochs=(2, 1),
        **members,
    )


@pytest.mark.parametrize("devices, lanes", [(1, 1), (2, 2)])
def test_a_sweep_equals_separate_runs(devices, lanes):
    runs = build(make_mesh(devices), lanes=lanes)
    servers, stores = start_sweep(runs, toys.norm_variables())
    for r in range(2):
        servers, outcomes = play_sweep(runs, servers, stores, r)
    assert runs.run._cache_size() == 1
    ends = []
    for s, sim in enumerate(runs.sims):
        server = start(sim, toys.norm_variables())
        store = open_store(sim, server)
        for r in range(2):
            server, outcome = play(sim, server, store, r)
        assert_close(jax.device_get(member(servers, s)), jax.device_get(server))
        assert_close(stores[s].gather(np.arange(5))[0], store.gather(np.arange(5))[0])
        np.testing.assert_array_equal(outcomes[s].ids, outcome.ids)
        np.testing.assert_allclose(
            outcomes[s].metrics["loss"], outcome.metrics["loss"], rtol=1e-5
        )
        ends.append(np.asarray(server.variables["params"]["scale"]))
    assert np.abs(ends[0] - ends[1]).max() > 1e-3  # the rates count
    assert np.abs(ends[0] - ends[2]).max() > 1e-3  # and so do the seeds


def test_every_seed_has_its_numbers():
    with pytest.raises(ValueError, match="one per seed, got 3 for 2 seeds"):
        build(make_mesh(1), seeds=[1, 2])
