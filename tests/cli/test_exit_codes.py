"""Exit codes: 2 for a mistake that a restart repeats, 75 for what it may cure."""

import errno
import http.server
import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest

from fedfr_jax.cli import launch
from fedfr_jax.cli.exit_codes import MISTAKE, RETRY, exit_code
from fedfr_jax.cli.main import explain
from fedfr_jax.runs.buckets import TakenOver, explained
from fedfr_jax.runs.locks import RunInUse, lock_to_write

ROOT = pathlib.Path(__file__).parents[2]
FULL = OSError(errno.ENOSPC, "No space left on device")
LOST = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:3"


def raised(error, cause=None):
    """`error` as it is when it was raised from `cause`."""
    error.__cause__ = cause
    return error


def of_a_bucket(cause):
    with pytest.raises(OSError) as error, explained("s3://a/b", "read"):
        raise cause
    return error.value


KINDS = [
    (1, AttributeError("a bug")),
    (MISTAKE, ValueError("config.seed must be a whole number, got 1.5.")),
    (MISTAKE, ImportError("onnx is missing")),
    (MISTAKE, FloatingPointError("the loss is not finite")),
    (MISTAKE, MemoryError()),
    (MISTAKE, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")),
    (1, jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes")),
    (MISTAKE, FileNotFoundError(errno.ENOENT, "No such file or directory", "a.npz")),
    (MISTAKE, PermissionError(errno.EACCES, "Permission denied", "/a/b")),
    (MISTAKE, OSError(errno.ELOOP, "Is a link", "config.json")),
    (MISTAKE, ChildProcessError("v5e does not compile")),
    (MISTAKE, TakenOver("the run has been taken over")),
    (MISTAKE, of_a_bucket(FileNotFoundError("The specified bucket does not exist"))),
    (MISTAKE, of_a_bucket(PermissionError("Access Denied"))),
    (MISTAKE, raised(ValueError("a.jpg must be an image"), OSError("truncated"))),
    (RETRY, FULL),
    (RETRY, raised(OSError("round 3 could not be finished"), FULL)),
    (RETRY, raised(ValueError("a.txt must be a list"), OSError(errno.EIO, "I/O"))),
    (RETRY, of_a_bucket(OSError("503 Service Unavailable"))),
    (RETRY, of_a_bucket(TimeoutError())),
    (RETRY, ConnectionError("the processes must join")),
    (RETRY, RunInUse("the run is in use")),
    (RETRY, jax.errors.JaxRuntimeError(LOST)),
    (RETRY, jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: barrier timed out")),
]


@pytest.mark.parametrize("code, error", KINDS, ids=lambda x: str(x)[:40])
def test_what_a_restart_may_cure_is_75(code, error):
    assert exit_code(explain(error)) == code


@pytest.mark.parametrize("child, code", [(2, 2), (75, 75), (1, 1), (143, 143)])
def test_launch_ends_with_the_code_of_its_child(child, code):
    assert exit_code(failed(f"raise SystemExit({child})")) == code


def test_a_killed_child_may_be_started_again():
    assert exit_code(failed("import os; os.kill(os.getpid(), 9)")) == RETRY


def failed(program):
    command = [sys.executable, "-c", program]
    with pytest.raises(ChildProcessError) as error:
        launch.start(command, range(1), total=1, coordinator="localhost:1")
    return error.value


def fedfr(*words, setup="", **environment):
    """(exit code, last lines) of a command in a process of its own."""
    program = f"import sys\nfrom fedfr_jax.cli import main\n{setup}\nmain.run()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.ci
def test_a_folder_in_use_is_free_later(config, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with lock_to_write(run, "run directory of fedfr_jax\n"):
        code, said = fedfr("train", f"--config={config}", f"--workdir={run}")
    assert code == RETRY and "cannot be used by two processes" in said


@pytest.mark.ci
def test_processes_that_nobody_waits_for_may_come_later(config, tmp_path):
    words = [f"--coordinator=127.0.0.1:{launch.free_port()}", "--num_processes=2"]
    words += ["--process_id=0", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    setup = "from fedfr_jax import distributed\ndistributed.STARTUP = 2"
    code, said = fedfr("train", *words, setup=setup)
    # JAX's client may abort instead of raising, which is a signal.
    assert code in (RETRY, -6), said
    assert code != RETRY or "the processes must join" in said


class Unavailable(http.server.BaseHTTPRequestHandler):
    """A bucket that answers 503."""

    def _answer(self):
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = _answer

    def log_message(self, *_):
        pass


@pytest.mark.ci
def test_a_bucket_that_answers_503_is_tried_again_later(config):
    pytest.importorskip("s3fs")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code, said = fedfr(
        "train",
        f"--config={config}",
        "--workdir=s3://runs/a",
        setup="import s3fs.core\ns3fs.core.S3FileSystem.retries = 1",
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_MAX_ATTEMPTS="1",
    )
    server.shutdown()
    server.server_close()
    assert code == RETRY, said
    assert "s3://runs/a could not be read" in said and "Traceback" not in said
