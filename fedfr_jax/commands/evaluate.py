"""Judge the checkpoints of a run again, by its config's protocols or changed ones."""

from absl import flags

from fedfr_jax.commands.flags import (
    define,
    define_processes,
    join_processes,
    parse,
    workdir,
)


def main(argv: list[str]) -> None:
    """evaluate --config=... --workdir=... [--config.evaluation.key=value].

    --distributed and its companions as for train.
    """
    values = flags.FlagValues()
    define(values)
    define_processes(values)
    parse(values, "evaluate", argv)
    folder = workdir(values, "evaluate")
    join_processes(values)
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import evaluate_experiment
    from fedfr_jax.runs.workdir import claim_for_all

    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} must hold a trained run, got no config.json.")
    config = values["config"].value
    text = config.to_json_best_effort(indent=1)
    with claim_for_all(folder, text, but_for="evaluation"):
        evaluate_experiment(build(config), folder)
