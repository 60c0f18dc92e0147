"""Data of re-identification: scenarios, tests, public images, batches of identities.

A domain is a data set: a source of `concat`, whose names begin with it, or the only
set, which is called "test".

Public images, for distillation and clustering, show people in no client's data: a share
of the training identities, or another source. Their labels are not used.

Batches of P identities with Q images each, for methods with `identities_per_batch`:
Hermans, Beyer, Leibe 2017, arXiv:1703.07737, section 2; the rule is that of torchreid's
RandomIdentitySampler (Zhou and Xiang 2019, arXiv:1910.10093), which Bag of Tricks uses
too. Made on the host: which identities are left depends on all batches before.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.partition import PARTITIONS, ClientPartition
from fedfr_jax.data.partition.reid import (
    ClientOfImage,
    TrainingLabels,
    by_camera,
    by_dataset,
    by_identity,
    client_classes,
)
from fedfr_jax.data.partition.rows import UNASSIGNED, ClientRows, group_rows
from fedfr_jax.data.sources.reid import DISTRACTOR
from fedfr_jax.data.sources.selection import concat_sources, keep_rows
from fedfr_jax.evaluation.retrieval import IdentityLabels, count_matches
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import Seed, Whole
from fedfr_jax.tasks.data import PartitionReader, SourceReader, open_data
from fedfr_jax.types import GALLERY, QUERY, TRAIN, DataUsage, Source, UsedRows

SCENARIOS = {
    "by_camera": by_camera,
    "by_dataset": by_dataset,
    "by_identity": by_identity,
}
ONE_DOMAIN = "test"


@section
class PublicDataConfig(NamedTuple):
    """Keys of config.partition.public; `fraction` or `source` must be set."""

    # Of the people to train on, who are taken from the clients
    fraction: Annotated[float, Interval(ge=0, le=0.9)] = 0.0
    # As config.data: all of its images
    source: Annotated[Part | None, SourceReader()] = None
    max_images: Whole = 0  # images at most, drawn at random; 0 takes all
    batch_size: Annotated[int, Interval(ge=2, le=2**16)] = 32
    seed: Seed = 0

    def check(self) -> None:
        """Raise ValueError unless it is one of the two."""
        if bool(self.fraction) == bool(self.source):
            raise ValueError(
                "config.partition.public must have a fraction or a source, got "
                f"{'both' if self.fraction else 'neither'}."
            )


@section
class PartitionConfig(NamedTuple):
    """Keys of config.partition."""

    scenario: Annotated[Part, PartitionReader(ChainMap(SCENARIOS, PARTITIONS)), INLINE]
    public: PublicDataConfig | None = None
    # A domain or several that no client trains on
    held_out_domains: str | tuple[str, ...] = ()


class TestDomain(NamedTuple):
    """Queries and gallery of one data set, as rows of the source."""

    queries: np.ndarray  # [Q] int64
    gallery: np.ndarray  # [G] int64, without distractors


class ReidSplit(NamedTuple):
    """Rows of a source by client, and the test images of every domain."""

    train: ClientRows  # labels: the client's own classes, in [0, num_classes[k])
    cameras: np.ndarray  # [n] int32 camera of each, distinct between clients
    num_classes: np.ndarray  # [N] int32 people of each client
    client_names: tuple[str, ...]  # N
    tests: dict[str, TestDomain]  # by the domain's name
    # N x the tested domains that it trains on
    client_tests: tuple[tuple[str, ...], ...]
    unseen: tuple[str, ...]  # tested domains that no client trains on


def roles_and_cameras(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Roles [T] and cameras [T] of a re-identification set.

    Raises:
      ValueError: for another source, or one without training images.
    """
    if source.roles is None or source.cameras is None:
        raise ValueError(
            "config.data must be a re-identification source (market1501, msmt17, "
            "cuhk03_np, reid_csv, or concat of these), got one without "
            f"{'roles' if source.roles is None else 'cameras'}."
        )
    if not (source.roles == TRAIN).any():
        raise ValueError("config.data must have training images, got none.")
    return source.roles, source.cameras


def build_split(config: PartitionConfig, source: Source) -> ReidSplit:
    """Build the scenario of config.partition.

    Raises:
      ValueError: for a source without roles or cameras, an unknown domain, clients
        without an image (with their names), or no test in which a query has a match.
    """
    roles, cameras = roles_and_cameras(source)
    names, domain = test_domains(source)
    left_out = config.held_out_domains
    left_out = {left_out} if isinstance(left_out, str) else set(left_out)
    if not left_out < set(names):
        raise ValueError(
            "config.partition.held_out_domains must leave at least one of the data "
            f"sets {', '.join(names)}, got {config.held_out_domains!r}."
        )
    is_distractor = [name.rpartition("/")[2] == DISTRACTOR for name in source.names]
    is_person = ~np.array(is_distractor)[source.labels]
    is_trained = np.array([name not in left_out for name in names])
    rows = np.flatnonzero((roles == TRAIN) & is_person & is_trained[domain])
    training = TrainingLabels(
        source.labels[rows],
        cameras[rows],
        (np.cumsum(is_trained) - 1)[domain[rows]],
        tuple(name for name in names if name not in left_out),
    )
    owners = client_assignment(config.scenario, training)
    num_clients = len(owners.names)
    train = group_rows(owners.client, source.labels[rows], num_clients)
    if not train.sizes.all():
        empty = [n for n, c in zip(owners.names, train.sizes, strict=True) if not c]
        raise ValueError(
            "config.partition must give every client a training image, got none for "
            f"{', '.join(empty)} (data sets only for test belong in held_out_domains)."
        )
    rows = rows[train.rows]
    labels, num_classes = client_classes(train.client, train.labels, num_clients)
    keys = np.stack([train.client, cameras[rows]], axis=1)
    tests = build_tests(source, names, domain, is_person)
    domains = [np.unique(x) for x in np.split(domain[rows], train.offsets[1:-1])]
    return ReidSplit(
        train=train._replace(rows=rows, labels=labels),
        cameras=np.unique(keys, axis=0, return_inverse=True)[1].astype(np.int32),
        num_classes=num_classes,
        client_names=owners.names,
        tests=tests,
        client_tests=tuple(
            tuple(names[i] for i in own if names[i] in tests) for own in domains
        ),
        unseen=tuple(name for name in tests if name in left_out),
    )


def data_usage(
    split: ReidSplit, source: Source, public: Source | None = None
) -> DataUsage:
    """Images of clients, queries, galleries and public data, by use.

    Args:
      public: they are part of the source that is returned, as "public/<name>".
    """
    _, cameras = roles_and_cameras(source)
    parts = {
        "train": UsedRows(split.train.rows, split.train.client, split.train.labels)
    }
    for name, test in split.tests.items():
        for use, rows in test._asdict().items():
            parts[f"{use} of {name}"] = UsedRows(rows, None, cameras[rows])
    if public is not None:
        first = len(source.labels)
        parts["public"] = UsedRows(first + np.arange(len(public.labels)))
        source = concat_sources({"data": source, "public": public})
    return DataUsage(source, parts)


def client_assignment(scenario: Part, training: TrainingLabels) -> ClientOfImage:
    """Assign training images to clients, by a scenario or a partition of examples.

    A set of re-identification has tests of its own: what a partition holds out of a
    client's images is trained on too.

    Raises:
      ValueError: for a partition of faces.
    """
    if scenario.name in SCENARIOS:
        return scenario(training)
    labels = np.unique(training.labels, return_inverse=True)[1].astype(np.int32)
    parts = scenario(labels)
    if not isinstance(parts, ClientPartition):
        raise ValueError(
            f"config.partition.name must be a partition by class, got "
            f"{scenario.name!r}."
        )
    client = np.full(len(labels), UNASSIGNED)
    for part in (parts.train, parts.test):
        client[part.rows] = part.client
    names = (f"client {number}" for number in range(parts.num_clients))
    return ClientOfImage(client, tuple(names))


def test_domains(source: Source) -> tuple[tuple[str, ...], np.ndarray]:
    """(names of the data sets, index [T] of each image's data set)."""
    parts = [name.partition("/") for name in source.names]
    if not all(slash for _, slash, _ in parts):
        return (ONE_DOMAIN,), np.zeros(len(source.labels), int)
    names = tuple(dict.fromkeys(part for part, *_ in parts))
    number = np.array([names.index(part) for part, *_ in parts])
    return names, number[source.labels]


def build_tests(source, names, domain, is_person) -> dict[str, TestDomain]:
    """Build the queries and gallery of every domain that has both.

    Args:
      names, domain: of `test_domains`; is_person: [T] bool.

    Raises:
      ValueError: when there is none, or a domain's queries have no match at all.
    """
    tests = {}
    for number, name in enumerate(names):
        is_here = is_person & (domain == number)
        queries = np.flatnonzero(is_here & (source.roles == QUERY))
        gallery = np.flatnonzero(is_here & (source.roles == GALLERY))
        if not len(queries) or not len(gallery):
            continue
        tests[name] = TestDomain(queries, gallery)
        if not with_matches(source, tests[name]).any():
            raise ValueError(
                f"{name} must have a query with a gallery match from another camera, "
                f"got none among {len(queries)} queries."
            )
    if not tests:
        raise ValueError(
            "config.data must have queries and a gallery (in one folder of images: set "
            "test_identities), got none."
        )
    return tests


def identity_labels(source: Source, rows: np.ndarray) -> IdentityLabels:
    """Identities and cameras of source rows [n]."""
    _, cameras = roles_and_cameras(source)
    return IdentityLabels(source.labels[rows], cameras[rows])


def with_matches(source: Source, test: TestDomain) -> np.ndarray:
    """Whether each query has a match by another camera in the gallery, [Q] bool."""
    people = [identity_labels(source, rows) for rows in test]
    return count_matches(*people)[0] > 0


def build_public_data(
    public: PublicDataConfig | None, source: Source
) -> tuple[Source, Source | None]:
    """Split a source: (source for the clients, source of the public images).

    Raises:
      ValueError: for images of another shape, or no image.
    """
    if public is None:
        return source, None
    rng, public_source = np.random.default_rng(public.seed), source
    if public.source is None:  # hold out a share of the training people
        is_training = roles_and_cameras(source)[0] == TRAIN
        people = np.unique(source.labels[is_training])
        count = math.ceil(public.fraction * len(people))
        chosen = rng.choice(people, count, replace=False)
        is_public = is_training & np.isin(source.labels, chosen)
        rows = np.flatnonzero(is_public)
        source = keep_rows(source, np.flatnonzero(~is_public))
    else:
        public_source = open_data(public.source)
        both = filter(None, (source.passed_over, public_source.passed_over))
        source = source._replace(passed_over="\n".join(both))
        rows = np.arange(len(public_source.labels))
    if public_source.input_shape != source.input_shape or not len(rows):
        raise ValueError(
            f"config.partition.public must have images of shape {source.input_shape}, "
            f"got {len(rows)} of {public_source.input_shape}."
        )
    if 0 < public.max_images < len(rows):
        rows = np.sort(rng.choice(rows, public.max_images, replace=False))
    return source, keep_rows(public_source, rows)


STATISTICS = "camera_statistics"  # an augment


def fill_statistics(augment: Sequence, statistics: Callable[[], tuple]) -> tuple:
    """Fill in the statistics of `camera_statistics` in a list of augments.

    Args:
      statistics: () -> (means, standard deviations) [cameras, C].
    """
    filled = []
    for entry in augment:
        if augment_name(entry) == STATISTICS:
            means, stds = (x.tolist() for x in statistics())
            settings = {} if isinstance(entry, str) else entry
            entry = {"name": STATISTICS, **settings, "means": means, "stds": stds}
        filled.append(entry)
    return tuple(filled)


def augment_name(entry: str | Mapping) -> str | None:
    """Name of an entry of a list of augments."""
    return entry.get("name") if isinstance(entry, Mapping) else entry


MAX_LINES = 30  # clients of the table as text


def report(split: ReidSplit, source: Source) -> dict:
    """Count images, people and cameras for the report.

    Returns:
      {"clients": N, "client_names", "images", "identities" [N], "classes": the cameras
      by name, "kind": what those are, one and many, "table": {"train": [N][cameras]
      images}, "tests": {domain: {"queries", "gallery", "identities",
      "num_queries_without_match" (queries)}}, "unseen": domains, "unassigned": images
      to train on that no client has}.
    """
    roles, cameras = roles_and_cameras(source)
    names, domain = test_domains(source)
    keys = np.stack([domain, cameras], axis=1)[split.train.rows]
    seen, column = np.unique(keys, axis=0, return_inverse=True)
    table = np.zeros((len(split.client_names), len(seen)), int)
    np.add.at(table, (split.train.client, column), 1)
    prefixes = [f"{name} " if len(names) > 1 else "" for name in names]
    return {
        "clients": len(split.client_names),
        "client_names": list(split.client_names),
        "images": split.train.sizes.tolist(),
        "identities": split.num_classes.tolist(),
        "classes": [f"{prefixes[where]}camera {camera}" for where, camera in seen],
        "kind": ("camera", "cameras"),
        "table": {"train": table.tolist()},
        "tests": {
            name: {
                "queries": len(test.queries),
                "gallery": len(test.gallery),
                "identities": len(np.unique(source.labels[test.queries])),
                "num_queries_without_match": int((~with_matches(source, test)).sum()),
            }
            for name, test in split.tests.items()
        },
        "unseen": list(split.unseen),
        "unassigned": int((roles == TRAIN).sum()) - len(split.train.rows),
    }


def format_report(facts: Mapping) -> str:
    """Format the report as lines of text."""
    cameras = np.count_nonzero(facts["table"]["train"], axis=1)
    columns = facts["client_names"], facts["identities"], facts["images"], cameras
    lines = [f"{'client':<24}{'people':>8}{'images':>8}{'cameras':>8}"]
    for name, *numbers in list(zip(*columns, strict=True))[:MAX_LINES]:
        lines.append(f"{name:<24}" + "".join(f"{number:>8}" for number in numbers))
    if facts["clients"] > MAX_LINES:
        lines.append(f"... and {facts['clients'] - MAX_LINES} more clients")
    if facts["unassigned"]:
        lines.append(f"{facts['unassigned']} images to train on are with no client")
    for name, test in facts["tests"].items():
        suffix = " (no client trains on it)" if name in facts["unseen"] else ""
        lines.append(
            f"{name}{suffix}: {test['queries']} queries of {test['identities']} people "
            f"in a gallery of {test['gallery']}; {test['num_queries_without_match']} "
            "queries have no match and are left out of the means"
        )
    return "\n".join(lines)


class BatchSizes(NamedTuple):
    """Sizes of a batch of P identities with Q images each."""

    identities: int  # P
    images: int  # Q


def batch_sizes(
    batch_size: int, identities: int, labels: Mapping[str, np.ndarray]
) -> BatchSizes:
    """Sizes of batches with `identities` identities.

    Args:
      labels: [n] of each owner, by its name.

    Raises:
      ValueError: when the identities do not divide the batch, or an owner has too few.
    """
    if identities < 2 or batch_size % identities:
        raise ValueError(
            "identities_per_batch must be at least 2 and divide "
            f"batch_size={batch_size}, got {identities}."
        )
    for owner, own in labels.items():
        if (number := len(np.unique(own))) < identities:
            raise ValueError(
                f"{owner} must have at least the {identities} identities of a batch, "
                f"got {number}."
            )
    return BatchSizes(identities, batch_size // identities)


def one_pass(
    labels: np.ndarray, rng: np.random.Generator, sizes: BatchSizes
) -> Iterator[np.ndarray]:
    """Sample the batches [P * Q] of one pass, rows of `labels` [n]; their number
    varies.

    The images of an identity are shuffled and cut into groups of Q, whose rest is left
    out; one that has fewer than Q gives a group drawn with replacement. While P
    identities have groups left, P of them are drawn uniformly and give a group each.
    """
    groups, (identities, images) = {}, sizes
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) < images:
            groups[label] = [rng.choice(rows, images)]
        else:
            rows = rng.permutation(rows)[: len(rows) // images * images]
            groups[label] = list(rows.reshape(-1, images))
    left = np.array([*groups])
    while len(left) >= identities:
        chosen = rng.choice(left, identities, replace=False)
        yield np.concatenate([groups[label].pop() for label in chosen])
        left = np.array([label for label in left if groups[label]])


def identity_batches(
    labels: np.ndarray, rng: np.random.Generator, sizes: BatchSizes, count: int
) -> np.ndarray:
    """Sample the first `count` batches of repeated passes, [count, P * Q] int32 rows.

    Args:
      labels: [n] of at least P identities.
    """
    batches: list[np.ndarray] = []
    while len(batches) < count:
        batches += one_pass(labels, rng, sizes)
    rows = np.array(batches[:count], np.int32)
    return rows.reshape(count, sizes.identities * sizes.images)
