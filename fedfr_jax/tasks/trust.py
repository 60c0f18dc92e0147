"""Malicious and faulty clients of a method: the keys `attack` and `on_bad_update`."""

from collections.abc import Mapping

from fedfr_jax.federated.aggregation import with_update_checks
from fedfr_jax.federated.attacks import ATTACKS
from fedfr_jax.federated.attacks.contract import Attack, attack_algorithm
from fedfr_jax.ranges import BelowOne, Seed
from fedfr_jax.schema import (
    check_choice,
    check_settings,
    check_values,
    choose,
    keyword_kinds,
)
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
        attack, settings = read_attack(section, method.attack)
        settings = {"seed": seed, **settings, "num_clients": num_clients}
        algorithm = attack_algorithm(algorithm, attack, **settings)
    if method.on_bad_update is not None:
        action, settings = read_action(section, method.on_bad_update)
        algorithm = with_update_checks(algorithm, action, **settings)
    return algorithm


def read_attack(section: str, attack: Mapping) -> tuple[Attack, dict]:
    """Read the key `attack`: (the attack, its `share` and perhaps `seed`)."""
    settings, where = dict(attack), f"config.{section}.attack"
    if "share" not in settings:
        raise ValueError(f"{where} needs the key share, of all clients.")
    attackers = {k: settings.pop(k) for k in ("share", "seed") if k in settings}
    check_values(f"{where}.", attackers, {"share": BelowOne, "seed": Seed})
    return choose(f"{section}.attack", ATTACKS, settings), attackers


def read_action(section: str, key: str | Mapping) -> tuple[str, dict]:
    """Read the key `on_bad_update`: (stop or exclude, further keywords)."""
    settings, where = named(key), f"config.{section}.on_bad_update"
    action = settings.pop("name")
    check_choice(f"{where}.name", action, ("exclude", "stop"))
    return action, check_settings(where, settings, keyword_kinds(with_update_checks))
