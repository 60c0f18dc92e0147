"""A config as a row of the board: `fedfr train` in a process, and what it logged."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import workloads

from fedfr_jax.config.files import find, load
from fedfr_jax.tasks.places import paths_in


def usable_word(name: str, word: str) -> tuple[str, str]:
    """The config's word whose data is at hand, and what that is."""
    config = load(find(name), word)
    missing = [path for _, path in paths_in(config.to_dict()) if not at_hand(path)]
    if not missing:
        return word, "its own data and traces"
    files = {pathlib.Path(path).name.partition(":")[0] for path in missing}
    names = ", ".join(sorted(files))
    return f"{word}_standin", (
        f"a stand-in, without {names}: MNIST over 200 clients, a small CNN, "
        "drawn devices and hours; seconds and accuracy say nothing of FEMNIST"
    )


def at_hand(path: str) -> bool:
    """Whether a file or folder, or the file of FILE.npz:KEY, exists."""
    file, dot, _ = path.partition(".npz:")
    return pathlib.Path(f"{file}.npz" if dot else path).exists()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--config", required=True)
    parser.add_argument("--word", required=True, help="the config's argument")
    args = parser.parse_args()
    word, note = usable_word(args.config, args.word)
    rounds = args.rounds + 1  # the scripts of a workload have one before the timed
    clock = workloads.Clock()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedfr_jax", "train", f"--workdir={folder}"]
        command += [f"--config={args.config}:{word}"]
        command += [f"--config.federation.rounds={rounds}"]
        with clock:
            done = subprocess.run(command, capture_output=True, text=True)
        clock.peak = workloads.peak_mib_of_children()
        if done.returncode:
            sys.exit(" ".join(done.stderr.splitlines()[-2:])[-300:])
        log = pathlib.Path(folder, "fedavg", "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    found = {key: value for line in lines for key, value in line.items()}
    curve = [
        [line["simulated_seconds"], line["generic/accuracy"]]
        for line in lines
        if "generic/accuracy" in line
    ]
    workloads.report(
        f"jax {jax.__version__}",
        clock,
        simulated_seconds=found["simulated_seconds"],
        accuracy=found["generic/accuracy"],
        simulated_curve=curve,
        note=note,
    )


if __name__ == "__main__":
    main()
