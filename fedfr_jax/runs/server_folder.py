"""Folder of a server of real clients: its rounds, and who its clients are.

    run.json      name of the training, and its settings
    clients.json  {client id: node that claimed it first}
    checkpoints/  the server's state, one for each of the last rounds

A server that is killed loses at most the round that it is in.
"""

import json
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax import manifest
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.types import PyTree

RUN, CLIENTS = "run.json", "clients.json"


class ServerFolder:
    """State of a server between its processes; in memory only without a `path`.

    Args:
      settings: of the training, in JSON's types; a folder of other ones is refused.
    """

    def __init__(self, path: str | os.PathLike | None, settings: Mapping[str, Any]):
        self.run = secrets.token_hex(8)  # name of the training
        self.owners: dict[int, str] = {}  # client -> node
        self.path, self._checkpoints, self._lock = None, None, None
        if path:
            self.path = pathlib.Path(path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_to_write(self.path, "server of real clients\n")
            try:
                self._read(json.loads(json.dumps(settings)))
            except BaseException:
                self._lock.close()
                raise
            self._checkpoints = Checkpointer(self.path / "checkpoints")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.path:
            self._checkpoints.close()
            self._lock.close()

    def _read(self, settings: dict) -> None:
        if not (self.path / RUN).exists():
            record = {"run": self.run, "settings": settings}
            manifest.write_object(self.path / RUN, record)
            return
        record = manifest.read_object(self.path / RUN)
        self.run = record["run"]
        for name, value in settings.items():
            if record["settings"].get(name) != value:
                raise ValueError(
                    f"{name} must be that of the training in {self.path}, "
                    f"{record['settings'].get(name)}, got {value}. Take another "
                    "workdir for another training."
                )
        if (self.path / CLIENTS).exists():
            owners = manifest.read_object(self.path / CLIENTS)
            self.owners = {int(client): node for client, node in owners.items()}

    def claim(self, client: int, node: str) -> bool:
        """Whether `client` is this node's, which it is if nobody has claimed it."""
        is_new = client not in self.owners
        owner = self.owners.setdefault(client, node)
        if is_new and self.path:
            manifest.write_object(self.path / CLIENTS, self.owners)
        return owner == node

    def restore(self, start: PyTree) -> tuple[int, PyTree]:
        """Newest (number of rounds, state); (0, `start`) before the first."""
        start = jax.tree.map(jnp.asarray, start)
        found = self._checkpoints.restore(start) if self.path else None
        return found or (0, start)

    def save(self, num_rounds: int, state: PyTree) -> None:
        """Save the state after that many rounds."""
        if self.path:
            self._checkpoints.save(num_rounds, state)
