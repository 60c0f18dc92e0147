"""Plan: what a config needs before it runs (memory, FLOPs, images/s, hours)."""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import ml_collections

from fedfr_jax.cli.flags import add_switch, count, define, names, new_parser, parse
from fedfr_jax.config.build import sections
from fedfr_jax.plan.devices import CPU, get_device
from fedfr_jax.plan.dummy_inputs import without_files
from fedfr_jax.plan.report import ABOUT as ASSUMED
from fedfr_jax.plan.report import format_stage
from fedfr_jax.plan.stages import as_numbers, plan_stage
from fedfr_jax.schema import check_choice
from fedfr_jax.tasks import TASKS
from fedfr_jax.text import printable
from fedfr_jax.types import Experiment

ABOUT = """\
Estimate, without training or compiling, what every stage of a config needs of each
device: memory by use, operations per image, expected images/s, MFU and hours, and the
largest batch, number of classes and clients per device that fit. No image is read; a
known data set that is missing is replaced by black images in its size."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr plan", ABOUT)
    add_flags(parser)
    values = parse(parser, argv)
    from fedfr_jax.cli.aot_compile import compile_for, compile_here, config_flags
    from fedfr_jax.plan.report import format_programs
    from fedfr_jax.plan.topologies import num_devices

    check_flags(values)
    kind, is_grid, _ = values.device.partition(":")
    result = plan(
        values.config,
        device=kind,
        devices=num_devices(values.device) if is_grid else values.num_devices or 1,
        rows=values.methods or (),
        hard_negatives=values.assume_hard_negatives,
    )
    if values.compile:
        flags = config_flags(argv)
        flags += [f"--save={values.save}"] if values.save else []
        is_here = values.device == CPU
        compiled = compile_here(flags) if is_here else compile_for(values.device, flags)
        for name, programs in compiled.items():
            print(f"\n{format_programs(name, programs)}")
        result["compiled"] = compiled
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(result, indent=1))


def add_flags(parser) -> None:
    """Add the flags of the command."""
    define(parser, needs_workdir=False)
    parser.flag(
        "--device",
        "NAME",
        "h200, h100, a100, v100, v5e, v5p or v6e, or cpu for this machine; or a grid "
        "of devices such as v5p:4x4x8 or h200:1x1x8, v5e:16x16:2 for two slices",
        default="h200",
    )
    add_switch(
        parser,
        "compile",
        "compile the steps for a grid of devices with XLA's own compiler, which is "
        "installed for it (docs/explanation/accelerators.md); with --device=cpu for "
        "this machine",
    )
    parser.flag(
        "--save",
        "FOLDER",
        "folder for the programs of --compile, for fedfr train --compiled; only for "
        "TPUs and cpu, as GPU kernels are timed on the device",
    )
    parser.flag("--num_devices", "N", "number of devices (default 1)", type=count)
    parser.flag("--methods", "A,B", "stages to plan (default all)", type=names)
    parser.flag(
        "--assume_hard_negatives",
        "N",
        "number of hard negatives per client (default the most that can be selected, "
        "up to the number of images of the largest client)",
        type=count,
    )
    parser.flag("--json", "FILE", "file to write the numbers to")


def check_flags(values: argparse.Namespace) -> None:
    """Raise ValueError for flags that cannot be used together."""
    from fedfr_jax.plan.topologies import device_kind

    is_grid = ":" in values.device
    if is_grid or (values.compile and values.device != CPU):
        device_kind(values.device)
    if values.save and not values.compile:
        raise ValueError("fedfr plan: --save needs --compile.")
    if values.save and values.device != CPU:
        if device_kind(values.device).platform != "tpu":
            raise ValueError(
                f"fedfr plan: --save needs a grid of TPUs, or cpu, got {values.device}:"
                " programs of GPUs are tuned on the device. `fedfr train` keeps them "
                "there."
            )
    if is_grid and values.num_devices:
        raise ValueError(
            "--num_devices cannot be used with a device grid, got "
            f"{values.num_devices} and {values.device}. Remove --num_devices."
        )
    if values.json and not pathlib.Path(values.json).parent.is_dir():
        raise ValueError(f"--json must be in an existing folder, got {values.json}.")


def plan(
    config: ml_collections.ConfigDict | Mapping,
    *,
    device: str = "h200",
    devices: int = 1,
    rows: Sequence[str] = (),
    hard_negatives: int | None = None,
) -> dict:
    """Print a config's plan; return {"device", "devices", "stages": {name: numbers}}.

    Args:
      rows: names of stages; (): all.
    """
    sheet = get_device(device)
    experiment, table = blind_experiment(config, devices)
    for name in rows:
        check_choice("--methods", name, experiment.stages)
    print(printable(experiment.task.data_report_text, keep="\n"))
    print(f"\n{devices} x {sheet.name}\n")
    stages = {}
    for name in rows or experiment.stages:
        planned = plan_stage(
            experiment, name, sheet, table=table, hard_negatives=hard_negatives
        )
        stages[name] = as_numbers(planned)
        print(format_stage(name, stages[name], sheet, devices), end="\n\n", flush=True)
    print(ASSUMED)
    return {"device": device, "devices": devices, "stages": stages}


def blind_experiment(config, devices: int) -> tuple[Experiment, str]:
    """(experiment with black images on virtual devices, its `data_placement`)."""
    use_virtual(devices)  # before a source computes something on them
    settings = sections(config)
    table = settings["federation"].get("data_placement", "auto")
    settings = without_files(settings)
    return TASKS[settings["task"]](settings), table


def use_virtual(devices: int) -> None:
    """Let JAX use `devices` virtual CPU devices."""
    if devices < 1:
        raise ValueError(f"--num_devices must be at least 1, got {devices}.")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # JAX is initialized already
        pass
    if jax.device_count() != devices:
        raise ValueError(
            f"--num_devices={devices} cannot change the {jax.device_count()} that JAX "
            "already uses in this process. Start fedfr plan on its own."
        )
