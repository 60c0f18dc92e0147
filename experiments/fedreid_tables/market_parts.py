"""Market-1501 cut into parts of very unequal size, as data sets of their own.

A part has two of the cameras and people of its own, to train on and to be tested. Two
parts share a pair of cameras, which only a clustering can know.
"""

import numpy as np

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.data.sources.selection import keep_rows
from fedfr_jax.types import TRAIN, Source

TESTED = 150  # people, half of them by each of the two parts with a pair of cameras
PAIRS = {"c26": (2, 6), "c35": (3, 5), "c14": (1, 4)}
PEOPLE = {"c26": (140, 35), "c35": (98, 21), "c14": (42, 15)}  # to train on: 351 in all


def market_part(
    path: str,
    *,
    image_size: tuple[int, int],
    seed: int,
    cameras: tuple[int, ...],
    trained: tuple[int, int],
    tested: tuple[int, int],
) -> Source:
    """What some cameras saw of some people of Market-1501.

    Args:
      path, image_size, seed: as of `market1501`, which tests TESTED people.
      trained, tested: (first, end) among the people of either kind, in a random order.

    Raises:
      ValueError: when there are fewer people than `end`.
    """
    given = {"image_size": image_size, "seed": seed, "test_identities": TESTED}
    source = SOURCES["market1501"](path, **given)
    is_train = source.roles == TRAIN
    chosen = np.zeros(len(source.labels), bool)
    for is_kind, (first, end) in ((is_train, trained), (~is_train, tested)):
        people = np.unique(source.labels[is_kind])
        if end > len(people):
            raise ValueError(f"{path} must hold {end} such people, got {len(people)}.")
        people = np.random.default_rng(seed).permutation(people)
        chosen |= np.isin(source.labels, people[first:end])
    is_seen = np.isin(source.cameras, cameras)
    return keep_rows(source, np.flatnonzero(chosen & is_seen))


def part_of(path, image_size, seed, cameras, trained, tested) -> dict:
    """Section of a part, as of `market_part`."""
    return {
        "name": "market_part",
        "path": path,
        "image_size": image_size,
        "seed": seed,
        "cameras": cameras,
        "trained": trained,
        "tested": tested,
    }


def parts_of(
    path: str,
    image_size: tuple[int, int],
    seed: int,
    people: dict[str, tuple[int, int]] = PEOPLE,
    first: int = 0,
) -> dict:
    """Section `data` of a config: the six parts, each named by cameras and people.

    Args:
      people: numbers of identities to train on, as PEOPLE.
      first: training identities before those of the first part.
    """
    parts = {}
    for pair, numbers in people.items():
        for place, number in enumerate(numbers):
            half = TESTED // 2
            tested = (place * half, (place + 1) * half)
            given = PAIRS[pair], (first, first + number), tested
            parts[f"{pair}_{number}"] = part_of(path, image_size, seed, *given)
            first += number
    return {"name": "concat", "sources": parts}
