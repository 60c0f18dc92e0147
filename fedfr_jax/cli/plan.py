"""Plan: what a config needs before it runs (memory, FLOPs, images/s, hours)."""

import json as texts
import pathlib
from collections.abc import Mapping, Sequence

import jax
from ml_collections import ConfigDict

from fedfr_jax.plan.aot import check_saved
from fedfr_jax.plan.devices import CPU, get_device, parse_grid
from fedfr_jax.plan.dummy_inputs import blind_experiment
from fedfr_jax.plan.stages import (
    ABOUT,
    format_programs,
    format_stage,
    plan_stage,
)
from fedfr_jax.schema import check_choice
from fedfr_jax.text import printable


def plan(
    config: ConfigDict,
    *,
    device: str = "h200",
    compile: bool = False,
    save: str | None = None,
    num_devices: int | None = None,
    methods: tuple[str, ...] = (),
    assume_hard_negatives: int | None = None,
    json: str | None = None,
    typed: Sequence[str],
) -> None:
    """Estimate the needs of a config: memory, operations, images/s, hours.

    Without training or compiling, of every stage of a config and each device: memory by
    use, operations per image, expected images/s, MFU and hours, and the largest batch,
    number of classes and clients per device that fit. No image is read; a known data
    set that is missing is replaced by black images in its size.

    Args:
      device: NAME h200, h100, a100, v100, v5e, v5p or v6e, or cpu for this machine; or
        a grid of devices such as v5p:4x4x8 or h200:1x1x8, v5e:16x16:2 for two slices
      compile: compile the steps for a grid of devices with XLA's own compiler, which is
        installed for it (docs/explanation/accelerators.md); with --device=cpu for this
        machine
      save: FOLDER folder for the programs of --compile, for fedfr train --compiled;
        only for TPUs and cpu, as GPU kernels are timed on the device
      num_devices: N number of devices (default 1)
      methods: A,B stages to plan (default all)
      assume_hard_negatives: N number of hard negatives per client (default the most
        that can be selected, up to the number of images of the largest client)
      json: FILE file to write the numbers to
    """
    from fedfr_jax.cli.aot_compile import compile_for, config_flags

    kind, is_grid, _ = device.partition(":")
    is_here = device == CPU
    grid = parse_grid(device) if is_grid or (compile and not is_here) else None
    is_saved = compile and (is_here or (grid and grid.kind.platform == "tpu"))
    if save and not is_saved:
        raise ValueError(
            "fedfr plan: --save needs --compile for a grid of TPUs, or cpu, got "
            f"{device}: programs of GPUs are tuned on the device. `fedfr train` keeps "
            "them there."
        )
    if is_grid and num_devices:
        raise ValueError(
            f"--num_devices cannot be used with a device grid, got {num_devices} and "
            f"{device}. Remove --num_devices."
        )
    if json and not pathlib.Path(json).parent.is_dir():
        raise ValueError(f"--json must be in an existing folder, got {json}.")
    result = print_plan(
        config,
        device=kind,
        devices=grid.num_devices if grid else num_devices or 1,
        methods=methods,
        hard_negatives=assume_hard_negatives,
        is_saved=bool(save),
    )
    if compile:
        words = config_flags(typed[1:])
        words += [f"--save={save}"] if save else []
        compiled = compile_for(device, words)
        for name, programs in compiled.items():
            print(f"\n{format_programs(name, programs)}")
        result["compiled"] = compiled
    if json:
        pathlib.Path(json).write_text(texts.dumps(result, indent=1))


def print_plan(
    config: ConfigDict | Mapping,
    *,
    device: str = "h200",
    devices: int = 1,
    methods: Sequence[str] = (),
    hard_negatives: int | None = None,
    is_saved: bool = False,
) -> dict:
    """Print a config's plan; return {"device", "devices", "stages": {name: numbers}}.

    Args:
      methods: names of stages; (): all.
      is_saved: whether their compiled programs will be.
    """
    sheet = get_device(device)
    use_virtual(devices)  # before a source computes something on them
    experiment = blind_experiment(config)
    for name in methods:
        check_choice("--methods", name, experiment.stages)
    if is_saved:
        check_saved(experiment, methods)
    print(printable(experiment.task.data_report_text, keep="\n"))
    print(f"\n{devices} x {sheet.name}\n")
    stages = {}
    for name in methods or experiment.stages:
        stages[name] = plan_stage(experiment, name, sheet, hard_negatives)
        print(format_stage(name, stages[name], sheet, devices), end="\n\n", flush=True)
    print(ABOUT)
    return {"device": device, "devices": devices, "stages": stages}


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
