"""A small experiment from a config: what its numbers are of, and what is refused."""

import functools
import json

import jax
import numpy as np
import pytest

from fedfr_jax.cli.prepare import open_source
from fedfr_jax.config.build import build, plain
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.types import Experiment, TrainedModels

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
    np.savez(path, images=images, labels=labels)
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
    sent = {"fedavg": model, "scaffold": 2 * model, "fedper": model - head, "local": 0}
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


# --- Clients that never take part, and fine-tuning

OUTSIDE = {
    "fedper": {**RATE, "personal": {"blocks": 1}, "personal_epochs": 1},
    "central": {**METHODS["central"], "epochs": 24},
}


def stacked(of_client, clients):
    """`TrainedModels.client_variables` of a function of one client."""
    if not np.ndim(clients):
        return of_client(clients)
    found = [of_client(client) for client in clients]
    return jax.tree.map(lambda *x: np.stack(x), *found)


@pytest.fixture(scope="module")
def outside(path, tmp_path_factory):
    """(experiment, its numbers) with two more clients, outside the federation."""
    partition = config(path)["partition"]
    partition |= {"num_clients": NUM_CLIENTS + 2, "unseen_clients": 2}
    finetune = {"epochs": 6, "learning_rate": 0.2}
    given = config(
        path, partition=partition, evaluation={"finetune": finetune}, methods=OUTSIDE
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

    def always(variables):
        return lambda clients: stacked(lambda client: variables, clients)

    own = one._replace(
        client_variables=always(nothing), new_client_variables=always(whole)
    )
    assert judged(own) == judged(one)
    assert judged(own._replace(new_client_variables=always(nothing))) != judged(one)


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
        sign = (-1) ** int(client)
        return {**start, "params": jax.tree.map(lambda x: sign * x, start["params"])}

    own = functools.partial(stacked, of_client)
    networks = TrainedModels(None, first.apply, own, first.apply)
    judged = {
        name: task.evaluators[name].evaluate(networks).per_client["accuracy"]
        for name in ("personalized", "finetuned")
    }
    np.testing.assert_array_equal(judged["finetuned"], judged["personalized"])
    alike = networks._replace(client_variables=lambda clients: own(clients * 0))
    other = task.evaluators["personalized"].evaluate(alike).per_client["accuracy"]
    assert (other != judged["personalized"]).any()


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


def test_methods_whose_clients_keep_a_part_have_no_global_model(path):
    fedrep = {"name": "fedrep", "head": "params/classifier", "head_epochs": 1}
    rows = {
        "fedavg": {},
        "fedper": {"personal": {"blocks": 1}},
        "fedrep": {"algorithm": fedrep},
        "ifca": {"algorithm": {"name": "ifca", "num_clusters": 2}},
    }
    rows = {name: {**RATE, **row} for name, row in rows.items()}
    stages = build(config(path, methods=rows)).stages
    evaluated = [name for name in rows if stages[name].trainer.global_model]
    assert evaluated == ["fedavg"]


def test_a_model_of_the_config_may_have_a_projection(path):
    model = {"name": "mlp", "hidden_dim": 8, "projection": 3}
    trainer = build(config(path, model=model)).stages["fedavg"].trainer
    kernel = trainer.init_variables(None)["params"]["classifier"]["kernel"]
    assert kernel.shape == (3, 4)
