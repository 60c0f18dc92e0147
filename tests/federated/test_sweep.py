"""S runs in one compiled round equal S separate runs."""

import functools

import jax
import numpy as np
import pytest

from fedfr_jax.data.stream import stream
from fedfr_jax.federated import programs as programs_module
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.calls import shared_tables
from fedfr_jax.federated.local import sgd, step_decay
from fedfr_jax.federated.model_parallel import placement
from fedfr_jax.federated.one_round import assign
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.pipeline import CohortRows
from fedfr_jax.federated.privacy import Privacy, private
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import open_store, sweep
from fedfr_jax.federated.systems.devices import log_normal_profiles
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import LocalTraining, Prepared
from tests.federated import toys
from tests.federated.toys import Reader, assert_close

pytestmark = pytest.mark.ci

HYPERS = [{"rate": 0.1}, {"rate": 0.02}, {"rate": 0.1}]
SEEDS = [7, 7, 8]
EVERYONE = np.arange(len(toys.SIZES))
CANONICAL = {"reproducible_sum": True, "num_partial_sums": 3}
STREAM = {"streamed": {"waves": 1}}
ROUNDS = 2


def make_fedavg(hyper):
    rate = step_decay(hyper["rate"], every=2)
    return with_personal_layers(
        fedavg(LocalTraining(toys.norm_loss, sgd(momentum=0.9), rate)), "head"
    )


def make_added(hyper):
    """FedAvg whose server adds other clients' rows, up to three."""

    def prepare(server, context):
        cohort = context.cohort
        examples = cohort.ids[:, None] * 5 + np.arange(3)[None]
        number = (cohort.ids + cohort.round) % 4
        return Prepared((), examples.astype(np.int32), number.astype(np.int32))

    return make_fedavg(hyper)._replace(prepare=prepare)


def make_fedfr(hyper):
    return toys.fedfr_toy(rate=0.1 * hyper["rate"])[0]


TOYS = {
    "fedavg": (make_fedavg, toys.norm_variables),
    "added": (make_added, toys.norm_variables),
    "fedfr": (make_fedfr, lambda: toys.fedfr_toy()[1]),
}


def build(
    name="fedavg",
    mesh=(1, 1),
    *,
    make=None,
    streamed=None,
    reader=None,
    hypers=HYPERS,
    seeds=SEEDS,
    **settings,
):
    """A sweep of a toy from a table, or with `streamed` from a stream."""
    table, population = toys.problem()
    if streamed is not None:
        table = stream(reader or Reader(table.images), table.labels, **streamed)
    return sweep(
        make or TOYS[name][0],
        toys.feed(),
        table,
        population,
        Settings(**{"cohort_size": 3, "local_epochs": (2, 1), **settings}),
        hypers=hypers,
        seeds=seeds,
        mesh=make_mesh(*mesh),
    )


def start_sweep(runs, variables):
    """Initial servers [S, ...] from the same variables, and each member's store."""
    init = lambda hyper: runs.build_member(hyper).init(variables)
    servers = jax.jit(jax.vmap(init, axis_size=len(runs.sims)))(runs.hyper)
    stores = [
        open_store(sim, runs.member(servers, s)) for s, sim in enumerate(runs.sims)
    ]
    return jax.device_put(servers, placement(runs.sims[0].mesh, servers, None)), stores


def play_sweeps(runs, name, rounds=ROUNDS):
    """Each member's (server, rows, metrics) at the end."""
    servers, stores = start_sweep(runs, TOYS[name][1]())
    for r in range(rounds):
        servers, logs = advance(runs, servers, stores, r)
    servers = jax.device_get(servers)
    return [
        (runs.member(servers, s), stores[s].gather(EVERYONE), logs[s][0].metrics)
        for s in range(len(runs.sims))
    ]


@functools.cache
def alone(name, cohort_size=3):
    """The same of runs that know of no other, on one device that has the table."""
    ends, (make, variables) = [], TOYS[name]
    for hyper, seed in zip(HYPERS, SEEDS, strict=True):
        settings = {"cohort_size": cohort_size, "local_epochs": (2, 1), "seed": seed}
        sim = toys.build(make(hyper), **settings)
        end = toys.play(sim, variables(), ROUNDS)
        ends.append((end.server, (end.rows, end.is_new), end.logs[-1].metrics))
    return ends


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("fedavg", (2, 1), {"clients_per_device": 2}),
        pytest.param("fedavg", (1, 1), {}, marks=pytest.mark.slow),
        pytest.param(
            *("fedavg", (2, 1), {"clients_per_device": 2, **STREAM, "cohort_size": 5}),
            marks=pytest.mark.slow,
        ),
        pytest.param("fedavg", (2, 1), {**STREAM, **CANONICAL}, marks=pytest.mark.slow),
        ("added", (2, 1), STREAM),
        pytest.param("fedfr", (2, 1), {}, marks=pytest.mark.slow),
        pytest.param("fedfr", (2, 1), STREAM, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)) or "plain",
)
def test_a_sweep_equals_separate_runs(name, mesh, options):
    """From a table or a stream, whose segments are single waves."""
    runs = build(name, mesh, **options)
    members = play_sweeps(runs, name)
    expected = alone(name, options.get("cohort_size", 3))
    assert_close(members, expected)
    if name != "fedfr":  # the room for hard negatives follows the round
        # A stream whose memory holds it all has one segment.
        programs = runs.programs
        assert programs.run_whole.num_compiled() + programs.run.num_compiled() == 1
    for other in (1, 2):  # the rates count, and so do the seeds
        leaves = [jax.tree.leaves(members[s][0]) for s in (0, other)]
        apart = [np.abs(x - y).max() for x, y in zip(*leaves, strict=True)]
        assert max(apart) > 1e-3


@pytest.mark.slow
def test_a_sweep_plays_rounds_in_one_call_with_the_numbers_of_single_rounds():
    runs = build(mesh=(2, 1), clients_per_device=2, **CANONICAL)
    servers, stores = start_sweep(runs, toys.norm_variables())
    servers, logs = advance(runs, servers, stores, 0, ROUNDS)
    ends = [
        (
            runs.member(jax.device_get(servers), s),
            stores[s].gather(EVERYONE),
            own[-1].metrics,
        )
        for s, own in enumerate(logs)
    ]
    assert_close(ends, play_sweeps(runs, "fedavg"))


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "got 3: the client states need"),
        (STREAM, "got 1.* a round needs .* GiB to train"),
    ],
    ids=["resident", "stream"],
)
def test_members_that_do_not_fit_together_are_refused(options, words, monkeypatch):
    runs = build("fedavg", **options)
    monkeypatch.setattr(programs_module, "free_bytes", lambda mesh: 1)
    with pytest.raises(MemoryError, match=words):
        play_sweeps(runs, "fedavg")


def test_members_of_equal_cohorts_read_their_rows_once():
    offsets, reader = toys.problem()[1].offsets, Reader(toys.problem()[0].images)
    runs = build(**STREAM, reader=reader, seeds=[8, 7, 8])
    servers, stores = start_sweep(runs, toys.norm_variables())
    reader.seen.clear()
    _, logs = advance(runs, servers, stores, 0)
    ids = np.concatenate([log.ids for (log,) in logs[:2]])
    own = [np.arange(offsets[i], offsets[i + 1]) for i in ids]
    seen = np.sort(np.concatenate(reader.seen))
    np.testing.assert_array_equal(seen, np.sort(np.concatenate(own)))


@pytest.mark.parametrize(
    "name, cohort_size, expected",
    [("fedavg", 3, [1, 0, 1]), ("fedavg", 5, [0, 0, 0]), ("added", 5, [0, 1, 2])],
)
def test_members_share_a_table_unless_the_server_adds_to_it(
    name, cohort_size, expected
):
    """Members of one seed, or of cohorts of all clients."""
    runs = build(name, **STREAM, seeds=[8, 7, 8], cohort_size=cohort_size)
    servers, stores = start_sweep(runs, toys.norm_variables())
    works = [
        assign(
            sim,
            runs.member(servers, 0),
            [before_round(sim, (), 0)],
            CohortRows(store, 0, lambda round: None),
        )
        for sim, store in zip(runs.sims, stores, strict=True)
    ]
    assert shared_tables(runs, works) == expected


def test_no_member_plays_a_round_that_overspends_its_privacy():
    """The second round of everybody would; nothing is compiled before it is said."""
    given = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "epsilon": 4.0}
    make = lambda hyper: private(
        fedavg(toys.LOCAL._replace(learning_rate=hyper["rate"])),
        Privacy(cohort_size=5, **given),
    )
    runs = build(make=make, cohort_size=5, hypers=HYPERS[:2], seeds=SEEDS[:2])
    with pytest.raises(ValueError, match="must stay within privacy.epsilon=4, but"):
        advance(runs, *start_sweep(runs, toys.norm_variables()), 1)


def test_clients_that_take_time_are_refused_in_one_line():
    slow = Systems(profiles=log_normal_profiles(len(EVERYONE)))
    with pytest.raises(ValueError, match="sweep cannot have systems .* one by one"):
        build(systems=slow)
