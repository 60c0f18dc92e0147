"""Seconds to a target accuracy on slow and fast devices: rounds, or no rounds at all.

    python experiments/systems/run.py --data=mnist_pfl20.npz

10,000 clients hold six MNIST images of two digits or so each. Their devices are drawn
once, log-normal; seconds are simulated, from counted bytes and operations. Writes
results.json and the table of README.md.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedfr_jax as ff

FOLDER = pathlib.Path(__file__).parent
NUM_CLIENTS, COHORT, TARGET, SEED = 10_000, 100, 0.85, 0
DEVICES = {
    "gflops": 0.005,
    "download_mbps": 20.0,
    "upload_mbps": 5.0,
    "speed_sigma": 1.0,
    "bandwidth_sigma": 1.0,
}
SERVER_RATES = {"FedBuff, buffer of 50, server rate 2": 2.0}  # of others 1
MAX_UPDATES = {"FedBuff, buffer of 50, server rate 2": 5_000}  # of clients


def open_mnist(path) -> tuple:
    """(clients' data, test images [T, 784], test labels [T])."""
    with np.load(path) as file:
        images, labels = file["images"], file["labels"].astype(np.int32)
        is_test = file["official_test"]
    images = images.reshape(len(images), -1).astype(np.float32) / 127.5 - 1
    x, y = images[~is_test], labels[~is_test]
    by_digit = np.argsort(y, kind="stable")
    pieces = np.array_split(by_digit, 2 * NUM_CLIENTS)  # two of each client
    owner = np.random.default_rng(SEED).permutation(2 * NUM_CLIENTS) % NUM_CLIENTS
    sizes = [len(piece) for piece in pieces]
    clients = np.empty(len(y), np.int64)
    clients[by_digit] = np.repeat(owner, sizes)
    data = ff.FederatedDataset.from_client_ids(x, y, clients)
    return data, images[is_test], labels[is_test]


def variables() -> dict:
    """Of a network with one hidden layer."""
    rng = np.random.default_rng(SEED)
    draw = lambda n, m: (rng.normal(size=(n, m)) / np.sqrt(n)).astype(np.float32)
    zeros = lambda n: np.zeros(n, np.float32)
    hidden = {"kernel": draw(784, 32), "bias": zeros(32)}
    return {"hidden": hidden, "head": {"kernel": draw(32, 10), "bias": zeros(10)}}


def logits_of(params, x):
    """Of x [B, 784], [B, 10]."""
    dense = lambda p, x: x @ p["kernel"] + p["bias"][None]
    return dense(params["head"], jax.nn.relu(dense(params["hidden"], x)))


def loss(variables, batch, key):
    """Mean cross-entropy of the valid examples."""
    del key
    logits = logits_of(variables["params"], batch.images)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(each, batch.is_valid)


METHODS = {  # options of `Systems`, server steps of one evaluation
    "rounds": ({}, 2),
    "rounds, 1.3 times as many asked": ({"over_selection": 1.3}, 2),
    "rounds, deadline with partial work": (
        {"deadline": 3.0, "partial_work": True},
        2,
    ),
    "FedBuff, buffer of 50": (
        {"asynchronous": ff.fedbuff(concurrency=COHORT, buffer_size=50)},
        4,
    ),
    "FedBuff, buffer of 50, server rate 2": (
        {"asynchronous": ff.fedbuff(concurrency=COHORT, buffer_size=50)},
        4,
    ),
    "FedBuff, buffer of 100": (
        {"asynchronous": ff.fedbuff(concurrency=COHORT, buffer_size=100)},
        2,
    ),
}


def play(name: str, data, x, y) -> list[dict]:
    """A method's accuracies over simulated seconds, until the target and a bit on."""
    options, every = METHODS[name]
    profiles = ff.log_normal_profiles(NUM_CLIENTS, seed=SEED, **DEVICES)
    local = ff.LocalTraining(loss, ff.sgd(), 0.1)
    is_rounds = "asynchronous" not in options
    run = ff.init(
        ff.fedavg(
            local,
            server_optimizer=optax.sgd(SERVER_RATES.get(name, 1.0)),
            weighting="uniform",
        ),
        data,
        variables(),
        batch_size=6,
        local_epochs=3,
        seed=SEED,
        clients_per_device=20,
        systems=ff.Systems(profiles=profiles, **options),
        **({"cohort_size": COHORT} if is_rounds else {}),
    )
    judge = jax.jit(lambda v: (logits_of(v["params"], x).argmax(1) == y).mean())
    points, updates = [], 0
    while updates < MAX_UPDATES.get(name, 40_000):
        run, metrics = ff.run_round(run)
        updates += metrics["num_clients"]
        if run.round_number % every == 0:
            point = {
                "simulated_seconds": round(metrics["simulated_seconds"], 3),
                "accuracy": round(float(judge(run.variables)), 4),
                "updates": updates,
                "server_steps": run.round_number,
            }
            points.append(point)
            print(name, point, flush=True)
        if len(points) > 2 and min(p["accuracy"] for p in points[-3:]) >= TARGET:
            break
    return points


def first_at(points: list[dict]) -> dict | None:
    """The first point at the target."""
    return next((p for p in points if p["accuracy"] >= TARGET), None)


def table(results: dict) -> str:
    """Markdown: when each method reaches the target."""
    lines = [
        f"| method | simulated seconds to {TARGET:.0%} | updates | server steps |",
        "| --- | --- | --- | --- |",
    ]
    for name, points in results.items():
        at = first_at(points)
        cells = ["not reached", "-", "-"]
        if at:
            cells = [
                f"{at['simulated_seconds']:.0f}",
                at["updates"],
                at["server_steps"],
            ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def publish(results: dict) -> None:
    """results.json, and the table between the markers of README.md."""
    path, readme = FOLDER / "results.json", FOLDER / "README.md"
    path.write_text(json.dumps({"devices": DEVICES, "methods": results}, indent=1))
    before, _, rest = readme.read_text().partition("<!-- table -->")
    after = rest.partition("<!-- /table -->")[2]
    text = f"{before}<!-- table -->\n{table(results)}\n<!-- /table -->{after}"
    readme.write_text(text)


def main() -> None:
    """Play the methods, and write down what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="mnist_pfl20.npz")
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    values = parser.parse_args()
    data, x, y = open_mnist(values.data)
    x, y = jnp.asarray(x), jnp.asarray(y)
    path, results = FOLDER / "results.json", {}
    if path.exists():  # of the methods that are not played again
        results = json.loads(path.read_text())["methods"]
    for name in values.methods:
        results[name] = play(name, data, x, y)
        publish({name: results[name] for name in METHODS if name in results})


if __name__ == "__main__":
    main()
