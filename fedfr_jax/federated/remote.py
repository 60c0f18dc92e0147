"""A round with remote clients: clients train elsewhere, the server aggregates.

The engine trains a cohort on the devices of one mesh. Here each client trains where its
examples are, and the server gets what the clients send; both exchange arrays by name. A
client's random numbers are functions of (seed, round, client), and its training, the
links of the aggregation and the server's step are the engine's, so that rounds equal
those of the simulation up to the order of additions.

A client gets its own key and never the run's, so that it cannot compute the server's
random numbers, such as the noise of a private mean.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import sums
from fedfr_jax.federated.answers import (
    Answer,
    ClientReply,
    check_counts,
    check_is_kept,
    check_numbers,
    check_round_of,
    check_weights,
    from_arrays,
    read_example,
    read_metrics,
    to_arrays,
    weights_of,
)
from fedfr_jax.federated.client import (
    Population,
    client_key,
    client_view,
    listed_rows,
    single_slot,
)
from fedfr_jax.federated.engine import (
    LaneOutput,
    RoundConstants,
    empty_prepared,
    next_server,
    train_client,
)
from fedfr_jax.federated.participation import check_participation, cohort_of_round
from fedfr_jax.federated.privacy.accountant import Accountant, check_round
from fedfr_jax.federated.privacy.mechanism import accountant_of
from fedfr_jax.federated.round_checks import check_metrics, check_rows, check_state
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.settings import Settings
from fedfr_jax.types import Algorithm, Cohort, Dataset, PyTree


class ClientData(NamedTuple):
    """Examples of one client."""

    dataset: Dataset  # of [n, ...]
    num_classes: int
    offset: int = 0  # of its first row in a table of all clients, where there is one


class Deployment(NamedTuple):
    """Settings that a server and its clients share."""

    algorithm: Algorithm
    variables: PyTree  # {"params", "batch_stats"} that the first round starts from
    client_data: Callable[[int], ClientData]  # client -> its data; asked by itself only
    num_clients: int  # N
    batching: Batching
    # Of a simulation: local_epochs, cohort_size (K), sampling, and the server's seed
    settings: Settings = Settings()
    max_weight: float = 0.0  # of a client's answer; 0: see `answers.MAX_RATIO`


def client_data_of(dataset, population: Population) -> Callable[[int], ClientData]:
    """Build a function: client -> its part of a table of all clients' examples."""

    def load(client):
        first, end = (
            int(population.offsets[client]),
            int(population.offsets[client + 1]),
        )
        rows = dataset.take(np.arange(first, end))
        return ClientData(rows, int(population.num_classes[client]), first)

    return load


def check_deployment(deployment: Deployment) -> Deployment:
    """Check that real clients can run it; return it with the cohort size K."""
    algorithm, settings = deployment.algorithm, deployment.settings
    if algorithm.prepare:
        name = algorithm.prepare.__module__.rpartition(".")[2]
        raise ValueError(
            f"{algorithm} with the `prepare` of {name} needs a server that looks at "
            "examples before a round, which real clients keep. Choose another one."
        )
    if algorithm.aggregator is None:
        raise ValueError(
            f"the server needs updates that are summed, but {algorithm} sends none. "
            "Choose an algorithm like fedavg."
        )
    settings = check_participation(settings, algorithm, deployment.num_clients)
    deployment = deployment._replace(settings=settings)
    if not callable(settings.local_epochs):
        algorithm.check_epochs(int(np.min(settings.local_epochs)))
    accountant_of_deployment(deployment)
    return deployment


def accountant_of_deployment(deployment: Deployment) -> Accountant | None:
    """Accountant of a deployment from its first round; None without privacy."""
    settings, algorithm = deployment.settings, deployment.algorithm
    sizes = deployment.num_clients, settings.cohort_size
    return accountant_of(algorithm, settings.sampling, *sizes)


# Functions of both sides.


def server_shapes(deployment: Deployment) -> PyTree:
    """Shapes of the server's state."""
    return jax.eval_shape(deployment.algorithm.init, deployment.variables)


def personal_shapes(deployment: Deployment) -> PyTree:
    """Shapes of a client's personal state."""
    init = deployment.algorithm.init_personal
    return jax.eval_shape(init, jax.random.key(0), server_shapes(deployment))


def client_round(deployment: Deployment) -> Callable:
    """Build (server, personal, slot, table, round, key) -> (sums, `LaneOutput`)."""

    def run(server, personal, slot, table, round, key):
        def view(key):
            return client_view(
                deployment.batching,
                table.num_examples,
                key,
                slot,
                empty_prepared(1),
                listed_rows(table, jnp.int32(0)),
                round,
            )

        algorithm = deployment.algorithm
        return train_client(algorithm, key, server, personal, slot, view, round)

    return run


def host_zeros(shapes: PyTree) -> PyTree:
    """Zeros of `shapes` in host memory."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def sent_parts(deployment: Deployment, total: PyTree, lane: LaneOutput) -> PyTree:
    """Arrays that a client sends; with privacy, only those the mechanism covers."""
    if deployment.algorithm.privacy:
        return {"sum": total}
    return {"sum": total, "client": lane._replace(personal=(), metrics={})}


# A client.


class ClientTask(NamedTuple):
    """Inputs of a client for a round, except the server's arrays."""

    run: str  # name of the training, the same in every round
    round: int
    accepted: int  # 1 + the last round in which the server has used an answer; 0: none
    key: np.ndarray  # uint32 [.]: the client's own, the same in every round
    cohort_index: int
    is_random_client: bool


def describe_example(dataset: Dataset) -> str:
    """Shapes and dtypes of one example, as JSON: what a server needs of the data."""

    def describe(x):
        return [list(x.shape[1:]), str(jax.dtypes.canonicalize_dtype(x.dtype))]

    return json.dumps(jax.tree.map(describe, dataset._asdict()))


def build_client(deployment: Deployment) -> Callable:
    """Build the function that trains one client:

        (client, ClientTask, arrays, personal) -> (ClientReply, personal)

    `arrays` are what it reads of the server's state, see `RemoteServer.received`;
    `personal` is its state after the last round that it took part in, {} before. It
    raises ValueError for arrays of another algorithm or network, and FloatingPointError
    where the state that stays would not be finite.
    """
    run, zeros = (
        jax.jit(client_round(deployment)),
        host_zeros(server_shapes(deployment)),
    )
    new_row = host_zeros(personal_shapes(deployment))

    def train(client, task, arrays, personal):
        data = deployment.client_data(client)
        server = from_arrays({**to_arrays(zeros), **arrays}, zeros)
        row = from_arrays(personal, new_row) if personal else new_row
        steps = deployment.batching.steps_per_epoch(data.dataset.num_examples)
        epochs = np.asarray(deployment.settings.epochs(task.round))
        epochs = int(epochs[client] if epochs.ndim else epochs)
        slot = single_slot(
            num_classes=data.num_classes,
            offset=data.offset,
            num_examples=data.dataset.num_examples,
            client=client,
            cohort_index=task.cohort_index,
            is_new=not personal,
            num_steps=steps * epochs,
            is_random_client=task.is_random_client,
        )
        key, round = jax.random.wrap_key_data(task.key), np.int32(task.round)
        total, lane = jax.device_get(run(server, row, slot, data.dataset, round, key))
        rows = jax.tree.map(lambda x: x[None], lane.personal)
        check_rows(rows, np.array([client]), task.round)
        is_private = deployment.algorithm.privacy is not None
        metrics = {} if is_private else jax.tree.map(float, lane.metrics)
        sent = to_arrays(sent_parts(deployment, total, lane))
        reply = ClientReply(task.run, task.round, sent, metrics)
        return reply, to_arrays(lane.personal)

    return train


# The server.


def asked_clients(cohort: Cohort) -> np.ndarray:
    """Ids of the sampled clients of a round; a Poisson cohort has further places."""
    part = cohort.participation
    return cohort.ids if part is None else cohort.ids[part.is_present]


class RemoteServer(NamedTuple):
    """Server of remote clients; its state is the algorithm's server state."""

    deployment: Deployment
    received: tuple[str, ...]  # names of the state's leaves that clients read
    total: PyTree  # shapes of what a client adds to the sums
    lane: LaneOutput  # shapes of a client's own output
    accountant: Accountant | None
    # (state, total, lanes [1, K, 1, ...], round) -> (state, metrics), compiled
    finish: Callable

    def cohort(self, round: int) -> Cohort:
        """Sample the cohort of a round, as in a simulation.

        Raises:
          ValueError: when the round would overspend the privacy budget.
        """
        check_round(self.accountant, round)
        deployment = self.deployment
        return cohort_of_round(deployment.settings, deployment.num_clients, round)

    def tasks(
        self,
        cohort: Cohort,
        run: str = "",
        accepted: np.ndarray | None = None,
    ) -> dict[int, ClientTask]:
        """Return {client: its `ClientTask`} for the sampled clients.

        Args:
          accepted: [N] as of the task; None: not known.
        """
        seed, asked = self.deployment.settings.seed, asked_clients(cohort).tolist()
        random_id = random_client(np.array(asked, int), seed, cohort.round)
        keys = {k: client_key(jax.random.key(seed), k) for k in asked}
        return {
            client: ClientTask(
                run=run,
                round=cohort.round,
                accepted=0 if accepted is None else int(accepted[client]),
                key=np.asarray(jax.random.key_data(keys[client])),
                cohort_index=i,
                is_random_client=client == random_id,
            )
            for i, client in enumerate(cohort.ids.tolist())
            if client in keys
        }

    def arrays(self, state: PyTree) -> dict[str, np.ndarray]:
        """Arrays of the server's state that clients read."""
        arrays = to_arrays(state)
        return {name: arrays[name] for name in self.received}

    def accept(
        self, replies: Mapping[int, ClientReply], tasks: Mapping[int, ClientTask]
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Check the answers of a round: ({client: `Answer`}, {client: what is wrong}).

        One that is wrong in anything is left out, as if it were lost.
        """
        accepted, wrong = {}, {}
        for client, reply in replies.items():
            try:
                check_round_of(reply, tasks[client].run, tasks[client].round)
                accepted[client] = self.unpack(reply)
            except ValueError as error:
                wrong[client] = str(error)
        too_heavy = check_weights(accepted, self.deployment.max_weight)
        return {k: x for k, x in accepted.items() if k not in too_heavy}, (
            wrong | too_heavy
        )

    def unpack(self, reply: ClientReply) -> Answer:
        """Read a client's answer.

        Raises:
          ValueError: for one of another algorithm or network, or numbers that no client
            can have, whatever its own flags say.
        """
        is_private = self.deployment.algorithm.privacy is not None
        expected = sent_parts(self.deployment, self.total, self.lane)
        sent = from_arrays(reply.arrays, expected)
        check_numbers(sent)
        metrics = read_metrics(reply.metrics, {} if is_private else self.lane.metrics)
        total, lane = sent["sum"], host_zeros(self.lane)._replace(is_finite=np.True_)
        if is_private:
            check_counts(total[0].extra)
        else:
            lane = sent["client"]._replace(metrics=metrics)
            check_is_kept(lane)
        return Answer(total, lane, weights_of(total, lane, not is_private))

    def update(
        self,
        state: PyTree,
        cohort: Cohort,
        answers: Mapping[int, Answer],
        num_wrong: int = 0,
    ) -> tuple[PyTree, dict[str, np.ndarray]]:
        """Aggregate the answers of a round and update the server.

        Args:
          answers: of `accept`, by client; without those that have not answered.
          num_wrong: number of answers that `accept` left out.

        Returns:
          the state, and metrics {name: [n]} of the clients that have, by ascending id.

        Raises:
          FloatingPointError: for too few answers, or a server that would not be
            finite; nothing has changed then.
        """
        self.check_enough(cohort, len(answers), num_wrong)
        total, lanes = sums.zero_sums(self.total), []
        for client in cohort.ids.tolist():
            is_received, lane = client in answers, host_zeros(self.lane)
            if is_received:
                total = add_sums(total, answers[client].total)
                lane = answers[client].lane
            lanes.append(lane._replace(is_received=np.bool_(is_received)))
        stacked = jax.tree.map(lambda *x: np.stack(x)[None, :, None], *lanes)
        round = cohort.round
        state, metrics = self.finish(state, total, stacked, np.int32(round))
        is_received = np.array([lane.is_received for lane in lanes])
        metrics = {k: x[is_received] for k, x in jax.device_get(metrics).items()}
        return state, self.checked(state, metrics, cohort.ids[is_received], round)

    def check_enough(self, cohort: Cohort, number: int, num_wrong: int) -> None:
        """Raise FloatingPointError for too few answers to aggregate."""
        algorithm, num_asked = self.deployment.algorithm, len(asked_clients(cohort))
        least = algorithm.aggregator.min_clients if algorithm.aggregator else 1
        least = max(least, min(num_asked, 1))
        least = max(least, math.ceil(algorithm.min_kept * (number + num_wrong)))
        if number < least:
            raise FloatingPointError(
                f"a round must have usable answers of at least {least} clients, got "
                f"{number}"
            )

    def checked(self, state, metrics: dict, ids: np.ndarray, round: int) -> dict:
        """Check metrics [n] and the state of a round; add the epsilon spent."""
        if self.deployment.algorithm.privacy:  # clients have not sent their metrics
            metrics = {k: x for k, x in metrics.items() if k not in self.lane.metrics}
        metrics = check_metrics(metrics, ids, round)
        check_state(state, f"round {round + 1}")
        if self.accountant:
            epsilon = self.accountant.epsilon_bound(round + 1)
            metrics["epsilon"] = np.full(len(ids), epsilon)
        return metrics


add_sums = jax.jit(sums.add_sums)


def build_server(deployment: Deployment, example: str) -> RemoteServer:
    """Build the server for clients with examples of the given shapes.

    Args:
      example: of `describe_example`, as a client sends it.
    """
    table = read_example(example)
    state, slot = server_shapes(deployment), single_slot(num_examples=1, num_classes=1)
    arguments = state, personal_shapes(deployment), slot, table
    trace = jax.make_jaxpr(client_round(deployment), return_shape=True)
    program, (total, lane) = trace(*arguments, np.int32(0), jax.random.key(0))
    used = {id(x) for step in program.jaxpr.eqns for x in step.invars}
    used |= {id(x) for x in program.jaxpr.outvars}
    pairs = zip(trees.by_name(state), program.jaxpr.invars, strict=False)
    read = [name for name, x in pairs if id(x) in used]
    key = jax.random.key(deployment.settings.seed)

    @jax.jit
    def finish(state, total, lanes, round):
        order = jnp.arange(lanes.weight.shape[1])
        extra = empty_prepared(1)._replace(num_added=())
        constants = RoundConstants(extra, round, key, hyper=())
        return next_server(deployment.algorithm, state, total, lanes, order, constants)

    return RemoteServer(
        deployment=deployment,
        received=tuple(read),
        total=total,
        lane=lane._replace(personal=()),
        accountant=accountant_of_deployment(deployment),
        finish=finish,
    )
