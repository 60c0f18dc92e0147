"""A federated run from a notebook: examples by client, rounds, numbers, files."""

import functools
import tracemalloc

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfr_jax as ff
from fedfr_jax.api import check_clients
from fedfr_jax.data.augment import compose, horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.simulation import open_store
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.settings import Systems

NUM_CLIENTS, CLASSES = 4, 3


def examples(num_clients=NUM_CLIENTS):
    """Images [40, 5], labels [40] and owners [40], in no order."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 5)).astype(np.float32)
    y = rng.integers(0, CLASSES, 40)
    owner = np.arange(40) % num_clients
    return x, y, rng.permutation(owner)


def contents(data):
    """Images and labels of each client, {client: (images [n, ...], labels [n])}."""
    offsets, table = data.population.offsets, data.dataset
    bounds = zip(offsets[:-1], offsets[1:], strict=True)
    return {
        client: (table.images[low:high], table.labels[low:high])
        for client, (low, high) in zip(data.clients.tolist(), bounds, strict=True)
    }


def variables(num_classes=CLASSES):
    """Of softmax regression: W [5, M] and b [M]."""
    weights = np.random.default_rng(1).normal(size=(5, num_classes))
    params = {"W": weights.astype(np.float32), "b": np.zeros(num_classes, np.float32)}
    return {"params": params, "batch_stats": {}}


def apply(variables, x):
    params = variables["params"]
    return x.reshape(len(x), -1) @ params["W"] + params["b"][None]


def loss(variables, batch, key):
    del key
    logits = apply(variables, batch.images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return ff.masked_mean(losses, batch.is_valid)


def algorithm(where="params/b", rate=0.3):
    """FedAvg whose clients keep the bias."""
    return ff.with_personal_layers(
        ff.fedavg(ff.LocalTraining(loss, optax.sgd, rate)), where
    )


def new_run(algorithm=algorithm, *, start=None, data=None, **options):
    """A run of two of four clients a round; its usual data are compiled for once."""
    if start is None and data is None:
        run = first_run(algorithm, **options)
        return run._replace(store=open_store(run.sim, run.server))
    data = data or ff.FederatedDataset.from_client_ids(*examples())
    given = {"batch_size": 4, "cohort_size": 2, "local_epochs": 2, "seed": 3, **options}
    return ff.init(algorithm(), data, start or variables(), **given)


@functools.cache
def first_run(algorithm, **options):
    data = ff.FederatedDataset.from_client_ids(*examples())
    return new_run(algorithm, data=data, **options)


def played(run, rounds):
    """The run after some rounds, and the metrics of each."""
    metrics = []
    for _ in range(rounds):
        run, found = ff.run_round(run)
        metrics.append(found)
    return run, metrics


def state(run):
    """All that the next rounds depend on: server, rows, who has none, round."""
    rows, is_new = run.store.gather(np.arange(run.store.population))
    return jax.device_get(run.server), rows, is_new, run.round_number


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# --- Examples by client


@settings(deadline=None, max_examples=40)
@given(
    owner=st.one_of(
        st.lists(st.integers(-3, 5), min_size=1, max_size=30),
        st.lists(st.sampled_from(["ann", "bob", "eve"]), min_size=1, max_size=30),
    ),
    order=st.randoms(use_true_random=False),
)
def test_examples_are_grouped_by_client_whatever_their_order(owner, order):
    examples = [(number, number % CLASSES, who) for number, who in enumerate(owner)]
    order.shuffle(examples)
    number, label, who = (list(column) for column in zip(*examples, strict=True))
    x = np.array(number, np.float32)[:, None]
    data = ff.FederatedDataset.from_client_ids(x, label, who)
    assert data.clients.tolist() == sorted(set(owner))
    for client, (images, labels) in contents(data).items():
        own = [n for n, w in zip(number, who, strict=True) if w == client]
        assert images[:, 0].tolist() == own  # in the order in which they came
        assert labels.tolist() == [n % CLASSES for n in own]
    assert data.population.num_classes.tolist() == [max(label) + 1] * len(data.clients)


def test_arrays_that_are_no_examples_are_refused():
    x, y, owner = examples()
    whole, bad = x, x.copy()
    bad[17, 3] = np.inf
    names = np.array(["a", "b", "c"])
    for arrays, rule in [
        ((whole, y[1:], owner), r"one entry per example, got \[40, 39, 40\]"),
        ((whole[:0], y[:0], owner[:0]), r"one entry per example, got \[0, 0, 0\]"),
        ((whole, y, owner[:, None]), "client_ids must be one number or string per"),
        ((whole, y, np.where(owner, owner, np.nan)), "per example, .* no nan, got"),
        ((bad, y, owner), "must be finite, .* in example 17. Remove"),
        ((np.full((40, 5), "a"), y, owner), "x must be numbers of shape"),
        ((whole, y - 1, owner), r"y must be integers in \[0, 2147483647\), got -1"),
        ((whole, y + 0.5, owner), "y must be integers in .*, got .*5"),
        ((whole, np.where(y, y, np.nan), owner), "y must be integers in .*, got nan"),
        ((whole, y + 2**40, owner), "y must be integers in .*, got 1099511627"),
        (
            (whole, names[y], owner),
            r"integers of shape \[T\], got <U1 of shape \(40,\)",
        ),
        ((whole, np.eye(3)[y], owner), r"of shape \(40, 3\). Give y.argmax\(1\)"),
    ]:
        with pytest.raises(ValueError, match=rule):
            ff.FederatedDataset.from_client_ids(*arrays)
    split = ff.partition.dirichlet(examples()[1], num_clients=3, alpha=0.5)
    with pytest.raises(ValueError, match=r"y must be integers in \[0, 3\), got 3"):
        ff.FederatedDataset.from_partition(whole, examples()[1] + 1, split)
    with pytest.raises(ValueError, match="labels must be integers in .*, got 3"):
        ff.FederatedDataset.from_reader(
            lambda rows: whole[rows], [3] * 4, num_clients=4, num_classes=3
        )


def test_a_split_gives_the_training_and_the_test_part_of_the_same_clients():
    x, y, _ = examples()
    split = ff.partition.dirichlet(y, num_clients=3, alpha=0.5, min_examples=4)
    train, test = ff.FederatedDataset.from_partition(x, y, split)
    for part, rows in ((train, split.train), (test, split.test)):
        assert part.clients.tolist() == [0, 1, 2]
        for client, (images, labels) in contents(part).items():
            np.testing.assert_array_equal(images, x[rows.of(client)])
            np.testing.assert_array_equal(labels, y[rows.of(client)])
    run, _ = ff.run_round(new_run(lambda: algorithm(None), data=train))
    right = apply(jax.device_get(run.variables), x[split.test.rows]).argmax(1)
    expected = (right == split.test.labels).mean()
    assert ff.evaluate(run, apply, test)["accuracy"] == pytest.approx(expected)


def test_examples_that_are_read_later_train_as_those_in_memory():
    x, y, _ = examples()
    whole = ff.FederatedDataset.from_client_ids(x, y, np.repeat(range(4), 10))
    read = ff.FederatedDataset.from_reader(
        lambda rows: x[rows], y.astype(np.int32), num_clients=4, num_classes=CLASSES
    )
    assert repr(read) == repr(whole)
    runs = [played(new_run(data=data), 3)[0] for data in (whole, read)]
    assert_same_bits(*map(state, runs))
    assert ff.evaluate(runs[1], apply, read)["accuracy_of_clients"] > 0.3
    for labels, num_clients in ((y, 3), (y[:0], 4), (y, 0)):
        with pytest.raises(
            ValueError, match="labels must have equally many entries per"
        ):
            ff.FederatedDataset.from_reader(
                lambda rows: x[rows],
                labels,
                num_clients=num_clients,
                num_classes=CLASSES,
            )


def test_ten_million_clients_are_data_set_and_run_without_memory_for_each():
    many = 10**7
    tracemalloc.start()
    data = ff.FederatedDataset.from_reader(
        lambda rows: np.ones((len(rows), 5), np.float32),
        np.broadcast_to(np.int32(0), many),
        num_clients=many,
        num_classes=CLASSES,
    )
    run = new_run(data=data)
    assert f"{many} clients" in repr(run) + repr(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    _, metrics = ff.run_round(run)
    assert metrics["client"].max() > many / 10
    assert peak < many / 4  # bytes


# --- Rounds


def test_a_round_trains_its_cohort_and_leaves_the_run_before_it():
    run = new_run()
    before = jax.device_get(run.server)
    after, metrics = ff.run_round(run)
    assert metrics["client"].shape == metrics["loss"].shape == (2,)
    assert (run.round_number, after.round_number) == (0, 1)
    np.testing.assert_array_equal(after.store.touched(), np.sort(metrics["client"]))
    assert_same_bits(jax.device_get(run.server), before)
    moved = after.variables["params"]["W"] - before.inner.variables["params"]["W"]
    assert np.abs(moved).max() > 1e-3


SIZES = [
    ({"cohort_size": 5}, "cohort_size must be at most .*got 5"),
    ({"clients_per_device": 0}, "clients_per_device must be at least 1, got 0"),
    ({"cohort_size": 0.1}, "cohort_size must be a whole number, got 0.1"),
    ({"local_epochs": 1.5}, "local_epochs must be a whole number or .*, got 1.5"),
    ({"local_epochs": 0}, "local_epochs must be at least 1, got 0"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"seed": -1}, r"seed must be in \[0, 2..32\), got -1"),
    ({"cohort": 2}, r"options of init must have keys of .* mean cohort_size\?"),
    (
        {"batch_size": 11, "batching": Batching(1, drop_last=True)},
        "drop_last=True must be at most .* 10 examples, got 11. Lower",
    ),
]


@pytest.mark.parametrize("wrong, rule", SIZES)
def test_sizes_out_of_range_are_refused(wrong, rule):
    with pytest.raises(ValueError, match=rule):
        new_run(**wrong)


def test_an_example_that_is_read_as_nan_names_its_client_and_keeps_the_run():
    x, y, _ = examples()
    x[33] = np.nan  # of client 3
    data = ff.FederatedDataset.from_reader(
        lambda rows: x[rows], y, num_clients=4, num_classes=CLASSES
    )
    run = new_run(data=data, cohort_size=0)
    before = state(run)
    for _ in range(2):  # a cell that is run again says the same
        message = "loss of client 3 in round 1 must be finite, got nan. The run stays"
        with pytest.raises(FloatingPointError, match=message):
            ff.run_round(run)
    assert_same_bits(state(run), before)


@pytest.mark.parametrize("augment", [None, horizontal_flip()])
def test_bytes_that_nothing_normalizes_are_refused(augment):
    x, y, owner = examples()
    images = np.zeros((40, 1, 5, 1), np.uint8)
    data = ff.FederatedDataset.from_client_ids(images, y, owner)
    with pytest.raises(
        ValueError, match="x must be floats, or uint8 with a batching that"
    ):
        new_run(data=data, batching=ff.Batching(4, augment))
    run = new_run(
        data=data, batching=ff.Batching(4, ff.build_augment([], flip_probability=0.5))
    )
    with pytest.raises(ValueError, match=r"must be uint8 .* got float32 \(5,\)"):
        ff.evaluate(run, apply, ff.FederatedDataset.from_client_ids(x, y, owner))


@pytest.mark.parametrize(
    "local",
    [
        ff.LocalTraining(loss, optax.sgd(optax.cosine_decay_schedule(0.1, 9))),
        ff.LocalTraining(
            loss,
            optax.inject_hyperparams(optax.sgd)(
                learning_rate=optax.cosine_decay_schedule(0.1, 9)
            ),
        ),
        ff.LocalTraining(loss, optax.sgd, optax.cosine_decay_schedule(0.1, 9)),
    ],
    ids=["sgd", "injected", "rate"],
)
def test_an_optax_schedule_that_would_restart_every_round_is_refused(local):
    with (
        jax.numpy_dtype_promotion("standard"),  # for optax's schedules
        pytest.raises(ValueError, match=r"lambda round, epoch: schedule\(round\)"),
    ):
        ff.run_round(new_run(lambda: ff.fedavg(local)))


def test_a_schedule_of_the_round_is_followed():
    schedule = optax.piecewise_constant_schedule(0.3, {1: 0.0})  # 0 from round 2 on
    local = ff.LocalTraining(loss, optax.sgd, lambda round, epoch: schedule(round))
    with jax.numpy_dtype_promotion("standard"):
        runs = [new_run(lambda: ff.fedavg(local))]
        for _ in range(3):
            runs.append(ff.run_round(runs[-1])[0])
    of = [jax.device_get(run.variables["params"]["W"]) for run in runs]
    moved = [float(np.abs(a - b).max()) for a, b in zip(of[:-1], of[1:], strict=True)]
    assert moved[0] > 1e-3
    assert moved[2] == 0


# --- Numbers


def right_of(params, client, data):
    images, labels = contents(data)[client]
    return apply({"params": params}, images).argmax(1) == labels


def test_evaluate_judges_the_server_and_every_client_on_its_own():
    data = ff.FederatedDataset.from_client_ids(*examples())
    run, _ = played(new_run(lambda: algorithm(rate=2.0), data=data), 1)
    found = ff.evaluate(run, apply, data, batch_size=8)
    params = jax.device_get(run.variables)["params"]
    all_right = [right_of(params, client, data) for client in range(NUM_CLIENTS)]
    assert "accuracy" not in found  # of the first bias, which nobody deploys
    rows, is_new = run.store.gather(np.arange(NUM_CLIENTS))
    assert 0 < is_new.sum() < NUM_CLIENTS  # one who never trained has the first bias
    biases = np.where(is_new[:, None], 0, rows.leaves["params"]["b"])
    own = [
        right_of({**params, "b": biases[client]}, client, data).mean()
        for client in range(NUM_CLIENTS)
    ]
    np.testing.assert_allclose(found["per_client"], own)
    assert found["accuracy_of_clients"] == pytest.approx(np.mean(own))
    assert not np.allclose(own, [right.mean() for right in all_right])


def test_a_network_that_is_evaluated_again_is_compiled_once():
    data, batches = ff.FederatedDataset.from_client_ids(*examples()), []

    def logits(variables, x):
        batches.append(len(x))
        return apply(variables, x)

    run = new_run(lambda: algorithm(rate=2.0), data=data)
    found = [ff.evaluate(run, logits, data, batch_size=8) for _ in range(2)]
    run, _ = ff.run_round(run)
    found.append(ff.evaluate(run, logits, data, batch_size=8))
    assert batches.count(8) == 1
    first, again, later = (x["accuracy_of_clients"] for x in found)
    assert first == again != later


def test_labels_of_more_classes_than_the_network_tells_are_refused():
    x, y, owner = examples()
    data = ff.FederatedDataset.from_client_ids(x, y + 1, owner)
    rule = r"labels of data must be below the 3 classes of apply's logits, got 3"
    with pytest.raises(ValueError, match=rule):
        ff.evaluate(new_run(), apply, data)
    with pytest.raises(ValueError, match=r"apply must give logits \[B, M\], got shape"):
        ff.evaluate(new_run(), lambda v, x: apply(v, x)[:, 0], data)
    with pytest.raises(FloatingPointError, match="labels are below the number of the"):
        ff.run_round(new_run(data=data))


def test_evaluating_other_clients_is_refused():
    data = ff.FederatedDataset.from_client_ids(*examples(num_clients=3))
    with pytest.raises(ValueError, match="the run's, got None for client 3"):
        ff.evaluate(new_run(), apply, data)
    x, y, owner = examples()
    for started, evaluated, found in (
        (["a", "b", "c", "e"], ["a", "b", "d", "e"], "'d' for client 'c'"),
        ([0, 1, 2, 3], ["0", "1", "2", "3"], "'0' for client 0"),
    ):
        of = lambda names: ff.FederatedDataset.from_client_ids(
            x, y, np.array(names)[owner]
        )
        run = new_run(data=of(started))
        with pytest.raises(ValueError, match=f"must be the run's, got {found}"):
            ff.evaluate(run, apply, of(evaluated))
        swapped = of(started)._replace(clients=of(started).clients[[1, 0, 2, 3]])
        with pytest.raises(ValueError, match="must be the run's"):
            ff.evaluate(run, apply, swapped)
    check_clients(range(10**12), range(10**12))  # without an array of them
    check_clients(np.arange(4), range(4))


def test_evaluate_sees_plain_images_decoded_as_in_training():
    """A network that tells from bytes whether the left or the right side is bright."""
    sides = np.array([[90, 160], [160, 90]], np.uint8)
    x, y = np.tile(sides, (8, 1)).reshape(16, 1, 2, 1), np.tile([0, 1], 8)
    data = ff.FederatedDataset.from_client_ids(x, y, np.arange(16) % 4)
    params = {"W": jnp.array([[-1.0, 1.0], [1.0, -1.0]]), "b": jnp.array([0.0, 0.1])}
    feed = Batching(4, compose(horizontal_flip(), normalize()))
    run = new_run(lambda: algorithm(None), start=params, data=data, batching=feed)
    assert ff.evaluate(run, apply, data)["accuracy"] == 1


def test_a_run_that_quantize_cuts_warns_once():
    cut = ff.AGGREGATORS["quantize"](range=1e-4)
    run = new_run(lambda: ff.with_aggregation(algorithm(where=None), cut))
    with pytest.warns(UserWarning, match="quantize cuts .*% .* Raise its key `range`"):
        run, _ = ff.run_round(run)
    run, _ = ff.run_rounds(run, 2)  # a warning is an error in tests
    assert run.has_warned and run.round_number == 3


# --- Files


def test_a_loaded_run_continues_to_the_bits_of_an_uninterrupted_one(tmp_path):
    one_a_round = {"cohort_size": 1}
    whole, metrics = played(new_run(**one_a_round), 5)
    path = ff.save(played(new_run(**one_a_round), 2)[0], tmp_path / "deep" / "run")
    assert [p.name for p in path.parent.iterdir()] == ["run.npz"]
    loaded = ff.resume(new_run(**one_a_round), path)
    assert loaded.round_number == len(loaded.store.touched()) == 2
    resumed, late = played(loaded, 3)
    assert_same_bits(state(resumed), state(whole))
    assert_same_bits(late, metrics[2:])


@pytest.mark.parametrize("name", ["run", "run.npz"])
def test_load_says_how_a_saved_run_is_opened(name, tmp_path):
    ff.save(new_run(), tmp_path / "run")
    with pytest.raises(ValueError, match=r"must be .*got .*ff.resume\(run, path\)"):
        ff.load_model(tmp_path / name)
    with pytest.raises(ValueError, match="path must be a run directory or"):
        ff.load_model(tmp_path / "other")
    (tmp_path / "run").mkdir()  # a work folder beside the file is itself
    with pytest.raises(ValueError, match=r"run(\.npz)? must"):
        ff.load_model(tmp_path / name)


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_run_without_rows_is_resumed_too_by_one_that_is_further_on(rounds, tmp_path):
    plain = lambda: algorithm(where=None)
    run, _ = played(new_run(plain), rounds)
    path, expected = ff.save(run, tmp_path / "lr0.1"), state(run)
    assert path.name == "lr0.1.npz"
    further, _ = played(run, 1)
    assert_same_bits(state(ff.resume(further, path)), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"start": variables(num_classes=4)},
        {"algorithm": lambda: algorithm("params/W")},
        {"algorithm": lambda: algorithm(None)},
    ],
    ids=["a wider head", "another personal leaf", "no personal leaf"],
)
def test_a_file_of_another_network_is_refused(options, tmp_path):
    usual = {"algorithm": algorithm, "cohort_size": 0}
    for saved, opened in ((usual, usual | options), (usual | options, usual)):
        run, _ = played(new_run(**saved), 1)
        path = ff.save(run, tmp_path / "run")
        with pytest.raises(ValueError, match=r"run\.npz must "):
            ff.resume(new_run(**opened), path)


def test_a_run_of_another_init_is_refused_by_what_differs(tmp_path):
    x, y, ids = examples()
    usual = ff.FederatedDataset.from_client_ids(x, y, ids)
    path = ff.save(new_run(), tmp_path / "run")
    moved = x.copy()
    moved[-1].flat[-1] += 1e-3
    dropout = Systems(dropout=Dropout(before_training=0.25))
    others = {
        "examples ": {"data": ff.FederatedDataset.from_client_ids(moved, y, ids)},
        "clients ": {"data": usual._replace(clients=np.arange(1, 5))},
        "labels ": {"data": ff.FederatedDataset.from_client_ids(x, y[::-1], ids)},
        "seed 3 in it and 4": {"seed": 4},
        "batch_size 4 in it and 5": {"batch_size": 5},
        "cohort_size 2 in it and 3": {"cohort_size": 3},
        "local_epochs": {"local_epochs": (2, 2, 1)},
        "sampling": {"sampling": ff.Sampling("fixed")},
        "systems": {"systems": dropout},
    }
    for name, options in others.items():
        with pytest.raises(ValueError, match=f"equal settings .* got {name}"):
            ff.resume(new_run(**{"data": usual, **options}), path)


def test_private_rounds_that_are_resumed_with_other_noise_are_composed(tmp_path):
    data = ff.FederatedDataset.from_client_ids(*examples())

    def private(noise, **options):
        given = {"clip_norm": 0.5, "cohort_size": 2, "delta": 0.1, **options}
        covered = ff.private(algorithm(), ff.Privacy(noise_multiplier=noise, **given))
        return new_run(lambda: covered, data=data)

    loud, found = played(private(0.5), 2)
    path = ff.save(loud, tmp_path / "run")
    resumed, late = played(ff.resume(private(5.0), path), 2)
    spent = [metrics["epsilon"] for metrics in (*found, *late)]
    # Four clients, two a round: each takes part once in two rounds.
    expected = dp_accounting.get_epsilon_gaussian((2**2 + 0.2**2) ** -0.5, 0.1)
    np.testing.assert_allclose([spent[1], spent[3]], [spent[0], expected], rtol=1e-6)
    assert ff.resume(private(5.0), ff.save(resumed, path)).ledger == resumed.ledger
    _, (metrics,) = played(loud._replace(sim=private(5.0).sim), 1)
    assert metrics["epsilon"] == spent[2]
    for message, options in {
        "got privacy.clip_norm 0.5 in it and 0.6 here": {"clip_norm": 0.6},
        "got privacy.delta 0.1 in it and 0.2 here": {"delta": 0.2},
    }.items():
        with pytest.raises(ValueError, match=message):
            ff.resume(private(0.5, **options), path)
    plain, _ = played(new_run(), 1)
    with pytest.raises(ValueError, match="must be private, got 0 of the 1 before"):
        ff.run_round(plain._replace(sim=private(5.0).sim))


def test_a_run_whose_rows_have_moved_on_is_refused(tmp_path):
    """As when a notebook's cell is run twice: rows are kept in one place."""
    data = ff.FederatedDataset.from_client_ids(*examples())
    run = new_run()
    after, _ = ff.run_round(run)
    for use in (
        lambda: ff.run_round(run),
        lambda: ff.evaluate(run, apply, data),
        lambda: ff.save(run, tmp_path / "run"),
    ):
        with pytest.raises(ValueError, match="run must be the newest .*1, got round 0"):
            use()
    ff.run_round(after)
