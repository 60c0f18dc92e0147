"""Folder of a server of real clients: its rounds, and who its clients are.

    run.json      name of the training, and its settings
    clients.json  {client id: node that claimed it first}
    checkpoints/  the server's state, one for each of the last rounds

A server that is killed loses at most the round that it is in.
"""

import contextlib
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax import manifest
from fedfr_jax.federated.training_description import check_settings
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.types import PyTree

RUN, CLIENTS = "run.json", "clients.json"


class ServerState:
    """State of a server in memory: who its clients are."""

    def __init__(self):
        self.run = secrets.token_hex(8)  # name of the training
        self.owners: dict[str, str] = {}  # client -> node

    def claim(self, client: int, node: str) -> bool:
        """Whether `client` is this node's, which it is if nobody has claimed it."""
        return self.owners.setdefault(str(client), node) == node

    def restore(self, start: PyTree) -> tuple[int, PyTree]:
        """Newest (number of rounds, state); (0, `start`) before the first."""
        return 0, jax.tree.map(jnp.asarray, start)

    def save(self, num_rounds: int, state: PyTree) -> None:
        """Save the state after that many rounds."""


class ServerFolder(ServerState):
    """State of a server in a locked folder, which outlives its process.

    Args:
      settings: of the training, in JSON's types; a folder of other ones is refused.
    """

    def __init__(
        self,
        path: pathlib.Path,
        settings: Mapping[str, Any],
        checkpointer: Checkpointer,
    ):
        super().__init__()
        self._clients, self._checkpointer = path / CLIENTS, checkpointer
        settings = json.loads(json.dumps(settings))
        if not (path / RUN).exists():
            record = {"run": self.run, "settings": settings}
            manifest.write_object(path / RUN, record)
        record = manifest.read_object(path / RUN)
        self.run = record["run"]
        check_settings(path, record["settings"], settings)
        if self._clients.exists():
            self.owners = manifest.read_object(self._clients)

    def claim(self, client: int, node: str) -> bool:
        is_new = str(client) not in self.owners
        is_own = super().claim(client, node)
        if is_new:
            manifest.write_object(self._clients, self.owners)
        return is_own

    def restore(self, start: PyTree) -> tuple[int, PyTree]:
        first = super().restore(start)
        return self._checkpointer.restore(first[1]) or first

    def save(self, num_rounds: int, state: PyTree) -> None:
        self._checkpointer.save(num_rounds, state)


@contextlib.contextmanager
def open_server_state(
    path: str | os.PathLike | None, settings: Mapping[str, Any]
) -> Iterator[ServerState]:
    """Open a server's folder; in memory only without a `path`."""
    if not path:
        yield ServerState()
        return
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        lock_to_write(folder, "server of real clients\n"),
        contextlib.closing(Checkpointer(folder / "checkpoints")) as checkpointer,
    ):
        yield ServerFolder(folder, settings, checkpointer)
