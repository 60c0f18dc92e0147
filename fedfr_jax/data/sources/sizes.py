"""What pictures and classes a set may have; `limits` has what any file may ask for."""

import os

MOST_IMAGE = 2**28  # bytes of an image file; photographs have less than 2^25
MOST_PIXELS = 2**26  # of a picture: 8192 x 8192
MOST_CLASSES = 10**7  # the largest face sets have 4 million


def check_pixels(width: int, height: int, origin: str) -> None:
    """Raise ValueError for a picture that is too large to be one of a face."""
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"{origin} must have at most {MOST_PIXELS} pixels, got {width} x {height}: "
            "make it smaller or take it out of the set."
        )


def check_classes(number: int, origin: str | os.PathLike) -> None:
    """Raise ValueError for more classes than any set has."""
    if number > MOST_CLASSES:
        raise ValueError(
            f"{origin} must have at most {MOST_CLASSES} classes, got {number}."
        )
