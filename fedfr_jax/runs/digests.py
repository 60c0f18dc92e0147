"""SHA-256 of a folder's files, kept beside them: are they still as they were written?

The list is what `sha256sum` writes, so `sha256sum -c SHA256SUMS` checks it as well.
"""

import pathlib

from fedfr_jax.digest_json import digest_of_file

SUMS = "SHA256SUMS"
LATER = (SUMS, "commit_success.txt")  # written after the list; nobody reads the latter


def write_digests(folder: pathlib.Path) -> None:
    """Put the list of all files below `folder` into it."""
    (folder / SUMS).write_bytes(_listing(folder))


def difference(folder: pathlib.Path) -> str | None:
    """The first listed file that is not as it was written; None when all are.

    Files that the list does not name, such as a file manager's, are nobody's damage.

    Raises:
      OSError: when a file is there and cannot be read.
    """
    try:
        lines = (folder / SUMS).read_bytes().splitlines()
    except FileNotFoundError:
        return f"no {SUMS} in it"
    for line in lines or [b""]:
        digest, _, name = line.decode(errors="replace").partition("  ")
        try:
            is_whole = digest_of_file(folder / name) == digest
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            is_whole = False  # the last: a name with a byte that no name has
        if not is_whole:
            return f"{name or SUMS} is not as it was written"
    return None


def _listing(folder):
    """A line per file, hidden ones left out: a file system may add its own."""
    paths = [p for p in folder.rglob("*") if p.name not in LATER and p.name[0] != "."]
    return "".join(
        f"{digest_of_file(path)}  {path.relative_to(folder).as_posix()}\n"
        for path in sorted(p for p in paths if not p.is_dir())
    ).encode()
