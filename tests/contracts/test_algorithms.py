"""What every member of ALGORITHMS owes the engine, on five clients and a tiny model."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import calls
from fedfr_jax.federated import client as client_module
from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedreid import PublicImages
from fedfr_jax.federated.algorithms.personal import (
    top_blocks,
    with_batch_stats,
    with_personal_layers,
)
from fedfr_jax.federated.attacks import with_attack
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.sampling import random_client, sample_cohort
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.streaming import place_data
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort, Dataset, LocalTraining, Model
from tests.federated import toys

SIZES = (3, 9, 5, 12, 7)
COHORT, CLASSES, SEED = 3, 3, 3
ALONE, APART = (1, 1), (4, 2)  # devices, lanes: APART has more places than clients
HEAD = "params/head"


def loss_fn(variables, batch, key):
    """Softmax regression through a linear body, with a running mean of the inputs."""
    del key
    params, stats = variables["params"], variables["batch_stats"]
    logits = batch.images @ params["body"] @ params["head"] + params["bias"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    count = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
    mean_of = lambda x: jnp.where(batch.is_valid, x, 0).sum() / count
    mean = 0.9 * stats["mean"] + 0.1 * mean_of(batch.images.mean(axis=1))
    is_right = (logits.argmax(axis=1) == batch.labels).astype(losses.dtype)
    return mean_of(losses), ({"mean": mean}, {"accuracy": mean_of(is_right)})


def features_of(variables, x, train, key=None):
    """Logits, features behind the body, statistics."""
    del train, key
    params = variables["params"]
    features = x @ params["body"]
    logits = features @ params["head"] + params["bias"][None]
    return logits, features, variables["batch_stats"]


def face_loss(variables, batch, key, *, reference):
    """The same for FedFR's tree: own classes first, then the public ones."""
    del reference
    params = variables["params"]
    classes = jnp.concatenate([params["head"], params["phi"]])
    flat = {
        "body": params["backbone"]["body"],
        "head": classes.T,
        "bias": jnp.zeros(len(classes)),
    }
    return loss_fn({**variables, "params": flat}, batch, key)


def variables_of(seed):
    """Parameters and statistics of the tiny model."""
    draw = np.random.default_rng(seed).normal
    params = {
        "body": draw(size=(6, 4), scale=0.5),
        "head": draw(size=(4, CLASSES), scale=0.5),
        "bias": np.zeros(CLASSES),
    }
    tree = {"params": params, "batch_stats": {"mean": np.zeros(())}}
    return jax.tree.map(lambda x: x.astype(np.float32), tree)


MODEL = Model(
    init=lambda key: variables_of(0),
    apply=lambda *arguments, key=None: features_of(*arguments)[::2],
    input_shape=(6,),
    embedding_dim=CLASSES,
    apply_with_features=features_of,
)


def contrasted(variables, batch, key, *, received, previous):
    """MOON's loss: near the received model, away from the previous one."""
    loss, aux = loss_fn(variables, batch, key)
    apart = lambda other: jnp.square(
        variables["params"]["body"] - other["params"]["body"]
    ).sum()
    return loss + 0.1 * (apart(received) - apart(previous)), aux


class Member(NamedTuple):
    """An algorithm at test size, and what its server starts from."""

    build: object
    variables: object = variables_of(0)


RATE = lambda round, epoch: jnp.float32(0.1)
LOCAL = LocalTraining(loss_fn, sgd(), RATE)
FACES = {
    "params": {
        "backbone": {"body": variables_of(0)["params"]["body"]},
        "phi": variables_of(1)["params"]["head"].T[:2],
        "head": np.float32(0.1 * np.random.default_rng(2).normal(size=(CLASSES, 4))),
    },
    "batch_stats": variables_of(0)["batch_stats"],
}


def tiny(name, local=LOCAL, **settings):
    """What builds the member `name`; `rows.py` makes rows of the same settings."""
    return functools.partial(_built, name, local, **settings)


def _built(name, local, **settings):
    return ALGORITHMS[name](local, **settings)


LAYER = {"head": {"kernel": np.ones((6, CLASSES)), "bias": np.zeros(CLASSES)}}
LAYER, NO_STATS = jax.tree.map(np.float32, LAYER), {"batch_stats": {}}


def linear_features(variables, x, train, key=None):
    """Logits of inputs, the inputs, no statistics: a layer behind a frozen network."""
    del train, key
    layer = variables["params"]["head"]
    return x @ layer["kernel"] + layer["bias"][None], x, {}


LINEAR = MODEL._replace(
    init=lambda key: {"params": LAYER, **NO_STATS}, apply_with_features=linear_features
)
IMAGES = np.random.default_rng(5).normal(size=(6, 6)).astype(np.float32)
SEEN = {"model": MODEL, "shared": PublicImages(IMAGES, Batching(batch_size=4))}
MEMBERS = {
    "afl": Member(tiny("afl", num_classes=CLASSES)),
    "apfl": Member(tiny("apfl")),
    "cdw": Member(tiny("cdw", model=MODEL)),
    "ditto": Member(tiny("ditto")),
    "fedavg": Member(tiny("fedavg", server_optimizer=optax.sgd(1))),
    "fedaws": Member(tiny("fedaws", spreadout=spreadout_sum, classes=HEAD)),
    "feddyn": Member(tiny("feddyn", num_clients=len(SIZES))),
    "feddane": Member(tiny("feddane", mu=0.1)),
    "fedfr": Member(
        tiny("fedfr", LocalTraining(face_loss, sgd(momentum=0.9), RATE)), FACES
    ),
    "fedmargin": Member(tiny("fedmargin", model=MODEL)),
    "fednova": Member(tiny("fednova")),
    "fedprox": Member(tiny("fedprox", mu=0.1)),
    "fedrep": Member(tiny("fedrep", head=HEAD, head_epochs=1)),
    "finch": Member(tiny("finch", num_clients=len(SIZES), **SEEN)),
    "fesem": Member(tiny("fesem", init_noise=0.5)),
    "hypcluster": Member(tiny("hypcluster", init_noise=0.5)),
    "kd": Member(
        tiny(
            "kd",
            distill_every=2,
            weighting="distance",
            distill_learning_rate=0.1,
            **SEEN,
        )
    ),
    "mime": Member(tiny("mime")),
    "mimelite": Member(tiny("mimelite")),
    "moon": Member(tiny("moon", LOCAL._replace(loss=contrasted))),
    "one_shot": Member(tiny("one_shot", model=LINEAR), {"params": LAYER, **NO_STATS}),
    "perfedavg": Member(tiny("perfedavg", inner_learning_rate=0.1, order="hf")),
    "ifca": Member(tiny("ifca", init_noise=0.5)),
    "pfedme": Member(tiny("pfedme", personal_learning_rate=0.05)),
    "qfedavg": Member(tiny("qfedavg", q=1.0)),
    "scaffold": Member(tiny("scaffold", num_clients=len(SIZES))),
}
# Gradients or prototypes of these are a sum over devices before a round.
BEFORE_A_ROUND = {"feddane", "fedmargin", "mime"}
LINKS = {  # settings of each link at test size
    "adaptive_robust_clipping": {},
    "attention": {},
    "bucketing": {},
    "bulyan": None,  # of seven clients or more
    "centered_clip": {"max_norm": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "drop_non_finite": {},
    "gaussian_noise": {"std": 0.01},
    "geometric_median": {},
    "krum": {"num_malicious_clients": 0},
    "median": {},
    "nearest_neighbor_mixing": {},
    "quantize": {},
    "random_k": {"fraction": 0.3},
    "rfa": {},
    "rotate": {},
    "sign": {},
    "stochastic_quantize": {"bits": 4},
    "top_k": {"fraction": 0.3},
    "trimmed_mean": {"trim_fraction": 0.4},
    "weighted_mean": {},
}
for name, settings in LINKS.items():
    if settings is not None:
        made = functools.partial(AGGREGATORS[name], **settings)
        MEMBERS[f"linked {name}"] = Member(
            lambda made=made: with_aggregation(_built("fedavg", LOCAL), made())
        )
attackers = {"share": 0.4, "num_clients": len(SIZES), "seed": SEED}
MEMBERS["attacked ifca"] = Member(
    lambda: with_attack(
        _built("ifca", LOCAL, init_noise=0.5), "inner_product", **attackers
    )
)
# Links that change nothing, as the bound is never met and the steps are small.
IDLE = (
    functools.partial(AGGREGATORS["clip_by_global_norm"], max_norm=1e9),
    functools.partial(AGGREGATORS["stochastic_quantize"], bits=23),
)
for name in sorted(ALGORITHMS.keys() - {"finch"}):  # whose updates are no sum
    inner = MEMBERS[name]
    MEMBERS[f"idle {name}"] = inner._replace(
        build=lambda b=inner.build: with_aggregation(b(), *(make() for make in IDLE))
    )
KEPT = "params/bias"
SENDS_LEAVES = ALGORITHMS.keys() - {"one_shot"}
for name in sorted(SENDS_LEAVES):  # under contract with a personal leaf
    build, variables = MEMBERS[name]
    kept = HEAD if name == "fedfr" else KEPT
    own = functools.partial(
        lambda b, kept: with_personal_layers(b(), kept), build, kept
    )
    MEMBERS[f"personal {name}"] = Member(own, variables)
for how in ("local", "random_client"):
    inner = MEMBERS["fedavg"].build
    MEMBERS[f"{how} statistics"] = Member(
        lambda b=inner, how=how: with_batch_stats(b(), how)
    )
PLAIN = [name for name in MEMBERS if " " not in name]  # entries of ALGORITHMS
KEEPING = [name for name in MEMBERS if name.startswith("personal ")]
# What a personal leaf adds is the same code around each: few of them train here.
SOME = ("fedavg", "fedfr", "fedrep", "kd", "scaffold")
PERSONAL = {f"personal {name}" for name in SOME}
IDLING = [name for name in MEMBERS if name.startswith("idle ")]
LINKED = [name for name in MEMBERS if name.startswith("linked ")]
# Links that share the code of nearest_neighbor_mixing and top_k, which train here.
ALIKE = ("adaptive_robust_clipping", "bucketing", "random_k", "rotate", "sign")
OTHERS = {*KEEPING, *IDLING, *(f"linked {name}" for name in ALIKE)}
TRAINED = MEMBERS.keys() - OTHERS | PERSONAL


# Of these the fast suite also compiles the program of one client at a time: each kind
# of state, of sums before and after the round, of sums over all updates.
COMPARED = {
    *("afl", "fedavg", "fedfr", "fedmargin", "finch", "ifca", "kd", "mime"),
    *("mimelite", "scaffold", "linked median", "linked rfa", "personal fedrep"),
    *("random_client statistics", "local statistics"),
}


def trained(names, *places):
    """Parameters (name, *place): slow but for TRAINED names at the first place."""
    quick = {(x, *places[:1]) for x in TRAINED if x in names}
    return toys.others_are_slow(quick, names, *([places] if places else []))


def table():
    """Examples of all clients, then rows that nobody owns: not a number."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(sum(SIZES) + 4, 6)).astype(np.float32)
    images[sum(SIZES) :] = np.nan
    labels = rng.integers(0, CLASSES, len(images)).astype(np.int32)
    return Dataset.from_arrays(images, labels)


@functools.cache
def simulated(name, devices, lanes, **options) -> Simulation:
    """A simulation that compiles once for all tests."""
    return build_simulation(
        MEMBERS[name].build(),
        Batching(batch_size=4, shuffle=False),  # shuffling would double compile time
        table(),
        Population(np.cumsum([0, *SIZES]), np.full(len(SIZES), CLASSES, np.int32)),
        Settings(COHORT, 2, clients_per_device=lanes, seed=SEED, **options),
        mesh=make_mesh(devices),
    )


def rounds(name, sim, numbers, server=None, folder=None):
    """Play rounds: -> (server, rows, metrics of all rounds) on the host."""
    server = (
        start_simulation(sim, MEMBERS[name].variables) if server is None else server
    )
    store = open_store(sim, server, folder, resume_round=numbers[0])
    metrics = []
    for r in numbers:
        server, outcome = toys.simulate_round(sim, server, store, r)
        metrics.append(outcome.metrics)
        if r == 1:
            store.flush(2)
    rows, is_new = store.gather(np.arange(len(SIZES)))
    return jax.device_get(server), (rows, is_new), metrics


@functools.cache
def reference(name, place=ALONE):
    """Two rounds on one device, one client at a time, or elsewhere."""
    return rounds(name, simulated(name, *place), (0, 1))


def assert_close(actual, expected):
    """Leaves are finite and agree to float32's order of summation."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5),
        actual,
        expected,
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual))


def assert_same_bits(actual, expected):
    """Leaves are equal bit by bit."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual))


def test_every_algorithm_is_under_contract():
    assert {name for name in MEMBERS if " " not in name} == ALGORITHMS.keys()
    assert LINKS.keys() == AGGREGATORS.keys()
    assert {name: getattr(ff, name) for name in ALGORITHMS} == ALGORITHMS  # all public


@pytest.mark.parametrize("name", trained(MEMBERS))
def test_training_moves_the_server(name):
    server, _, metrics = reference(name, APART)
    before = MEMBERS[name].build().init(MEMBERS[name].variables)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), server, before)
    assert sum(jax.tree.leaves(moved)) >= 2
    for values in metrics:
        assert all(x.shape == (COHORT,) for x in values.values())
        assert {"loss", "steps"} <= values.keys()


@pytest.mark.parametrize(
    "name, where",
    toys.others_are_slow({(x, APART) for x in COMPARED}, MEMBERS, (APART, (8, 1))),
    ids=str,
)
def test_devices_lanes_and_idle_slots_change_nothing(name, where):
    assert_close(reference(name, where), reference(name))


@pytest.mark.slow
@pytest.mark.usefixtures("run_level")
@pytest.mark.parametrize("name", sorted({*PLAIN, *LINKED} - BEFORE_A_ROUND))
def test_canonical_sums_have_the_same_bits_on_any_number_of_devices(name):
    canonical = functools.partial(
        simulated, name, reproducible_sum=True, num_partial_sums=4
    )
    one, *others = (rounds(name, canonical(n, 1), (0, 1)) for n in (1, 2, 4))
    for other in others:
        assert_same_bits(other, one)


QUICK = ("fedavg", "scaffold", "ifca", "fedmargin", "fedfr", "mimelite", "afl")


@pytest.mark.parametrize(
    "name", toys.others_are_slow({(f"idle {name}",) for name in QUICK}, IDLING)
)
def test_links_that_change_nothing_change_nothing(name):
    server, rows, metrics = rounds(name, simulated(name, *ALONE), (0, 1))
    plain, *expected, wanted = reference(name.removeprefix("idle "))
    assert_close((server, rows), (plain, *expected))
    for found, want in zip(metrics, wanted, strict=True):
        assert not found.pop("clip_fraction").any() and not found.pop("dropped").any()
        assert_close(found, want)


@pytest.mark.parametrize("name", PLAIN)
def test_the_order_in_which_clients_arrive_changes_nothing(name, monkeypatch):
    schedule = calls.build_schedule

    def reverse(*args, **settings):
        plan = schedule(*args, **settings)
        return plan._replace(slots=plan.slots[:, ::-1])

    monkeypatch.setattr(calls, "build_schedule", reverse)
    actual = rounds(name, simulated(name, *APART), (0, 1))
    assert_close(actual, reference(name, APART))


STATEFUL = ["linked centered_clip", "linked rfa", "linked gaussian_noise"]
STATEFUL += ["linked top_k"]  # with a state at clients
RESUMED = [*PLAIN, *STATEFUL, "personal fedavg", "random_client statistics"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_killed_in_round_2_resumes_to_the_same_bits(name, tmp_path):
    sim = simulated(name, *APART)
    whole = rounds(name, sim, (0, 1, 2, 3))
    saved, _, _ = rounds(name, sim, (0, 1), folder=tmp_path)
    rounds(name, sim, (2,), server=device_tree(sim, saved), folder=tmp_path)
    server = device_tree(sim, saved)
    resumed = rounds(name, sim, (2, 3), server=server, folder=tmp_path)
    assert_same_bits(resumed[:2], whole[:2])


def device_tree(sim, tree):
    """A saved server, back on the devices."""
    return jax.device_put(tree, meshes.replicated(sim.mesh))


@pytest.mark.parametrize("name", PLAIN)
def test_examples_of_other_clients_are_never_seen(name):
    sim = simulated(name, *APART)
    ids = sample_cohort(SEED, 0, len(SIZES), COHORT)
    assert 0 not in ids  # idle slots point at client 0
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    images = table().images
    images[: len(owner)][~np.isin(owner, ids)] = np.nan
    poisoned = jax.device_put(images, meshes.replicated(sim.mesh))
    held = sim.device_data._replace(inputs={"image": poisoned})
    poisoned = sim._replace(data=place_data(sim.mesh, held))
    assert_same_bits(rounds(name, poisoned, (0,)), rounds(name, sim, (0,)))


@pytest.mark.parametrize("name", trained([*MEMBERS]))
def test_a_client_deploys_variables_of_the_model(name):
    server, (rows, is_new), _ = reference(name, APART)
    client = int(np.flatnonzero(~is_new)[0])
    row = jax.tree.map(lambda x: x[client], rows)
    deployed = MEMBERS[name].build().personalize(server, row)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(deployed) == shapes(MEMBERS[name].variables)


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_sent_has_no_byte_of_a_personal_leaf(name):
    """Sums, uploads and the server's state: as if the model had no such leaf."""
    build, start = MEMBERS[name].build, MEMBERS[name].variables
    algorithm = build()
    server = jax.eval_shape(algorithm.init, start)
    inner = leaves_of(server.inner)
    assert not [path for path, _ in inner if "bias" in jax.tree_util.keystr(path)]
    sim = simulated(name, *ALONE)
    row = jax.eval_shape(algorithm.init_personal, jax.random.key(0), server)
    slot = jax.tree.map(
        jnp.int32, client_module.SlotInputs(0, 0, 1, 0, 3, 0, CLASSES, 2)
    )
    tables = ()
    if algorithm.prepare:
        tables = algorithm.prepare(
            start_of(sim, name),
            sim.context(Cohort(np.arange(COHORT), 0)),
        ).shared

    def sent(server, row, table):
        extra = empty_prepared(COHORT)._replace(shared=tables)
        client = client_module.client_view(
            *(sim.batching, 12, jax.random.key(1), slot, extra),
            *(client_module.all_rows(table), jnp.int32(0)),
        )
        output = algorithm.client_update(jax.random.key(2), server, row, client)
        return output.update, output.per_client, output.sums

    shapes = jax.eval_shape(sent, server, row, sim.device_data)
    names = [jax.tree_util.keystr(p) for p, _ in leaves_of(shapes)]
    assert any("body" in name for name in names)
    assert not [name for name in names if "bias" in name]


leaves_of = jax.tree_util.tree_leaves_with_path


def start_of(sim, name):
    return start_simulation(sim, MEMBERS[name].variables)


@pytest.mark.parametrize("name", trained(KEEPING))
def test_personal_leaves_are_trained_and_differ_between_clients(name):
    _, (rows, is_new), _ = reference(name, APART)
    leaf = "head" if name == "personal fedfr" else "bias"
    kept = rows.leaves["params"][leaf][~is_new]
    assert np.abs(kept).max() > 1e-4
    assert len(np.unique(kept.round(6), axis=0)) == len(kept)


def test_personal_of_nothing_is_the_algorithm_itself():
    algorithm = MEMBERS["fedavg"].build()
    for nothing in (None, "", top_blocks(("stem", "fc"), 0)):
        assert with_personal_layers(algorithm, nothing) is algorithm


def test_a_pattern_that_matches_no_leaf_names_near_ones():
    algorithm = with_personal_layers(MEMBERS["fedavg"].build(), "params/bais$")
    with pytest.raises(ValueError, match="must match a leaf.*params/bias"):
        algorithm.init(variables_of(0))


def test_statistics_are_averaged_kept_or_of_the_first_client():
    ends = {
        how: rounds(name, simulated(name, *ALONE), (0,))
        for how, name in (
            ("average", "fedavg"),
            ("local", "local statistics"),
            ("random_client", "random_client statistics"),
        )
    }
    ids = sample_cohort(SEED, 0, len(SIZES), COHORT)
    kept = ends["local"][1][0].leaves["batch_stats"]["mean"][ids]
    assert len(set(kept.tolist())) == COHORT
    np.testing.assert_allclose(
        ends["average"][0].variables["batch_stats"]["mean"],
        np.average(kept, weights=np.array(SIZES)[ids]),
        rtol=1e-5,
    )
    chosen = kept[ids == random_client(ids, SEED, 0)].item()
    server, (rows, _), _ = ends["random_client"]
    np.testing.assert_allclose(server.first["batch_stats"]["mean"], chosen)
    personalize = MEMBERS["random_client statistics"].build().personalize
    for client in ids:  # whoever was not the first is judged by them too
        judged = personalize(server, jax.tree.map(lambda x, i=client: x[i], rows))
        np.testing.assert_allclose(judged["batch_stats"]["mean"], chosen)


# How algorithms average running statistics, where weights are no business of theirs.
AVERAGED = {
    "num_examples": [
        *("ditto", "fedavg", "fedaws", "feddane", "fedfr", "fednova", "fedprox"),
        *("fedrep", "mime", "moon", "linked attention", "linked centered_clip"),
    ],
    "uniform": ["afl", "apfl", "feddyn", "qfedavg", "scaffold"],
    "median": ["linked median"],
}


def test_running_statistics_of_clients_are_averaged_whatever_the_algorithm():
    ids = sample_cohort(SEED, 0, len(SIZES), COHORT)
    own = "local statistics"
    _, (rows, _), _ = rounds(own, simulated(own, *ALONE), (0,))
    kept = rows.leaves["batch_stats"]["mean"][ids]
    expected = {
        "num_examples": np.average(kept, weights=np.array(SIZES)[ids]),
        "uniform": kept.mean(),
        "median": np.median(kept),
    }
    offenders = []
    for how, names in AVERAGED.items():
        for name in names:
            server, _, _ = rounds(name, simulated(name, *APART), (0,))
            network = MEMBERS[name].build().global_model(server)
            found = network["batch_stats"]["mean"]
            if not np.isclose(found, expected[how], rtol=1e-4, atol=0):
                offenders.append(f"{name}: {found}, not {expected[how]}")
    assert not offenders, "\n".join(offenders)
