"""Damaged files of every format are read as something valid, or refused by name.

An input is a small whole set with one file changed: bits flipped, numbers replaced,
parts cut, doubled, swapped or zeroed. Anything but a well-formed `Source` or a
ValueError that names a file of the set is a finding: another exception, one without a
name, more than 10 seconds, or more memory than MEMORY beyond the start.
"""

import collections
import concurrent.futures
import gc
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings

import numpy as np

from fedfr_jax.schema import naming
from fedfr_jax.types import GALLERY, IGNORE_INDEX, QUERY, TRAIN
from tests.faults import small_sets, task_sets

SETS = small_sets.SETS | task_sets.SETS
ROLES = (TRAIN, QUERY, GALLERY)
MEMORY, SECONDS = 2**30, 10
EXTREMES = (
    b"-1 0 1 255 2147483648 4294967296 -9999999 nan 1e999 inf 0.5 \0 \xff".split()
)
EXTREMES += [b"9" * 25, b"", b"\n", b"\t", b'"']


class Late(BaseException):
    """An input took too long."""


def change(data: bytes, rng: random.Random) -> bytes:
    """The data with one to three faults."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(FAULTS)(bytearray(data), rng)
    return bytes(data)


def _span(data, rng, most=64):
    begin = rng.randrange(len(data) + 1)
    return begin, min(begin + rng.randrange(1, most), len(data))


def _flip(data, rng):
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _number(data, rng):
    """Four or eight bytes become a number at the end of a range."""
    size = rng.choice((2, 4, 8))
    value = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10**6))
    begin = rng.randrange(len(data) + 1)
    data[begin : begin + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return data


def _word(data, rng):
    """A run of digits becomes something else."""
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if digits:
        begin = end = rng.choice(digits)
        while end < len(data) and 48 <= data[end] <= 57:
            end += 1
        data[begin:end] = rng.choice(EXTREMES)
    return data


def _cut(data, rng):
    return data[: rng.randrange(len(data) + 1)]


def _drop(data, rng):
    begin, end = _span(data, rng)
    return data[:begin] + data[end:]


def _zero(data, rng):
    begin, end = _span(data, rng)
    data[begin:end] = bytes(end - begin)
    return data


def _copy(data, rng):
    begin, end = _span(data, rng)
    place = rng.randrange(len(data) + 1)
    return data[:place] + data[begin:end] + data[place + end - begin :]


FAULTS = (_flip, _flip, _number, _word, _word, _cut, _drop, _zero, _copy)


def same(source, images, expected) -> bool:
    """Whether a source and its images are those of the whole set."""
    whole, whole_images = expected
    if source.names != whole.names or not np.array_equal(images, whole_images):
        return False
    keys = ("labels", "landmarks", "cameras", "is_test", "pairs", "roles", "client_ids")
    ours, theirs = source._asdict(), whole._asdict()
    return all(repr(ours[key]) == repr(theirs[key]) for key in keys)


def flaws(source, images, masks) -> str | None:
    """What is not well-formed in a source of one to 99 images."""
    count, classes = len(source.labels), len(source.names)
    labels, pairs = source.labels, source.pairs
    facts = {
        "images": images.shape == (count, *source.input_shape),
        "pixels": images.dtype == np.uint8,
        "masks": masks is None
        or np.isin(masks, [*range(len(source.masks.class_names)), IGNORE_INDEX]).all(),
        "roles": source.roles is None or np.isin(source.roles, ROLES).all(),
        "labels": 0 < count < 99 and 0 <= labels.min() <= labels.max() < classes,
        "landmarks": source.landmarks is None
        or (source.landmarks.shape == (count, 5, 2)),
        "cameras": source.cameras is None or source.cameras.shape == (count,),
        "is_test": source.is_test is None or source.is_test.shape == (count,),
        "pairs": pairs is None
        or (
            pairs.indices.shape == (len(pairs.is_same), 2)
            and 0 <= pairs.indices.min() <= pairs.indices.max() < count
        ),
    }
    return next((name for name, is_fine in facts.items() if not is_fine), None)


def outcome(small, folder, expected) -> str:
    """ "same", "valid", "refused", or what is wrong."""
    try:
        with naming(folder):  # as for the data of a config
            source = small.read(folder)
            rows = np.arange(len(source.labels))
            images, masks = source.read(rows), source.masks and source.masks.read(rows)
    except ValueError as error:
        return "refused" if str(folder) in str(error) else f"no name: {error!r}"
    except (Exception, Late) as error:
        return f"{type(error).__name__}: {error}"[:300]
    if flaw := flaws(source, images, masks):
        return f"flaw: {flaw}"
    if same(source, images, expected):
        return "same"
    return "other data" if small.is_summed else "valid"


def limit() -> None:
    """Bound the memory of this process, from here on."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def late(*_):
    """What a signal does when an input takes too long."""
    raise Late("took too long")


def attack(name: str, seeds: range):
    """Try one set's inputs; yields (file, seed, outcome)."""
    small = SETS[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = pathlib.Path(folder, "set")
        folder.mkdir()
        small.write(folder)
        source = small.read(folder)
        expected = source, source.read(np.arange(len(source.labels)))
        limit()
        signal.signal(signal.SIGALRM, late)
        for seed in seeds:
            rng = random.Random(f"{name} {seed}")
            file = rng.choice(small.files)
            path = folder / file
            state, whole = path.stat(), path.read_bytes()
            path.unlink()  # what is mapped into memory must not be cut
            path.write_bytes(change(whole, rng))
            signal.alarm(SECONDS)
            result = outcome(small, folder, expected)
            signal.alarm(0)
            path.unlink()
            path.write_bytes(whole)
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
            yield file, seed, result
        # NumPy leaves a damaged .npz open, and a later test would be told. It is young;
        # to look at all objects takes seconds where much has been compiled.
        gc.collect(1)


def attack_in_process(name: str, seeds: range) -> list[list]:
    """`attack` in a process of its own, whose crash or hang is a finding."""
    words = [sys.executable, "-m", "tests.faults.inputs", name, seeds.start, seeds.stop]
    try:
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=120 + len(seeds),
        )
    except subprocess.TimeoutExpired:
        return [["?", seeds.start, "the process hung"]]
    if done.returncode:
        return [["?", seeds.start, f"the process ended with {done.returncode}"]]
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(count: int, workers: int = 2, part: int = 1000) -> dict:
    """Try `count` inputs: how those of each set ended, how often, and what is wrong."""
    begin, each = time.monotonic(), -(-count // len(SETS))
    starts = range(0, each, part)
    jobs = [(name, range(a, min(a + part, each))) for a in starts for name in SETS]
    tally, findings = {name: collections.Counter() for name in SETS}, []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda job: attack_in_process(*job), jobs)
        for (name, _), found in zip(jobs, results, strict=True):
            for file, seed, result in found:
                is_fine = result in ("same", "valid", "refused")
                tally[name][result if is_fine else "finding"] += 1
                if not is_fine:
                    findings.append((name, file, seed, result[:160]))
    seconds = round(time.monotonic() - begin)
    return {"table": tally, "findings": findings, "seconds": seconds}


if __name__ == "__main__":
    given, start, stop = sys.argv[1:]
    for found in attack(given, range(int(start), int(stop))):
        print(json.dumps(found))
