"""Attacks in whole rounds: who attacks, what arrives, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.aggregation import (
    bucketing,
    centered_clip,
    chain,
    krum,
    median,
    nearest_neighbor_mixing,
    trimmed_mean,
    with_aggregation,
)
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.attacks import (
    ATTACKS,
    backdoor_rate,
    is_attacker,
    stamp,
    with_attack,
)
from fedfr_jax.federated.attacks.contract import with_poison
from fedfr_jax.types import Batch, Client
from tests.contracts import test_algorithms as contracts
from tests.federated.test_aggregation import network_of, unflat_row
from tests.federated.toys import LOCAL, close, replay, unflat

SHARE, NUMBER = 0.3, 9


def play(name, updates, *links, where=(2, 2), weighting="uniform", **settings):
    """A round of clients that move by `updates` [K, 18], a share of them attackers."""
    given = jnp.asarray(updates)

    def train(key, variables, client):
        del key
        end = jax.tree.map(jnp.add, variables["params"], unflat_row(given[client.id]))
        zero = jnp.zeros(())
        return {**variables, "params": end}, {"loss": zero, "steps": zero + 1}

    algorithm = with_aggregation(fedavg(train, weighting=weighting), *links)
    attack = {"share": SHARE, "num_clients": len(updates), **settings}
    examples = [[np.zeros((2, 5))] * len(updates), [np.zeros(2, int)] * len(updates)]
    start = unflat(np.zeros(18))
    return replay(with_attack(algorithm, name, **attack), examples, start, where=where)


@pytest.fixture
def updates(golden):
    return np.asarray(golden("fl_more")["rob_u"])


@functools.cache
def attackers(seed=0, number=3, num_clients=NUMBER):
    run = jax.jit(lambda ids: is_attacker(ids, number, num_clients, seed))
    return np.asarray(run(np.arange(num_clients)))


def test_attackers_are_as_many_as_the_share_and_drawn_by_the_seed(updates):
    ids = np.arange(NUMBER)
    draw = jax.jit(lambda: [is_attacker(ids, 3, NUMBER, seed) for seed in range(20)])
    masks = np.array(draw())
    assert len({mask.tobytes() for mask in masks}) > 10
    assert (masks.sum(axis=1) == 3).all()
    with jax.enable_x64(True):
        end = play("sign_flip", updates, seed=4)
    np.testing.assert_array_equal(end.metrics["attacker"], attackers(4))
    sent = np.where(attackers(4)[:, None], -updates, updates)
    close(network_of(end.servers[0]), sent.mean(axis=0))


def test_a_changed_update_is_the_scaled_one_or_noise_of_its_own_for_each_array():
    key, update = jax.random.key(0), [jnp.arange(4.0), jnp.arange(4.0)]
    for x in ATTACKS["scaled"](factor=3.0).change(key, update):
        np.testing.assert_array_equal(x, [0, 3, 6, 9])
    first, second = ATTACKS["gaussian"](mean=5.0, std=0.1).change(key, update)
    assert abs(first - 5).max() < 1 and (first != second).all()


@pytest.mark.parametrize("link", ["median", "centered_clip"])
def test_attackers_who_know_the_others_send_one_update_through_the_aggregation(
    updates, link
):
    """Whatever devices and lanes; a link with a state keeps it."""
    links = {"median": (median(),), "centered_clip": (centered_clip(),)}
    is_bad = attackers()
    sent = np.where(is_bad[:, None], -2 * updates[~is_bad].mean(axis=0), updates)
    norms = np.linalg.norm(sent, axis=1, keepdims=True)
    expected = {
        "median": np.median(sent, axis=0),
        "centered_clip": (sent * np.minimum(1, 1 / norms)).mean(axis=0),
    }[link]
    with jax.enable_x64(True):
        end = play("inner_product", updates, *links[link])
        close(network_of(end.servers[0]), expected)
        if link == "centered_clip":
            alone = play("inner_product", updates, *links[link], where=(1, 1))
            jax.tree.map(close, alone.servers[0], end.servers[0])


def batch_of(labels, images=None, **masks):
    labels = np.asarray(labels, np.int32)
    zeros = np.zeros((len(labels), 6, 6, 1), np.float32)
    images = zeros if images is None else images
    number = np.arange(len(labels), dtype=np.int32)
    return Batch(
        inputs={"image": images},
        targets={"label": labels, **masks},
        num_classes=np.int32(10),
        is_valid=number < len(labels) - 1,
        is_added=number == 0,
        row=number,
        position=number,
        view_index=number * 0,
    )


def poisoned(name, batch, is_bad=True, **settings):
    poison = ATTACKS[name](**settings).poison

    @jax.jit
    def run(batch, is_bad):
        client = Client(**dict.fromkeys(Client._fields))
        given = {"batch": lambda step: batch, "num_classes": batch.num_classes}
        return with_poison(client._replace(**given), poison, is_bad).batch(0)

    return jax.device_get(run(batch, np.bool_(is_bad)))


def test_flipped_labels_are_those_of_an_attackers_own_valid_examples():
    mask = np.asarray([[0, 9, 255]] * 4, np.uint8)
    batch = batch_of([1, 2, 9, 3], mask=mask)
    found = poisoned("label_flip", batch)
    assert found.labels.tolist() == [1, 7, 0, 3]  # the first is the server's
    assert found.targets["mask"][1].tolist() == [9, 0, 255]
    assert poisoned("label_flip", batch, False).labels.tolist() == [1, 2, 9, 3]


def test_a_backdoor_is_a_stamp_and_a_class_on_the_same_share_of_examples():
    batch = batch_of(np.arange(1000) % 9 + 1)
    found = poisoned("backdoor", batch, target=0, fraction=0.25, pattern_size=2)
    is_bad = found.labels == 0
    assert 0.2 < is_bad.mean() < 0.3
    sums = found.inputs["image"].sum(axis=(1, 2, 3))
    np.testing.assert_array_equal(sums, np.where(is_bad, 4, 0))
    again = poisoned("backdoor", batch, target=0, fraction=0.25, pattern_size=2)
    np.testing.assert_array_equal(again.labels, found.labels)
    none = ATTACKS["backdoor"](fraction=0.0).poison(jax.tree.map(jnp.asarray, batch))
    np.testing.assert_array_equal(none.labels, batch.labels)
    with pytest.raises(ValueError, match="needs images"):
        poisoned("backdoor", batch_of([1, 2], np.zeros((2, 5))))


def test_a_backdoors_rate_is_of_images_of_other_classes():
    images = np.zeros((4, 6, 6, 1), np.float32)

    def apply(variables, x):
        del variables
        is_stamped = x[:, -1, -1, 0] == 1
        return jnp.stack([jnp.where(is_stamped, 1.0, 0.0), 0.5 + 0 * x[:, 0, 0, 0]], 1)

    assert backdoor_rate(apply, {}, images, [1, 1, 0, 2]) == 1
    assert np.sum(jax.jit(stamp)(np.zeros((6, 6, 1), np.float32))) == 9


@pytest.mark.parametrize(
    "links, stands",
    [
        ([median()], 4),
        ([trimmed_mean(trim_fraction=0.2)], 1),
        ([krum(num_malicious_clients=2)], 2),
        ([nearest_neighbor_mixing(num_malicious_clients=1), median()], 1),
        ([bucketing(clients_per_bucket=2), median()], 2),
        ([chain(median())], 4),
    ],
)
def test_more_attackers_than_a_rule_can_stand_are_refused_with_its_bound(links, stands):
    algorithm = with_aggregation(fedavg(LOCAL), *links)
    below, above = (
        with_attack(algorithm, "alie", share=f / NUMBER, num_clients=NUMBER)
        for f in (stands, stands + 1)
    )
    below.check_cohort(NUMBER)
    with pytest.raises(ValueError, match=f"attack.share must.*it tolerates {stands}"):
        above.check_cohort(NUMBER)


def test_a_cohorts_expected_attackers_are_rounded_up():
    algorithm = with_aggregation(fedavg(LOCAL), krum(num_malicious_clients=1))
    for share, cohort, expected in (
        (0.3, 5, 2),
        (0.2, 7, 2),
        (0.1, 10, 1),
        (0.2, 5, 1),
    ):
        attacked = with_attack(algorithm, "alie", share=share, num_clients=10)
        if expected == 1:
            attacked.check_cohort(cohort)
            continue
        with pytest.raises(ValueError, match=f"{expected} of a cohort of {cohort} at"):
            attacked.check_cohort(cohort)


def test_wrong_shares_names_and_settings_of_an_attack_are_refused():
    algorithm = fedavg(LOCAL)
    assert with_attack(algorithm, "alie", share=0, num_clients=5) is algorithm
    for wrong, words in (
        ({"share": 1.0}, r"share must be in \[0, 1\), got 1.0"),
        ({"share": 0.05}, "share must give at least one of 5 .* at least 0.1"),
        ({"share": 0.5, "tau": "x"}, "config.attack.tau must be"),
        ({"share": 0.5, "taw": 1}, "config.attack must have keys .*taw"),
    ):
        with pytest.raises(ValueError, match=words):
            with_attack(algorithm, "alie", num_clients=5, **wrong)
    with pytest.raises(ValueError, match="did you mean label_flip"):
        with_attack(algorithm, "label_flipp", share=0.5, num_clients=5)
    finch = contracts.MEMBERS["finch"].build()
    with pytest.raises(ValueError, match="updates are summed, got .*finch"):
        with_attack(finch, "alie", share=0.5, num_clients=5)
