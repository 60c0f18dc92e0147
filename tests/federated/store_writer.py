"""A process that writes personal rows until it is killed, for test_store."""

import os
import pathlib

import numpy as np

from fedfr_jax.federated.store import Store

CLIENTS, PIECE = 3, 2**12
TEMPLATE = {"x": np.zeros(2**18, np.float32)}  # 1 MiB, in pieces: kills come within it


def value(client, round):
    """The number that fills a client's row in a round."""
    return 1000 * client + round


def checkpoint(folder):
    """Round that the newest checkpoint stands for."""
    path = folder / "checkpoint"
    return int(path.read_text()) if path.exists() else 0


def write_for_ever(folder: pathlib.Path) -> None:
    """Go on from the checkpoint, with one after every 16th round."""
    write = os.pwrite
    os.pwrite = lambda file, row, place: write(file, row[:PIECE], place)
    round, ids = checkpoint(folder), np.arange(CLIENTS)
    store = Store(TEMPLATE, CLIENTS, folder, resume_round=round)
    while True:
        values = np.float32(value(ids, round))[:, None]
        rows = np.repeat(values, len(TEMPLATE["x"]), axis=1)
        store.scatter(ids, {"x": rows}, round)
        round += 1
        if round % 16 == 0:
            store.flush(round)
            (folder / "draft").write_text(str(round))
            os.replace(folder / "draft", folder / "checkpoint")
