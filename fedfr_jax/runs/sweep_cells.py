"""Cells of a sweep, each a run: in a folder, or in a bucket that many machines share.

Whoever trains a cell holds its lease, see `leases`. In a bucket a finished cell is an
object of its own, `rows/<cell>.json`, and the table is made of these objects.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from fedfr_jax import manifest
from fedfr_jax.files import check_bytes, is_url
from fedfr_jax.json_files import parse_json
from fedfr_jax.runs import sweep_results as results
from fedfr_jax.runs.buckets import (
    RunFolder,
    copy_folder,
    explained,
    fetch,
    open_folder,
    open_run,
)
from fedfr_jax.runs.leases import Leases
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.runs.sweep_results import Sibling
from fedfr_jax.runs.workdir import CONFIG, check_contents

ROWS = "rows"
TABLE = (results.FILE, "results.csv", manifest.FILE)


class Cells:
    """The cells of a sweep in a folder, which all its machines see."""

    def __init__(self, folder: pathlib.Path):
        check_contents(folder, results.MARK, results.FILE)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, str(folder)
        self.leases = Leases(folder)

    def base(self, config: Mapping) -> dict:
        """Config that all cells share; `config` is stored if there is none."""
        path = self.folder / CONFIG
        with lock_to_write(self.folder, results.MARK, waits=True):
            if not path.exists():
                manifest.write_object(path, config)
            return manifest.read_object(path)

    def read(self) -> dict[str, dict]:
        """{cell: its row} of those that have ended."""
        return results.read(self.folder)

    def is_ended(self, cell: str, before: Mapping[str, Any] | None = None) -> bool:
        """Whether a cell has a row, one other than `before`."""
        return self.read().get(cell) not in (None, before)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a cell that has ended."""
        results.add(self.folder, row)

    def opened(self, cell: str) -> contextlib.AbstractContextManager[RunFolder]:
        """Open the run of a cell."""
        return contextlib.nullcontext(RunFolder(self.folder / cell))

    def siblings(self, cell: str) -> Iterator[Sibling]:
        """Yield the other cells that may have finished stages."""
        return results.siblings_of(self.folder / cell)


class BucketCells(Cells):
    """The cells of a sweep in a bucket; `folder` has the table, on this machine."""

    def __init__(self, url: str):
        self.name, self._fs = url.rstrip("/"), open_folder(url)
        self.folder = copy_folder(url, use="sweep")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.leases = Leases(self.name)

    def base(self, config: Mapping) -> dict:
        with explained(self.name, "written"):
            self._fs.invalidate_cache()
            if not self._fs.exists(CONFIG):
                self._fs.pipe_file(CONFIG, json.dumps(config, indent=1).encode())
            size = self._fs.info(CONFIG)["size"]
        check_bytes(size, f"{self.name}/{CONFIG}", manifest.MAX_BYTES)
        with explained(self.name, "read"):
            data = self._fs.cat_file(CONFIG)
        return parse_json(data, f"{self.name}/{CONFIG}")

    def read(self) -> dict[str, dict]:
        with explained(self.name, "read"):
            self._fs.invalidate_cache()
            found: Any = self._fs.glob(f"{ROWS}/*.json", detail=True)
        check_bytes(sum(x["size"] for x in found.values()), f"{self.name}/{ROWS}")
        with explained(self.name, "read"):
            texts: Any = self._fs.cat([*found]) if found else {}
        rows = {x: parse_json(text, f"{self.name}/{x}") for x, text in texts.items()}
        is_of = lambda path, row: path.endswith(f"{ROWS}/{row.get('run')}.json")
        return {row["run"]: row for path, row in rows.items() if is_of(path, row)}

    def add(self, row: Mapping[str, Any]) -> None:
        text = json.dumps(results.finite(row), default=list)
        with explained(self.name, "written"):
            self._fs.pipe_file(f"{ROWS}/{row['run']}.json", text.encode())
        rows, written = self.read(), None
        while rows != written:  # others may have written a shorter table meanwhile
            results.write(self.folder, [*rows.values()])
            with explained(self.name, "written"):
                for name in TABLE:
                    self._fs.pipe_file(name, (self.folder / name).read_bytes())
            rows, written = self.read(), rows

    def opened(self, cell: str) -> contextlib.AbstractContextManager[RunFolder]:
        return open_run(f"{self.name}/{cell}")

    def siblings(self, cell: str) -> Iterator[Sibling]:
        for name, row in self.read().items():
            if name != cell and "error" not in row:
                url = f"{self.name}/{name}"
                config = copy_folder(url, use="read") / CONFIG
                if not config.exists():
                    fetch(url, lambda path: path == CONFIG)
                yield Sibling(config, lambda url=url: fetch(url))


def open_cells(location: str | pathlib.Path) -> Cells:
    """Open the sweep in a folder, or in the bucket at a URL."""
    return (
        BucketCells(str(location))
        if is_url(location)
        else Cells(pathlib.Path(location))
    )
