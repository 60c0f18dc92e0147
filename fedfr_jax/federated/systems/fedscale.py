"""FedScale's device traces: how fast clients are, and when they are there.

Lai et al. 2022, arXiv:2105.11367. Both files are pickled dicts, of which this reads
plain containers, numbers and text only; a file that asks for anything else is refused.

    client_device_capacity: {client: {"computation": ms, "communication": kbit/s}}
    client_behave_trace: {client: {"active": [s], "inactive": [s], "finish_time": s}}

Their simulator computes seconds of a client as 3 x examples x computation / 1000, where
`computation` is a forward pass of one example and 3 stands for the backward pass, and
(upload + download) / communication. Entries are given to our clients in the order of
the file, again from the first when there are more clients.
"""

import io
import os
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfr_jax.federated.systems.devices import GIGA, MEGABIT, Availability, Profiles
from fedfr_jax.files import read_regular
from fedfr_jax.ranges import Positive
from fedfr_jax.schema import checked
from fedfr_jax.text import printable

MAX_BYTES = 2**30
# Opcodes of pickle that make dicts, lists, numbers and text, or keep them; none calls a
# function, or allocates what the file does not hold. Without tuples: hashing nested
# ones can take forever.
PLAIN_OPCODES = b"\x80\x95.0(}]ldsuaeNKMJGFI\x8a\x88\x89X\x8cVhjqrp\x94g2"


class _PlainUnpickler(pickle._Unpickler):  # type: ignore  # in Python, unlike the other
    """Reads containers, numbers and text."""

    dispatch = {
        opcode: load
        for opcode, load in pickle._Unpickler.dispatch.items()  # type: ignore
        if opcode in PLAIN_OPCODES
    }


def read_plain_pickle(path: str | os.PathLike) -> Any:
    """Read a pickle of dicts, lists, numbers and text.

    Raises:
      ValueError: for any other file, naming it.
    """
    data = read_regular(path, MAX_BYTES)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles fail in many ways
        reason = printable(str(error))[:80]
        if isinstance(error, KeyError):
            reason = "something else in it"
        raise ValueError(
            f"{path} must be a pickle of dicts, lists, numbers and text, got {reason}."
        ) from error


def _entries(path: str | os.PathLike, num_clients: int) -> list[tuple[str, Mapping]]:
    """(name in the file, its dict) of each of N clients."""
    table = read_plain_pickle(path)
    is_table = isinstance(table, dict) and table
    if not is_table or not all(isinstance(x, dict) for x in table.values()):
        kind = type(table).__name__ if not is_table else "others"
        raise ValueError(f"{path} must hold {{client: dict}}, got {kind}.")
    entries = [(printable(str(name))[:40], x) for name, x in table.items()]
    return [entries[i % len(entries)] for i in range(num_clients)]


def _numbers(path, name: str, entry: Mapping, key: str) -> np.ndarray:
    """Finite float64 [n] under a key of a client's entry."""
    value = entry.get(key)
    items = value if isinstance(value, list) else [value]
    if all(type(x) in (int, float) for x in items):
        try:
            numbers = np.array(items, np.float64)
        except OverflowError:  # of an integer
            numbers = np.array([np.inf])
        if np.isfinite(numbers).all():
            return numbers
    raise ValueError(
        f"{path} must have finite numbers under {key!r} of client {name}, got "
        f"{_short(value)}."
    )


def _short(value) -> str:
    """A number or text of a file, or the type of what else is there."""
    is_plain = isinstance(value, int | float | str) or value is None
    return repr(value)[:60] if is_plain else type(value).__name__


@checked
def read_profiles(
    path: str | os.PathLike, num_clients: int, *, forward_gflops: Positive
) -> Profiles:
    """Read profiles of N clients from FedScale's client_device_capacity.

    Args:
      forward_gflops: operations, in 1e9, of the forward pass whose milliseconds the
        file has. With those of the trained network (`fedfr plan` prints them) a step
        takes the seconds of FedScale's formula.
    """
    columns = {"computation": [], "communication": []}
    for name, entry in _entries(path, num_clients):
        for key, column in columns.items():
            numbers = _numbers(path, name, entry, key)
            if len(numbers) != 1 or numbers[0] <= 0:
                raise ValueError(
                    f"{path} must have one positive number under {key!r} of client "
                    f"{name}, got {numbers.tolist()[:3]}."
                )
            column.append(numbers[0])
    milliseconds, kilobits = map(np.array, columns.values())
    bytes_per_second = kilobits * MEGABIT / 1e3
    flops = forward_gflops * GIGA / (milliseconds / 1e3)
    return Profiles(flops, bytes_per_second, bytes_per_second.copy())


def read_availability(path: str | os.PathLike, num_clients: int) -> Availability:
    """Read windows of N clients from FedScale's client_behave_trace.

    A client is there from each `active` to the `inactive` of the same place, and its
    windows repeat after its own `finish_time`.
    """
    windows = []
    for name, entry in _entries(path, num_clients):
        active, inactive, finish = (
            _numbers(path, name, entry, key)
            for key in ("active", "inactive", "finish_time")
        )
        if len(active) != len(inactive) or len(finish) != 1:
            raise ValueError(
                f"{path} must have an 'inactive' for each 'active' and one "
                f"'finish_time' of client {name}, got {len(inactive)}, {len(active)} "
                f"and {len(finish)}."
            )
        end = np.minimum(inactive, finish)
        is_open = (active >= 0) & (active < end)
        if not is_open.any():
            raise ValueError(
                f"{path} must have 0 <= active < inactive and active < finish_time in "
                f"a window of client {name}, got none."
            )
        period = np.full(is_open.sum(), finish[0])
        windows.append((active[is_open], (end - active)[is_open], period))
    counts = [len(start) for start, _, _ in windows]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    start, length, period = (np.concatenate(x) for x in zip(*windows, strict=True))
    return Availability(offsets, start, length, period)
