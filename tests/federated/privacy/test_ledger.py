"""Rounds of several mechanisms, composed, against distributions of our own."""

import itertools
import json
import math
from typing import NamedTuple

import numpy as np
import pytest
from scipy import optimize

from fedfr_jax.federated.privacy.accountant import (
    _epsilons,
    build_accountant,
    calibrate_noise,
    check_round,
    continued,
    ended,
    participations,
)
from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.privacy.ledger import (
    Entry,
    Mechanism,
    extend,
    from_json,
    num_rounds,
    to_json,
)
from fedfr_jax.federated.sampling import Sampling

DELTA, GRID, SIZE = 1e-5, 1e-3, 2**17
POISSON = Sampling("poisson", capacity=10**9)  # no cohort is cut
ALL = Mechanism(100, 100, 2.0, DELTA)
BANDED = Strategy("banded", 64, 8, True)


class Losses(NamedTuple):
    """Privacy losses of a round and their probabilities."""

    losses: np.ndarray
    masses: np.ndarray


def subsampled(noise, chance):
    """Losses of removing a client, and of adding one, by densities on a line."""
    x = np.linspace(-12, 13, 400_001)
    width = x[1] - x[0]
    density = lambda mean: (
        np.exp(-((x - mean * 1.0) ** 2) / (2 * noise**2))
        / (noise * math.sqrt(2 * math.pi))
    )
    without = density(0)
    having = chance * density(1) + (1 - chance) * without
    loss = np.log(chance * np.exp((x - 0.5) / noise**2) + 1 - chance)
    return Losses(loss, having * width), Losses(-loss, without * width)


def replaced(noise, chance):
    """Losses of replacing a client in a sample without replacement.

    Those above zero are of removing one; by symmetry e^-loss of a mass is at -loss.
    """
    loss, mass = subsampled(noise / 2, chance)[0]
    loss, mass = loss[loss > 0], mass[loss > 0]
    losses = np.concatenate([loss, -loss, [0.0]])
    masses = np.concatenate([mass, np.exp(-loss) * mass])
    return Losses(losses, np.append(masses, 1 - masses.sum()))


def own_epsilon(rounds):
    """Epsilon of {losses of a round: how often}, by one FFT."""
    spectrum = 1
    for (losses, masses), count in rounds:
        places = np.rint(losses / GRID).astype(int) % SIZE
        spectrum = spectrum * np.fft.fft(np.bincount(places, masses, SIZE)) ** count
    masses = np.fft.ifft(spectrum).real.clip(0)
    losses = GRID * ((np.arange(SIZE) + SIZE // 2) % SIZE - SIZE // 2)

    def excess(epsilon):
        above = losses > epsilon
        delta = (masses * -np.expm1(epsilon - losses))[above].sum()
        return delta - DELTA

    return optimize.brentq(excess, 0, 60)


def composed(mechanism, *noises_and_rounds):
    ledger = ()
    for noise, rounds in noises_and_rounds:
        now = mechanism._replace(noise_multiplier=noise)
        ledger = extend(ledger, now, num_rounds(ledger) + rounds)
    return build_accountant(ledger[-1].mechanism, past=ledger[:-1])


def test_three_rounds_at_epsilon_8_and_three_more_are_10_and_not_8():
    """The noise of six rounds is more, but three had the noise of three."""
    three = calibrate_noise(ALL, epsilon=8.0, rounds=3)
    six = calibrate_noise(ALL, epsilon=8.0, rounds=6)
    accountant = composed(ALL, (three, 3), (six, 3))
    after = [accountant.epsilon(number) for number in range(7)]
    assert after[3] == build_accountant(ALL._replace(noise_multiplier=three)).epsilon(3)
    assert sorted(after) == after
    all_of = lambda noise: subsampled(noise, 1.0)[0]
    own = own_epsilon([(all_of(three), 3), (all_of(six), 3)])
    np.testing.assert_allclose([own, after[6]], 10.247, rtol=1e-3)


@pytest.mark.parametrize("name", ["poisson", "fixed"])
def test_sampled_rounds_of_two_noises_are_the_convolution_of_their_losses(name):
    sampling = {"poisson": POISSON, "fixed": Sampling("fixed")}[name]
    mechanism = Mechanism(1000, 100, 1.0, DELTA, sampling)
    found = composed(mechanism, (1.0, 4), (2.0, 30)).epsilon(34)
    if name == "poisson":
        sides = zip(subsampled(1.0, 0.1), subsampled(2.0, 0.1), strict=True)
        own = max(own_epsilon([(a, 4), (b, 30)]) for a, b in sides)
    else:
        own = own_epsilon([(replaced(1.0, 0.1), 4), (replaced(2.0, 0.1), 30)])
    np.testing.assert_allclose(found, own, rtol=2e-3)


def test_little_noise_is_composed_by_renyi_divergences_for_all_rounds():
    mechanism = Mechanism(1000, 100, 1.0, DELTA, POISSON)
    accountant = composed(mechanism, (0.25, 1), (1.0, 5))
    alone = build_accountant(mechanism._replace(noise_multiplier=0.25)).epsilon(1)
    own = own_epsilon([(subsampled(0.25, 0.1)[0], 1), (subsampled(1.0, 0.1)[0], 5)])
    assert accountant.epsilon(1) == alone < accountant.epsilon(6)
    assert own < accountant.epsilon(6) < 1.5 * own


def test_a_client_meets_the_least_noise_of_its_epoch_or_that_of_its_group():
    shuffled = Mechanism(10, 5, 0.0, 1e-2)  # two rounds an epoch
    cyclic = shuffled._replace(sampling=Sampling("cyclic"))
    drawn = shuffled._replace(sampling=Sampling("poisson"))
    expected = {
        shuffled: {((1.0, 2), (2.0, 1))},  # 1 1 | 1 2 | 2
        cyclic: {((1.0, 2), (2.0, 1)), ((1.0, 1), (2.0, 1))},  # 1 1 2, 1 2
        drawn: {((1.0, 3), (2.0, 2))},
    }
    expected[cyclic].remove(((1.0, 1), (2.0, 1)))  # which the other group exceeds
    for mechanism, times in expected.items():
        first, second = (mechanism._replace(noise_multiplier=x) for x in (1.0, 2.0))
        assert participations((Entry(first, 3), Entry(second, 2))) == times
    with_more = Entry(shuffled._replace(noise_multiplier=4.0), 3)
    assert participations((with_more,)) == {((4.0, 2),)}
    first, second = (cyclic._replace(noise_multiplier=x) for x in (2.0, 1.0))
    of_turns = participations((Entry(first, 1), Entry(second, 1)))
    assert of_turns == {((2.0, 1),), ((1.0, 1),)}


def test_epsilon_grows_and_its_bound_in_the_past_is_not_that_of_rounds_to_come():
    mechanism = Mechanism(1000, 100, 1.0, DELTA, POISSON)
    accountant = composed(mechanism, (1.5, 22), (0.5, 9), (200.0, 9))
    exact = [accountant.epsilon(number) for number in (3, 22, 23, 31, 32)]
    assert all(a <= b for a, b in itertools.pairwise(exact))
    _epsilons.cache_clear()  # which knows the exact ones
    fresh = composed(mechanism, (1.5, 22), (0.5, 9), (200.0, 9))
    assert fresh.epsilon_bound(31) == accountant.epsilon(31)
    assert accountant.epsilon(22) <= fresh.epsilon_bound(22) < accountant.epsilon(23)
    silent = composed(mechanism, (0.0, 1), (1.0, 2))
    assert math.isinf(silent.epsilon(1)) and math.isinf(silent.epsilon(3))


def test_what_is_left_of_a_budget_is_what_may_be_spent():
    past = (Entry(ALL, 3),)
    budget = build_accountant(ALL).epsilon(5)
    now = ALL._replace(noise_multiplier=4.0)  # a quarter of the cost: 3 + 8 / 4 = 5
    accountant = continued(build_accountant(now, budget + 1e-9), past)
    assert accountant.rounds_within_budget(100) == 11
    with pytest.raises(ValueError, match="round 12 would bring it to"):
        check_round(accountant, 11)
    assert accountant.ledger(5) == (Entry(ALL, 3), Entry(now, 2))
    overspent = continued(build_accountant(now, 0.1), past)
    assert overspent.rounds_within_budget(100) == 3  # which are done
    last = ended(accountant, 11)  # then the clients adapt, and send nothing
    check_round(last, 11)
    assert last.epsilon(12) == last.epsilon_bound(12) == accountant.epsilon(11)
    assert last.ledger(12) == accountant.ledger(11)


def test_a_ledger_is_read_as_it_was_written():
    cyclic = Mechanism(100, 10, 1.1, 1e-3, Sampling("cyclic", 12, 9), False, BANDED, 20)
    for mechanism in (ALL._replace(is_local=True), cyclic):
        ledger = (Entry(mechanism, 7),)
        read = from_json(to_json(ledger))
        accountant = build_accountant(mechanism, past=read)
        assert accountant.past == ledger and accountant.ledger(9)[0].rounds == 9


def test_another_mechanism_than_that_of_the_ledger_is_refused():
    past = from_json(to_json((Entry(ALL, 3),)))
    for name, value in (
        ("cohort_size", 50),
        ("num_clients", 200),
        ("delta", 1e-6),
        ("sampling", Sampling("fixed")),
        ("is_local", True),
        ("num_sampled", 90),
    ):
        with pytest.raises(ValueError, match=f"must keep the {name} of the"):
            build_accountant(ALL._replace(**{name: value}), past=past)


def test_correlated_noise_goes_on_as_it_began():
    banded = Mechanism(100, 10, 1.0, 1e-3, Sampling("cyclic"), False, BANDED)
    past = (Entry(banded, 3),)
    accountant = build_accountant(banded, past=past)
    with pytest.raises(ValueError, match="must be built for all rounds"):
        check_round(accountant, 64)
    check_round(ended(accountant, 64), 64)
    longer = banded._replace(strategy=BANDED._replace(rounds=65))
    for other in (longer, banded._replace(noise_multiplier=2.0)):
        with pytest.raises(ValueError, match="to be composed with them"):
            build_accountant(other, past=past)


def test_a_damaged_ledger_is_named():
    (row,) = json.loads(to_json((Entry(ALL, 3),)))
    changed = lambda **fields: [{**row, "mechanism": {**row["mechanism"], **fields}}]
    for rows in (
        {},
        [1],
        [{"mechanism": row["mechanism"]}],
        [{**row, "rounds": -1}],
        [{**row, "rounds": 1.5}],
        changed(noise_multiplier="2"),
        changed(noise_multiplier=math.nan),
        changed(unknown=1),
    ):
        with pytest.raises(ValueError, match="^here/ledger.json[^\\n]*(must|needs)"):
            from_json(json.dumps(rows), "here/ledger.json")
    with pytest.raises(ValueError, match="^here/ledger.json must be readable JSON"):
        from_json("[", "here/ledger.json")
