"""Small federated problems that several tests share, and golden rounds of them."""

import contextlib
import hashlib
import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.data.augment import compose, horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.local import sgd, step_decay
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.sinks import Sink
from fedfr_jax.tasks.faces.frozen_features import frozen_features, prepare_features
from fedfr_jax.tasks.faces.loss import Branch, face_loss, init_local, on_variables
from fedfr_jax.types import Augment, Cohort, Dataset, LocalTraining, Model, PyTree

SIZES = np.array([5, 9, 3, 12, 7])  # examples of each client
CLASSES = np.array([2, 3, 2, 3, 1])  # classes of each client
NUM_PUBLIC, PUBLIC_CLASSES = 20, 4
SHAPE = (4, 4, 1)
DIM = 6


MIRROR = horizontal_flip()
MIRRORED_BYTES = compose(horizontal_flip(), normalize())


def always(change):
    """The augment that changes every image by `change`, whatever its rank."""

    def apply(key, inputs, targets):
        del key
        return view(0, inputs), targets

    def view(i, inputs):
        del i
        return {**inputs, "image": change(inputs["image"])}

    return Augment(apply, num_views=1, apply_view=view)


def problem(seed=0):
    """Data set and population of five clients and a public set."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(SIZES.sum() + NUM_PUBLIC, *SHAPE)).astype(np.float32)
    labels = [rng.integers(m, size=n) for m, n in zip(CLASSES, SIZES, strict=True)]
    labels.append(rng.integers(PUBLIC_CLASSES, size=NUM_PUBLIC))
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    return (
        Dataset.from_arrays(images, np.concatenate(labels).astype(np.int32)),
        Population(offsets, CLASSES.astype(np.int32)),
    )


def feed(**options):
    return Batching(**{"batch_size": 4, "augment": MIRROR, **options})


def norm_variables():
    """A linear classifier behind a batch norm, in the shape the algorithms expect."""
    kernel = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
    return {
        "params": {"head": {"kernel": jnp.asarray(kernel)}, "scale": jnp.ones(16)},
        "batch_stats": {"mean": jnp.zeros(16)},
    }


def norm_loss(variables, batch, key):
    """Softmax cross-entropy; the running mean moves in every step."""
    del key
    p = variables["params"]
    x = batch.images.reshape(len(batch.images), -1)
    count = jnp.maximum(batch.is_valid.sum(), 1).astype(x.dtype)
    mean = jnp.where(batch.is_valid[:, None], x, 0).sum(0) / count
    logits = ((x - mean[None]) * p["scale"][None]) @ p["head"]["kernel"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[:, None], 1)
    loss = -jnp.where(batch.is_valid, picked[:, 0], 0).sum() / count
    stats = {"mean": 0.9 * variables["batch_stats"]["mean"] + 0.1 * mean}
    return loss, (stats, {})


def fedavg_of(loss, **options):
    """FedAvg of a loss like `norm_loss`."""
    optimizer = sgd(momentum=0.9, weight_decay=1e-3)
    return fedavg(LocalTraining(loss, optimizer, step_decay(0.1, every=2)), **options)


def fedavg_toy(**options):
    """(algorithm, variables to start from)."""
    where = options.pop("personal", None)
    return with_personal_layers(
        fedavg_of(norm_loss, **options), where
    ), norm_variables()


def linear_model():
    def apply(variables, x, train, key=None):
        del train, key
        kernel = variables["params"]["kernel"]
        return x.reshape(len(x), -1) @ kernel, variables["batch_stats"]

    def init(key):
        kernel = jax.random.normal(key, (16, DIM))
        return {"params": {"kernel": kernel}, "batch_stats": {}}

    return gather(Model(init, apply, SHAPE, DIM))


def fedfr_toy(rate=0.01, **options):
    """FedFR whole on a linear backbone: (algorithm, variables to start from)."""
    model = linear_model()
    loss = face_loss(on_variables(model), contrastive_weight=5.0, branch=Branch("bce"))
    optimizer = sgd(momentum=0.9, weight_decay=5e-4)
    embed = model.output
    algorithm = fedfr(
        LocalTraining(loss, optimizer, step_decay(rate, every=2)),
        reference_features=partial(frozen_features, embed),
        prepare=prepare_features(embed, threshold=0.6),
        **options,
    )
    own = init_local(3, DIM, branch=Branch("bce"))
    draw = lambda key: {"params": own(key), "batch_stats": {}}
    algorithm = with_personal_layers(
        algorithm, "params/(head|branch)", init_per_client=draw
    )
    backbone = model.init(jax.random.key(1))
    phi = jax.random.normal(jax.random.key(2), (PUBLIC_CLASSES, DIM))
    params = {"backbone": backbone["params"], "phi": phi, **own(jax.random.key(3))}
    return algorithm, {**backbone, "params": params}


TOYS = {"fedavg": fedavg_toy, "fedfr": fedfr_toy}


def simulate_round(sim, server, store, round):
    """(server after the round, log); the rows go to the store."""
    return run_cohort(sim, server, store, before_round(sim, server, round))


def build(algorithm, *, table=None, mesh=(1, 1), batching=None, **settings):
    """The simulation of `problem`, or of another table."""
    dataset, population = problem()
    dataset = dataset if table is None else table
    parts = batching or feed(), dataset, population
    return build_simulation(
        algorithm, *parts, Settings(**settings), mesh=make_mesh(*mesh)
    )


class Played(NamedTuple):
    """What rounds left, on the host."""

    server: PyTree
    rows: PyTree  # [N, ...]
    is_new: np.ndarray  # [N] bool
    logs: list


def play_rounds(sim, server, rounds=1, *, first=0, cohorts=(), store=None) -> Played:
    """Rounds from a server's state, with the given cohorts or those of the seed."""
    store, logs = store or open_store(sim, server), []
    numbers = range(first, first + rounds)
    chosen = cohorts or (before_round(sim, server, number) for number in numbers)
    for cohort in chosen:
        server, log = run_cohort(sim, server, store, cohort)
        logs.append(log)
    rows, is_new = store.gather(np.arange(sim.population.num_clients))
    return Played(jax.device_get(server), rows, is_new, logs)


def play(sim, variables, rounds=1, **options) -> Played:
    """Rounds from the first, see `play_rounds`."""
    return play_rounds(sim, start_simulation(sim, variables), rounds, **options)


class Reader:
    """Reads rows of an array and remembers which."""

    def __init__(self, images):
        self.images, self.seen = images, []

    def __call__(self, rows):
        self.seen.append(np.asarray(rows))
        return self.images[rows]


def digest(tree) -> str:
    """Of the bits of all leaves."""
    state = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        state.update(np.ascontiguousarray(leaf).tobytes())
    return state.hexdigest()


def assert_same(actual, expected):
    """Equal trees, to the last bit."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected, rtol=1e-5, atol=1e-5):
    """Trees of nearly the same numbers."""
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol, atol)
    jax.tree.map(near, actual, expected)


# --- Golden rounds, in float64

close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


class Replay(NamedTuple):
    """What the rounds left: the server after each, the last rows, the last metrics."""

    servers: list
    rows: object
    metrics: dict


def replay(
    algorithm,
    examples,
    variables,
    *,
    where=(1, 1),
    rows=None,
    rounds=1,
    tau=1,
    cohorts=(),
):
    """Play rounds in float64 with one full batch per step; client k takes tau[k].

    `where` is (devices, lanes).

    All clients train in every round unless `cohorts` names those of each.
    """
    images, labels = examples
    sizes = [len(x) for x in images]
    population = Population(
        np.cumsum([0, *sizes]), np.full(len(sizes), 3, dtype=np.int32)
    )
    sim = build_simulation(
        algorithm,
        Batching(batch_size=max(sizes), shuffle=False),
        Dataset.from_arrays(
            np.concatenate(images), np.concatenate(labels).astype(np.int32)
        ),
        population,
        Settings(
            local_epochs=lambda round: np.asarray(tau), clients_per_device=where[1]
        ),
        mesh=make_mesh(where[0]),
    )
    server = start_simulation(sim, variables)
    store, ids, first = open_store(sim, server), np.arange(len(sizes)), 0
    if rows is not None:
        store.scatter(ids, rows, first)
        first = 1
    servers = []
    for r, cohort in enumerate(cohorts or [ids] * rounds, first):
        played = play_rounds(
            sim, server, store=store, cohorts=[Cohort(np.int32(cohort), r)]
        )
        server = played.server
        servers.append(server)
    return Replay(servers, played.rows, played.logs[0].metrics)


# --- Softmax regression: fl_rounds


def loss_fn(variables, batch, key):
    """Mean cross-entropy of a linear model over the valid examples."""
    del key
    params = variables["params"]
    logits = batch.images @ params["W"] + params["b"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    count = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
    loss = jnp.where(batch.is_valid, losses, 0).sum() / count
    return loss, (variables["batch_stats"], {})


RATE = lambda round, epoch: jnp.full((), 0.1)
LOCAL = LocalTraining(loss_fn, sgd(), RATE)


def unflat(w):
    """Variables of flat parameters [..., 18]."""
    w = np.asarray(w)
    params = {"W": w[..., :15].reshape(*w.shape[:-1], 5, 3), "b": w[..., 15:]}
    return {"params": params, "batch_stats": {}}


def flat(params):
    """Flat parameters [..., 18]."""
    params = params.get("params", params)
    head = np.reshape(params["W"], (*np.shape(params["b"])[:-1], 15))
    return np.concatenate([head, params["b"]], axis=-1)


def play_golden(arrays, algorithm, **options):
    """`replay` of three clients, on two devices with two lanes each."""
    options = {"where": (2, 2), **options}
    examples = [[arrays[f"{name}{k}"] for k in range(3)] for name in "xy"]
    variables = options.pop("variables", None) or unflat(arrays["w0"])
    return replay(algorithm, examples, variables, tau=arrays["tau"], **options)


@contextlib.contextmanager
def compilations(note=lambda name: name):
    """A list to which `note(name)` of every compilation inside the block is added."""
    found = []

    def listen(event, duration, **facts):
        del duration
        if event.endswith("backend_compile_duration"):
            found.append(note(facts.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def others_are_slow(chosen: set, *axes) -> list:
    """Parameters of a test: all combinations, those not chosen marked slow."""
    missing = chosen - set(itertools.product(*axes))
    assert not missing, missing
    mark = lambda case: () if case in chosen else pytest.mark.slow
    cases = itertools.product(*axes)
    return [pytest.param(*case, marks=mark(case)) for case in cases]


class Watcher(Sink):
    """A sink that calls `numbers` and `clients`."""

    def __init__(self, numbers=lambda step, scalars: None, clients=None):
        self.numbers, self.of_clients = numbers, clients

    def __call__(self, step, scalars):
        self.numbers(step, scalars)

    def clients(self, step, values):
        if self.of_clients:
            self.of_clients(step, values)
