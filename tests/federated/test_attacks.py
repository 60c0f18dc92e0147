"""Attacks: byzfl's numbers, who attacks, what arrives, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated import attacks
from fedfr_jax.federated.aggregation import clip, robust
from fedfr_jax.types import Batch, Client
from tests.contracts import test_algorithms as contracts
from tests.federated.aggregation.played import network_of, play_updates
from tests.federated.toys import LOCAL, close

NUMBER = 9


def play(name, updates, *links, seed=0, **options):
    """A round of clients that move by `updates` [K, 18], three of nine attackers."""
    settings = {"share": 0.3, "num_clients": NUMBER, "seed": seed}
    around = lambda algorithm: ff.with_attack(algorithm, name, **settings)
    return play_updates(updates, *links, around=around, **options)


@pytest.fixture
def updates(golden):
    return np.asarray(golden("fl_more")["rob_u"])


def attackers(seed=0):
    run = jax.jit(lambda ids: attacks.is_attacker(ids, 3, NUMBER, seed))
    return np.asarray(run(np.arange(NUMBER)))


def test_attackers_are_as_many_as_the_share_and_drawn_by_the_seed(updates):
    masks = np.array([attackers(seed) for seed in range(12)])
    assert len({mask.tobytes() for mask in masks}) > 6
    assert (masks.sum(axis=1) == 3).all()
    with jax.enable_x64(True):
        end = play("sign_flip", updates, seed=4)
    np.testing.assert_array_equal(end.metrics["attacker"], masks[4])
    sent = np.where(masks[4][:, None], -updates, updates)
    close(network_of(end.servers[0]), sent.mean(axis=0))


def test_attackers_who_know_the_others_send_one_update_through_the_aggregation(updates):
    """Whatever devices and lanes; a link with a state keeps it."""
    is_bad = attackers()
    sent = np.where(is_bad[:, None], -2 * updates[~is_bad].mean(axis=0), updates)
    norms = np.linalg.norm(sent, axis=1, keepdims=True)
    clipped = (sent * np.minimum(1, 1 / norms)).mean(axis=0)
    with jax.enable_x64(True):
        end = play("inner_product", updates, robust.median())
        close(network_of(end.servers[0]), np.median(sent, axis=0))
        for where in ((2, 2), (1, 1)):
            end = play("inner_product", updates, clip.centered_clip(), where=where)
            close(network_of(end.servers[0]), clipped)


def test_attacks_are_byzfls(golden):
    arrays = golden("robust_byzfl")
    names = {f"ipm_tau{tau}": ("inner_product", tau) for tau in (0.5, 1.1, 2)}
    names |= {f"alie_tau{tau}": ("alie", tau) for tau in (1.5, -1, 0.5)}
    names["foe_tau1.1_own"] = ("inner_product", 1.1 - 1)
    is_honest = np.arange(10) < 8

    @jax.jit
    def sent(everybody):
        found = {
            key: ff.ATTACKS[name](tau=tau).collude([everybody], is_honest)[0]
            for key, (name, tau) in names.items()
        }
        mean = everybody[:8].mean(axis=0)
        return {**found, "signflip": ff.ATTACKS["sign_flip"]().change(None, [mean])[0]}

    with jax.enable_x64(True):
        everybody = np.concatenate([arrays["honest"], np.full((2, 7), 1e3)])
        for name, found in sent(everybody).items():
            close(found, arrays[f"atk_{name}"])


def test_a_changed_update_is_the_scaled_one_or_noise_of_its_own_for_each_array():
    key, update = jax.random.key(0), [jnp.arange(4.0), jnp.arange(4.0)]
    for x in ff.ATTACKS["scaled"](factor=3.0).change(key, update):
        np.testing.assert_array_equal(x, [0, 3, 6, 9])
    zeros = [jnp.zeros(4000)] * 2
    first, second = ff.ATTACKS["gaussian"](mean=0.5, std=2).change(key, zeros)
    assert abs(first.mean() - 0.5) < 0.1 and abs(first.std() - 2) < 0.1
    assert (first != second).all()


def batch_of(labels, images=None, **masks):
    labels = np.asarray(labels, np.int32)
    zeros = np.zeros((len(labels), 6, 6, 1), np.float32)
    number = np.arange(len(labels), dtype=np.int32)
    return Batch(
        inputs={"image": zeros if images is None else images},
        targets={"label": labels, **masks},
        num_classes=np.int32(10),
        is_valid=number < len(labels) - 1,
        is_added=number == 0,
        row=number,
        position=number,
        view_index=number * 0,
    )


def poisoned(name, batch, is_bad=True, **settings):
    poison = ff.ATTACKS[name](**settings).poison

    @jax.jit
    def run(batch, is_bad):
        client = Client(**dict.fromkeys(Client._fields))
        given = {"batch": lambda step: batch, "num_classes": batch.num_classes}
        return attacks.with_poison(client._replace(**given), poison, is_bad).batch(0)

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
    none = ff.ATTACKS["backdoor"](fraction=0.0).poison(jax.tree.map(jnp.asarray, batch))
    np.testing.assert_array_equal(none.labels, batch.labels)
    with pytest.raises(ValueError, match="needs images"):
        poisoned("backdoor", batch_of([1, 2], np.zeros((2, 5))))


def test_a_backdoors_rate_is_of_images_of_other_classes():
    images = np.zeros((4, 6, 6, 1), np.float32)

    def apply(variables, x):
        del variables
        is_stamped = x[:, -1, -1, 0] == 1
        return jnp.stack([jnp.where(is_stamped, 1.0, 0.0), 0.5 + 0 * x[:, 0, 0, 0]], 1)

    assert attacks.backdoor_rate(apply, {}, images, [1, 1, 0, 2]) == 1
    assert np.sum(jax.jit(attacks.stamp)(np.zeros((6, 6, 1), np.float32))) == 9


BOUNDS = (  # of a cohort of nine
    ([robust.median()], 4),
    ([robust.trimmed_mean(trim_fraction=0.2)], 1),
    ([robust.krum(num_malicious_clients=2)], 2),
    ([robust.nearest_neighbor_mixing(num_malicious_clients=1), robust.median()], 1),
    ([robust.bucketing(clients_per_bucket=2), robust.median()], 2),
)


def test_more_attackers_than_a_rule_tolerates_are_refused_with_its_bound():
    """Those that are expected in a cohort, rounded up."""
    cases = [(links, f, f / NUMBER, NUMBER, NUMBER) for links, f in BOUNDS]
    one = [robust.krum(num_malicious_clients=1)]
    cases += [(one, 1, 0.1, 10, 10), (one, 1, 0.2, 10, 5)]
    for links, bound, share, number, cohort in cases:
        algorithm = ff.with_aggregation(ff.fedavg(LOCAL), *links)
        for more in (0, 1):
            attacked = ff.with_attack(
                algorithm, "alie", share=share + more / number, num_clients=number
            )
            if not more:
                attacked.check_cohort(cohort)
                continue
            with pytest.raises(ValueError, match=f"it tolerates {bound}"):
                attacked.check_cohort(cohort)


def test_wrong_shares_names_and_settings_of_an_attack_are_refused():
    plain, finch = ff.fedavg(LOCAL), contracts.MEMBERS["finch"].build()
    assert ff.with_attack(plain, "alie", share=0, num_clients=5) is plain
    for algorithm, name, wrong, words in (
        (plain, "alie", {"share": 1.0}, r"share must be in \[0, 1\), got 1.0"),
        (plain, "alie", {"share": 0.05}, "give at least one of 5 .* at least 0.1"),
        (plain, "alie", {"taw": 1}, "^attack must have keys .*taw"),
        (plain, "label_flipp", {}, "did you mean label_flip"),
        (finch, "alie", {}, "updates are summed, got .*finch"),
    ):
        with pytest.raises(ValueError, match=words):
            ff.with_attack(algorithm, name, num_clients=5, **{"share": 0.5, **wrong})
