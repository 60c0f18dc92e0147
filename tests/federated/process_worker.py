"""One process of a small federated run: python -m tests.federated.process_worker.

[--devices=D] [--model_shards=M] [--lanes=L] [--stop=R] [--kill=R] [--table=stream]
[--per_call=R] [--disagree=1] [--bucket=URL]
--algorithms=a,b --workdir=DIR and, among several, the flags that `launch` gives.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys

import numpy as np

from fedfr_jax import distributed
from fedfr_jax.federated.settings import Federation, Settings

ROUNDS = 5


def main(argv):
    given = dict(word.removeprefix("--").split("=", 1) for word in argv)
    devices = f"{distributed.DEVICES_FLAG}={given.get('devices', 2)}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"  # the last one counts
    os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    distributed.use_every_core()
    if "coordinator" in given:
        number, count = int(given["process_id"]), int(given["num_processes"])
        distributed.join(given["coordinator"], count, number)
    is_victim = given.get("process_id") == "1" and kill_now(given)
    kill = int(given["kill"]) if is_victim else 0
    with contextlib.ExitStack() as stack:
        url = given.get("bucket")
        bucket = stack.enter_context(open_bucket(url)) if url else None
        for name in given["algorithms"].split(","):
            folder = pathlib.Path(given["workdir"]) / name
            run(
                name,
                folder,
                int(given.get("stop", ROUNDS)),
                kill=kill,
                streamed=given.get("table") == "stream",
                model_shards=int(given.get("model_shards", 1)),
                lanes=int(given.get("lanes", 1)),
                per_call=int(given.get("per_call", 0)),
                bucket=bucket,
            )
    if "disagree" in given:
        folder, port = given["workdir"], int(given["coordinator"].rpartition(":")[2])
        disagree(pathlib.Path(folder), port)


@contextlib.contextmanager
def open_bucket(url):
    """The run in a bucket, from which nothing may be gathered by the devices."""
    import jax

    from fedfr_jax import mesh as meshes
    from fedfr_jax.runs.buckets import open_run

    def refuse(tree):
        raise AssertionError("client states passed through devices")

    meshes.gather_processes = refuse
    with open_run(url, jax.process_index(), jax.process_count()) as bucket:
        with bucket.shared():
            yield bucket


def disagree(folder, port):
    """Process 1 cannot read the last checkpoint: I.txt is what process I then has.

    listens.txt has the addresses at which process 0 listens for the others.
    """
    import jax

    from fedfr_jax import mesh as meshes
    from fedfr_jax.runs.checkpoint import Checkpointer

    here = meshes.replicated(meshes.make_mesh())
    state = lambda x: meshes.put_global({"w": np.full(3, x, np.float32)}, here)
    if meshes.is_first_process():
        tables = [pathlib.Path("/proc/net", x).read_text() for x in ("tcp", "tcp6")]
        listening = [x.split()[1] for x in "".join(tables).splitlines() if " 0A " in x]
        at = [x.rpartition(":") for x in listening]
        own = [address for address, _, number in at if int(number, 16) == port]
        (folder / "listens.txt").write_text(" ".join(own))
    checkpointer = Checkpointer(folder / "checkpoints")
    for step in (1, 2):
        checkpointer.save(step, state(step))
    honest = checkpointer._handler.restore

    def restore(path, **rest):
        if path.parent.name == "2" and jax.process_index() == 1:
            raise ValueError("a bad checksum")
        return honest(path, **rest)

    checkpointer._handler.restore = restore
    try:
        says = f"restored {checkpointer.restore(state(0))}"
    except (ValueError, OSError) as error:
        says = str(error)
    (folder / f"{jax.process_index()}.txt").write_text(says)


def kill_now(given):
    """Whether this start is the one that ends badly: the first."""
    marker = pathlib.Path(given["workdir"]) / "killed"
    if "kill" not in given or marker.exists():
        return False
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return True


def run(
    name,
    folder,
    stop,
    *,
    kill=0,
    streamed=False,
    model_shards=1,
    lanes=1,
    per_call=0,
    bucket=None,
):
    """Start or go on under `folder` up to round `stop`; result.npz has the end.

    Of a run in a bucket, with checkpoints of every second round, moved-I.json has what
    process I sends and receives: [exchange, rows, rows].

    With `per_call` rounds in a call sums are reproducible, and nothing is due but the
    last checkpoint. Of a stream, read-I.npz says which rows process I read and whose
    they should be.
    """
    import jax

    from fedfr_jax import mesh as meshes
    from fedfr_jax.data.stream import stream
    from fedfr_jax.federated import model_parallel
    from fedfr_jax.federated.simulation import build_simulation, start_simulation
    from fedfr_jax.runs import loop
    from fedfr_jax.runs.trackers import open_sinks
    from tests.federated import toys

    if model_shards > 1:
        model_parallel.SMALLEST = 16  # the toys' leaves are small
    algorithm, variables = TOYS[name](toys)
    table, population = toys.problem()
    rows_read, clients = [], []
    if streamed:
        read = lambda rows, images=table.images: rows_read.append(rows) or images[rows]
        memory = 2 * 12 * 68  # a client at a time
        table = stream(read, table.labels, memory=memory * (20 if per_call else 1))
        rows_read.clear()
    sim = build_simulation(
        algorithm,
        toys.feed(),
        table,
        population,
        Settings(
            cohort_size=4,
            clients_per_device=lanes,
            local_epochs=2,
            seed=3,
            reproducible_sum=per_call > 0,
            num_partial_sums=2,
        ),
        mesh=meshes.make_mesh(0, model_shards),
    )
    folder.mkdir(parents=True, exist_ok=True)
    start, place, lifecycle = start_simulation(sim, variables), folder, loop.Lifecycle()
    if bucket:
        place, mirror = bucket.path / name, bucket.mirror
        lifecycle = loop.Lifecycle(mirror.upload, objects=mirror)
        state = loop.resume(sim, start, place, is_mirrored=True, objects=mirror)
    else:
        state = loop.resume(sim, start, folder)
    sim, server, store, checkpointer, first = state
    moved = watch_exchange(store) if bucket and jax.process_count() > 1 else []

    def killer(round, scalars):
        if kill and round == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    gather = store.gather
    note = lambda ids: clients.append(ids[ids >= 0])
    store.gather = lambda ids, *readers: note(ids) or gather(ids, *readers)
    with open_sinks(place, ROUNDS, first, title=name) as sinks:
        nothing = lambda server, store: {}
        sinks = [*sinks, toys.Watcher(killer)]
        due = Federation()
        if per_call:
            every = 2 if bucket else 0
            due = Federation(checkpoint_every=every, rounds_per_call=per_call)
        to = loop.RunOutputs(state, nothing, due, sinks, lifecycle)
        server = loop.train(sim.runs, server, [to], first, stop)
    cut = [x for x in jax.tree.leaves(server) if not x.sharding.is_fully_replicated]
    assert bool(cut) == (model_shards > 1)
    checkpointer.close()
    server = meshes.fetch(server)
    own = [np.arange(*population.offsets[i : i + 2]) for x in clients for i in x]
    if streamed:
        path = folder / f"read-{jax.process_index()}.npz"
        np.savez(path, read=np.concatenate(rows_read), own=np.concatenate(own))
    rows, is_new = gather(np.arange(len(toys.SIZES)))
    if meshes.is_first_process():
        leaves = jax.tree.leaves((server, rows))
        np.savez(folder / "result.npz", *leaves, is_new)
        if bucket:
            shutil.copy(place / "metrics.jsonl", folder)
    if bucket:
        path = folder / f"moved-{jax.process_index()}.json"
        path.write_text(json.dumps(moved))


def watch_exchange(store):
    """List of [exchange, rows sent, rows received], as it grows."""
    moved, exchange = [], store._exchange
    pass_on = exchange.pass_on

    def counted(name_of_store, name, plan, sent):
        received = pass_on(name_of_store, name, plan, sent)
        moved.append([name, len(sent), len(received)])
        return received

    exchange.pass_on = counted
    return moved


def result(folder):
    """(arrays, rows of metrics.jsonl without seconds) of a finished `run`."""
    with np.load(folder / "result.npz") as arrays:
        ends = [arrays[name] for name in arrays.files]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    is_fact = lambda name: "seconds" not in name
    rows = [{k: v for k, v in json.loads(x).items() if is_fact(k)} for x in lines]
    return ends, rows


TOYS = {
    "fedavg": lambda toys: toys.fedavg_toy(personal="head"),
    "fedfr": lambda toys: toys.fedfr_toy(),
}

if __name__ == "__main__":
    main(sys.argv[1:])
