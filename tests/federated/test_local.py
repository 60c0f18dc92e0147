"""Local training obeys optax: a client's rounds against a plain loop of its steps."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.corrections import scaffold
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.local import build_local_training, run_steps, sgd
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.federated.simulation import open_store, start_simulation
from fedfr_jax.plan import hlo
from fedfr_jax.types import Client, LocalTraining
from tests.federated import toys

ROUNDS, STEPS = 2, 3
RATE = 0.1
SIZES, STEPS_OF_EACH = (7, 4, 5), (3, 1, 4)  # of several clients
SEED = 8  # draws a client for the first time in round 2


@pytest.fixture(autouse=True)
def _float64_and_optax_own_promotion():
    """Adam's counts need the promotion that optax is written for."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def examples(sizes=(7,)):
    """Images [n, 5] and labels [n] in [0, 3) of every client."""
    rng = np.random.default_rng(0)
    images = [rng.normal(size=(n, 5)) for n in sizes]
    labels = [rng.integers(0, 3, n) for n in sizes]
    return images, labels


def first_variables():
    """Those of the softmax regression `toys.loss_fn`: params W [5, 3] and b [3]."""
    return toys.unflat(np.random.default_rng(1).normal(size=18))


def train(algorithm, **options):
    """Rounds of one client, in the engine, a full batch per step."""
    settings = {"rounds": ROUNDS, "tau": (STEPS,), **options}
    return toys.replay(algorithm, examples(), first_variables(), **settings)


def plain_loss(params, images, labels):
    """What `toys.loss_fn` computes, written again."""
    log_p = jax.nn.log_softmax(images @ params["W"] + params["b"][None])
    return -jnp.mean(log_p[jnp.arange(len(labels)), labels])


def plain_loop(optimizer_at, images, labels, *, rounds=ROUNDS, steps=STEPS):
    """Parameters after each round of optax steps, every round from a fresh state.

    Args:
      optimizer_at: (round, epoch) -> transformation; a full batch is an epoch.
    """

    @jax.jit
    def step(round, epoch, params, state):
        grads = jax.grad(plain_loss)(params, images, labels)
        updates, state = optimizer_at(round, epoch).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, first_variables()["params"])
    ends = []
    for r in range(rounds):
        state = optimizer_at(r, 0).init(params)
        for epoch in range(steps):
            params, state = step(r, epoch, params, state)
        ends.append(params)
    return ends


def plain_loop_of_one(optimizer_at):
    images, labels = examples()
    return plain_loop(optimizer_at, images[0], labels[0])


assert_equal = partial(toys.assert_close, rtol=1e-9, atol=0)


def assert_rounds_equal(end, expected):
    """The parameters of a `train` after each round are those of a plain loop."""
    for server, params in zip(end.servers, expected, strict=True):
        assert_equal(server.variables["params"], params)


# --- Optimizers as optax makes them


def is_bias(params):
    """A mask by path: the leaf b, and not W."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: trees.path_name(path) == "b", params
    )


def clipped(rate):
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(rate, momentum=0.9))


def frozen_bias(rate):
    freeze = optax.masked(optax.set_to_zero(), is_bias)
    return optax.chain(optax.sgd(rate, momentum=0.9), freeze)


def two_parts(rate):
    """Adam for W; b ten times slower, by SGD."""
    kinds = lambda params: jax.tree.map(
        lambda bias: "bias" if bias else "weight", is_bias(params)
    )
    parts = {"bias": optax.sgd(rate / 10), "weight": optax.adam(rate)}
    return optax.multi_transform(parts, kinds)


OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": partial(optax.adamw, weight_decay=0.1),
    "clipped": clipped,
    "frozen_bias": frozen_bias,
    "two_parts": two_parts,
}


def rate_of(round, epoch):
    """A rate that no two steps of the rounds have in common."""
    return RATE / (1 + 3 * round + epoch)


def some(*chosen):
    """Parametrizes by the names of OPTIMIZERS, those not chosen marked slow."""
    chosen = {(name,) for name in chosen}
    return pytest.mark.parametrize("name", toys.others_are_slow(chosen, OPTIMIZERS))


@some("momentum", "adamw", "frozen_bias", "two_parts")
def test_a_rate_of_round_and_epoch_is_that_of_every_step(name):
    make = OPTIMIZERS[name]
    end = train(fedavg(LocalTraining(toys.loss_fn, make, rate_of)))
    at = lambda round, epoch: make(rate_of(round, epoch))
    assert_rounds_equal(end, plain_loop_of_one(at))


@some("adam", "clipped")
def test_an_optimizer_with_its_own_rate_equals_a_plain_loop(name):
    optimizer = OPTIMIZERS[name](RATE)
    end = train(fedavg(LocalTraining(toys.loss_fn, optimizer)))
    assert_rounds_equal(end, plain_loop_of_one(lambda round, epoch: optimizer))


def test_leaves_that_do_not_move_count_in_no_norm():
    """`moves` hides the other leaves from the optimizer, which sees one gradient."""
    local = LocalTraining(toys.loss_fn, clipped, RATE)
    end = train(
        fedavg(build_local_training(local, moves="params/b$")), rounds=1, tau=(1,)
    )
    before = first_variables()["params"]
    images, labels = examples()
    gradient = jax.jit(jax.grad(plain_loss))(before, images[0], labels[0])["b"]
    assert np.linalg.norm(gradient) > 0.05  # so that it is clipped
    params = end.servers[0].variables["params"]
    np.testing.assert_array_equal(params["W"], before["W"])
    clipped_gradient = 0.05 * gradient / np.linalg.norm(gradient)
    np.testing.assert_allclose(
        params["b"], before["b"] - RATE * clipped_gradient, rtol=1e-9
    )


# --- What a loss may return


def scalar_loss(variables, batch, key):
    return toys.loss_fn(variables, batch, key)[0]


def loss_with_metrics(variables, batch, key):
    value = scalar_loss(variables, batch, key)
    return value, {"double": 2 * value}


def loss_with_statistics(variables, batch, key):
    value, metrics = loss_with_metrics(variables, batch, key)
    return value, (variables["batch_stats"], metrics)


def test_losses_of_all_three_forms_train_alike():
    forms = (scalar_loss, loss_with_metrics, loss_with_statistics)
    ends = [train(fedavg(LocalTraining(form, optax.adam, RATE))) for form in forms]
    for end in ends[1:]:
        assert_equal(end.servers, ends[0].servers)
        assert_equal(end.metrics["double"], 2 * ends[0].metrics["loss"])
    assert ends[0].metrics.keys() == {"loss", "steps"}


# --- Optimizers and rates that do not go together


def test_rates_that_do_not_fit_the_optimizer_or_the_algorithm_are_refused():
    own_rate = LocalTraining(toys.loss_fn, optax.sgd(0.1))
    for make, local, message in [
        (fedavg, own_rate._replace(learning_rate=0.3), "must be None.*got 0.3"),
        (fedavg, LocalTraining(toys.loss_fn, optax.sgd), "must be set.*optax.sgd"),
        (partial(scaffold, num_clients=1), own_rate, "must be set for an"),
    ]:
        with pytest.raises(ValueError, match=f"learning_rate {message}"):
            make(local)


def test_an_optimizer_that_keeps_its_first_rate_is_refused_where_rates_change():
    make = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(RATE))
    keeps = lambda rate: optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(rate)
    )
    with pytest.raises(ValueError, match="optimizer must take a new rate"):
        train(fedavg(LocalTraining(toys.loss_fn, keeps, rate_of)))
    end = train(fedavg(LocalTraining(toys.loss_fn, keeps, RATE)))  # which never changes
    assert_rounds_equal(end, plain_loop_of_one(lambda round, epoch: make))


# --- Several rounds of several clients, in the toys' problem


def norm_local(rate=RATE, make=OPTIMIZERS["momentum"]):
    return LocalTraining(toys.norm_loss, make, rate)


# --- Personal leaves


def plain_loops_of_all(make):
    """Parameters of several clients, each trained on its own."""
    parts = zip(*examples(SIZES), STEPS_OF_EACH, strict=True)
    at = lambda round, epoch: make(rate_of(round, epoch))
    return [plain_loop(at, x, y, steps=steps)[-1] for x, y, steps in parts]


def test_clients_that_share_nothing_train_alone():
    make = OPTIMIZERS["momentum"]
    algorithm = with_personal_layers(
        fedavg(LocalTraining(toys.loss_fn, make, rate_of)), "."
    )
    end = toys.replay(
        algorithm,
        examples(SIZES),
        first_variables(),
        where=(2, 2),
        rounds=ROUNDS,
        tau=STEPS_OF_EACH,
    )
    for client, params in enumerate(plain_loops_of_all(make)):
        leaves = jax.tree.map(lambda x, c=client: x[c], end.rows.leaves["params"])
        assert_equal(leaves, params)
    assert not jax.tree.leaves(end.servers[-1].inner)


PATTERNS = ("params/W", "params/b")
EACH_ONCE = {("clipped", "params/W"), ("two_parts", "params/b")}


@pytest.mark.parametrize(
    "name, where", toys.others_are_slow(EACH_ONCE, ["clipped", "two_parts"], PATTERNS)
)
def test_an_optimizer_sees_shared_and_personal_leaves_together(name, where):
    """One client shares with nobody else, so its network is that of a plain loop."""
    make = OPTIMIZERS[name]
    algorithm = with_personal_layers(
        fedavg(LocalTraining(toys.loss_fn, make, RATE)), where
    )
    end = train(algorithm)
    row = jax.tree.map(lambda x: x[0], end.rows)
    deployed = algorithm.personalize(end.servers[-1], row)
    expected = plain_loop_of_one(lambda round, epoch: make(RATE))[-1]
    assert_equal(deployed["params"], expected)
    kept = end.rows.leaves["params"]
    assert [name for name in kept if kept[name] is not None] == [where[-1]]


@functools.cache  # compiled once for all tests of an algorithm
def simulated(algorithm, cohort_size):
    return toys.build(algorithm, cohort_size=cohort_size, local_epochs=2, seed=SEED)


def rounds_of(algorithm, *, folder=None, numbers=(0, 1, 2), server=None, cohort_size=3):
    """Rounds of some of five clients whose batches are shuffled and mirrored.

    Numbers that do not begin with 0 go on from `server` and the rows in `folder`.
    """
    sim, first = simulated(algorithm, cohort_size), numbers[0]
    server = start_simulation(sim, toys.norm_variables()) if server is None else server
    store = open_store(sim, server, folder, resume_round=first)
    end = toys.play_rounds(sim, server, len(numbers), first=first, store=store)
    store.flush(numbers[-1] + 1)
    return end


def test_an_algorithm_that_hands_no_personal_leaves_back_is_refused_by_what_it_lacks():
    whole = fedavg(norm_local())

    def forgetful(*given):
        return whole.client_update(*given)._replace(personal_variables=())

    algorithm = with_personal_layers(whole._replace(client_update=forgetful), "scale")
    with pytest.raises(ValueError, match="^personal needs an algorithm whose Client"):
        rounds_of(algorithm)


def draw(key):
    """Only the personal leaf is given."""
    return {"params": {"scale": jax.random.normal(key, (16,))}}


STILL = with_personal_layers(
    fedavg(norm_local(rate=0.0)), "scale", init_per_client=draw
)


def raw_noise():
    """Noise from a key that is two numbers."""

    def update(grads, key, params=None):
        key, now = jax.random.split(key)
        noise = jax.tree.map(lambda x: jax.random.normal(now, x.shape, x.dtype), grads)
        return noise, key

    init = lambda params: jax.random.PRNGKey(0)
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("noise", [optax.add_noise(1.0, 0.0, 0), raw_noise()])
def test_noise_of_an_optimizer_differs_by_client_and_round(noise):
    rate_zero = lambda rate: optax.chain(optax.sgd(rate), noise)
    algorithm = with_personal_layers(fedavg(norm_local(0.0, rate_zero)), "scale")

    def noise_of_rounds(numbers):
        rows = rounds_of(algorithm, cohort_size=5, numbers=numbers).rows
        return np.asarray(rows.leaves["params"]["scale"]) - 1  # [5, 16]

    first, both = noise_of_rounds((0,)), noise_of_rounds((0, 1))
    for values in (first, both - first):
        assert len(np.unique(values.round(6), axis=0)) == 5
    assert np.abs(both - 2 * first).min(axis=0).max() > 1e-3
    np.testing.assert_array_equal(first, noise_of_rounds((0,)))


def test_noise_of_a_servers_optimizer_differs_by_round_and_is_resumed():
    server_optimizer = optax.chain(optax.sgd(1.0), optax.add_noise(1.0, 0.0, 0))
    algorithm = fedavg(norm_local(0.0), server_optimizer=server_optimizer)
    scale = lambda server: np.asarray(server.variables["params"]["scale"])
    ends = [rounds_of(algorithm, numbers=range(n)).server for n in (1, 2)]
    first, second = scale(ends[0]) - 1, scale(ends[1]) - scale(ends[0])
    assert np.abs(first - second).min() > 1e-3
    stored = jax.tree.map(np.asarray, ends[0])  # as a checkpoint holds it
    resumed = rounds_of(algorithm, numbers=(1,), server=stored).server
    np.testing.assert_array_equal(scale(resumed), scale(ends[1]))


def test_clients_that_are_new_after_a_resume_draw_the_same_leaf(tmp_path):
    whole, half = rounds_of(STILL), rounds_of(STILL, folder=tmp_path, numbers=(0, 1))
    assert half.is_new[sample_cohort(SEED, 2, 5, 3)].sum() == 1
    options = {"folder": tmp_path, "numbers": (2,), "server": half.server}
    toys.assert_same(rounds_of(STILL, **options)[1:3], whole[1:3])


@pytest.mark.parametrize(
    "given, found",
    [({"kernel": jnp.ones(16)}, "none"), ({"scale": jnp.ones(4)}, r"\(4,\)")],
)
def test_a_draw_without_the_personal_leaf_is_refused(given, found):
    algorithm = with_personal_layers(
        fedavg(norm_local()), "scale", init_per_client=lambda key: {"params": given}
    )
    rule = rf"init_per_client must give params/scale of shape \(16,\), got {found}"
    with pytest.raises(ValueError, match=rule):
        rounds_of(algorithm, numbers=(0,))


def test_only_the_leaves_that_decay_says_are_pulled_to_zero():
    params = {"kernel": jnp.full(3, 2.0), "bias": jnp.full(3, 2.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = sgd(weight_decay=0.1, weight_decay_mask="kernel$")(0.5)
    steps, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(steps["kernel"], -0.1)  # rate x decay x 2
    np.testing.assert_array_equal(steps["bias"], 0)


def test_counted_loops_have_lengths_that_the_compiler_knows():
    """Lanes of 7 and 5 steps: a long loop, then two short ones, one step in vain."""
    empty = Client(**dict.fromkeys(Client._fields))

    def steps(num_steps, lengths):
        client = empty._replace(num_steps=num_steps, steps_per_loop=lengths)
        body = lambda step, x: (0.5 * jnp.sin(x) + step.astype(x.dtype), {"x": x})
        return run_steps(body, jnp.ones(()), client)

    lanes = jnp.array([7, 5], jnp.int32)
    run = jax.jit(jax.vmap(steps, (0, None)), static_argnums=1)
    jax.tree.map(np.testing.assert_array_equal, run(lanes, (4, 2)), run(lanes, ()))
    program = hlo.parse(run.lower(lanes, (4, 2)).compile().as_text())
    loops = [x for lines in program.lines.values() for x in lines if x.name == "while"]
    turns = [hlo._turns(program, line) for line in loops]
    assert sorted(filter(None, turns)) == [2, 4] and turns.count(None) == 2
