"""Judge the checkpoints of a run again, by its config's protocols or changed ones."""

from absl import flags

from fedfr_jax.commands.flags import define, parse, workdir


def main(argv: list[str]) -> None:
    """evaluate --config=... --workdir=... [--config.evaluation.key=value]."""
    values = flags.FlagValues()
    define(values)
    parse(values, "evaluate", argv)
    folder = workdir(values, "evaluate")
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import evaluate_experiment

    evaluate_experiment(build(values["config"].value), folder)
