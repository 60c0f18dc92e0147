"""Flower apps: the algorithms of a simulation with real clients.

    deployment = flower.build_deployment(fedavg, data, variables, batch_size=20)
    server = flower.server_app(deployment, rounds=3)    # serverapp = "app:server"
    client = flower.client_app(deployment)              # clientapp = "app:client"

Both are Flower apps, so that `flwr run`, SuperLink and SuperNodes run them. A SuperNode
gets its client id by `--node-config "partition-id=3"`. See docs/how-to/real-clients.md.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedfr_jax.api import FederatedDataset, check_input, class_labels, inputs_of
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.privacy.accountant import affordable_rounds
from fedfr_jax.federated.remote import (
    ClientData,
    ClientTask,
    Deployment,
    build_client,
    build_server,
    check_deployment,
    client_data_of,
    describe_example,
)
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.systems.settings import SystemsConfig
from fedfr_jax.federated.training_description import describe_training
from fedfr_jax.files import replace_file
from fedfr_jax.flower_nodes import Nodes, ask, check_client_id, say, to_record
from fedfr_jax.parts import parse
from fedfr_jax.ranges import BatchSize, ByRound, Count, NonNegative, Seed, Whole
from fedfr_jax.runs.server_folder import open_server_state
from fedfr_jax.schema import check_choice, check_values, checked, naming
from fedfr_jax.types import Algorithm, Dataset, FederatedTrainer, PyTree

ROUNDS, WORKDIR = "num-server-rounds", "workdir"  # keys of a Flower run's config
MAX_SKIPPED = 3  # rounds in a row
RAW = "raw"  # serialization of arrays that the server reads: their bytes
PERSONAL, STATES = "personal", "state-folder"  # of a node: its record, key of config
Given = Deployment | Callable[[Mapping[str, Any]], Deployment]


def check_library() -> None:
    """Raise ImportError unless Flower is installed."""
    try:
        metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise ImportError(
            'fedfr_jax.flower needs Flower: pip install "fedfr_jax[flower]".'
        ) from None


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
    max_weight: NonNegative = 0.0,
) -> Deployment:
    """Build a deployment for real clients, from the arguments of `ff.init`.

    Args:
      data: all clients' examples, of which each takes its own; or, with `num_clients`,
        a function client -> (x, y), its examples, called only at that client.
      variables: {"params": ..., "batch_stats": ...}, or the parameters alone.
      batching: how batches are made; None shuffles and does not change the examples.
      local_epochs, cohort_size, seed, sampling: as of `ff.init`.
      max_weight: largest weight that a client may claim, of `fedavg` its number of
        examples; 0 is 100 times the median of its round.

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
    settings = Settings(cohort_size, local_epochs, seed=seed, sampling=sampling)
    deployment = Deployment(
        algorithm=algorithm,
        variables={"batch_stats": {}, **variables},
        client_data=load,
        num_clients=num_clients,
        batching=batching,
        settings=settings,
        max_weight=max_weight,
    )
    return check_deployment(deployment)


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

    sections: Any = config
    if isinstance(config, str):
        path, argument = files.with_argument(config)
        sections = files.load(files.find(path), argument)
    experiment = build(sections)
    check_choice("method", method, experiment.stages)
    with naming(f"config.methods.{method}"):
        return check_deployment(_deployment_of(experiment, method, run))


def _deployment_of(experiment, method: str, run: str | None) -> Deployment:
    """Build the deployment of a stage of an experiment, not yet checked."""
    trainer = experiment.stages[method].trainer
    federation, population = experiment.federation, experiment.task.population
    if not isinstance(trainer, FederatedTrainer):
        raise ValueError("Flower needs a method with clients, got a central one.")
    has_systems = federation.systems != parse(SystemsConfig, {})
    if has_systems or federation.straggler_fraction:
        raise ValueError(
            "config.federation cannot have systems or straggler_fraction with Flower: "
            "real clients fail and take time anyway. Remove them."
        )
    if trainer.frozen_model is not None:
        raise ValueError(
            "Flower cannot train a method with frozen leaves or an adapter. Remove "
            "`frozen` and `adapter`."
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
        settings=federation.rounds_of(trainer, population.num_clients, experiment.seed),
    )


def _variables_before(experiment, method: str, run: str | None) -> PyTree | None:
    """Variables that the stage starts from; None if it has no earlier stage."""
    from fedfr_jax.runs.stages import read_stage

    start = experiment.stages[method].init_from_stage
    if start is None:
        return None
    if run is None:
        raise ValueError(
            f"it needs the stage {start} that it starts from. Train that with `fedfr "
            f"train --methods={start} --workdir=RUN`, and give run=RUN."
        )
    return read_stage(experiment, start, pathlib.Path(run)).variables


def _resolve(given: Given, config: Mapping[str, Any]) -> Deployment:
    return given if isinstance(given, Deployment) else given(config)


def _from_record(record) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


class ClientState(NamedTuple):
    """A client's personal state after its newest round, and before that.

    The state before counts if the server has not used the newest answer: it came too
    late, was left out, or the server was killed.
    """

    run: str = ""  # as of the task
    rounds: tuple[int, int] = (0, 0)  # after which each was, as `ClientTask.accepted`
    newest: Mapping[str, np.ndarray] = MappingProxyType({})
    before: Mapping[str, np.ndarray] = MappingProxyType({})

    def after(self, task: ClientTask) -> Mapping[str, np.ndarray]:
        """State after the last round in which the server has used an answer."""
        states = {}
        if self.run == task.run:
            states = dict(zip(self.rounds, (self.newest, self.before), strict=True))
        if task.accepted and task.accepted not in states:
            print(f"The state after round {task.accepted} is lost: it is a new one.")
        return states.get(task.accepted, {})

    @classmethod
    def load(cls, context, client: int) -> "ClientState":
        """Load from the node's `state-folder`, or else from its `Context.state`."""
        if (path := _state_file(context, client)) is None:
            arrays = _from_record(context.state.get(PERSONAL, {}))
        else:
            arrays = dict(np.load(path)) if path.exists() else {}
        if not arrays:
            return cls()

        def part(prefix):
            names = [name for name in arrays if name.startswith(prefix)]
            return {name.removeprefix(prefix): arrays[name] for name in names}

        run, rounds = bytes(arrays["run"]).decode(), tuple(arrays["rounds"].tolist())
        return cls(run, rounds, part("newest/"), part("before/"))

    def save(self, context, client: int) -> None:
        """Save where `load` reads."""
        arrays: dict[str, Any] = {
            f"newest/{name}": x for name, x in self.newest.items()
        }
        arrays |= {f"before/{name}": x for name, x in self.before.items()}
        arrays["run"] = np.frombuffer(self.run.encode(), np.uint8)
        arrays["rounds"] = np.array(self.rounds)
        if (path := _state_file(context, client)) is None:
            context.state[PERSONAL] = to_record(arrays)
            return
        with replace_file(path) as file:
            np.savez(file, **arrays)


def _state_file(context, client: int) -> pathlib.Path | None:
    folder = context.node_config.get(STATES)
    return pathlib.Path(folder) / f"client_{client}.npz" if folder else None


def client_app(given: Given):
    """Build the `flwr.clientapp.ClientApp` of a deployment.

    A client's personal state is in its SuperNode's `Context.state` during the run, or
    with `state-folder="path"` in its --node-config in that folder; it is never sent.

    Args:
      given: the deployment; or a function from the run's and the node's config,
        {key: value}, to a deployment.

    Raises:
      ImportError: without Flower, or with an unsupported version.
    """
    check_library()
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @functools.cache
    def build_from(items):
        deployment = _resolve(given, dict(items))
        return deployment, build_client(deployment)

    def resolve(context):
        config = {**context.run_config, **context.node_config}
        is_built = isinstance(given, Deployment)  # once for all nodes of a process
        deployment, train = build_from(
            () if is_built else tuple(sorted(config.items()))
        )
        client: Any = context.node_config.get("partition-id")
        origin = "partition-id of the SuperNode's --node-config"
        check_client_id(origin, client, deployment.num_clients)
        return deployment, train, client

    @app.query()
    def query(message, context):
        deployment, _, client = resolve(context)
        example = describe_example(deployment.client_data(client).dataset)
        record = ConfigRecord({"id": client, "example": example})
        return Message(RecordDict({"client": record}), reply_to=message)

    @app.train()
    def train(message, context):
        _, step, client = resolve(context)
        content = message.content
        task = ClientTask(**content["task"])
        task = task._replace(key=np.array(task.key, np.uint32))
        arrays = _from_record(content["server"])
        before = ClientState.load(context, client).after(task)
        reply, personal = step(client, task, arrays, before)
        rounds = task.round + 1, task.accepted
        ClientState(task.run, rounds, personal, before).save(context, client)
        update = {
            name: Array(str(x.dtype), x.shape, RAW, x.tobytes())
            for name, x in reply.arrays.items()
        }
        reply_content = {
            "task": ConfigRecord({"run": reply.run, "round": reply.round}),
            "update": ArrayRecord(update),
            "metrics": MetricRecord(dict(reply.metrics)),
        }
        return Message(RecordDict(reply_content), reply_to=message)

    return app


def server_app(
    given: Given,
    *,
    rounds: int = 3,
    timeout: float = 3600.0,
    evaluate_fn: Callable[[int, PyTree], Mapping[str, float] | None] | None = None,
    workdir: str = "",
):
    """Build the `flwr.serverapp.ServerApp` of a deployment.

    Args:
      given: as of `client_app`, without the nodes' config.
      rounds: default of `num-server-rounds` in the run's config.
      timeout: seconds that a round waits for its clients; it continues with those that
        have answered. The first round waits as long for all clients to connect.
      evaluate_fn: (round from 1, variables of the global model) -> numbers to print, or
        None, called after every round.
      workdir: default of `workdir` in the run's config: folder that keeps the server's
        rounds and who its clients are, from which a new run goes on; "" keeps nothing.

    Raises:
      ImportError: as `client_app`.
    """
    check_library()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid, context):
        deployment = _resolve(given, dict(context.run_config))
        number = context.run_config.get(ROUNDS, rounds)
        check_values("", {ROUNDS: number}, {ROUNDS: Count})
        folder = context.run_config.get(WORKDIR, workdir)
        train_rounds(deployment, grid, number, timeout, evaluate_fn, folder)

    return app


def train_rounds(
    deployment: Deployment,
    grid,
    rounds: int,
    timeout: float = 3600.0,
    evaluate_fn: Callable[[int, PyTree], Mapping[str, float] | None] | None = None,
    workdir: str = "",
) -> PyTree:
    """Train with the clients of a Flower `Grid`; return the final server state.

    A round without enough usable answers is skipped: the server stays as it was.

    Raises:
      RuntimeError: when no client connects, or MAX_SKIPPED rounds in a row are skipped.
      ValueError: when the first round would exceed the privacy budget; later ones that
        would are not trained.
    """
    settings = describe_training(
        deployment.algorithm, deployment.settings, deployment.num_clients
    )
    with open_server_state(workdir, settings) as folder:
        nodes, num_skipped = Nodes(grid, deployment.num_clients, folder), 0
        nodes.wait(timeout)
        server = build_server(deployment, nodes.example)
        start = deployment.algorithm.init(deployment.variables)
        accepted = np.zeros(deployment.num_clients, np.int32)
        first, (state, accepted) = folder.restore((start, accepted))
        accepted = np.array(accepted)  # [N] as of `ClientTask`
        for number in range(first, affordable_rounds(server.accountant, rounds)):
            cohort = server.cohort(number)
            tasks = server.tasks(cohort, folder.run, accepted)
            answers, num_wrong = ask(server, state, nodes, tasks, timeout)
            try:
                state, metrics = server.update(state, cohort, answers, num_wrong)
                accepted[[*answers]], num_skipped = number + 1, 0
            except FloatingPointError as error:
                text, num_skipped = f"skipped ({error})", num_skipped + bool(tasks)
            else:
                numbers = {k: float(x.mean()) for k, x in metrics.items() if x.size}
                variables = deployment.algorithm.global_model(state)
                numbers |= (evaluate_fn and evaluate_fn(number + 1, variables)) or {}
                text = f"{len(answers)} of {len(tasks)} clients"
                text += "".join(f", {name} {x:.4g}" for name, x in numbers.items())
            folder.save(number + 1, (state, accepted))
            say(text, number, rounds)
            if num_skipped == min(MAX_SKIPPED, rounds):
                raise RuntimeError(
                    f"No round of the last {num_skipped} had enough usable answers. "
                    "See the log, and those of the SuperNodes, then `flwr run` again."
                )
    return state
