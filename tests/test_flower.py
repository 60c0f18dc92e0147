"""Flower's apps. Where flwr is missing (its pins differ from requirements.txt) only
what needs none of it runs; `make test-flower` has an environment of its own."""

import contextlib
import importlib
import pathlib
import subprocess
from importlib import metadata

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import flower
from fedfr_jax.config.build import build
from tests.contracts import test_algorithms as contract
from tests.federated import test_remote as remotes
from tests.federated import toys

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
    return read


class Loopback:
    """A `Grid` whose SuperNodes are in this process; messages are bytes between."""

    def __init__(self, app, num_nodes):
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self.app, self.gone = app, set()  # {(client, round)} that does not answer
        self.contexts = {}
        for i in range(num_nodes):
            node = {"node_id": 100 + i, "node_config": {"partition-id": i}}
            self.contexts[100 + i] = Context(
                run_id=1, **node, state=RecordDict(), run_config={}
            )

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout):
        from flwr.app import Error, Message

        replies = []
        for message in reversed(list(messages)):  # in no order of the clients
            node = message.metadata.dst_node_id
            message = over_the_wire(message)
            try:
                if (node - 100, message.metadata.group_id) in self.gone:
                    raise ConnectionError("the node is offline")
                reply = self.app(message, self.contexts[node])
            except Exception as error:  # as a SuperNode does
                reply = Message(Error(2, str(error)), reply_to=message)
            replies.append(over_the_wire(reply))
        return replies


@needs_flower
@pytest.mark.parametrize(
    "name",
    toys.others_are_slow({("scaffold with a personal head",)}, remotes.METHODS),
)
def test_rounds_through_flowers_messages_are_those_of_the_simulation(name, capsys):
    given = remotes.deployment(remotes.METHODS[name])
    grid = Loopback(flower.client_app(given), given.num_clients)
    first = flower.build_server(given, flower.describe_example(remotes.DATA))
    gone = remotes.leaves(first.cohort(1), 1)
    grid.gone = {(gone, "2")}
    state = flower.train_rounds(given, grid, remotes.ROUNDS, timeout=1)
    expected, *_ = remotes.simulated(given)
    contract.assert_close(jax.device_get(state), expected)
    printed = capsys.readouterr().out
    if gone is not None:
        assert f"Round 2: client {gone} is left out (the node is offline). " in printed
    assert "Round 3 of 3: " in printed


@needs_flower
def test_a_round_that_nobody_answers_and_nodes_that_are_nobody_are_one_line(capsys):
    given = remotes.deployment(remotes.METHODS["fedavg"])
    grid = Loopback(flower.client_app(given), given.num_clients + 1)
    grid.gone = {(client, "1") for client in range(given.num_clients)}
    with pytest.raises(RuntimeError, match="^No client of round 1 has answered within"):
        flower.train_rounds(given, grid, 1, timeout=1)
    words = "partition-id of the SuperNode's --node-config must be one of 0 to 3, got 4"
    assert words in capsys.readouterr().out
    grid.contexts.clear()
    with pytest.raises(RuntimeError, match="^No client has connected within 0 s. "):
        flower.train_rounds(given, grid, 1, timeout=0)


EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture
def examples(monkeypatch):
    """examples/real_clients.py, with the app that it starts importable."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield importlib.import_module("real_clients")


METHODS = ("fedavg", "scaffold", "fedper", "fedfr", "quantized", "private")


@needs_flower
@pytest.mark.slow
def test_real_processes_on_the_loopback_train_the_network_of_the_simulation(examples):
    """A SuperLink, three SuperNodes, and a process for each message."""
    differences = examples.main(*METHODS, rounds=3)
    assert set(differences) == set(METHODS) and max(differences.values()) < 1e-5


@needs_flower
@pytest.mark.slow
def test_a_process_that_is_killed_is_one_line_that_says_what_to_do(examples, tmp_path):
    """Its client leaves in the middle; the others end the run."""
    import loopback

    with loopback.running(tmp_path, 3) as (environment, processes):
        command = loopback.run_command(examples.APP, method="fedavg")
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as run:
            printed = []
            for line in run.stdout:
                printed.append(line)
                if "Round 1 of 3: 3 of 3 clients" in line:
                    processes[-1].kill()
    said = "".join(printed)
    assert run.returncode == 0 and "Round 3 of 3: 2 of 3 clients" in said
    (line,) = (line for line in printed if "is left out" in line)
    assert "client 2" in line and "start that again" in line


@pytest.mark.parametrize("version", [None, "1.17.0", "2.0.1"])
def test_flower_of_another_version_is_one_line_that_says_what_to_do(
    version, monkeypatch
):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(flower.metadata, "version", installed)
    for app in (flower.client_app, flower.server_app):
        with pytest.raises(ImportError, match=r'pip install "fedfr_jax.flower."\.$'):
            app(None)


def test_a_deployment_is_built_from_what_a_simulation_is_built_from():
    """Of all clients' examples, or of a function that only its client calls."""
    x, y = np.asarray(remotes.DATA.images), np.asarray(remotes.DATA.labels)
    ids = np.repeat(np.arange(len(remotes.SIZES)), remotes.SIZES)
    data = ff.FederatedDataset.from_client_ids(x, y, ids)
    asked = []

    def own(client):
        asked.append(client)
        return x[ids == client], y[ids == client]

    given = remotes.fedavg(), contract.variables_of(0)
    make = lambda data, **options: flower.build_deployment(
        given[0], data, given[1], batch_size=4, **options
    )
    whole, parts = make(data), make(own, num_clients=4)
    assert not asked and whole.num_clients == parts.num_clients
    one, other = (of.client_data(2) for of in (whole, parts))
    jax.tree.map(np.testing.assert_array_equal, one.dataset, other.dataset)
    with pytest.raises(ValueError, match="^build_deployment needs num_clients with"):
        make(own)
    with pytest.raises(ValueError, match="^x must be floats, or uint8 with a batching"):
        images = (np.zeros((3, 6), np.uint8), np.zeros(3, np.int32))
        make(lambda client: images, num_clients=1).client_data(0)


DANE = {"algorithm": {"name": "feddane", "mu": 0.1}, "learning_rate": 0.1}


def small_config(tmp_path, **sections):
    """A classification of three clients."""
    rng, path = np.random.default_rng(0), tmp_path / "arrays.npz"
    images = rng.integers(0, 256, (36, 4, 4, 1)).astype(np.uint8)
    np.savez(path, images=images, labels=np.arange(36) % 3)
    methods = {"fedper": {"learning_rate": 0.1, "personal": {"blocks": 1}}}
    return {
        "task": "classification",
        "data": {"name": "arrays", "path": str(path)},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "mlp", "hidden_dim": 4},
        "federation": {"rounds": 2, "local_epochs": 1, "batch_size": 4},
        "methods": methods,
        **sections,
    }


def test_a_method_of_a_config_is_deployed_with_its_data(tmp_path):
    given = flower.from_config(small_config(tmp_path), "fedper")
    experiment = build(small_config(tmp_path))
    trainer, task = experiment.stages["fedper"].trainer, experiment.task
    expected = trainer.init_variables(None)
    jax.tree.map(np.testing.assert_array_equal, given.variables, expected)
    assert given.batching == experiment.batching and given.num_clients == 3
    rows = task.dataset.take(np.arange(*task.population.offsets[1:3]))
    jax.tree.map(np.testing.assert_array_equal, given.client_data(1).dataset, rows)


@pytest.mark.parametrize(
    "sections, method, rule",
    [
        ({}, "fedavg", "^method must be one of .'fedper'., got 'fedavg'"),
        (
            {"methods": {"central": {"kind": "central", "batch_size": 8}}},
            "central",
            "Flower needs a method with clients",
        ),
        (
            {"federation": {"systems": {"dropout": {"before_training": 0.1}}}},
            "fedper",
            "config.federation cannot have systems or straggler_fraction",
        ),
        (
            {"methods": {"dane": DANE}},
            "dane",
            "config.methods.dane: .*needs a server that looks at examples",
        ),
    ],
)
def test_configs_that_real_clients_cannot_run_are_refused(
    sections, method, rule, tmp_path
):
    with pytest.raises(ValueError, match=rule):
        flower.from_config(small_config(tmp_path, **sections), method)
