"""Rules against malicious clients, against official code and byzfl's numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.aggregation.clip import centered_clip, clip_by_global_norm
from fedfr_jax.federated.aggregation.contract import chain
from fedfr_jax.federated.aggregation.mean import attention, weighted_mean
from fedfr_jax.federated.aggregation.robust import (
    adaptive_robust_clipping,
    average,
    bucketing,
    bulyan,
    geometric_median,
    krum,
    median,
    nearest_neighbor_mixing,
    of_all_updates,
    rfa,
    trimmed_mean,
)
from tests.federated.aggregation.played import (
    aggregate,
    center_of,
    network_of,
    play_updates,
    unflat_row,
)
from tests.federated.toys import LOCAL, close, flat


@pytest.fixture
def arrays(golden):
    return {**golden("fl_rounds"), **golden("fl_more")}


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


def unflat_rows(w):
    return {"W": w[:, :15].reshape(-1, 5, 3), "b": w[:, 15:]}


def compiled_rule(rule):
    """Updates [K, ...], weights [K] -> what a rule makes of them."""
    return jax.jit(lambda updates, weights: aggregate(rule, updates, weights)[0])


@pytest.mark.parametrize("name", RULES)
def test_aggregates_are_the_official_ones_also_beside_an_update_that_is_not_finite(
    arrays, name
):
    """A client is left out whose update has one coordinate that is no number."""
    rule, count, weighting = RULES[name]
    updates = np.concatenate([arrays["rob_u"], arrays["rob_u11_extra"]])[:count]
    counts = np.ones(count) if weighting == "uniform" else np.arange(1.0, count + 1)
    run, bad = compiled_rule(rule), np.insert(updates, 4, updates.mean(axis=0), axis=0)
    with jax.enable_x64(True):
        found = run(unflat_rows(updates), counts)
        close(flat(found), arrays[f"rob_{name}"])
        for number in (np.nan, -np.inf):
            bad[4, 17] = number
            others = run(unflat_rows(bad), np.insert(counts, 4, 5))
            jax.tree.map(close, others, found)


ROBUST = {
    "median": median(),
    "trimmed_mean": trimmed_mean(trim_fraction=0.2),
    "multi_krum": krum_of(2, keep=3),
    "bulyan": bulyan(num_malicious_clients=1),
    "geometric_median": geometric_median(),
    "rfa": chain(rfa(), weighted_mean()),
    "clip_by_global_norm": chain(clip_by_global_norm(max_norm=2.0), weighted_mean()),
    "centered_clip": chain(centered_clip(max_norm=2.0), weighted_mean()),
    "clipping, mean": chain(
        adaptive_robust_clipping(num_malicious_clients=2), weighted_mean()
    ),
    "neighbors, median": chain(
        nearest_neighbor_mixing(num_malicious_clients=2), median()
    ),
}


@pytest.mark.parametrize("name", ROBUST)
def test_one_huge_finite_update_overflows_in_no_robust_rule(name):
    """In float32 as in float64, whose squares do not overflow."""
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(9, 18)) * rng.uniform(0.5, 2, size=(9, 1))
    rule, counts = compiled_rule(ROBUST[name]), np.arange(1.0, 10)
    for size in (1e22, 3e38):
        for direction in (np.ones(18), rng.choice([-1.0, 0.5, 1.0], 18)):
            updates[3] = size * direction
            found = rule(unflat_rows(np.float32(updates)), np.float32(counts))
            with jax.enable_x64(True):
                exact = rule(unflat_rows(updates), counts)
            for x, y in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
                assert x.dtype == np.float32 and np.abs(x).max() < 5


@pytest.mark.parametrize("name", ["median", "rfa", "drop_non_finite"])
def test_a_client_whose_update_is_not_finite_is_dropped_and_named(arrays, name):
    """With rules of all updates at once, of each, and with a state."""
    updates, link = np.asarray(arrays["rob_u"]), ff.AGGREGATORS[name]()
    bad = np.append(updates, [np.full(18, np.nan)], axis=0)
    with jax.enable_x64(True):
        expected = play_updates(updates, link, rounds=2)
        found = play_updates(bad, link, rounds=2)
        for server, want in zip(found.servers, expected.servers, strict=True):
            jax.tree.map(close, server, want)
        assert found.metrics["dropped"].tolist() == 9 * [0] + [1]
        if name == "median":
            says = "round 1 .* from 9 of 9 clients"
            with pytest.raises(FloatingPointError, match=says):
                play_updates(np.full_like(updates, np.inf), link)


def test_bad_updates_are_excluded_and_counted_until_too_few_are_left(arrays):
    """Those that are not finite and those that are too long."""
    updates = np.asarray(arrays["rob_u"])
    norms = np.linalg.norm(updates, axis=1)
    bad = np.concatenate([updates, 100 + updates[:1], np.full((1, 18), np.nan)])
    check = partial(ff.with_update_checks, max_norm=2 * norms.max())
    with jax.enable_x64(True):
        found = play_updates(bad, median(), around=check)
        want = play_updates(updates, median())
        jax.tree.map(close, found.servers[0], want.servers[0])
        assert found.metrics["dropped"].tolist() == 9 * [0] + 2 * [1]
        for options in ({"on_bad_update": "stop"}, {"min_kept": 0.9}):
            with pytest.raises(FloatingPointError, match=r"from 2 of 11 .*\(9, 10\)"):
                play_updates(bad, median(), around=partial(check, **options))


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


def test_centered_clipping_goes_on_from_the_center_of_the_round_before(arrays):
    """A call of the official code is three iterations, three rounds of ours."""
    with jax.enable_x64(True):
        link = centered_clip(max_norm=1.0)
        servers = play_updates(arrays["rob_u"], link, rounds=6).servers
        close(center_of(servers[2]), arrays["rob_centered_clip_call1"])
        close(center_of(servers[5]), arrays["rob_centered_clip_call2"])
        close(network_of(servers[5]), sum(map(center_of, servers)))


def test_rounds_of_rfa_are_iterations_from_the_received_model(arrays):
    """Of clients whose updates stay the same, two of nine far away."""
    updates = np.asarray(arrays["rob_u"]).copy()
    updates[:2] += 50
    counts, centers = np.arange(1.0, 10), [np.zeros(18)]
    for _ in range(60):
        distances = np.linalg.norm(updates - centers[-1], axis=1)
        centers.append(np.average(updates, axis=0, weights=counts / distances))
    played = partial(play_updates, weighting="num_examples", rounds=60)
    with jax.enable_x64(True):
        wanted = compiled_rule(geometric_median(iterations=200))(updates, counts)
        servers = played(updates, rfa()).servers
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
def test_a_cohort_too_small_for_its_malicious_clients_is_refused(rule, least):
    algorithm = ff.with_aggregation(ff.fedavg(LOCAL), rule)
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


# --- What mixes updates before rules, and byzfl's numbers


def mixed(link, updates):
    """Rows [R, D] that a link makes of updates [K, D]."""
    return link.mix(jax.random.key(0), [updates], jnp.ones(len(updates)))[0][0]


def rounds(link, updates, count):
    """Aggregates after `count` rounds of the same updates, [count, D]."""
    state, found = None, []
    for _ in range(count):
        one, state = aggregate(chain(link, weighted_mean()), updates, state=state)
        found.append(one)
    return found


def of_rules(updates):
    """What rules make of updates [11, D], by their names in the golden file."""
    rules = {"mean": weighted_mean(), "median": median()}
    rules["geomed_nu1e-06_T200"] = geometric_median(iterations=200)
    found = {}
    for f in (1, 3):
        trim = trimmed_mean(trim_fraction=f / 10.9)
        nnm = nearest_neighbor_mixing(num_malicious_clients=f)
        arc = adaptive_robust_clipping(num_malicious_clients=f)
        found[f"nnm_f{f}"] = mixed(nnm, updates)
        found[f"arc_f{f}"] = mixed(arc, updates)
        rules[f"trmean_f{f}"] = trim
        rules[f"nnm_trmean_f{f}"] = chain(nnm, trim)
        rules[f"nnm_median_f{f}"] = chain(nnm, median())
        rules[f"arc_nnm_trmean_f{f}"] = chain(arc, nnm, trim)
    for name, rule in rules.items():
        found[name] = aggregate(rule, updates)[0]
    for tau, steps in ((100, 1), (2, 1), (2, 5), (0.5, 3)):
        centers = rounds(centered_clip(max_norm=tau), updates, 2 * steps)
        for call in (1, 2):
            name = f"cclip_tau{tau}_L{steps}_call{call}"
            found[name] = centers[call * steps - 1]
    return found


def test_rules_and_mixing_give_the_numbers_of_byzfl(golden):
    arrays, rules = golden("robust_byzfl"), jax.jit(of_rules)
    with jax.enable_x64(True):
        for of in ("X", "X2"):
            for name, value in rules(arrays[of]).items():
                # Centered clipping adds up the moves, byzfl the centers.
                near = 1e-6 if "geomed" in name else 1e-10
                close(value, arrays[f"{of}_{name}"], rtol=near, atol=near)


def test_buckets_of_a_known_order_are_byzfls(golden):
    arrays = golden("robust_byzfl")
    with jax.enable_x64(True):
        for size in (2, 3):
            place = np.argsort(arrays[f"X_bucket_s{size}_perm"])
            is_in = place[None] // size == np.arange(-(-11 // size))[:, None]
            (found,) = jax.jit(average)(is_in, [arrays["X"]])
            close(found, arrays[f"X_bucket_s{size}"])


def test_buckets_are_means_of_random_clients_each_in_one():
    """Of one-hot updates, whose rows say who is in; clients left out are in none."""
    weights = np.ones(11, np.float32)
    weights[[3, 7]] = 0
    mix = jax.jit(bucketing(clients_per_bucket=2).mix)
    seen = set()
    for seed in range(5):
        one_hot = [np.eye(11, dtype=np.float32)]
        (rows,), kept = mix(jax.random.key(seed), one_hot, weights)
        assert rows.shape == (6, 11) and kept.tolist() == [1] * 5 + [0]
        members = (np.asarray(rows) > 0).astype(int)
        assert members.sum(axis=1).tolist() == [2, 2, 2, 2, 1, 0]
        assert members.sum(axis=0).tolist() == [int(w > 0) for w in weights]
        seen.add(members.tobytes())
    assert len(seen) > 1


def test_a_mixed_update_that_is_not_finite_is_left_out_of_all_rows(golden):
    arrays = golden("robust_byzfl")
    with jax.enable_x64(True):
        bad = np.insert(arrays["X"], 4, np.nan, axis=0)
        nnm = nearest_neighbor_mixing(num_malicious_clients=3)
        close(aggregate(chain(nnm, median()), bad)[0], arrays["X_nnm_median_f3"])
        whole = chain(bucketing(clients_per_bucket=12), weighted_mean())
        close(aggregate(whole, bad)[0], arrays["X_mean"])


def test_attentive_aggregation_equals_the_official_one(golden):
    arrays = golden("fedatt")
    names = {"weight": "fc.weight", "bias": "fc.bias"}
    old = {k: arrays[f"server_{x}"].astype(float) for k, x in names.items()}
    updates = {
        k: np.stack([arrays[f"client{c}_{x}"] - old[k] for c in range(3)])
        for k, x in names.items()
    }
    for norm in ("spectral", "l2"):
        link = attention(epsilon=float(arrays["epsilon"]), distance_norm=norm)
        with jax.enable_x64(True):
            moved, _ = aggregate(link, updates)
        if norm == "spectral":
            for k, x in names.items():
                close(
                    old[k] + np.asarray(moved[k]),
                    arrays[f"next_{x}"],
                    rtol=1e-5,
                    atol=1e-6,
                )
    power = np.exp(np.linalg.norm(updates["weight"], axis=(1, 2)))  # of l2
    attended = np.tensordot(power / power.sum(), updates["weight"], 1)
    close(moved["weight"], float(arrays["epsilon"]) * attended)
