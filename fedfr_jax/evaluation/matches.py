"""Who is on a gallery's images: the matches of each query, and what is junk for it.

Protocol of Zheng et al., "Scalable Person Re-identification: A Benchmark", ICCV 2015:
what the query's own camera saw of the query's person is junk, which is taken out of the
ranking, as is whatever has the identity JUNK; other images of the person are matches.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

JUNK = -1  # identity of boxes that show nobody
BLOCK_SIZE = 1 << 20  # scores held at once


class People(NamedTuple):
    """Who is on n images, and which camera saw them."""

    identities: np.ndarray  # [n] int, perhaps JUNK
    cameras: np.ndarray  # [n] int


def single_digit(cameras: np.ndarray) -> np.ndarray:
    """The first digit of camera numbers [n], all that FedReID's loader reads of them.

    >>> single_digit(np.array([1, 6, 15, 20])).tolist()
    [1, 6, 1, 2]
    """
    return np.array([int(str(camera)[0]) for camera in cameras.tolist()])


class Matches(NamedTuple):
    """A block of B queries with the gallery rows that show the same person.

    A query's matches come first, then its junk, then padding up to P.
    """

    rows: np.ndarray  # [B] queries; all have a match
    places: np.ndarray  # [B, P] int32 gallery rows
    num_good: np.ndarray  # [B] int32 matches
    num_same: np.ndarray  # [B] int32 matches and junk

    @property
    def is_good(self) -> np.ndarray:
        """[B, P] bool, the matches."""
        return np.arange(self.places.shape[1]) < self.num_good[:, None]


def count_matches(queries: People, gallery: People) -> tuple[np.ndarray, np.ndarray]:
    """(matches, matches and junk of the same person) of each query, [Q] int each.

    Raises:
      ValueError: for identities and cameras of different lengths, or an empty set.
    """
    for name, people in (("queries", queries), ("gallery", gallery)):
        shapes = np.shape(people.identities), np.shape(people.cameras)
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not shapes[0][0]:
            raise ValueError(
                f"{name} must have as many identities as cameras, at least 1, got "
                f"{shapes[0]} and {shapes[1]}."
            )
    cameras = np.concatenate([queries.cameras, gallery.cameras])
    number = np.unique(cameras, return_inverse=True)[1]
    people = np.concatenate([queries.identities, gallery.identities])
    seen = people.astype(np.int64) * (number.max() + 1) + number
    num_queries, is_kept = len(queries.identities), gallery.identities != JUNK
    num_same = _occurrences(people[:num_queries], people[num_queries:][is_kept])
    num_junk = _occurrences(seen[:num_queries], seen[num_queries:][is_kept])
    return num_same - num_junk, num_same


def _occurrences(wanted, values):
    """How often each of wanted [Q] is among values [G], [Q]."""
    values = np.sort(values)
    low = np.searchsorted(values, wanted, side="left")
    return np.searchsorted(values, wanted, side="right") - low


def matches_of(queries: People, gallery: People) -> Iterator[Matches]:
    """All queries with a match; a query may come in two blocks.

    Queries whose person is on about as many images are together, so that P is small.

    Raises:
      ValueError: as `count_matches`, or when no query has a match.
    """
    num_good, num_same = count_matches(queries, gallery)
    order = np.argsort(gallery.identities, kind="stable")
    low = np.searchsorted(gallery.identities[order], queries.identities)
    by_count = np.argsort(num_same, kind="stable")
    by_count = by_count[num_good[by_count] > 0]
    if not len(by_count):
        raise ValueError(
            "queries must include one whose person another camera saw in the gallery, "
            f"got none of {len(num_good)}."
        )
    size = min(max(1, BLOCK_SIZE // len(order)), len(by_count))
    for start in range(0, len(by_count), size):
        rows = by_count[min(start, len(by_count) - size) :][:size]
        column = np.arange(1 << int(num_same[rows].max() - 1).bit_length())
        is_same = column < num_same[rows][:, None]
        places = order[np.where(is_same, low[rows][:, None] + column, 0)]
        is_junk = gallery.cameras[places] == queries.cameras[rows][:, None]
        kind = np.where(is_same, is_junk, 2)  # matches, junk, padding
        places = np.take_along_axis(places, np.argsort(kind, 1, kind="stable"), 1)
        counts = num_good[rows].astype(np.int32), num_same[rows].astype(np.int32)
        yield Matches(rows, places.astype(np.int32), *counts)
