"""Signals: one line on how to resume when a command is interrupted.

A signal may end the process at any instruction, since checkpoints and files are put in
place by renaming. A thread does it, as Python's own handlers wait for the end of a
compile. After the first SIGTERM, with which schedulers announce a preemption, a
training has some seconds to end its round and save it. This module imports nothing of
the package, so that signals are handled before its libraries are loaded.
"""

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 30  # seconds from SIGTERM to the end, as of Kubernetes and Slurm


def end_at_once(number: int) -> float:
    """Seconds until the end after a signal, of commands that do not wait."""
    del number
    return 0


def exit_on_signals(
    arguments: Sequence[str],
    before_end: Callable[[], None] = lambda: None,
    on_first: Callable[[int], float] = end_at_once,
) -> tuple[int, int]:
    """End this process with a line of text at one of SIGNALS.

    An ignored signal, as under `nohup`, stays ignored.

    Args:
      arguments: the command line.
      before_end: called by another thread between the signal and the end.
      on_first: called by that thread with the first signal; returns the seconds until
        the end, which a second signal ends at once.

    Returns:
      File descriptors to which Python writes the numbers of signals: the previous one
      (-1: none) and the new one.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:  # each of them writes its number to the pipe
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    args = (reading, arguments, before_end, on_first)
    threading.Thread(target=_exit_now, args=args, daemon=True).start()
    return before, writing


@contextlib.contextmanager
def exiting_on_signals(
    arguments: Sequence[str],
    before_end: Callable[[], None] = lambda: None,
    on_first: Callable[[int], float] = end_at_once,
) -> Iterator[None]:
    """`exit_on_signals` within the block; the earlier handlers are restored afterwards.

    No signal is lost between an earlier `exit_on_signals` and this one.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before, writing = exit_on_signals(arguments, before_end, on_first)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writing)


@contextlib.contextmanager
def ending_after_a_round(
    arguments: Sequence[str], seconds: float
) -> Iterator[Callable[[], bool]]:
    """Yield a function: whether a SIGTERM in the block has asked for the end.

    The process ends `seconds` later, or at once with another signal.
    """
    is_asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_asked.is_set  # Python handles signals only in the main thread
        return

    def answer(number):
        if number != signal.SIGTERM or not seconds:
            return 0
        is_asked.set()
        os.write(
            2,
            f"SIGTERM: ending after this round, or in {seconds:g} s as it is; a second "
            "signal ends at once.\n".encode(),
        )
        return seconds

    with exiting_on_signals(arguments, on_first=answer):
        yield is_asked.is_set


def _next_signal(reading: int, seconds: float | None = None) -> int | None:
    """Wait for one of SIGNALS; 0 if none comes in time, None if the pipe is closed."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if end is None else max(end - time.monotonic(), 0)
        if not select.select([reading], [], [], left)[0]:
            return 0
        byte = os.read(reading, 1)
        if not byte or byte[0] in SIGNALS:
            return byte[0] if byte else None


def _exit_now(
    reading: int,
    arguments: Sequence[str],
    before_end: Callable[[], None],
    on_first: Callable[[int], float],
) -> None:
    number = _next_signal(reading)
    if number and (seconds := on_first(number)):
        second = _next_signal(reading, seconds)
        number = second if second is None else second or number
    if number is None:
        return os.close(reading)
    try:
        before_end()
        cursor = "\033[?25h\n" if sys.stderr.isatty() else ""  # a bar has hidden it
        text = f"{cursor}{describe_interrupt(number, arguments)}\n"
        os.write(2, text.encode(errors="replace"))
    finally:  # also if the output is closed
        os._exit(128 + number)


def describe_interrupt(number: int, arguments: Sequence[str]) -> str:
    """Message of a command that a signal has ended."""
    return f"Stopped by {signal.Signals(number).name}: {describe_resume(arguments)}."


def describe_resume(arguments: Sequence[str], where: str = "") -> str:
    """How to resume a command; with --overwrite it would train anew."""
    flags = {word.partition("=")[0] for word in arguments}
    but = " without --overwrite" if "--overwrite" in flags else ""
    what = "resumes the run" if "train" in arguments else "starts again"
    return f"the same command{but}{where} {what}"


def grace_seconds(arguments: Sequence[str]) -> float:
    """Value of --grace_seconds; the command itself refuses anything but a number.

    The command's parser is not used, as a signal may come before it is loaded.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--grace_seconds", "--grace-seconds", default=str(GRACE))
    text = parser.parse_known_args(arguments)[0].grace_seconds
    return float(text) if text.replace(".", "", 1).isdecimal() else GRACE
