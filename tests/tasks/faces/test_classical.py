"""Classical algorithms train faces by config, and FedAvg is FedFR's FedAvg row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Model
from tests.contracts.rows import required
from tests.federated import toys
from tests.tasks.faces import given

pytestmark = pytest.mark.ci

SIDE, DIM, PUBLIC = 4, 8, 4
COMMON = {"learning_rate": 0.05, "decay_epochs": 1}
HEAD = "params/(head|backbone/kernel)"
OPTIONS = {  # beside what a row must have: what it is more interesting with
    "fedavg": {
        "server_optimizer": {"name": "fedadam", "learning_rate": 0.01},
        "aggregation": ("centered_clip", "attention"),
    },
    "fedprox": {"weighting": "uniform"},
    "pfedme": {"lam": 1.0},
    "perfedavg": {"inner_learning_rate": 0.005},
    "scaffold": {"momentum": 0.0},
    "ifca": {"num_clusters": 3},
}
REFUSED = {"afl", "fedaws", "feddane", "fedmargin", "finch", "kd", "mime"}
NAMES = sorted(ALGORITHMS.keys() - {"fedfr", *REFUSED})


def row_of(name):
    """Keys of a row of the algorithm."""
    return {"algorithm": name, **required(name, HEAD), **OPTIONS.get(name, {})}


PLAIN = {"use_public_data": False, "contrastive_weight": 0.0, "branch": None}


def small_model():
    """Two linear layers and a running mean over the pixels."""

    def init(key):
        keys = jax.random.split(key)
        params = {
            "kernel": 0.2 * jax.random.normal(keys[0], (SIDE * SIDE, DIM)),
            "last": 0.3 * jax.random.normal(keys[1], (DIM, DIM)),
        }
        return {"params": params, "batch_stats": {"mean": jnp.zeros(DIM)}}

    def apply(variables, x, train, key=None):
        del key
        params, mean = variables["params"], variables["batch_stats"]["mean"]
        hidden = x.reshape(len(x), -1) @ params["kernel"]
        new = 0.9 * mean + 0.1 * hidden.mean(0) if train else mean
        return jnp.tanh(hidden - mean[None]) @ params["last"], {"mean": new}

    return Model(init, apply, (SIDE, SIDE, 1), DIM)


MODEL = small_model()
BACKBONE = MODEL.init(jax.random.key(5))
PHI = np.zeros((PUBLIC, DIM), np.float32)
START = {**BACKBONE, "params": {"backbone": BACKBONE["params"], "phi": PHI}}


RUNS = {}  # results by their arguments, shared by the tests


def run(task, options, *, rounds=1, lanes=1):
    """(method, server, rows [3], outcome) after some rounds of two epochs."""
    name = repr((sorted(options.items()), rounds, lanes))
    if name not in RUNS:
        RUNS[name] = _run(task, options, rounds, lanes)
    return RUNS[name]


def _run(task, options, rounds, lanes):
    settings = given.nested({**COMMON, **options})
    trainer = given.trainer_of(settings, MODEL, task.partition)
    sim = build_simulation(
        trainer.algorithm,
        Batching(8, normalize(), shuffle=False),  # shuffling would double compile time
        task.train,
        given.population_of(task),
        Settings(local_epochs=2, clients_per_device=lanes),
        mesh=make_mesh(1),
    )
    end = toys.play(sim, trainer.init_variables(START), rounds)
    return trainer, end.server, end.rows, end.logs[-1]


def assert_close(a, b):
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(a), jax.device_get(b))


# One of each kind of state; the others are slow.
SOME = ("fedavg", "apfl", "fedrep", "ifca", "perfedavg", "pfedme", "scaffold")
some = pytest.mark.parametrize(
    "name", toys.others_are_slow({(name,) for name in SOME}, NAMES)
)


@some
def test_an_algorithm_trains_faces_whose_class_embeddings_never_leave(task, name):
    trainer, server, rows, outcome = run(task, row_of(name))
    assert (outcome.metrics["steps"] > 0).all()
    generic = trainer.global_model(server)
    same_shape = lambda x, y: x.shape == y.shape
    assert all(jax.tree.leaves(jax.tree.map(same_shape, generic, BACKBONE)))
    change = np.abs(np.asarray(generic["params"]["last"]) - BACKBONE["params"]["last"])
    assert change.max() > 1e-6
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((server, rows)))
    images = jnp.float32(task.train.images[:2]) / 127.5 - 1
    row = jax.tree.map(lambda x: x[0], rows)
    deployed = trainer.algorithm.personalize(server, row)
    assert trainer.apply(deployed, images).shape == (2, DIM)
    heads = rows.leaves["params"]["head"]  # [3, M, D]
    assert not np.isclose(heads[0], heads[1]).any()
    lengths = np.linalg.norm(heads[:, :2], axis=-1)
    if name != "perfedavg":  # whose steps go along every other batch, of one class
        assert (lengths > 0.06).all(), "the first ones are N(0, 0.01^2)"
    inner = jax.tree_util.tree_leaves_with_path(server.inner)
    assert not [p for p, _ in inner if "head" in jax.tree_util.keystr(p)]


@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fedavg_is_the_fedavg_row_of_fedfr(task, lanes):
    _, server, rows, outcome = run(task, {"algorithm": "fedavg"}, rounds=2, lanes=lanes)
    _, expected, known, wanted = run(task, PLAIN, rounds=2, lanes=lanes)
    shared = server.inner.variables
    assert_close(shared["params"]["backbone"], given.backbone(expected)["params"])
    assert_close(shared["batch_stats"], given.backbone(expected)["batch_stats"])
    assert_close(rows.leaves["params"]["head"], given.own(known)["head"])
    assert_close(outcome.metrics["loss"], wanted.metrics["loss"])


def test_statistics_of_fedfr_are_averaged_kept_or_of_the_first(task):
    still = {**PLAIN, "learning_rate": 0.0}
    stats = lambda rows: unpack(given.previous(rows)["batch_stats"])["mean"]
    generic = lambda run: run[0].global_model(run[1])
    _, _, alone, _ = run(task, {**still, "personal": "."}, rounds=2)
    own = run(task, {**still, "batch_stats": "local"}, rounds=2)
    assert_close(stats(own[2]), stats(alone))  # as if there were nobody else
    assert_close(generic(own)["batch_stats"], BACKBONE["batch_stats"])
    averaged = run(task, PLAIN)
    first = run(task, {**PLAIN, "batch_stats": "random_client"})
    assert_close(generic(first)["params"], generic(averaged)["params"])
    chosen = random_client(np.arange(3), 0, 0)
    assert_close(generic(first)["batch_stats"]["mean"], stats(first[2])[chosen])
    mean = generic(averaged)["batch_stats"]["mean"]
    assert not np.allclose(mean, stats(averaged[2])[0])


def in_blocks():
    """`small_model` with its weights in two blocks, the first with statistics."""
    plain = small_model()

    def init(key):
        params, stats = plain.init(key).values()
        return {"params": {k: {"w": x} for k, x in params.items()}, **named(stats)}

    named = lambda stats: {"batch_stats": {"kernel": stats}}

    def apply(variables, x, train, key=None):
        params = {k: x["w"] for k, x in variables["params"].items()}
        stats = variables["batch_stats"]["kernel"]
        own = {"params": params, "batch_stats": stats}
        out, stats = plain.apply(own, x, train, key)
        return out, {"kernel": stats}

    return plain._replace(init=init, apply=apply, blocks=("kernel", "last"))


FIRST = {"backbone/kernel/w", "batch_stats/kernel/mean", "head"}


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("", {"head"}),
        ({"blocks": 1}, {"backbone/last/w", "head"}),
        ({"blocks": 2}, FIRST | {"backbone/last/w"}),
        ({"all_but_blocks": 1}, FIRST),
        ({"batch_norms": True}, FIRST),
        ("backbone/last", {"backbone/last/w", "head"}),
        (".", FIRST | {"backbone/last/w"}),
    ],
)
def test_blocks_of_the_backbone_stay_with_clients_beside_their_classes(
    task, where, kept
):
    model, row = in_blocks(), {"algorithm": "fedavg", "personal": where}
    trainer = given.trainer_of(given.nested(row), model, task.partition)
    drawn = model.init(jax.random.key(0))
    start = {**drawn, "params": {"backbone": drawn["params"], "phi": PHI}}
    algorithm = trainer.algorithm
    server = algorithm.init(trainer.init_variables(start))
    own = algorithm.init_personal(jax.random.key(1), server)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(own)]
    found = {jax.tree_util.keystr(p, simple=True, separator="/") for p in paths}
    short = {name.rpartition("leaves/")[2].removeprefix("params/") for name in found}
    assert short == kept


def test_a_row_of_faces_has_the_keys_of_every_task(task):
    """FedBABU with more: a frozen layer, one that stays, RMSProp, heads first."""
    keys = {
        "personal": "backbone/last",
        "frozen": "backbone/kernel",
        "optimizer": {"name": "rmsprop", "decay": 0.8},
        "learning_rate_multipliers": {"head": 0.1},
        "personal_epochs": 1,
    }
    trainer, server, rows, outcome = run(task, {"algorithm": "fedavg", **keys})
    _, _, _, plain = run(task, {"algorithm": "fedavg"})
    more = outcome.metrics["steps"] / plain.metrics["steps"]
    np.testing.assert_allclose(more, 1.5)  # an epoch beside two
    assert server.inner.inner.variables["params"]["backbone"]["kernel"] is None
    network = trainer.global_model(server)
    np.testing.assert_array_equal(
        network["params"]["kernel"], BACKBONE["params"]["kernel"]
    )
    last = rows.inner.leaves["params"]["backbone"]["last"]
    assert not np.isclose(last[0], last[1]).all()
