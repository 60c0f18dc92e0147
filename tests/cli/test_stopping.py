"""What is left on the screen, and of the processes, when a run is told to stop."""

import contextlib
import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fedfr_jax import distributed
from fedfr_jax.cli import launch
from fedfr_jax.cli.signals import GRACE, SIGNALS, describe_interrupt, grace_seconds
from fedfr_jax.distributed import TERMINAL

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parents[2]
BUSY = "print('begun', flush=True); threading.Event().wait()"


def start(*lines, **options):
    # A shell starts what runs in the background with SIGINT ignored, nohup with SIGHUP.
    heard = [
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)",
    ]
    text = "\n".join(["import signal, threading", *heard, *lines, BUSY])
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_one_line_that_says_how_to_resume(name):
    words = ["train", "--config=demo", "--overwrite"]
    process = start(
        "from fedfr_jax.cli.signals import exit_on_signals",
        f"exit_on_signals({words})",
    )
    assert process.stdout.readline() == "begun\n"
    for _ in range(2):  # the first ends it, a second says nothing more
        process.send_signal(signal.Signals[name])
    assert process.communicate(timeout=60)[0] == (
        f"Stopped by {name}: the same command without --overwrite resumes the run.\n"
    )
    assert process.returncode == 128 + signal.Signals[name]


AFTER_A_ROUND = """
import time
from fedfr_jax.cli.signals import ending_after_a_round
with ending_after_a_round(["train"], SECONDS) as is_asked:
    print("begun", flush=True)
    while not is_asked():
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(LONGER)
print("saved", flush=True)
"""


@pytest.mark.parametrize(
    "seconds, longer, sent, said, code",
    [
        (60, 0, [], "saved", 0),
        (0.2, 60, [], "Stopped by SIGTERM: ", 143),
        (60, 60, ["SIGTERM"], "Stopped by SIGTERM: ", 143),
        (60, 60, ["SIGINT"], "Stopped by SIGINT: ", 130),
    ],
)
def test_a_sigterm_leaves_time_to_end_a_round(seconds, longer, sent, said, code):
    text = AFTER_A_ROUND.replace("SECONDS", str(seconds))
    process = start(text.replace("LONGER", str(longer)) + "raise SystemExit")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    lines = {process.stdout.readline() for _ in range(2)}
    lines.remove("asked\n")
    assert f"ending after this round, or in {seconds:g} s as it is" in lines.pop()
    for name in sent:
        process.send_signal(signal.Signals[name])
    # With a timeout, `communicate` would lose what `readline` has read ahead.
    last = process.communicate()[0]
    assert last.startswith(said) and process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["launch"]])
def test_a_preempted_run_saves_its_round(launcher, tmp_path):
    words = ["train", "--config=smoke", f"--workdir={tmp_path}", "--quiet"]
    words += ["--config.federation.rounds=50000", "--sinks=csv"]
    words += ["--config.federation.checkpoint_every=0"]
    words += ["--config.federation.evaluate_every=0"]
    process = command(*launcher, *words)
    log = tmp_path / "fedper" / "metrics.jsonl"
    while not (log.is_file() and log.read_text().count("\n") > 3):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    lines = process.communicate(timeout=60)[0].splitlines()
    rounds = log.read_text().count("\n")
    ended = f"fedper: round {rounds} has ended and its checkpoint is saved."
    assert ended in lines and process.returncode == 143
    assert lines[-1] == "Stopped by SIGTERM: the same command resumes the run."


COMPILING = """
import jax, jax.numpy as jnp
def long(x):
    for i in range(1000):
        x = jnp.sin(x @ x[: 3 + i % 5].T @ x[: 3 + i % 5]) + i
    return x
lowered = jax.jit(long).lower(jnp.ones((8, 8)))
print("compiling", flush=True)
lowered.compile()
print("compiled", flush=True)
"""


def test_a_signal_ends_a_command_in_the_middle_of_a_compile():
    hears = (
        "from fedfr_jax.cli.signals import exit_on_signals; exit_on_signals(['train'])"
    )
    slow = {**os.environ, "XLA_FLAGS": ""}  # to compile, as a user's
    process = start(hears, COMPILING, env=slow)
    assert process.stdout.readline() == "compiling\n"
    time.sleep(0.5)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert said == "Stopped by SIGINT: the same command resumes the run.\n"
    assert time.monotonic() - sent < 10


def test_a_signal_ends_a_command_whose_lines_nobody_reads():
    process = start(
        "from fedfr_jax.cli.signals import exit_on_signals; exit_on_signals([])"
    )
    assert process.stdout.readline() == "begun\n"
    process.stdout.close()  # as when the terminal, or tee beside it, is gone
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP


@pytest.mark.parametrize(
    "words, seconds",
    [([], GRACE), (["--grace_seconds=5"], 5), (["--grace-seconds", "x"], GRACE)],
)
def test_a_launcher_reads_how_long_its_processes_may_take(words, seconds):
    assert grace_seconds(["train", *words]) == seconds
    assert describe_interrupt(2, ["prepare"]).endswith("same command starts again.")


def test_a_process_of_a_launcher_ends_with_it():
    line = "from fedfr_jax import distributed; distributed.exit_with_parent()"
    environment = {**os.environ, distributed.WATCHED: "1"}
    process = start(line, stdin=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)  # a terminal's, which the launcher answers
    process.communicate(timeout=60)  # closes its input
    assert process.returncode == 1


def test_a_launcher_that_is_stopped_stops_its_processes(tmp_path):
    text = "import os, sys, time; open(sys.argv[-1][-1], 'w').write(str(os.getpid()))"
    words = ["-c", f"import os; os.chdir({str(tmp_path)!r}); {text}; time.sleep(60)"]
    process = start(
        "import sys",
        "from fedfr_jax.cli import launch",
        f"given = [[sys.executable, *{words!r}], range(2)]",
        "launch.start(*given, total=2, coordinator='a:1', typed=['launch'])",
    )
    while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2:
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert said == "Stopped by SIGTERM: the same command starts again.\n"
    assert process.returncode == 143
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_processes_of_a_launcher_begin_deaf_to_the_terminal(capfd):
    said = (
        "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    launch.start([sys.executable, "-c", said], range(1), total=1, coordinator="a:1")
    heard = {int(word) for word in capfd.readouterr().out.split()}
    assert heard >= set(map(int, TERMINAL))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def command(*words, **options):
    """Start the launcher as a user does, in a terminal, where no signal is ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "fedfr_jax", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            **options,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until(process, kind, number):
    """Until a process catches (SigCgt) or ignores (SigIgn) a signal."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        mask = int(status.partition(f"{kind}:")[2].split()[0], 16)
        if mask >> number - 1 & 1:
            return
        time.sleep(0.005)
    raise AssertionError(f"no {kind} of {number} in {process.pid}")


def is_running(pid):
    """Whether a process has not ended; one that nobody has asked for its code has."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    return False


def children_of(process):
    """Process numbers of what a process has started."""
    listed = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in listed.read_text().split()]


LAUNCH = ["launch", "--processes_per_host=2"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("launcher", [[], LAUNCH], ids=["alone", "launch"])
def test_a_command_hears_a_signal_before_its_libraries_are_loaded(
    launcher, name, tmp_path
):
    words = [*launcher, "train", "--config=demo", f"--workdir={tmp_path}"]
    process = command(*words)
    wait_until(process, "SigCgt", SIGNALS[-1])  # the last that is set up
    assert not children_of(process)
    for _ in range(2):
        process.send_signal(signal.Signals[name])
    expected = f"Stopped by {name}: the same command resumes the run.\n"
    assert process.communicate(timeout=60)[0] == expected
    assert process.returncode == 128 + signal.Signals[name]


def wait_for_children(launcher):
    """The process numbers of both, as soon as they have any."""
    while len(children := children_of(launcher)) < 2:
        assert launcher.poll() is None
    return children


@pytest.mark.parametrize("seconds", [0, 0.1, 1.0])
def test_a_terminals_signals_leave_one_line_while_processes_start(seconds, tmp_path):
    words = [*LAUNCH, "train", "--config=demo", f"--workdir={tmp_path}"]
    launcher = command(*words, process_group=0)
    try:
        children = wait_for_children(launcher)
        time.sleep(seconds)
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGINT)
            time.sleep(0.02)
        said = launcher.communicate(timeout=60)[0]
        said = re.sub("^fedfr .*: .*\n", "", said)  # the first sign of life, by then
        assert re.fullmatch("Stopped by SIGINT: .* resumes the run.\n", said), said
        assert launcher.returncode == 130
        wait_for_end(children)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def wait_for_end(pids):
    """Until all of these processes have ended."""
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_processes_of_a_killed_launcher_end(tmp_path):
    words = ["train", "--config=demo", f"--workdir={tmp_path}"]
    launcher = command(*LAUNCH, *words, process_group=0)
    try:
        children = wait_for_children(launcher)
        watching = [SimpleNamespace(pid=x, poll=lambda: None) for x in children]
        for child in watching:
            wait_until(child, "SigIgn", signal.SIGHUP)  # the last that is set up
        launcher.kill()
        launcher.wait()
        wait_for_end(children)
    finally:
        launcher.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


FAILING = """
import sys, threading, types
from fedfr_jax.cli import main as launcher
from fedfr_jax.cli import flags

def fails():
    raise OSError(int(sys.argv[-1]), "No space left on device", "rows.bin")

class Failing:
    def __del__(self):
        raise RuntimeError("of an object")

@types.coroutine
def wait():
    yield

async def read():
    try:
        await wait()
    finally:
        raise RuntimeError("of a read")

def main(name, command, words):
    if words[0] == "nobody":
        Failing()
        dropped = read()
        dropped.send(None)
        del dropped
        sys.excepthook(RuntimeError, RuntimeError("of a library"), None)
        callback = types.SimpleNamespace(object=None, exc_value=RuntimeError("closed"))
        return sys.unraisablehook(callback)
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    if words[:-1]:
        fails()

flags.run = main
sys.argv = ["fedfr", "train", *sys.argv[1:]]
launcher.run()
"""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_once_and_a_threads_error_is_not_lost(number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("FEDFR_DEBUG", None)

    def run(*words):
        return subprocess.run(
            [sys.executable, "-c", FAILING, *words, str(number)],
            capture_output=True,
            text=True,
            env=environment,
        )

    found = run("too")
    assert found.returncode == 75
    assert len(found.stderr.splitlines()) == 2
    assert "'rows.bin': make room and start the same command" in found.stderr
    assert run().stderr.count("No space left on device") == 1
    found = run("nobody")
    assert found.returncode == 0
    assert found.stderr.count("Exception ignored") == 1
    assert "of a library" not in found.stderr
