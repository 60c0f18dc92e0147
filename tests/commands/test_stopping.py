"""What is left on the screen, and of the processes, when a run is told to stop."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from fedfr_jax import processes
from fedfr_jax.commands import launch
from fedfr_jax.commands.stopping import going_on, stopped

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
        "from fedfr_jax.commands.stopping import end_on_signals",
        f"end_on_signals({words})",
    )
    assert process.stdout.readline() == "begun\n"
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
