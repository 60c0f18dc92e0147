"""Flower apps: the algorithms of a simulation with real clients.

    deployment = flower.build_deployment(fedavg, data, variables, batch_size=20)
    server = flower.server_app(deployment, rounds=3)    # serverapp = "app:server"
    client = flower.client_app(deployment)              # clientapp = "app:client"

Both are Flower apps, so that `flwr run`, SuperLink and SuperNodes run them. A SuperNode
gets its client id by `--node-config "partition-id=3"`. See docs/how-to/real-clients.md.
"""

import functools
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import numpy as np

from fedfr_jax.api import FederatedDataset, check_input, class_labels, inputs_of
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.privacy.accountant import affordable_rounds
from fedfr_jax.federated.remote import (
    ClientData,
    ClientReply,
    ClientTask,
    Deployment,
    RemoteServer,
    build_client,
    build_server,
    check_deployment,
    client_data_of,
    describe_example,
)
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.federated.settings import build_sampling
from fedfr_jax.ranges import BatchSize, ByRound, Count, Seed, Whole
from fedfr_jax.schema import check_choice, check_values, checked, naming
from fedfr_jax.types import Algorithm, Dataset, FederatedTrainer, PyTree

OLDEST, TOO_NEW = (1, 42), (2, 0)  # versions of flwr
ROUNDS = "num-server-rounds"  # key of a Flower run's config
Given = Deployment | Callable[[Mapping[str, Any]], Deployment]


def check_library() -> None:
    """Raise ImportError unless a supported version of Flower is installed."""
    install = 'pip install "fedfr_jax[flower]"'
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise ImportError(f"fedfr_jax.flower needs Flower: {install}.") from None
    if not OLDEST <= tuple(map(int, version.split(".")[:2])) < TOO_NEW:
        raise ImportError(
            f"fedfr_jax.flower needs flwr of version 1.42 or later, below 2, got "
            f"{version}: {install}."
        )


@checked
def build_deployment(
    algorithm: Algorithm,
    data: FederatedDataset | Callable,
    variables: PyTree,
    *,
    batch_size: BatchSize,
    batching: Batching | None = None,
    num_clients: Count | None = None,
    local_epochs: ByRound | Callable = 1,
    cohort_size: Whole = 0,
    seed: Seed = 0,
    sampling: Sampling = Sampling(),  # noqa: B008 (a constant)
) -> Deployment:
    """Build a deployment for real clients, from the arguments of `ff.init`.

    Args:
      data: all clients' examples, of which each takes its own; or, with `num_clients`,
        a function client -> (x, y), its examples, called only at that client.
      variables: {"params": ..., "batch_stats": ...}, or the parameters alone.
      batching: how batches are made; None shuffles and does not change the examples.
      local_epochs, cohort_size, seed, sampling: as of `ff.init`.

    Raises:
      ValueError: for an algorithm that real clients cannot run, or a number out of
        range.
    """
    batching = (batching or Batching(batch_size))._replace(batch_size=batch_size)
    if isinstance(data, FederatedDataset):
        check_input(batching, data.dataset)
        load = client_data_of(data.dataset, data.population)
        num_clients = len(data.clients)
    elif num_clients is None:
        raise ValueError(
            "build_deployment needs num_clients with a function of a client's examples."
        )
    else:
        load = functools.partial(_load_client_data, data, batching)
    if not (isinstance(variables, dict) and "params" in variables):
        variables = {"params": variables}
    deployment = Deployment(
        algorithm=algorithm,
        variables={"batch_stats": {}, **variables},
        client_data=load,
        num_clients=num_clients,
        batching=batching,
        local_epochs=local_epochs,
        cohort_size=cohort_size,
        seed=seed,
        sampling=sampling,
    )
    check_deployment(deployment)
    return deployment


def _load_client_data(load: Callable, batching: Batching, client: int) -> ClientData:
    x, y = load(client)
    table = Dataset.from_arrays(inputs_of(x), class_labels("y", y))
    check_input(batching, table)
    return ClientData(table, int(table.labels.max()) + 1)


def from_config(
    config: str | Mapping[str, Any], method: str, *, run: str | None = None
) -> Deployment:
    """Build the deployment of a method of a config, with its data.

    Args:
      config: value of `fedfr train --config=`, or the sections.
      method: of config.methods.
      run: run directory of that config with the earlier stage from which the method
        starts, if any.

    Raises:
      ValueError: for a config that simulates failures or delays of clients, a method
        that real clients cannot run, or a missing stage.
    """
    from fedfr_jax.config import files
    from fedfr_jax.config.build import build

    if isinstance(config, str):
        path, argument = files.with_argument(config)
        config = files.load(files.find(path), argument)
    experiment = build(config)
    check_choice("method", method, experiment.stages)
    with naming(f"config.methods.{method}"):
        deployment = _deployment_of(experiment, method, run)
        check_deployment(deployment)
    return deployment


def _deployment_of(experiment, method: str, run: str | None) -> Deployment:
    """Build the deployment of a stage of an experiment, not yet checked."""
    trainer = experiment.stages[method].trainer
    federation, population = experiment.federation, experiment.task.population
    if not isinstance(trainer, FederatedTrainer):
        raise ValueError("Flower needs a method with clients, got a central one.")
    if federation.systems or federation.straggler_fraction:
        raise ValueError(
            "config.federation cannot have systems or straggler_fraction with Flower: "
            "real clients fail and take time anyway. Remove them."
        )
    if trainer.final_adaptation:
        raise ValueError(
            "Flower cannot run the round of all clients after the last one. Remove its "
            "key from the method."
        )
    return Deployment(
        algorithm=trainer.algorithm,
        variables=trainer.init_variables(_variables_before(experiment, method, run)),
        client_data=client_data_of(experiment.task.dataset, population),
        num_clients=population.num_clients,
        batching=experiment.batching,
        local_epochs=federation.epochs_of(trainer),
        cohort_size=federation.cohort_size,
        seed=experiment.seed,
        sampling=build_sampling(federation.sampling),
    )


def _variables_before(experiment, method: str, run: str | None) -> PyTree | None:
    """Variables that the stage starts from; None if it has no earlier stage."""
    from fedfr_jax.runs.restore import variables_before

    start = experiment.stages[method].init_from_stage
    if start is not None and run is None:
        raise ValueError(
            f"it needs the stage {start} that it starts from. Train that with `fedfr "
            f"train --methods={start} --workdir=RUN`, and give run=RUN."
        )
    return variables_before(experiment, method, run)


def _hashable_config(given: Given, *configs: Mapping[str, Any]) -> tuple:
    """Hashable arguments of `given`: sorted config items, () for a deployment."""
    items = {k: x for config in configs for k, x in config.items()}
    return () if isinstance(given, Deployment) else tuple(sorted(items.items()))


def _resolve(given: Given, items: tuple) -> Deployment:
    return given if isinstance(given, Deployment) else given(dict(items))


def _to_record(arrays: Mapping[str, np.ndarray]):
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(np.asarray(x)) for name, x in arrays.items()})


def _from_record(record) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def client_app(given: Given):
    """Build the `flwr.clientapp.ClientApp` of a deployment.

    A client's personal state is in its SuperNode's `Context.state` during the run; it
    is never sent.

    Args:
      given: the deployment; or a function from the run's and the node's config,
        {key: value}, to a deployment.

    Raises:
      ImportError: without Flower, or with an unsupported version.
    """
    check_library()
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @functools.cache
    def build_from(items):
        deployment = _resolve(given, items)
        return deployment, build_client(deployment)

    def resolve(context):
        items = _hashable_config(given, context.run_config, context.node_config)
        deployment, train = build_from(items)
        return deployment, train, _client_id(deployment, context.node_config)

    @app.query()
    def query(message, context):
        deployment, _, client = resolve(context)
        example = describe_example(deployment.client_data(client).dataset)
        record = ConfigRecord({"id": client, "example": example})
        return Message(RecordDict({"client": record}), reply_to=message)

    @app.train()
    def train(message, context):
        _, step, client = resolve(context)
        content, state = message.content, context.state
        task = _task(content["task"])
        arrays = _from_record(content["server"])
        personal = _from_record(state["personal"]) if "personal" in state else {}
        reply, personal = step(client, task, arrays, personal)
        state["personal"] = _to_record(personal)
        update, metrics = _to_record(reply.arrays), MetricRecord(dict(reply.metrics))
        reply_content = RecordDict({"update": update, "metrics": metrics})
        return Message(reply_content, reply_to=message)

    return app


def _task(record: Mapping[str, Any]) -> ClientTask:
    return ClientTask(**{**record, "key": np.array(record["key"], np.uint32)})


def _client_id(deployment: Deployment, node_config: Mapping[str, Any]) -> int:
    """Read the client id of a SuperNode from its config."""
    client, last = node_config.get("partition-id"), deployment.num_clients - 1
    if not (isinstance(client, int) and 0 <= client <= last):
        raise ValueError(
            f"partition-id of the SuperNode's --node-config must be one of 0 to {last},"
            f' got {client}. Start it with --node-config "partition-id=0".'
        )
    return client


def server_app(
    given: Given,
    *,
    rounds: int = 3,
    timeout: float = 3600.0,
    evaluate_fn: Callable[[int, PyTree], Mapping[str, float] | None] | None = None,
):
    """Build the `flwr.serverapp.ServerApp` of a deployment.

    Args:
      given: as of `client_app`, without the nodes' config.
      rounds: default of `num-server-rounds` in the run's config.
      timeout: seconds that a round waits for its clients; it continues with those that
        have answered. The first round waits as long for all clients to connect.
      evaluate_fn: (round from 1, variables of the global model) -> numbers to print, or
        None, called after every round.

    Raises:
      ImportError: as `client_app`.
    """
    check_library()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid, context):
        deployment = _resolve(given, _hashable_config(given, context.run_config))
        number = context.run_config.get(ROUNDS, rounds)
        check_values("", {ROUNDS: number}, {ROUNDS: Count})
        train_rounds(deployment, grid, number, timeout, evaluate_fn)

    return app


def train_rounds(
    deployment: Deployment,
    grid,
    rounds: int,
    timeout: float = 3600.0,
    evaluate_fn: Callable[[int, PyTree], Mapping[str, float] | None] | None = None,
) -> PyTree:
    """Train with the clients of a Flower `Grid`; return the final server state.

    Raises:
      RuntimeError: when no client connects, or none answers in a round.
      ValueError: when the first round would exceed the privacy budget; later ones that
        would are not trained.
      FloatingPointError: when the server's numbers are not finite after a round.
    """
    nodes = Nodes(grid, deployment.num_clients)
    nodes.wait(timeout)
    server = build_server(deployment, nodes.example)
    state = deployment.algorithm.init(deployment.variables)
    for number in range(affordable_rounds(server.accountant, rounds)):
        cohort = server.cohort(number)
        replies = ask(server, state, nodes, cohort, number, timeout)
        state, metrics = server.update(state, cohort, replies, number)
        numbers = {name: float(x.mean()) for name, x in metrics.items() if x.size}
        if evaluate_fn:
            variables = deployment.algorithm.global_model(state)
            numbers |= evaluate_fn(number + 1, variables) or {}
        text = "".join(f", {name} {x:.4g}" for name, x in numbers.items())
        say(f"{len(replies)} of {len(cohort.asked)} clients{text}", number, rounds)
    return state


def say(text: str, number: int, rounds: int | None = None) -> None:
    """Print a log line for round `number` (0-based)."""
    total = f" of {rounds}" if rounds else ""
    print(f"Round {number + 1}{total}: {text}", flush=True)


class Nodes:
    """Connected SuperNodes and their client ids."""

    def __init__(self, grid, num_clients: int):
        self.grid, self.num_clients = grid, num_clients
        self.known: dict[int, int | None] = {}  # node -> client; None: cannot take part
        self.example = ""  # see `describe_example`

    def wait(self, timeout: float) -> None:
        """Wait until all clients are connected, at most `timeout` seconds.

        Raises:
          RuntimeError: when there is none.
        """
        end = time.monotonic() + timeout
        while len(list(self.grid.get_node_ids())) < self.num_clients:
            if time.monotonic() > end:
                break
            time.sleep(1)
        connected = self.connected(timeout)
        if not connected:
            raise RuntimeError(
                f"No client has connected within {timeout:g} s. Start SuperNodes with "
                '--node-config "partition-id=0" and so on, then `flwr run` again.'
            )
        if len(connected) < self.num_clients:
            print(f"{len(connected)} of {self.num_clients} clients are connected.")

    def connected(self, timeout: float) -> dict[int, int]:
        """Return {client: node} of connected clients; ask new nodes for their id."""
        from flwr.app import Message, MessageType, RecordDict

        node_ids = list(self.grid.get_node_ids())
        query = lambda node: Message(RecordDict(), node, MessageType.QUERY)
        if new := [query(node) for node in node_ids if node not in self.known]:
            for reply in self.grid.send_and_receive(new, timeout=timeout):
                self.learn(reply)
        return {
            client: node
            for node, client in self.known.items()
            if node in node_ids and client is not None
        }

    def learn(self, reply) -> None:
        """Record the client id that a node reports."""
        node = reply.metadata.src_node_id
        if reply.has_error():
            self.known[node] = None
            print(f"A client cannot take part: {reason(reply)}", flush=True)
            return
        record = reply.content["client"]
        self.example = self.example or record["example"]
        if record["example"] != self.example:
            self.known[node] = None
            print(
                f"Client {record['id']} cannot take part: its examples must be "
                f"{self.example}, got {record['example']}.",
                flush=True,
            )
            return
        self.known[node] = record["id"]


def reason(reply) -> str:
    """Reason why a client did not answer, in one line."""
    parts = str(reply.error.reason or f"error {reply.error.code}").split()
    return " ".join(parts)


def ask(
    server: RemoteServer, state: PyTree, nodes: Nodes, cohort, number: int, timeout
) -> dict:
    """Let a cohort train; return {client: its reply for `RemoteServer.update`}.

    Raises:
      RuntimeError: when none of them answers.
    """
    from flwr.app import ConfigRecord, Message, MessageType, RecordDict

    node_of, arrays = nodes.connected(timeout), _to_record(server.arrays(state))
    messages, asked = [], set()
    for client, task in server.tasks(cohort, number).items():
        if client in node_of:
            asked.add(client)
            fields = {**task._asdict(), "key": task.key.tolist()}
            content = RecordDict({"task": ConfigRecord(fields), "server": arrays})
            group = {"group_id": str(number + 1)}
            message = Message(content, node_of[client], MessageType.TRAIN, **group)
            messages.append(message)
    replies, results, reasons = [], {}, {}
    if messages:
        replies = nodes.grid.send_and_receive(messages, timeout=timeout)
    for reply in replies:
        client = nodes.known.get(reply.metadata.src_node_id)  # None: the SuperLink
        if reply.has_error():
            reasons[client] = reason(reply)
            continue
        content = reply.content
        try:
            sent = ClientReply(_from_record(content["update"]), content["metrics"])
            results[client] = server.unpack(client, sent)
        except (KeyError, ValueError) as error:  # of another app or network
            reasons[client] = str(error)
    late = f"no answer within {timeout:g} s"
    for client in sorted(asked - results.keys()):
        why = reasons.get(client, reasons.get(None, late))
        say(
            f"client {client} is left out ({why}). See its SuperNode's log, and start "
            "that again if it has ended; the round continues.",
            number,
        )
    if len(cohort.asked) and not results:
        raise RuntimeError(
            f"No client of round {number + 1} has answered within {timeout:g} s. See "
            "the SuperNodes' logs, start them again, then `flwr run` again."
        )
    return results
