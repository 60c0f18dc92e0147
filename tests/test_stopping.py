"""What is left on the screen, and of the processes, when a run is told to stop."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fedfr_jax import processes
from fedfr_jax.commands import launch
from fedfr_jax.stopping import going_on, stopped

ROOT = pathlib.Path(__file__).parent.parent
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
def test_a_signal_leaves_one_line_that_says_how_to_go_on(name, tmp_path):
    for place in ("pretrained/checkpoints/2", "fedfr.old/checkpoints/9"):
        (tmp_path / place).mkdir(parents=True)
    words = ["train", "--config=demo", "--overwrite", f"--workdir={tmp_path}"]
    process = start(
        "from fedfr_jax.stopping import end_on_signals",
        f"end_on_signals({words})",
    )
    assert process.stdout.readline() == "begun\n"
    for _ in range(2):  # the first ends it, a second says nothing more
        process.send_signal(signal.Signals[name])
    assert process.communicate(timeout=60)[0] == (
        f"Stopped by {name}: `fedfr train --config=demo --workdir={tmp_path}` goes on "
        "from checkpoint 2 of pretrained.\n"
    )
    assert process.returncode == 128 + signal.Signals[name]


@pytest.mark.parametrize(
    "words",
    [
        "train --overwrite --config=a",
        "train --restart=b --config=a",
        "train --restart b,c --overwrite=true --config=a",
    ],
)
def test_nobody_is_told_to_begin_again_to_go_on(words):
    assert going_on(words.split()) == ["train", "--config=a"]
    assert stopped(2, ["prepare"]) == "Stopped by SIGINT: start the same command again."


def test_a_process_of_a_launcher_ends_with_it():
    line = "from fedfr_jax import processes; processes.end_with_parent()"
    environment = {**os.environ, processes.WATCHED: "1"}
    process = start(line, stdin=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)  # a terminal's, which the launcher answers
    process.communicate(timeout=60)  # closes its input
    assert process.returncode == 1


def test_a_launcher_that_is_stopped_stops_its_processes(tmp_path, capfd):
    text = "import os, sys, time; open(sys.argv[-1][-1], 'w').write(str(os.getpid()))"
    command = [
        sys.executable,
        "-c",
        f"import os; os.chdir({str(tmp_path)!r}); {text}; time.sleep(60)",
    ]

    def stop():
        while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(SystemExit, match="143"):
        launch.launch(command, range(2), total=2, coordinator="a:1", typed=["launch"])
    assert capfd.readouterr().err.startswith("Stopped by SIGTERM: ")
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def command(*words, **options):
    """Start the launcher as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedfr_jax", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


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


def test_a_command_hears_a_signal_before_its_libraries_are_loaded(tmp_path):
    words = ["train", "--config=demo", f"--workdir={tmp_path}"]
    process = command(*words)
    wait_until(process, "SigCgt", signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    again = f"`fedfr train --config=demo --workdir={tmp_path}`"
    expected = f"Stopped by SIGTERM: {again} goes on from the beginning.\n"
    assert process.communicate(timeout=60)[0] == expected
    assert process.returncode == 143


def test_the_processes_of_a_killed_launcher_end(tmp_path):
    words = ["train", "--config=demo", f"--workdir={tmp_path}"]
    launcher = command("launch", "--processes=2", *words, process_group=0)
    try:
        listed = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        while len(children := listed.read_text().split()) < 2:
            assert launcher.poll() is None
        watching = [SimpleNamespace(pid=int(x), poll=lambda: None) for x in children]
        for child in watching:
            wait_until(child, "SigIgn", signal.SIGHUP)  # the last that is set up
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 60
        while any(map(is_running, children)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        launcher.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


FAILING = """
import sys, threading
from fedfr_jax import __main__, commands

def fails():
    raise OSError(28, "No space left on device", "rows.bin")

def main(words):
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    if words:
        fails()

commands.train.main = main
sys.argv = ["fedfr", "train", *sys.argv[1:]]
__main__.run()
"""


def test_a_full_disk_is_told_once_and_a_threads_error_is_not_lost():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("FEDFR_DEBUG", None)

    def run(*words):
        return subprocess.run(
            [sys.executable, "-c", FAILING, *words],
            capture_output=True,
            text=True,
            env=environment,
        )

    found = run("too")
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 2
    assert "'rows.bin': make room and start the same command" in found.stderr
    assert run().stderr.count("No space left on device") == 1
