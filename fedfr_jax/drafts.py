"""Files that are put in place whole: written aside, then renamed."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, by: str = "") -> Iterator[IO[bytes]]:
    """Open a file for bytes that takes the place of `path` when the block has ended.

    Whoever looks at `path` sees what was there before or all of the new file, also
    after a kill or a loss of power. A block that raises leaves `path` as it was. Makes
    the folder.

    Args:
      by: who writes, when others may write the same path at the same time.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(".".join(filter(None, (path.name, by, "tmp"))))
    try:
        with draft.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike, text: str, *, by: str = "") -> None:
    """Write a file of UTF-8 as `replacing` does."""
    with replacing(path, by=by) as file:
        file.write(text.encode())


@contextlib.contextmanager
def locked(path: str | os.PathLike) -> Iterator[None]:
    """Let one process at a time change the file `path`: the others wait. Makes the
    folder, and beside the file a hidden one that stays."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
