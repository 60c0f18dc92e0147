"""Algorithms of earlier versions, and what a method says instead of them."""

EQUAL = '"algorithm": {"name": "fedavg", "weighting": "uniform"}'
RENAMED = {  # algorithm: keys of the method that do the same
    "centered_clipping": '"aggregation": {"name": "centered_clip", "max_norm": 1.0}, '
    + EQUAL,
    "fedatt": f'"aggregation": "attention", {EQUAL}',
    "norm_clipping": '"aggregation": {"name": "clip_by_global_norm", "max_norm": 1.0}, '
    + EQUAL,
    "robust": '"aggregation": "median"',
    "weiszfeld": f'"aggregation": "rfa", {EQUAL}',
}


def check_renamed(section: str, algorithm: str) -> None:
    """Raise ValueError for an algorithm that has become a link of an aggregation."""
    if isinstance(algorithm, str) and algorithm in RENAMED:
        raise ValueError(
            f"config.{section}.algorithm must not be {algorithm!r}, which is now a "
            f"link of any algorithm: got no {RENAMED[algorithm]}."
        )
