"""Rules, what mixes updates before them, and attacks, against byzfl's numbers.

Krum is the paper's, with one neighbor fewer than byzfl's, see test_aggregation.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.aggregation import (
    adaptive_robust_clipping,
    bucketing,
    centered_clip,
    chain,
    clip_by_global_norm,
    geometric_median,
    median,
    nearest_neighbor_mixing,
    trimmed_mean,
    weighted_mean,
)
from fedfr_jax.federated.aggregation.contract import on_all_updates
from fedfr_jax.federated.aggregation.mixing import average
from fedfr_jax.federated.attacks.contract import HONEST, MALICIOUS, put_collusion
from fedfr_jax.federated.attacks.updates import (
    alie,
    gaussian,
    inner_product,
    sign_flip,
)
from tests.federated.test_aggregation import aggregate
from tests.federated.toys import close


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
        found[f"nnm_f{f}"], found[f"arc_f{f}"] = (
            mixed(nnm, updates),
            mixed(arc, updates),
        )
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


@pytest.fixture(scope="module")
def rules():
    return jax.jit(of_rules)


@pytest.mark.parametrize("of", ["X", "X2"])
def test_rules_and_mixing_give_the_numbers_of_byzfl(golden, rules, of):
    arrays = golden("robust_byzfl")
    with jax.enable_x64(True):
        found = rules(arrays[of])
        assert len(found) == 23
        for name, value in found.items():
            # Centered clipping adds up the moves, byzfl the centers.
            tolerance = 1e-6 if "geomed" in name else 1e-10
            np.testing.assert_allclose(
                value, arrays[f"{of}_{name}"], rtol=tolerance, atol=tolerance
            )


def test_clipping_and_buckets_of_a_known_order_are_byzfls(golden):
    arrays = golden("robust_byzfl")
    with jax.enable_x64(True):
        for c in (1, 2):
            link = clip_by_global_norm(max_norm=c)
            send = lambda x, link=link: link.summarize(
                jax.random.key(0), (), [x], jnp.ones(())
            )
            (clipped,) = jax.jit(jax.vmap(send))(arrays["X"])[0].update
            close(clipped, arrays[f"X_clip_c{c}"])
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


def test_attacks_are_byzfls(golden):
    arrays = golden("robust_byzfl")
    with jax.enable_x64(True):
        everybody = np.concatenate([arrays["honest"], np.full((2, 7), 1e3)])
        is_honest = np.arange(10) < 8
        attacks = {f"ipm_tau{tau}": inner_product(tau=tau) for tau in (0.5, 1.1, 2)}
        attacks |= {f"alie_tau{tau}": alie(tau=tau) for tau in (1.5, -1, 0.5)}
        attacks["foe_tau1.1_own"] = inner_product(tau=1.1 - 1)

        @jax.jit
        def sent(everybody):
            of = lambda attack: attack.collude([everybody], is_honest)[0]
            found = {name: of(attack) for name, attack in attacks.items()}
            mean = everybody[:8].mean(axis=0)
            return {**found, "signflip": sign_flip().change(None, [mean])[0]}

        for name, found in sent(everybody).items():
            close(found, arrays[f"atk_{name}"])
        noise = lambda key: gaussian(mean=0.5, std=2).change(key, [jnp.zeros(4000)])[0]
        drawn = np.asarray(jax.jit(noise)(jax.random.key(0)))
        assert abs(drawn.mean() - 0.5) < 0.1 and abs(drawn.std() - 2) < 0.1
        close(arrays["atk_gaussian_mu0.5_s2"], 0.5 + 2 * arrays["atk_gaussian_draw"])


def test_colluding_attackers_send_what_they_make_of_the_honest_updates(golden):
    """Through the whole of an aggregation, in the places of their own updates."""
    arrays = golden("robust_byzfl")
    with jax.enable_x64(True):
        rows = np.insert(arrays["honest"], [0, 4, 8], 1e3, axis=0)
        is_bad = np.isin(np.arange(11), [0, 5, 10])
        roles = np.where(is_bad, MALICIOUS, HONEST)
        attack = alie(tau=1.5)
        link = nearest_neighbor_mixing()._replace(mix=put_collusion(attack.collude))
        for rule in (median(), chain(clip_by_global_norm(max_norm=1), weighted_mean())):
            found, _ = aggregate(on_all_updates(link, rule), (rows, roles))
            rows[is_bad] = arrays["atk_alie_tau1.5"]
            close(found, aggregate(rule, rows)[0])
