"""What a partition of faces gives everybody, in numbers and as text."""

import numpy as np

from fedfr_jax.data.identities import Partition

_QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


def report(partition: Partition) -> dict:
    """What everybody holds, as plain numbers that JSON can keep.

    Returns:
      {"clients": N, "identities": {part: count}, "images": {part: count},
      "per_client": {what: {"min", "q25", "median", "q75", "max"}},
      "left_out": {reason: count}}; the parts are clients (train, test), global and
      unseen.
    """
    p = partition
    per_client = {
        "identities": p.num_classes,
        "train images": np.diff(p.train_offsets),
        "test images": np.diff(p.test_offsets),
    }
    return {
        "clients": len(p.num_classes),
        "identities": {
            "clients": int(p.num_classes.sum()),
            "global": len(p.global_identities),
            "unseen": len(p.unseen_identities),
        },
        "images": {
            "train": len(p.train),
            "test": len(p.test),
            "global": len(p.global_examples),
            "unseen": len(p.unseen_examples),
        },
        "per_client": {what: _quantiles(n) for what, n in per_client.items()},
        "left_out": dict(p.left_out),
    }


def format_report(numbers: dict) -> str:
    """The report as lines of text, for people."""
    identities, images = numbers["identities"], numbers["images"]
    who = f"{numbers['clients']} clients"
    rows = [
        ("part", "identities", "images"),
        (f"{who}, train", identities["clients"], images["train"]),
        (f"{who}, test", identities["clients"], images["test"]),
        ("global", identities["global"], images["global"]),
        ("unseen", identities["unseen"], images["unseen"]),
    ]
    lines = [f"{part:<22}{ids:>12}{number:>12}" for part, ids, number in rows]
    lines += [""] + [f"{'per client':<22}" + "".join(f"{q:>9}" for q in _QUANTILES)]
    lines += [
        f"{what:<22}" + "".join(f"{row[q]:>9g}" for q in _QUANTILES)
        for what, row in numbers["per_client"].items()
    ]
    lines += ["", "left out"]
    lines += [f"  {why:<32}{number:>12}" for why, number in numbers["left_out"].items()]
    return "\n".join(lines)


def _quantiles(numbers: np.ndarray) -> dict[str, float]:
    return {q: float(np.quantile(numbers, at)) for q, at in _QUANTILES.items()}
