"""SuperNodes of a Flower server: who they are, and what they answer.

What a node sends is untrusted: it is read by `federated.answers`, and one that is
wrong in anything is left out in one line.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfr_jax.federated.answers import (
    Answer,
    ClientReply,
    quote,
    read_example,
)
from fedfr_jax.federated.remote import ClientTask, RemoteServer
from fedfr_jax.runs.server_folder import ServerState
from fedfr_jax.text import printable
from fedfr_jax.types import PyTree

MAX_REASON = 400  # characters of an error of Flower


def to_record(arrays: Mapping[str, np.ndarray]):
    """`ArrayRecord` of arrays by name."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(np.asarray(x)) for name, x in arrays.items()})


def check_client_id(origin: str, client, num_clients: int) -> None:
    """Raise ValueError unless a value is a client id."""
    if type(client) is not int or not 0 <= client < num_clients:
        raise ValueError(
            f"{origin} must be one of 0 to {num_clients - 1}, got {quote(client)}. "
            'Start it with --node-config "partition-id=0".'
        )


def say(text: str, number: int, rounds: int | None = None) -> None:
    """Print a log line for round `number` (0-based)."""
    total = f" of {rounds}" if rounds else ""
    print(f"Round {number + 1}{total}: {text}", flush=True)


class Nodes:
    """Connected SuperNodes and their client ids.

    What they say is untrusted: a client id is of the node that claims it first, by
    its public key, and the examples are what most of the first clients have.
    """

    def __init__(self, grid, num_clients: int, folder: ServerState):
        self.grid, self.num_clients, self.folder = grid, num_clients, folder
        # node -> (its client, shapes of an example); None: it cannot take part
        self.known: dict[int, tuple[int, str] | None] = {}
        self.example = ""  # see `describe_example`

    def wait(self, timeout: float) -> None:
        """Wait until all clients are connected, at most `timeout` seconds.

        Raises:
          RuntimeError: when there is none.
        """
        end = time.monotonic() + timeout
        while len(self.connected(timeout)) < self.num_clients:
            if time.monotonic() > end:
                break
            time.sleep(1)
        examples = [x[1] for x in self.known.values() if x]
        if not examples:
            raise RuntimeError(
                f"No client has connected within {timeout:g} s. Start SuperNodes with "
                '--node-config "partition-id=0" and so on, then `flwr run` again.'
            )
        self.example = max(sorted(set(examples)), key=examples.count)
        for node, said in self.known.items():
            self.known[node] = said and self.checked(*said)
        if (number := len(self.connected(timeout))) < self.num_clients:
            print(f"{number} of {self.num_clients} clients are connected.")

    def connected(self, timeout: float) -> dict[int, int]:
        """Return {client: node} of connected clients; ask new nodes for their id."""
        from flwr.app import Message, MessageType, RecordDict

        infos = sorted(
            self.grid.get_nodes(), key=lambda x: (x.registered_at, x.node_id)
        )
        new = {x.node_id: x for x in infos if x.node_id not in self.known}
        query = lambda node: Message(RecordDict(), node, MessageType.QUERY)
        replies = self.exchange({node: query(node) for node in new}, timeout)
        for node in [node for node in new if node in replies]:
            try:
                self.known[node] = self.learn(replies[node], identity_of(new[node]))
            except (ValueError, ConnectionError) as error:
                self.known[node] = None
                print(f"A client cannot take part: {error}", flush=True)
        pairs = [(self.known.get(info.node_id), info.node_id) for info in infos]
        return {said[0]: node for said, node in pairs if said}

    def learn(self, reply, identity: str) -> tuple[int, str] | None:
        """Read (client, its example) from a node's answer.

        Raises:
          ConnectionError: for an error, with its reason.
          ValueError: for any other answer, or a client of another node.
        """
        if reply.has_error():
            raise ConnectionError(reason(reply))
        (record,) = records(reply, {"client": "ConfigRecord"})
        if record.keys() != {"id", "example"}:
            raise ValueError(f"it must send id and example, got {quote(record)}.")
        client, example = record["id"], record["example"]
        check_client_id("its client id", client, self.num_clients)
        read_example(example)
        if not self.folder.claim(client, identity):
            raise ValueError(
                f"it must not claim client {client}, which is of another node. If that "
                "has got a new key, stop the server, remove its line in clients.json "
                "of the workdir, and start again."
            )
        return self.checked(client, example)

    def checked(self, client: int, example: str) -> tuple[int, str] | None:
        """What a node has said; None, and a line, for other examples than expected."""
        if self.example in ("", example):
            return client, example
        print(
            f"Client {client} cannot take part: its examples must be {self.example}, "
            f"got {quote(example)}.",
            flush=True,
        )
        return None

    def exchange(self, messages: Mapping[int, Any], timeout: float) -> dict[int, Any]:
        """Send a message to each node; return {node: its first reply}."""
        if not messages:
            return {}
        try:
            found = self.grid.send_and_receive([*messages.values()], timeout=timeout)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            print(f"Answers cannot be read: {quote(str(error))}.", flush=True)
            return {}
        node_of, replies = {x.metadata.message_id: k for k, x in messages.items()}, {}
        for reply in found:
            node = node_of.get(reply.metadata.reply_to_message_id)
            is_own = reply.has_error() or reply.metadata.src_node_id == node
            if node is None or node in replies or not is_own:
                source = reply.metadata.src_node_id
                print(f"A second or foreign answer of node {source} is left out.")
                continue
            replies[node] = reply
        return replies


def identity_of(node) -> str:
    """Who a node is: its key, which it has after a restart too; else its number."""
    key = bytes(node.public_key)
    return hashlib.sha256(key).hexdigest() if key else str(node.node_id)


def reason(reply) -> str:
    """Reason why a client did not answer, in one line."""
    parts = str(reply.error.reason or f"error {reply.error.code}").split()
    return printable(" ".join(parts))[:MAX_REASON]


def records(reply, kinds: Mapping[str, str]) -> list:
    """Records of an answer by name, of the given kinds.

    Raises:
      ValueError: for any other content.
    """
    content = dict(reply.content) if reply.has_content() else {}
    actual = {quote(name): type(x).__name__ for name, x in content.items()}
    if actual != kinds:
        raise ValueError(f"it must send the records {kinds}, got {quote(actual)}.")
    return [content[name] for name in kinds]


SENT = {"task": "ConfigRecord", "update": "ArrayRecord", "metrics": "MetricRecord"}


def read_reply(reply) -> ClientReply:
    """Read a client's answer from its message, without looking into its arrays.

    Raises:
      ConnectionError: for an error, with its reason.
      ValueError: for a message of another app.
    """
    if reply.has_error():
        raise ConnectionError(reason(reply))
    task, update, metrics = records(reply, SENT)
    return ClientReply(task.get("run"), task.get("round"), update, metrics)


def ask(
    server: RemoteServer,
    state: PyTree,
    nodes: Nodes,
    tasks: Mapping[int, ClientTask],
    timeout: float,
) -> tuple[dict[int, Answer], int]:
    """Let clients train; return ({client: answer}, number of wrong answers)."""
    from flwr.app import ConfigRecord, Message, MessageType, RecordDict

    node_of, arrays = nodes.connected(timeout), to_record(server.arrays(state))
    messages, lost = {}, dict.fromkeys(tasks, "it is not connected")
    for client in [client for client in tasks if client in node_of]:
        task, node = tasks[client], node_of[client]
        fields = {**task._asdict(), "key": task.key.tolist()}
        content = RecordDict({"task": ConfigRecord(fields), "server": arrays})
        group = {"group_id": str(task.round + 1)}
        messages[node] = Message(content, node, MessageType.TRAIN, **group)
        lost[client] = f"no answer within {timeout:g} s"
    replies, sent = nodes.exchange(messages, timeout), {}
    for client in [client for client in tasks if node_of.get(client) in replies]:
        try:
            sent[client] = read_reply(replies[node_of[client]])
        except (ValueError, ConnectionError) as error:
            lost[client] = str(error)
    answers, wrong = server.accept(sent, tasks)
    for client, why in (lost | wrong).items():
        if client not in answers:
            say(
                f"client {client} is left out ({why}). See its SuperNode's log, and "
                "start that again if it has ended; the round continues.",
                tasks[client].round,
            )
    return answers, len(wrong)
