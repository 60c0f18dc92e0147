"""Judge the checkpoints of a run again, by its config's evaluators or changed ones."""

from fedfr_jax.commands.flags import (
    KEPT,
    define,
    define_processes,
    join_processes,
    new_parser,
    parse,
    workdir,
)

ABOUT = """\
Judge the checkpoints of the run in --workdir again, by the config that the run keeps
unless --config is given; --config.evaluation.key=value changes how they are judged."""


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr evaluate", ABOUT)
    define(parser)
    define_processes(parser)
    values = parse(parser, argv)
    folder = workdir(values, parser.prog)
    if not (folder / KEPT).exists():
        raise ValueError(f"{folder} must hold a trained run, got no {KEPT}.")
    join_processes(values)
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import evaluate_experiment
    from fedfr_jax.runs.workdir import claim_for_all

    text = values.config.to_json_best_effort(indent=1)
    with claim_for_all(folder, text, but_for="evaluation"):
        evaluate_experiment(build(values.config), folder)
