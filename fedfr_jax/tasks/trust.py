"""Malicious and faulty clients of a method: the keys `attack` and `on_bad_update`."""

from fedfr_jax.federated.aggregation import with_update_checks
from fedfr_jax.federated.attacks import ATTACKS
from fedfr_jax.federated.attacks.contract import attack_algorithm
from fedfr_jax.schema import call, choose
from fedfr_jax.tasks.methods import Method, named
from fedfr_jax.types import Algorithm


def with_trust_keys(
    algorithm: Algorithm, section: str, method: Method, num_clients: int, seed: int
) -> Algorithm:
    """Add the attackers and update checks that a method configures.

    Args:
      method: its `attack` is {"name": of ATTACKS, "share": of all clients, settings},
        with a `seed` that is the config's unless given; its `on_bad_update` is exclude
        or stop, or {"name": one of them, `max_norm`, `min_kept` of
        `with_update_checks`}.

    Raises:
      ValueError: for an unknown name or key, a missing one, or a number out of range.
    """
    if method.attack is not None:
        settings, where = dict(method.attack), f"config.{section}.attack"
        if "share" not in settings:
            raise ValueError(f"{where} needs the key share, of all clients.")
        share, seed = settings.pop("share"), settings.pop("seed", seed)
        attack = choose(f"{section}.attack", ATTACKS, settings)
        algorithm = attack_algorithm(
            algorithm, attack, share=share, num_clients=num_clients, seed=seed
        )
    if method.on_bad_update is not None:
        settings = named(method.on_bad_update)
        action = {"on_bad_update": settings.pop("name") or None, **settings}
        algorithm = call(
            f"{section}.on_bad_update", with_update_checks, action, algorithm
        )
    return algorithm
