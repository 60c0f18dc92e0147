"""What a person sees of a run."""

import io

import jax.numpy as jnp
from rich.console import Console

from fedfr_jax.runs import terminal
from fedfr_jax.runs.sinks import Sink


def console(is_terminal):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


def test_progress_without_a_terminal_is_one_plain_line_a_round():
    screen = console(False)
    sink = terminal.LineView(3, name="fedfr", console=screen, every_seconds=0)
    for r in range(3):
        sink(r, {"loss": jnp.float32(0.5), "tar@far=[1e-3]": 0.25})
    sink.close()
    lines = screen.file.getvalue().splitlines()
    assert lines[0] == "fedfr 1/3  0 s  loss 0.5  tar@far=[1e-3] 0.25"
    assert len(lines) == 3 and "\x1b" not in screen.file.getvalue()


def test_rounds_in_which_nobody_trains_say_so():
    screen = console(False)
    sink = terminal.LineView(2, console=screen, metrics=("loss",), every_seconds=0)
    sink(0, {"loss": 0.0, "steps": 0.0})
    sink(1, {"loss": 0.5, "steps": 0.5})
    silent, trained = screen.file.getvalue().splitlines()
    assert "loss 0  no client took a step" in silent
    assert trained.endswith("loss 0.5")


def test_plain_lines_are_spaced_in_time_but_the_last_round_is_always_shown():
    screen = console(False)
    sink = terminal.LineView(500, console=screen, every_seconds=3600)
    for r in range(500):
        sink(r, {"loss": 1.0})
    sink.close()
    shown = [line.split()[1] for line in screen.file.getvalue().splitlines()]
    assert shown == ["1/500", "500/500"]


def test_progress_on_a_terminal_is_a_bar_with_the_chosen_numbers():
    screen = console(True)
    sink = terminal.LiveView(3, name="fedavg", metrics=("loss",), console=screen)
    for r in range(3):
        sink(r, {"other": 9.0, "loss": 0.125})
    sink.close()
    text = screen.file.getvalue()
    assert "fedavg" in text and "3/3" in text and "loss 0.125" in text
    assert "other" not in text


def test_a_note_is_a_plain_line_without_a_terminal():
    screen = console(False)
    sink = terminal.LineView(3, name="fedfr", console=screen)
    sink.note("compiling round 0 [red]")
    sink(0, {"loss": 0.5})
    sink.close()
    lines = screen.file.getvalue().splitlines()
    assert lines == ["fedfr  compiling round 0 [red]", "fedfr 1/3  0 s  loss 0.5"]


def test_a_note_is_in_the_bar_of_a_terminal_until_the_next_numbers():
    screen = console(True)
    sink = terminal.LiveView(3, name="fedfr", console=screen)
    sink.note("compiling round 0 [red]")
    assert "compiling round 0 [red]" in screen.file.getvalue()
    sink(0, {"loss": 0.5})
    sink.close()
    last = screen.file.getvalue().rsplit("fedfr", 1)[1]
    assert "loss 0.5" in last and "compiling" not in last


def test_the_live_view_has_speed_memory_epsilon_and_the_last_evaluation():
    screen = console(True)
    view = terminal.LiveView(3, name="fedavg", metrics=("loss",), console=screen)
    numbers = {"loss": 0.5, "epsilon": 1.25}
    numbers |= {"clients_per_second": 4.0, "images_per_second": 200.0}
    view(0, {**numbers, "generic/accuracy": 0.875})
    view(1, numbers)
    view.close()
    last = screen.file.getvalue().rsplit("2/3", 1)[1]
    for text in ("4 clients/s", "200 images/s", " GiB", "epsilon 1.25"):
        assert text in last
    assert "round 1: generic/accuracy 0.875" in last


def test_the_view_is_live_on_a_terminal_alone_and_quiet_is_nothing():
    of = lambda kind, is_terminal: terminal.open_view(
        kind, 1, name="a", console=console(is_terminal)
    )
    assert isinstance(of("auto", False), terminal.LineView)
    assert isinstance(of("lines", True), terminal.LineView)
    assert type(of("quiet", True)) is Sink
    view = of("auto", True)
    assert isinstance(view, terminal.LiveView)
    view.close()
