"""Pretrain and train every method of a config, or go on where a run stopped."""

import shutil

from absl import flags

from fedfr_jax.commands.flags import define, parse, workdir


def main(argv: list[str]) -> None:
    """train --config=... --workdir=... [--overwrite] [--config.key=value].

    train --config=... --dry_run [--compile] [--hard_negatives=N] prints the memory and
    the operations that a round needs, and trains nothing.
    """
    values = flags.FlagValues()
    define(values)
    flags.DEFINE_bool(
        "overwrite", False, "start afresh in --workdir", flag_values=values
    )
    flags.DEFINE_bool("dry_run", False, "say what a round needs", flag_values=values)
    flags.DEFINE_bool("compile", False, "dry run: and compile it", flag_values=values)
    flags.DEFINE_integer(
        "hard_negatives",
        10_000,
        "dry run: images that a client is assumed to select",
        lower_bound=0,
        flag_values=values,
    )
    parse(values, "train", argv)
    if values["dry_run"].value:
        from fedfr_jax.build import dry_run

        dry_run(
            values["config"].value,
            compile=values["compile"].value,
            hard_negatives=values["hard_negatives"].value,
        )
        return
    folder = workdir(values, "train")
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import run_experiment
    from fedfr_jax.runs.workdir import claim

    experiment = build(values["config"].value)
    if values["overwrite"].value:
        shutil.rmtree(folder, ignore_errors=True)
    lock = claim(folder, values["config"].value.to_json_best_effort(indent=1))
    with lock:
        run_experiment(experiment, folder)
