"""The released personalized evaluation, asked as a run asks when it has trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.evaluation.error_rates import UNSUPPORTED
from fedfr_jax.runs.stages import start_stage, trained_models
from fedfr_jax.types import Model
from tests.tasks.faces import given
from tests.tasks.faces.given import experiment_of, partition_of, source_of

DIM, CLIENTS = 24, [range(20), range(20, 40), range(40, 60)]
FARS = (1e-1, 1e-2, 1e-3, 1e-4)


def linear(variables, x, train):
    """An image of [D, 1, 1] times the network's matrix."""
    del train
    return x[:, :, 0, 0] @ variables["params"]["kernel"], variables["batch_stats"]


def network(kernel):
    kernel = jnp.asarray(kernel, jnp.float32)
    return {"params": {"kernel": kernel}, "batch_stats": {}}


MODEL = Model(lambda key: network(np.eye(DIM)), linear, (DIM, 1, 1), DIM)


def images_of(released):
    """(images, people, is_test): the file's features at any length.

    Gallery first, then test, then the first people once more under other names, as
    two public and two unseen ones.
    """
    gallery, labels = released["gallery_image_features"], released["labels"]
    features = np.concatenate([gallery, released["features"], gallery[:52]])
    lengths = np.random.default_rng(0).uniform(0.5, 2, (len(features), 1))
    others = 60 + np.repeat(np.arange(4), 13)
    labels = np.concatenate([released["gallery_image_labels"], labels, others])
    is_test = np.zeros(len(labels), bool)
    is_test[len(gallery) : len(gallery) + len(released["labels"])] = True
    images = (features * lengths * 127.5 + 127.5).astype(np.float32)[..., None, None]
    return images, labels.astype(np.int32), is_test


def rows_of(algorithm, server):
    """Three clients' rows whose converters undo what their backbones spoil."""
    row = algorithm.init_personal(jax.random.key(0), server)
    for client in range(3):
        rng = np.random.default_rng(client)
        kernel = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
        kernel *= rng.uniform(0.5, 2, DIM)  # else cosines would stay as they were
        converter = {
            "kernel": np.linalg.inv(kernel).astype(np.float32),
            "bias": np.zeros(DIM, np.float32),
        }
        branch = {**given.own(row)["branch"], "converter": converter}
        yield given.with_own(row, {"branch": branch}, network(kernel))


def evaluate(released, folder, how):
    """What a trained row's evaluators find; the one network is worth nothing."""
    settings = {
        "methods": {"fedfr": {}},
        "evaluation": {
            "fars": FARS,
            "fpirs": tuple(released["tpir_fpir"].tolist()),
            "client_thresholds": how,
        },
    }
    images, labels, is_test = images_of(released)
    who = {"public": (60, 61), "unseen": (62, 63)}
    partition = partition_of(labels, is_test, CLIENTS, **who)
    experiment = experiment_of(settings, MODEL, source_of(images, labels), partition)
    trainer = experiment.stages["fedfr"].trainer
    spoilt = {
        "backbone": network(np.zeros((DIM, DIM)))["params"],
        "phi": np.ones((2, DIM), np.float32),
    }
    begun = start_stage(
        experiment, trainer, {"params": spoilt, "batch_stats": {}}, folder
    )
    begun.checkpointer.close()
    rows = rows_of(trainer.algorithm, begun.server)
    rows = jax.tree.map(lambda *x: np.stack(x), *rows)
    begun.store.scatter(np.arange(3), rows, 0)
    networks = trained_models(experiment, trainer, begun.sim, begun.server, begun.store)
    return experiment.task.evaluators["personalized"].evaluate(networks)


@pytest.mark.parametrize("how", ["exact", "binned"])
def test_a_trained_row_has_the_released_numbers(golden, tmp_path, how):
    released = golden("fedfr_personalized_eval")
    found = evaluate(released, tmp_path, how)
    tar = np.stack([found.per_client[f"tar@far={far:.0e}"] for far in FARS], axis=1)
    if how == "exact":
        expected = np.stack([released[f"exact_tar_client{c}"] for c in range(3)])
        # A positive of 15,600 may change sides with float32's last bits.
        tolerance = 1.01 / 15_600
    else:
        expected = released["tpr_percent_far_1e-1_to_1e-6"][:, :4] / 100
        tolerance = 1.01e-4
    np.testing.assert_allclose(tar, expected, atol=tolerance)
    np.testing.assert_allclose(
        [found.metrics[f"tar@far={far:.0e}"] for far in FARS],
        expected.mean(0),
        atol=tolerance,
    )
    fpirs = [f"tpir@fpir={fpir:.0e}" for fpir in released["tpir_fpir"]]
    bare = lambda found: {name.rstrip(UNSUPPORTED): x for name, x in found.items()}
    tpir = np.stack([bare(found.per_client)[name] for name in fpirs], axis=1)
    np.testing.assert_allclose(tpir, released["tpir_clients"], atol=1e-9)
    mean = [bare(found.metrics)[name] for name in fpirs]
    np.testing.assert_allclose(mean, released["tpir_mean"], atol=1e-9)
