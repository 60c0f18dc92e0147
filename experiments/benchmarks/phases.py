"""Where a round of this engine spends its time, and how near the arithmetic it is."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated import simulation
from fedfr_jax.federated.disclosure import count_work
from fedfr_jax.federated.engine import Program
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.sampling import sample_cohort


def median_seconds(function, repeats: int = 3) -> float:
    """Median wall time of a call, after one that is not counted."""
    taken = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))


def seconds(sim, server, work, test) -> dict:
    """Median seconds of a round's parts, each measured on its own, and of evaluating.

    A round of no local epochs runs the same compiled code but the steps: what is left
    is the transfer and the schedule on the host, and the copies and sums of `run`.
    FedFR's frozen features of the server's backbone count with the former, those of
    the clients' previous ones with the latter.
    """
    store = simulation.open_store(sim, server)
    inside, whole = [], sim.programs.run_whole

    def timed(*arguments):
        begin = time.perf_counter()
        result = jax.block_until_ready(whole(*arguments))
        inside.append(time.perf_counter() - begin)
        return result

    def play(sim):
        inside.clear()
        total = median_seconds(lambda: advance(sim.runs, server, [store], 0)[0])
        return total, float(np.median(inside[1:]))

    timed.lower = whole.lower  # guarded like a round's own
    sim = sim._replace(programs=sim.programs._replace(run_whole=Program(timed)))
    total, run = play(sim)
    settings = sim.settings._replace(local_epochs=lambda round: 0)
    _, idle = play(sim._replace(settings=settings))
    size = (sim.settings.seed, 1, work.population, work.cohort)
    sample = median_seconds(lambda: sample_cohort(*size))
    return {
        "sample": sample,
        "schedule, transfer, store": total - run - sample,
        "train": run - idle,
        "aggregate": idle,
        "evaluate": median_seconds(test) if test else 0.0,
    }


def step_flops(sim, server, algorithm) -> float:
    """Operations of one local step's products and convolutions.

    Args:
      algorithm: that of `sim` on a network with XLA's own convolutions.
    """
    store = simulation.open_store(sim, server)
    return count_work(
        sim._replace(algorithm=algorithm), server, store.template
    ).flops_per_step


def matmul_rate(size: int = 1024) -> float:
    """Operations per second of one matrix product on every device at once."""
    devices = jax.devices()
    ones = [jax.device_put(jnp.ones((size, size)), device) for device in devices]
    product = jax.jit(lambda x: x @ x)
    taken = median_seconds(lambda: [product(x) for x in ones], 15)
    return len(devices) * 2 * size**3 / taken
