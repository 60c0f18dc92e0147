"""Pretrain and train every method of a config, or go on where a run stopped."""

import argparse

from fedfr_jax.commands.flags import (
    Parser,
    add_switch,
    count,
    define,
    define_processes,
    join_processes,
    names,
    new_parser,
    parse,
    workdir,
)

ABOUT = """\
Pretrain, then train every method of a config. A run that was stopped resumes with the
same command, and with a changed config where that leaves a trained stage as it is: a
line says which stages are kept and which are trained anew. --restart=fedfr trains a
method alone again, --overwrite starts all from the beginning. --dry_run trains nothing:
it compiles a round of every row and prints the memory and the operations that it needs;
the data need not be there.

As one of several processes: --distributed under Slurm, Open MPI, Kubernetes and on TPU
pods; elsewhere --coordinator, --num_processes and --process_id, which fedfr launch
passes. See docs/clusters.md."""
DRY_RUN = {"rows": (), "compile": True, "hard_negatives": 10_000}  # when not given


def main(argv: list[str]) -> None:
    """Run the command with the words after it."""
    parser = new_parser("fedfr train", ABOUT)
    define(parser)
    add_switch(parser, "overwrite", "empty the work folder first")
    parser.add_argument(
        "--restart",
        type=names,
        metavar="A,B",
        help="train these stages (rows of methods, or pretrained) from their beginning "
        "again, with those that start from them; the others stay",
    )
    define_dry_run(parser)
    define_processes(parser)
    values = parse(parser, argv)
    given = {name: vars(values)[name] for name in DRY_RUN}
    given = {name: value for name, value in given.items() if value is not None}
    if values.dry_run:
        from fedfr_jax.commands.dry_run import dry_run

        dry_run(values.config, **{**DRY_RUN, **given})
        return
    for name, value in given.items():
        raise ValueError(f"--{name} must come with --dry_run, got {value!r}.")
    train(values, workdir(values, parser.prog))


def define_dry_run(parser: Parser) -> None:
    """Add --dry_run and its companions, which are None when they are not given."""
    add_switch(parser, "dry_run", "only say what a round of every row needs")
    group = parser.add_argument_group("with --dry_run")
    group.add_argument("--rows", type=names, metavar="A,B", help="these; default all")
    group.add_argument(
        "--nocompile",
        dest="compile",
        action="store_const",
        const=False,
        help="count operations only, not the memory",
    )
    group.add_argument(
        "--hard_negatives",
        type=count,
        metavar="N",
        help="images that a client is assumed to select, default 10000",
    )


def train(values: argparse.Namespace, folder) -> None:
    """Build the experiment and run it in `folder`."""
    join_processes(values)
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import run_experiment
    from fedfr_jax.runs.workdir import claim_for_all

    experiment = build(values.config)
    text = values.config.to_json_best_effort(indent=1)
    with claim_for_all(
        folder,
        text,
        experiment.stages,
        is_fresh=bool(values.overwrite),
        restart=values.restart or (),
    ):
        run_experiment(experiment, folder)
