"""Attacks of malicious clients, under any algorithm and aggregation.

`with_attack(algorithm, "alie", share=0.2, num_clients=100)`; the contract is
`attacks.contract`.
"""

from collections.abc import Callable

from fedfr_jax.federated.attacks.contract import Attack, attack_algorithm, is_attacker
from fedfr_jax.federated.attacks.kinds import (
    alie,
    backdoor,
    backdoor_rate,
    gaussian,
    inner_product,
    label_flip,
    scaled,
    sign_flip,
    stamp,
)
from fedfr_jax.parts import choose
from fedfr_jax.schema import register
from fedfr_jax.types import Algorithm

__all__ = ["Attack", "backdoor_rate", "is_attacker", "stamp", "with_attack"]

ATTACKS = {
    "alie": alie,
    "backdoor": backdoor,
    "gaussian": gaussian,
    "inner_product": inner_product,
    "label_flip": label_flip,
    "scaled": scaled,
    "sign_flip": sign_flip,
}


def with_attack(
    algorithm: Algorithm,
    name: str,
    *,
    share: float,
    num_clients: int,
    seed: int = 0,
    **settings,
) -> Algorithm:
    """Make a share of an algorithm's clients malicious.

    It goes around `with_aggregation`, so that the attack meets the defence. Every
    client's metric `attacker` is 1 for those who attack.

    Args:
      name: of ATTACKS.
      share: of all N clients, in [0, 1); 0 is no attack.
      num_clients: N.
      seed: draws them.
      settings: of the attack.

    Raises:
      ValueError: for an unknown name or setting, or a number out of its range; of a
        cohort, when more of it would attack than the aggregation tolerates.
    """
    attack = choose("attack", ATTACKS, {"name": name, **settings})
    return attack_algorithm(
        algorithm, attack, share=share, num_clients=num_clients, seed=seed
    )


def register_attack(name: str, factory: Callable) -> None:
    """Register `factory(*, ...settings) -> Attack` in ATTACKS."""
    register(ATTACKS, "attack", name, factory)
