"""What cost_model.py's formula needs of this machine, in CPU seconds of all threads.

    python experiments/benchmarks/measured_costs.py

CPU seconds are disturbed less by a busy machine than wall time.

A step is timed alone, outside of the engine; an empty client by a round of the scalar
model of overhead.py; memory by adding two long vectors; whole rounds as ours.py plays
them. One JAX device, so that CPU seconds are device seconds.
"""

import json
import time

import jax
import jax.numpy as jnp
import ours
import overhead
import phases
import workloads

from fedfr_jax.federated import simulation
from fedfr_jax.federated.engine import Program
from fedfr_jax.models import MODELS
from fedfr_jax.types import Batch

WORKLOADS = ("mlp_many", "emnist_cnn", "cifar_cnn")


def cpu_seconds(function, repeats: int) -> float:
    """Fastest CPU time of a call, after one that is not counted."""
    taken = []
    for _ in range(1 + repeats):
        begin = time.process_time()
        jax.block_until_ready(function())
        taken.append(time.process_time() - begin)
    return min(taken[1:])


def step_seconds(work, data, steps: int) -> float:
    """A local step of one client: gradient and update, in a loop as in training."""
    loss, variables, _ = ours.classification(work)
    images, labels = jnp.asarray(data.images[0]), jnp.asarray(data.labels[0])

    def batch(step):
        place = (jnp.arange(work.batch_size) + step) % work.examples
        nothing = jnp.zeros(work.batch_size, bool)
        return Batch(
            inputs={"image": images[place]},
            targets={"label": labels[place]},
            num_classes=jnp.int32(work.num_classes),
            is_valid=~nothing,
            is_added=nothing,
            row=place,
            position=place,
            view_index=jnp.zeros_like(place),
        )

    @jax.jit
    def train(params):
        def step(i, params):
            of = lambda p: loss({**variables, "params": p}, batch(i), None)[0]
            gradient = jax.grad(of)(params)
            return jax.tree.map(lambda p, g: p - work.rate * g, params, gradient)

        return jax.lax.fori_loop(0, steps, step, params)

    return cpu_seconds(lambda: train(variables["params"]), 3) / steps


def memory_rate(size: int = 2**24) -> float:
    """Bytes per second of adding two vectors that no cache holds."""
    x, y = jnp.ones(size), jnp.ones(size)
    add = jax.jit(jnp.add)
    return 3 * 4 * size / cpu_seconds(lambda: add(x, y), 10)


def client_seconds(clients: int = 1000) -> dict:
    """Per client of a round of the scalar model: on the host, and in the call."""
    sim, server, store = overhead.empty(clients, 1)
    state = {"server": server, "round": 0}
    inside, run = [], sim.programs.run_whole

    def timed(*arguments):
        jax.block_until_ready(arguments)
        begin = time.process_time()
        result = jax.block_until_ready(run(*arguments))
        inside.append(time.process_time() - begin)
        return result

    timed.lower = run.lower  # guarded like a round's own
    programs = sim.programs._replace(run_whole=Program(timed))
    timed_sim = sim._replace(programs=programs)

    def play():
        server, _ = simulation.simulate_round(
            timed_sim, state["server"], store, state["round"]
        )
        state.update(server=server, round=state["round"] + 1)
        return server

    total = cpu_seconds(play, 20)
    device = min(inside[1:])
    return {
        "host_client": (total - device) / clients,
        "device_client": device / clients,
    }


def workload(name: str, rounds: int = 3) -> dict:
    """A row of MEASURED."""
    work = workloads.WORKLOADS[name]
    data = workloads.make_data(work)
    sim, server, _ = ours.build(work, data)
    flops = phases.step_flops(sim, server, ours.counted(work))
    state = {"server": server, "round": 0}
    store = simulation.open_store(sim, server)

    def play():
        server, _ = simulation.simulate_round(
            sim, state["server"], store, state["round"]
        )
        state.update(server=server, round=state["round"] + 1)
        return server

    spent = cpu_seconds(play, rounds)
    model = MODELS[work.model](work.input_shape).init(jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(model["params"]))
    step = step_seconds(work, data, 20)
    return {
        "cpu_seconds": spent,
        "flops": flops / step,
        "step_seconds": step,
        "work": {
            "population": work.population,
            "cohort": work.cohort,
            "examples": work.examples,
            "batch": work.batch_size,
            "epochs": work.epochs,
            "parameters": size,
            "forward": flops / 3 / work.batch_size,
        },
    }


def main():
    """Print CONSTANTS, then a line of MEASURED per workload."""
    constants = {"memory": memory_rate(), **client_seconds()}
    print(json.dumps({"device": jax.devices()[0].device_kind, **constants}), flush=True)
    for name in WORKLOADS:
        print(json.dumps({name: workload(name)}), flush=True)


if __name__ == "__main__":
    main()
