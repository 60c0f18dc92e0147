"""Power of choice and Oort: who is asked, by losses and durations."""

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.systems.devices import log_normal_profiles
from fedfr_jax.federated.systems.sampling import (
    NEVER,
    Known,
    Oort,
    PowerOfChoice,
    choose,
    utilities,
)
from fedfr_jax.federated.systems.settings import Systems, check_systems
from tests.federated import toys

N = 40
EVERYBODY = np.arange(N)
LOSSES = np.linspace(0.1, 4, N)
HEARD = Known(np.full(N, 10), LOSSES, np.zeros(N, int), np.ones(N))


def chosen(sampling, known=HEARD, number=5, round=9, times=300):
    """How often each client is chosen, [N]."""
    counts = np.zeros(N)
    for seed in range(times):
        rng = np.random.default_rng(seed)
        ids = choose(sampling, rng, EVERYBODY, number, known, round)
        assert len(set(ids.tolist())) == number and (np.diff(ids) > 0).all()
        counts[ids] += 1
    return counts / times


def test_of_some_candidates_losses_decide_and_sizes_draw():
    share = chosen(PowerOfChoice(10))
    assert share[-10:].mean() > 3 * share[:20].mean()
    sizes = np.where(EVERYBODY < 20, 1, 100)
    few = chosen(PowerOfChoice(5), HEARD._replace(num_examples=sizes))
    assert few[:20].mean() < 0.1 * few[20:].mean()


def test_oort_prefers_useful_and_fast_clients_and_explores_a_part():
    slow = np.where(EVERYBODY % 2, 4.0, 1.0)
    share = chosen(
        Oort(min_exploration=0.0, exploration=0.0), HEARD._replace(seconds=slow)
    )
    assert share[::2].sum() > 5 * share[1::2].sum()
    assert share[20:].sum() > share[:20].sum()
    last = np.where(EVERYBODY < 20, NEVER, 0)
    share = chosen(Oort(min_exploration=0.4), HEARD._replace(last_round=last), round=99)
    np.testing.assert_allclose(share[:20].sum(), 2)  # 0.4 of 5
    np.testing.assert_allclose(share[20:].sum(), 3)


def test_a_utility_is_worked_by_hand():
    """n loss + sqrt(0.1 log R / L), a slow one's times (T / t)^2."""
    known = Known(
        np.array([2, 3]), np.array([0.5, 1.0]), np.array([0, 3]), np.array([1.0, 4.0])
    )
    found = utilities(Oort(preferred_quantile=0.0), np.array([0, 1]), known, 7)
    bonus = np.sqrt(0.1 * np.log(8) / np.array([1, 4]))
    np.testing.assert_allclose(found, (np.array([1, 3]) + bonus) * [1, 1 / 16])


class Recorder:
    """A random generator that records weights and takes the first entries."""

    def choice(self, ids, number, *, replace, p):
        assert not replace
        if number:
            self.weights = dict(zip(ids.tolist(), p.tolist(), strict=True))
        return ids[:number]


def test_oort_exploits_those_near_the_best_and_no_outlier_rules():
    """Utilities of algorithm 1 in a plain loop: the top 5 % count as its border."""
    loss = np.where(EVERYBODY == 7, 1e4, LOSSES)
    known = HEARD._replace(loss=loss)
    rng = Recorder()
    sampling = Oort(exploration=0.0, min_exploration=0.0, cutoff=0.9)
    choose(sampling, rng, EVERYBODY, 5, known, 9)
    utility = [10 * x + np.sqrt(0.1 * np.log(10) / 1) for x in loss]
    ascending = sorted(utility)
    place = 0.95 * (N - 1)
    low = int(place)
    cap = ascending[low] + (place - low) * (ascending[low + 1] - ascending[low])
    capped = [min(x, cap) for x in utility]
    border = 0.9 * sorted(capped)[-5]
    near = {k: x for k, x in enumerate(capped) if x >= border}
    total = sum(near.values())
    assert rng.weights == pytest.approx({k: x / total for k, x in near.items()})
    assert 5 < len(near) < N and rng.weights[7] == max(rng.weights.values())


def test_rounds_remember_losses_and_resume_with_them(tmp_path):
    sizes = np.array([4, 2, 6, 3, 5, 1])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sizes.sum(), 5)).astype(np.float32)
    y = rng.integers(3, size=sizes.sum())
    data = ff.FederatedDataset.from_client_ids(x, y, np.repeat(np.arange(6), sizes))
    run = ff.init(
        fedavg(toys.LOCAL),
        data,
        toys.unflat(np.zeros(18, np.float32)),
        batch_size=6,
        cohort_size=2,
        systems=Systems(profiles=log_normal_profiles(6), sampling=ff.PowerOfChoice(6)),
    )
    heard = {}
    for r in range(4):
        cohort = before_round(run.sim, run.server, r)
        unheard = [k for k in range(6) if k not in heard]
        least = min((heard[k] for k in cohort.ids if k in heard), default=np.inf)
        rest = [heard[k] for k in heard if k not in cohort.ids]
        assert set(cohort.ids) <= set(unheard) or not set(unheard) - set(cohort.ids)
        assert not rest or len(unheard) >= 2 or least >= max(rest)
        run, metrics = ff.run_round(run)
        np.testing.assert_array_equal(metrics["client"], cohort.ids)
        heard |= dict(zip(cohort.ids.tolist(), metrics["loss"].tolist(), strict=True))
    state = jax.device_get(run.server.systems_state)
    np.testing.assert_allclose([state.loss[k] for k in heard], [*heard.values()])
    again = ff.resume(run, ff.save(run, tmp_path / "run"))
    now = before_round(run.sim, run.server, 4)
    then = before_round(again.sim, again.server, 4)
    np.testing.assert_array_equal(then.ids, now.ids)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (PowerOfChoice(4), "num_candidates must be at least 5, .* got 4"),
        (Oort(exploration=1.5), r"sampling.exploration must be in \[0, 1\], got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        check_systems(Systems(sampling=sampling), num_clients=N, cohort_size=5)
