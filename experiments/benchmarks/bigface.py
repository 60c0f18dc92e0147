"""A central step of a thin IResNet, beside the same step as a PyTorch loop.

    python experiments/benchmarks/bigface.py [--size=56] [--batch=64] [--steps=8]
        [--rounds=3] [--repeats=3]

Two blocks a stage, 16 to 128 channels, CosFace over 1,000 classes, SGD with momentum
and decay. Ours on one device and on one per core, PyTorch's with channels first and
last and as many threads as cores, in turns, each in a process of its own; what counts
is the fastest round of each, and the ratio of the best. Not for a machine that does
other work meanwhile.
"""

import argparse
import json
import os
import pathlib
import sys

import environments
import results_file
import turns

HERE = pathlib.Path(__file__).resolve().parent
WIDTHS, BLOCKS, DIM, CLASSES = (16, 32, 64, 128), (2, 2, 2, 2), 128, 1000
SIZES = {"size": 56, "batch": 64, "steps": 8, "rounds": 3}
DEVICES, ORDERS = ("1 device", "a device per core"), ("first", "last")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", choices=DEVICES, help="a child's work")
    results_file.add_flag(parser)
    return parser.parse_args()


def ours(args) -> float:
    """Seconds of a step in the fastest of some epochs."""
    from fedfr_jax.distributed import use_every_core

    if args.ours == DEVICES[1]:
        use_every_core()
    from central_step import Running, trainer_of

    from fedfr_jax.central.settings import Training
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.models import MODELS

    shape, mesh = (args.size, args.size, 3), make_mesh()
    settings = {"blocks": BLOCKS, "widths": WIDTHS, "embedding_dim": DIM}
    model = MODELS["iresnet"](shape, **settings)
    told = Training(batch_size=args.batch, loss={"scale": 64.0})
    trainer = trainer_of(model, CLASSES, told, args.steps, mesh)
    return Running(trainer, mesh).times(args.rounds).least


def of_torch(args, order: str) -> list[str]:
    """The command of the PyTorch loop."""
    numbers = {name: getattr(args, name) for name in SIZES}
    numbers |= {"classes": CLASSES, "dim": DIM, "threads": os.cpu_count()}
    flags = [f"--{name}={value}" for name, value in numbers.items()]
    flags += ["--widths", *map(str, WIDTHS), "--blocks", *map(str, BLOCKS)]
    script = str(HERE / "peer_torch_iresnet.py")
    return [environments.python_of("torch"), script, f"--channels={order}", *flags]


def main():
    """Print and write the seconds of a step, and ours over PyTorch's."""
    args = parse_arguments()
    if args.ours:
        print(json.dumps({"seconds": ours(args)}))
        return
    given = [f"--{name}={getattr(args, name)}" for name in SIZES]
    child = lambda devices: [sys.executable, __file__, f"--ours={devices}", *given]
    mine = {name: child(name) for name in DEVICES}
    peers = {f"torch, channels {x}": of_torch(args, x) for x in ORDERS}
    row = turns.fastest({**mine, **peers}, args.repeats)
    row["ours over torch"] = min(row[x] for x in mine) / min(row[x] for x in peers)
    print({name: round(value, 4) for name, value in row.items()})
    results_file.write(args.out, {f"central step, {args.size} px": row})


if __name__ == "__main__":
    main()
