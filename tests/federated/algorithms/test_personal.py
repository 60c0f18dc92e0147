"""LG-FedAvg and FedBN against a plain loop, and the memory of rounds that stream."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.aggregation.robust import median, rfa
from fedfr_jax.federated.algorithms.fedreid import PublicImages
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.programs import round_arguments
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation, start_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.methods import Leaves
from fedfr_jax.tasks.trainers import select_leaves
from fedfr_jax.types import Dataset, LocalTraining, Model
from tests.federated.toys import play

pytestmark = pytest.mark.ci

SIZES, BATCH, RATE = np.array([5, 9, 3]), 4, 0.1
OFFSETS = np.cumsum([0, *SIZES])
BLOCKS = ("body", "bn", "head")


def variables(width=3, seed=0):
    draw = np.random.default_rng(seed).normal
    params = {
        "body": {"kernel": draw(size=(5, width))},
        "bn": {"scale": 1 + 0.1 * draw(size=width), "bias": draw(size=width)},
        "head": {"kernel": draw(size=(width, 2))},
    }
    tree = {"params": params, "batch_stats": {"bn": {"mean": np.zeros(width)}}}
    return jax.tree.map(np.float32, tree)


def features(variables, x, train=False, key=None):
    """Logits, features and moved statistics; x minus the batch's mean in training."""
    del key
    params, mean = variables["params"], variables["batch_stats"]["bn"]["mean"]
    x = x @ params["body"]["kernel"]
    used = x.mean(0) if train else mean
    x = (x - used[None]) * params["bn"]["scale"][None] + params["bn"]["bias"][None]
    stats = {"bn": {"mean": 0.5 * (mean + used)}} if train else {"bn": {"mean": mean}}
    return x @ params["head"]["kernel"], x, stats


def model_of(width=3):
    apply = lambda *given, key=None: features(*given)[::2]
    init = lambda key: variables(width)
    return Model(init, apply, (5,), 2, blocks=BLOCKS, apply_with_features=features)


def cross_entropy(params, stats, x, labels, is_valid):
    logits, _, stats = features({"params": params, "batch_stats": stats}, x, True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = jnp.where(is_valid, losses, 0).sum() / is_valid.sum().astype(losses.dtype)
    return loss, stats


def loss_fn(variables, batch, key):
    del key
    given = batch.images, batch.labels, batch.is_valid
    loss, stats = cross_entropy(variables["params"], variables["batch_stats"], *given)
    return loss, (stats, {})


def examples(count):
    rng = np.random.default_rng(1)
    images = rng.normal(size=(count, 5)).astype(np.float32)
    return Dataset.from_arrays(images, rng.integers(0, 2, count).astype(np.int32))


def trained_alone(network, client):
    """A client's epoch, batch by batch; the last one is filled up with its first."""
    data, gradient = (
        examples(OFFSETS[-1]),
        jax.jit(jax.grad(cross_entropy, has_aux=True)),
    )
    for first in range(0, SIZES[client], BATCH):
        place = first + np.arange(BATCH)
        rows = OFFSETS[client] + place % SIZES[client]
        seen = data.images[rows], data.labels[rows], place < SIZES[client]
        slope, stats = gradient(network["params"], network["batch_stats"], *seen)
        step = lambda x, g: x - RATE * g
        params = jax.tree.map(step, network["params"], slope)
        network = {"params": params, "batch_stats": stats}
    return network


def plain_rounds(is_kept, shares, rounds):
    """What every client has after rounds; its kept leaves are those it trained last."""
    networks = [variables() for _ in SIZES]
    for _ in range(rounds):
        ends = [trained_alone(x, client) for client, x in enumerate(networks)]
        mean = jax.tree.map(lambda *x: np.average(x, axis=0, weights=shares), *ends)
        pick = lambda path, own, sent: own if is_kept(path) else sent
        networks = [jax.tree_util.tree_map_with_path(pick, x, mean) for x in ends]
    return networks


@pytest.mark.parametrize(
    "where, kept, weighting",
    [
        (Leaves(all_but_blocks=1), ("body", "bn"), "uniform"),
        (Leaves(batch_norms=True), ("bn",), "num_examples"),
    ],
    ids=("lg_fedavg", "fedbn"),
)
def test_kept_leaves_are_the_clients_own_and_the_others_their_mean(
    where, kept, weighting
):
    local = LocalTraining(loss_fn, ff.sgd(), lambda round, epoch: np.float32(RATE))
    algorithm = ff.with_personal_layers(
        ff.fedavg(local, weighting=weighting), select_leaves(model_of(), where)
    )
    sim = build_simulation(
        *(algorithm, Batching(BATCH, shuffle=False), examples(OFFSETS[-1])),
        Population(OFFSETS, np.full(3, 2, np.int32)),
        mesh=make_mesh(1),
    )
    server, rows, *_ = play(sim, variables(), 2)
    shares = SIZES if weighting == "num_examples" else np.ones(3)
    wanted = plain_rounds(lambda path: path[1].key in kept, shares, 2)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for client in range(3):
        row = jax.tree.map(lambda x, i=client: x[i], rows)
        jax.tree.map(close, algorithm.personalize(server, row), wanted[client])


WIDTH, COHORTS = 2**14, (4, 16)
MEMORY = {
    "fedmargin": {},
    "kd": {
        "shared": PublicImages(np.ones((8, 5), np.float32), Batching(4)),
        "distill_every": 1,
    },
    "fedavg": {"links": [rfa()]},
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_round_of_four_times_the_clients_takes_no_model_more(name):
    """Sums are streamed: not one of twelve further clients' models is held."""
    first, more, network = memories_of(name, **MEMORY[name])
    assert first > network
    assert more - first < network / 2


def test_a_round_that_keeps_changes_takes_a_model_more_for_each_client():
    first, more, network = memories_of("fedavg", links=[median()])
    assert more - first >= (COHORTS[1] - COHORTS[0]) * network


def memories_of(name, links=(), **settings):
    """Bytes of a round of each of COHORTS, and of a network."""
    model = model_of(WIDTH)
    facts = {"model": model} if "model" in keywords(ff.ALGORITHMS[name]) else {}
    algorithm = ff.ALGORITHMS[name](
        LocalTraining(loss_fn, ff.sgd(), 0.1), **settings, **facts
    )
    algorithm = ff.with_aggregation(algorithm, *links)
    network = sum(x.nbytes for x in jax.tree.leaves(variables(WIDTH)))
    return *(memory_of(algorithm, cohort, model) for cohort in COHORTS), network


def memory_of(algorithm, cohort, model):
    """Bytes of the compiled round, but for its examples."""
    sizes = np.full(max(COHORTS), 3)
    sim = build_simulation(
        *(algorithm, Batching(BATCH, shuffle=False), examples(sizes.sum())),
        Population(np.cumsum([0, *sizes]), np.full(len(sizes), 2, np.int32)),
        Settings(cohort_size=cohort),
        mesh=make_mesh(1),
    )
    server = start_simulation(sim, model.init(None))
    program = sim.programs.run_whole.lower(*round_arguments(sim, server))
    memory = program.compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes
