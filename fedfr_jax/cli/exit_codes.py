"""Exit codes of commands: what a scheduler should start again, and what not."""

import errno
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
