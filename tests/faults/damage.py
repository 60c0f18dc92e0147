"""A checkpoint or a store that was damaged is refused, or its run ends as ever.

A run of a toy is killed after its second checkpoint; then one file of its folder is
damaged, and the run is started again: by a flipped bit in 8 places of the file, cut in
half, emptied or removed.
"""

import collections
import logging
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np

from tests.runs import test_loop

PLACES = 8


def damages(path: pathlib.Path) -> Iterator[str]:
    """Damage a file in one way after the other; says how."""
    whole = path.read_bytes()
    for i in range(min(PLACES, len(whole))):
        data = bytearray(whole)
        data[(2 * i + 1) * len(whole) // (2 * PLACES)] ^= 1 << i
        path.write_bytes(data)
        yield "a flipped bit"
    path.write_bytes(whole[: len(whole) // 2])
    yield "cut in half"
    path.write_bytes(b"")
    yield "emptied"
    path.unlink()
    yield "removed"


def stopped(sim, server, folder) -> None:
    """A run that was killed in round 5, after checkpoints 2 and 4."""
    try:
        test_loop.train(sim, server, folder, kill_at=("after sinks", 4), rounds=6)
    except test_loop.Killed:
        return
    raise RuntimeError("the run must be killed")


def outcome(sim, server, folder, expected) -> str:
    """ "same", "refused", or what is wrong."""
    try:
        end = test_loop.train(sim, server, folder, rounds=6)
    except ValueError as error:
        return "refused" if str(folder) in str(error) else f"no name: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    is_same = all(jax.tree.leaves(jax.tree.map(np.array_equal, end, expected)))
    return "same" if is_same else "other numbers"


def report(step: int = 1) -> dict:
    """Damage every file, or every `step`-th: how each fault ended, how often."""
    begin, tally, findings = time.monotonic(), collections.Counter(), []
    logging.disable(logging.WARNING)
    sim, server = test_loop.build("fedfr")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        expected = test_loop.train(sim, server, folder / "whole", rounds=6)
        stopped(sim, server, folder / "stopped")
        places = [folder / "stopped" / name for name in ("checkpoints", "store")]
        files = sorted(p for place in places for p in place.rglob("*") if p.is_file())
        shutil.copytree(folder / "stopped", folder / "damaged")
        for file in files[::step]:
            name = file.relative_to(folder / "stopped")
            for how in damages(folder / "damaged" / name):
                shutil.copytree(folder / "damaged", folder / "run")
                result = outcome(sim, server, folder / "run", expected)
                shutil.rmtree(folder / "run")
                tally[how, result] += 1
                if result not in ("same", "refused"):
                    findings.append(f"FOUND {name} {how}: {result}")
            shutil.copy(file, folder / "damaged" / name)
    logging.disable(logging.NOTSET)
    return {
        "table": {f"{how}, {what}": n for (how, what), n in sorted(tally.items())},
        "findings": findings,
        "seconds": round(time.monotonic() - begin),
    }
