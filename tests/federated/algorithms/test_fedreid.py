"""FedReID's algorithms: the released code's numbers, and rounds worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.clusters import (
    find_clusters,
    first_neighbor_links,
    first_neighbors,
)
from fedfr_jax.federated.algorithms.fedreid import (
    PublicImages,
    feature_distance,
    features_of_images,
)
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort, Dataset, Model
from tests.federated.toys import simulate_round

OWN = "params/classifier"


def linear(num_inputs, dim, num_classes):
    """x W + b, then the classifier's logits; features are x W + b."""

    def init(key):
        shape = {"kernel": (num_inputs, dim), "bias": (dim,)}
        top = {"kernel": (dim, num_classes), "bias": (num_classes,)}
        zeros = lambda sizes: {k: jnp.zeros(v) for k, v in sizes.items()}
        params = {"body": zeros(shape), "classifier": zeros(top)}
        return {"params": params, "batch_stats": {}}

    def features(variables, x, train=False, key=None):
        params = variables["params"]
        seen = through(params["body"], x)
        logits = through(params["classifier"], seen)
        return logits, seen, variables["batch_stats"]

    apply = lambda *given, key=None: features(*given)[::2]
    shape = (num_inputs,)
    return Model(init, apply, shape, num_classes, apply_with_features=features)


def through(layer, x):
    return x @ layer["kernel"] + layer["bias"][None]


def layer(weight, bias):
    """Of torch's [out, in]."""
    return {"kernel": weight.T.astype(np.float32), "bias": bias.astype(np.float32)}


def to_ends(ends):
    """Local training that gives every client its row of `ends` [N, ...]."""

    def train(key, variables, client):
        whole = jax.tree.map(lambda x: jnp.asarray(x)[client.id], ends)
        metrics = {"loss": jnp.float32(0), "steps": jnp.float32(1)}
        return variable_split.split_paths(whole, variables), metrics

    return train


def simulated(algorithm, images, num_classes, where=(1, 1), memory=None, **options):
    sizes = [len(x) for x in images]
    labels = np.zeros(sum(sizes), np.int32)
    images = np.concatenate(images).astype(np.float32)
    table = Dataset.from_arrays(images, labels)
    if memory:
        table = stream(lambda rows: images[rows], {"label": labels}, memory=memory)
    return build_simulation(
        *(algorithm, Batching(max(sizes), shuffle=False), table),
        Population(np.cumsum([0, *sizes]), np.asarray(num_classes, np.int32)),
        Settings(clients_per_device=where[1], **options),
        mesh=make_mesh(where[0]),
    )


def of(params):
    return {"params": params, "batch_stats": {}}


def stacked(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def padded(weight, bias, rows, filling):
    """A classifier [M, D] with rows up to the largest client's."""
    more = rows - len(weight)
    weight = np.pad(weight, ((0, more), (0, 0)), constant_values=filling)
    return layer(weight, np.pad(bias, (0, more), constant_values=-filling))


def test_distances_weigh_clients_as_in_the_released_code(golden):
    arrays = golden("fedreid_cdw")
    numbers = [len(arrays[f"c{k}_cls_old_b"]) for k in range(4)]
    most = max(numbers)
    heads = {
        age: [
            padded(arrays[f"c{k}_cls_{age}_W"], arrays[f"c{k}_cls_{age}_b"], most, fill)
            for k in range(4)
        ]
        for age, fill in (("old", 3.0), ("new", -7.0))
    }
    bodies = [
        layer(arrays[f"c{k}_backbone_W"], arrays[f"c{k}_backbone_b"]) for k in range(4)
    ]
    pairs = zip(bodies, heads["new"], strict=True)
    ends = stacked([of({"body": b, "classifier": h}) for b, h in pairs])
    model = linear(12, 8, most)
    algorithm = ff.with_personal_layers(ff.cdw(to_ends(ends), model=model), OWN)
    images = [arrays[f"c{k}_x"] for k in range(4)]
    sim = simulated(algorithm, images, numbers, (2, 2))
    body = layer(arrays["backbone_global_W"], arrays["backbone_global_b"])
    server = start_simulation(sim, of({"body": body, "classifier": heads["old"][0]}))
    store = open_store(sim, server)
    rows = store.gather(np.arange(4))[0]
    old = {"body": None, "classifier": stacked(heads["old"])}
    rows = rows._replace(leaves={**rows.leaves, "params": old})
    store.scatter(np.arange(4), rows, 0)
    server, outcome = simulate_round(sim, server, store, 1)
    found = outcome.metrics["cosine_distance"]
    np.testing.assert_allclose(found, arrays["d"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found / found.sum(), arrays["p"], atol=2e-6)
    moved = server.inner.variables["params"]["body"]
    np.testing.assert_allclose(moved["kernel"].T, arrays["agg_cdw_W"], atol=2e-6)
    np.testing.assert_allclose(moved["bias"], arrays["agg_cdw_b"], atol=2e-6)


@pytest.mark.parametrize("kind", ["raw", "reg"])
def test_the_distillation_loss_is_the_released_one(golden, kind):
    arrays = golden("fedreid_kd")
    x = arrays["x"].astype(np.float32)
    model, shared = linear(12, 8, 2), PublicImages(x, Batching(len(x)))
    look = features_of_images(model, shared, normalize=kind == "reg")
    zero = np.int32(0)
    given = x, zero, zero

    def network(body):
        return of({**model.init(None)["params"], "body": body})

    teachers = [network(layer(arrays[f"t{k}_W"], arrays[f"t{k}_b"])) for k in range(4)]
    of_all = jax.jit(lambda them: sum(look(one, *given) for one in them) / 4)
    target = of_all(teachers)
    student = layer(arrays["student_W"], arrays["student_b"])
    see = features_of_images(model, shared)

    def loss(body):
        return feature_distance(see(network(body), *given), target, np.ones(5, bool))

    value, gradient = jax.jit(jax.value_and_grad(loss))(student)
    np.testing.assert_allclose(value, arrays[f"loss_{kind}"], rtol=1e-5)
    wanted = arrays[f"grad_student_W_{kind}"].T
    np.testing.assert_allclose(gradient["kernel"], wanted, rtol=1e-4, atol=1e-6)


def test_a_distilling_server_takes_one_pass_of_sgd_every_other_round():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    model = linear(4, 3, 2)
    network = lambda: of(
        {
            "body": {"kernel": draw(4, 3), "bias": draw(3)},
            "classifier": {"kernel": draw(3, 2), "bias": draw(2)},
        }
    )
    ends, first = [network(), network()], network()
    shared = PublicImages(draw(5, 4), Batching(2))  # a last batch of one
    settings = {"model": model, "shared": shared, "distill_every": 2, "normalize": True}
    settings |= {
        "distill_learning_rate": 0.1,
        "distill_momentum": 0.9,
        "distill_weight_decay": 0.01,
    }
    algorithm = ff.with_personal_layers(ff.kd(to_ends(stacked(ends)), **settings), OWN)
    sim = simulated(algorithm, [draw(2, 4), draw(2, 4)], [2, 2], (1, 2))
    server = start_simulation(sim, first)
    store = open_store(sim, server)
    mean = jax.tree.map(lambda *x: sum(x) / 2, *[e["params"]["body"] for e in ends])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    server, _ = simulate_round(sim, server, store, 0)
    jax.tree.map(close, server.inner.variables["params"]["body"], mean)
    server, _ = simulate_round(sim, server, store, 1)

    def target_of(x):
        found = [through(e["params"]["body"], x) for e in ends]
        unit = [y / np.linalg.norm(y, axis=1, keepdims=True) for y in found]
        return sum(unit) / 2

    body, trace = mean, jax.tree.map(np.zeros_like, mean)
    for step in range(3):
        x, counts = shared.batch(shared.images, jnp.int32(1), jnp.int32(step))
        x = np.asarray(x)[np.asarray(counts)]
        assert len(x) == (2, 2, 1)[step]
        error = 2 * (through(body, x) - target_of(x)) / (len(x) * 3)
        grads = {"kernel": x.T @ error, "bias": error.sum(0)}
        grads = jax.tree.map(lambda g, p: g + 0.01 * p, grads, body)
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, grads)
        step = lambda p, g, t: p - 0.1 * (g + 0.9 * t)  # Nesterov
        body = jax.tree.map(step, body, grads, trace)
    jax.tree.map(close, server.inner.variables["params"]["body"], body)


@pytest.mark.parametrize("how", ["average", "random_client"])
def test_the_pass_renews_the_statistics_of_the_server(how):
    """Those that the network has after the aggregation, whichever they are."""
    model = counting(linear(4, 3, 2))
    zeros = model.init(None)["params"]
    ends = [{"params": zeros, "batch_stats": {"seen": np.float32(k)}} for k in (1, 5)]
    shared = PublicImages(np.zeros((5, 4), np.float32), Batching(2))  # three batches
    algorithm = ff.kd(
        to_ends(stacked(ends)), model=model, shared=shared, distill_every=2
    )
    algorithm = ff.with_batch_stats(algorithm, how)
    sim = simulated(algorithm, [np.zeros((2, 4))] * 2, [2, 2], (1, 2))
    server = start_simulation(sim, model.init(None))
    store = open_store(sim, server)
    first = [
        (1.0, 5.0)[random_client(np.arange(2), sim.settings.seed, r)] for r in range(2)
    ]
    before, after = (3.0, 3.0) if how == "average" else first
    for round, wanted in enumerate((before, after / 8 + 7)):
        server, _ = simulate_round(sim, server, store, round)
        seen = algorithm.global_model(server)["batch_stats"]["seen"]
        np.testing.assert_allclose(seen, wanted, rtol=1e-5)


def counting(model):
    """The model with a statistic that becomes (seen + 8) / 2 in a training step."""
    init = lambda key: {**model.init(key), "batch_stats": {"seen": jnp.float32(0)}}

    def features(variables, x, train=False, key=None):
        logits, seen, stats = model.apply_with_features(variables, x, train, key)
        return logits, seen, {"seen": (stats["seen"] + 8) / 2} if train else stats

    return model._replace(init=init, apply_with_features=features)


@pytest.mark.parametrize("name", ["f9", "f40"])
def test_clusters_are_those_of_finch(golden, name):
    arrays = {k: v for k, v in golden("reid_more").items() if f"finch_{name}" in k}

    @jax.jit
    def run(x):
        near = first_neighbors(x)
        return near, first_neighbor_links(near), find_clusters(x)

    near, adjacency, found = run(arrays[f"finch_{name}_x"].astype(np.float32))
    np.testing.assert_array_equal(near, arrays[f"finch_{name}_first_neighbour"])
    adjacency = np.array(adjacency)
    np.fill_diagonal(adjacency, False)
    np.testing.assert_array_equal(adjacency, arrays[f"finch_{name}_adjacency"] > 0)
    np.testing.assert_array_equal(found, arrays[f"finch_{name}_labels"])


def test_clients_restart_from_the_mean_of_their_cluster():
    """Clients 0, 2 and 1, 3 see alike; 4, whom round 0 lacks, has the mean of all."""
    rng, model = np.random.default_rng(0), linear(4, 3, 2)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    near = [draw(4, 3), draw(4, 3)]
    top = {"kernel": draw(3, 2), "bias": draw(2)}
    network = lambda kernel: of(
        {"body": {"kernel": kernel, "bias": np.zeros(3, np.float32)}, "classifier": top}
    )
    kernels = [near[k % 2] + 0.01 * draw(4, 3) for k in range(5)]
    ends = stacked([network(kernel) for kernel in kernels])
    shared = PublicImages(draw(6, 4), Batching(6))
    algorithm = ff.finch(to_ends(ends), model=model, shared=shared, num_clients=5)
    images = [draw(n, 4) for n in (2, 3, 4, 5, 1)]
    sim = simulated(algorithm, images, [2] * 5)
    sim = sim._replace(settings=sim.settings._replace(cohort_size=4))
    server = start_simulation(sim, network(draw(4, 3)))
    store = open_store(sim, server)
    ids = np.arange(4, dtype=np.int32)
    server, outcome = run_cohort(sim, server, store, Cohort(ids, 0))
    np.testing.assert_array_equal(outcome.metrics["cluster"], [0, 1, 0, 1])
    found = server["params"]["body"]["kernel"]
    even = (2 * kernels[0] + 4 * kernels[2]) / 6
    odd = (3 * kernels[1] + 5 * kernels[3]) / 8
    for k, wanted in enumerate([even, odd, even, odd]):
        np.testing.assert_allclose(found[k], wanted, rtol=1e-5, atol=1e-6)
    rows, _ = store.gather(np.arange(5))
    deployed = lambda k: algorithm.personalize(server, rows[k])["params"]["body"]
    np.testing.assert_allclose(deployed(2)["kernel"], even, rtol=1e-5, atol=1e-6)
    mean = np.asarray(found).mean(0)
    new = algorithm.personalize(server, jnp.int32(-1))["params"]["body"]["kernel"]
    np.testing.assert_allclose(new, mean, rtol=1e-5, atol=1e-6)
