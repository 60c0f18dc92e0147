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

from fedfr_jax import trees
from fedfr_jax.data.permutation import permute
from fedfr_jax.federated.aggregation.contract import (
    on_all_updates,
    on_change,
    split,
)
from fedfr_jax.ranges import BelowOne, Count, Seed
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator, Algorithm, Batch, Client, PyTree

# Role that a client sends with its update under colluding attacks; 0 for a client whose
# update was dropped.
HONEST, MALICIOUS = 1.0, 2.0
SALT = 0xA77AC  # so that attackers are independent of the cohorts


class Attack(NamedTuple):
    """Functions of an attack, of which one is set; updates as links see them."""

    poison: Callable[[Batch], Batch] | None = None
    change: Callable[[jax.Array, list], list] | None = None  # (key, update) -> update
    # (updates [K, ...], is_honest [K]) -> the update [...] of all attackers
    collude: Callable[[list, jax.Array], list] | None = None


@checked
def attack_algorithm(
    algorithm: Algorithm,
    attack: Attack,
    *,
    share: BelowOne,
    num_clients: Count,
    seed: Seed = 0,
) -> Algorithm:
    """Make round(share N) of the N clients attackers, chosen by the seed."""
    if share == 0:
        return algorithm
    number = round(share * num_clients)
    if not number:
        raise ValueError(
            f"attack.share must give at least one of {num_clients} clients, got "
            f"{share}. Choose at least {0.5 / num_clients}."
        )
    if algorithm.aggregator is None and not attack.poison:
        raise ValueError(
            f"attack needs an algorithm whose updates are summed, got {algorithm}. "
            "Choose an attack on examples."
        )

    def client_update(key, server, personal, client):
        is_bad = is_attacker(client.id, number, num_clients, seed)
        if attack.poison:
            client = with_poison(client, attack.poison, is_bad)
        output = algorithm.client_update(key, server, personal, client)
        update = output.update
        if attack.change:

            def change(honest):
                bad = attack.change(jax.random.fold_in(key, SALT), honest)
                return trees.where(is_bad, bad, honest)

            update = on_change(change, update)
        if attack.collude:
            update = update, jnp.where(is_bad, MALICIOUS, HONEST)
        metrics = {**output.metrics, "attacker": jnp.where(is_bad, 1.0, 0.0)}
        return output._replace(update=update, metrics=metrics)

    def check_cohort(cohort_size):
        algorithm.check_cohort(cohort_size)
        check_bound(algorithm.aggregator, share, number, num_clients, cohort_size)

    attacked = algorithm._replace(
        client_update=client_update,
        check_cohort=check_cohort,
        built_for=(*algorithm.built_for, ("with_attack", num_clients)),
    )
    if not attack.collude:
        return attacked
    link = Aggregator(mix=put_collusion(attack.collude))
    return attacked._replace(aggregator=on_all_updates(link, algorithm.aggregator))


def is_attacker(client, number: int, num_clients: int, seed: int) -> jax.Array:
    """Whether clients [...] int are among the `number` attackers, [...] bool.

    Computed from their places in a keyed permutation, without a list of attackers.
    """
    word = jnp.uint32((seed * 0x9E3779B9 + SALT) % 2**32)
    place = permute(word, jnp.atleast_1d(client), jnp.int32(num_clients))
    return (place < number).reshape(jnp.shape(client))


def check_bound(
    aggregator: Aggregator, share: float, number: int, num_clients: int, cohort: int
) -> None:
    """Raise ValueError if more clients of a cohort attack than a rule tolerates.

    Of a sample of the clients the mean number of attackers counts.
    """
    if not (aggregator and aggregator.max_malicious):
        return
    bound = aggregator.max_malicious(cohort)
    expected = math.ceil(number * cohort / num_clients - 1e-9)
    if expected > bound:
        raise ValueError(
            f"attack.share must be at most {bound / cohort:.3g} for this aggregation, "
            f"got {share}: {expected} of a cohort of {cohort} attack, it tolerates "
            f"{bound}. Lower the share, raise num_malicious_clients of the "
            "aggregation, or choose one that tolerates more."
        )


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

    def mix(key, updates: PyTree, weights: PyTree):
        del key
        updates, role = updates
        change, statistics, join = split(updates)
        bad = collude(change, role == HONEST)

        def put(x, y):
            is_bad = (role == MALICIOUS).reshape(-1, *[1] * y.ndim)
            return jnp.where(is_bad, y[None].astype(x.dtype), x)

        rows = [put(x, y) for x, y in zip(change, bad, strict=True)]
        return join(rows, statistics), weights

    return mix
