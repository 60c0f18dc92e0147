"""Evaluate a run's checkpoints again, by its evaluators or changed ones."""

import argparse
import json
import pathlib

from fedfr_jax.cli.flags import (
    CONFIG_FILE,
    config_text,
    define,
    define_data_changed,
    define_processes,
    join_processes,
    new_parser,
    parse,
    run_location,
)

ABOUT = """\
Evaluate the checkpoints of the run in --workdir again, by the run's config unless
--config is given; --config.evaluation.key=value changes an evaluation."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr evaluate", ABOUT)
    define(parser)
    define_data_changed(parser)
    define_processes(parser)
    values = parse(parser, argv)
    location = run_location(values, parser.prog)
    join_processes(values)
    import jax

    from fedfr_jax.runs.remote import fetched_to_evaluate

    with fetched_to_evaluate(location, jax.process_index()) as folder:
        if not (folder / CONFIG_FILE).exists():
            raise ValueError(
                f"{folder} must be a run directory, got no {CONFIG_FILE} in it."
            )
        evaluate(values, folder)


def evaluate(values: argparse.Namespace, folder: pathlib.Path) -> None:
    """Evaluate the run in `folder` again."""
    from fedfr_jax.config.build import build, sections
    from fedfr_jax.loading import writing_nothing
    from fedfr_jax.runs.experiment import evaluate_experiment
    from fedfr_jax.runs.locks import lock_to_read
    from fedfr_jax.runs.stage_settings import check_stages
    from fedfr_jax.runs.workdir import check_config, check_inside

    config = json.loads(config_text(values.config))
    with lock_to_read(folder):
        check_config(folder, config, but_for="evaluation")
        check_inside(folder)
        experiment = build(writing_nothing(sections(values.config)))
        check_stages(folder, experiment.stages, config)
        evaluate_experiment(experiment, folder, changed=values.data_changed)
