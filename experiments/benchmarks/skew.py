"""What the schedule loses on skewed clients: steps Zipf 1.2 up to 2,000.

    python experiments/benchmarks/skew.py [--cohort=128] [--population=1000]

Prints the range over five seeds of executed over useful steps, of the busiest device's
steps over the mean device's, and of the busiest device's over the least that any
schedule has. No arithmetic is done: the figures are the same on every machine.
"""

import argparse

import numpy as np

from fedfr_jax.federated.schedule import Schedule, build_schedule

LANES, DEVICES, SEEDS = (1, 2, 4, 8, 16), (1, 8), 5
MOST_STEPS = 2000


def zipf_steps(seed: int, *, cohort: int = 128, population: int = 1000) -> np.ndarray:
    """Steps of a cohort's clients, [cohort]."""
    rng = np.random.default_rng(seed)
    steps = np.minimum(rng.zipf(1.2, population), MOST_STEPS)
    return rng.choice(steps, cohort, replace=False)


def busiest(plan: Schedule, num_devices: int) -> float:
    """Steps of the busiest device's waves: what the round waits for."""
    lanes = plan.slots.shape[2]
    return plan.imbalance * plan.executed_steps / (num_devices * lanes)


def least(steps: np.ndarray, num_devices: int, lanes: int) -> float:
    """A bound of `busiest` that no schedule passes.

    Waves by falling steps are the shortest there are; the busiest device has no less
    than the mean of them, nor than k + 1 of the k A + 1 longest.
    """
    waves = np.sort(steps)[::-1][::lanes]
    longest = [
        waves[k * num_devices - k : k * num_devices + 1].sum()
        for k in range((len(waves) - 1) // num_devices + 1)
    ]
    return max(waves.sum() / num_devices, *longest)


def main():
    """Print one row per number of devices and lanes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohort", type=int, default=128)
    parser.add_argument("--population", type=int, default=1000)
    args = parser.parse_args()
    print("| devices | lanes | executed / useful | busiest / mean | busiest / least |")
    print("| --- | --- | --- | --- | --- |")
    for num_devices in DEVICES:
        for lanes in LANES:
            found = []
            for seed in range(SEEDS):
                steps = zipf_steps(seed, **vars(args))
                plan = build_schedule(steps, num_devices=num_devices, lanes=lanes)
                waste = plan.executed_steps / plan.useful_steps
                late = busiest(plan, num_devices) / least(steps, num_devices, lanes)
                found.append((waste, plan.imbalance, late))
            low, high = np.min(found, axis=0), np.max(found, axis=0)
            cells = [f"{a:.3f} to {b:.3f}" for a, b in zip(low, high, strict=True)]
            print("|", " | ".join([str(num_devices), str(lanes), *cells]), "|")


if __name__ == "__main__":
    main()
