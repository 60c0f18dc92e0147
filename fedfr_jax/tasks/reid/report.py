"""What every client of a scenario holds, and what it is tested on."""

from collections.abc import Mapping

import numpy as np

from fedfr_jax.tasks.reid.data import ReidSplit, domains_of, matched
from fedfr_jax.types import TRAIN, Source

MAX_LINES = 30  # clients of the table as text


def report(split: ReidSplit, source: Source) -> dict:
    """Numbers of images, people and cameras.

    Returns:
      {"clients": N, "client_names", "images", "people" [N], "classes": the cameras by
      name, "kind": what those are, one and many, "table": {"train": [N][cameras]
      images}, "tests": {domain: {"queries", "gallery", "people", "without_match"
      (queries)}}, "unseen": domains, "unheld": images to train on that no client has}.
    """
    names, domain = domains_of(source)
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
        "people": split.num_classes.tolist(),
        "classes": [f"{prefixes[of]}camera {camera}" for of, camera in cameras],
        "kind": ("camera", "cameras"),
        "table": {"train": table.tolist()},
        "tests": {name: _of_test(source, test) for name, test in split.tests.items()},
        "unseen": list(split.unseen),
        "unheld": int((source.roles == TRAIN).sum()) - len(split.train),
    }


def _of_test(source, test):
    """Numbers of one domain's test."""
    return {
        "queries": len(test.queries),
        "gallery": len(test.gallery),
        "people": len(np.unique(source.labels[test.queries])),
        "without_match": int((~matched(source, test)).sum()),
    }


def format_report(facts: Mapping) -> str:
    """The report as lines of text."""
    cameras = np.count_nonzero(facts["table"]["train"], axis=1)
    columns = facts["client_names"], facts["people"], facts["images"], cameras
    lines = [f"{'client':<24}{'people':>8}{'images':>8}{'cameras':>8}"]
    for name, *numbers in list(zip(*columns, strict=True))[:MAX_LINES]:
        lines.append(f"{name:<24}" + "".join(f"{number:>8}" for number in numbers))
    if facts["clients"] > MAX_LINES:
        lines.append(f"... and {facts['clients'] - MAX_LINES} more clients")
    if facts["unheld"]:
        lines.append(f"{facts['unheld']} images to train on are with no client")
    for name, test in facts["tests"].items():
        where = " (no client trains on it)" if name in facts["unseen"] else ""
        lines.append(
            f"{name}{where}: {test['queries']} queries of {test['people']} people in a "
            f"gallery of {test['gallery']}; {test['without_match']} queries have no "
            "match and are left out of the means"
        )
    return "\n".join(lines)
