"""Flower's apps. Where flwr is missing (its pins differ from requirements.txt) only
what needs none of it runs; `make test-flower` has an environment of its own."""

import contextlib
import importlib
import pathlib
import re
import subprocess
import types
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
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    objects = get_all_nested_objects(message)
    contents = {name: x.deflate() for name, x in objects.items()}
    read = inflate_object_from_contents(message.object_id, contents)
    read.metadata.__dict__["_message_id"] = message.object_id
    return read


class Loopback:
    """A `Grid` whose SuperNodes are in this process; messages are bytes between."""

    def __init__(self, app, num_nodes, **node_config):
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self.app, self.gone = app, set()  # {(client, round)} whose answer is lost
        self.contexts, self.keys, self.dates, self.hostile = {}, {}, {}, {}
        for i in range(num_nodes):
            config = {"partition-id": i, **node_config}
            node = {"node_id": 100 + i, "node_config": config}
            self.contexts[100 + i] = Context(
                run_id=1, **node, state=RecordDict(), run_config={}
            )

    def get_nodes(self):
        return [
            types.SimpleNamespace(
                node_id=node,
                registered_at=self.dates.get(node, "2026"),
                public_key=self.keys.get(node, b""),
            )
            for node in self.contexts
        ]

    def send_and_receive(self, messages, *, timeout):
        from flwr.app import Error, Message

        replies = []
        for message in reversed(list(messages)):  # in no order of the clients
            node, sent = message.metadata.dst_node_id, over_the_wire(message)
            message.metadata.__dict__["_message_id"] = sent.metadata.message_id
            message = sent
            try:
                reply = self.app(message, self.contexts[node])
                if (node - 100, message.metadata.group_id) in self.gone:
                    raise ConnectionError("the node is offline")
            except Exception as error:  # as a SuperNode does
                reply = Message(Error(2, str(error)), reply_to=message)
            if change := self.hostile.get(node - 100):
                reply = change(reply)
            for one in reply if isinstance(reply, list) else [reply]:
                replies.append(over_the_wire(one))
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
    with pytest.raises(RuntimeError, match="^No round of the last 1 had enough usable"):
        flower.train_rounds(given, grid, 1, timeout=1)
    words = "partition-id of the SuperNode's --node-config must be one of 0 to 3, got 4"
    assert words in capsys.readouterr().out
    grid.contexts.clear()
    with pytest.raises(RuntimeError, match="^No client has connected within 0 s. "):
        flower.train_rounds(given, grid, 1, timeout=0)


def loopback(name="fedavg", extra=0, **node_config):
    """(deployment, its `Loopback`)."""
    given = remotes.deployment(remotes.METHODS[name])
    app = flower.client_app(given)
    return given, Loopback(app, given.num_clients + extra, **node_config)


def nodes_of(grid, given, workdir=""):
    with flower.open_server_state(workdir, {}) as state:
        nodes = flower.Nodes(grid, given.num_clients, state)
        nodes.wait(0)
        return nodes


def hostile_messages():
    """{what a node sends: change of its message, or what is said of it}."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict

    def with_content(change):
        def changed(reply):
            content = change(dict(reply.content))
            reply.content = RecordDict(content)
            return reply

        return changed

    def failing(reply):
        error = Error(2, "\x1b[2J" * 1000)
        reply.__dict__.update(_content=None, _error=error)
        return reply

    def of_another_node(reply):
        reply.metadata.__dict__["_src_node_id"] = 777
        return reply

    def unasked(reply):
        reply.metadata.__dict__["_reply_to_message_id"] = "f" * 64
        return reply

    def as_npy(content):
        arrays = {
            k: Array(np.frombuffer(x.data, x.dtype).reshape(x.shape))
            for k, x in content["update"].items()
        }
        return {**content, "update": ArrayRecord(arrays)}

    drop = lambda name: lambda content: {k: content[k] for k in content if k != name}
    records, late = "it must send the records", "no answer within 1 s"
    return {
        "an error": (failing, r"\\x1b\[2J"),
        "nothing": (with_content(lambda x: {}), records),
        "no task": (with_content(drop("task")), records),
        "no update": (with_content(drop("update")), records),
        "no metrics": (with_content(drop("metrics")), records),
        "one more": (with_content(lambda x: {**x, "m": ConfigRecord()}), records),
        "metrics of another kind": (
            with_content(lambda x: {**x, "metrics": ConfigRecord({"loss": "1"})}),
            records,
        ),
        "arrays of another kind": (
            with_content(lambda x: {**x, "update": x["metrics"]}),
            records,
        ),
        "an empty task": (
            with_content(lambda x: {**x, "task": ConfigRecord()}),
            "it must answer round 1",
        ),
        "arrays as files": (with_content(as_npy), "must have dtype, shape and bytes"),
        "another node's": (of_another_node, late),
        "not asked for": (unasked, late),
    }


@needs_flower
def test_hostile_messages_are_left_out_in_one_line_each(capsys):
    given, grid = loopback()
    nodes = nodes_of(grid, given)
    server = flower.build_server(given, nodes.example)
    state, cohort = given.algorithm.init(given.variables), server.cohort(0)
    tasks = server.tasks(cohort, nodes.folder.run)
    bad, *others = tasks
    for name, (change, words) in hostile_messages().items():
        grid.hostile = {bad: change}
        answers, _ = flower.ask(server, state, nodes, tasks, 1)
        (line,) = re.findall(r"^Round 1: client.*$", capsys.readouterr().out, re.M)
        assert sorted(answers) == others, name
        assert f"client {bad} is left out (" in line and re.search(words, line), line
        assert line.isprintable() and len(line) < 700
    grid.hostile = {bad: lambda reply: [reply, reply]}
    answers, _ = flower.ask(server, state, nodes, tasks, 1)
    assert len(answers) == 3 and "A second or foreign" in capsys.readouterr().out

    def unreadable(messages, *, timeout):
        raise IndexError("chunk 9 of 1")

    grid.send_and_receive = unreadable
    assert flower.ask(server, state, nodes, tasks, 1) == ({}, 0)
    assert "Answers cannot be read: chunk 9 of 1." in capsys.readouterr().out


@needs_flower
def test_a_client_is_the_node_that_claimed_it_first_and_examples_are_what_most_have(
    tmp_path, capsys
):
    """Also after a restart of the server; a node is known by its key, where it has
    one."""
    from flwr.app import ConfigRecord, RecordDict

    given, grid = loopback(extra=2)
    grid.contexts[104].node_config["partition-id"] = 2
    grid.keys = {102: b"key"}
    said = lambda **words: {"id": 5, "example": "{}", **words}

    def saying(words):
        def changed(reply):
            reply.content = RecordDict({"client": ConfigRecord(words)})
            return reply

        return changed

    example = flower.describe_example(remotes.DATA)
    other = example.replace("6", "7")
    grid.hostile = {0: saying(said(id=0, example=other))}
    nodes = nodes_of(grid, given, tmp_path)
    assert nodes.connected(0) == {1: 101, 2: 102, 3: 103} and nodes.example == example
    printed = capsys.readouterr().out
    assert "it must not claim client 2, which is of another node" in printed
    assert "Client 0 cannot take part: its examples must be" in printed
    grid.contexts[109], grid.keys = grid.contexts.pop(102), {109: b"key"}
    nodes = nodes_of(grid, given, tmp_path)
    assert nodes.connected(0)[2] == 109
    del grid.contexts[109]
    for words in ({}, {"id": 3}, said(), said(id=True), said(id=0, example="1")):
        grid.hostile = {3: saying(words)}
        nodes = nodes_of(grid, given, tmp_path)
        assert nodes.connected(0) == {0: 100, 1: 101}, words
        assert "A client cannot take part: " in capsys.readouterr().out
    grid.contexts[102], grid.dates[104] = grid.contexts[104], "2025"
    assert nodes_of(grid, given).connected(0)[2] == 104


@needs_flower
def test_a_server_that_is_killed_in_a_round_goes_on_as_if_it_was_not(tmp_path, capsys):
    """After the clients have trained, who keep their states; with a new SuperLink."""
    given, grid = loopback("scaffold")
    expected = flower.train_rounds(given, grid, 3, timeout=1)

    def kill(number, variables):
        if number == 2:
            raise KeyboardInterrupt

    options = {"state-folder": str(tmp_path / "clients")}
    _, grid = loopback("scaffold", **options)
    with pytest.raises(KeyboardInterrupt):
        flower.train_rounds(given, grid, 3, 1, kill, tmp_path / "server")
    seen = []
    _, grid = loopback("scaffold", **options)
    note = lambda number, variables: seen.append(number)
    found = flower.train_rounds(given, grid, 3, 1, note, tmp_path / "server")
    assert seen == [2, 3] and "is lost" not in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    again = flower.train_rounds(given, grid, 3, 1, note, tmp_path / "server")
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    _, grid = loopback("scaffold")
    flower.train_rounds(given, grid, 4, 1, note, tmp_path / "server")
    assert "The state after round 3 is lost: it is a new" in capsys.readouterr().out
    other = given._replace(settings=given.settings._replace(seed=6))
    with pytest.raises(ValueError, match="equal settings .* got seed 5 in it"):
        flower.train_rounds(other, grid, 3, 1, None, tmp_path / "server")


@needs_flower
def test_a_run_stops_after_three_rounds_without_answers_not_before(capsys):
    given, grid = loopback()
    start = jax.device_get(given.algorithm.init(given.variables))
    everyone = lambda *rounds: {(k, str(n)) for k in range(4) for n in rounds}
    grid.gone = everyone(1, 2, 4, 5)
    flower.train_rounds(given, grid, 5, timeout=1)
    assert capsys.readouterr().out.count("of 5: skipped (a round must have") == 4
    grid.gone = everyone(1, 2, 3)
    with pytest.raises(RuntimeError, match="^No round of the last 3 had enough"):
        flower.train_rounds(given, grid, 5, timeout=1)
    grid.gone = everyone(1)
    state = flower.train_rounds(given, grid, 2, timeout=1)
    with pytest.raises(AssertionError):
        contract.assert_close(jax.device_get(state), start)


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
def test_a_process_that_is_killed_is_a_line_a_round(examples, tmp_path):
    """Its client leaves after the first or second round; the others end the run."""
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
    lines = [line for line in printed if "is left out" in line]
    assert 1 <= len(lines) <= 2  # the log may say that round 1 has ended during round 2
    assert all("client 2" in line and "start that again" in line for line in lines)


def test_a_missing_flower_is_one_line_that_says_what_to_do(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flower.metadata, "version", missing)
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


def test_a_client_has_the_state_of_the_server_s_last_round_of_the_same_training():
    state = flower.ClientState("a", (5, 2), {"x": 5}, {"x": 2})
    task = flower.ClientTask("a", 6, 5, None, 0, False)
    for run, accepted, found in [
        ("a", 5, 5),
        ("a", 2, 2),
        ("a", 4, None),
        ("b", 5, None),
    ]:
        asked = task._replace(run=run, accepted=accepted)
        assert state.after(asked).get("x") == found


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
