"""Pretrain and train every method of a config, or go on where a run stopped."""

import shutil

from absl import flags

from fedfr_jax.commands.flags import define, parse, workdir


def main(argv: list[str]) -> None:
    """train --config=... --workdir=... [--overwrite] [--config.key=value]."""
    values = flags.FlagValues()
    define(values)
    flags.DEFINE_bool(
        "overwrite", False, "start afresh in --workdir", flag_values=values
    )
    parse(values, "train", argv)
    folder = workdir(values, "train")
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import run_experiment, same_config

    experiment = build(values["config"].value)
    if values["overwrite"].value:
        shutil.rmtree(folder, ignore_errors=True)
    same_config(folder, values["config"].value.to_json_best_effort(indent=1))
    run_experiment(experiment, folder)
