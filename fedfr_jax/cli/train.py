"""Commands that train and evaluate a run: train, demo, evaluate."""

import argparse
import contextlib
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

from ml_collections import ConfigDict

import fedfr_jax
from fedfr_jax.cli import flags
from fedfr_jax.cli.flags import DataChanged, Processes, config_text
from fedfr_jax.cli.signals import GRACE, describe_interrupt, ending_after_a_round
from fedfr_jax.text import without_secrets


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


class Training(NamedTuple):
    """What is trained, and what is shown and kept of it.

    Args:
      overwrite: A,B stages (methods, or pretrained) to remove and train again, with
        those that start from them; without names, all that is in the run directory
      methods: A,B methods to train and to list in the result table, with the stages
        that they start from (default all)
      profile: A:B profile rounds A to B of each method, or epochs of central stages;
        traces go to the stage's tensorboard folder, for xprof
      sinks: A,B outputs of the metrics of rounds and clients: csv, tensorboard, wandb,
        trackio, mlflow (default tensorboard)
      quiet: print only errors and results
      compiled: FOLDER folder of programs by fedfr plan --compile --save, for the same
        devices, config and JAX version
      grace_seconds: S seconds to end and save the round after SIGTERM; 0 ends at once
    """

    overwrite: bool | tuple[str, ...] = ()
    data_changed: DataChanged = None
    methods: tuple[str, ...] = ()
    profile: Annotated[range | tuple[()], rounds] = ()
    sinks: tuple[str, ...] | None = None
    quiet: bool = False
    compiled: str | None = None
    grace_seconds: Annotated[float, seconds] = GRACE


def train(
    config: ConfigDict,
    *,
    workdir: str | None,
    training: Training,
    from_: str | None = None,
    print_config: bool = False,
    processes: Processes,
    typed: Sequence[str],
) -> None:
    """Train every method of a config, or resume where a run stopped.

    After pretraining, every method of the config is trained. An interrupted run resumes
    with the same command, and with more rounds continues from the last one. Any other
    change to what a trained stage depends on is refused: --overwrite=fedfr trains that
    method again, with those that start from it, --overwrite everything. --from=runs/a
    trains the config of another run in a new --workdir. fedfr plan estimates the needs
    of a config beforehand, fedfr serve shows the run while it trains.

    As one of several processes: --distributed under Slurm, Open MPI, Kubernetes and on
    TPU pods; elsewhere --coordinator, --num_processes and --process_id, which fedfr
    launch passes. See docs/how-to/clusters.md.

    Args:
      from_: RUN run directory whose config is trained again, instead of --config
      print_config: print the config as JSON, and train nothing
    """
    if print_config:
        return print(config_text(config))
    location = flags.run_location(workdir)
    if not training.quiet:  # before JAX and the data, which take a while
        shown = without_secrets(str(location))
        print(f"fedfr {fedfr_jax.__version__}: {shown}", flush=True)
    processes.join()
    import jax

    from fedfr_jax.runs.buckets import open_run
    from fedfr_jax.runs.trackers import RunInterrupted

    with (
        ending_after_a_round(typed, training.grace_seconds) as is_asked,
        open_run(location, jax.process_index(), jax.process_count()) as run,
    ):
        try:
            with compiled(config, training) as experiment:
                train_in(config, training, run, is_asked, experiment)
        except RunInterrupted as error:
            if jax.process_index() == 0:
                print(error, flush=True)
            if processes.process_id is None and jax.process_index() == 0:
                print(describe_interrupt(signal.SIGTERM, typed), file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM) from error


@contextlib.contextmanager
def compiled(config: ConfigDict, training: Training) -> Iterator:
    """Build the experiment; in the block its programs are taken from --compiled."""
    from fedfr_jax.config.build import build

    if not training.compiled:
        yield build(config)
        return
    import jax

    from fedfr_jax.runs.compiled_programs import check_stamp, programs_in

    folder = pathlib.Path(training.compiled)
    check_stamp(folder, json.loads(config_text(config)), jax.devices())
    with programs_in(folder) as count:
        yield build(config)
    if jax.process_index() == 0 and not training.quiet:
        print(f"{count.found} programs were in {folder}, {count.compiled} were not.")


def train_in(
    config: ConfigDict,
    training: Training,
    run,
    is_asked: Callable[[], bool],
    experiment,
) -> None:
    """Run the experiment in the folder of an opened run.

    Args:
      is_asked: whether a signal asks this process to end after a round.
    """
    import jax

    from fedfr_jax.runs.data_digest import data_check
    from fedfr_jax.runs.experiment import run_experiment
    from fedfr_jax.runs.hosts import describe_hosts
    from fedfr_jax.runs.loop import Lifecycle
    from fedfr_jax.runs.trackers import Logging, check_sinks
    from fedfr_jax.runs.workdir import claim_on_all_processes, with_earlier

    sinks = Logging().sinks if training.sinks is None else training.sinks
    view = "quiet" if training.quiet else "auto"
    logging = Logging(sinks, view, training.profile)
    if jax.process_count() > 1:
        hosts = describe_hosts(experiment.mesh)
        if jax.process_index() == 0:
            print(hosts, flush=True)
    check_sinks(sinks)  # a config's file may have registered some
    methods = training.methods or experiment.stages
    chosen = with_earlier(experiment.stages, methods)
    folder, mirror = run.path, run.mirror
    with (
        claim_on_all_processes(
            folder,
            config_text(config),
            experiment.stages,
            overwrite=training.overwrite,
            to_train=chosen,
            check_data=data_check(experiment.task, training.data_changed),
        ),
        run.shared(),
    ):
        run_experiment(
            experiment._replace(stages=chosen),
            folder,
            lifecycle=Lifecycle(
                copy=mirror and mirror.upload,
                objects=mirror,
                is_asked_to_end=is_asked,
                logging=logging,
            ),
        )


def demo(
    config: ConfigDict | str = "fedfr/demo",
    *,
    workdir: str = "runs/demo",
    training: Training,
    processes: Processes,
    typed: Sequence[str],
) -> None:
    """Train the demo, in minutes and without a download.

    The shipped config `demo` has pretraining, FedAvg and FedFR on rendered faces.
    Flags are those of fedfr train, such as --config.seed=1.
    """
    assert isinstance(config, ConfigDict)
    again = ["train", "--config=fedfr/demo", f"--workdir={workdir}", *typed[1:]]
    train(config, workdir=workdir, training=training, processes=processes, typed=again)
    print(f"One page of it: fedfr report {workdir} --open")


def evaluate(
    config: ConfigDict,
    *,
    workdir: str | None,
    data_changed: DataChanged = None,
    processes: Processes,
) -> None:
    """Evaluate the checkpoints of a run again, with its evaluators or others.

    The config is that of the run in --workdir unless --config is given;
    --config.evaluation.key=value changes an evaluation.
    """
    location = flags.run_location(workdir)
    processes.join()
    import jax

    from fedfr_jax.config.build import build, sections
    from fedfr_jax.loading import writing_nothing
    from fedfr_jax.runs.buckets import fetched_to_evaluate
    from fedfr_jax.runs.experiment import evaluate_experiment
    from fedfr_jax.runs.locks import lock_to_read
    from fedfr_jax.runs.workdir import check_config, check_inside, check_stages

    stored = json.loads(config_text(config))
    with (
        fetched_to_evaluate(location, jax.process_index()) as folder,
        lock_to_read(folder),
    ):
        check_config(folder, stored, but_for="evaluation")
        check_inside(folder)
        experiment = build(writing_nothing(sections(config)))
        check_stages(folder, experiment.stages, stored)
        evaluate_experiment(experiment, folder, changed=data_changed)
