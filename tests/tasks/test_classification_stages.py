"""A small experiment from a config: what its numbers are of, and what is refused."""

import json

import jax
import numpy as np
import pytest

from fedfr_jax.cli.prepare import open_source
from fedfr_jax.config.build import build, plain
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.runs.experiment import evaluate_experiment, run_experiment
from fedfr_jax.runs.stages import load_models
from fedfr_jax.types import Experiment, TrainedModels
from tests.contracts.rows import rows_of

pytestmark = pytest.mark.ci

CLASSES, NUM_CLIENTS = 4, 4
RATE = {"learning_rate": 0.1}
TARGET = 0.85


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Noise in which a quarter of the image that tells the class is brighter."""
    path = tmp_path_factory.mktemp("arrays") / "quarters.npz"
    rng = np.random.default_rng(0)
    labels = np.arange(160) % CLASSES
    images = rng.integers(0, 200, (160, 8, 8, 1))
    for quarter in range(CLASSES):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        images[labels == quarter, top : top + 4, left : left + 4] += 55
    images = images.astype(np.uint8)
    first, rest = slice(40), slice(40, None)
    np.savez(
        path,
        images=images,
        labels=labels,
        test_images=images[first],
        test_labels=labels[first],
        train_images=images[rest],
        train_labels=labels[rest],
    )
    return path


def config(path, **sections):
    """Four clients of two classes each, an MLP and FedAvg."""
    return {
        "task": "classification",
        "seed": 0,
        "data": {"name": "arrays", "path": str(path)},
        "partition": {
            "name": "by_class",
            "num_clients": NUM_CLIENTS,
            "classes_per_client": 2,
        },
        "model": {"name": "mlp", "hidden_dim": 8},
        "federation": {
            "rounds": 3,
            "local_epochs": 2,
            "batch_size": 8,
            "flip_probability": 0.0,
            "evaluate_every": 1,
        },
        "evaluation": {},
        "methods": {"fedavg": RATE},
        **sections,
    }


def run(experiment: Experiment, folder) -> dict:
    """{method: {evaluator: {metric: value}}}."""
    with jax.numpy_dtype_promotion("standard"):  # which optax's schedules need
        return run_experiment(experiment, folder)["methods"]


@pytest.mark.slow
def test_features_are_judged_beside_those_of_another_run(path, tmp_path):
    """AMM alone, and MMD to a run's last row, which is 0 to itself."""
    central = {"kind": "central", "epochs": 1, "batch_size": 16, "learning_rate": 0.1}
    first = config(path, methods={"central": central})
    with jax.numpy_dtype_promotion("standard"):
        run_experiment(build(first), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(first))  # as `fedfr train` does
    given = {"reference": str(tmp_path), "max_images": 20}
    experiments = [
        build(config(path, evaluation={"representation": told})) for told in ({}, given)
    ]
    trained = load_models(build(first), "central", tmp_path)
    alone, beside = (
        e.task.evaluators["representation"].evaluate(trained).metrics
        for e in experiments
    )
    assert alone["amm"] > 0 and "mmd" not in alone
    assert abs(beside["mmd"]) < 1e-6
    start = experiments[0].stages["fedavg"].trainer.init_variables(None)
    others = experiments[1].task.evaluators["representation"]
    assert others.evaluate(trained._replace(variables=start)).metrics["mmd"] > 1e-3
    other = {"name": "mlp", "hidden_dim": 9}
    evaluation = {"representation": given}
    with pytest.raises(ValueError, match="reference: weights must fit the model"):
        build(config(path, model=other, evaluation=evaluation))


METHODS = {
    "fedavg": RATE,
    "fedper": {**RATE, "personal": {"blocks": 1}},
    "local": {**RATE, "personal": "."},
    "scaffold": {**RATE, "algorithm": "scaffold"},
    "central": {
        "kind": "central",
        "epochs": 8,
        "batch_size": 16,
        "flip_probability": 0.0,
    },
}


@pytest.fixture(scope="module")
def finished(path, tmp_path_factory):
    """(experiment, its folder, its numbers) of METHODS."""
    given = config(path, methods=METHODS, evaluation={"target_accuracy": TARGET})
    experiment = build(given)
    folder = tmp_path_factory.mktemp("finished")
    return experiment, folder, run(experiment, folder)


def test_a_run_is_judged_again_to_the_same_numbers(finished):
    experiment, folder, found = finished
    assert evaluate_experiment(experiment, folder)["methods"] == found
    assert json.loads((folder / "evaluation.json").read_text()) == {"methods": found}


def test_every_row_is_judged_where_it_has_a_network(finished):
    _, folder, found = finished
    assert found.keys() == METHODS.keys()
    has_one = {name for name, of in found.items() if of["generic"]}
    assert has_one == {"fedavg", "scaffold", "central"}  # who shares every leaf
    spread = {f"accuracy{x}" for x in ("", "_std", "_min", "_max", "_worst_decile")}
    for name, of in found.items():
        rounds = set() if name == "central" else {f"rounds_to_{TARGET}"}
        assert of["personalized"].keys() == {*spread, *rounds}, name
    rows = [
        json.loads(line)
        for line in (folder / "fedper" / "metrics.jsonl").read_text().splitlines()
    ]
    accuracies = [row["personalized/accuracy"] for row in rows]
    assert len(accuracies) == 3
    assert accuracies[-1] == found["fedper"]["personalized"]["accuracy"]


def test_a_row_says_what_was_sent_and_when_the_target_was_reached(finished):
    _, folder, found = finished
    model, head = 4 * (64 * 8 + 8 + 8 * 4 + 4), 4 * (8 * 4 + 4)  # bytes, of the MLP
    sent = {
        "fedavg": model,
        "scaffold": 2 * model,
        "fedper": model - head,
        "local": 0,
    }
    for name, size in sent.items():
        communication = found[name]["communication"]
        assert communication["upload_mb"] == communication["download_mb"] == size / 1e6
        total = 2 * size * NUM_CLIENTS * 3 / 1e6  # of three rounds
        assert communication["total_mb"] == pytest.approx(total)
        rows = (folder / name / "metrics.jsonl").read_text().splitlines()
        seen = [json.loads(row)["personalized/accuracy"] for row in rows]
        reached = [i for i, x in enumerate(seen, 1) if x >= TARGET]
        first = found[name]["personalized"][f"rounds_to_{TARGET}"]
        assert first == (reached[0] if reached else None)
    assert "rounds_to_0.85" not in found["fedper"]["generic"]


def test_training_is_better_than_chance_and_heads_know_their_two_classes(finished):
    _, _, found = finished
    mean = {name: of["personalized"]["accuracy"] for name, of in found.items()}
    assert found["fedavg"]["generic"]["accuracy"] > 0.5
    assert min(mean["fedper"], mean["local"]) > max(0.85, mean["fedavg"])


def test_central_training_sees_the_training_images_of_all_clients(finished):
    experiment, _, found = finished
    trainer = experiment.stages["central"].trainer
    assert trainer.dataset is experiment.task.dataset
    assert (trainer.first_row, trainer.num_rows) == (0, 128)
    assert found["central"]["generic"]["accuracy"] > 0.9


def server_of(experiment, name):
    trainer = experiment.stages[name].trainer
    return jax.eval_shape(lambda: trainer.algorithm.init(trainer.init_variables(None)))


def names_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
    }


def test_what_fedper_averages_has_no_head(finished):
    experiment, _, _ = finished
    inner = names_of(server_of(experiment, "fedper").inner)
    assert inner == {"variables/params/fc/bias", "variables/params/fc/kernel"}
    kept = names_of(server_of(experiment, "fedper").first)
    assert kept == {"params/classifier/bias", "params/classifier/kernel"}
    assert not names_of(server_of(experiment, "local").inner)


def test_all_rows_start_from_the_same_network(finished):
    experiment, _, _ = finished
    trainers = [stage.trainer for stage in experiment.stages.values()]
    central = trainers.pop()
    starts = [trainer.init_variables(None) for trainer in trainers]
    starts.append(central.init(jax.random.key(7)))
    for start in starts[1:]:
        jax.tree.map(np.testing.assert_array_equal, start, starts[0])


def test_streamed_images_give_the_same_numbers(finished, path, tmp_path):
    _, _, found = finished
    given = config(path)
    given["federation"] = {**given["federation"], "data_placement": "stream"}
    streamed = run(build(given), tmp_path)
    for name, of in streamed["fedavg"].items():
        expected = found["fedavg"][name]
        assert of == pytest.approx({metric: expected[metric] for metric in of})


def test_test_images_of_the_set_itself_are_those_that_are_judged(path):
    data = {
        "name": "arrays",
        "path": str(path),
        "images": ["train_images", "test_images"],
        "labels": ["train_labels", "test_labels"],
    }
    task = build(config(path, data=data)).task
    assert task.data_report["images"] == {"train": 120, "test": 40}
    with np.load(path) as file:
        images = file["train_images"]
    flat = lambda x: sorted(x.reshape(len(x), -1).tolist())
    assert flat(np.asarray(task.dataset.images)) == flat(images)


# --- Clients that never take part, and fine-tuning

OUTSIDE = {
    "fedper": {**RATE, "personal": {"blocks": 1}, "personal_epochs": 1},
    "central": {**METHODS["central"], "epochs": 24},
}


@pytest.fixture(scope="module")
def outside(path, tmp_path_factory):
    """(experiment, its numbers) with two more clients, outside the federation."""
    partition = config(path)["partition"]
    partition |= {"num_clients": NUM_CLIENTS + 2, "unseen_clients": 2}
    finetune = {"epochs": 6, "learning_rate": 0.2}
    given = config(
        path,
        partition=partition,
        evaluation={"finetune": finetune},
        methods=OUTSIDE,
    )
    experiment = build(given)
    return experiment, run(experiment, tmp_path_factory.mktemp("outside"))


def test_clients_outside_are_in_no_round_and_in_no_central_epoch(path, outside):
    experiment, _ = outside
    task = experiment.task
    assert (
        task.data_report["clients"] == len(task.population.num_classes) == NUM_CLIENTS
    )
    assert experiment.stages["central"].trainer.num_rows == task.dataset.num_examples
    assert "and 2 clients that never take part" in task.data_report_text
    partition = config(path)["partition"] | {"num_clients": NUM_CLIENTS + 2}
    whole = build(config(path, partition=partition)).task
    flat = lambda x: {image.tobytes() for image in np.asarray(x)}
    inside, everybody = flat(task.dataset.images), flat(whole.dataset.images)
    assert inside < everybody
    assert len(everybody) - len(inside) > 30  # a third of 128


def test_clients_outside_are_judged_as_they_come_and_after_fine_tuning(outside):
    _, found = outside
    evaluators = {"generic", "personalized", "finetuned", "unseen", "unseen_finetuned"}
    mean = {}
    for name, of in found.items():
        assert of.keys() - {"communication"} == evaluators
        mean[name] = {k: v.get("accuracy") for k, v in of.items()}
    for of in mean.values():  # two classes each, known after six epochs
        assert of["finetuned"] > 0.8 and of["unseen_finetuned"] > 0.75
        assert of["unseen_finetuned"] >= of["unseen"]
    # A head that nobody has trained knows nothing, that of all clients something.
    assert mean["central"]["unseen"] > 0.7
    assert mean["fedper"]["unseen"] < 0.5


def test_clients_outside_are_judged_by_what_a_new_one_would_be_handed(path, outside):
    experiment, _ = outside
    first = build(config(path)).stages["fedavg"].trainer
    whole = first.init_variables(None)
    nothing = jax.tree.map(np.zeros_like, whole)
    unseen = experiment.task.evaluators["unseen"]
    judged = lambda networks: unseen.evaluate(networks).metrics
    one = TrainedModels(whole, first.apply, None, first.apply)
    own = one._replace(
        client_variables=lambda c: nothing, new_client_variables=lambda c: whole
    )
    assert judged(own) == judged(one)
    assert judged(own._replace(new_client_variables=lambda c: nothing)) != judged(one)


def test_fine_tuning_one_layer_leaves_the_others(path):
    """The judged networks of a round without aggregation, by hand."""
    finetune = {"epochs": 1, "learning_rate": 0.2, "trainable": "classifier"}
    task = build(config(path, evaluation={"finetune": finetune})).task
    first = build(config(path)).stages["fedavg"].trainer
    seen = []

    def apply(variables, images):
        jax.debug.callback(
            lambda x: seen.append(np.asarray(x)), variables["params"]["fc"]["bias"]
        )
        return first.apply(variables, images)

    start = first.init_variables(None)
    networks = TrainedModels(start, apply, None, apply)
    tuned = task.evaluators["finetuned"].evaluate(networks).metrics["accuracy"]
    jax.effects_barrier()
    plain = task.evaluators["personalized"].evaluate(networks).metrics["accuracy"]
    assert tuned > plain
    for bias in seen:
        np.testing.assert_array_equal(bias, start["params"]["fc"]["bias"])


def test_fine_tuning_starts_from_every_clients_own_network(path):
    still = {"epochs": 1, "learning_rate": 0.0}
    task = build(config(path, evaluation={"finetune": still})).task
    first = build(config(path)).stages["fedavg"].trainer
    start = first.init_variables(None)

    def of_client(client):
        sign = (-1) ** client
        return {**start, "params": jax.tree.map(lambda x: sign * x, start["params"])}

    networks = TrainedModels(None, first.apply, of_client, first.apply)
    judged = {
        name: task.evaluators[name].evaluate(networks).per_client["accuracy"]
        for name in ("personalized", "finetuned")
    }
    np.testing.assert_array_equal(judged["finetuned"], judged["personalized"])
    alike = networks._replace(client_variables=lambda client: of_client(0))
    other = task.evaluators["personalized"].evaluate(alike).per_client["accuracy"]
    assert (other != judged["personalized"]).any()


# --- Running statistics

STATISTICS = {
    "average": {"learning_rate": 0.3, "batch_stats": "average"},
    "local": {"learning_rate": 0.3, "batch_stats": "local"},
    "first": {"learning_rate": 0.3, "batch_stats": "random_client"},
    "fedbn": {"learning_rate": 0.3, "personal": "bn"},
}


def normalized(path):
    """Three clients of different classes, and a ResNet with batch normalization."""
    given = config(
        path,
        partition={"name": "dirichlet", "num_clients": 3, "alpha": 1.0},
        model={"name": "resnet", "blocks": (1,), "widths": (4,)},
        methods=STATISTICS,
    )
    given["federation"] = {**given["federation"], "local_epochs": 6}
    return build(given)


@pytest.mark.slow
def test_networks_of_the_four_ways_to_keep_statistics_differ(path, tmp_path):
    found = run(normalized(path), tmp_path)
    assert not found["fedbn"]["generic"]
    own = {name: of["personalized"]["accuracy"] for name, of in found.items()}
    assert len(set(own.values())) == len(STATISTICS)


def test_running_statistics_are_averaged_kept_or_of_the_first(path):
    experiment = normalized(path)
    for name in ("local", "first", "fedbn"):
        inner = names_of(server_of(experiment, name).inner)
        assert not [leaf for leaf in inner if leaf.endswith(("/mean", "/var"))]
        assert any("bn" in leaf for leaf in inner) == (name != "fedbn")
    server = names_of(server_of(experiment, "average"))
    assert [leaf for leaf in server if leaf.endswith("/mean")]


def test_there_is_no_one_network_where_clients_keep_the_statistics(path):
    stages = normalized(path).stages
    assert (
        stages["average"].trainer.global_model and stages["first"].trainer.global_model
    )
    assert stages["local"].trainer.global_model is None


# --- What a row may be

TOLD = ("model", "num_clients", "num_classes", "classes", "spreadout")


def test_every_algorithm_but_those_of_faces_and_public_images_is_a_row(path):
    rows = rows_of("params/classifier", given=TOLD)
    assert ALGORITHMS.keys() - rows.keys() == {"fedfr", "finch", "kd"}
    experiment = build(config(path, methods=rows))
    assert experiment.stages.keys() == rows.keys()
    kept = {name: {**row, "personal": "classifier/bias"} for name, row in rows.items()}
    for name, stage in build(config(path, methods=kept)).stages.items():
        assert stage.trainer.global_model is None
        inner = names_of(server_of(build_one(path, kept[name]), "row").inner)
        assert not any(leaf.endswith("classifier/bias") for leaf in inner), name


def test_a_source_that_is_open_already_is_taken_as_it_is(path):
    source = open_source({"name": "arrays", "path": str(path)})
    opened = config(path, data={"name": "source_object", "source": source})
    assert plain({"a": [source]})["a"][0] is source
    facts = [build(given).task.data_report for given in (opened, config(path))]
    assert facts[0] == facts[1]


def build_one(path, row):
    return build(config(path, methods={"row": row}))


def test_a_drawn_head_is_another_one_for_every_new_client(path):
    row = {**RATE, "personal": "classifier", "init_per_client": True}
    trainer = build_one(path, row).stages["row"].trainer
    first = trainer.init_variables(None)
    server = trainer.algorithm.init(first)
    heads = [
        trainer.algorithm.init_personal(jax.random.key(i), server).leaves["params"]
        for i in range(2)
    ]
    kernels = [head["classifier"]["kernel"] for head in heads]
    kernels.append(first["params"]["classifier"]["kernel"])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(kernels[i] - kernels[j]).max() > 0.1
    assert all(head["fc"] == {"bias": None, "kernel": None} for head in heads)


WRONG_SETTINGS = [
    (
        {**RATE, "personal": 2},
        "must be a regular expression or a mapping or none, got 2",
    ),
    ({**RATE, "personal": {}}, "personal: leaves must have exactly one key of"),
    ({**RATE, "personal": {"blocks": "fc"}}, "blocks must .*got 'fc'"),
    ({**RATE, "personal": "("}, r"a regular expression or a mapping .*, got '\('"),
    ({**RATE, "init_per_client": True}, "init_per_client needs personal"),
    (
        {**RATE, "init_per_client": None},
        "init_per_client must be true or false, got None",
    ),
    ({**RATE, "personal_epochs": ()}, r"epochs must be a whole number, got \(\)"),
]
ROWS = [
    ({**RATE, "personal": {"blocks": 3}}, r"blocks must be in \[0, 2\] .*got 3"),
    ({**RATE, "personal": {"block": 1}}, "personal must have keys of .*did you mean"),
    ({**RATE, "personal": "conv1"}, "path pattern must match a leaf.*got 'conv1'"),
    ({**RATE, "algorithm": "fedavgg"}, "algorithm must be one of .*'fedavgg'"),
    ({**RATE, "algorithm": {"name": None}}, "algorithm must be one of .*got None"),
    ({**RATE, "algorithm": "fedprox"}, "needs the key mu"),
    ({**RATE, "algorithm": "kd"}, r"needs public data, .* offer \(reid does\)"),
    ({**RATE, "algorithm": "fedfr"}, r"needs public identities .*\(faces does\)"),
    ({**RATE, "mu": 0.1}, "must have keys of .*got 'mu'"),
    ({"learning_rat": 0.1}, "did you mean learning_rate"),
    ({}, "needs the key learning_rate"),
    (
        {**RATE, "optimizer": "adamm"},
        "optimizer must be the name of an optax optimizer",
    ),
    ({**RATE, "batch_stats": "frozen"}, "batch_stats must be one of .*'frozen'"),
    ({**RATE, "loss": {"label_smoothing": 1.0}}, r"label_smoothing must .* \[0, 1\)"),
    ({**RATE, "kind": "center"}, "kind must be one of .*, got 'center'"),
    ({"kind": "central", "margin": 0.1}, "must have keys of .*got 'margin'"),
    ({"kind": "central", "epochs": 0}, "epochs must be at least 1, got 0"),
    (
        {"kind": "central", "learning_rate_multipliers": {"stemm": 0.1}},
        "learning_rate_multipliers: path pattern must match a leaf",
    ),
    (
        {"kind": "central", "sharding": (("nosuch", "zero3"),)},
        "sharding: path pattern must match a leaf.*got 'nosuch'",
    ),
    (
        {"kind": "central", "frozen": "nosuch"},
        "frozen: path pattern must match a leaf.*got 'nosuch'",
    ),
    ({"kind": "central", "gate_weight": 2.0}, "must have keys of .*got 'gate_weight'"),
    ({"kind": "central", "batch_size": 129}, r"batch_size must be at most 128"),
    (
        {"kind": "central", "loss": {"label_smoothing": 1.0}},
        "loss.label_smoothing must",
    ),
    ({**RATE, "personal_epochs": 1}, "personal_epochs needs personal leaves"),
    (
        {**RATE, "personal": "classifier", "personal_epochs": -1},
        "personal_epochs must be at least 0, got -1",
    ),
    (
        {**RATE, "personal": "fc", "personal_epochs": 1, "algorithm": "scaffold"},
        "personal_epochs needs the algorithm fedavg, got 'scaffold'",
    ),
    *WRONG_SETTINGS,
]


@pytest.mark.parametrize("row, rule", ROWS)
def test_a_wrong_row_is_refused_by_its_name(path, row, rule):
    with pytest.raises(ValueError, match=rule) as raised:
        build_one(path, row)
    assert str(raised.value).startswith("config.methods.row")


FACES = {
    "name": "by_identity",
    "num_clients": 1,
    "ids_per_client": 1,
    "num_public_ids": 1,
    "num_unseen_ids": 1,
}
OWNERS = [i % CLASSES for i in range(160)]  # each has the images of one class
ONE_CLASS_EACH = {"name": "by_class", "num_clients": 4, "classes_per_client": 1}
SECTIONS = [
    (
        {"partition": FACES},
        "partition.name must be a partition by class, got 'by_identity'",
    ),
    ({"partition": {"name": "by_clas"}}, "partition.name must be one of .*by_class"),
    (
        {"partition": {"name": "natural", "client_ids": OWNERS, "num_clients": 1}},
        r"partition must leave each class .*got none of '\d' \(3 such of 4\)",
    ),
    ({"pretrain": {"epochs": 1}}, "pretrain must have keys of .*got 'epochs'"),
    (
        {"model": {"name": "mlp", "num_classes": 7}},
        "model.num_classes must be the 4 classes of the data, got 7",
    ),
    (
        {
            "model": {
                "name": "sphereface",
                "blocks": (1,),
                "widths": (4,),
                "embedding_dim": 7,
            }
        },
        "model.embedding_dim must be the 4 classes of the data, got 7",
    ),
    ({"evaluation": {"fars": 1}}, r"evaluation must have keys of .*batch_size"),
    ({"federation": {"cohort_size": 5}}, r"federation: cohort_size must be at most 4"),
    (
        {"federation": {"augment": ("blur",)}},
        r"federation.augment\[\d\].name must be one of",
    ),
    (
        {"model": {"name": "resnett"}},
        "model.name must be one of .*'resnet'.*got 'resnett'",
    ),
    (
        {"partition": {"name": "iid", "num_clients": 160}},
        "partition must leave test images",
    ),
    (
        {"evaluation": {"target_accuracy": 75}},
        r"evaluation.target_accuracy must be in \[0, 1\], got 75",
    ),
    (
        {"evaluation": {"batch_size": 0}},
        r"evaluation.batch_size must be in \[1, 65536\]",
    ),
    (
        {"evaluation": {"finetune": {"epochs": 0, **RATE}}},
        "evaluation.finetune.epochs must be at least 1, got 0",
    ),
    (
        {"evaluation": {"finetune": {"trainable": "conv", **RATE}}},
        "evaluation.finetune.trainable: path pattern must match a leaf.*got 'conv'",
    ),
    (
        {"evaluation": {"representation": {"reference": "nowhere"}}},
        "evaluation.representation.reference: weights must be .*run's folder",
    ),
    (
        {"evaluation": {"finetune": {}}},
        "evaluation.finetune needs the key learning",
    ),
    (
        {"partition": {"name": "iid", "num_clients": 3, "unseen_clients": 3}},
        r"partition: unseen_clients must be an integer in \[0, 3\), .*got 3",
    ),
    (
        {"partition": {**ONE_CLASS_EACH, "unseen_clients": 1}},
        r"partition must leave each class .* without the 1 unseen_clients, got none "
        r"of '\d' \(1 such of 4\)",
    ),
]


@pytest.mark.parametrize("sections, rule", SECTIONS)
def test_a_wrong_section_is_refused_by_its_name(path, sections, rule):
    with pytest.raises(ValueError, match=f"^config.{rule}"):
        build(config(path, **sections))
