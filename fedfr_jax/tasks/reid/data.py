"""Who trains on what, and what networks are tested on: a scenario of re-identification.

A domain is a data set: a part of a `join` source, whose names begin with it, or the one
set, which is called "test".
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition import PARTITIONS, ClientSplit
from fedfr_jax.data.partition.client_split import NOBODY as UNHELD
from fedfr_jax.data.partition.reid import (
    Owners,
    Seen,
    by_camera,
    by_dataset,
    by_identity,
    classes_of_clients,
)
from fedfr_jax.data.sources.join import join_sources
from fedfr_jax.data.sources.reid import NOBODY
from fedfr_jax.evaluation.matches import People, count_matches
from fedfr_jax.schema import choose, is_of
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Part, Source, Used

SCENARIOS = {
    "by_camera": by_camera,
    "by_dataset": by_dataset,
    "by_identity": by_identity,
}
ONE_DOMAIN = "test"


class Domain(NamedTuple):
    """Test images of one data set, as rows of the source."""

    queries: np.ndarray  # [Q] int64
    gallery: np.ndarray  # [G] int64, without what shows nobody


class ReidSplit(NamedTuple):
    """Rows of a source by client, and the test images of every domain."""

    train: np.ndarray  # [n] int64 rows grouped by client
    labels: np.ndarray  # [n] int32 class of the client's own, in [0, num_classes[k])
    offsets: np.ndarray  # [N + 1] int64 of each client's among them
    num_classes: np.ndarray  # [N] int32 people of each client
    client_names: tuple[str, ...]  # N
    tests: dict[str, Domain]  # by the domain's name
    own_tests: tuple[tuple[str, ...], ...]  # N x the tested domains that it trains on
    unseen: tuple[str, ...]  # tested domains that no client trains on

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.client_names)


def split_of(settings: Mapping, source: Source) -> ReidSplit:
    """The scenario of config.partition.

    Args:
      settings: "name", one of SCENARIOS or of the partitions that split classes, with
        its settings; and "leave_out", a domain or several that no client trains on.

    Raises:
      ValueError: for a source without roles or cameras, an unknown domain, clients
        without an image (with their names), or no test in which a query has a match.
    """
    check_source(source)
    names, domain = domains_of(source)
    left_out = _left_out(settings.get("leave_out", ()), names)
    is_person = np.array([not is_nobody(name) for name in source.names])[source.labels]
    is_held = np.array([name not in left_out for name in names])
    rows = np.flatnonzero((source.roles == TRAIN) & is_person & is_held[domain])
    kept = tuple(name for name in names if name not in left_out)
    number = np.cumsum(is_held) - 1
    seen = Seen(source.labels[rows], source.cameras[rows], number[domain[rows]], kept)
    scenario = {k: v for k, v in settings.items() if k != "leave_out"}
    owners = owners_of(scenario, seen)
    rows, client = _grouped(rows, owners)
    labels, num_classes = classes_of_clients(
        client, source.labels[rows], len(owners.names)
    )
    tests = tests_of(source, names, domain, is_person)
    return ReidSplit(
        train=rows,
        labels=labels,
        offsets=np.searchsorted(client, np.arange(len(owners.names) + 1)),
        num_classes=num_classes,
        client_names=owners.names,
        tests=tests,
        own_tests=tuple(
            tuple(names[i] for i in np.unique(domain[own]) if names[i] in tests)
            for own in np.split(rows, np.flatnonzero(np.diff(client)) + 1)
        ),
        unseen=tuple(name for name in tests if name in left_out),
    )


def used_of(split: ReidSplit, source: Source, public: Source | None = None) -> Used:
    """The images of clients, queries and galleries, and those that all share.

    Args:
      public: they are part of the source that is returned, as "public/<name>".
    """
    client = np.repeat(np.arange(split.num_clients), np.diff(split.offsets))
    parts = {"train": Part(split.train, client, split.labels)}
    for name, test in split.tests.items():
        for use, rows in test._asdict().items():
            parts[f"{use} of {name}"] = Part(rows, None, source.cameras[rows])
    if public is not None:
        first = len(source.labels)
        parts["public"] = Part(first + np.arange(len(public.labels)))
        source = join_sources({"data": source, "public": public})
    return Used(source, parts)


def owners_of(settings: Mapping, seen: Seen) -> Owners:
    """Who trains on which image: a scenario, or a partition of examples.

    A set of re-identification has tests of its own: what a partition holds out of a
    client's images is trained on too.

    Raises:
      ValueError: for an unknown name, wrong settings or a partition of faces.
    """
    name = settings.get("name")
    if name in list(SCENARIOS) or name not in list(PARTITIONS):
        return choose("partition", {**PARTITIONS, **SCENARIOS}, settings, seen)
    labels = np.unique(seen.labels, return_inverse=True)[1].astype(np.int32)
    parts = choose("partition", PARTITIONS, settings, labels)
    if not isinstance(parts, ClientSplit):
        raise ValueError(f"config.partition.name must split classes, got {name!r}.")
    client = np.full(len(labels), UNHELD)
    numbers = np.arange(len(parts.train_offsets) - 1)
    client[parts.train] = np.repeat(numbers, np.diff(parts.train_offsets))
    client[parts.test] = np.repeat(numbers, np.diff(parts.test_offsets))
    return Owners(client, tuple(f"client {number}" for number in numbers))


def check_source(source: Source) -> None:
    """Raise ValueError unless the source is one of re-identification."""
    if source.roles is None or source.cameras is None:
        raise ValueError(
            "config.data must be a source of re-identification (market1501, msmt17, "
            "cuhk03_np, reid_csv or a join of such), got one without "
            f"{'roles' if source.roles is None else 'cameras'}."
        )
    if not (source.roles == TRAIN).any():
        raise ValueError("config.data must have images to train on, got none.")


def is_nobody(name: str) -> bool:
    """Whether an identity, perhaps of a part of a join, is no person."""
    return name.rpartition("/")[2] == NOBODY


def domains_of(source: Source) -> tuple[tuple[str, ...], np.ndarray]:
    """(names of the data sets, the number of each image's [T])."""
    parts = [name.partition("/") for name in source.names]
    if not all(slash for _, slash, _ in parts):
        return (ONE_DOMAIN,), np.zeros(len(source.labels), int)
    names = tuple(dict.fromkeys(part for part, *_ in parts))
    number = np.array([names.index(part) for part, *_ in parts])
    return names, number[source.labels]


def _left_out(given: str | Sequence[str], names: tuple[str, ...]) -> set[str]:
    """The domains of config.partition.leave_out."""
    is_text = is_of(str | tuple[str, ...], given)
    left_out = {given} if isinstance(given, str) else set(given if is_text else ())
    if not is_text or not left_out < set(names):
        raise ValueError(
            f"config.partition.leave_out must leave some of the data sets "
            f"{', '.join(names)}, got {given!r}."
        )
    return left_out


def _grouped(rows, owners):
    """(rows by client, their clients), without those that nobody holds."""
    counts = np.bincount(owners.client[owners.client != UNHELD], minlength=1)
    counts = np.pad(counts, (0, len(owners.names) - len(counts)))
    if not counts.all():
        empty = [n for n, c in zip(owners.names, counts, strict=True) if not c]
        raise ValueError(
            "config.partition must give every client an image to train on, got none "
            f"for {', '.join(empty)} (leave_out takes data sets to be tested only)."
        )
    is_held = owners.client != UNHELD
    rows, client = rows[is_held], owners.client[is_held]
    order = np.argsort(client, kind="stable")
    return rows[order], client[order]


def tests_of(source, names, domain, is_person) -> dict[str, Domain]:
    """The queries and the gallery of every domain that has both.

    Args:
      names, domain: of `domains_of`; is_person: [T] bool.

    Raises:
      ValueError: when there is none, or a domain's queries have no match at all.
    """
    tests = {}
    for number, name in enumerate(names):
        is_here = is_person & (domain == number)
        queries = np.flatnonzero(is_here & (source.roles == QUERY))
        gallery = np.flatnonzero(is_here & (source.roles == GALLERY))
        if len(queries) and len(gallery):
            tests[name] = Domain(queries, gallery)
    if not tests:
        raise ValueError(
            "config.data must have queries and a gallery (in one folder of images: set "
            "test_identities), got none."
        )
    for name, test in tests.items():
        if not matched(source, test).any():
            raise ValueError(
                f"the queries of {name} must include one whose person another camera "
                f"saw in the gallery, got none of {len(test.queries)}."
            )
    return tests


def people_of(source: Source, rows: np.ndarray) -> People:
    """Who is on rows [n] of the source."""
    return People(source.labels[rows], source.cameras[rows])


def matched(source: Source, test: Domain) -> np.ndarray:
    """Which queries another camera's image in the gallery answers, [Q] bool."""
    people = [people_of(source, rows) for rows in test]
    return count_matches(*people)[0] > 0
