"""A run's programs compiled for devices that are not there, and what comes of them."""

import time
from collections.abc import Iterable

import jax

from fedfr_jax import devices
from fedfr_jax.runs.accelerators import hlo
from fedfr_jax.runs.accelerators.programs import programs_of
from fedfr_jax.types import Experiment

GIB = 2**30


def compiled_stages(experiment: Experiment, names: Iterable[str] = ()) -> dict:
    """{stage: {program: what `compiled` says}}, one after the other.

    Args:
      names: of stages; none: all.

    Raises:
      ValueError: for a stage that the experiment does not have.
    """
    for name in (names := list(names) or list(experiment.stages)):
        if name not in experiment.stages:
            known = list(experiment.stages)
            raise ValueError(f"--rows must be of {known}, got {name!r}.")
    return {
        name: {
            what: compiled(program, experiment.mesh.size)
            for what, program in programs_of(experiment, name).items()
        }
        for name in names
    }


def compiled(program: jax.stages.Lowered, num_devices: int) -> dict:
    """What the compiler says of a program for so many devices, as plain numbers.

    Returns:
      compile_seconds; fits; gib: of a device, by what it is for, `needed` in all;
      whole and step: see `hlo.Counts`, step None where there is none;
      optimal_seconds: a TPU's estimate, each loop turned once, None where there is
      none or one below zero. Where the compiler finds no room, only fits (false) and
      what it says.
    """
    start = time.perf_counter()
    try:
        found = program.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fits": False, "says": _used(str(error))}
    seconds = time.perf_counter() - start
    memory, text = gib_of(found.memory_analysis()), hlo.parse(found.as_text())
    step = hlo.of_step(text, num_devices)
    estimate = (found.cost_analysis() or {}).get("optimal_seconds", 0)
    return {
        "compile_seconds": round(seconds, 1),
        "fits": memory["needed"] * GIB <= devices.memory(),
        "gib": {name: round(size, 6) for name, size in memory.items()},
        "whole": hlo.of_program(text, num_devices)._asdict(),
        "step": step and step._asdict(),
        "optimal_seconds": estimate if estimate > 0 else None,
    }


def gib_of(memory) -> dict[str, float]:
    """GiB of a device, by what it is for."""
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    number = {
        "arguments": memory.argument_size_in_bytes / GIB,
        "results": max(results, 0) / GIB,  # beside those in place of arguments
        "temporaries": memory.temp_size_in_bytes / GIB,
    }
    return {**number, "needed": sum(number.values())}


def _used(text: str) -> str:
    """The sentence of a TPU's compiler that says how much would be used."""
    lines = [line for line in text.splitlines() if "Used" in line]
    return (lines or text.splitlines())[0].strip()
