"""Algorithms of earlier versions and of papers that are settings of another."""

from collections.abc import Mapping

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
# Methods that `fedfr describe variants` prints as settings of another.
VARIANTS = (
    *("fairavg", "fedadagrad", "fedadam", "fedavgm", "fedbabu", "fedbn", "fedper"),
    *("fedyogi", "lg_fedavg", "local"),
)


def check_renamed(section: str, algorithm: str) -> None:
    """Raise ValueError for a name that is settings of another algorithm."""
    if isinstance(algorithm, str) and algorithm in VARIANTS:
        raise ValueError(
            f"config.{section}.algorithm cannot be {algorithm!r}, which is keys of a "
            f"method: fedfr describe variants {algorithm} prints them."
        )
    if isinstance(algorithm, str) and algorithm in RENAMED:
        raise ValueError(
            f"config.{section}.algorithm cannot be {algorithm!r}, which is now an "
            f"aggregation link of any algorithm. Set {RENAMED[algorithm]}."
        )


def check_removed(section: str, settings: Mapping) -> None:
    """Raise ValueError for a key of FedFR that is a method's `personal` now."""
    if "share" in settings:
        raise ValueError(
            f"config.{section}.algorithm cannot have the key share, which is now the "
            'method\'s key personal: clients that train alone have personal=".".'
        )
