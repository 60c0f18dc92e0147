"""Flower's apps. Where flwr is missing (its pins differ from requirements.txt) only
what needs none of it runs; `make test-flower` has an environment of its own."""

import contextlib
from importlib import metadata

import jax
import pytest

from fedfr_jax import flower
from tests.contracts import test_algorithms as contract
from tests.federated import test_remote as remotes

# Of flwr and what it imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def has_flower():
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("flwr"))
    return False


needs_flower = pytest.mark.skipif(
    not has_flower(), reason="flwr is not installed: make test-flower"
)


def over_the_wire(message):
    """The message as the other side reads it from Flower's bytes."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents,
    )

    objects = get_all_nested_objects(message)
    contents = {name: x.deflate() for name, x in objects.items()}
    read = inflate_object_from_contents(message.object_id, contents)
    read.metadata.__dict__["_message_id"] = message.object_id
    return read, sum(map(len, contents.values()))


class Loopback:
    """A `Grid` whose SuperNodes are in this process; messages are bytes between."""

    def __init__(self, app, num_nodes, run_config=()):
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self.app, self.sent, self.gone = app, [], set()
        self.contexts = {}
        for i in range(num_nodes):
            node = {"node_id": 100 + i, "node_config": {"partition-id": i}}
            self.contexts[100 + i] = Context(
                run_id=1, **node, state=RecordDict(), run_config=dict(run_config)
            )

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout):
        from flwr.app import Error, Message

        replies = []
        for message in reversed(list(messages)):  # in no order of the clients
            node = message.metadata.dst_node_id
            message, _ = over_the_wire(message)
            try:
                if (node, message.metadata.group_id) in self.gone:
                    raise ConnectionError("the node is offline")
                reply = self.app(message, self.contexts[node])
            except Exception as error:  # as a SuperNode does
                reply = Message(Error(2, str(error)), reply_to=message)
            reply, size = over_the_wire(reply)
            self.sent.append((node, reply, size))
            replies.append(reply)
        return replies


def trained(name, **options):
    """Three rounds of a method of `test_remote.py` through Flower's messages."""
    given = remotes.deployment(remotes.METHODS[name], **options)
    grid = Loopback(flower.client_app(given), given.num_clients)
    state = flower.train_rounds(given, grid, remotes.ROUNDS, timeout=1)
    return given, grid, state


@needs_flower
@pytest.mark.parametrize(
    "name",
    [
        "scaffold with a personal head",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("fedavg", "scaffold", "fedper", "fedfr", "quantized", "private")
        ),
    ],
)
def test_rounds_through_flowers_messages_are_those_of_the_simulation(name):
    given, grid, state = trained(name)
    expected, store, _ = remotes.simulated(given)
    contract.assert_close(jax.device_get(state), jax.device_get(expected))
    uploaded = {key for _, x, _ in grid.sent for key in x.content.get("update", {})}
    assert not any("head" in key for key in uploaded) or "fedper" not in name
