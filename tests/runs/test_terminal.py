"""What a person sees of a run."""

import io

import jax.numpy as jnp
import pytest
from rich.console import Console

from fedfr_jax.runs import terminal
from fedfr_jax.runs.sinks import Sink


def console(is_terminal):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


def test_without_a_terminal_a_round_and_a_note_are_a_plain_line(monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0)
    screen = console(False)
    sink = terminal.LineView(2, "fedfr [b]", screen)
    sink.note("compiling round 0 [red]")
    sink(0, {"loss": jnp.float32(0.5), "seconds": 0.25, "other": 9.0})
    sink(1, {"loss": 0.0, "steps": 0.0})
    sink.close()
    note, first, silent = screen.file.getvalue().splitlines()
    assert note == "fedfr [b]  compiling round 0 [red]"
    assert first == "fedfr [b] 1/2  0 s  loss 0.5  seconds 0.25"
    assert silent.startswith("fedfr [b] 2/2  0 s  loss 0  no client took a step: ")


def test_plain_lines_are_spaced_in_time_but_the_last_round_is_always_shown(monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 3600)
    screen = console(False)
    sink = terminal.LineView(500, "fedfr", screen)
    for r in range(500):
        sink(r, {"loss": 1.0})
    shown = [line.split()[1] for line in screen.file.getvalue().splitlines()]
    assert shown == ["1/500", "500/500"]


def test_a_terminal_has_a_bar_with_numbers_speed_memory_and_the_last_evaluation():
    screen = console(True)
    view = terminal.LiveView(3, "fedavg", screen)
    view.note("compiling round 0 [red]")
    assert "compiling round 0 [red]" in screen.file.getvalue()
    numbers = {"loss": 0.5, "other": 9.0, "epsilon": 1.25}
    numbers |= {"clients_per_second": 4.0, "images_per_second": 200.0}
    view(0, {**numbers, "generic/accuracy": 0.875})
    view(1, numbers)
    view.close()
    last = screen.file.getvalue().rsplit("2/3", 1)[1]
    texts = ("loss 0.5", "4 clients/s", "200 images/s", " GiB", "epsilon 1.25")
    for text in (*texts, "round 1: generic/accuracy 0.875"):
        assert text in last
    assert "other" not in last and "compiling" not in last


@pytest.mark.parametrize(
    "kind, is_terminal, view",
    [
        ("auto", False, terminal.LineView),
        ("lines", True, terminal.LineView),
        ("quiet", True, Sink),
        ("auto", True, terminal.LiveView),
    ],
)
def test_the_view_is_live_on_a_terminal_alone_and_quiet_is_nothing(
    kind, is_terminal, view
):
    opened = terminal.open_view(kind, 1, "a", console=console(is_terminal))
    assert type(opened) is view
    opened.close()
