"""Launch the processes of one run on this machine, and stop all if one fails."""

import collections
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from fedfr_jax.cli.exit_codes import BUG, MISTAKE, RETRY, ProcessFailed
from fedfr_jax.cli.flags import Rest
from fedfr_jax.cli.signals import (
    describe_interrupt,
    describe_resume,
    exiting_on_signals,
    grace_seconds,
)
from fedfr_jax.distributed import HEARTBEAT, TERMINAL, WATCHED, use_every_core

PORT = 8482  # of the coordinator, JAX's on TPUs
SPARE = 5  # seconds until processes are killed after their own grace period
NUM_LINES = 40  # last lines of a process that are shown when it fails
NOISE = ("[Gloo] Rank",)
# Exit codes that are the less likely to be the cause, the later they are listed:
# processes that lost another one end with an error or by JAX's abort.
CONSEQUENCES = (MISTAKE, RETRY, BUG, -signal.SIGABRT)
ELSEWHERE = f"those on other hosts stop by themselves within about {HEARTBEAT} seconds"


def launch(
    command: Rest,
    *,
    processes_per_host: int = 2,
    num_hosts: int = 1,
    host_index: int = 0,
    coordinator: str | None = None,
    typed: Sequence[str],
) -> None:
    """Start the processes of one run on this machine.

      fedfr launch --processes_per_host=4 train --config=demo --workdir=runs/demo

    Everything from the command on is passed to the processes on this machine. With
    several hosts start the same line on each of them, with its number --host_index
    (from 0); --coordinator is the address of the first, its port 8482 unless it names
    another. The output of the first process is printed, that of others only if they
    fail. When one fails, the others on its host are stopped.

    Args:
      command: COMMAND command to start, and its flags
      processes_per_host: N number of processes on this machine
      num_hosts: N number of machines
      host_index: I index of this machine
      coordinator: HOST[:PORT] address of the first host
    """
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise ValueError(
            "launch needs a command to start, as in `fedfr launch train ...`."
        )
    if processes_per_host < 1:
        raise ValueError("launch: --processes_per_host must be at least 1, got 0.")
    if not host_index < num_hosts:
        raise ValueError(
            f"launch: --host_index must be less than --num_hosts={num_hosts}, got "
            f"{host_index}."
        )
    if num_hosts > 1 and not coordinator:
        raise ValueError("launch: --num_hosts needs --coordinator=HOST.")
    first = host_index * processes_per_host
    start(
        [sys.executable, "-m", "fedfr_jax", *words],
        range(first, first + processes_per_host),
        total=num_hosts * processes_per_host,
        coordinator=coordinator_address(coordinator),
        typed=typed,
    )


def coordinator_address(host: str | None) -> str:
    """HOST:PORT of the first process: JAX's port, or on this machine a free one.

    >>> coordinator_address("host0"), coordinator_address("host0:12345")
    ('host0:8482', 'host0:12345')
    """
    if host is None:
        return f"127.0.0.1:{free_port()}"
    _, colon, port = host.rpartition(":")  # [::1] has colons too
    return host if colon and port.isdecimal() else f"{host}:{PORT}"


def start(
    command: list[str],
    ids: range,
    *,
    total: int,
    coordinator: str,
    typed: Sequence[str] = (),
) -> None:
    """Run `command` as processes `ids` of `total`, until all have ended.

    Each gets --coordinator, --num_processes and --process_id, as `join` needs them. Its
    input is a pipe, which closes when this process ends, and so ends the child.

    Args:
      typed: the command line, for the message after a signal.

    Raises:
      ProcessFailed: when one of them failed; the others on this host are stopped.
    """
    address = [f"--coordinator={coordinator}", f"--num_processes={total}"]
    children = _start_children([*command, *address], ids)
    lock = threading.Lock()
    last_lines = {i: collections.deque(maxlen=NUM_LINES) for i in ids}
    readers = [
        threading.Thread(target=_read, args=(child, i == 0, last_lines[i]), daemon=True)
        for i, child in children.items()
    ]
    for reader in readers:
        reader.start()
    is_interrupted = threading.Event()

    def forward_signal(number):
        """Forward a preemption's SIGTERM, so that a training saves its round."""
        if number != signal.SIGTERM:
            return 0
        is_interrupted.set()
        with lock:
            for child in children.values():
                child.send_signal(number)
        return grace_seconds(command) + SPARE

    try:
        with exiting_on_signals(typed, lambda: _stop(children, lock), forward_signal):
            failed = _wait(children, lock, is_interrupted)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
            if child.stdin:
                child.stdin.close()
        for reader in readers:
            reader.join()
    if failed is None:
        return
    if is_interrupted.is_set():
        print(describe_interrupt(signal.SIGTERM, typed), file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM)
    for line in last_lines[failed]:  # none of process 0, whose output is printed
        print(f"[{failed}] {line}", end="")
    code, is_alone = children[failed].returncode, len(ids) == total
    text = _exit_text(failed, code, total, command, is_alone=is_alone)
    raise ProcessFailed(text, code)


def _start_children(command: list[str], ids: range) -> dict[int, subprocess.Popen]:
    """Start the processes {id: process}, with their shares of the cores."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", WATCHED: "1"}
    use_every_core(environment, num_processes=len(ids))
    children = {}
    # A terminal sends its signals to the children too: they inherit the blocked mask
    # until they ignore them. In this process another thread handles them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL)
    try:
        for i in ids:
            children[i] = subprocess.Popen(
                [*command, f"--process_id={i}"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return children


def _stop(children, lock: threading.Lock) -> None:
    """Kill all children; the lock, never released, keeps `_wait` from blaming one."""
    lock.acquire()
    for child in children.values():
        child.kill()
    for child in children.values():
        child.wait()


def _read(child, is_first: bool, last_lines: collections.deque) -> None:
    """Print the output of the first process; keep the end of the others'."""
    with child.stdout as lines:
        for line in lines:
            if line.startswith(NOISE):
                continue
            if is_first:
                print(line, end="", flush=True)
            else:
                last_lines.append(line)


def _wait(children, lock, is_interrupted: threading.Event) -> int | None:
    """Wait until all children are done (None) or one has failed (its index).

    Args:
      is_interrupted: set once all were asked to end, which they do by themselves.
    """
    while True:
        with lock:
            codes = {i: child.poll() for i, child in children.items()}
        is_over = not is_interrupted.is_set() or None not in codes.values()
        if any(codes.values()) and is_over:
            return _first_failure(codes)
        if all(code == 0 for code in codes.values()):
            return None
        time.sleep(0.1)


def _first_failure(codes: dict[int, int | None]) -> int:
    """First process that failed on its own, not because of another."""
    ranks = {code: rank for rank, code in enumerate(CONSEQUENCES)}
    bad = [i for i, code in codes.items() if code]
    return min(bad, key=lambda i: ranks.get(codes[i] or 0, -1))


def _exit_text(
    failed: int, code: int, total: int, command: list[str], *, is_alone: bool
) -> str:
    """Message of a failed process, and how to resume; `is_alone`: one host."""
    code = 128 - code if 128 < code < 160 else code  # ended by our handler of a signal
    ending = f"code {code}" if code > 0 else f"signal {-code}"
    others = "were stopped" if is_alone else f"on this host were stopped, {ELSEWHERE}"
    message = f"process {failed} of {total} ended with {ending}; the others {others}."
    if code == MISTAKE:  # which the process has explained
        return message
    where = "" if is_alone else " on every host"
    return f"{message} {describe_resume(command, where).capitalize()}."


def free_port() -> int:
    """Find a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
