"""Say what a config needs before it runs: memory, operations, images/s, hours."""

import json
import pathlib

from fedfr_jax.commands.flags import (
    add_switch,
    count,
    define,
    names,
    new_parser,
    parse,
)

ABOUT = """\
Say, without training or compiling anything, what every stage of a config needs of each
device: memory and what it is for, operations for an image, expected images/s, MFU and
hours, and the largest batch, number of classes and lanes that fit. No image is read; a
known data set that is not there is made up in its size."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr plan", ABOUT)
    define(parser, needs_workdir=False)
    parser.add_argument(
        "--device",
        default="h200",
        metavar="NAME",
        help="h200 (the default), h100, a100, v100, v5e, v5p or v6e; a grid such as "
        "v5p:4x4x8 or h200:1x1x8 says how many; cpu: this machine",
    )
    add_switch(
        parser,
        "compile",
        "compile the steps for a grid of devices with XLA's own compiler, which is "
        "installed for it (docs/accelerators.md)",
    )
    parser.add_argument("--devices", type=count, metavar="N", help="of them; default 1")
    parser.add_argument("--rows", type=names, metavar="A,B", help="these; default all")
    parser.add_argument(
        "--hard_negatives",
        type=count,
        metavar="N",
        help="that a client is assumed to select; default as many as it can, but no "
        "more than the largest client has images of its own",
    )
    parser.add_argument("--json", metavar="FILE", help="keep the numbers")
    values = parse(parser, argv)
    from fedfr_jax.commands.compiling import compile_for, config_words
    from fedfr_jax.commands.planning import plan
    from fedfr_jax.runs.accelerators.text import lines_of
    from fedfr_jax.runs.accelerators.topologies import kind_of, num_devices

    kind, is_grid, _ = values.device.partition(":")
    if is_grid or values.compile:
        kind_of(values.device)
    if is_grid and values.devices:
        raise ValueError(
            f"--devices must not be given beside a grid, got {values.devices} and "
            f"{values.device}."
        )
    if values.json and not pathlib.Path(values.json).parent.is_dir():
        raise ValueError(f"--json must lie in a folder that exists, got {values.json}.")
    found = plan(
        values.config,
        device=kind,
        devices=num_devices(values.device) if is_grid else values.devices or 1,
        rows=values.rows or (),
        hard_negatives=values.hard_negatives,
    )
    if values.compile:
        found["compiled"] = compile_for(values.device, config_words(argv))
        for name, programs in found["compiled"].items():
            print(f"\n{lines_of(name, programs)}")
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(found, indent=1))
