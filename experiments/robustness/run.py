"""Rules against attacks: accuracy on MNIST with 0, 10 and 30 % of attackers.

    python experiments/robustness/run.py --data=mnist_pfl20.npz

One seed; results.json keeps what was there, so that a stopped start goes on.
"""

import argparse
import json
import pathlib
import time

import cases
import jax

import fedfr_jax as ff

HERE = pathlib.Path(__file__).parent
SHARES = (0.3, 0.1)
ATTACKS = {
    "sign_flip": {},
    "label_flip": {},
    "gaussian": {"std": 1.0},
    "scaled": {"factor": -5.0},
    "alie": {"tau": 1.5},
    "inner_product": {"tau": 2.0},
    "backdoor": {"target": cases.TARGET, "fraction": 0.5, "boost": 2.0},
}


def rules(num_attackers: int) -> dict:
    """Links by a rule's name, as a config has them; they know how many attack."""
    count = {"num_malicious_clients": max(num_attackers, 1)}
    nnm = {"name": "nearest_neighbor_mixing", **count}
    arc = {"name": "adaptive_robust_clipping", **count}
    share = max(num_attackers, 1) / cases.NUM_CLIENTS
    trimmed = {"name": "trimmed_mean", "trim_fraction": share + 1e-6}
    keep = cases.NUM_CLIENTS - max(num_attackers, 1)
    return {
        "mean": [],
        "centered clip": [{"name": "centered_clip", "max_norm": 1.0}],
        "median": ["median"],
        "trimmed mean": [trimmed],
        "multi-Krum": [{"name": "krum", **count, "num_clients_to_keep": keep}],
        "geometric median": ["geometric_median"],
        "NNM, trimmed mean": [nnm, trimmed],
        "ARC, NNM, trimmed mean": [arc, nnm, trimmed],
    }


def play(rule: str, attack: str, share: float, data, test) -> dict:
    """Accuracy, and how often the backdoor opens, after a run."""
    links = rules(round(share * cases.NUM_CLIENTS))[rule]
    algorithm = cases.with_links(cases.fedavg(), links)
    if share:
        who = {"share": share, "num_clients": cases.NUM_CLIENTS, "seed": cases.SEED}
        algorithm = ff.with_attack(algorithm, attack, **who, **ATTACKS[attack])
    started = time.perf_counter()
    try:
        variables, accuracy, _ = cases.train(algorithm, data, *test)
    except FloatingPointError:  # diverged
        return {"accuracy": 0.1, "is_diverged": True}
    found = {"accuracy": round(accuracy, 4)}
    rate = ff.backdoor_rate(cases.logits, variables, *test, target=cases.TARGET)
    if attack in ("backdoor", "none"):
        found["backdoor_rate"] = round(rate, 4)
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results.json")
    values = parser.parse_args()
    images, labels, *test = cases.load(values.data)
    data = cases.federate(images, labels)
    path = values.results
    results = json.loads(path.read_text()) if path.exists() else {}
    todo = [("none", 0.0)] + [(a, s) for s in SHARES for a in ATTACKS]
    for attack, share in todo:
        for rule in rules(1):
            key = f"{rule} | {attack} | {share:g}"
            if key not in results:
                results[key] = play(rule, attack, share, data, test)
                path.write_text(json.dumps(results, indent=1) + "\n")
                print(key, results[key], flush=True)
                jax.clear_caches()


if __name__ == "__main__":
    main()
