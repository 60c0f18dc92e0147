"""Pretrain and train every method of a config, or go on where a run stopped."""

from absl import flags

from fedfr_jax.commands.flags import (
    define,
    define_processes,
    join_processes,
    parse,
    workdir,
)


def main(argv: list[str]) -> None:
    """train --config=... --workdir=... [--overwrite] [--config.key=value].

    train --config=... --dry_run [--rows=fedfr,...] [--nocompile] [--hard_negatives=N]
    goes the same way up to the images, compiles a round of every row and prints the
    memory and the operations that it needs. MS1M need not be there.

    --distributed: this is one of the processes that Slurm, Open MPI or Kubernetes has
    started or that run on a TPU pod; elsewhere --coordinator=HOST:PORT
    --num_processes=N --process_id=I, which `fedfr launch` gives by itself.
    """
    values = flags.FlagValues()
    define(values)
    define_processes(values)
    flags.DEFINE_bool(
        "overwrite", False, "start afresh in --workdir", flag_values=values
    )
    flags.DEFINE_bool("dry_run", False, "say what a round needs", flag_values=values)
    flags.DEFINE_list("rows", [], "dry run: of these; none: all", flag_values=values)
    flags.DEFINE_bool("compile", True, "dry run: for memory", flag_values=values)
    flags.DEFINE_integer(
        "hard_negatives",
        10_000,
        "dry run: images that a client is assumed to select",
        lower_bound=0,
        flag_values=values,
    )
    parse(values, "train", argv)
    if values["dry_run"].value:
        from fedfr_jax.commands.dry_run import dry_run

        dry_run(
            values["config"].value,
            rows=values["rows"].value,
            compile=values["compile"].value,
            hard_negatives=values["hard_negatives"].value,
        )
        return
    for name in ("rows", "compile", "hard_negatives"):
        if values[name].present:
            given = values[name].value
            raise ValueError(f"--{name} must come with --dry_run, got {given!r}.")
    folder = workdir(values, "train")
    join_processes(values)
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import run_experiment
    from fedfr_jax.runs.workdir import claim_for_all

    experiment = build(values["config"].value)
    text = values["config"].value.to_json_best_effort(indent=1)
    with claim_for_all(folder, text, is_fresh=values["overwrite"].value):
        run_experiment(experiment, folder)
