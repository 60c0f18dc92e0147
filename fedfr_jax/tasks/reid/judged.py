"""What networks are judged on, and how: a scenario's tests and config.evaluation."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedfr_jax.evaluation.matches import People
from fedfr_jax.evaluation.retrieval import AVERAGE_PRECISIONS, DIVISORS
from fedfr_jax.schema import AT_ONCE, call, check_choice, check_ranges
from fedfr_jax.stream import Stream, stream
from fedfr_jax.tasks.reid.data import Domain, ReidSplit, people_of
from fedfr_jax.types import Dataset, Source


class Evaluating(NamedTuple):
    """Keys of config.evaluation; the defaults are what most papers report."""

    batch_size: int = 64  # test images at once on a device
    flip: bool = True  # features are sums with those of mirror images
    ranks: tuple[int, ...] = (1, 5, 10)
    average_precision: str = "standard"  # or "official", see retrieval.py
    divide_by: str = "valid"  # means over queries with a match; "all": FedReID's code
    single_digit_camera: bool = False  # FedReID's bug: camera 15 is taken for camera 1
    single_shot: int = 0  # galleries of one image of each person for CMC; 0: the whole
    rerank: bool | Mapping = False  # or settings of rerank.py: {"k1", "k2", "weight"}
    pictures: int = 8  # queries on the page that is drawn in the end; 0 draws none
    personalised_in_rounds: bool = False  # a test per client, or only in the end
    local: Mapping | None = None  # clients train before a test, see local_models.py


def evaluation_of(settings: Mapping) -> Evaluating:
    """config.evaluation, checked."""
    evaluating = call("evaluation", Evaluating, settings)
    bounds = {"batch_size": AT_ONCE, "ranks": (1, math.inf)}
    bounds |= {"single_shot": (0, 10**4), "pictures": (0, 100)}
    check_ranges("config.evaluation.", evaluating._asdict(), bounds)
    if not evaluating.ranks:
        raise ValueError("config.evaluation.ranks must have a rank, got ().")
    for key, known in (
        ("average_precision", AVERAGE_PRECISIONS),
        ("divide_by", DIVISORS),
    ):
        check_choice(f"config.evaluation.{key}", evaluating._asdict()[key], known)
    return evaluating


class Judged(NamedTuple):
    """What networks are judged on."""

    table: Dataset | Stream  # test images, of one domain after the other
    people: People  # [R], on the table's images
    tests: dict[str, Domain]  # rows of the table
    own_tests: tuple[tuple[str, ...], ...]  # N x the domains of a client
    unseen: tuple[str, ...]  # domains that no client trains on


def judged_of(
    source: Source, split: ReidSplit, stream_bytes: int | None = None
) -> Judged:
    """Read a scenario's test images once, or as often as they are needed.

    Args:
      stream_bytes: bytes that the images may take on a device; None takes them all.
    """
    parts = [part for test in split.tests.values() for part in test]
    rows = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts])
    places = iter(np.split(np.arange(len(rows)), ends[:-1]))
    tests = {name: Domain(next(places), next(places)) for name in split.tests}
    labels = source.labels[rows].astype(np.int32)
    if stream_bytes is None:
        table = Dataset.labelled(source.read(rows), labels)
    else:
        table = stream(lambda i: source.read(rows[i]), labels, memory=stream_bytes)
    people = people_of(source, rows)
    return Judged(table, people, tests, split.own_tests, split.unseen)
