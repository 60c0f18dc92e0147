"""Asynchronous rounds: FedBuff and FedAsync.

Some clients train at any time, each from the server's model at its start. An update
that arrives is put into a buffer, and another client starts; when the buffer has B
updates, the server takes a step and has a new version. An update was trained from a
version that is t steps old, and is weighted by s(t).

FedBuff: Nguyen et al. 2022, arXiv:2106.06639, algorithm 1: x <- x + (1 / B) sum_i
s(t_i) d_i, s(t) = 1 / sqrt(1 + t), then the server's optimizer.

FedAsync: Xie et al. 2019, arXiv:1903.03934: B = 1 and x <- (1 - a_t) x + a_t x_i, a_t =
mixing s(t), s(t) = (1 + t)^-a.

A round of the engine is one step of the server: its cohort are the clients of a buffer,
which train when they arrive, from versions of the server in a ring [R, ...] in its
tree. The order of events is known before training, because durations are computed and
not measured; the clients in training are in the server's tree too, so a run resumes to
the same bits. Deviations: a client is not asked again while its update is in the
buffer; a client that drops out, before or after training, or whose version is no longer
in the ring, changes nothing, not even its personal state.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.systems.state import WithSystems, as_bits, as_seconds
from fedfr_jax.ranges import Count, NonNegative, PositiveShare, Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, AnyArray, Cohort, Participation


class Asynchronous(NamedTuple):
    """When the server takes a step, and how it weights stale updates."""

    concurrency: int  # M clients that train at any time
    buffer_size: int = 10  # B updates of a step
    max_staleness: int = 20  # R - 1 steps; later updates are not used
    staleness_exponent: float = 0.5  # s(t) = (1 + t)^-a
    mixing: float | None = None  # of FedAsync; None: FedBuff


@checked
def fedbuff(
    *,
    concurrency: Count,
    buffer_size: Count = 10,
    max_staleness: Whole = 20,
    staleness_exponent: NonNegative = 0.5,
) -> Asynchronous:
    """FedBuff: server steps on buffered updates, scaled down by their staleness.

    Weights of clients are the algorithm's own; the paper's are `weighting="uniform"`.
    """
    return Asynchronous(concurrency, buffer_size, max_staleness, staleness_exponent)


@checked
def fedasync(
    *,
    concurrency: Count,
    mixing: PositiveShare = 0.6,
    max_staleness: Whole = 20,
    staleness_exponent: NonNegative = 0.5,
) -> Asynchronous:
    """FedAsync: every model that arrives is mixed into the server's."""
    return Asynchronous(concurrency, 1, max_staleness, staleness_exponent, mixing)


def check_asynchronous(settings: Asynchronous, num_clients: int) -> None:
    """Raise ValueError for more training clients than there are."""
    busy = settings.concurrency + settings.buffer_size
    if busy > num_clients:
        raise ValueError(
            f"asynchronous.concurrency + buffer_size must be at most {num_clients}, "
            f"the number of clients, got {busy}."
        )


LOST = -1  # version of a client that drops out


class UnderWay(NamedTuple):
    """Asynchronous systems state: the M clients in training, and the time."""

    clock: AnyArray  # [2] int32, see `as_seconds`
    client: AnyArray  # [M] int32
    version: AnyArray  # [M] int32 that it has begun from, or LOST
    end: AnyArray  # [M, 2] int32, when it arrives
    num_begun: AnyArray  # [] int32 clients that have begun so far


class Begun(NamedTuple):
    """A client that has started to train."""

    client: int
    end: float  # seconds, when its update arrives
    is_lost: bool  # it never does, which is noticed then


def with_versions(algorithm: Algorithm, settings: Asynchronous) -> Algorithm:
    """Let an algorithm's clients start from earlier versions of its server.

    A client's `round` is the one that it has begun in; what it sends is scaled by its
    staleness.
    """
    if settings.mixing is not None:
        _check_mixing(algorithm)
    inner, number = on_inner(algorithm), settings.max_staleness + 1

    def init(variables):
        server = algorithm.init(variables)
        versions = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), server
        )
        count = settings.concurrency
        state = UnderWay(
            clock=jnp.zeros(2, jnp.int32),
            client=jnp.zeros(count, jnp.int32),
            version=jnp.zeros(count, jnp.int32),
            end=jnp.zeros((count, 2), jnp.int32),
            num_begun=jnp.int32(0),
        )
        return WithSystems(server, state, versions)

    def begun_from(server, client):
        place = jax.lax.rem(client.round, jnp.int32(number))
        return jax.tree.map(lambda x: x[place], server.versions)

    def client_update(key, server, personal, client):
        start = begun_from(server, client)
        output = algorithm.client_update(key, start, personal, client)
        since = jnp.asarray(client.staleness, jnp.float32) + 1
        scale, update = since**-settings.staleness_exponent, output.update
        if settings.mixing is not None:
            scale = settings.mixing * scale
            old = variable_split.shared(algorithm.global_model(start))
            new = variable_split.shared(algorithm.global_model(server.inner))
            update = jax.tree.map(lambda d, a, b: d + (a - b), update, old, new)
        scaled = jax.tree.map(lambda x: x * scale.astype(x.dtype), update)
        return output._replace(update=scaled)

    def server_update(server, result):
        server = inner.server_update(server, result)
        place = jax.lax.rem(result.round + 1, jnp.int32(number))
        put = lambda x, new: x.at[place].set(new)
        versions = jax.tree.map(put, server.versions, server.inner)
        return server._replace(versions=versions)

    return inner._replace(
        init=init, client_update=client_update, server_update=server_update
    )


def _check_mixing(algorithm: Algorithm) -> None:
    if algorithm.update_like is not None or algorithm.aggregator is None:
        raise ValueError(
            "asynchronous.mixing needs an algorithm whose update is a change of the "
            f"model, got {algorithm}. Use fedbuff."
        )


def next_buffer(
    settings: Asynchronous, state: UnderWay, round: int, begin: Callable
) -> Cohort:
    """Clients of the server's next step, with the systems state after it.

    Args:
      round: the server's version.
      begin: (number of the start, time, clients that are busy, version) -> `Begun`.
    """
    clock, count = float(as_seconds(state.clock)), int(state.num_begun)
    queue = _queue_of(state) if count else []
    buffer = {}  # {client: staleness}

    def start(version):
        nonlocal count
        busy = [client for _, client, _ in queue] + [*buffer]
        begun = begin(count, clock, busy, version)
        version = LOST if begun.is_lost else version
        heapq.heappush(queue, (begun.end, begun.client, version))
        count += 1

    while len(queue) < settings.concurrency:
        start(round)
    while len(buffer) < settings.buffer_size:
        clock, client, version = heapq.heappop(queue)
        if version != LOST and round - version <= settings.max_staleness:
            buffer[client] = round - version
        if len(buffer) < settings.buffer_size:
            start(round)
    ids = np.array(sorted(buffer))
    staleness = np.array([buffer[client] for client in ids.tolist()])
    buffer.clear()  # the server has taken its step
    start(round + 1)
    all_clients = np.ones(len(ids), bool)
    part = Participation(all_clients, all_clients, staleness=staleness)
    return Cohort(ids, round, part, _state_of_queue(queue, clock, count))


def _queue_of(state: UnderWay) -> list[tuple[float, int, int]]:
    """Heap of (arrival time, client, version) of the clients in training."""
    columns = as_seconds(state.end), state.client, state.version
    return [*zip(*(x.tolist() for x in columns), strict=True)]


def _state_of_queue(queue: list, clock: float, count: int) -> UnderWay:
    """Inverse of `_queue_of`; an ascending list is a heap."""
    end, client, version = zip(*sorted(queue), strict=True)
    return UnderWay(
        clock=as_bits(clock),
        client=np.array(client, np.int32),
        version=np.array(version, np.int32),
        end=as_bits(end),
        num_begun=np.int32(count),
    )
