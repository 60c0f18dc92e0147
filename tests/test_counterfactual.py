"""Replays of a run without some clients: oracles, Shapley values, unlearning."""

import functools
import itertools
import math

import jax
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.api import RunState
from fedfr_jax.counterfactual import (
    Replay,
    marginal_values,
    sample_orders,
    summarize,
)
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.federated.systems.devices import log_normal_profiles
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.federated.unlearning import Subtraction
from fedfr_jax.types import Cohort

pytestmark = pytest.mark.ci

SIZES = (20, 30, 12, 40, 25)
LAST = len(SIZES) - 1
ROUNDS = 3


def examples():
    """Inputs [T, 5], labels [T] and clients [T]."""
    rng, owner = np.random.default_rng(0), np.repeat(np.arange(len(SIZES)), SIZES)
    x = rng.normal(size=(len(owner), 5)).astype(np.float32)
    return x, rng.integers(0, 3, len(owner)), owner


def apply(variables, x):
    return x @ variables["params"]["W"] + variables["params"]["b"][None]


def loss(variables, batch, key):
    del key
    logits = apply(variables, batch.images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(losses, batch.is_valid)


LOCAL = ff.LocalTraining(loss, optax.sgd, 0.3)
VARIABLES = {
    "params": {"W": np.zeros((5, 3), np.float32), "b": np.zeros(3, np.float32)}
}
ALGORITHMS = {
    "fedavg": lambda: ff.fedavg(LOCAL),
    "ditto": lambda: ff.ditto(LOCAL, lam=0.1),
    "median": lambda: ff.with_aggregation(ff.fedavg(LOCAL), ff.AGGREGATORS["median"]()),
    "personal": lambda: ff.with_personal_layers(ff.fedavg(LOCAL), "params/b"),
    "feddane": lambda: ff.feddane(LOCAL, mu=0.1),
    "clipped": lambda: ff.with_aggregation(
        ff.fedavg(LOCAL), ff.AGGREGATORS["clip_by_global_norm"](max_norm=1e-3)
    ),
    "halved": lambda: ff.fedavg(LOCAL, server_optimizer=optax.sgd(0.5)),
    "private": lambda: ff.private(ff.fedavg(LOCAL), ff.Privacy(1.0, 0.5, 5, 0.1)),
    "ifca": lambda: ff.ifca(LOCAL, num_clusters=2),
    "mimelite": lambda: ff.mimelite(LOCAL),
}


def start(algorithm="fedavg", arrays=None, **options):
    """A run before its first round, of all clients in every round."""
    data = ff.FederatedDataset.from_client_ids(*(arrays or examples()))
    options = {"batch_size": 8, "local_epochs": 2, "seed": 3, **options}
    return ff.init(ALGORITHMS[algorithm](), data, VARIABLES, **options)


@functools.cache
def replayed(algorithm="fedavg", without=(LAST, 1), members=3) -> ff.Replay:
    return ff.replay(start(algorithm), ROUNDS, list(without), members=members)


def value(run: RunState) -> float:
    x, y, _ = examples()
    logits = apply(run.variables, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return -float(losses.mean())


def assert_close(run: RunState, other: RunState) -> None:
    """The same server and client states, up to the order of sums."""
    near = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(near, *(jax.device_get(x.server) for x in (run, other)))
    ids = other.store.touched()
    np.testing.assert_array_equal(run.store.touched(), ids)
    jax.tree.map(near, run.store.gather(ids)[0], other.store.gather(ids)[0])


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "median", "personal"])
def test_without_a_client_is_a_run_on_data_without_it(algorithm):
    x, y, owner = examples()
    rest = owner != LAST
    run, _ = ff.run_rounds(start(algorithm, (x[rest], y[rest], owner[rest])), ROUNDS)
    whole, _ = ff.run_rounds(start(algorithm), ROUNDS)
    members = replayed(algorithm)
    assert_close(members.without[LAST], run)
    assert_close(members.all, whole)
    gap = np.abs(whole.variables["params"]["W"] - run.variables["params"]["W"])
    assert gap.max() > 1e-3  # so that both are not the same anyway


def test_any_client_is_left_out_of_the_same_cohorts():
    run = start(cohort_size=3)
    found = ff.replay(run, 4, [1], members=2).without[1]
    state, sim = run, run.sim
    for round in range(4):
        ids = sample_cohort(sim.settings.seed, round, len(SIZES), 3)
        ids = ids[ids != 1]
        server, _ = run_cohort(sim, state.server, state.store, Cohort(ids, round))
        state = state._replace(server=server)
    assert_close(found, state)


def test_members_are_single_replays_and_groups_their_clients_together():
    groups = {"north": [0, 2], "south": [3]}
    run = start(cohort_size=2)
    names = ["north", 4, "south", 3]
    many = ff.replay(run, ROUNDS, names, groups=groups, members=5)
    for name in names:
        alone = ff.replay(run, ROUNDS, [name], groups=groups, members=1)
        assert_close(many.without[name], alone.without[name])
        excluded = np.array(groups.get(name, [name]))
        sim = run.sim._replace(excluded=excluded)
        single = run._replace(sim=sim, store=start(cohort_size=2).store)
        assert_close(many.without[name], ff.run_rounds(single, ROUNDS)[0])
    assert_close(many.without["south"], many.without[3])


def mean_loss(variables, batch, key):
    """The loss, with the mean of a batch's inputs as statistics."""
    mean = jax.tree.map(lambda _: batch.images.mean(0), variables["batch_stats"])
    return loss(variables, batch, key), (mean, {})


def test_each_member_takes_the_statistics_of_its_own_random_client():
    local = ff.LocalTraining(mean_loss, optax.sgd, 0.3)
    algorithm = ff.with_batch_stats(ff.fedavg(local), "random_client")
    variables = {**VARIABLES, "batch_stats": {"mean": np.zeros(5, np.float32)}}
    data = ff.FederatedDataset.from_client_ids(*examples())
    begin = lambda: ff.init(algorithm, data, variables, batch_size=8, seed=3)
    found, means = ff.replay(begin(), 1, [*range(len(SIZES))], members=6), []
    for client, member in found.without.items():
        run = begin()
        sim = run.sim._replace(excluded=np.array([client]))
        single, _ = ff.run_rounds(run._replace(sim=sim), 1)
        assert_close(member, single)
        means.append(tuple(np.asarray(member.variables["batch_stats"]["mean"])))
    assert 1 < len(set(means)) < len(means)  # not all of the same client


def test_a_run_whose_energy_is_counted_is_replayed_without_counting():
    systems = Systems(footprint=ff.footprint(len(SIZES)))
    found = ff.replay(start(systems=systems), ROUNDS, [LAST], members=3)
    expected = replayed().without[LAST].variables
    jax.tree.map(np.testing.assert_allclose, found.without[LAST].variables, expected)


def test_nan_of_an_excluded_client_does_not_leak_and_an_empty_round_moves_nothing():
    x, y, owner = examples()
    bad = start(arrays=(np.where(owner[:, None] == 1, 1e30, x), y, owner))
    excluded = bad._replace(sim=bad.sim._replace(excluded=np.array([1])))
    assert_close(ff.run_rounds(excluded, ROUNDS)[0], replayed().without[1])
    with pytest.raises(FloatingPointError, match="client 1 in round 1"):
        ff.run_rounds(bad, 1)
    nobody = bad._replace(sim=bad.sim._replace(excluded=np.arange(len(SIZES))))
    end, (metrics, *_) = ff.run_rounds(nobody, ROUNDS)
    np.testing.assert_array_equal(
        end.variables["params"]["W"], VARIABLES["params"]["W"]
    )
    assert metrics["num_absent_clients"] == len(SIZES) and not len(metrics["client"])


def test_leave_one_out_is_the_difference_of_two_runs():
    members = replayed()
    found = members.leave_one_out(value)
    for name, run in members.without.items():
        assert found[name] == value(members.all) - value(run)


def test_shapley_values_of_three_clients_are_the_formula():
    players = [0, 2, 3]
    members = ff.replay(start(), ROUNDS, players, members=4)
    values = {}
    for count in range(4):
        for present in itertools.combinations(players, count):
            sim = start().sim._replace(excluded=np.setdiff1d(players, present))
            run, _ = ff.run_rounds(start()._replace(sim=sim), ROUNDS)
            values[frozenset(present)] = value(run)
    found = members.shapley(value, permutations=6)
    for name in players:
        expected = 0.0
        for present in (x for x in values if name not in x):
            ways = math.factorial(len(present)) * math.factorial(2 - len(present))
            expected += ways / 6 * (values[present | {name}] - values[present])
        assert found[name].value == pytest.approx(expected, abs=1e-6)
        assert found[name].low == found[name].high == found[name].value
    total = sum(x.value for x in found.values())
    assert total == pytest.approx(values[frozenset(players)] - values[frozenset()])


def test_sampled_permutations_give_intervals_that_hold_the_exact_values():
    weights = np.random.default_rng(1).normal(size=7)
    pairs = np.triu(np.random.default_rng(2).normal(size=(7, 7)), 1)

    def values_of(sets):
        there = [np.isin(np.arange(7), [*x]).astype(float) for x in sets]
        return [float(weights @ x + x @ pairs @ x) for x in there]

    exact = weights + (pairs + pairs.T).sum(0) / 2
    (whole,) = values_of([frozenset(range(7))])
    hits = []
    for seed in range(40):
        orders = sample_orders(7, 30, seed)
        margins = marginal_values(values_of, orders, whole, 0.0)
        np.testing.assert_allclose(margins.sum(1), whole)  # efficiency
        rows = summarize(margins, False)
        hits += [x.low <= v <= x.high for x, v in zip(rows, exact, strict=True)]
    assert 0.9 < np.mean(hits) < 0.99
    (alone,) = summarize(margins[:1, :1], False)
    assert (alone.low, alone.value, alone.high) == (-np.inf, margins[0, 0], np.inf)
    (two,) = summarize(np.array([[0.0], [2.0]]), False)
    assert two == pytest.approx((1.0, 1 - 12.706, 1 + 12.706), rel=1e-4)  # Student's, 1
    assert sample_orders(4, 24, 0).shape == (24, 4)
    assert sample_orders(4, 23, 0).shape == (23, 4)


def test_truncated_permutations_ask_for_no_more_sets():
    asked = []

    def values_of(sets):
        asked.extend(sets)
        return [min(len(x), 2) for x in sets]

    orders = sample_orders(6, 9, 0)
    margins = marginal_values(values_of, orders, 2.0, 0.5)
    assert max(map(len, asked)) == 2
    for order, margin in zip(orders, margins, strict=True):
        np.testing.assert_array_equal(margin[order], [1, 1, 0, 0, 0, 0])


def test_all_permutations_have_no_interval_though_they_are_ended_early():
    members = ff.replay(start(), 1, [0, 2, 3], members=4)
    exact = members.shapley(value, permutations=6)
    found = members.shapley(value, permutations=6, tolerance=0.01)
    assert found != exact
    for one in (*found.values(), *replayed().shapley(value, tolerance=9.0).values()):
        assert one.low == one.value == one.high


def test_runs_that_are_yielded_are_those_that_train_keeps():
    kept, run = replayed(), start()
    members = Replay(run, ROUNDS, kept.players, 1)
    whole, *others = members.runs()
    assert whole is members.all and members.without == {}
    for one, name in zip(others, kept.players, strict=True):
        assert_close(one, kept.without[name])
        found = members.unlearn(name, 0, reference=one)
        assert found.distance == pytest.approx(kept.unlearn(name, 0).distance, rel=1e-3)


def test_unlearning_subtracts_the_weighted_updates_of_all_rounds():
    run, moved = start(), 0.0
    for _ in range(ROUNDS):
        only = run._replace(sim=run.sim._replace(excluded=np.arange(LAST)))
        alone, _ = ff.run_rounds(only, 1)  # the client's update alone
        update = alone.variables["params"]["W"] - run.variables["params"]["W"]
        moved += SIZES[LAST] / sum(SIZES) * update
        run, _ = ff.run_rounds(run, 1)
    members = replayed()
    found = members.unlearn(LAST, 0)
    params = run.variables["params"]["W"] - moved
    np.testing.assert_allclose(found.run.variables["params"]["W"], params, atol=1e-6)
    exact = members.without[LAST].variables["params"]["W"]
    assert np.abs(params - exact).max() > 1e-4
    for other, length in (
        (found.run, found.distance),
        (members.all, found.distance_before),
    ):
        leaves = [x.variables["params"] for x in (other, members.without[LAST])]
        gaps = jax.tree.leaves(jax.tree.map(np.subtract, *jax.device_get(leaves)))
        expected = np.linalg.norm(np.concatenate([x.ravel() for x in gaps]))
        assert length == pytest.approx(float(expected), rel=1e-4)
    tuned = members.unlearn(LAST, 2).run
    again = found.run._replace(sim=members.without[LAST].sim)
    assert_close(tuned, ff.run_rounds(again, 2)[0])
    assert tuned.round_number == ROUNDS + 2


def test_updates_of_all_players_are_subtracted_by_one_program():
    run = start()
    subtraction = Subtraction(run.sim, run.variables, ROUNDS)
    subtraction.check()
    servers = [subtraction.without(np.array(ids)) for ids in ([1], [0, 2], [1])]
    models = map(run.sim.inner_algorithm.global_model, servers)
    kernels = [model["params"]["W"] for model in models]
    programs = subtraction.recorder.programs
    assert programs.run_whole.num_compiled() + programs.run.num_compiled() == 1
    np.testing.assert_array_equal(kernels[0], kernels[2])
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4


def test_rounds_without_any_client_have_nothing_to_subtract():
    systems = Systems(ff.Dropout(before_training=0.5))
    members = ff.replay(start(systems=systems, cohort_size=1), 8, [1], members=2)
    found = members.unlearn(1, 0).run.variables["params"]["W"]
    kept = members.without[1].variables["params"]["W"]
    assert np.isfinite(found).all() and np.abs(kept).max() > 0
    _, metrics = ff.run_rounds(start(systems=systems, cohort_size=1), 8)
    assert 0 < sum(row["num_clients"] for row in metrics) < 8


@pytest.mark.parametrize("algorithm", ["clipped", "halved"])
def test_a_server_that_does_not_add_the_plain_mean_is_not_subtracted_from(algorithm):
    with pytest.raises(ValueError, match="needs a server that adds the mean"):
        replayed(algorithm, (LAST,), 2).unlearn(LAST, 0)


def test_what_cannot_be_replayed_is_refused_in_one_line():
    run = start()
    after, _ = ff.run_rounds(run, 1)
    slow = Systems(profiles=log_normal_profiles(len(SIZES)))
    x, y, _ = examples()
    read = ff.FederatedDataset.from_reader(
        lambda rows: x[rows], y[:100], num_clients=4, num_classes=3
    )
    streamed = ff.init(ALGORITHMS["fedavg"](), read, VARIABLES, batch_size=8)
    groups = {"all": range(5), "none": [], "far": [0, 77]}
    for given, without, rule in [
        (after, [1], "before its first round, got one after round 1"),
        (run, [77], "among the run's 5, got 77"),
        (run, ["nroth"], r"among the run's 5, got 'nroth'"),
        (run, ["far"], "clients of group 'far' must be among the run's 5, got 77"),
        (run, ["all"], "'all' must leave out some of the 5 clients and keep others"),
        (run, ["none"], "'none' must leave out some of the 5 clients and keep others"),
        (run, [], "without must be a list of clients and groups"),
        (run, "north", "without must be a list of clients and groups, got 'north'"),
        (run, [[0, 1]], r"a list of clients and groups, got \[\[0, 1\]\]"),
        (start(systems=slow), [1], "got clients that take time"),
        (streamed, [1], "got streamed examples"),
        (start("feddane"), [1], "got a mean over the whole cohort before training"),
    ]:
        with pytest.raises(ValueError, match=rule) as error:
            ff.replay(given, 1, without, groups=groups)
        assert "\n" not in str(error.value)
    x, y, owner = examples()
    named = start(arrays=(x, y, owner.astype(str)))
    with pytest.raises(ValueError, match="must not have a client's name, got '1'"):
        ff.replay(named, 1, ["1"], groups={"1": ["2"]})
    with pytest.raises(ValueError, match="share no client, got client number 1"):
        ff.replay(run, 1, [1, "a"], groups={"a": [1, 2]}).shapley(value)
    with pytest.raises(ValueError, match=r"left out, of \[4, 1\], got 'nroth'"):
        replayed().unlearn("nroth")
    for algorithm, rule in [
        ("ditto", "states of clients"),
        ("median", "without a plain mean"),
        ("private", "private updates"),
        ("ifca", "states of clients"),
        ("mimelite", "updates unlike the global model"),
    ]:
        with pytest.raises(ValueError, match=f"with .*{rule}"):
            replayed(algorithm).unlearn(LAST, 0)
