"""A process that decodes images for a thread of this one.

Pillow holds the interpreter's lock for two fifths of the time that a small JPEG takes,
so threads of one process decode on two or three cores at most. A thread still reads
the files; it sends some to its process, and gets back their pixels.
"""

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np

DECODED, REFUSED = b"d", b"r"  # begins of answers


class DecodeProcess:
    """A process of one thread; it ends with its input, also when this one is killed."""

    def __init__(self):
        self._process = None

    def decode(
        self, decode: Callable, items: Sequence[tuple], images: np.ndarray
    ) -> None:
        """Write `decode(*item)` of each item into `images` [n, ...].

        A process that dies is replaced once.

        Args:
          decode: can be pickled, as `items` can.

        Raises:
          ValueError: of `decode`; or when the process dies again.
        """
        for is_last in (False, True):
            try:
                return self._ask(decode, items, images)
            except (EOFError, BrokenPipeError):
                code = self._end()
                text = f"a process that decodes images ended with code {code} at one "
                text += f"of {items[0][1]} to {items[-1][1]}"
                if is_last:
                    raise ValueError(
                        f"{text}, twice. Free memory, or replace the file that it "
                        "cannot decode, and start the same command again."
                    ) from None
                logging.warning("%s: another one takes them.", text)

    def _ask(self, decode, items, images) -> None:
        process = self._running()
        pickle.dump((decode, items), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        kind = process.stdout.read(1)
        if kind == REFUSED:
            raise pickle.load(process.stdout)
        pixels = memoryview(images.reshape(-1))
        if kind != DECODED or process.stdout.readinto(pixels) < len(pixels):
            raise EOFError

    def _end(self) -> int:
        """Exit code of the process that has died."""
        process, self._process = self._running(), None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process.wait()

    def _running(self) -> Any:
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
                process_group=0,  # a terminal's signals are for the parent
            )
        return self._process


_OF_THREAD = threading.local()


def process_of_thread() -> DecodeProcess:
    """The decoding process of the calling thread."""
    if not hasattr(_OF_THREAD, "process"):
        _OF_THREAD.process = DecodeProcess()
    return _OF_THREAD.process


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests to their end."""
    while True:
        try:
            decode, items = pickle.load(requests)
        except EOFError:
            return
        try:
            images = [np.ascontiguousarray(decode(*item)) for item in items]
        except Exception as error:
            answers.write(REFUSED + _pickled(error))
        else:
            answers.write(DECODED)
            for image in images:
                answers.write(image.data)
        answers.flush()


def _pickled(error):
    """An error, or its text if it cannot be pickled or read again."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(ValueError(f"{type(error).__name__}: {error}"))
    return data


def main() -> None:
    """Decode for the process that has started this one."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a decoder prints
    serve(sys.stdin.buffer, answers)
