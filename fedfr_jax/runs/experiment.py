"""The stages of an experiment, one after the other, judged by the same evaluators.

The work folder holds a folder per stage (checkpoints, personal rows, metrics.jsonl) and
beside them summary.json, partition.json and the plots. Started again with the same
command it goes on where it stopped; a finished stage is read, not repeated.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
import rich.console
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import client_key, first_personal_key
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.federated.store import Store
from fedfr_jax.runs import data_digest, loop, report
from fedfr_jax.runs.begin import begin, end_of, last_simulation
from fedfr_jax.runs.central_stage import train_central
from fedfr_jax.runs.costs import with_costs
from fedfr_jax.runs.sinks import (
    JsonlSink,
    open_sinks,
    read_jsonl,
    show_at_end,
    write_summary,
)
from fedfr_jax.runs.stage_model import add_calibration, forget_model, write_model
from fedfr_jax.runs.workdir import Clock, named_config
from fedfr_jax.text import printable
from fedfr_jax.types import (
    Central,
    Evaluation,
    Evaluator,
    Experiment,
    Federated,
    Networks,
    PyTree,
)

Evaluations = Mapping[str, Evaluation]  # by evaluator


def show(what) -> None:
    """Print text as it is, and a table as wide as it has to be; the first process."""
    if not meshes.is_first():
        return
    if isinstance(what, str):
        print(printable(what, keep="\n"), flush=True)
        return
    console = rich.console.Console()
    wide = rich.console.Console(width=10_000)
    width = max(console.width, wide.measure(what).maximum)
    rich.console.Console(width=width).print(what)


def run_experiment(experiment: Experiment, workdir) -> dict:
    """Run or resume every stage; returns the summary that summary.json holds."""
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    clock = Clock(workdir / "seconds.json")
    write_summary(workdir / "partition.json", experiment.task.facts)
    show(experiment.task.text)
    found = run_stages(experiment, workdir, clock)
    summary = {"methods": numbers(found), "seconds": clock.note()}
    summary |= named_config(workdir)
    write_summary(workdir / "summary.json", summary)
    show(report.result_table(summary))  # before the plots, which may lack a package
    rows = {name: rows_of(workdir / name) for name in found}
    facts = experiment.task.facts
    paths = report.draw(found, rows, workdir, facts=facts, say=show)
    pictures = [path for path in paths if path.suffix == ".png"]
    for path in [workdir / "summary.json", *pictures]:
        show(str(path))
    return summary


def rows_of(folder: pathlib.Path) -> list[dict]:
    """The lines of a stage's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def numbers(found: Mapping[str, Evaluations]) -> dict:
    """{stage: {evaluator: {metric: value}}}."""
    return {
        stage: {name: dict(of.metrics) for name, of in evaluations.items()}
        for stage, evaluations in found.items()
    }


def run_stages(
    experiment: Experiment, workdir: pathlib.Path, clock: Clock | None = None
) -> dict[str, Evaluations]:
    """Train every stage, or read its end, and evaluate it."""
    ends, found = {}, {}
    folders = [workdir / name for name in experiment.stages]
    data_digest.check(experiment.task, folders)
    data_digest.keep(experiment.task, folders)
    wanted = {stage.start_from for stage in experiment.stages.values()}
    for name, stage in experiment.stages.items():
        run = run_central if isinstance(stage.trainer, Central) else run_federated
        before = ends.get(stage.start_from)
        end, found[name] = run(experiment, stage.trainer, before, workdir / name)
        if name in wanted:
            ends[name] = end
        if clock:
            clock.note()
    return found


def run_central(
    experiment: Experiment, trainer: Central, before: PyTree, folder: pathlib.Path
) -> tuple[PyTree, Evaluations]:
    """One network for every client: (its variables, evaluations)."""
    del before
    mesh, seed, end = experiment.mesh, experiment.seed, trainer.settings.epochs
    is_new = len(rows_of(folder)) < end
    variables = train_central(trainer, mesh, folder, seed=seed)
    apply, network = trainer.network_apply, trainer.network(variables)
    networks = Networks(network, apply, None, apply)
    found = saved_and_evaluated(experiment, trainer, networks, folder)
    if is_new:
        show_at_end(folder, end - 1, named(found))
    return variables, found


def saved_and_evaluated(
    experiment: Experiment,
    trainer: Federated | Central,
    networks: Networks,
    folder: pathlib.Path,
) -> dict[str, Evaluation]:
    """Leave a stage's model in its folder, and say what every evaluator finds."""
    write_model(folder, experiment.task, trainer, networks.variables)
    found = evaluate(experiment.task.evaluators, networks)
    add_calibration(folder, found)
    return found


def evaluate(
    evaluators: Mapping[str, Evaluator], networks: Networks
) -> dict[str, Evaluation]:
    """What every evaluator finds."""
    return {name: of.evaluate(networks) for name, of in evaluators.items()}


def run_federated(
    experiment: Experiment, trainer: Federated, before: PyTree, folder: pathlib.Path
) -> tuple[PyTree, Evaluations]:
    """Train one method from `before`, or read its end: (its network, evaluations)."""
    federation, evaluators = experiment.federation, experiment.task.evaluators
    begun = begin(experiment, trainer, before, folder)
    sim, first, last = begun.sim, begun.first, begun.last_round
    server, store = begun.server, begun.store
    view = lambda server: networks_of(experiment, trainer, sim, server, store)
    rounds = federation.rounds
    period = loop.Period(federation.evaluate_every, federation.checkpoint_every)
    parts = [(sim, first, rounds)]
    if last:
        parts.append((last_simulation(sim, last), max(first, rounds), rounds + 1))
    end = end_of(trainer, rounds)
    if first < end:
        forget_model(folder)
    with (
        open_client_log(folder, first) as clients,
        open_sinks(folder, folder.name, end, first) as sinks,
    ):
        judge = in_rounds(experiment, trainer, sim)
        to = loop.Keeper(store, begun.checkpointer, judge, sinks, clients, period)
        for part, first_round, num_rounds in parts:
            server = loop.train(part, server, to, first_round, num_rounds)
        store.keep_newest()  # the last checkpoint is whole
        found = saved_and_evaluated(experiment, trainer, view(server), folder)
    begun.checkpointer.close()
    if first < end:  # what is judged in rounds is there already
        late = {x: of for x, of in found.items() if not evaluators[x].in_rounds}
        show_at_end(folder, end - 1, named(late))
    found = with_costs(found, evaluators, rows_of(folder), begun, rounds)
    network = trainer.network(server) if trainer.network else None
    return network, found


def in_rounds(experiment: Experiment, trainer: Federated, sim) -> Callable:
    """(server, store) -> {"evaluator/metric": value} of what is judged in rounds."""
    evaluators = experiment.task.evaluators.items()
    between = {name: of for name, of in evaluators if of.in_rounds}

    def judge(server, store):
        networks = networks_of(experiment, trainer, sim, server, store)
        return named(evaluate(between, networks))

    return judge


def named(found: Evaluations) -> dict[str, float]:
    """{"evaluator/metric": value}."""
    return {
        f"{name}/{metric}": value
        for name, of in found.items()
        for metric, value in of.metrics.items()
    }


def networks_of(
    experiment: Experiment, trainer: Federated, sim, server: PyTree, store: Store
) -> Networks:
    """The server's network and every client's own, on the whole mesh."""
    mesh = experiment.mesh
    variables, of_client, of_new = None, None, None
    if trainer.network:
        variables = onto(mesh, trainer.network(server))
    if jax.tree.leaves(store.template) or variables is None:
        of_client, of_new = own_networks(mesh, trainer, server, sim.key, store)
    return Networks(variables, trainer.network_apply, of_client, trainer.apply, of_new)


def own_networks(
    mesh: Mesh, trainer: Federated, server: PyTree, key: jax.Array, store: Store
) -> tuple[Callable[[int], PyTree], Callable[[int], PyTree]]:
    """Variables of networks, client -> its own, number -> that of one outside.

    The former is what a client's personal row says.
    """
    server, key = onto(mesh, (server, key))

    def first_row(client):
        own = first_personal_key(client_key(key, client))
        return trainer.algorithm.init_personal(own, server)

    def of_client(client):
        rows, is_new = store.gather(np.array([client]))
        row = jax.tree.map(lambda x: x[0], rows)
        row = meshes.put(row, meshes.replicated(mesh))
        if is_new[0]:  # never drawn: what it would start from
            row = first_row(client)
        return trainer.algorithm.personalize(server, row)

    def of_new(number):
        row = first_row(store.population + number)
        return trainer.algorithm.personalize(server, row)

    return of_client, of_new


@contextlib.contextmanager
def open_client_log(folder: pathlib.Path, first: int):
    """clients.jsonl of one stage, None but in the first process."""
    if not meshes.is_first():
        yield None
        return
    with contextlib.closing(
        JsonlSink(folder / "clients.jsonl", resume_step=first)
    ) as log:
        yield log
