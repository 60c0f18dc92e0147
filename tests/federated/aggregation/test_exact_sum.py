"""Whole-number sums, and secure sums of them: every bit, whoever adds up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.aggregation.clip import clip_by_global_norm
from fedfr_jax.federated.aggregation.exact_sum import (
    CLIPPED_SHARE,
    decode,
    encode,
    quantize,
)
from fedfr_jax.federated.aggregation.mean import attention
from fedfr_jax.federated.aggregation.robust import median
from fedfr_jax.federated.state import RoundLog
from fedfr_jax.runs.loop import warn_of_clipping
from tests.federated.aggregation.played import aggregate, network_of, play_updates
from tests.federated.toys import LOCAL
from tests.test_examples import load

secure = load("secure_sum")


@pytest.fixture
def arrays(golden):
    return golden("compression")


@pytest.mark.parametrize("power", [20, 28])
def test_codes_are_rounded_by_chance_and_their_sum_wraps_where_the_bound_says(
    arrays, power
):
    """At 2^28 for 20 clients of numbers up to 1 the sum is beyond 32 bits."""
    updates, scale = arrays["mod_updates"], 2.0**power

    @jax.jit
    def run(updates, uniform):
        codes = encode(updates, uniform, scale)
        total = codes.sum(axis=0, dtype=jnp.int32)
        return codes, total, decode(total, scale)

    with jax.enable_x64(True):
        codes, total, decoded = run(updates, arrays["mod_uniform"])
    mean = np.asarray(decoded) / len(updates)
    np.testing.assert_array_equal(codes, arrays[f"mod_s2p{power}_stoch_code"])
    np.testing.assert_array_equal(total, arrays[f"mod_s2p{power}_stoch_sum"])
    np.testing.assert_allclose(mean, arrays[f"mod_s2p{power}_stoch_mean"], rtol=1e-12)
    is_wrapped = np.abs(mean - updates.mean(axis=0)) > 1e-3
    np.testing.assert_array_equal(is_wrapped, arrays[f"mod_s2p{power}_stoch_wrapped"])
    most = quantize(range=1, levels=2 * 2**power).max_clients
    assert is_wrapped.any() == (len(updates) > most)


def test_the_aggregate_is_the_mean_to_a_step_and_its_bits_do_not_depend_on_places():
    """Nor on the order of the clients; of updates whose plain sums do."""
    updates = np.random.default_rng(0).normal(size=(9, 18)).astype(np.float32)
    links = clip_by_global_norm(max_norm=3.0), quantize(range=64)
    ends = [
        play_updates(updates, *links, weighting="num_examples", where=where).servers[0]
        for where in ((1, 1), (2, 2))
    ]
    np.testing.assert_array_equal(*map(network_of, ends))
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    clipped = updates * np.minimum(1, 3 / norms)
    mean = np.average(clipped, axis=0, weights=np.arange(1, 10))
    np.testing.assert_allclose(network_of(ends[0]), mean, atol=9 * 2**-15 / 45)


def test_numbers_outside_the_range_are_cut_and_counted():
    link = ff.with_aggregation(ff.fedavg(LOCAL), quantize(range=2.0)).aggregator
    updates = np.array([[0.5, 3.0, -9.0, 1.0]] * 2, np.float32)
    found, _ = aggregate(link, updates)
    np.testing.assert_allclose(found, [0.5, 2, -2, 1], atol=1e-5)
    send = jax.jit(lambda x: link.summarize(jax.random.key(0), (), x, jnp.ones(())))
    assert send(updates[0])[1]["clipped_share"] == 0.5


def test_the_first_round_that_is_cut_by_more_than_a_percent_is_logged(caplog):
    log = RoundLog(np.arange(2), {}, np.zeros(2, int), None, 0.0)
    shares = (0.0, 0.01), (0.99, 0.966), (1.0, 1.0)
    logs = [log._replace(metrics={CLIPPED_SHARE: np.array(x)}) for x in shares]
    assert not warn_of_clipping("a", 0, [log, logs[0]]) and not caplog.records
    assert "cuts 97.8%" in warn_of_clipping("a", 4, logs)
    (record,) = caplog.records
    assert "methods.a.aggregation: in round 6 quantize cuts" in record.message


def test_a_range_that_overflows_or_a_sum_that_is_none_is_refused():
    algorithm = ff.with_aggregation(ff.fedavg(LOCAL), quantize())
    algorithm.check_cohort(1023)
    with pytest.raises(ValueError, match="cohort_size must be at most 1023 .* 32 bits"):
        algorithm.check_cohort(1024)
    for last in (median(), attention()):
        with pytest.raises(ValueError, match="must end with link 1"):
            ff.with_aggregation(ff.fedavg(LOCAL), last, quantize())


@pytest.mark.parametrize("number", [3, 10, 511])
def test_the_largest_cohort_does_not_wrap_at_the_end_of_the_range(number):
    """Of as many levels as fit it, which float32 cannot tell apart."""
    most = (2**31 - 1) // number
    link = quantize(range=8.0, levels=2 * most)
    assert link.max_clients == number
    send = jax.jit(lambda x: link.summarize(jax.random.key(0), (), x, jnp.ones(())))
    for sign in (1, -1):
        sent = send(np.full(64, sign * 8, np.float32))[0].update
        assert abs(np.int64(sent)).max() * number < 2**31


# --- The masked protocol


def test_masks_and_what_takes_them_off_are_the_golden_ones(arrays):
    pairs = zip(arrays["pm_pairs"].tolist(), arrays["pm_pair_masks"], strict=True)
    pairs, masks = {tuple(p): m for p, m in pairs}, arrays["pm_self_masks"]
    masked = secure.mask_codes(arrays["pm_encoded"].view(np.int32), masks, pairs)
    np.testing.assert_array_equal(masked, arrays["pm_masked"])
    dropped = set(arrays["pm_dropped"].tolist())
    left = [i for i in range(6) if i not in dropped]
    total = masked[left].sum(axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(total, arrays["pm_survivor_sum_masked"])
    known = {p: m for p, m in pairs.items() if len(dropped & {*p}) == 1}
    found = secure.unmask(total, left, {i: masks[i] for i in left}, known)
    np.testing.assert_array_equal(found, arrays["pm_recovered"])
    assert secure.PRIME == arrays["shamir_prime"]
    points = arrays["shamir_used_x"].tolist()
    for secret, coefs, shares in zip(
        *(arrays[f"shamir_{x}"].tolist() for x in ("secrets", "coefs", "shares")),
        strict=True,
    ):
        each = [secure.polynomial([secret, *coefs], x) for x in range(1, 7)]
        assert each == shares
        assert secure.recover([shares[x - 1] for x in points], points) == secret


@pytest.mark.parametrize("dropped", [[], [1, 4, 7]])
def test_a_secure_sum_is_the_plain_sum_of_who_is_left(dropped):
    rng = np.random.default_rng(0)
    codes = rng.integers(-(2**31), 2**31, (10, 50)).astype(np.int32)
    is_gone = np.isin(np.arange(10), dropped)
    _, total = secure.secure_sum(codes, is_gone, threshold=7)
    plain = codes[~is_gone].sum(axis=0, dtype=np.int32)
    np.testing.assert_array_equal(total, plain)
    with pytest.raises(ValueError, match="threshold must .* 7 of 10, got 8"):
        secure.secure_sum(codes, np.arange(10) < 3, threshold=8)
