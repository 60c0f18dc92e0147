"""Renamed algorithms of earlier versions, with their replacement."""

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
    """Raise ValueError for an algorithm that is now a link of an aggregation."""
    if isinstance(algorithm, str) and algorithm in RENAMED:
        raise ValueError(
            f"config.{section}.algorithm cannot be {algorithm!r}, which is now an "
            f"aggregation link of any algorithm. Set {RENAMED[algorithm]}."
        )
