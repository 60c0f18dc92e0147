"""Rounds of models with frozen leaves, against masks of the optimizer."""

import re

import chex
import jax
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.federated.programs import round_arguments
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import open_store, start_simulation, sweep
from fedfr_jax.models import MODELS
from fedfr_jax.models.frozen import set_frozen
from fedfr_jax.tasks.classification import cross_entropy

MODEL = MODELS["cnn"]((8, 8, 1), num_classes=3)
PATTERN = "params/(conv|fc)"
VARIABLES = MODEL.init(jax.random.key(0))
NUM_CLIENTS, EACH, LANES = 6, 5, 3


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_CLIENTS * EACH, 8, 8, 1)).astype(np.float32)
    y = np.arange(len(x)) % 3
    return ff.FederatedDataset.from_client_ids(x, y, np.arange(len(x)) // EACH)


def frozen_model():
    return ff.with_frozen(MODEL, PATTERN, VARIABLES)


def masked(rate):
    return trees.freeze(optax.sgd(rate), PATTERN)


def play(
    model, variables, build=ff.fedavg, *, optimizer=optax.sgd, rounds=2, **options
):
    local = ff.LocalTraining(cross_entropy(model), optimizer, 0.1)
    options = {"clients_per_device": LANES, "mesh": ff.make_mesh(1), **options}
    options = {"batch_size": 2, **options}
    run = ff.init(build(local), data(), variables, **options)
    return ff.run_rounds(run, rounds)[0]


def ditto(local):
    return ff.ditto(local, lam=0.5)


def personal(local):
    return ff.with_personal_layers(ff.fedavg(local), "classifier/bias")


def scaffold(local):
    return ff.scaffold(local, num_clients=NUM_CLIENTS)


SLOW = [pytest.param(build, marks=pytest.mark.slow) for build in (ditto, scaffold)]


@pytest.mark.parametrize("build", [ff.fedavg, personal, *SLOW])
def test_training_is_that_of_a_mask(build):
    model = frozen_model()
    run = play(model, ff.moving_variables(model, VARIABLES), build)
    expected = play(MODEL, VARIABLES, build, optimizer=masked).variables
    found = ff.whole_variables(model, run.variables)
    chex.assert_trees_all_close(found, expected, atol=1e-6)
    sizes = lambda tree: [x.size for x in jax.tree.leaves(tree)]
    assert max(sizes((run.server, run.store.template))) <= max(sizes(run.variables))


@pytest.mark.parametrize("devices", [1, 2])
def test_no_frozen_leaf_has_an_axis_of_lanes_or_is_returned(devices):
    model = frozen_model()
    mesh = ff.make_mesh(devices)
    run = play(model, ff.moving_variables(model, VARIABLES), mesh=mesh)
    arguments = round_arguments(run.sim, run.server)
    text = run.sim.programs.run_whole.lower(*arguments).as_text()
    kernels = [x for x in jax.tree.leaves(model.frozen.shapes) if x.ndim > 1]
    for shape in kernels:
        of_one = "x".join(map(str, shape.shape)) + "xf32"
        assert of_one in text
        assert not re.search(rf"<({LANES}|\d+x{LANES})x{of_one}", text)
    returned = re.search(r"func public @main.*?-> \((.*?)\{\n", text, re.S).group(1)
    assert not [x for x in kernels if "x".join(map(str, x.shape)) + "xf32" in returned]


def test_members_of_a_sweep_and_calls_of_rounds_share_them():
    model, table = frozen_model(), data()
    moving = ff.moving_variables(model, VARIABLES)

    def make(rate):
        local = ff.LocalTraining(cross_entropy(model), optax.sgd, rate)
        return ff.fedavg(local)

    settings = Settings(clients_per_device=LANES)
    parts = ff.Batching(2), table.dataset, table.population, settings
    mesh, rates = ff.make_mesh(1), (0.1, 0.2)
    runs = sweep(make, *parts, hypers=rates, seeds=(0, 0), mesh=mesh)
    servers = [start_simulation(sim, moving) for sim in runs.sims]
    stores = [open_store(*x) for x in zip(runs.sims, servers, strict=True)]
    ends, _ = advance(runs, runs.join(jax.device_get(servers)), stores, 0, 2)
    for s in range(2):
        alone = play(model, moving, lambda _, s=s: make(rates[s])).server
        chex.assert_trees_all_close(runs.member(ends, s), alone, atol=1e-6)


def test_programs_take_the_newest_numbers_without_another_compile():
    model, table = frozen_model(), data()
    run = play(model, ff.moving_variables(model, VARIABLES), rounds=1, batch_size=EACH)
    program = run.sim.programs.run_whole
    assert program.num_compiled() == 1
    set_frozen(model, jax.tree.map(lambda x: 1.5 * x, VARIABLES))
    whole = ff.whole_variables(model, run.variables)
    _, (metrics,) = ff.run_rounds(run, 1)
    assert program.num_compiled() == 1
    logs = jax.nn.log_softmax(MODEL.output(whole, table.dataset.images))
    losses = -np.take_along_axis(logs, table.dataset.labels[:, None], 1)
    expected = losses.reshape(NUM_CLIENTS, EACH).mean(1)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_lanes_that_no_round_fills_are_said():
    model = frozen_model()
    moving = ff.moving_variables(model, VARIABLES)
    local = ff.LocalTraining(cross_entropy(model), optax.sgd, 0.1)
    options = {"batch_size": 2, "mesh": ff.make_mesh(2)}
    most = NUM_CLIENTS // 2
    for lanes, words in ((most, ""), (50, f"is 50, .* has {most} .* Set it to {most}")):
        run = ff.init(
            ff.fedavg(local), data(), moving, clients_per_device=lanes, **options
        )
        assert re.search(words, run.sim.idle_lanes) and bool(words) == bool(
            run.sim.idle_lanes
        )


def test_leaves_that_are_not_set_are_refused_and_shapes_set_nothing():
    model = ff.with_frozen(MODEL, PATTERN)
    with pytest.raises(ValueError, match="frozen leaves must be set before it is trai"):
        play(model, model.init(jax.random.key(0)))
    jax.eval_shape(lambda variables: set_frozen(model, variables), VARIABLES)
    assert not model.frozen.is_set
    set_frozen(model, VARIABLES)
    play(model, ff.moving_variables(model, VARIABLES), rounds=1)


def test_a_program_takes_the_constants_that_it_reads_alone():
    model, other = frozen_model(), frozen_model()
    run = play(model, ff.moving_variables(model, VARIABLES), rounds=1)
    assert other.frozen.is_set
    arguments = round_arguments(run.sim, run.server)
    (constants, *_), _ = run.sim.programs.run_whole.lower(*arguments).in_avals
    assert [*constants] == [model.frozen.number]
