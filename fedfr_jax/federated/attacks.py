"""Attacks by malicious clients, under any algorithm and aggregation.

    with_attack(with_aggregation(fedavg(local), median()), "alie", share=0.2,
                num_clients=100)

An attacker runs the algorithm as the others do and then cheats in one of three ways:
it trains on other examples, it sends another update, or all of a round's attackers
agree on an update that they make of the honest ones. Attackers cheat in nothing else:
weights, per-client results, what an algorithm sums besides, and what `prepare` reads of
their examples are honest. Running statistics too, as the links of an aggregation leave
them alone.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.data.permutation import permute
from fedfr_jax.federated.aggregation import contract
from fedfr_jax.federated.aggregation.robust import average
from fedfr_jax.parts import choose
from fedfr_jax.ranges import BelowOne, Count, NonNegative, Number, Seed, Share, Whole
from fedfr_jax.schema import checked, register
from fedfr_jax.types import Aggregator, Algorithm, Batch, Client, any_number

# Role that a client sends with its update under colluding attacks; 0 for a client whose
# update was dropped.
HONEST, MALICIOUS = 1.0, 2.0
SALT = 0xA77AC  # so that attackers are independent of the cohorts
WORD = 0x9E3779B9  # spreads the positions of examples


class Attack(NamedTuple):
    """Functions of an attack; updates as links of an aggregation see them."""

    poison: Callable[[Batch], Batch] | None = None
    change: Callable[[jax.Array, list], list] | None = None  # (key, update) -> update
    # (updates [K, ...], is_honest [K]) -> the update [...] of all attackers
    collude: Callable[[list, jax.Array], list] | None = None


@checked
def with_attack(
    algorithm: Algorithm,
    attack: str | Attack,
    *,
    share: BelowOne,
    num_clients: Count,
    seed: Seed = 0,
    **settings,
) -> Algorithm:
    """Make round(share N) of an algorithm's N clients malicious, chosen by the seed.

    It goes around `with_aggregation`, so that the attack meets the defence. Every
    client's metric `attacker` is 1 for those who attack.

    Args:
      attack: a name of ATTACKS, with its `settings`; or an attack.
      share: of all clients; 0 is no attack.
      num_clients: N.

    Raises:
      ValueError: for an unknown name or setting, or a number out of its range; of a
        cohort, when more of it would attack than the aggregation tolerates.
    """
    is_named = not isinstance(attack, Attack)
    poison, change, collude = (
        choose("attack", ATTACKS, {"name": attack, **settings}) if is_named else attack
    )
    if share == 0:
        return algorithm
    number = round(share * num_clients)
    if not number:
        raise ValueError(
            f"attack.share must give at least one of {num_clients} clients, got "
            f"{share}. Choose at least {0.5 / num_clients}."
        )
    aggregator = algorithm.aggregator
    if not poison:
        aggregator = contract.aggregator_of(algorithm, "attack")
    tolerated = aggregator.max_malicious if aggregator else any_number

    def client_update(key, server, personal, client):
        is_bad = is_attacker(client.id, number, num_clients, seed)
        if poison:
            client = with_poison(client, poison, is_bad)
        output = algorithm.client_update(key, server, personal, client)
        update = output.update
        if change:
            honest, statistics, join = contract.split(update)
            bad = change(jax.random.fold_in(key, SALT), honest)
            update = join(trees.where(is_bad, bad, honest), statistics)
        if collude:
            update = update, jnp.where(is_bad, MALICIOUS, HONEST)
        metrics = {**output.metrics, "attacker": jnp.where(is_bad, 1.0, 0.0)}
        return output._replace(update=update, metrics=metrics)

    def check_cohort(cohort_size):
        algorithm.check_cohort(cohort_size)
        bound = tolerated(cohort_size)
        expected = math.ceil(number * cohort_size / num_clients - 1e-9)
        if expected > bound:
            raise ValueError(
                f"attack.share must be at most {bound / cohort_size:.3g} for this "
                f"aggregation, got {share}: {expected} of a cohort of {cohort_size} "
                f"attack, it tolerates {bound}. Lower the share, raise "
                "num_malicious_clients of the aggregation, or choose one that "
                "tolerates more."
            )

    if aggregator and collude:
        link = Aggregator(mix=put_collusion(collude))
        aggregator = contract.on_all_updates(link, aggregator)
    return algorithm._replace(
        client_update=client_update,
        aggregator=aggregator,
        check_cohort=check_cohort,
        built_for=(*algorithm.built_for, ("with_attack", num_clients)),
    )


def is_attacker(client, number: int, num_clients: int, seed: int) -> jax.Array:
    """Whether clients [...] int are among the `number` attackers, [...] bool.

    Computed from their places in a keyed permutation, without a list of attackers.
    """
    word = jnp.uint32((seed * WORD + SALT) % 2**32)
    place = permute(word, jnp.atleast_1d(client), jnp.int32(num_clients))
    return (place < number).reshape(jnp.shape(client))


def with_poison(client: Client, poison: Callable, is_bad: jax.Array) -> Client:
    """Poison a client's own examples if it is an attacker (`is_bad`, [] bool)."""

    def poisoned(batch):
        is_own = is_bad & batch.is_valid & ~batch.is_added
        pick = lambda bad, x: jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), bad, x)
        bad = poison(batch)
        return batch._replace(
            inputs=jax.tree.map(pick, bad.inputs, batch.inputs),
            targets=jax.tree.map(pick, bad.targets, batch.targets),
        )

    return client._replace(
        batch=lambda step: poisoned(client.batch(step)),
        batch_at=lambda step, positions: poisoned(client.batch_at(step, positions)),
        batch_from=lambda start, view: poisoned(client.batch_from(start, view)),
    )


def put_collusion(collude: Callable) -> Callable:
    """Build `Aggregator.mix` that replaces the attackers' updates by a common one."""

    def mix(key, updates, weights):
        del key
        updates, role = updates

        def replace_bad(change):
            bad = collude(change, role == HONEST)
            return [put(x, y) for x, y in zip(change, bad, strict=True)]

        def put(x, y):
            is_bad = (role == MALICIOUS).reshape(-1, *[1] * y.ndim)
            return jnp.where(is_bad, y[None].astype(x.dtype), x)

        return contract.on_change(replace_bad, updates), weights

    return mix


def label_flip() -> Attack:
    """Label flip: class y of M becomes M - 1 - y (two classes in arXiv:1808.04866)."""

    def poison(batch):
        last = batch.num_classes - 1
        targets = {**batch.targets, "label": last - batch.labels}
        if "mask" in targets:  # pixels of no class stay
            mask = targets["mask"].astype(jnp.int32)
            flipped = jnp.where(mask <= last, last - mask, mask)
            targets["mask"] = flipped.astype(targets["mask"].dtype)
        return batch._replace(targets=targets)

    return Attack(poison=poison)


@checked
def backdoor(
    *,
    target: Whole = 0,
    fraction: Share = 0.5,
    pattern_size: Count = 3,
    boost: Number = 1.0,
) -> Attack:
    """Backdoor: images with a white square in the corner get the label `target`.

    Gu et al. 2017 (BadNets), arXiv:1708.06733; `boost` is the model replacement of
    Bagdasaryan et al. 2018, arXiv:1807.00459. `backdoor_rate` measures what it does.

    Args:
      target: the class.
      fraction: of an attacker's examples that are so, always the same ones.
      pattern_size: pixels of the square's side.
      boost: by which the attacker's update is multiplied.
    """

    def poison(batch: Batch) -> Batch:
        image = batch.inputs.get("image")
        if image is None or image.ndim != 4 or "mask" in batch.targets:
            raise ValueError("attack backdoor needs images [H, W, C] with a label.")
        spread = batch.position.astype(jnp.uint32) * jnp.uint32(WORD)
        is_chosen = spread < jnp.uint32(min(fraction * 2**32, 2**32 - 1))
        is_stamped = is_chosen[:, None, None, None]
        stamped = jnp.where(is_stamped, stamp(image, pattern_size), image)
        label = jnp.where(is_chosen, target, batch.labels)
        return batch._replace(
            inputs={**batch.inputs, "image": stamped},
            targets={**batch.targets, "label": label},
        )

    change = lambda key, update: [boost * x for x in update]
    return Attack(poison=poison, change=None if boost == 1 else change)


def stamp(images: jax.Array, pattern_size: int = 3) -> jax.Array:
    """Put a white square in the lower right of images [..., H, W, C] in [-1, 1]."""
    return images.at[..., -pattern_size:, -pattern_size:, :].set(1)


def backdoor_rate(
    apply: Callable, variables, images, labels, *, target=0, pattern_size=3
) -> float:
    """Share of stamped images of other classes that a model assigns to the target.

    Args:
      apply: (variables, images [T, H, W, C]) -> logits [T, M].
    """
    stamped = stamp(jnp.asarray(images), pattern_size)
    predicted = apply(variables, stamped).argmax(axis=1)
    is_other = jnp.asarray(labels) != target
    return float((is_other & (predicted == target)).sum() / is_other.sum())


def sign_flip() -> Attack:
    """Send minus the attacker's update (Li et al. 2019, arXiv:1811.03761)."""
    return Attack(change=lambda key, update: [-x for x in update])


@checked
def scaled(*, factor: Number = 10.0) -> Attack:
    """Send the attacker's update times `factor`; arXiv:1807.00459, section 4.2."""
    return Attack(change=lambda key, update: [factor * x for x in update])


@checked
def gaussian(*, mean: Number = 0.0, std: NonNegative = 1.0) -> Attack:
    """Send normal noise instead of an update, independent for each attacker.

    Blanchard et al. 2017, arXiv:1703.02757, section 5.
    """

    def change(key, update):
        noise = optax.tree.random_like(key, update)
        return jax.tree.map(lambda x: mean + std * x, noise)

    return Attack(change=change)


@checked
def alie(*, tau: Number = 1.5) -> Attack:
    """ALIE ("a little is enough"): the honest mean plus tau standard deviations.

    Baruch et al. 2019, arXiv:1902.06156, algorithm 3, with the deviation (of a sample,
    divided by h - 1 for h honest clients) added as in byzfl; the paper takes it off,
    which is a negative tau.

    Args:
      tau: z of the paper, which chooses it by the numbers of clients and attackers.
    """

    def collude(updates, is_honest):
        count = is_honest.sum()
        share = count / jnp.maximum(count - 1, 1)

        def bad(x):
            mean = honest_mean(x, is_honest)
            variance = honest_mean(jnp.square(x - mean[None]), is_honest)
            return mean + tau * jnp.sqrt(variance * share.astype(x.dtype))

        return [bad(x) for x in updates]

    return Attack(collude=collude)


@checked
def inner_product(*, tau: Number = 2.0) -> Attack:
    """Inner product manipulation: send minus tau times the honest mean.

    Xie et al. 2020, arXiv:1903.03936, section 4. Fall of empires (FOE) in the
    convention (1 - tau) times the mean is this with tau - 1.

    Args:
      tau: epsilon of the paper.
    """

    def collude(updates, is_honest):
        return [-tau * honest_mean(x, is_honest) for x in updates]

    return Attack(collude=collude)


def honest_mean(x: jax.Array, is_honest: jax.Array) -> jax.Array:
    """Mean [...] of x [K, ...] over the honest clients."""
    return average(is_honest[None], x)[0]


ATTACKS = {
    "alie": alie,
    "backdoor": backdoor,
    "gaussian": gaussian,
    "inner_product": inner_product,
    "label_flip": label_flip,
    "scaled": scaled,
    "sign_flip": sign_flip,
}


def register_attack(name: str, factory: Callable) -> None:
    """Register `factory(*, ...settings) -> Attack` in ATTACKS."""
    register(ATTACKS, "attack", name, factory)
