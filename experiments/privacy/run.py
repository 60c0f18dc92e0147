"""Accuracy against epsilon on MNIST, for independent and for banded noise.

    python experiments/privacy/run.py --data=mnist.npz [--parts accuracy cost]

6,000 clients with ten images each, all classes with everybody, on images of 14 x 14: a
network of one hidden layer of 32, 6,634 numbers. 600 clients in a round on average,
Poisson sampling (banded: within BANDS groups that take turns), ROUNDS rounds of one
step, the server's steps with momentum. The noise is calibrated to each epsilon at delta
1e-5. One seed. Writes results.json here, and the table in README.md.

`cost` times rounds of a private algorithm and of the plain one in turns, in one
process, on the same clients.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "fedfr_tables")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from orderings import provenance, write_between  # noqa: E402

import fedfr_jax as ff  # noqa: E402

CLIENTS, COHORT, DELTA, CLIP, ROUNDS, BANDS = 6000, 600, 1e-5, 0.2, 40, 4
EPSILONS = (1.0, 2.0, 4.0, 8.0, np.inf)
CLIENT_RATE, SERVER_RATE, MOMENTUM = 0.2, 1.0, 0.8
HIDDEN, LANES = 32, 60


def load(path: pathlib.Path):
    """(training clients, test images, test labels): halved images in [-1, 1]."""
    with np.load(path) as file:
        images, labels, is_test = (
            file[name] for name in ("images", "labels", "official_test")
        )
    small = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).astype(np.float32)
    small = small.reshape(-1, 196) / 127.5 - 1
    train = np.random.default_rng(0).permutation(np.flatnonzero(~is_test))
    owner = np.arange(len(train)) % CLIENTS
    data = ff.FederatedDataset.from_client_ids(small[train], labels[train], owner)
    return data, small[is_test], labels[is_test]


def apply(variables, x):
    """Logits [B, 10] of images [B, 196]."""
    params = variables["params"]
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return hidden @ params["w2"] + params["b2"][None]


def loss(variables, batch, key):
    """Mean cross-entropy."""
    del key
    logits = apply(variables, batch.images)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(each, batch.is_valid)


def first_variables():
    """What all runs start from."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (196, HIDDEN)) / 14,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(keys[1], (HIDDEN, 10)) / HIDDEN**0.5,
        "b2": jnp.zeros(10),
    }


def plain():
    """FedAvg with momentum of the server, clients equal."""
    return ff.fedavg(
        ff.LocalTraining(loss, learning_rate=CLIENT_RATE),
        server_optimizer=optax.sgd(SERVER_RATE, MOMENTUM),
        weighting="uniform",
    )


def sampling_of(noise: str) -> ff.Sampling:
    """Poisson cohorts, of groups in turn for banded noise."""
    return (
        ff.Sampling("cyclic", cycle=BANDS)
        if noise == "banded"
        else ff.Sampling("poisson")
    )


def calibrated(name: str, epsilon: float):
    """(noise multiplier, strategy or None)."""
    strategy = None
    if name == "banded":
        strategy = ff.privacy.banded_noise(rounds=ROUNDS, bands=BANDS)
    if np.isinf(epsilon):
        return 0.0, strategy
    mechanism = ff.privacy.Mechanism(
        CLIENTS, COHORT, 0.0, DELTA, sampling_of(name), strategy=strategy
    )
    return ff.privacy.calibrate_noise(
        mechanism, epsilon=epsilon, rounds=ROUNDS
    ), strategy


def accuracy_of(data, test, noise: str, epsilon: float) -> dict:
    """One training: its accuracy, noise and the epsilon that it has spent."""
    multiplier, strategy = calibrated(noise, epsilon)
    algorithm = ff.private(
        plain(),
        ff.Privacy(
            clip_norm=CLIP,
            noise_multiplier=multiplier,
            cohort_size=COHORT,
            delta=DELTA,
            epsilon=epsilon,
            noise=strategy,
        ),
    )
    run = ff.init(
        algorithm,
        data,
        first_variables(),
        batch_size=10,
        cohort_size=COHORT,
        clients_per_device=LANES,
        sampling=sampling_of(noise),
    )
    images, labels = test
    clipped = []
    for _ in range(ROUNDS):
        run, metrics = ff.run_round(run)
        clipped.append(float(metrics["clip_fraction"].mean()))
    found = float((jnp.argmax(apply(run.variables, images), 1) == labels).mean())
    return {
        "accuracy": round(found, 4),
        "noise_multiplier": round(multiplier, 4),
        "epsilon_spent": float(metrics["epsilon"]),
        "clip_fraction": round(statistics.mean(clipped), 3),
    }


def cost(data) -> dict:
    """Seconds of a round, private and plain in turns, without what compiles."""
    options = {"batch_size": 10, "cohort_size": COHORT, "clients_per_device": LANES}
    covered = ff.private(
        plain(), ff.Privacy(CLIP, 1.0, cohort_size=COHORT, delta=DELTA)
    )
    runs = {
        name: ff.init(algorithm, data, first_variables(), **options)
        for name, algorithm in {"plain": plain(), "private": covered}.items()
    }
    seconds, cores = ({name: [] for name in runs} for _ in range(2))
    for _ in range(60):
        for name in runs:
            begun = time.perf_counter(), time.process_time()
            run, _ = ff.run_round(runs[name])
            jax.block_until_ready(run.server)
            seconds[name].append(time.perf_counter() - begun[0])
            cores[name].append(time.process_time() - begun[1])
            runs[name] = run
    median = {name: statistics.median(x[3:]) for name, x in seconds.items()}
    fastest = {name: min(x[3:]) for name, x in seconds.items()}
    core = {name: statistics.median(x[3:]) for name, x in cores.items()}
    return {
        "milliseconds": {name: round(1e3 * x, 1) for name, x in median.items()},
        "ratio_of_medians": round(median["private"] / median["plain"], 3),
        "ratio_of_fastest": round(fastest["private"] / fastest["plain"], 3),
        "ratio_of_core_seconds": round(core["private"] / core["plain"], 3),
    }


def table(results: dict) -> str:
    """Markdown of the accuracies and the cost."""
    rows = results.get("accuracy", {})
    named = [f"{x:g}" for x in EPSILONS]
    lines = [
        "| noise | " + " | ".join(f"epsilon {x}" for x in named) + " |",
        "| --- " * (len(named) + 1) + "|",
    ]
    for noise, found in rows.items():
        cells = [
            f"{100 * found[x]['accuracy']:.1f} % (z {found[x]['noise_multiplier']:.2f})"
            if x in found
            else ""
            for x in named
        ]
        lines.append(f"| {noise} | " + " | ".join(cells) + " |")
    if "cost" in results:
        each = results["cost"]
        lines += [
            "",
            f"A private round takes {each['ratio_of_medians']:.2f} times a plain one "
            "(medians of 57 in turns; fastest: "
            f"{each['ratio_of_fastest']:.2f}; seconds of cores: "
            f"{each['ratio_of_core_seconds']:.2f}), "
            f"{each['milliseconds']['private']} against "
            f"{each['milliseconds']['plain']} ms.",
        ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="the .npz")
    parser.add_argument("--parts", nargs="+", default=["accuracy", "cost"])
    given = parser.parse_args()
    data, *test = load(given.data)
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if "accuracy" in given.parts:
        for epsilon in EPSILONS[::-1]:
            for noise in ("independent", "banded"):
                begun = time.perf_counter()
                found = accuracy_of(data, test, noise, epsilon)
                results.setdefault("accuracy", {}).setdefault(noise, {})
                results["accuracy"][noise][f"{epsilon:g}"] = found
                spent = time.perf_counter() - begun
                print(noise, epsilon, found, f"{spent:.0f} s", flush=True)
                publish(path, results)
    if "cost" in given.parts:
        results["cost"] = cost(data)
        print(results["cost"], flush=True)
        publish(path, results)


def publish(path: pathlib.Path, results: dict) -> None:
    """Write down what there is."""
    path.write_text(json.dumps({**results, "made": provenance()}, indent=1))
    write_between(HERE / "README.md", "results", table(results))


if __name__ == "__main__":
    main()
