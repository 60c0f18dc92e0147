"""How commands end: a line for the user, and a code for the scheduler.

The code says what should be started again.
"""

import errno
import os
from collections.abc import Iterator

BUG, MISTAKE = 1, 2
RETRY = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
EXPLAINED = (ValueError, ImportError, OSError, FloatingPointError, MemoryError)
# What is wrong with a path, or with what lies there, stays wrong.
OF_A_PATH = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    ChildProcessError,  # a compiler that refuses the program
)
OF_A_FILE = (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG)
# What readers of data may report as a file that they cannot parse.
TEMPORARY = (
    errno.EIO,
    errno.ESTALE,  # of NFS
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
)
# Status codes and libraries in XLA's errors for a process or device that has gone.
LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "DATA_LOSS")
LOST += ("Gloo", "NCCL", "onnection reset", "onnection closed")


class ProcessFailed(ChildProcessError):
    """A process of `launch` failed; the launcher ends with its code."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.exit_code = code if code > 0 else RETRY  # a signal is below 0


def explain(error: Exception) -> Exception:
    """The one-line error for what is full, missing or lost; or the error itself."""
    if is_lost(error):
        line = str(error).splitlines()[0]
        return ConnectionError(
            f"another process of the run, or a device, was lost ({line}). Start the "
            "same command again on all hosts."
        )
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return MemoryError(f"a device has no memory left: {str(error).splitlines()[0]}")
    explains_itself = isinstance(error, OSError) and error.errno is None
    cause: BaseException | None = None if explains_itself else error
    while cause:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return OSError(f"{cause}: make room and start the same command again.")
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        return FileNotFoundError(f"{name} must be there, got no such file or folder.")
    return error


def exit_code(error: BaseException) -> int:
    """Exit code of a command that ends with `error`."""
    from fedfr_jax.runs.locks import RunInUse  # which needs NumPy

    if not isinstance(error, EXPLAINED):
        return BUG
    if isinstance(error, ProcessFailed):
        return error.exit_code
    if isinstance(error, RunInUse):
        return RETRY
    numbers = [x.errno for x in causes(error) if isinstance(x, OSError)]
    if any(number in TEMPORARY for number in numbers):
        return RETRY
    is_of_a_path = any(isinstance(x, OF_A_PATH) for x in causes(error))
    is_mistake = is_of_a_path or any(number in OF_A_FILE for number in numbers)
    return RETRY if isinstance(error, OSError) and not is_mistake else MISTAKE


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    while error:
        yield error
        error = error.__cause__


def is_lost(error: BaseException) -> bool:
    """Whether JAX has lost another process of the run, or a device."""
    is_of_jax = type(error).__name__ == "JaxRuntimeError"
    return is_of_jax and any(word in str(error) for word in LOST)
