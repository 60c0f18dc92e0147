"""A config's row for every algorithm, from what its line of MEMBERS tells it."""

import inspect
from collections.abc import Collection

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.methods import NEEDS
from tests.contracts.test_algorithms import HEAD, MEMBERS

FACTS = {"model", "num_clients", *NEEDS}  # what a task offers, no key of a config


def asked(name: str) -> set[str]:
    """Settings that an algorithm cannot do without."""
    needed = inspect.Parameter.empty
    return {k for k, p in keywords(ALGORITHMS[name]).items() if p.default is needed}


def required(name: str, head: str) -> dict:
    """Keys that a row of the algorithm must have, with the values of its contract.

    Args:
      head: the last layer in the task, where the tiny network of the contract has its.
    """
    given = MEMBERS[name].build.keywords
    own = sorted(asked(name) - FACTS)
    return {key: head if given[key] == HEAD else given[key] for key in own}


def identities(name: str) -> set[str]:
    """{"identities"} for an algorithm that needs public ones, as FedFR."""
    return {"identities"} & {*MEMBERS[name].build().needs}


def rows_of(head: str, *, given: Collection[str], rate: float = 0.1) -> dict:
    """{algorithm: its row} of those that a task can tell all that they ask for.

    Args:
      given: of FACTS, what the task offers.
    """
    lacking = FACTS - {*given}
    more = {"one_shot": {"frozen": f"^params/(?!{head.removeprefix('params/')}/)"}}
    return {
        name: {
            "learning_rate": rate,
            "algorithm": {"name": name, **required(name, head)},
            **more.get(name, {}),
        }
        for name in sorted(ALGORITHMS)
        if not (asked(name) | identities(name)) & lacking
    }
