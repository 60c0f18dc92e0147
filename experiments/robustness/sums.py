"""What exact sums cost and give: bits, milliseconds and memory, three ways to add up.

    python experiments/robustness/sums.py --data=mnist_pfl20.npz

Plain sums, whose last bits depend on the devices; reproducible sums, a tree of partial
sums; and whole numbers (`quantize`). Two rounds on 1, 2 and 4 virtual devices say
whether the server has the same bits. Rounds on two devices take turns for the time; one
client at a time on a device. Prints a Markdown table and keeps it in sums.json.
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import time

HERE = pathlib.Path(__file__).parent
WAYS = {
    "plain sum": ([], {}),
    "reproducible, 8 partial sums": ([], {"reproducible_sum": True}),
    "whole numbers (quantize)": (["quantize"], {}),
}
DEVICES, TIMED = (1, 2, 4), 2


def begin(name: str, devices: int, data):
    """A run of one of the ways on so many devices, before its first round."""
    import cases
    import jax

    import fedfr_jax as ff

    links, options = WAYS[name]
    return ff.init(
        cases.with_links(cases.fedavg(), links),
        data,
        cases.MODEL.init(jax.random.key(0)),
        batch_size=20,
        mesh=ff.make_mesh(devices),
        **options,
    )


def digest(run) -> str:
    """Of every bit of the server's network."""
    import jax
    import numpy as np

    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(run.variables)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:8]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    values = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={max(DEVICES)}"
    os.environ["XLA_FLAGS"] = flag
    import cases

    import fedfr_jax as ff

    images, labels, *_ = cases.load(values.data)
    data = cases.federate(images, labels)
    runs, bits, seconds = {}, {}, {}
    for name in WAYS:
        for devices in DEVICES:
            run = begin(name, devices, data)
            for _ in range(2):
                run, _ = ff.run_round(run)
            bits.setdefault(name, []).append(digest(run))
            if devices == TIMED:
                runs[name], seconds[name] = run, []
    for _ in range(values.rounds):
        for name in WAYS:
            started = time.perf_counter()
            runs[name], _ = ff.run_round(runs[name])
            seconds[name].append(time.perf_counter() - started)
    publish(runs, bits, seconds)


def publish(runs, bits, seconds) -> None:
    """Print the table, and keep it."""
    print("| sum | same bits on 1, 2, 4 devices | ms a round | MiB of a program |")
    print("| --- | --- | --- | --- |")
    found = {}
    for name, run in runs.items():
        (needs,) = run.sim.programs.run_whole.needs.values()
        memory = (needs.temp_size_in_bytes + needs.output_size_in_bytes) / 2**20
        took = 1000 * statistics.median(seconds[name])
        fastest = 1000 * min(seconds[name])
        found[name] = {
            "digests": bits[name],
            "milliseconds": round(took, 1),
            "fastest": round(fastest, 1),
            "mebibytes": round(memory, 2),
        }
        is_same = "yes" if len({*bits[name]}) == 1 else "no"
        print(f"| {name} | {is_same} | {took:.0f} ({fastest:.0f}) | {memory:.2f} |")
    (HERE / "sums.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
