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

from fedfr_jax.data.augment.photometric import compute_statistics
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import PARTITIONS, ClientPartition
from fedfr_jax.data.partition.client_partition import UNASSIGNED as UNHELD
from fedfr_jax.data.partition.reid import (
    ClientOfImage,
    TrainingLabels,
    by_camera,
    by_dataset,
    by_identity,
    client_classes,
)
from fedfr_jax.data.sources.reid import DISTRACTOR
from fedfr_jax.data.sources.selection import (
    concat_sources,
    keep_rows,
    select_stored,
)
from fedfr_jax.evaluation.retrieval import IdentityLabels, count_matches
from fedfr_jax.federated.algorithms.fedreid import PublicImages
from fedfr_jax.federated.algorithms.host_batches import with_host_batches
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import Seed, Whole
from fedfr_jax.schema import check_keys
from fedfr_jax.tasks.data import PartitionReader, SourceReader, open_data
from fedfr_jax.types import (
    GALLERY,
    QUERY,
    TRAIN,
    Algorithm,
    DataUsage,
    Source,
    UsedRows,
)


@section
class PublicDataConfig(NamedTuple):
    """Keys of config.partition.public; `fraction` or `source` must be set."""

    fraction: Annotated[float, Interval(ge=0, le=0.9)] = (
        0.0  # of the people to train on, who are taken from the clients
    )
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
    if public.source is None:
        source, rows = held_back(source, public.fraction, rng)
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


def held_back(
    source: Source, share: float, rng: np.random.Generator
) -> tuple[Source, np.ndarray]:
    """Hold out a share of the training people: (source without them, their rows)."""
    people = np.unique(source.labels[source.roles == TRAIN])
    chosen = rng.choice(people, math.ceil(share * len(people)), replace=False)
    is_public = (source.roles == TRAIN) & np.isin(source.labels, chosen)
    is_kept = ~is_public
    rows = np.flatnonzero(is_kept)
    remaining = source._replace(
        read=lambda indices: source.read(rows[indices]),
        labels=source.labels[rows],
        cameras=source.cameras[rows],
        roles=source.roles[rows],
        preprocessing=source.preprocessing,
        stored=select_stored(source.stored, rows),
    )
    return remaining, np.flatnonzero(is_public)


def build_public_images(
    public: PublicDataConfig | None, source: Source | None, feed: Batching
) -> dict:
    """{"shared": PublicImages} for algorithm factories; {} without a source.

    Args:
      feed: of the clients, whose augmentation is the shared images' too.
    """
    if source is None:
        return {}
    images = source.read(np.arange(len(source.labels)))
    return {"shared": PublicImages(images, feed._replace(batch_size=public.batch_size))}


SCENARIOS = {
    "by_camera": by_camera,
    "by_dataset": by_dataset,
    "by_identity": by_identity,
}
ONE_DOMAIN = "test"


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
    gallery: np.ndarray  # [G] int64, without what shows nobody


class ReidSplit(NamedTuple):
    """Rows of a source by client, and the test images of every domain."""

    train: np.ndarray  # [n] int64 rows grouped by client
    labels: np.ndarray  # [n] int32 class of the client's own, in [0, num_classes[k])
    offsets: np.ndarray  # [N + 1] int64 of each client's among them
    num_classes: np.ndarray  # [N] int32 people of each client
    client_names: tuple[str, ...]  # N
    tests: dict[str, TestDomain]  # by the domain's name
    client_tests: tuple[
        tuple[str, ...], ...
    ]  # N x the tested domains that it trains on
    unseen: tuple[str, ...]  # tested domains that no client trains on

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.client_names)


def build_split(config: PartitionConfig, source: Source) -> ReidSplit:
    """Build the scenario of config.partition.

    Raises:
      ValueError: for a source without roles or cameras, an unknown domain, clients
        without an image (with their names), or no test in which a query has a match.
    """
    check_source(source)
    names, domain = test_domains(source)
    left_out = _left_out(config.held_out_domains, names)
    is_person = np.array([not is_nobody(name) for name in source.names])[source.labels]
    is_held = np.array([name not in left_out for name in names])
    rows = np.flatnonzero((source.roles == TRAIN) & is_person & is_held[domain])
    kept = tuple(name for name in names if name not in left_out)
    number = np.cumsum(is_held) - 1
    training = TrainingLabels(
        source.labels[rows], source.cameras[rows], number[domain[rows]], kept
    )
    owners = client_assignment(config.scenario, training)
    rows, client = _grouped(rows, owners)
    labels, num_classes = client_classes(client, source.labels[rows], len(owners.names))
    tests = build_tests(source, names, domain, is_person)
    return ReidSplit(
        train=rows,
        labels=labels,
        offsets=np.searchsorted(client, np.arange(len(owners.names) + 1)),
        num_classes=num_classes,
        client_names=owners.names,
        tests=tests,
        client_tests=tuple(
            tuple(
                names[i] for i in np.unique(domain[rows_of_client]) if names[i] in tests
            )
            for rows_of_client in np.split(rows, np.flatnonzero(np.diff(client)) + 1)
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
    client = np.repeat(np.arange(split.num_clients), np.diff(split.offsets))
    parts = {"train": UsedRows(split.train, client, split.labels)}
    for name, test in split.tests.items():
        for use, rows in test._asdict().items():
            parts[f"{use} of {name}"] = UsedRows(rows, None, source.cameras[rows])
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
    client = np.full(len(labels), UNHELD)
    numbers = np.arange(len(parts.train_offsets) - 1)
    client[parts.train] = np.repeat(numbers, np.diff(parts.train_offsets))
    client[parts.test] = np.repeat(numbers, np.diff(parts.test_offsets))
    return ClientOfImage(client, tuple(f"client {number}" for number in numbers))


def check_source(source: Source) -> None:
    """Raise ValueError unless the source is a re-identification set."""
    if source.roles is None or source.cameras is None:
        raise ValueError(
            "config.data must be a re-identification source (market1501, msmt17, "
            "cuhk03_np, reid_csv, or concat of these), got one without "
            f"{'roles' if source.roles is None else 'cameras'}."
        )
    if not (source.roles == TRAIN).any():
        raise ValueError("config.data must have training images, got none.")


def is_nobody(name: str) -> bool:
    """Whether an identity is a distractor."""
    return name.rpartition("/")[2] == DISTRACTOR


def test_domains(source: Source) -> tuple[tuple[str, ...], np.ndarray]:
    """(names of the data sets, index [T] of each image's data set)."""
    parts = [name.partition("/") for name in source.names]
    if not all(slash for _, slash, _ in parts):
        return (ONE_DOMAIN,), np.zeros(len(source.labels), int)
    names = tuple(dict.fromkeys(part for part, *_ in parts))
    number = np.array([names.index(part) for part, *_ in parts])
    return names, number[source.labels]


def _left_out(domains: str | tuple[str, ...], names: tuple[str, ...]) -> set[str]:
    """Domains of config.partition.held_out_domains."""
    left_out = {domains} if isinstance(domains, str) else set(domains)
    if not left_out < set(names):
        raise ValueError(
            "config.partition.held_out_domains must leave at least one of the data "
            f"sets {', '.join(names)}, got {domains!r}."
        )
    return left_out


def _grouped(rows, owners):
    """(rows by client, their clients), without unassigned rows."""
    counts = np.bincount(owners.client[owners.client != UNHELD], minlength=1)
    counts = np.pad(counts, (0, len(owners.names) - len(counts)))
    if not counts.all():
        empty = [n for n, c in zip(owners.names, counts, strict=True) if not c]
        raise ValueError(
            "config.partition must give every client a training image, got none "
            f"for {', '.join(empty)} (data sets only for test belong in "
            f"held_out_domains)."
        )
    is_held = owners.client != UNHELD
    rows, client = rows[is_held], owners.client[is_held]
    order = np.argsort(client, kind="stable")
    return rows[order], client[order]


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
        if len(queries) and len(gallery):
            tests[name] = TestDomain(queries, gallery)
    if not tests:
        raise ValueError(
            "config.data must have queries and a gallery (in one folder of images: set "
            "test_identities), got none."
        )
    for name, test in tests.items():
        if not with_matches(source, test).any():
            raise ValueError(
                f"{name} must have a query with a gallery match from another camera, "
                f"got none among {len(test.queries)} queries."
            )
    return tests


def identity_labels(source: Source, rows: np.ndarray) -> IdentityLabels:
    """Identities and cameras of source rows [n]."""
    return IdentityLabels(source.labels[rows], source.cameras[rows])


def with_matches(source: Source, test: TestDomain) -> np.ndarray:
    """Whether each query has a match by another camera in the gallery, [Q] bool."""
    people = [identity_labels(source, rows) for rows in test]
    return count_matches(*people)[0] > 0


NAME = "camera_statistics"
Statistics = Callable[[], tuple]  # () -> (means, standard deviations) [cameras, C]


def client_cameras(source: Source, split: ReidSplit) -> np.ndarray:
    """Camera number [n] int32 of each training image, distinct between clients."""
    client = np.repeat(np.arange(split.num_clients), np.diff(split.offsets))
    keys = np.stack([client, source.cameras[split.train]], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].astype(np.int32)


def exchanges_colors(augment: Sequence) -> bool:
    """Whether a list of augments has `camera_statistics`."""
    return any(_name(entry) == NAME for entry in augment)


def fill_statistics(augment: Sequence, statistics: Callable[[], tuple]) -> tuple:
    """Fill in the statistics of `camera_statistics` in a list of augments.

    Args:
      statistics: () -> (means, standard deviations) [cameras, C].
    """
    if not exchanges_colors(augment):
        return tuple(augment)
    means, stds = (x.tolist() for x in statistics())

    def filled(entry):
        if _name(entry) != NAME:
            return entry
        settings = {"name": NAME} if isinstance(entry, str) else dict(entry)
        check_keys(
            f"config.federation.augment {NAME}", settings, ("name", "probability")
        )
        return {**settings, "means": means, "stds": stds}

    return tuple(map(filled, augment))


def without_statistics(augment: Sequence) -> tuple:
    """Remove `camera_statistics` from a list of augments."""
    return tuple(entry for entry in augment if _name(entry) != NAME)


def kept_statistics(read: Callable, cameras: np.ndarray) -> Statistics:
    """Build () -> `compute_statistics`, computed at the first call."""
    computed = []

    def statistics():
        if not computed:
            computed.append(compute_statistics(read, cameras))
        return computed[0]

    return statistics


def _name(entry):
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
    names, domain = test_domains(source)
    keys = np.stack([domain, source.cameras], axis=1)[split.train]
    cameras, column = np.unique(keys, axis=0, return_inverse=True)
    sizes = np.diff(split.offsets)
    client = np.repeat(np.arange(split.num_clients), sizes)
    table = np.zeros((split.num_clients, len(cameras)), int)
    np.add.at(table, (client, column), 1)
    prefixes = [f"{name} " if len(names) > 1 else "" for name in names]
    return {
        "clients": split.num_clients,
        "client_names": list(split.client_names),
        "images": sizes.tolist(),
        "identities": split.num_classes.tolist(),
        "classes": [
            f"{prefixes[domain_index]}camera {camera}"
            for domain_index, camera in cameras
        ],
        "kind": ("camera", "cameras"),
        "table": {"train": table.tolist()},
        "tests": {
            name: _test_lines(source, test) for name, test in split.tests.items()
        },
        "unseen": list(split.unseen),
        "unassigned": int((source.roles == TRAIN).sum()) - len(split.train),
    }


def _test_lines(source, test):
    """Count queries, gallery and identities of one domain's test."""
    return {
        "queries": len(test.queries),
        "gallery": len(test.gallery),
        "identities": len(np.unique(source.labels[test.queries])),
        "num_queries_without_match": int((~with_matches(source, test)).sum()),
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
            f"{name}{suffix}: {test['queries']} queries of {test['identities']} "
            f"people in a "
            f"gallery of {test['gallery']}; {test['num_queries_without_match']} "
            f"queries have no "
            "match and are left out of the means"
        )
    return "\n".join(lines)


def one_pass(
    labels: np.ndarray, rng: np.random.Generator, *, identities: int, images: int
) -> Iterator[np.ndarray]:
    """Sample the batches [P * Q] of one pass, rows of `labels` [n]; their number
    varies.

    The images of an identity are shuffled and cut into groups of Q, whose rest is left
    out; one that has fewer than Q gives a group drawn with replacement. While P
    identities have groups left, P of them are drawn uniformly and give a group each.
    """
    groups = {}
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
    labels: np.ndarray,
    rng: np.random.Generator,
    *,
    identities: int,
    images: int,
    count: int,
) -> np.ndarray:
    """Sample the first `count` batches of repeated passes, [count, P * Q] int32 rows.

    Args:
      labels: [n] of at least P identities, see `check_identities`.
      identities, images: P and Q.
    """
    batches = []
    while len(batches) < count:
        batches += one_pass(labels, rng, identities=identities, images=images)
    rows = np.array(batches[:count], np.int32)
    return rows.reshape(count, identities * images)


def check_identities(
    owner: str, labels: np.ndarray, *, identities: int, images: int
) -> None:
    """Raise ValueError unless batches of P identities and Q images are possible.

    Args:
      owner: whose `labels` [n] they are, such as "client 3".
    """
    if identities < 2:
        raise ValueError(f"identities_per_batch must be at least 2, got {identities}.")
    number = len(np.unique(labels))
    if number < identities:
        raise ValueError(
            f"{owner} must have at least the {identities} identities of a batch, got "
            f"{number}."
        )


def images_per_identity(batch_size: int, identities: int) -> int:
    """Images per identity, Q, in a batch with `identities` identities.

    Raises:
      ValueError: when the identities do not divide the batch.
    """
    is_number = isinstance(identities, int) and identities > 0
    if not is_number or batch_size % identities:
        raise ValueError(
            "identities_per_batch must divide batch_size="
            f"{batch_size}, got "
            f"{identities!r}."
        )
    return batch_size // identities


def with_identity_batches(
    algorithm: Algorithm,
    split: ReidSplit,
    feed: Batching,
    *,
    identities: int,
    epochs: int,
    seed: int,
) -> Algorithm:
    """Let an algorithm's clients train on batches balanced over identities.

    An epoch has as many batches as any epoch of the feed, of pass after pass.

    Args:
      epochs: most local epochs of a round.

    Raises:
      ValueError: naming the client, for one with fewer identities than a batch.
    """
    images = images_per_identity(feed.batch_size, identities)
    of_client = np.split(split.labels, split.offsets[1:-1])
    for name, labels in zip(split.client_names, of_client, strict=True):
        check_identities(name, labels, identities=identities, images=images)
    max_images = int(np.diff(split.offsets).max())
    count = max(int(feed.steps_per_epoch(max_images)) * epochs, 1)

    def order(client, round):
        rng = np.random.default_rng((seed, client, round))
        options = {"identities": identities, "images": images, "count": count}
        return identity_batches(of_client[client], rng, **options)

    return with_host_batches(algorithm, order)


def identity_order(labels: np.ndarray, batch_size: int, identities: int) -> Callable:
    """Build `CentralTrainer.batch_order` of balanced batches.

    On several devices a triplet is of the rows of one device, whose part of the batch
    is of whole groups where it is a multiple of Q.

    Args:
      labels: [n] of all training images.
    """
    images = images_per_identity(batch_size, identities)
    check_identities("the data", labels, identities=identities, images=images)
    options = {"identities": identities, "images": images}

    def order(word, steps):
        rng = np.random.default_rng(word)
        return identity_batches(labels, rng, count=steps, **options)

    return order
