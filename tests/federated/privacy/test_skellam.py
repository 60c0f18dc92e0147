"""Skellam noise: whole numbers of clients, under a secure sum, and their epsilon."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import optimize, special

import fedfr_jax as ff
from fedfr_jax.federated.privacy.accountant import (
    ORDERS,
    Mechanism,
    build_accountant,
    calibrate_noise,
)
from fedfr_jax.federated.privacy.mechanism import skellam_mean
from fedfr_jax.federated.privacy.skellam import (
    draw,
    noise_table,
    norm_before_rounding,
    round_to_norm,
    skellam_divergences,
    skellam_noise,
)
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Summary
from tests.federated.aggregation.played import aggregate
from tests.federated.toys import (
    LOCAL,
    fedavg_of,
    feed,
    norm_loss,
    norm_variables,
    play,
    problem,
)
from tests.test_examples import load

secure_sum = load("secure_sum").secure_sum

NUMBERS = {"clip_norm": 0.5, "noise_multiplier": 1.5, "cohort_size": 6, "delta": 1e-3}


def settings(**options):
    return ff.Privacy(**{**NUMBERS, **options})


def link_of(noise, **options):
    return skellam_mean(settings(noise=noise, **options), noise)


def sends(link):
    """sends(seed, update) -> (whole numbers of a client, metrics)."""

    @jax.jit
    def send(seed, update):
        key = jax.random.key(seed)
        summary, metrics = link.summarize(key, (), update, jnp.ones(()))
        return summary.update, metrics

    return send


def chances(std, radius):
    """P(X = x) for x from -radius to radius."""
    return special.ive(np.abs(np.arange(-radius, radius + 1)), std**2)


@pytest.mark.parametrize("std", [0.4, 5.0, 300.0])
def test_a_share_is_the_difference_of_two_poisson_numbers(std):
    table = noise_table(std)
    radius = table.largest
    bounds = np.concatenate([[0], table.thresholds.astype(np.float64), [2**32]])
    found = np.diff(bounds) / 2**32
    assert table.lowest == -radius or table.lowest == 1 - radius
    expected = chances(std, radius)[table.lowest + radius :][: len(found)]
    np.testing.assert_allclose(found, expected, atol=2**-31)
    like = jnp.zeros(200_000)
    drawn = jax.jit(lambda key: draw(key, like, table))(jax.random.key(0))
    drawn = np.float64(drawn)
    poisson = np.random.default_rng(0).poisson(std**2 / 2, (2, 200_000))
    other = np.float64(poisson[0] - poisson[1])
    for moment in (1, 2, 4):
        error = 5 * (other**moment).std() / 200_000**0.5 * 2**0.5
        assert abs((drawn**moment).mean() - (other**moment).mean()) < error
    assert noise_table(0.0).lowest == 0 and not len(noise_table(0.0).thresholds)


@pytest.mark.parametrize("min_received", [0, 3])
def test_the_noise_of_the_clients_that_are_needed_is_that_of_the_sum(min_received):
    """Of z times the clip norm; more clients than needed add more of it."""
    link = link_of(skellam_noise(levels=256, min_received=min_received))
    nothing = {"x": np.zeros((6, 4000), np.float32)}
    sums = [np.asarray(aggregate(link, nothing, key=key)[0]["x"]) * 6 for key in (0, 1)]
    std = 1.5 * 0.5 * (6 / (min_received or 6)) ** 0.5
    np.testing.assert_allclose(sums[0].std(), std, rtol=0.05)
    assert abs(np.corrcoef(*sums)[0, 1]) < 0.1  # of another round
    assert link.min_clients == (min_received or 6)


def test_an_update_becomes_whole_numbers_within_its_levels_and_without_bias():
    """Of a clipped and a short update; without noise, over 300 rounds."""
    levels, size = 100, 4000
    link = link_of(skellam_noise(levels=levels), noise_multiplier=0.0)
    rng, send = np.random.default_rng(0), sends(link)
    direction = rng.normal(size=size)
    direction /= np.linalg.norm(direction)
    for norm, is_clipped in ((7.0, 1.0), (0.2, 0.0)):
        sent = [send(seed, jnp.float32(norm * direction)) for seed in range(300)]
        codes = np.stack([np.asarray(x) for x, _ in sent])
        assert codes.dtype == np.int32 and sent[0][1]["clip_fraction"] == is_clipped
        assert np.linalg.norm(codes, axis=1).max() <= levels
        kept = norm_before_rounding(levels, size) if is_clipped else norm * levels / 0.5
        slope = codes.mean(axis=0) @ direction
        np.testing.assert_allclose(slope, kept, rtol=0.01)
        rest = codes.mean(axis=0) - kept * direction
        assert np.abs(rest).max() < 5 * (0.5 / 300**0.5)


def test_an_update_that_rounding_makes_too_long_is_rounded_toward_zero():
    """Of norm 14; one of six roundings is longer than 17."""
    x = jnp.full(400, 0.7)
    rounded = jax.jit(lambda key: round_to_norm(key, {"x": x}, 1.0, 17)["x"])
    codes = np.stack([rounded(jax.random.key(i)) for i in range(60)])
    norms = np.linalg.norm(codes, axis=1)
    assert 16.5 < norms.max() <= 17 and 2 < (norms == 0).sum() < 25
    assert ((norms == 0) | (norms > 15)).all()


def test_a_secure_sum_of_the_codes_is_the_sum_of_the_round_to_its_bits():
    """With clients that drop out after their masks were agreed."""
    link = link_of(skellam_noise(levels=1000, min_received=4))
    rng = np.random.default_rng(0)
    updates = {"w": rng.normal(size=(6, 5, 3)), "b": rng.normal(size=(6, 3))}
    updates = jax.tree.map(np.float32, updates)
    key = jax.random.key(3)

    def one(i):
        update = jax.tree.map(lambda x: jnp.asarray(x)[i], updates)
        keys = jax.random.fold_in(key, i)
        return link.summarize(keys, (), update, jnp.ones(()))[0].update

    codes = jax.jit(jax.vmap(one))(jnp.arange(6))
    flat = jax.vmap(lambda x: ravel_pytree(x)[0])(codes)
    unflatten = ravel_pytree(jax.tree.map(lambda x: x[0], codes))[1]
    finish = jax.jit(lambda x: link.finish(key, (), Summary(x, jnp.ones(())))[0])
    for dropped in ([], [1, 4]):
        has_dropped = np.isin(np.arange(6), dropped)
        sizes = {"threshold": link.min_clients}
        _, total = secure_sum(np.asarray(flat), has_dropped, **sizes)
        plain = np.asarray(flat)[~has_dropped].sum(axis=0, dtype=np.int64)
        np.testing.assert_array_equal(total, plain)  # nothing has wrapped
        if not dropped:
            whole = finish(unflatten(jnp.asarray(total)))
            expected, _ = aggregate(link, updates, key=3)
            jax.tree.map(np.testing.assert_array_equal, whole, expected)
    with pytest.raises(ValueError, match="threshold must be at most"):
        secure_sum(np.asarray(flat), np.arange(6) > 2, threshold=link.min_clients)


def test_the_largest_cohort_cannot_wrap():
    levels = 2**18
    noise = skellam_noise(levels=levels, min_received=100)
    link = link_of(noise, cohort_size=100)
    largest = levels + noise_table(noise.share_std(1.5, 100)).largest
    assert link.max_clients * largest < 2**31 <= (link.max_clients + 1) * largest
    one = jnp.zeros(400).at[0].set(9.0)
    codes = np.stack([sends(link)(seed, one)[0] for seed in range(3)])
    assert levels / 2 < np.abs(codes).max() <= largest
    made = ff.private(ff.fedavg(LOCAL), settings(cohort_size=10_000, noise=noise))
    with pytest.raises(ValueError, match="at most .* its sum could overflow 32 bits"):
        made.check_cohort(10_000)


def test_a_round_with_fewer_updates_than_hide_the_sum_leaves_the_server():
    noise = skellam_noise(levels=1000, min_received=4)
    private = settings(cohort_size=5, delta=0.1, noise=noise)
    sim = build_simulation(
        ff.private(fedavg_of(norm_loss), private),
        feed(),
        *problem(),
        Settings(systems=Systems(Dropout(after_training=0.3))),
        mesh=make_mesh(1),
    )
    start, seen = np.array(ravel_pytree(norm_variables())[0]), set()
    for number in (0, 1):  # of 4 clients and of 2
        server, _, _, (log,) = play(sim, norm_variables(), first=number)
        has_moved = (ravel_pytree(sim.algorithm.global_model(server))[0] != start).any()
        assert has_moved == (len(log.ids) >= 4)
        assert log.counts["epsilon"] > 0
        seen.add(bool(has_moved))
    assert seen == {True, False}


# --- Epsilon


def test_renyi_divergences_are_those_of_the_theorem():
    """By hand, its two terms, with 9 and 1 as L1 sensitivities."""
    by_hand = skellam_divergences(np.array([2]), 2.0, 3)
    np.testing.assert_allclose(by_hand, 2 * 9 / 8 + (3 * 9 + 6 * 9) / 64)
    np.testing.assert_allclose(skellam_divergences(np.array([2]), 0.5, 1), 4 + 6)


def exact_epsilon(std, shift, numbers, delta):
    """Least epsilon of `numbers` releases, each moved by `shift`, by enumeration."""
    radius = int(7 * std)
    p = chances(std, radius)
    p, q = p[shift:], p[:-shift]
    for _ in range(numbers - 1):
        p, q = (
            np.outer(p, chances(std, radius)[shift:]),
            np.outer(q, chances(std, radius)[:-shift]),
        )
        p, q = p.ravel(), q.ravel()
    excess = lambda epsilon: np.maximum(p - np.exp(epsilon) * q, 0).sum() - delta
    return optimize.brentq(excess, 0, 50)


def test_epsilon_is_above_the_exact_one_and_near_it():
    """Three rounds of a client, of an update of two whole numbers at most."""
    mechanism = Mechanism(10, 10, 4.0, 1e-3, clip_levels=2)
    found = build_accountant(mechanism).epsilon(3)
    in_one = exact_epsilon(8.0, 2, 3, 1e-3)
    assert in_one < found < 1.3 * in_one


def test_many_levels_are_a_gaussian_and_few_cost_more():
    from dp_accounting import dp_event, rdp

    def epsilon(levels, noise=1.0, **options):
        mechanism = Mechanism(100, 10, noise, 1e-3, clip_levels=levels, **options)
        return build_accountant(mechanism).epsilon(25)  # a client takes part 3 times

    gaussian = rdp.RdpAccountant(ORDERS).compose(dp_event.GaussianDpEvent(1.0), 3)
    np.testing.assert_allclose(epsilon(2**20), gaussian.get_epsilon(1e-3), rtol=1e-6)
    assert epsilon(4) > 1.01 * epsilon(2**20)
    assert epsilon(2**20) > build_accountant(Mechanism(100, 10, 1.0, 1e-3)).epsilon(25)
    # Replacing a client moves the sum by twice the clip norm, in each of 25 rounds.
    fixed = epsilon(2**20, 2.0, sampling=Sampling("fixed"))
    gaussian = rdp.RdpAccountant(ORDERS).compose(dp_event.GaussianDpEvent(1.0), 25)
    np.testing.assert_allclose(fixed, gaussian.get_epsilon(1e-3), rtol=1e-6)
    mechanism = Mechanism(100, 10, 1.0, 1e-3, clip_levels=64)
    noise = calibrate_noise(mechanism, epsilon=4.0, rounds=25)
    assert 3.98 < epsilon(64, noise) <= 4.0


def test_too_few_levels_for_an_update_are_refused():
    message = "levels must be at least (.*) for an update of 1,000,000"
    with pytest.raises(ValueError, match=message) as error:
        norm_before_rounding(500, 10**6)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert norm_before_rounding(least, 10**6) >= least / 2
    with pytest.raises(ValueError, match=message):
        norm_before_rounding(least - 1, 10**6)
