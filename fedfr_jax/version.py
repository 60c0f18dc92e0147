"""Version of the installed library."""

from importlib import metadata

UNKNOWN = "0+unknown"  # of a tree that is not installed


def library_version() -> str:
    """Version string, such as "1.0.0"."""
    try:
        return metadata.version("fedfr_jax")
    except metadata.PackageNotFoundError:
        return UNKNOWN
