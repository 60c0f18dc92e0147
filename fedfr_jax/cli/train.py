"""Train every method of a config, or resume where a run stopped."""

import argparse
import contextlib
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator

import fedfr_jax
from fedfr_jax.cli.flags import (
    add_switch,
    config_text,
    define,
    define_data_changed,
    define_processes,
    join_processes,
    names,
    new_parser,
    parse,
    run_location,
)
from fedfr_jax.cli.signals import GRACE, describe_interrupt, ending_after_a_round
from fedfr_jax.text import without_secrets

ABOUT = """\
Pretrain, then train every method of a config. An interrupted run resumes with the same
command, and with more rounds continues from the last one. Any other change to what a
trained stage depends on is refused: --overwrite=fedfr trains that method again, with
those that start from it, --overwrite everything. --from=runs/a trains the config of
another run in a new --workdir. fedfr plan estimates the needs of a config beforehand,
fedfr serve shows the run while it trains.

As one of several processes: --distributed under Slurm, Open MPI, Kubernetes and on TPU
pods; elsewhere --coordinator, --num_processes and --process_id, which fedfr launch
passes. See docs/how-to/clusters.md."""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr train", ABOUT)
    define(parser)
    parser.add_argument(
        "--overwrite",
        nargs="?",
        const=True,
        default=(),
        type=names,
        metavar="A,B",
        help="stages (methods, or pretrained) to remove and train again, with those "
        "that start from them; without names, all that is in the run directory",
    )
    define_data_changed(parser)
    parser.flag(
        "--methods",
        "A,B",
        "methods to train and to list in the result table, with the stages that they "
        "start from (default all)",
        type=names,
    )
    parser.flag(
        "--profile",
        "A:B",
        "profile rounds A to B of each method, or epochs of central stages; traces go "
        "to the stage's tensorboard folder, for xprof",
        type=rounds,
        default=(),
    )
    parser.flag(
        "--from",
        "RUN",
        "run directory whose config is trained again, instead of --config",
        dest="source",
    )
    add_switch(parser, "print-config", "print the config as JSON, and train nothing")
    parser.flag(
        "--sinks",
        "A,B",
        "outputs of the metrics of rounds and clients: csv, tensorboard, wandb, "
        "trackio, mlflow (default tensorboard)",
        type=names,
    )
    add_switch(parser, "quiet", "print only errors and results")
    parser.flag(
        "--compiled",
        "FOLDER",
        "folder of programs by fedfr plan --compile --save, for the same devices, "
        "config and JAX version",
    )
    parser.flag(
        "--grace_seconds",
        "S",
        "seconds to end and save the round after SIGTERM; 0 ends at once",
        type=seconds,
        default=GRACE,
    )
    define_processes(parser)
    values = parse(parser, argv)
    values.words = ["train", *argv]
    if values.print_config:
        return print(config_text(values.config))
    train(values, run_location(values, parser.prog))


def rounds(text: str) -> range:
    """Parse A:B as rounds A to B, counted from 1."""
    parts = text.split(":")
    if len(parts) == 2 and all(word.isdecimal() for word in parts):
        first, last = map(int, parts)
        if 1 <= first <= last:
            return range(first, last + 1)
    raise argparse.ArgumentTypeError(f"must be A:B with 1 <= A <= B, got {text!r}.")


def seconds(text: str) -> float:
    """Parse a flag's value as seconds of at least 0."""
    if text.replace(".", "", 1).isdecimal():
        return float(text)
    raise argparse.ArgumentTypeError(f"must be seconds of at least 0, got {text!r}.")


def train(values: argparse.Namespace, location) -> None:
    """Build the experiment and run it at `location`, a folder or a URL.

    Raises:
      SystemExit: when a signal has ended the run after a round.
    """
    if not values.quiet:  # before JAX and the data, which take a while
        shown = without_secrets(str(location))
        print(f"fedfr {fedfr_jax.__version__}: {shown}", flush=True)
    join_processes(values)
    import jax

    from fedfr_jax.runs.remote import open_run
    from fedfr_jax.runs.trackers import RunInterrupted

    with (
        ending_after_a_round(values.words, values.grace_seconds) as is_asked,
        open_run(location, jax.process_index()) as run,
    ):
        try:
            with compiled(values) as experiment:
                train_in(values, run, is_asked, experiment)
        except RunInterrupted as error:
            if jax.process_index() == 0:
                print(error, flush=True)
            if values.process_id is None and jax.process_index() == 0:
                print(describe_interrupt(signal.SIGTERM, values.words), file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM) from error


@contextlib.contextmanager
def compiled(values: argparse.Namespace) -> Iterator:
    """Build the experiment; in the block its programs are taken from --compiled."""
    from fedfr_jax.config.build import build

    if not values.compiled:
        yield build(values.config)
        return
    import jax

    from fedfr_jax.runs.compiled_programs import check_stamp, programs_in

    folder = pathlib.Path(values.compiled)
    check_stamp(folder, json.loads(config_text(values.config)), jax.devices())
    with programs_in(folder) as count:
        yield build(values.config)
    if jax.process_index() == 0 and not values.quiet:
        print(f"{count.found} programs were in {folder}, {count.compiled} were not.")


def train_in(
    values: argparse.Namespace, run, is_asked: Callable[[], bool], experiment
) -> None:
    """Run the experiment in the folder of an opened run.

    Args:
      is_asked: whether a signal asks this process to end after a round.
    """
    import jax

    from fedfr_jax.runs.data_digest import data_check
    from fedfr_jax.runs.experiment import run_experiment
    from fedfr_jax.runs.hosts import describe_hosts, see_hosts
    from fedfr_jax.runs.loop import Lifecycle
    from fedfr_jax.runs.stage_settings import with_earlier
    from fedfr_jax.runs.trackers import Logging, check_sinks
    from fedfr_jax.runs.workdir import claim_on_all_processes

    sinks = values.sinks if values.sinks is not None else Logging().sinks
    view = "quiet" if values.quiet else "auto"
    logging = Logging(sinks, view, values.profile)
    if jax.process_count() > 1:
        hosts = describe_hosts(see_hosts(experiment.mesh), experiment.mesh)
        if jax.process_index() == 0:
            print(hosts, flush=True)
    check_sinks(sinks)  # a config's file may have registered some
    chosen = with_earlier(experiment.stages, values.methods or experiment.stages)
    text = config_text(values.config)
    folder, copy = run.path, run.mirror and run.mirror.upload
    with (
        claim_on_all_processes(
            folder,
            text,
            experiment.stages,
            overwrite=values.overwrite,
            to_train=chosen,
            check_data=data_check(experiment.task, values.data_changed),
        ),
        run.shared(),
    ):
        run_experiment(
            experiment._replace(stages=chosen),
            folder,
            logging=logging,
            lifecycle=Lifecycle(copy, is_asked),
        )
