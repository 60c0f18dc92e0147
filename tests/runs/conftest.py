"""What is drawn, for the tests that look at it."""

import pytest

from fedfr_jax.runs.report import figures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, by file name."""
    found, save = {}, figures.save

    def keep(figure, path):
        paths = save(figure, path)
        found[paths[0].stem] = figure
        return paths

    monkeypatch.setattr(figures, "save", keep)
    return found


@pytest.fixture
def shown(drawn, monkeypatch):
    """`drawn`, each figure laid out in full but not written: a fifth of the time."""

    def lay_out(figure, path):
        figure.draw_without_rendering()
        return [path.with_suffix(f".{kind}") for kind in ("png", "pdf")]

    monkeypatch.setattr(figures, "write", lay_out)
    return drawn
