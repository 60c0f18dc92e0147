"""Every row of FedFR's tables is settings of few pieces, and each does what it says."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import compose, horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.losses.distillation import knowledge_distillation
from fedfr_jax.losses.spreadout import spread
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.stages import final_simulation
from fedfr_jax.tasks.faces.loss import on_variables
from fedfr_jax.tasks.faces.methods import distillation_loss
from fedfr_jax.tasks.faces.public_classes import public_means, public_population
from fedfr_jax.types import Cohort
from tests.federated import toys
from tests.tasks.faces import given

pytestmark = pytest.mark.ci

SIDE, DIM, SIZES = 4, 8, (2, 3, 2)
PLAIN = {"use_public_data": False, "contrastive_weight": 0.0, "branch": None}
ADDED = {"contrastive_weight": 0.0, "branch": None, "hard_negative_threshold": 0.0}
ROWS = {
    "fedavg": PLAIN,
    "hard negatives": ADDED,
    "contrastive": {**ADDED, "contrastive_weight": 5.0},
    "fedfr": {"hard_negative_threshold": 0.0},
    "cosface branch": {"hard_negative_threshold": 0.0, "branch": "cosface"},
    "cosface on all": {"hard_negative_threshold": 0.0, "branch": "cosface_all"},
    "moon": {**PLAIN, "contrastive_weight": 5.0, "initial_previous_model": "random"},
    "class level": {**ADDED, "hard_negative_level": "class"},
    "init_head_from_class_means": {
        "hard_negative_threshold": 0.0,
        "init_head_from_class_means": True,
    },
    "local only": {**PLAIN, "personal": "."},
    "fedface": {**PLAIN, "spreadout": 0.0},
    "finetune": {**ADDED, "adaptation": {"kind": "finetune", "epochs": 2}},
    "distill": {**ADDED, "adaptation": {"kind": "distill", "epochs": 2}},
    "official": {
        "hard_negative_threshold": 0.0,
        "public_classes_update": "frozen",
        "initial_previous_model": "random",
        "decay_epochs": (8, 6, 4, 3),
        "weighting": "num_examples+hard_negatives",
    },
}


MODEL = given.linear_model((SIDE, SIDE, 1), DIM)
BACKBONE = MODEL.init(jax.random.key(5))


def decode(images):
    return images.astype(jnp.float32) / 255


SCALED = normalize(mean=0, std=255)
MIRRORED = compose(horizontal_flip(), SCALED)


def method_of(options):
    return given.method_of(
        MODEL, num_classes=3, num_clients=3, learning_rate=0.05, **options
    )


BUILT = {}  # compiled simulations by their options, shared by the tests


def run(task, options, *, rounds=2, local_epochs=(2, 1), adaptation=None):
    """(sim, server, rows [3], outcomes) after some rounds on the real engine.

    Args:
      adaptation: that of `options`, or another one.
    """
    name = repr(sorted(options.items(), key=str))
    if name not in BUILT:
        method = method_of(options)
        # Shuffling would take longer to compile.
        feed, mesh = Batching(8, MIRRORED, shuffle=False), make_mesh(1)
        population = given.population_of(task)
        sim = build_simulation(
            method.algorithm, feed, task.train, population, mesh=mesh
        )
        end = method.final_adaptation
        BUILT[name] = method, sim, end and final_simulation(sim, end, 2)
    method, sim, last = BUILT[name]
    if adaptation:
        method = method_of({**options, "adaptation": adaptation})
        last = final_simulation(sim, method.final_adaptation, 2)
    sim = sim._replace(settings=sim.settings._replace(local_epochs=local_epochs))
    phi = jax.random.normal(jax.random.key(6), (4, DIM))
    server = start_simulation(sim, method.init_variables(BACKBONE, phi))
    store = open_store(sim, server)
    end = toys.play_rounds(sim, server, rounds, store=store)
    if not last:
        return sim, end.server, end.rows, end.logs
    own = toys.play_rounds(last, end.server, first=rounds, store=store)
    return sim, own.server, own.rows, end.logs + own.logs


def assert_same(a, b, tolerance=1e-6):
    close = lambda x, y: np.testing.assert_allclose(
        x, y, rtol=tolerance, atol=tolerance
    )
    jax.tree.map(close, a, b)


def differs(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(np.abs(x - y).max() > 1e-5 for x, y in pairs)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_trains_through_the_engine(task, name):
    sim, server, rows, outcomes = run(task, ROWS[name])
    for outcome in outcomes:
        assert all(np.isfinite(x).all() for x in outcome.metrics.values())
        assert (outcome.metrics["steps"] > 0).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((server, rows)))
    assert differs(given.previous(rows), jax.tree.map(lambda x: x[None], BACKBONE))
    variables = sim.algorithm.personalize(server, jax.tree.map(lambda x: x[0], rows))
    images = decode(task.train.images[:2])
    assert method_of(ROWS[name]).embed(variables, images).shape == (2, DIM)


def test_fedavg_is_the_row_without_public_data(task):
    _, server, _, outcomes = run(task, PLAIN)
    assert given.phi(server) is None
    assert not any(o.num_added.any() for o in outcomes)
    assert set(outcomes[0].metrics) == {"loss", "classification_loss", "steps"}


def test_a_contrastive_weight_of_zero_is_no_contrastive_term(task):
    _, plain, _, _ = run(task, ADDED)
    _, tiny, _, outcomes = run(task, {**ADDED, "contrastive_weight": 1e-12})
    assert "contrastive_loss" in outcomes[0].metrics
    assert_same(tiny, plain)
    _, real, _, _ = run(task, {**ADDED, "contrastive_weight": 5.0})
    assert differs(given.backbone(real), given.backbone(plain))


def test_a_threshold_of_one_or_none_selects_nothing(task):
    _, none, _, first = run(task, {**ADDED, "hard_negative_threshold": None})
    _, one, _, second = run(task, {**ADDED, "hard_negative_threshold": 1.0})
    assert not any(o.num_added.any() for o in [*first, *second])
    assert_same(none, one)
    _, _, _, some = run(task, ADDED)
    assert all(o.num_added.any() for o in some)


def test_moon_has_the_term_and_no_public_data(task):
    _, server, _, outcomes = run(task, ROWS["moon"])
    assert given.phi(server) is None
    assert not outcomes[0].num_added.any()
    assert (outcomes[0].metrics["contrastive_loss"] > 0).all()


def test_the_branch_leaves_the_aggregate_alone_when_detached(task):
    _, without, _, _ = run(task, ADDED)
    for branch in ("bce", "cosface", "cosface_all"):
        detached = {**ADDED, "branch": branch, "detach_branch": True}
        _, server, rows, _ = run(task, detached)
        assert_same(given.backbone(server), given.backbone(without))
        assert_same(given.phi(server), given.phi(without))
        kernel = given.own(rows)["branch"]["converter"]["kernel"]
        assert differs(kernel, np.eye(DIM, dtype=np.float32)[None])


def test_reweighting_trains_otherwise_and_officially_not_at_all(task):
    ends = {}
    for kind in (None, "corrected", "official"):
        options = {**PLAIN, "weight_decay": 0.0, "branch_reweighting": kind}
        _, server, _, _ = run(task, options, rounds=1)
        ends[kind] = given.backbone(server)["params"]["kernel"]
    np.testing.assert_array_equal(ends["official"], BACKBONE["params"]["kernel"])
    assert differs(ends["corrected"], BACKBONE["params"]["kernel"])
    assert differs(ends["corrected"], ends[None])


def test_frozen_networks_see_an_image_and_flip_once_a_round_whatever_the_epochs(task):
    seen = []

    def apply(variables, x, train, key=None):
        if not train:
            jax.debug.callback(lambda: seen.append(len(x)))
        return MODEL.apply(variables, x, train)

    counted = MODEL._replace(apply=apply)
    method = given.method_of(counted, num_classes=3, hard_negative_threshold=0.0)
    feed, tables = Batching(8, MIRRORED), (task.train, given.population_of(task))
    sim = build_simulation(
        method.algorithm, feed, *tables, Settings(local_epochs=5), mesh=make_mesh(1)
    )
    start = method.init_variables(BACKBONE, jnp.ones((4, DIM)))
    (outcome,) = toys.play(sim, start).logs
    jax.effects_barrier()
    whole = lambda number: int((8 * -(-np.asarray(number) // 8)).sum())  # in batches
    by_clients = whole(given.population_of(task).sizes(outcome.ids) + outcome.num_added)
    by_the_server = whole(len(task.train.labels))
    assert outcome.num_added.any()
    assert sum(seen) == 2 * (by_clients + by_the_server)


def test_phi_is_averaged_or_frozen(task):
    phi = jax.random.normal(jax.random.key(6), (4, DIM))
    _, averaged, _, _ = run(task, ADDED)
    _, frozen, _, _ = run(task, {**ADDED, "public_classes_update": "frozen"}, rounds=1)
    np.testing.assert_array_equal(given.phi(frozen), phi)
    assert differs(given.phi(averaged), phi)


def test_weights_count_hard_negatives_or_not(task):
    _, extra, _, outcomes = run(
        task, {**ADDED, "weighting": "num_examples+hard_negatives"}, rounds=1
    )
    _, local, _, _ = run(task, {**ADDED, "weighting": "num_examples"}, rounds=1)
    assert len(set(np.diff(given.population_of(task).offsets).tolist())) > 1
    assert outcomes[0].num_added.any()
    assert differs(extra, local)


def test_the_first_previous_network_is_the_global_or_a_random_one(task):
    # Twice the same frozen network: the term is log 2 at every first step.
    once = {"rounds": 1, "local_epochs": (1, 1)}
    options = {**PLAIN, "contrastive_weight": 1e-9}
    _, _, _, same = run(task, options, **once)
    np.testing.assert_allclose(
        same[0].metrics["contrastive_loss"], np.log(2), atol=1e-6
    )
    _, _, _, other = run(task, {**options, "initial_previous_model": "random"}, **once)
    assert (np.abs(other[0].metrics["contrastive_loss"] - np.log(2)) > 1e-3).all()


def test_a_client_trained_alone_never_meets_the_others(task):
    alone = ROWS["local only"]
    _, server, rows, _ = run(task, alone, rounds=2)
    assert_same(method_of(alone).generic(server), BACKBONE)
    # Two rounds of FedAvg with nobody else around are the same training.
    _, _, shared, _ = run(task, PLAIN, rounds=1)
    _, _, first, _ = run(task, alone, rounds=1)
    assert_same(given.own(first), given.own(shared))
    assert_same(given.previous(first), unpack(given.previous(shared)))
    # The next round begins where the client's own network ended.
    _, _, kept, _ = run(task, alone, rounds=2, local_epochs=(2, 0))
    assert_same(given.previous(kept), given.previous(first))
    _, _, second, _ = run(task, PLAIN, rounds=2)
    assert differs(given.previous(rows), unpack(given.previous(second)))


def test_class_level_takes_whole_classes_by_phi(task):
    sim, _, _, outcomes = run(task, ROWS["class level"], rounds=1)
    phi = np.asarray(jax.random.normal(jax.random.key(6), (4, DIM)))
    labels, offsets = task.train.labels, given.population_of(task).offsets
    images = decode(task.train.images)
    features = np.asarray(MODEL.apply(BACKBONE, images, False)[0])
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    cohort = Cohort(np.arange(3, dtype=np.int32), 0)
    server = start_simulation(
        sim, method_of(ROWS["class level"]).init_variables(BACKBONE, phi)
    )
    chosen = np.asarray(sim.algorithm.prepare(server, sim.context(cohort)).added_rows)
    some = False
    for c, number in enumerate(outcomes[0].num_added):
        own = slice(offsets[c], offsets[c + 1])
        means = [features[own][labels[own] == k].mean(axis=0) for k in range(SIZES[c])]
        is_hard = (unit(np.stack(means)) @ unit(phi).T > 0).any(axis=0)
        hard = offsets[-1] + np.flatnonzero(is_hard[labels[offsets[-1] :]])
        np.testing.assert_array_equal(chosen[c, :number], hard)
        some |= is_hard.any() and not is_hard.all()
    assert some  # neither everything nor nothing


def test_init_head_from_class_means_starts_from_the_pretrained_class_means(task):
    frozen = {"learning_rate": 0.0, "weight_decay": 0.0}
    method = given.method_of(
        MODEL, num_classes=3, **{**ROWS["init_head_from_class_means"], **frozen}
    )
    assert method.init_head_from_class_means
    mesh = make_mesh(2)
    phi = public_means(MODEL, task, mesh, BACKBONE, 8)
    sim = build_simulation(
        method.algorithm,
        Batching(8, SCALED),
        task.train,
        given.population_of(task),
        mesh=mesh,
    )
    rows = toys.play(sim, method.init_variables(BACKBONE, phi)).rows
    labels, offsets = task.train.labels, given.population_of(task).offsets
    images = decode(task.train.images)
    features = np.asarray(MODEL.apply(BACKBONE, images, False)[0])
    for c, size in enumerate(SIZES):
        own = slice(offsets[c], offsets[c + 1])
        means = [features[own][labels[own] == k].mean(axis=0) for k in range(size)]
        np.testing.assert_allclose(given.own(rows)["head"][c, :size], means, atol=1e-6)
        assert not given.own(rows)["head"][c, size:].any()
    np.testing.assert_array_equal(
        given.own(rows)["branch"]["weights"], given.own(rows)["head"]
    )
    pixels = jnp.float32(task.train.images) / 127.5 - 1
    features = np.asarray(MODEL.apply(BACKBONE, pixels, False)[0])[offsets[-1] :]
    public = labels[offsets[-1] :]
    means = [features[public == k].mean(axis=0) for k in range(4)]
    np.testing.assert_allclose(phi, means, atol=1e-6)


def test_a_head_that_was_trained_is_not_started_again(task):
    _, _, once, _ = run(task, ROWS["init_head_from_class_means"], rounds=1)
    _, _, twice, _ = run(
        task, ROWS["init_head_from_class_means"], rounds=2, local_epochs=(2, 0)
    )
    assert_same(given.own(once)["head"], given.own(twice)["head"])


def test_fedface_hands_back_embeddings_that_lie_further_apart(task):
    _, server, rows, _ = run(task, ROWS["fedface"], rounds=1)
    assert server.is_known.all()
    own = np.concatenate([server.heads[c, :n] for c, n in enumerate(SIZES)])
    before = np.concatenate(
        [given.own(rows)["head"][c, :n] for c, n in enumerate(SIZES)]
    )

    def penalty(x):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        cosine = (x @ x.T)[~np.eye(len(x), dtype=bool)]
        return np.square(np.maximum(cosine, 0)).mean()

    assert penalty(own) < penalty(before)
    np.testing.assert_array_equal(server.heads[0, 2:], given.own(rows)["head"][0, 2:])
    # The next round starts there: without a step the client uploads it unchanged.
    _, _, after, _ = run(task, ROWS["fedface"], rounds=2, local_epochs=(2, 0))
    assert_same(given.own(after)["head"], server.heads)
    _, plain, _, _ = run(task, PLAIN, rounds=1)
    assert_same(given.backbone(server), given.backbone(plain))


@pytest.mark.parametrize("kind", ["finetune", "distill"])
def test_adaptation_moves_the_clients_and_not_the_server(task, kind):
    _, before, rows, _ = run(task, ADDED)
    _, after, adapted, outcomes = run(task, ROWS[kind])
    assert_same(before, after)
    assert differs(given.previous(adapted), given.previous(rows))
    assert not outcomes[-1].num_added.any()
    # From the global network: a rate of zero leaves every client with exactly that.
    still = {"kind": kind, "learning_rate": 0.0, "epochs": 1}
    _, server, same, _ = run(task, ADDED, adaptation=still)
    for c in range(3):
        row = jax.tree.map(lambda x, c=c: x[c], given.previous(same))
        assert_same(row, given.backbone(server))


def test_adaptation_after_private_rounds_sends_nothing_and_spends_nothing(task):
    privacy = {"clip_norm": 0.5, "noise_multiplier": 2.0, "delta": 0.1}
    adaptation = {"kind": "finetune", "epochs": 1}
    _, before, _, _ = run(task, {**PLAIN, "privacy": privacy})
    _, after, rows, outcomes = run(
        task, {**PLAIN, "privacy": privacy, "adaptation": adaptation}
    )
    assert_same(before, after)
    spent = [outcome.counts["epsilon"] for outcome in outcomes]
    assert 0 < spent[0] < spent[1] == spent[2]


def test_a_perfect_student_has_nothing_to_distil(task):
    still = {"alpha": 1.0, "learning_rate": 0.0, "epochs": 1}
    for kind in ("distill", "distill_classes", "angular"):
        _, _, _, outcomes = run(task, ADDED, adaptation={**still, "kind": kind})
        term = "angular_loss" if kind == "angular" else "loss"
        np.testing.assert_allclose(outcomes[-1].metrics[term], 0, atol=1e-4)


def test_distilling_compares_own_classes_with_the_embeddings_of_the_teacher():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    log_softmax = lambda x: x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    images, taught = draw(5, SIDE, SIDE, 1), draw(5, DIM)
    head, teacher_head, labels = draw(4, DIM), draw(4, DIM), np.int32([0, 1, 2, 2, 0])
    batch = given.batch_of(images, labels, num_classes=3)
    options = {"scale": 8.0, "alpha": 0.9, "temperature": 2.0}
    loss = distillation_loss(on_variables(MODEL), knowledge_distillation, **options)
    variables = {"params": {"backbone": BACKBONE["params"], "head": head}}
    reference = SimpleNamespace(previous_features=lambda batch: taught)
    variables["batch_stats"] = {}
    teacher = {"reference": reference, "teacher_head": teacher_head}
    found, _ = jax.jit(lambda given: loss(given, batch, None, **teacher))(variables)

    student = 8 * unit(images.reshape(5, -1) @ BACKBONE["params"]["kernel"])
    student = student @ unit(head[:3]).T
    teacher = 8 * unit(taught) @ unit(teacher_head[:3]).T
    p, q = (log_softmax(x / 2) for x in (teacher, student))
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    hard = -log_softmax(student)[np.arange(5), labels]
    expected = np.mean(0.9 * 2.0**2 * divergence + 0.1 * hard)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_central_training_on_everybody_has_every_class_once(task):
    everything = public_population(task)
    names = everything.partition.public.identities
    p, labels = task.partition, everything.train.labels
    assert len(names) == 4 + sum(SIZES) == len(set(names.tolist()))
    np.testing.assert_array_equal(np.bincount(labels) > 0, True)
    own, public = np.split(names[labels], [len(p.train.rows)])
    np.testing.assert_array_equal(own, p.train_identities)
    np.testing.assert_array_equal(public, p.public.identities[p.public.labels])


def test_the_options_of_the_spread_out_reach_the_server(task):
    row = {**ROWS["fedface"], "weight_decay": 0.0}
    options = {"steps": 3, "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.1}
    spreadout = {"threshold": 0.0, **options}
    _, server, rows, _ = run(task, {**row, "spreadout": spreadout}, rounds=1)
    mask = np.arange(3)[None] < np.array(SIZES)[:, None]
    heads = given.own(rows)["head"].reshape(-1, DIM)
    apart = lambda **options: jax.jit(
        lambda x: spread(x, margin=0.0, class_mask=mask.reshape(-1), **options)[0]
    )(heads)
    found = server.heads.reshape(-1, DIM)
    np.testing.assert_allclose(found, apart(**options), atol=1e-6)
    assert differs(found, apart())
