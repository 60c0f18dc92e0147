"""Aggregation: every link against its formula or official code, and chains of them."""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.federated import sums
from fedfr_jax.federated.aggregation import (
    AGGREGATORS,
    bucketing,
    build_links,
    bulyan,
    centered_clip,
    chain,
    clip_by_global_norm,
    gaussian_noise,
    geometric_median,
    krum,
    median,
    nearest_neighbor_mixing,
    of_all_updates,
    rfa,
    stochastic_quantize,
    top_k,
    trimmed_mean,
    weighted_mean,
    with_aggregation,
    with_update_checks,
)
from fedfr_jax.federated.aggregation.robust import (
    choose_one_by_one,
    krum_scores,
    squared_distances,
)
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.programs import on_mesh, round_arguments
from fedfr_jax.federated.simulation import build_simulation, start_simulation
from fedfr_jax.mesh import make_mesh
from tests.contracts import test_algorithms as contracts
from tests.federated.toys import (
    LOCAL,
    close,
    fedavg_toy,
    feed,
    flat,
    problem,
    replay,
    unflat,
)


def aggregate(aggregator, updates, weights=None, *, state=None, key=0):
    """(aggregate, state) of updates [K, ...], as the engine makes it."""
    count = len(jax.tree.leaves(updates)[0])

    @jax.jit
    def run(updates, weights, state, key):
        key = jax.random.key(key)
        if state is None:
            zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), updates)
            state = aggregator.init(zeros)

        def one(i, update, weight):
            keys = jax.random.fold_in(key, i)
            found, _ = aggregator.summarize(keys, state, update, weight)
            return sums.without_kept(found)

        summary, kept = jax.vmap(one)(jnp.arange(count), updates, weights)
        total = sums.with_kept(sums.over_lanes(summary), kept)
        return aggregator.finish(key, state, total)[:2]

    weights = jnp.ones(count) if weights is None else jnp.asarray(weights)
    return run(jax.tree.map(jnp.asarray, updates), weights, state, key)


def made(name, **options):
    """A member of AGGREGATORS in a chain that has a mean."""
    link = AGGREGATORS[name](**options)
    return link if link.role != "link" else chain(link, weighted_mean())


# --- Whole rounds of clients whose updates are given


@pytest.fixture
def arrays(golden):
    return {**golden("fl_rounds"), **golden("fl_more")}


def play_updates(
    updates, *links, weighting="uniform", rounds=1, where=(2, 2), around=None
):
    """Rounds of clients that move by `updates` [K, 18] from wherever they are.

    The k-th of them has k + 1 examples. `around` changes the algorithm.
    """
    number, given = len(updates), jnp.asarray(updates)

    def train(key, variables, client):
        del key
        end = jax.tree.map(jnp.add, variables["params"], unflat_row(given[client.id]))
        zero = jnp.zeros(())
        return {**variables, "params": end}, {"loss": zero, "steps": zero + 1}

    sizes = range(1, number + 1)
    examples = [[np.zeros((n, 5)) for n in sizes], [np.zeros(n, int) for n in sizes]]
    algorithm = with_aggregation(fedavg(train, weighting=weighting), *links)
    algorithm = around(algorithm) if around else algorithm
    start = unflat(np.zeros(18))
    return replay(algorithm, examples, start, where=where, rounds=rounds)


def unflat_row(w):
    return {"W": w[:15].reshape(5, 3), "b": w[15:]}


def network_of(server):
    """Flat parameters of a server with or without the state of links."""
    return flat(getattr(server, "inner", server).variables)


def center_of(server):
    """The flat center, which is all that links keep."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(server.links)])


def krum_of(f, keep=1):
    return krum(num_malicious_clients=f, num_clients_to_keep=keep)


RULES = {  # (rule, K, weighting of clients)
    "median": (median(), 9, "num_examples"),
    "median_first8": (median(), 8, "num_examples"),
    "trimmed_02": (trimmed_mean(trim_fraction=0.2), 9, "num_examples"),
    "trimmed_025": (trimmed_mean(trim_fraction=0.25), 9, "num_examples"),
    "krum": (krum_of(2), 9, "num_examples"),
    "multikrum_m4": (krum_of(2, 4), 9, "num_examples"),
    "bulyan_f1": (bulyan(num_malicious_clients=1), 9, "num_examples"),
    "bulyan_f2_11": (bulyan(num_malicious_clients=2), 11, "num_examples"),
    "geomed_50": (geometric_median(iterations=50), 9, "uniform"),
    "geomed_weighted_50": (geometric_median(iterations=50), 9, "num_examples"),
    # Its rule for an early stop does not come into play here.
    "rfa_official_default": (
        geometric_median(iterations=4, smoothing=1e-5),
        9,
        "uniform",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_robust_aggregates_are_the_official_ones(arrays, name):
    rule, count, weighting = RULES[name]
    updates = np.concatenate([arrays["rob_u"], arrays["rob_u11_extra"]])[:count]
    with jax.enable_x64(True):
        end = play_updates(updates, rule, weighting=weighting)
        close(network_of(end.servers[0]), arrays[f"rob_{name}"])
    close(arrays["rob_geomed_weights"], np.arange(1, 10) / 45)  # those of examples
    assert arrays["rob_rfa_official_default_iters"] == 4


def unflat_rows(w):
    return {"W": w[:, :15].reshape(-1, 5, 3), "b": w[:, 15:]}


def compiled_rule(rule):
    """Updates [K, ...], weights [K] -> what a rule makes of them."""
    return jax.jit(lambda updates, weights: aggregate(rule, updates, weights)[0])


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"median_first8"}))
def test_a_rule_of_updates_with_one_that_is_not_finite_is_that_of_the_others(
    arrays, name
):
    updates = np.concatenate([arrays["rob_u"], arrays["rob_u11_extra"]])
    updates -= updates.mean(axis=0)[None]  # around what a client left out is taken for
    bad = np.insert(updates, 4, 0, axis=0)
    counts, rule = np.arange(1.0, 12), compiled_rule(RULES[name][0])
    with jax.enable_x64(True):
        others = rule(unflat_rows(updates), counts)
        for number in (np.nan, np.inf, -np.inf):
            bad[4, 17] = number  # a single coordinate
            found = rule(unflat_rows(bad), np.insert(counts, 4, 5))
            jax.tree.map(close, found, others)


ROBUST = {
    "median": median(),
    "trimmed_mean": trimmed_mean(trim_fraction=0.2),
    "krum": krum_of(2),
    "multi_krum": krum_of(2, keep=3),
    "bulyan": made("bulyan", num_malicious_clients=1),
    "geometric_median": geometric_median(),
    "rfa": made("rfa"),
    "clip_by_global_norm": made("clip_by_global_norm", max_norm=2.0),
    "centered_clip": made("centered_clip", max_norm=2.0),
    "clipping, mean": chain(
        AGGREGATORS["adaptive_robust_clipping"](num_malicious_clients=2),
        weighted_mean(),
    ),
    "neighbors, median": chain(
        AGGREGATORS["nearest_neighbor_mixing"](num_malicious_clients=2), median()
    ),
}


@pytest.mark.parametrize("name", ROBUST)
def test_one_huge_finite_update_overflows_in_no_robust_rule(name):
    """In float32 as in float64, whose squares do not overflow."""
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(9, 18)) * rng.uniform(0.5, 2, size=(9, 1))
    for size in (1e22, 3e38):
        for direction in (np.ones(18), rng.choice([-1.0, 0.5, 1.0], 18)):
            updates[3] = size * direction
            counts = np.arange(1.0, 10)
            found = compiled_rule(ROBUST[name])(
                unflat_rows(np.float32(updates)), np.float32(counts)
            )
            with jax.enable_x64(True):
                exact = compiled_rule(ROBUST[name])(unflat_rows(updates), counts)
            for x, y in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
                assert x.dtype == np.float32 and np.abs(x).max() < 5


DROPPING = {
    "median": median(),
    "geometric_median": geometric_median(),
    "krum": krum_of(2),
    "clip_by_global_norm": clip_by_global_norm(),
    "centered_clip": centered_clip(),
    "rfa": rfa(),
    "drop_non_finite": AGGREGATORS["drop_non_finite"](),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_client_whose_update_is_not_finite_is_dropped_and_named(arrays, name):
    updates, link = np.asarray(arrays["rob_u"]), DROPPING[name]
    bad = np.append(updates, [np.full(18, np.nan)], axis=0)
    with jax.enable_x64(True):
        expected = play_updates(updates, link, rounds=2)
        found = play_updates(bad, link, rounds=2)
        for server, want in zip(found.servers, expected.servers, strict=True):
            jax.tree.map(close, server, want)
        assert found.metrics["dropped"].tolist() == 9 * [0] + [1]
        if name in ("median", "drop_non_finite"):  # of all at once, and of each
            says = "round 1 .* from all 9 clients"
            with pytest.raises(FloatingPointError, match=says):
                play_updates(np.full_like(updates, np.inf), link)


@pytest.mark.parametrize("link", ["mean", "median"])
def test_bad_updates_are_excluded_and_counted_until_too_few_are_left(arrays, link):
    """Those that are not finite and those that are too long."""
    updates, links = np.asarray(arrays["rob_u"]), [median()] if link == "median" else []
    norms = np.linalg.norm(updates, axis=1)
    bad = np.concatenate([updates, 100 + updates[:1], np.full((1, 18), np.nan)])
    check = partial(with_update_checks, max_norm=2 * norms.max())
    with jax.enable_x64(True):
        found = play_updates(bad, *links, around=check)
        want = play_updates(updates, *links)
        jax.tree.map(close, found.servers[0], want.servers[0])
        assert found.metrics["dropped"].tolist() == 9 * [0] + 2 * [1]
        stop, many = {"on_bad_update": "stop"}, {"min_kept": 0.9}
        for around in (partial(check, **stop), partial(check, **many)):
            with pytest.raises(FloatingPointError, match=r"from 2 of 11 .*\(9, 10\)"):
                play_updates(bad, *links, around=around)


@pytest.mark.parametrize("of", ["X", "X2"])
@pytest.mark.parametrize("f", [1, 3])
def test_krum_is_the_papers_of_k_minus_f_minus_2_neighbors(golden, of, f):
    """Not of one neighbor more as in byzfl, which chooses other clients here."""
    arrays = golden("robust_byzfl")
    rows = arrays[f"{of}_multikrum_paper_f{f}_rows_own"]
    with jax.enable_x64(True):
        one = compiled_rule(krum_of(f))(arrays[of], np.ones(11))
        mean = compiled_rule(krum_of(f, len(rows)))(arrays[of], np.ones(11))
    close(one, arrays[of][arrays[f"{of}_krum_paper_f{f}_index_own"]])
    close(mean, arrays[f"{of}_multikrum_paper_f{f}_own"])


def test_krum_scores_and_bulyans_choices_are_the_official_ones(arrays):
    with jax.enable_x64(True):
        distances = jax.jit(squared_distances)(unflat_rows(arrays["rob_u"]))
        scores = jax.jit(partial(krum_scores, count=9 - 2 - 2))(distances)
        close(scores, arrays["rob_krum_scores"])
        chosen = jax.jit(lambda x: choose_one_by_one(x, 7, 1))(distances)
    np.testing.assert_array_equal(chosen, arrays["rob_bulyan_f1_selected"])


def test_clipping_by_the_global_norm_is_flowers(arrays):
    with jax.enable_x64(True):
        end = play_updates(arrays["rob_u"], clip_by_global_norm(max_norm=1.0))
        close(network_of(end.servers[0]), arrays["rob_norm_clip_1_mean"])
    is_long = np.linalg.norm(arrays["rob_u"], axis=1) > 1
    np.testing.assert_array_equal(end.metrics["clip_fraction"], is_long)


def test_centered_clipping_goes_on_from_the_center_of_the_round_before(arrays):
    """A call of the official code is three iterations, three rounds of ours."""
    with jax.enable_x64(True):
        link = centered_clip(max_norm=1.0)
        servers = play_updates(arrays["rob_u"], link, rounds=6).servers
        close(center_of(servers[2]), arrays["rob_centered_clip_call1"])
        close(center_of(servers[5]), arrays["rob_centered_clip_call2"])
        close(network_of(servers[5]), sum(map(center_of, servers)))


@pytest.mark.parametrize("weighting", ["uniform", "num_examples"])
def test_rounds_of_rfa_are_iterations_from_the_received_model(arrays, weighting):
    """Of clients whose updates stay the same, two of nine far away."""
    updates = np.asarray(arrays["rob_u"]).copy()
    updates[:2] += 50
    counts = np.arange(1.0, 10) if weighting == "num_examples" else np.ones(9)
    centers = [np.zeros(18)]
    for _ in range(60):
        distances = np.linalg.norm(updates - centers[-1], axis=1)
        centers.append(np.average(updates, axis=0, weights=counts / distances))
    with jax.enable_x64(True):
        wanted = compiled_rule(geometric_median(iterations=200))(updates, counts)
        servers = play_updates(updates, rfa(), weighting=weighting, rounds=60).servers
        for server, expected in zip(servers, centers[1:], strict=True):
            close(center_of(server), expected)
        close(network_of(servers[-1]), sum(map(center_of, servers)))
    np.testing.assert_allclose(centers[-1], wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(updates.mean(0) - centers[-1]).min() > 5  # where the mean is


def test_an_update_in_the_center_weighs_no_more_than_the_smoothing_lets_it():
    updates = np.stack([np.zeros(18), np.ones(18)])
    with jax.enable_x64(True):
        (server,) = play_updates(updates, rfa(smoothing=0.5)).servers
    shares = np.array([1 / 0.5, 1 / np.sqrt(18)])
    close(center_of(server), np.full(18, shares[1] / shares.sum()))


@pytest.mark.parametrize(
    "rule, least",
    [
        (krum_of(4), 11),
        (krum_of(1, 10), 10),
        (bulyan(num_malicious_clients=2), 11),
        (chain(clip_by_global_norm(), krum_of(4)), 11),
    ],
)
def test_a_cohort_too_small_for_its_malicious_clients_is_refused(arrays, rule, least):
    with pytest.raises(ValueError, match=f"at least {least} .* got 9"):
        play_updates(arrays["rob_u"], rule)
    algorithm = with_aggregation(fedavg(LOCAL), rule)
    with pytest.raises(ValueError, match=f"at least {least} .* got {least - 1}"):
        algorithm.check_cohort(least - 1)
    algorithm.check_cohort(least)


def test_a_rule_of_ones_own_sees_kernels_with_their_axes(arrays):
    def combine(updates, weights):
        del weights
        return jax.tree.map(lambda x: jnp.flip(x, 1).mean(0), updates)

    with jax.enable_x64(True):
        end = play_updates(arrays["rob_u"], of_all_updates(combine))
    want = unflat_row(arrays["rob_u"].mean(0))
    want = {"params": {name: x[::-1] for name, x in want.items()}}
    close(network_of(end.servers[0]), flat(want))


# --- Chains


def program(algorithm, variables):
    """What a round compiles to, without the names of source lines."""
    mesh, extra = make_mesh(2), empty_prepared(5)
    sim = build_simulation(algorithm, feed(), *problem(), mesh=mesh)
    server = start_simulation(sim, variables)
    row = jax.eval_shape(algorithm.init_personal, sim.key, server)
    sizes = {"cohort_size": 5, "lanes": 1, "shards": None}
    given = {"server": server, "row": row, "extra": on_mesh(mesh, extra)}
    arguments = round_arguments(
        mesh, **sizes, **given, table=sim.device_data, key=sim.key
    )
    text = sim.programs.run_whole.lower(*arguments).compile().as_text()
    text = re.sub(r"\.\d+|, metadata={[^}]*}|^(\d+ |[A-Z]\w+$).*", "", text, flags=re.M)
    return [line for line in text.splitlines() if line]


def test_an_empty_chain_is_the_algorithm_and_one_of_the_mean_compiles_to_it():
    algorithm, variables = fedavg_toy()
    assert with_aggregation(algorithm) is algorithm
    assert chain(weighted_mean()).init is weighted_mean().init  # no state
    plain = program(algorithm, variables)
    linked = with_aggregation(algorithm, weighted_mean())
    assert program(linked, variables) == plain
    clipped = with_aggregation(algorithm, clip_by_global_norm())
    assert program(clipped, variables) != plain


numbers = st.floats(-100, 100, width=32)
updates_of = st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=5, max_size=5)
few = settings(max_examples=25, deadline=None)
ORDERLESS = ("median", "trimmed_mean", "geometric_median", "attention")


@functools.cache
def compiled(name, **options):
    """Updates [5, 4], key -> what a chain with this link makes of them."""
    link = made(name, **options)
    return jax.jit(lambda updates, key: aggregate(link, updates, key=key)[0])


@jax.jit
def clipped(updates, bound):
    return aggregate(made("clip_by_global_norm", max_norm=bound), updates)[0]


@few
@given(updates_of, st.floats(0.5, 200))
def test_no_clipped_update_is_longer_than_its_bound_and_short_ones_stay(rows, bound):
    for update in np.array(rows, np.float32):
        found, norm = clipped(update[None], bound), np.linalg.norm(update)
        assert np.linalg.norm(found) <= bound * (1 + 1e-5)
        scale = min(1, bound / norm) if norm else 1
        np.testing.assert_allclose(found, update * scale, rtol=1e-4, atol=1e-5)


@few
@given(updates_of, st.sampled_from([1, 4, 12]), st.integers(0, 99))
def test_a_quantized_number_is_one_of_the_two_levels_around_it(rows, bits, key):
    x = np.array(rows, np.float32)[:1]
    found = compiled("stochastic_quantize", bits=bits)(x, key)
    step = (x.max() - x.min()) / (2**bits - 1)
    assert (np.abs(found - x[0]) <= step * 1.001 + 1e-4).all()
    level = (np.asarray(found) - x.min()) / (step or 1)
    if step > 1e-3:
        np.testing.assert_allclose(level, level.round(), atol=0.1)


def test_a_quantized_number_is_the_number_itself_on_average():
    x = np.float32([[0, 0.1, 0.5, 1]])
    link = compiled("stochastic_quantize", bits=1)
    each = jax.jit(jax.vmap(lambda key: link(x, key)))
    found = np.asarray(each(np.arange(1000, dtype=np.int32)))
    np.testing.assert_allclose(found.mean(axis=0), x[0], atol=0.05)
    assert set(np.ravel(found)) == {0, 1}


@few
@given(updates_of, st.permutations(range(5)))
def test_no_rule_looks_at_the_order_of_clients(rows, order):
    updates = np.array(rows, np.float32)
    for name in ORDERLESS:
        one, other = (compiled(name)(x, 0) for x in (updates, updates[order]))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_chains_of_chains_are_chains():
    updates = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    links = clip_by_global_norm(max_norm=1.5), centered_clip(), rfa(), weighted_mean()
    chains = chain(*links), chain(chain(*links[:2]), chain(*links[2:]))

    @jax.jit
    def rounds(updates):
        states, found = [None, None], []
        for _ in range(3):
            ends = [
                aggregate(link, updates, state=state)
                for link, state in zip(chains, states, strict=True)
            ]
            states = [state for _, state in ends]
            found.append([end for end, _ in ends])
        return found

    for plain, nested in rounds(updates):
        np.testing.assert_allclose(plain, nested, rtol=1e-6)


def test_noise_behind_the_mean_is_on_the_sum_and_before_it_on_the_mean():
    updates, weights = np.zeros((4, 10000), np.float32), np.full(4, 5.0)
    noise = gaussian_noise(std=2.0)
    before = jax.jit(partial(aggregate, chain(noise, weighted_mean())))
    behind = jax.jit(partial(aggregate, chain(weighted_mean(), noise)))
    noisy = lambda run, key: np.asarray(run(updates, weights, key=key)[0])
    on_mean, on_sum = noisy(before, 0), noisy(behind, 0)
    assert abs(np.std(on_mean) - 2) < 0.1 and abs(np.std(on_sum) - 2 / 20) < 0.005
    np.testing.assert_array_equal(on_mean, noisy(before, 0))
    assert np.abs(on_mean - noisy(before, 1)).min() > 0


def test_links_leave_running_statistics_alone_but_for_rules_and_weights():
    """Clipped, quantized and noisy params beside the plain mean of statistics."""
    random = np.random.default_rng(0)
    values = {"w": random.normal(size=(3, 8)).astype(np.float32)}
    updates = {"params": values, "batch_stats": {"norm": values}}
    links = (
        clip_by_global_norm(max_norm=0.1),
        centered_clip(max_norm=0.1),
        stochastic_quantize(bits=2),
        gaussian_noise(std=1.0),
    )
    found, _ = aggregate(chain(*links, weighted_mean()), updates, np.arange(1.0, 4))
    found = jax.device_get(found)
    mean = np.average(values["w"], axis=0, weights=np.arange(1.0, 4))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(found["batch_stats"]["norm"]["w"], mean)
    assert np.abs(found["params"]["w"] - mean).max() > 0.1


def test_noise_of_a_round_is_of_the_seed_and_the_round():
    """Whatever the devices, and on top of what FedAvg does."""
    name = "linked gaussian_noise"
    end = contracts.reference(name)[0]
    sim = contracts.simulated(name, *contracts.APART)
    contracts.assert_close(contracts.rounds(name, sim, (0, 1))[0], end)
    plain = contracts.reference("linked weighted_mean")[0]
    body, without = (x.variables["params"]["body"] for x in (end, plain))
    assert 0.005 < np.std(body - without) < 0.03


def test_what_stands_in_the_place_of_the_mean_ends_a_chain():
    with pytest.raises(ValueError, match="must end with link 1.* got 2 links"):
        chain(median(), rfa(), weighted_mean())
    with pytest.raises(ValueError, match="must have exactly one mean, got 2"):
        chain(weighted_mean(), median())
    clipped = with_aggregation(fedavg(LOCAL), clip_by_global_norm())
    with pytest.raises(ValueError, match="cannot replace the mean of .*fedavg"):
        with_aggregation(clipped, median())
    with pytest.raises(ValueError, match="must be one chain, got a second one around"):
        with_aggregation(with_aggregation(clipped, rfa()), rfa())
    ifca = contracts.MEMBERS["ifca"].build()
    with pytest.raises(ValueError, match="cannot replace the mean of .*ifca"):
        with_aggregation(ifca, median())
    with pytest.raises(ValueError, match="cannot have a link with a center.*got 2"):
        with_aggregation(ifca, rfa()).init(contracts.MEMBERS["ifca"].variables)
    with pytest.raises(ValueError, match="whose updates are summed, got .*finch"):
        with_aggregation(contracts.MEMBERS["finch"].build(), rfa())
    for one in (nearest_neighbor_mixing(), bucketing()):
        with pytest.raises(ValueError, match="needs a mean, or a rule .* link 2"):
            chain(clip_by_global_norm(), one)
        with pytest.raises(ValueError, match="cannot replace the mean of .*ifca"):
            with_aggregation(ifca, one)
        with pytest.raises(ValueError, match="with error feedback before those"):
            with_aggregation(fedavg(LOCAL), one, top_k())


def test_links_of_a_config_are_names_or_names_with_settings():
    assert build_links("aggregation") == ()
    for form in ("median", {"name": "median"}, ("median",), [{"name": "median"}]):
        (link,) = build_links("aggregation", form)
        assert link.role == "last"
    roles = [x.role for x in build_links("a", ("rfa", {"name": "weighted_mean"}))]
    assert roles == ["link", "mean"]
    with pytest.raises(ValueError, match="config.a.name must be one of .*did you mean"):
        build_links("a", ("mediann",))
