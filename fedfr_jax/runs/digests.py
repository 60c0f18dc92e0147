"""SHA-256 of a folder's files, kept beside them: are they still as they were written?

The list is what `sha256sum` writes, so `sha256sum -c SHA256SUMS` checks it as well.
"""

import hashlib
import pathlib

SUMS = "SHA256SUMS"
LATER = (SUMS, "commit_success.txt")  # written after the list; nobody reads the latter


def write_digests(folder: pathlib.Path) -> None:
    """Put the list of all files below `folder` into it."""
    (folder / SUMS).write_bytes(_listing(folder))


def difference(folder: pathlib.Path) -> str | None:
    """What is not as it was when the list was written; None when nothing is.

    Raises:
      OSError: when a file is there and cannot be read.
    """
    try:
        kept = (folder / SUMS).read_bytes().splitlines()
    except FileNotFoundError:
        return f"no {SUMS} in it"
    found = _listing(folder).splitlines()
    if kept == found:
        return None
    line = min({*kept} ^ {*found}, default=b"  " + SUMS.encode())
    name = line.partition(b"  ")[2].decode(errors="replace")
    return f"{name} is not as it was written"


def _listing(folder):
    """A line per file, hidden ones left out: a file system may add its own."""
    paths = [p for p in folder.rglob("*") if p.name not in LATER and p.name[0] != "."]
    lines = []
    for path in sorted(p for p in paths if not p.is_dir()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder).as_posix()}\n")
    return "".join(lines).encode()
