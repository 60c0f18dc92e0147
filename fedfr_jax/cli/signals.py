"""Signals: one line on how to resume when a command is interrupted.

A run loses nothing by ending between two instructions, since checkpoints and files are
put in place by renaming: a signal ends the process whatever it is doing, and a thread
sees to it, as Python's own handlers wait for the end of a compile. The first SIGTERM,
by which schedulers announce a preemption, lets a training end its round and save it,
for as long as it is given. It needs nothing of the package, so that a command hears a
signal before its libraries are loaded.
"""

import argparse
import contextlib
import os
import pathlib
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FRESH = ("overwrite", "restart")  # flags that begin again instead of going on
GRACE = 30  # seconds from SIGTERM to the end: what Kubernetes and Slurm give


def at_once(number: int) -> float:
    """The seconds that a signal leaves, of commands that end at the first one."""
    del number
    return 0


def exit_on_signals(
    words: Sequence[str],
    before_end: Callable[[], None] = lambda: None,
    answer: Callable[[int], float] = at_once,
) -> tuple[int, int]:
    """End this process with a line of text at one of SIGNALS.

    One that is ignored, as `nohup` has it, stays so.

    Args:
      words: the command line.
      before_end: called by a thread of its own between the signal and the end.
      answer: called with the first signal by that thread: the seconds until the end,
        which comes sooner with a second signal.

    Returns:
      Descriptors that Python writes the numbers of signals to: the one until now, -1
      where there is none, and the new one.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:  # each of them writes its number to the pipe
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    arguments = (reading, words, before_end, answer)
    threading.Thread(target=_exit_now, args=arguments, daemon=True).start()
    return before, writing


@contextlib.contextmanager
def exiting_on_signals(
    words: Sequence[str],
    before_end: Callable[[], None] = lambda: None,
    answer: Callable[[int], float] = at_once,
) -> Iterator[None]:
    """`exit_on_signals` within the block; the earlier handlers are restored afterwards.

    Of an earlier `exit_on_signals` this takes over at once: no signal is lost between.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before, writing = exit_on_signals(words, before_end, answer)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writing)


@contextlib.contextmanager
def ending_after_a_round(
    words: Sequence[str], seconds: float
) -> Iterator[Callable[[], bool]]:
    """Yield whether the first SIGTERM within the block has asked for the end.

    The end comes by itself so many seconds later, or at once with another signal.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # Python lets no other thread answer signals
        return

    def answer(number):
        if number != signal.SIGTERM or not seconds:
            return 0
        asked.set()
        os.write(
            2,
            f"SIGTERM: ending after this round, or in {seconds:g} s as it is; a second "
            "signal ends at once.\n".encode(),
        )
        return seconds

    with exiting_on_signals(words, answer=answer):
        yield asked.is_set


def _next_signal(reading: int, seconds: float | None = None) -> int | None:
    """The next of SIGNALS; 0 when none comes in time, None at the pipe's end."""
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
    words: Sequence[str],
    before_end: Callable[[], None],
    answer: Callable[[int], float],
) -> None:
    number = _next_signal(reading)
    if number and (seconds := answer(number)):
        second = _next_signal(reading, seconds)
        number = second if second is None else second or number
    if number is None:
        return os.close(reading)
    try:
        before_end()
        cursor = "\033[?25h\n" if sys.stderr.isatty() else ""  # which a bar has hidden
        os.write(
            2, f"{cursor}{describe_interrupt(number, words)}\n".encode(errors="replace")
        )
    finally:  # also where nobody listens any more
        os._exit(128 + number)


def describe_interrupt(number: int, words: Sequence[str]) -> str:
    """Message of a command that a signal has ended."""
    name = signal.Signals(number).name
    if "train" not in words:
        return f"Stopped by {name}: start the same command again."
    again = shlex.join(["fedfr", *describe_resume(words)])
    checkpoint = newest_checkpoint(find_run(words).workdir)
    return f"Stopped by {name}: `{again}` goes on from {checkpoint}."


def describe_resume(words: Sequence[str]) -> list[str]:
    """Command line to resume, without the flags that would start again."""
    kept, is_value = [], False
    for word in words:
        flag, equals, _ = word.removeprefix("--").partition("=")
        is_fresh = word.startswith("--") and flag in FRESH
        if not is_fresh and not (is_value and not word.startswith("-")):
            kept.append(word)
        is_value = is_fresh and not equals
    return kept


def find_run(words: Sequence[str]) -> argparse.Namespace:
    """Parse --workdir, --grace_seconds, --overwrite and --restart of a command.

    Its own parser is not asked, as a signal may come before commands are loaded.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("workdir", "restart"):
        parser.add_argument(f"--{name}", nargs="?", default="")
    parser.add_argument("--grace_seconds", type=_seconds, default=GRACE)
    is_true = lambda text: text.lower() in ("true", "1")
    parser.add_argument("--overwrite", nargs="?", const=True, type=is_true)
    parser.add_argument("--nooverwrite", dest="overwrite", action="store_false")
    return parser.parse_known_args(words)[0]


def _seconds(text: str) -> float:
    """A flag's number; what is none is the command's to refuse."""
    return float(text) if text.replace(".", "", 1).isdecimal() else GRACE


def newest_checkpoint(workdir: str) -> str:
    """Describe the newest complete checkpoint of the run in `workdir`."""
    if "://" in workdir:
        from fedfr_jax.runs.scratch import copy_folder

        workdir = copy_folder(workdir)
    found = pathlib.Path(workdir).glob("*/checkpoints/*") if workdir else ()
    is_new = lambda path: "." not in path.parent.parent.name  # <stage>.old
    found = [p for p in found if p.name.isdigit() and is_new(p)]
    if not found:
        return "the beginning"
    last = max(found, key=_time_of)
    return f"checkpoint {last.name} of {last.parent.parent.name}"


def _time_of(path: pathlib.Path) -> float:
    """Modification time; 0 for a checkpoint that is being removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
