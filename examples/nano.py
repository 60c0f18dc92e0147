"""Federated averaging of a cohort, in one file of plain JAX.

    python examples/nano.py

This is what the library's engine does, without its features: nothing here imports the
library, and a test compares the numbers with the engine's. The page "Read the code"
(docs/explanation/read-the-code.md) walks from here through the library.

Letters: N clients, K cohort, S local steps, B batch, L lanes, T examples.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Clients(NamedTuple):
    """Examples of all clients, those of a client one after another."""

    x: np.ndarray  # [T, ...]
    y: np.ndarray  # [T]
    offsets: np.ndarray  # [N + 1]: client i has the rows offsets[i] to offsets[i + 1]


class Schedule(NamedTuple):
    """What the clients of a cohort read in their local steps: rows of `Clients`."""

    rows: np.ndarray  # [K, S, B] int32; 0 where is_valid is False
    is_valid: np.ndarray  # [K, S, B]


def group(x, y, client_ids) -> Clients:
    """Sort examples by client."""
    order = np.argsort(client_ids, kind="stable")
    counts = np.bincount(client_ids)
    return Clients(x[order], y[order], np.concatenate([[0], np.cumsum(counts)]))


def sample_cohort(rng, num_clients: int, cohort_size: int) -> np.ndarray:
    """Draw K clients, without replacement."""
    return rng.choice(num_clients, cohort_size, replace=False)


def plan_steps(
    clients: Clients, cohort, *, epochs: int, batch_size: int, rng=None
) -> Schedule:
    """Divide each client's rows into batches, epoch by epoch, shuffled with an `rng`.

    Clients differ in their number of examples, programs do not: everybody has as many
    steps as the client with the most, and a mask says which entries are real.
    """
    batches = []
    for client in cohort:
        rows = np.arange(clients.offsets[client], clients.offsets[client + 1])
        steps = []
        for _ in range(epochs):
            mixed = rng.permutation(rows) if rng else rows
            steps += np.split(mixed, range(batch_size, len(rows), batch_size))
        batches.append(steps)
    shape = len(batches), max(map(len, batches)), batch_size
    schedule = Schedule(np.zeros(shape, np.int32), np.zeros(shape, bool))
    for i, steps in enumerate(batches):
        for j, batch in enumerate(steps):
            schedule.rows[i, j, : len(batch)] = batch
            schedule.is_valid[i, j, : len(batch)] = True
    return schedule


def apply(params, x):
    """A linear classifier, [B, D] -> logits [B, M]."""
    return x @ params["w"] + params["b"]


def loss(params, x, y, is_valid):
    """Mean cross-entropy of the valid examples of a batch [B]."""
    log_probabilities = jax.nn.log_softmax(apply(params, x))
    losses = -jnp.take_along_axis(log_probabilities, y[:, None], axis=1)[:, 0]
    return jnp.where(is_valid, losses, 0).sum() / jnp.maximum(is_valid.sum(), 1)


def train_client(params, x, y, rate, schedule):
    """One client: S steps of SGD from the global model.

    Args:
      x, y: the examples of all clients, on the device.
      schedule: this client's, [S, B].

    Returns:
      (update: what it changed, weight [], its number of examples in the steps).
    """

    def step(current, batch):
        rows, is_valid = batch
        grads = jax.grad(loss)(current, x[rows], y[rows], is_valid)
        # A step without examples changes nothing: its mask is all False.
        is_real = is_valid.any()
        moved = jax.tree.map(lambda p, g: p - rate * g, current, grads)
        return jax.tree.map(partial(jnp.where, is_real), moved, current), None

    end, _ = jax.lax.scan(step, params, (schedule.rows, schedule.is_valid))
    update = jax.tree.map(jnp.subtract, end, params)
    return update, schedule.is_valid.sum().astype(jnp.float32)


@partial(jax.jit, static_argnames="lanes")
def run_round(params, x, y, rate, schedule, *, lanes: int):
    """One round: local training of the cohort, and the weighted mean of the updates.

    The cohort is trained in waves of L clients at once: `lanes` is how much memory is
    used, and changes nothing else.
    """
    train = partial(train_client, params, x, y, rate)
    updates, weights = jax.lax.map(train, schedule, batch_size=lanes)
    shares = weights / weights.sum()
    change = jax.tree.map(lambda leaf: jnp.tensordot(shares, leaf, axes=1), updates)
    return jax.tree.map(jnp.add, params, change)


def train(
    clients: Clients,
    params,
    *,
    rounds: int,
    cohort_size: int,
    epochs: int = 1,
    batch_size: int = 5,
    rate: float = 0.1,
    lanes: int = 4,
    seed: int = 0,
):
    """Train for some rounds; returns the global model."""
    x, y = jnp.asarray(clients.x), jnp.asarray(clients.y)
    num_clients = len(clients.offsets) - 1
    for number in range(rounds):
        # Randomness is a function of (seed, round): a run that resumes draws the same.
        rng = np.random.default_rng([seed, number])
        cohort = sample_cohort(rng, num_clients, cohort_size)
        schedule = plan_steps(
            clients, cohort, epochs=epochs, batch_size=batch_size, rng=rng
        )
        params = run_round(params, x, y, rate, schedule, lanes=lanes)
    return params


def main(rounds=20):
    """Train on linear data of 50 clients; returns the accuracy."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 16)).astype(np.float32)
    y = (x @ rng.normal(size=16) > 0).astype(np.int32)
    clients = group(x, y, rng.integers(0, 50, len(x)))
    params = {"w": jnp.zeros((16, 2)), "b": jnp.zeros(2)}
    params = train(clients, params, rounds=rounds, cohort_size=10)
    accuracy = float((apply(params, x).argmax(1) == y).mean())
    print(f"accuracy of the global model: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
