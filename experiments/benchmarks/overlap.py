"""What reading costs: rounds of streamed clients, and images per CPU second.

    python experiments/benchmarks/overlap.py

Rounds of the workload `emnist_cnn` whose reader sleeps as long as a round trains: one
after the other, as calls of `advance`, and together, as a run trains them. Then small
images that cost nothing to decode, read for a hundred clients: client by client, with
four tasks for each of a hundred workers, and at once. Last small JPEGs, decoded by the
decoder alone, by threads and by processes.
"""

import io
import itertools
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
import ours
import workloads
from PIL import Image

from fedfr_jax.data.sources import decoding
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.index import index_files, open_index
from fedfr_jax.data.stream import stream
from fedfr_jax.distributed import use_every_core
from fedfr_jax.federated import rounds, simulation

ROUNDS, REPEATS, WORKERS = 6, 3, 100


class SlowReader:
    """Rows of an array, after some seconds."""

    def __init__(self, images):
        self.images, self.seconds = images, 0.0

    def __call__(self, rows):
        time.sleep(self.seconds)
        return self.images[rows]


def build_streamed(work):
    """(simulation, server, its reader)."""
    data = workloads.make_data(work)
    images = data.images.reshape(-1, *work.input_shape)
    sim, server, _ = ours.build(work, data)
    reader = SlowReader(images)
    sim = simulation.build_simulation(
        sim.algorithm,
        sim.batching,
        stream(reader, data.labels.reshape(-1)),
        sim.population,
        sim.settings,
        mesh=sim.mesh,
    )
    return sim, server, reader


def seconds_of_rounds(sim, server, numbers, is_ahead) -> float:
    """Mean seconds of a round."""
    store = simulation.open_store(sim, server)
    calls = [(round, round + 1) for round in numbers]
    begin = time.perf_counter()
    if is_ahead:
        rounds.train_calls(sim.runs, server, [store], calls, lambda call: None)
    else:
        for first, _ in calls:
            server, _ = rounds.advance(sim.runs, server, [store], first)
    return (time.perf_counter() - begin) / len(calls)


def measure_rounds(work) -> dict:
    """Seconds of a round, medians of turns."""
    sim, server, reader = build_streamed(work)
    for is_ahead in (False, True):  # compiles
        seconds_of_rounds(sim, server, range(2), is_ahead)
    training = seconds_of_rounds(sim, server, range(ROUNDS), False)
    reader.seconds = training
    spent = {False: [], True: []}
    for _, is_ahead in itertools.product(range(REPEATS), spent):
        spent[is_ahead].append(seconds_of_rounds(sim, server, range(ROUNDS), is_ahead))
    alone, ahead = (statistics.median(x) for x in spent.values())
    return {
        "seconds_of_training": training,
        "seconds_one_after_the_other": alone,
        "seconds_together": ahead,
        "times_as_fast": alone / ahead,
    }


def four_tasks_a_worker(work, count):
    """[work(0), ...] in four equal parts for each worker."""
    parts = np.array_split(np.arange(count), min(4 * WORKERS, count))
    done = decoding._pool().map(lambda part: [work(i) for i in part.tolist()], parts)
    return list(itertools.chain.from_iterable(done))


def measure_images(num_clients=100, examples=100, shape=(28, 28, 1)) -> dict:
    """Images per CPU second."""
    images = np.zeros((num_clients * examples, *shape), np.uint8)
    decoding.num_cores = lambda: WORKERS
    read = decoding.reader(lambda row: images[row], len(images), shape)
    clients = np.arange(len(images)).reshape(num_clients, -1)

    def by_client():
        for rows in clients:
            read(rows)

    def at_once():
        read(clients.reshape(-1))

    rates, ways = {}, {"client_by_client": (by_client, four_tasks_a_worker)}
    ways["at_once"] = at_once, decoding.in_threads
    for name, (work, decoding.in_threads) in ways.items():
        work()
        begin = time.process_time()
        for _ in range(REPEATS):
            work()
        rates[name] = REPEATS * len(images) / (time.process_time() - begin)
    return {**rates, "times_as_many": rates["at_once"] / rates["client_by_client"]}


def measure_jpegs(count=2000, side=112) -> dict:
    """JPEG files decoded a second: by the decoder alone, by threads, by processes."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            small = random.integers(256, size=(14, 14, 3), dtype=np.uint8)
            picture = Image.fromarray(small).resize((side, side))
            picture.save(f"{folder}/{i:05}.jpg", quality=90)
        source = open_index(index_files(open_files(folder)), side)
        encoded = [path.read_bytes() for path in pathlib.Path(folder).iterdir()]
        rows = np.arange(count)

        def alone():
            for data in encoded:
                np.asarray(Image.open(io.BytesIO(data), formats=("JPEG",)))

        rates = {}
        ways = {"decoder_alone_on_a_core": (alone, 99), "threads": (source.read, 99)}
        ways["processes"] = source.read, 1
        for name, (work, decoding.MIN_CORES) in ways.items():
            given = () if work is alone else (rows,)
            work(*given)
            begin = time.perf_counter()
            work(*given)
            rates[name] = count / (time.perf_counter() - begin)
    return rates


def main():
    use_every_core()
    work = workloads.WORKLOADS["emnist_cnn"]
    for measure in (measure_jpegs, lambda: measure_rounds(work), measure_images):
        print(json.dumps(measure(), indent=1), flush=True)


if __name__ == "__main__":
    main()
