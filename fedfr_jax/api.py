"""Python API: federated data sets, rounds one at a time, evaluation.

A thin layer over `federated.build_simulation`, which has every setting. For long runs
with checkpoints, logs and reports use `fedfr train`.
"""

import itertools
import json
import os
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import ClientPartition
from fedfr_jax.data.partition.rows import ClientRows, group_rows
from fedfr_jax.data.stream import Stream, example_shape, stream
from fedfr_jax.federated.aggregation.exact_sum import clipping_warning
from fedfr_jax.federated.client import EqualRows, Population
from fedfr_jax.federated.inference import client_models
from fedfr_jax.federated.model_parallel import put_on_mesh
from fedfr_jax.federated.participation import with_counted_work
from fedfr_jax.federated.privacy import ledger as ledgers
from fedfr_jax.federated.privacy.accountant import continued
from fedfr_jax.federated.privacy.ledger import Ledger, num_rounds
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.state import RoundLog, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.training_description import check_settings, describe_run
from fedfr_jax.files import replace_file
from fedfr_jax.json_files import parse_json
from fedfr_jax.ranges import Count
from fedfr_jax.schema import check_keys, checked
from fedfr_jax.types import Algorithm, Dataset, PyTree, TrainedModels, model_inputs


class FederatedDataset(NamedTuple):
    """Examples grouped by client, in host memory or read when they are needed."""

    dataset: Dataset | Stream  # [T, ...] and labels [T]
    population: Population
    clients: np.ndarray | range  # [N] names or numbers of the clients

    @classmethod
    def from_client_ids(cls, x, y, client_ids) -> "FederatedDataset":
        """Group examples by their client ids.

        Args:
          x: [T, ...] model inputs: finite floats, or uint8 that `batching` normalizes;
            or {name: [T, ...]}, which a loss finds in `batch.inputs`.
          y: [T] whole numbers from 0, the classes.
          client_ids: [T] client of each example, numbers or names.
        """
        x, y, client_ids = inputs_of(x), class_labels("y", y), np.asarray(client_ids)
        num_inputs = {len(leaf) for leaf in jax.tree.leaves(x)}
        has_nan = client_ids.dtype.kind == "f" and np.isnan(client_ids).any()
        if client_ids.ndim != 1 or has_nan:
            raise ValueError(
                "client_ids must be one number or string per example, shape [T], no "
                f"nan, got {client_ids.dtype} of shape {client_ids.shape}."
            )
        counts = [*sorted(num_inputs), len(y), len(client_ids)]
        if len({*counts}) > 1 or not len(y):
            raise ValueError(
                f"x, y and client_ids must have one entry per example, got {counts}."
            )
        clients, owner = np.unique(client_ids, return_inverse=True)
        part = group_rows(owner, y, len(clients))
        return cls._of_rows(x, y, part, y.max() + 1, clients)

    @classmethod
    def from_partition(
        cls, x, y, split: ClientPartition
    ) -> tuple["FederatedDataset", "FederatedDataset"]:
        """Build the training and the test set of a partition, such as `dirichlet`'s."""
        x, y = inputs_of(x), class_labels("y", y, split.num_classes)
        of_part = lambda part: cls._of_rows(
            x, y, part, split.num_classes, np.arange(split.num_clients)
        )
        return of_part(split.train), of_part(split.test)

    @classmethod
    def _of_rows(cls, x, y, part: ClientRows, num_classes: int, clients):
        """Select the rows of a partition's part."""
        classes = np.broadcast_to(np.int32(num_classes), len(clients))
        inputs = jax.tree.map(lambda leaf: leaf[part.rows], x)
        dataset = Dataset.from_arrays(inputs, y[part.rows])
        return cls(dataset, Population(part.offsets, classes), clients)

    @classmethod
    def from_reader(
        cls, read: Callable, labels, *, num_clients: int, num_classes: int
    ) -> "FederatedDataset":
        """Build a data set that is read when needed, with equal clients.

        Client i has the i-th of `num_clients` equal parts of the examples. No array has
        an entry per client, so that memory is that of a cohort.

        Args:
          read: rows [n] int64 -> model inputs [n, ...]; called from another thread.
          labels: [T] int; if they do not fit memory, int32 of a memory map, or one for
            all: `np.broadcast_to(np.int32(0), T)`.
        """
        labels = class_labels("labels", labels, num_classes)
        rows_each, rest = divmod(len(labels), max(num_clients, 1))
        if num_clients < 1 or rows_each < 1 or rest:
            raise ValueError(
                "labels must have equally many entries per client, got "
                f"{len(labels)} for num_clients={num_clients}."
            )
        classes = np.broadcast_to(np.int32(num_classes), num_clients)
        population = Population(EqualRows(num_clients, rows_each), classes)
        return cls(stream(read, labels), population, range(num_clients))

    def __repr__(self) -> str:
        return (
            f"FederatedDataset({len(self.clients)} clients, "
            f"{self.dataset.num_examples} examples of {self.dataset.input_shape})"
        )


def inputs_of(x) -> PyTree:
    """Check inputs: an array, or a mapping of arrays."""
    if isinstance(x, Mapping):
        return {name: examples(value) for name, value in x.items()}
    return examples(x)


def examples(x) -> np.ndarray:
    """Check that `x` [T, ...] is an array of finite numbers."""
    x = np.asarray(x)
    if x.ndim < 1 or x.dtype.kind not in "fiub":
        raise ValueError(
            f"x must be numbers of shape [T, ...], got {x.dtype} of shape {x.shape}."
        )
    if x.dtype.kind != "f":
        return x
    is_finite = np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if not is_finite.all():
        raise ValueError(
            "x must be finite, got nan or infinity in example "
            f"{int(is_finite.argmin())}. Remove or repair it."
        )
    return x


def class_labels(name: str, y, num_classes: int | None = None) -> np.ndarray:
    """Check labels [T], return them as int32 in [0, num_classes)."""
    y = np.asarray(y)
    if y.ndim != 1 or y.dtype.kind not in "fiub":
        raise ValueError(
            f"{name} must be integers of shape [T], got {y.dtype} of shape {y.shape}. "
            f"Give {name}.argmax(1) for one-hot rows, {name}[:, 0] for a column, "
            f"np.unique({name}, return_inverse=True)[1] for names of classes."
        )
    limit = 2**31 - 1 if num_classes is None else num_classes
    suspects = [y.min(), y.max()] if len(y) else []  # without memory for each label
    if y.dtype.kind == "f":
        suspects += [*y[y != np.floor(y)][:1]]
    for label in suspects:
        if not 0 <= label < limit or label != np.floor(label):
            raise ValueError(f"{name} must be integers in [0, {limit}), got {label}.")
    return y if y.dtype == np.int32 else y.astype(np.int32)


def check_input(batching: Batching, table: Dataset | Stream) -> None:
    """Raise ValueError for uint8 images that would be trained on without scaling."""
    inputs = trained_inputs(batching, table)
    if any(x.dtype == jnp.uint8 for x in jax.tree.leaves(inputs)):
        raise ValueError(
            "x must be floats, or uint8 with a batching that normalizes, got plain "
            "uint8. Give x.astype(np.float32) / 127.5 - 1, or "
            "batching=ff.Batching(batch_size, ff.build_augment([]))."
        )


def trained_inputs(batching: Batching, table: Dataset | Stream):
    """Shapes of one example's inputs as the model gets them."""
    example = example_shape(table)
    if batching.augment is None:
        return example.inputs
    key = jax.random.key(0)
    apply = batching.augment.apply
    inputs, _ = jax.eval_shape(apply, key, example.inputs, example.targets)
    return inputs


def check_steps(sim: Simulation, local_epochs: int | tuple | Callable) -> None:
    """Raise ValueError if no client would ever take a step.

    Epochs by a function of the round, and examples that an algorithm adds, are not
    known here.
    """
    if callable(local_epochs) or sim.algorithm.prepare:
        return
    if not np.max(local_epochs):
        raise ValueError(f"local_epochs must be at least 1, got {local_epochs}.")
    largest = int(sim.population.largest(1)[0])
    if not sim.batching.steps_per_epoch(largest):
        raise ValueError(
            "batch_size with drop_last=True must be at most the largest client's "
            f"{largest} examples, got {sim.batching.batch_size}. Lower batch_size or "
            "set drop_last=False."
        )


def check_data(run, apply: Callable, data) -> None:
    """Raise ValueError for data unlike the run's, or with other classes."""
    expected, given = describe_data(run.sim.data.dataset), describe_data(data.dataset)
    if expected != given:
        raise ValueError(
            f"examples of data must be {expected}, as those of the run, got {given}."
        )
    inputs = model_inputs(trained_inputs(run.sim.batching, run.sim.data.dataset))
    logits = jax.eval_shape(apply, run.variables, trees.shapes(inputs, 1))
    if logits.ndim != 2:
        raise ValueError(f"apply must give logits [B, M], got shape {logits.shape}.")
    if (largest := int(data.dataset.labels.max())) >= logits.shape[1]:
        raise ValueError(
            f"labels of data must be below the {logits.shape[1]} classes of apply's "
            f"logits, got {largest}."
        )


def check_clients(expected: np.ndarray | range, given: np.ndarray | range) -> None:
    """Raise ValueError unless these are the run's clients [N], in its order.

    Numbers are no texts: client 1 is another one than client "1".
    """
    if isinstance(expected, range) and isinstance(given, range) and expected == given:
        return  # a population too large for a list of its clients
    both = [x if isinstance(x, range) else x.tolist() for x in (expected, given)]
    for before, now in itertools.zip_longest(*both):
        if before != now:
            raise ValueError(
                f"clients of data must be the run's, got {now!r} for client "
                f"{before!r}. Give the examples the client ids of the run."
            )


def describe_data(table: Dataset | Stream) -> str:
    """Shape and dtype of an example, such as "float32 (28, 28, 1)"."""

    def describe(x):
        return f"{jax.dtypes.canonicalize_dtype(x.dtype)} {x.shape}"

    names = jax.tree.map(describe, model_inputs(example_shape(table).inputs))
    return str(names)


ADVICE = (
    "The run stays as it was before the round. Lower the learning rate, and see that "
    "labels are below the number of the network's outputs."
)


class RunState(NamedTuple):
    """State of a federated run between two rounds."""

    sim: Simulation
    server: PyTree
    store: Store  # of the clients' personal states
    round_number: int  # of the last round that was trained, from 1; 0 before it
    clients: np.ndarray | range  # [N] names or numbers, as of `FederatedDataset`
    has_warned: bool = False  # of numbers that `quantize` cuts
    ledger: Ledger = ()  # of its private rounds

    @property
    def variables(self) -> PyTree:
        """Variables {"params", "batch_stats"} of the global model."""
        return self.sim.algorithm.global_model(self.server)

    def __repr__(self) -> str:
        num_clients = self.sim.population.num_clients
        cohort_size = self.sim.settings.cohort_size
        return (
            f"Run(round {self.round_number}, {cohort_size} of {num_clients} "
            "clients a round)"
        )


@checked
def init(
    algorithm: Algorithm,
    data: FederatedDataset,
    variables: PyTree,
    *,
    batch_size: Count,
    batching: Batching | None = None,
    mesh=None,
    folder: str | os.PathLike | None = None,
    **options,
) -> RunState:
    """Initialize a run before its first round.

    Args:
      variables: {"params": ..., "batch_stats": ...}, or the parameters alone.
      batch_size: B of local steps.
      batching: how batches are made; None shuffles and does not change the examples,
        which must not be uint8.
      mesh: None takes every device.
      folder: of the store of personal states; None takes a temporary folder.
      options: cohort_size, local_epochs, clients_per_device, seed, sampling,
        reproducible_sum and systems, see `federated.settings.Settings`.

    Raises:
      ValueError: for unknown options, sizes out of range, images that are not
        normalized and clients that take no step, before anything is compiled.
    """
    check_keys("options of init", options, Settings._fields)
    batching = (batching or Batching(batch_size))._replace(batch_size=batch_size)
    check_input(batching, data.dataset)
    if not (isinstance(variables, dict) and "params" in variables):
        variables = {"params": variables}
    sim = build_simulation(
        algorithm,
        batching,
        data.dataset,
        data.population,
        Settings(**options),
        mesh=mesh or meshes.make_mesh(),
    )
    check_steps(sim, options.get("local_epochs", 1))
    server = start_simulation(sim, {"batch_stats": {}, **variables})
    sim = with_counted_work(sim, server)
    return RunState(sim, server, open_store(sim, server, folder), 0, data.clients)


def run_round(run: RunState) -> tuple[RunState, dict[str, np.ndarray]]:
    """Train one round: (the run after it, {metric: [K] of the cohort's clients}).

    Metrics of the round as a whole are numbers, such as the `epsilon` that a private
    algorithm has spent after it. If clients fail or take time, K counts those whose
    update has arrived; the number of others and the simulated seconds so far are
    further numbers.

    Raises:
      ValueError: when a round was trained from this run before, or this one would spend
        more than the algorithm's epsilon.
      FloatingPointError: when a loss, an update or the server is not finite; names the
        client. The run stays as it was before the round.
    """
    run, (metrics,) = run_rounds(run, 1)
    return run, metrics


@checked
def run_rounds(
    run: RunState, num_rounds: Count
) -> tuple[RunState, list[dict[str, np.ndarray]]]:
    """Train rounds in one call of the devices: (the run after them, metrics of each).

    The numbers are those of as many `run_round`; the host does not wait between them,
    which takes most of a round of small models on an accelerator. A program is compiled
    for each `num_rounds`.

    Raises:
      ValueError: as `run_round`, and if rounds need the host: for an algorithm with
        `prepare`, and clients that take time or are sampled by loss; or if the streamed
        examples of all rounds do not fit.
      FloatingPointError: as `run_round`; the run stays as it was before the call.
    """
    _check_newest(run)
    sim = _after_ledger(run)
    try:
        server, (logs,) = advance(
            sim.runs, run.server, [run.store], run.round_number, num_rounds
        )
    except FloatingPointError as error:
        raise FloatingPointError(f"{error}. {ADVICE}") from error
    metrics = [{"client": x.ids, **x.metrics, **x.counts} for x in logs]
    return _after_rounds(run, sim, server, logs), metrics


def _after_ledger(run: RunState) -> Simulation:
    """The run's simulation, whose accountant knows the private rounds before.

    Raises:
      ValueError: for rounds before that were not private, or cannot be composed.
    """
    sim, done = run.sim, num_rounds(run.ledger)
    if sim.accountant is not None and done != run.round_number:
        raise ValueError(
            f"all rounds of a private run must be private, got {done} of the "
            f"{run.round_number} before. Begin a new run with ff.init."
        )
    return sim._replace(accountant=continued(sim.accountant, run.ledger))


def _after_rounds(
    run: RunState, sim: Simulation, server: PyTree, logs: Sequence[RoundLog]
) -> RunState:
    """The run after rounds, of which the first that cuts many numbers warns."""
    texts = [clipping_warning(outcome.metrics) for outcome in logs]
    if any(texts) and not run.has_warned:
        warnings.warn(next(filter(None, texts)), stacklevel=3)
    end, ledger = run.round_number + len(logs), run.ledger
    if sim.accountant is not None:
        ledger = sim.accountant.ledger(end)
    return run._replace(
        server=server,
        round_number=end,
        ledger=ledger,
        has_warned=run.has_warned or any(texts),
    )


def evaluate(
    run: RunState, apply: Callable, data: FederatedDataset, *, batch_size: int = 256
) -> dict[str, float | np.ndarray]:
    """Evaluate the accuracy of the global model, and of each client's on its examples.

    Args:
      apply: (variables, x [B, ...]) -> logits [B, M].
      data: examples of the run's clients, in the same order.

    Returns:
      {"accuracy": of the global model on all examples, "accuracy_of_clients": mean over
      clients of their models', "per_client": [N]}. There is no "accuracy" if clients
      keep leaves, as under `personal`: the global model is not deployed then.

    Raises:
      ValueError: when the data has other clients, shape or dtype, or more classes than
        `apply` gives, or a round was trained from this run.
    """
    from fedfr_jax.tasks.classification import Accuracy  # slow to import

    _check_newest(run)
    check_clients(run.clients, data.clients)
    batching, mesh = run.sim.batching._replace(batch_size=batch_size), run.sim.mesh
    check_data(run, apply, data)
    offsets: Any = data.population.offsets  # EqualRows are indexed as an array is
    accuracy = Accuracy(data.dataset, offsets, mesh, batching)
    has_rows = bool(jax.tree.leaves(run.store.template))
    models = run.sim.algorithm, run.server, run.sim.key, run.store, mesh
    of_client = client_models(*models)[0] if has_rows else None
    networks = TrainedModels(run.variables, apply, of_client, apply)
    personalized = accuracy.personalized(networks)
    generic = {}
    if run.sim.algorithm.has_global_model:
        generic = accuracy.generic(networks).metrics
    return {
        **generic,
        "accuracy_of_clients": personalized.metrics["accuracy"],
        "per_client": personalized.per_client["accuracy"],
    }


def _check_newest(run: RunState) -> None:
    """Raise ValueError if the store has states of later rounds than `run`.

    A round overwrites the states, so that earlier runs can no longer be used.
    """
    has_states = bool(jax.tree.leaves(run.store.template))
    if has_states and (newest := run.store.newest()) > run.round_number:
        raise ValueError(
            f"run must be the newest one, of round {newest}, got round "
            f"{run.round_number}, whose client states are overwritten."
        )


def _npz(path: str | os.PathLike) -> pathlib.Path:
    """`path` with the suffix .npz, as numpy.savez adds it."""
    path = pathlib.Path(path).expanduser()
    return path if path.suffix == ".npz" else path.with_name(path.name + ".npz")


def save(run: RunState, path: str | os.PathLike) -> pathlib.Path:
    """Write the run's state to an .npz file, for `resume`.

    With what its `init` got, as far as it can be compared, and with the ledger of its
    private rounds.
    """
    _check_newest(run)
    path = _npz(path)
    ids = run.store.touched()
    rows, _ = run.store.gather(ids)
    arrays = {"round_number": run.round_number, "ids": ids}
    arrays["num_clients"] = run.store.population
    arrays["ledger"] = ledgers.to_json(run.ledger)
    arrays["settings"] = json.dumps(describe_run(run.sim, run.clients))
    for part, tree in (("server", meshes.fetch(run.server)), ("rows", rows)):
        for name, leaf in trees.by_name(tree).items():
            arrays[f"{part}/{name}"] = np.asarray(leaf)
    with replace_file(path) as file:
        np.savez(file, **arrays)
    return path


def is_saved(path: str | os.PathLike) -> bool:
    """Whether a path, with or without its .npz, is a file that `save` wrote."""
    if pathlib.Path(path).is_dir():  # a run directory may have the name of such a file
        return False
    for file in (path, f"{path}.npz"):
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                return {"round_number.npy", "num_clients.npy"} <= {*archive.namelist()}
    return False


def resume(run: RunState, path: str | os.PathLike) -> RunState:
    """Load the state that `save` wrote, into a run from an equal `init`.

    A run that has trained rounds is not changed: the loaded one has a new store, in a
    temporary folder.

    Raises:
      ValueError: when the file is of another algorithm, network or population, other
        data or settings: names what differs. The noise multiplier of private rounds may
        differ: epsilon composes the rounds before with those to come.
    """
    path = _npz(path)
    with np.load(path) as file:
        arrays = dict(file)
    ids, round_number = arrays.pop("ids"), int(arrays.pop("round_number"))
    if (num_clients := int(arrays.pop("num_clients"))) != run.store.population:
        raise ValueError(
            f"{path} must have {run.store.population} clients, got {num_clients}."
        )
    before = parse_json(str(arrays.pop("settings")), path)
    ledger = ledgers.from_json(str(arrays.pop("ledger")), path)
    server = _named(path, arrays, "server", run.server, ())
    rows = _named(path, arrays, "rows", run.store.template, (len(ids),))
    if arrays:
        raise ValueError(
            f"{path} must have no other arrays than the run, got {min(arrays)}."
        )
    check_settings(path, before, describe_run(run.sim, run.clients))
    store = run.store
    if store.newest():
        store = open_store(run.sim, run.server)
    if len(ids):
        store.scatter(ids, rows, max(round_number - 1, 0))
    server = put_on_mesh(run.sim.mesh, server)
    return run._replace(
        server=server, store=store, round_number=round_number, ledger=ledger
    )


def _named(path, arrays, part: str, template: PyTree, leading: tuple) -> PyTree:
    """Take part `part` from `arrays`, like `template` with `leading` axes in front."""

    def pick(key_path, leaf):
        name = f"{part}/{trees.path_name(key_path)}"
        array = arrays.pop(name, None)
        if array is not None and array.dtype.kind == "V":  # as numpy stores bfloat16
            array = array.view(leaf.dtype)
        found = None if array is None else (array.shape, array.dtype)
        if found != (expected := ((*leading, *leaf.shape), leaf.dtype)):
            raise ValueError(f"{path} must have {name} of {expected}, got {found}.")
        return array

    return jax.tree_util.tree_map_with_path(pick, template)
