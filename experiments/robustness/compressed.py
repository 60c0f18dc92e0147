"""Accuracy against bytes sent up, for each link that compresses updates.

    python experiments/robustness/compressed.py --data=mnist_pfl20.npz

One seed; prints a Markdown table and keeps it in compressed.json.
"""

import argparse
import json
import pathlib

import cases

from fedfr_jax.federated.communication import count_communication

HERE = pathlib.Path(__file__).parent
QUANTIZED = {"name": "stochastic_quantize"}
LINKS = {
    "nothing": [],
    "8 bits": [{**QUANTIZED, "bits": 8}],
    "2 bits": [{**QUANTIZED, "bits": 2}],
    "2 bits, rotated": ["rotate", {**QUANTIZED, "bits": 2}],
    "2 bits, error feedback": [{**QUANTIZED, "bits": 2, "error_feedback": True}],
    "sign": ["sign"],
    "top 10 %": [{"name": "top_k", "fraction": 0.1}],
    "top 1 %": [{"name": "top_k", "fraction": 0.01}],
    "top 1 %, no error feedback": [
        {"name": "top_k", "fraction": 0.01, "error_feedback": False}
    ],
    "random 10 %": [{"name": "random_k", "fraction": 0.1}],
    "whole numbers (quantize)": ["quantize"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    values = parser.parse_args()
    images, labels, *test = cases.load(values.data)
    data, found = cases.federate(images, labels), {}
    print("| link | KB up per client and round | accuracy |\n| --- | --- | --- |")
    for name, links in LINKS.items():
        algorithm = cases.with_links(cases.fedavg(), links)
        _, accuracy, run = cases.train(algorithm, data, *test)
        sent = count_communication(run.sim, run.server, run.store.template)
        found[name] = {"bytes_up": sent.up, "accuracy": round(accuracy, 4)}
        print(f"| {name} | {sent.up / 1000:.2f} | {100 * accuracy:.1f} % |", flush=True)
    (HERE / "compressed.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
