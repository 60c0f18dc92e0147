"""Summaries of partitions: classes or identities per client, in numbers and text."""

from collections.abc import Sequence

import numpy as np

from fedfr_jax.data.partition.client_partition import ClientPartition
from fedfr_jax.data.partition.identities import IdentityPartition
from fedfr_jax.data.partition.rows import ClientRows
from fedfr_jax.text import printable

# In the table of counts: this many clients, fewer when its cells become too many.
MAX_CLIENTS, MIN_CLIENTS, MAX_CELLS = 1000, 100, 100_000
MAX_LINES, MAX_COLUMNS = 20, 10  # of the table as text
SUMMARY = {"min": 0.0, "median": 0.5, "max": 1.0}  # quantiles


def class_report(split: ClientPartition, names: Sequence[str]) -> dict:
    """Count images by client and class, as numbers for JSON.

    Args:
      names: M names of the classes.

    Returns:
      {"clients": N, "classes": the M names, "images": {"train", "test"},
      "per_client": {what: {"min", "median", "max"}} of train images, test images and
      classes (those that the client trains on), "clients without test images": count,
      "table": {"train", "test"} of [n][M] images per class of the first n clients: at
      most 1000, and 100 or as many as fill 100,000 cells, "client_names" of these where
      there are names}.
    """
    train, test = split.train, split.test
    table = {
        "train": _table(train, len(names)),
        "test": _table(test, len(names)),
    }
    client_names = split.client_names[: len(table["train"])]
    named = {"client_names": list(client_names)} if client_names else {}
    pairs = np.unique(train.client * split.num_classes + train.labels)
    classes = np.bincount(pairs // split.num_classes, minlength=split.num_clients)
    return {
        "clients": split.num_clients,
        **named,
        "classes": list(names),
        "images": {"train": len(train.rows), "test": len(test.rows)},
        "per_client": {
            "train images": _quantiles(train.sizes, SUMMARY),
            "test images": _quantiles(test.sizes, SUMMARY),
            "classes": _quantiles(classes, SUMMARY),
        },
        "clients without test images": int(np.sum(test.sizes == 0)),
        "table": table,
    }


def format_class_report(numbers: dict) -> str:
    """Format the class report as lines of text.

    The table of training images is printed for at most 10 classes and 20 clients.
    """
    images = numbers["images"]
    lines = [
        f"{numbers['clients']} clients, {len(numbers['classes'])} classes, "
        f"{images['train']} train and {images['test']} test images",
        "",
        *_per_client_lines(numbers),
    ]
    if "unseen clients" in numbers:
        lines += [f"and {numbers['unseen clients']} clients that never take part"]
    untested = numbers["clients without test images"]
    if untested:
        lines += [f"{untested} of {numbers['clients']} clients have no test image"]
    if len(numbers["classes"]) <= MAX_COLUMNS:
        lines += ["", *_table_lines(numbers)]
    return "\n".join(lines)


def _per_client_lines(numbers):
    """Lines of the quantiles per client."""
    rows = numbers["per_client"]
    quantiles = next(iter(rows.values()))
    yield f"{'per client':<22}" + "".join(f"{name:>9}" for name in quantiles)
    for quantity, row in rows.items():
        yield f"{quantity:<22}" + "".join(f"{value:>9g}" for value in row.values())


def _table_lines(numbers):
    yield f"{'train images':<14}" + "".join(f" {n[:6]:>6}" for n in numbers["classes"])
    names = numbers.get("client_names", ())
    for client, counts in enumerate(numbers["table"]["train"][:MAX_LINES]):
        name = printable(names[client])[:13] if names else f"client {client}"
        yield f"{name:<14}" + "".join(f" {count:>6}" for count in counts)
    if numbers["clients"] > MAX_LINES:
        yield f"... and {numbers['clients'] - MAX_LINES} more clients"


def _table(part: ClientRows, num_classes: int) -> list[list[int]]:
    """Images per class of the first n clients, as a nested list [n][M]."""
    max_clients = min(max(MAX_CELLS // num_classes, MIN_CLIENTS), MAX_CLIENTS)
    first = part.keep(np.arange(len(part.sizes))[:max_clients])
    cell = first.client * num_classes + first.labels
    counts = np.bincount(cell, minlength=len(first.sizes) * num_classes)
    return counts.reshape(-1, num_classes).tolist()


_QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


def report(partition: IdentityPartition) -> dict:
    """Count identities and images of each part of a face partition, for JSON.

    Returns:
      {"clients": N, "identities": {part: count}, "images": {part: count},
      "per_client": {what: {"min", "q25", "median", "q75", "max"}},
      "left_out": {reason: count}}; the parts are clients (train, test), public and
      unseen.
    """
    p = partition
    return {
        "clients": len(p.num_classes),
        "identities": {
            "clients": int(p.num_classes.sum()),
            "public": len(p.public.identities),
            "unseen": len(p.unseen.identities),
        },
        "images": {
            "train": len(p.train.rows),
            "test": len(p.test.rows),
            "public": len(p.public.rows),
            "unseen": len(p.unseen.rows),
        },
        "per_client": {
            "identities": _quantiles(p.num_classes, _QUANTILES),
            "train images": _quantiles(p.train.sizes, _QUANTILES),
            "test images": _quantiles(p.test.sizes, _QUANTILES),
        },
        "left_out": dict(p.left_out),
    }


def format_report(numbers: dict) -> str:
    """Format the face partition report as lines of text."""
    lines = [f"{'part':<22}{'identities':>12}{'images':>12}"]
    for part, number in numbers["images"].items():
        owner = part if part in numbers["identities"] else "clients"
        name = part if owner == part else f"{numbers['clients']} clients, {part}"
        lines += [f"{name:<22}{numbers['identities'][owner]:>12}{number:>12}"]
    lines += ["", *_per_client_lines(numbers), "", "left out"]
    lines += [
        f"  {reason:<32}{number:>12}" for reason, number in numbers["left_out"].items()
    ]
    return "\n".join(lines)


def _quantiles(numbers: np.ndarray, wanted: dict[str, float]) -> dict[str, float]:
    return {name: float(np.quantile(numbers, q)) for name, q in wanted.items()}
