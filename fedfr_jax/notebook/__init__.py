"""What a notebook does: examples by client, rounds one by one, and what came out.

A thin way to `federated.simulation`, which has every setting; `fedfr train` is the way
for long runs, with checkpoints, logs and pages.
"""

import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.drafts import replacing
from fedfr_jax.federated.client import client_key
from fedfr_jax.federated.client import first_personal_key as first_key
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.federated.simulation import (
    Simulation,
    open_store,
    play,
    simulation,
    start,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.feed import Feed
from fedfr_jax.notebook.checks import (
    check_fits,
    check_input,
    check_options,
    check_steps,
)
from fedfr_jax.notebook.clients import FederatedDataset
from fedfr_jax.schema import check_whole
from fedfr_jax.tasks.classification.accuracy import Accuracy
from fedfr_jax.types import Algorithm, Networks, PyTree

ADVICE = (
    "The run stays as it was before the round. Lower the learning rate, and see that "
    "labels are below the number of the network's outputs."
)


class Run(NamedTuple):
    """A federated run between two rounds."""

    sim: Simulation
    server: PyTree
    store: Store  # the clients' personal rows
    round_number: int  # of the last round that was trained, from 1; 0 before it

    @property
    def variables(self) -> PyTree:
        """{"params", "batch_stats"} of the network that the server hands out."""
        return self.sim.algorithm.network(self.server)

    def __repr__(self) -> str:
        num_clients = self.sim.population.num_clients
        return (
            f"Run(round {self.round_number}, {self.sim.cohort_size} of {num_clients} "
            "clients a round)"
        )


def init(
    algorithm: Algorithm,
    data: FederatedDataset,
    variables: PyTree,
    *,
    batch_size: int,
    feed: Feed | None = None,
    mesh=None,
    folder: str | os.PathLike | None = None,
    **options,
) -> Run:
    """A run before its first round.

    Args:
      variables: {"params": ..., "batch_stats": ...}, or the parameters alone.
      batch_size: B of local steps.
      feed: how batches are made; None shuffles and takes examples as they are, which
        uint8 must not be.
      mesh: None takes every device.
      folder: where personal rows are kept; None takes a temporary folder.
      options: cohort_size, local_epochs, lanes, seed, reduction of `simulation`.

    Raises:
      ValueError: for unknown options, sizes out of range, images that nothing
        normalizes and clients that take no step, before anything is compiled.
    """
    check_options(options)
    check_whole("batch_size", batch_size, 1)
    feed = (feed or Feed(batch_size))._replace(batch_size=batch_size)
    check_input(feed, data.table)
    if not (isinstance(variables, dict) and "params" in variables):
        variables = {"params": variables}
    sim = simulation(
        algorithm,
        feed,
        data.table,
        data.population,
        mesh=mesh or meshes.make_mesh(),
        **options,
    )
    check_steps(sim, options.get("local_epochs", 1))
    server = start(sim, {"batch_stats": {}, **variables})
    return Run(sim, server, open_store(sim, server, folder), 0)


def run_round(run: Run) -> tuple[Run, dict[str, np.ndarray]]:
    """Train one round: (the run after it, {metric: [K] of the cohort's clients}).

    Raises:
      ValueError: when a round was trained from this run before.
      FloatingPointError: when a loss, an update or the server is not finite; names the
        client. The run stays as it was before the round.
    """
    _check_newest(run)
    try:
        server, outcome = play(run.sim, run.server, run.store, run.round_number)
    except FloatingPointError as error:
        raise FloatingPointError(f"{error}. {ADVICE}") from error
    metrics = {"client": outcome.ids, **outcome.metrics}
    return run._replace(server=server, round_number=run.round_number + 1), metrics


def evaluate(
    run: Run, apply: Callable, data: FederatedDataset, *, batch_size: int = 256
) -> dict[str, float | np.ndarray]:
    """Accuracy of the server's network, and of each client's own on its examples.

    Args:
      apply: (variables, x [B, ...]) -> logits [B, M].
      data: examples of the clients that the run has, in the same order.

    Returns:
      {"accuracy": of the server's network on all examples, "accuracy_of_clients": mean
      over clients of their own networks', "per_client": [N]}. There is no "accuracy"
      where clients keep leaves, as under `personal`: nobody deploys that network.

    Raises:
      ValueError: when the data is of another number of clients, shape, dtype or of more
        classes than `apply` gives, or a round was trained from this run.
    """
    _check_newest(run)
    num_clients = run.sim.population.num_clients
    if len(data.clients) != num_clients:
        raise ValueError(
            f"data must be of the run's {num_clients} clients, got {len(data.clients)}."
        )
    feed, mesh = run.sim.feed._replace(batch_size=batch_size), run.sim.mesh
    check_fits(run, apply, data)
    judge = Accuracy(data.table, data.population.offsets, mesh, feed)
    has_rows = bool(jax.tree.leaves(run.store.template))
    of_client = own_networks(run) if has_rows else None
    networks = Networks(run.variables, apply, of_client, apply)
    own = judge.personalised(networks)
    generic = {}
    if run.sim.algorithm.has_global_model:
        generic = judge.generic(networks).metrics
    return {
        **generic,
        "accuracy_of_clients": own.metrics["accuracy"],
        "per_client": own.per_client["accuracy"],
    }


def own_networks(run: Run) -> Callable[[int], PyTree]:
    """client -> variables of its own network."""
    algorithm, server = run.sim.algorithm, run.server

    def of_client(client):
        rows, is_new = run.store.gather(np.array([client]))
        row = jax.tree.map(lambda x: x[0], rows)
        if is_new[0]:  # never drawn: what it would start from
            own = first_key(client_key(run.sim.key, client))
            row = algorithm.init_personal(own, server)
        return algorithm.personalize(server, row)

    return of_client


def _check_newest(run: Run) -> None:
    """Raise ValueError when the store has rows of rounds that `run` has not played.

    Rows are kept in one place, which a round changes: the run before it is history.
    """
    if (newest := run.store.newest()) > run.round_number:
        raise ValueError(
            f"run must be the newest one, of round {newest}, got round "
            f"{run.round_number}: its clients' rows have moved on."
        )


def _npz(path: str | os.PathLike) -> pathlib.Path:
    """`path` with .npz behind it, as numpy.savez has it."""
    path = pathlib.Path(path).expanduser()
    return path if path.suffix == ".npz" else path.with_name(path.name + ".npz")


def save(run: Run, path: str | os.PathLike) -> pathlib.Path:
    """Write the run's state to one .npz file, for `resume`: server, rows, round number.

    Raises:
      ValueError: when a round was played from this run.
    """
    _check_newest(run)
    path = _npz(path)
    ids = run.store.touched()
    rows, _ = run.store.gather(ids)
    arrays = {"round_number": run.round_number, "ids": ids}
    arrays["num_clients"] = run.store.population
    for part, tree in (("server", meshes.fetch(run.server)), ("rows", rows)):
        for place, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[f"{part}/{trees.path_name(place)}"] = np.asarray(leaf)
    with replacing(path) as file:
        np.savez(file, **arrays)
    return path


def is_saved(path: str | os.PathLike) -> bool:
    """Whether a path, with or without its .npz, is what `save` wrote."""
    if pathlib.Path(path).is_dir():  # a work folder may lie beside such a file
        return False
    for file in (path, f"{path}.npz"):
        if zipfile.is_zipfile(file):  # which a path without a file is not
            with zipfile.ZipFile(file) as archive:
                return {"round_number.npy", "num_clients.npy"} <= {*archive.namelist()}
    return False


def resume(run: Run, path: str | os.PathLike) -> Run:
    """The state that `save` wrote, for a run that `init` made alike.

    A run that has played rounds stays as it is: the loaded one has rows of its own, in
    a temporary folder.

    Raises:
      ValueError: when the file is of another algorithm, network or population.
    """
    path = _npz(path)
    with np.load(path) as file:
        arrays = dict(file)
    ids, round_number = arrays.pop("ids"), int(arrays.pop("round_number"))
    if (num_clients := int(arrays.pop("num_clients"))) != run.store.population:
        raise ValueError(
            f"{path} must be of {run.store.population} clients, got {num_clients}."
        )
    server = _named(path, arrays, "server", run.server, ())
    rows = _named(path, arrays, "rows", run.store.template, (len(ids),))
    if arrays:
        raise ValueError(f"{path} must hold no more than the run, got {min(arrays)}.")
    store = run.store
    if store.newest():
        store = open_store(run.sim, run.server)
    if len(ids):
        store.scatter(ids, rows, max(round_number - 1, 0))
    server = onto(run.sim.mesh, server)
    return run._replace(server=server, store=store, round_number=round_number)


def _named(path, arrays, part: str, template: PyTree, leading: tuple) -> PyTree:
    """Take a part out of `arrays`, like `template` with `leading` axes before."""

    def pick(place, leaf):
        name = f"{part}/{trees.path_name(place)}"
        found = arrays[name].shape if name in arrays else "none"
        if found != (*leading, *leaf.shape):
            raise ValueError(
                f"{path} must hold {name} of shape {(*leading, *leaf.shape)}, "
                f"got {found}."
            )
        return arrays.pop(name)

    return jax.tree_util.tree_map_with_path(pick, template)
