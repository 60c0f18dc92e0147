"""What the tests of plots share: what is drawn, and what it says."""

from typing import NamedTuple

import numpy as np
from PIL import Image

FAR = np.logspace(-4, 0, 50)


class Roc(NamedTuple):
    far: np.ndarray
    tar: np.ndarray
    num_negatives: int = 10_000
    num_positives: int = 500


def client_row(r, loss, **scalars):
    return {"round": r, "loss": loss, "num_idle_clients": 0.0, **scalars}


def assert_is_drawn(path):
    """A PNG of a sensible size with more than a blank page on it, and a PDF."""
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 200
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]
