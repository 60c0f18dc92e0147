"""Seconds of an epoch of central training, in this tree and in others, in turns.

    python experiments/benchmarks/central.py --config=configs/fedfr/demo.py
        [--trees=before=/path/of/another/checkout] [--epochs=6]

Trains the config's pretraining. Each tree runs in a process of its own and takes an
epoch when it is told to, so that the epochs of all trees come in turns on a machine
whose speed changes. Prints and writes median and fastest seconds of an epoch, the first
one, which compiles, left out, the processor's seconds, which other work disturbs less,
the last loss, and this tree's figures over the other's.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import results_file

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="of the faces, with pretrain")
    parser.add_argument("--trees", default="", help="name=folder,...")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    results_file.add_flag(parser)
    return parser.parse_args()


def work(config: pathlib.Path, epochs: int) -> None:
    """Train; after each epoch print a line and wait for one."""
    from fedfr_jax.distributed import use_every_core

    use_every_core()
    from fedfr_jax.config.build import build
    from fedfr_jax.config.files import load
    from fedfr_jax.runs import central_stage

    clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
    read = lambda: {name: clock() for name, clock in clocks.items()}
    began = read()

    def sink(epoch, scalars):
        nonlocal began
        spent = {name: clock() - began[name] for name, clock in clocks.items()}
        print(json.dumps({**spent, "loss": scalars["loss"]}), flush=True)
        sys.stdin.readline()
        began = read()

    options = {"sinks": [sink]}
    if hasattr(central_stage, "open_sinks"):  # of an earlier tree
        central_stage.open_sinks = lambda *_, **__: contextlib.nullcontext([sink])
        options = {}
    experiment = build(load(config))
    trainer = experiment.stages["pretrained"].trainer
    settings = trainer.settings._replace(epochs=epochs, checkpoint_every=0)
    trainer = trainer._replace(settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdin.readline()
        began = read()
        place = pathlib.Path(folder, "pretrained")
        central_stage.train_central(trainer, experiment.mesh, place, seed=0, **options)


def start(tree: pathlib.Path, args) -> subprocess.Popen:
    """This script on the package of a tree."""
    config = pathlib.Path(args.config).resolve()
    words = [__file__, "--worker", f"--config={config}", f"--epochs={args.epochs}"]
    code = "import runpy, sys; sys.argv = sys.argv[1:]; sys.path[:0] = [sys.argv.pop()]"
    code += f"; sys.path[1:1] = [{str(results_file.FOLDER)!r}]"
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *words, str(tree)], **pipes)


def take_turns(workers: dict[str, subprocess.Popen], epochs: int) -> dict[str, list]:
    """{name: what each epoch printed}."""
    found = {name: [] for name in workers}
    for _ in range(epochs):
        for name, worker in workers.items():
            worker.stdin.write("\n")
            worker.stdin.flush()
            while not (line := worker.stdout.readline()).startswith("{"):
                if not line:
                    raise RuntimeError(f"the tree {name} must train, got nothing.")
            found[name].append(json.loads(line))
    for worker in workers.values():
        worker.communicate("\n")
    return found


def summary(lines: list[dict], own: list[dict]) -> dict:
    """Figures of a tree, and this tree's `own` over them, epoch by epoch."""
    row = {"first_seconds": lines[0]["seconds"], "last_loss": lines[-1]["loss"]}
    for name in ("seconds", "cpu_seconds"):
        values = [line[name] for line in lines[1:]]
        pairs = zip(own[1:], values, strict=True)
        row[f"median_{name}"] = statistics.median(values)
        row[f"fastest_{name}"] = min(values)
        row[f"this_over_it_{name}"] = statistics.median(x[name] / y for x, y in pairs)
    return {name: round(value, 4) for name, value in row.items()}


def main():
    """Print and write the rows."""
    args = parse_arguments()
    if args.worker:
        return work(pathlib.Path(args.config), args.epochs)
    others = [word.partition("=") for word in args.trees.split(",") if word]
    trees = {"this": ROOT, **{name: pathlib.Path(path) for name, _, path in others}}
    workers = {name: start(tree, args) for name, tree in trees.items()}
    found = take_turns(workers, args.epochs)
    row = {name: summary(lines, found["this"]) for name, lines in found.items()}
    for name, figures in row.items():
        print(name, figures)
    results_file.write(args.out, {pathlib.Path(args.config).stem: row})


if __name__ == "__main__":
    main()
