"""What `fedfr plan` does with a config."""

from collections.abc import Mapping, Sequence

import jax
import ml_collections

from fedfr_jax.build import sections
from fedfr_jax.plan.devices import device_of
from fedfr_jax.plan.stages import as_numbers, plan_stage
from fedfr_jax.plan.stand_in import unread
from fedfr_jax.plan.text import ABOUT as ASSUMED
from fedfr_jax.plan.text import of_stage
from fedfr_jax.tasks import TASKS
from fedfr_jax.text import printable
from fedfr_jax.types import Experiment


def plan(
    config: ml_collections.ConfigDict | Mapping,
    *,
    device: str = "h200",
    devices: int = 1,
    rows: Sequence[str] = (),
    hard_negatives: int | None = None,
) -> dict:
    """Print and return {"device", "devices", "stages": {name: numbers}}.

    Args:
      rows: stages; none: all.

    Raises:
      ValueError: as `build`, and for an unknown device or row.
    """
    sheet = device_of(device)
    experiment, table = blind_experiment(config, devices)
    for name in rows:
        if name not in experiment.stages:
            known = sorted(experiment.stages)
            raise ValueError(f"--rows must be of {known}, got {name!r}.")
    print(printable(experiment.task.text, keep="\n"))
    print(f"\n{devices} x {sheet.name}\n")
    stages = {}
    for name in rows or experiment.stages:
        planned = plan_stage(
            experiment, name, sheet, table=table, hard_negatives=hard_negatives
        )
        stages[name] = as_numbers(planned)
        print(of_stage(name, stages[name], sheet, devices), end="\n\n", flush=True)
    print(ASSUMED)
    return {"device": device, "devices": devices, "stages": stages}


def blind_experiment(config, devices: int) -> tuple[Experiment, str]:
    """(the experiment on so many virtual devices, its images black; where its table
    was to lie)."""
    use_virtual(devices)  # before a source draws something on them
    settings = sections(config)
    table = settings["federation"].get("table", "auto")
    settings = unread(settings)
    return TASKS[settings["task"]](settings), table


def use_virtual(devices: int) -> None:
    """Have JAX make so many devices of this machine's CPU.

    Raises:
      ValueError: when JAX has other devices already.
    """
    if devices < 1:
        raise ValueError(f"--devices must be at least 1, got {devices}.")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # it has begun
        pass
    if (found := len(jax.devices())) != devices:
        raise ValueError(
            f"--devices must be the {found} of this process, where JAX has begun, got "
            f"{devices}."
        )
