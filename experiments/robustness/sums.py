"""What exact sums cost: milliseconds and memory of a round, three ways to add up.

    python experiments/robustness/sums.py --data=mnist_pfl20.npz [--devices=2]

Plain sums, whose last bits depend on the devices; reproducible sums, a tree of partial
sums; and whole numbers (`quantize`). Rounds take turns; one client at a time on a
device.
"""

import argparse
import os
import pathlib
import statistics
import time

WAYS = {
    "plain sum": ([], {}),
    "reproducible, 8 partial sums": ([], {"reproducible_sum": True}),
    "whole numbers (quantize)": (["quantize"], {}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    values = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={values.devices}"
    os.environ["XLA_FLAGS"] = flag
    import cases
    import jax

    import fedfr_jax as ff

    images, labels, *_ = cases.load(values.data)
    data, runs, seconds = cases.federate(images, labels), {}, {}
    for name, (links, options) in WAYS.items():
        start = cases.MODEL.init(jax.random.key(0))
        algorithm = cases.with_links(cases.fedavg(), links)
        run = ff.init(algorithm, data, start, batch_size=20, **options)
        runs[name], _ = ff.run_round(run)
        seconds[name] = []
    for _ in range(values.rounds):
        for name in WAYS:
            started = time.perf_counter()
            runs[name], _ = ff.run_round(runs[name])
            seconds[name].append(time.perf_counter() - started)
    print("| sum | ms a round | MiB of a program |\n| --- | --- | --- |")
    for name, run in runs.items():
        (needs,) = run.sim.programs.run_whole.needs.values()
        took = 1000 * statistics.median(seconds[name])
        memory = needs.temp_size_in_bytes + needs.output_size_in_bytes
        print(f"| {name} | {took:.0f} | {memory / 2**20:.2f} |")


if __name__ == "__main__":
    main()
