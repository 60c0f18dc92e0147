"""FedBuff and FedAsync: the engine against an event loop in plain Python."""

import pathlib
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms.corrections import scaffold
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.client import EqualRows, Population
from fedfr_jax.federated.participation import start_client
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.systems.asynchronous import Begun, next_buffer, with_versions
from fedfr_jax.federated.systems.devices import (
    Availability,
    Profiles,
    Work,
    log_normal_profiles,
)
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.footprint import Footprint
from fedfr_jax.federated.systems.settings import Systems, check_systems
from fedfr_jax.federated.systems.state import as_seconds
from fedfr_jax.types import ClientOutput
from tests.federated import toys
from tests.federated.systems import regression

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
SIZES = np.array([4, 2, 6, 3, 5, 1, 4, 6, 2, 3])
SEED, STEPS, ROUNDS = 5, 2, 6
PROFILES = log_normal_profiles(len(SIZES), gflops=1e-6, speed_sigma=1.5)
SETTINGS = {
    "fedbuff": ff.fedbuff(concurrency=3, buffer_size=2, max_staleness=3),
    "fedasync": ff.fedasync(concurrency=4, mixing=0.6, max_staleness=3),
}
IMAGES, LABELS, START = regression.examples(SIZES, seed=3)


def run_of(settings, footprint=None):
    """A run of softmax regressions, one full batch a step, and some dropouts."""
    data = ff.FederatedDataset.from_client_ids(
        IMAGES, LABELS, np.repeat(np.arange(len(SIZES)), SIZES)
    )
    return ff.init(
        fedavg(toys.LOCAL, weighting="uniform"),
        data,
        toys.unflat(START),
        batch_size=int(SIZES.max()),
        batching=Batching(int(SIZES.max()), shuffle=False),
        local_epochs=STEPS,
        seed=SEED,
        mesh=ff.make_mesh(2),
        systems=Systems(
            ff.Dropout(0.1, 0.1), PROFILES, asynchronous=settings, footprint=footprint
        ),
    )


def trained(w, client):
    """A model [18] after a client's steps."""
    own = np.repeat(np.arange(len(SIZES)), SIZES) == client
    return regression.trained(w, IMAGES[own], LABELS[own], STEPS)


class Arrival(NamedTuple):
    end: float
    client: int
    version: int
    is_lost: bool


def event_loop(settings, work):
    """What happens, told as it happens: (models, times, all staleness) of each step."""
    w, versions, now = START.astype(float), [START.astype(float)], 0.0
    under_way, buffer, number = [], [], 0
    models, times, late, too_late = [], [], [], 0

    def start():
        nonlocal number
        rng = np.random.default_rng((SEED, number, 5))
        busy = {x.client for x in under_way} | {client for client, _ in buffer}
        client = rng.choice([k for k in range(len(SIZES)) if k not in busy])
        leaves_before, leaves_after = rng.random(2) < 0.1
        number += 1
        lasts = work.download / PROFILES.download[client]
        lasts += STEPS * work.flops_per_step / PROFILES.flops[client]
        lasts += work.upload / PROFILES.upload[client]
        end = now if leaves_before else now + lasts
        is_lost = bool(leaves_before or leaves_after)
        under_way.append(Arrival(end, int(client), len(versions) - 1, is_lost))

    for _ in range(settings.concurrency):
        start()
    while len(models) < ROUNDS:
        arrival = min(under_way)
        under_way.remove(arrival)
        now, stale = arrival.end, len(versions) - 1 - arrival.version
        if not arrival.is_lost and stale <= settings.max_staleness:
            own = trained(versions[arrival.version], arrival.client)
            scale = (1 + stale) ** -settings.staleness_exponent
            if settings.mixing is None:
                change = scale * (own - versions[arrival.version])
            else:
                change = settings.mixing * scale * (own - w)
            buffer.append((arrival.client, change))
            late.append(stale)
        elif not arrival.is_lost:
            too_late += 1
        if len(buffer) == settings.buffer_size:
            w = w + np.mean([change for _, change in buffer], axis=0)
            versions.append(w)
            models.append(w)
            times.append(now)
            buffer.clear()
        start()
    return models, times, late, too_late


@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_does_what_an_event_loop_does(name):
    run = run_of(SETTINGS[name])
    models, times, late, too_late = event_loop(SETTINGS[name], run.sim.work)
    assert len(set(late)) > 1 and bool(too_late) == (name == "fedbuff")
    assert name == "fedasync" or max(late) == SETTINGS[name].max_staleness
    # A model of 18 numbers; a batch of 6 forward, and backward for its gradient.
    assert run.sim.work == Work(4 * 18, 4 * 18, 0, 2 * 2 * 6 * 5 * 3)
    found = []
    for model, time in zip(models, times, strict=True):
        run, metrics = ff.run_round(run)
        np.testing.assert_allclose(metrics["simulated_seconds"], time, rtol=1e-12)
        np.testing.assert_allclose(
            toys.flat(run.variables["params"]), model, rtol=2e-5, atol=2e-6
        )
        assert metrics["num_clients"] == len(metrics["loss"])
        found.append(metrics["simulated_seconds"])
    assert run.sim.programs.run_whole.num_compiled() == 1
    assert (np.diff(found) >= 0).all()


def test_updates_that_the_server_takes_cost_what_the_hour_of_its_step_emits():
    settings = SETTINGS["fedbuff"]
    _, times, *_ = event_loop(settings, run_of(settings).sim.work)
    change = (times[1] + times[2]) / 2  # from hour 0 to 1, between two steps
    joules, grams = np.arange(1.0, 1 + len(SIZES)), np.arange(1.0, 25)
    prices = Footprint(joules, 2.0, 0.5, 4.0, grams, 1 - change / 3600)
    run = run_of(settings, prices)
    work, emitted = run.sim.work, []
    for _ in range(4):
        run, metrics = ff.run_round(run)
        gflop, ids = STEPS * work.flops_per_step / 1e9, metrics["client"]
        spent = joules[ids] * gflop + 2.0 * 2 * 72 / 1e6
        np.testing.assert_allclose(metrics["joules"], spent)
        price = 0.5 * spent.sum() / 3.6e6 + 4.0 * len(ids) * 2 * 72 / 1e9
        assert metrics["price"] == pytest.approx(price)
        assert len(ids) == metrics["num_clients"] == 2
        emitted.append(metrics["co2_kg"] / metrics["energy_kwh"] * 1000)
    np.testing.assert_allclose(emitted, [1, 1, 2, 2])


def test_an_update_of_the_largest_staleness_counts_and_a_later_one_is_gone():
    """Client 9 begins at version 0 and arrives when the server is at `stale`."""
    settings = ff.fedbuff(concurrency=2, buffer_size=1, max_staleness=3)
    for stale, is_used in ((0, True), (3, True), (4, False)):
        queue = iter(range(9))
        # Others arrive one after another; 9 just after `stale` steps of the server.
        ends = {9: stale + 0.5}

        def begin(number, time, busy, version, queue=queue, ends=ends):
            client = 9 if not number else next(queue)
            assert client not in busy
            return Begun(client, ends.get(client, client + 1.0), False)

        state, steps = jax.device_get(first_state(settings)), []
        for version in range(stale + 2):
            cohort = next_buffer(settings, state, version, begin)
            state = cohort.systems_state
            steps += zip(cohort.ids, cohort.participation.staleness, strict=True)
        assert ((9, stale) in steps) is is_used and len(steps) == stale + 2
        assert {client for client, _ in steps} >= {*range(stale)}
        clock = float(as_seconds(state.clock))
        assert clock == (stale + 1 if is_used else stale + 2)


def test_who_trains_or_waits_in_the_buffer_is_busy_until_the_servers_step():
    settings, asked = ff.fedbuff(concurrency=2, buffer_size=2), []

    def begin(number, time, busy, version):
        asked.append((time, sorted(busy), version))
        return Begun(number, number + 1.0, number == 2)  # the third never arrives

    state = jax.device_get(first_state(settings))
    cohort = next_buffer(settings, state, 5, begin)
    assert cohort.ids.tolist() == [0, 1]
    assert asked == [(0, [], 5), (0, [0], 5), (1, [0, 1], 5), (2, [2], 6)]
    cohort = next_buffer(settings, cohort.systems_state, 6, begin)
    assert cohort.ids.tolist() == [3, 4] and asked[4:6] == [(3, [3], 6), (4, [3, 4], 6)]


def first_state(settings):
    return (
        with_versions(fedavg(toys.LOCAL), settings)
        .init(toys.unflat(START))
        .systems_state
    )


def test_a_client_begins_when_it_is_there_and_is_lost_by_its_own_chance():
    """`start_client` against the same draws in a plain loop."""
    there = Availability(
        np.arange(5), np.array([50.0, 10, 30, 20]), np.full(4, 5.0), 100.0
    )
    devices = Profiles(*np.array([[1.0, 2, 4, 5], np.ones(4), np.ones(4)]))
    work = Work(download=2, upload=3, flops=0, flops_per_step=20)
    systems = Systems(Dropout(0.3, 0.3), devices, there)
    sim = SimpleNamespace(
        settings=Settings(0, lambda round: 2 + round, seed=7, systems=systems),
        population=Population(EqualRows(4), np.ones(4, np.int32)),
        batching=Batching(1),
        work=work,
    )
    kinds = set()
    for number, (time, busy) in enumerate([(0.0, [1]), (12.0, []), (96.0, [3])] * 20):
        wait = {0: [20, 3], 12: [0, 1], 96: [14, 1]}[int(time)]  # seconds, client
        rng = np.random.default_rng((7, number, 5))
        rng.choice([wait[1]])
        leaves_before, leaves_after = rng.random(2) < 0.3
        end = time + wait[0]
        if not leaves_before:
            end += 2 + 3 + 20 * (2 + number) / devices.flops[wait[1]]
        found = start_client(sim, number, time, busy, number)
        assert found == (wait[1], pytest.approx(end), leaves_before or leaves_after)
        kinds.add((leaves_before, leaves_after))
    assert len(kinds) == 4


def test_a_run_that_is_saved_and_resumed_has_the_same_bits(tmp_path):
    settings = SETTINGS["fedbuff"]
    run, short = run_of(settings), run_of(settings)
    for _ in range(4):
        run, _ = ff.run_round(run)
    for _ in range(2):
        short, _ = ff.run_round(short)
    path = ff.save(short, tmp_path / "run")
    again = ff.resume(short, path)
    for _ in range(2):
        again, _ = ff.run_round(again)
    same = np.testing.assert_array_equal
    jax.tree.map(same, jax.device_get(again.server), jax.device_get(run.server))
    assert as_seconds(jax.device_get(run.server.systems_state.clock)) > 0


def test_a_buffer_of_the_paper_s_weights_is_the_golden_one():
    with (
        np.load(GOLDEN / "fl_more.npz") as more,
        np.load(GOLDEN / "fl_rounds.npz") as w,
    ):
        g = {k.removeprefix("fedbuff_"): x for k, x in {**w, **more}.items()}
    settings = ff.fedbuff(concurrency=4, buffer_size=4)
    optimizer = optax.sgd(float(g["eta_g"]))
    plain = fedavg(toys.LOCAL, server_optimizer=optimizer, weighting="uniform")
    deltas = toys.unflat(g["deltas"].astype(np.float32))

    def sends(key, server, personal, client):
        change = jax.tree.map(lambda x: x[client.id], deltas)
        return ClientOutput(change, jnp.float32(1), (), {})

    algorithm = with_versions(plain._replace(client_update=sends), settings)
    variables = toys.unflat(g["w0"].astype(np.float32))
    server, weights = algorithm.init(variables), []
    for client, stale in enumerate(g["staleness"].tolist()):
        view = SimpleNamespace(
            id=client, staleness=jnp.int32(stale), round=jnp.int32(20 - stale)
        )
        output = algorithm.client_update(None, server, (), view)
        weights.append(toys.flat(output.update["params"]) / g["deltas"][client])
    np.testing.assert_allclose(np.mean(weights, axis=1), g["weight_sqrt"], rtol=1e-5)
    change = np.mean(np.array(weights) * g["deltas"], axis=0)
    w = g["w0"] + g["eta_g"] * change
    np.testing.assert_allclose(w, g["w_paper"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"concurrency": 9, "buffer_size": 2}, "at most 10, the number of clients"),
        ({"concurrency": 2, "mixing": 0.0}, r"mixing must be in \(0, 1\], got 0"),
        ({"concurrency": 2, "max_staleness": -1}, "max_staleness must be at least"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    factory = ff.fedasync if "mixing" in settings else ff.fedbuff
    with pytest.raises(ValueError, match=message):
        systems = Systems(profiles=PROFILES, asynchronous=factory(**settings))
        check_systems(systems, 10, 2)


def test_what_an_asynchronous_run_cannot_have_is_refused():
    systems = Systems(profiles=PROFILES, asynchronous=SETTINGS["fedasync"])
    with pytest.raises(ValueError, match="deadline needs synchronous rounds"):
        check_systems(systems._replace(deadline=1.0), 10, 1)
    with pytest.raises(ValueError, match="Use fedbuff"):
        with_versions(scaffold(toys.LOCAL, num_clients=10), SETTINGS["fedasync"])
