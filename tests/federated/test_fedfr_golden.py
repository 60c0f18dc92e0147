"""Three rounds of the official FedFR server, replayed through the real engine."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.algorithms.aggregators import weighted_mean
from fedfr_jax.federated.algorithms.fedfr import Personal, fedfr
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.local import sgd, step_decay
from fedfr_jax.federated.simulation import open_store, play, simulation, start
from fedfr_jax.feed import Feed
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.faces.hard_negatives import hard_negatives, prepare_features
from fedfr_jax.tasks.faces.loss import face_loss
from fedfr_jax.tasks.faces.methods import previous_features
from fedfr_jax.types import Dataset, Local, Model


def apply_backbone(variables, x, train):
    """conv3x3 stride 2, PReLU, linear over C, H, W: the network of the golden file."""
    del train
    p = variables["params"]
    conv = partial(jax.lax.conv_general_dilated, window_strides=(2, 2))
    x = conv(
        x,
        p["conv"],
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
    )
    x = x + p["conv_bias"].reshape(1, 1, 1, -1)
    x = jnp.where(x > 0, x, p["slope"].reshape(1, 1, 1, -1) * x)
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return x @ p["fc"].T + p["fc_bias"][None], variables["batch_stats"]


MODEL = Model(init=None, apply=apply_backbone, image_shape=(8, 8, 3), embedding_dim=16)


def backbone(arrays, prefix, dtype):
    names = {
        "conv": "conv.weight",
        "conv_bias": "conv.bias",
        "slope": "prelu.weight",
        "fc": "fc.weight",
        "fc_bias": "fc.bias",
    }
    params = {k: arrays[f"{prefix}/{v}"].astype(dtype) for k, v in names.items()}
    return {"params": params, "batch_stats": {}}


def local_params(arrays, prefix, dtype, num_classes=4):
    pad = lambda x: np.pad(
        x, [(0, num_classes - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=0.1
    ).astype(dtype)
    kernel = arrays[f"{prefix}/bce/converter.0.weight"].T.astype(dtype)
    bias = arrays[f"{prefix}/bce/converter.0.bias"].astype(dtype)
    return {
        "head": pad(arrays[f"{prefix}/W_l"]),
        "branch": {
            "converter": {"kernel": kernel, "bias": bias},
            "weights": pad(arrays[f"{prefix}/bce/weight"]),
            "bias": pad(arrays[f"{prefix}/bce/bias"]),
        },
    }


def build(arrays, dtype, num_devices, lanes):
    sets = ("client0", "client1", "public")
    images = np.concatenate([arrays[f"{s}/images"] for s in sets])
    labels = np.concatenate([arrays[f"{s}/labels"] for s in sets]).astype(np.int32)
    images = images.transpose(0, 2, 3, 1).astype(dtype)
    population = Population(np.array([0, 21, 45]), np.array([3, 4], np.int32))
    embed = lambda variables, x: apply_backbone(variables, x, False)[0]
    loss = face_loss(MODEL, contrastive_weight=5.0, branch="bce")
    rate = step_decay(float(arrays["lr"]), every=(3, 3, 3))
    algorithm = fedfr(
        Local(loss, sgd(momentum=0.9, weight_decay=5e-4), rate),
        init_local=lambda key: jax.tree.map(
            jnp.asarray, local_params(arrays, "init/client0", dtype)
        ),
        frozen=previous_features(embed),
        prepare=prepare_features(embed, threshold=0.4),
        phi_update="frozen",
    )
    sim = simulation(
        algorithm,
        Feed(batch_size=93),
        Dataset.labelled(images, labels),
        population,
        mesh=make_mesh(num_devices),
        local_epochs=(5, 4, 4),
        lanes=lanes,
    )
    variables = {
        "backbone": backbone(arrays, "init/global_backbone", dtype),
        "phi": arrays["init/phi_g"].astype(dtype),
    }
    server = start(sim, variables)
    store = open_store(sim, server)
    rows = [
        Personal(
            local_params(arrays, f"init/client{c}", dtype),
            backbone(arrays, f"init/client{c}/last_model", dtype),
        )
        for c in range(2)
    ]
    store.scatter(np.arange(2), jax.tree.map(lambda *x: np.stack(x), *rows), 0)
    return sim, server, store


@pytest.mark.parametrize(
    "dtype, tolerance, num_devices, lanes",
    [
        ("float64", 1e-9, 1, 1),
        ("float64", 1e-9, 1, 2),
        ("float64", 1e-9, 2, 1),
        ("float32", 1e-5, 1, 1),
    ],
)
def test_engine_reproduces_the_official_server(
    golden, dtype, tolerance, num_devices, lanes
):
    arrays = golden("fedfr_round")
    with jax.enable_x64(dtype == "float64"):
        sim, server, store = build(arrays, dtype, num_devices, lanes)
        close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
        for r in range(3):
            server, outcome = play(sim, server, store, r)
            prefix = f"round{r}/client"
            chosen = [len(arrays[f"{prefix}{c}/hn_idx"]) for c in range(2)]
            np.testing.assert_array_equal(outcome.num_extra, chosen)
            losses = [arrays[f"{prefix}{c}/mean_total_loss"] for c in range(2)]
            # Their logarithm has 1e-8 inside: 5e-10 per branch loss, weighted by 10.
            np.testing.assert_allclose(
                outcome.metrics["loss"], losses, rtol=tolerance, atol=1e-8
            )
            rows, _ = store.gather(np.arange(2))
            for c, num_classes in enumerate((3, 4)):
                row = jax.tree.map(lambda x, c=c: x[c], rows)
                expected = backbone(arrays, f"{prefix}{c}/backbone", dtype)
                jax.tree.map(close, row.previous, expected)
                head = row.params["head"][:num_classes]
                close(head, arrays[f"{prefix}{c}/W_l"])
                branch = row.params["branch"]
                close(
                    branch["weights"][:num_classes],
                    arrays[f"{prefix}{c}/bce/weight"],
                )
                close(branch["bias"][:num_classes], arrays[f"{prefix}{c}/bce/bias"])
                close(
                    branch["converter"]["kernel"].T,
                    arrays[f"{prefix}{c}/bce/converter.0.weight"],
                )
            expected = backbone(arrays, f"round{r}/global_backbone", dtype)
            jax.tree.map(close, jax.device_get(server.backbone), expected)
            close(server.phi, arrays[f"round{r}/phi_g_sent_next_round"])


@pytest.mark.parametrize("threshold", ["0.20", "0.40", "0.60", "0.99"])
def test_hard_negatives_are_the_official_ones(golden, threshold):
    arrays = golden("fedfr_hard_negative")
    padding = np.ones((7, 32), np.float32)  # another client's rows
    features = np.concatenate([padding, arrays["local_raw"], padding])
    indices, number = hard_negatives(
        jnp.asarray(features),
        jnp.int32(7),
        jnp.int32(40),
        jnp.asarray(arrays["public_feats"]),
        threshold=float(threshold),
    )
    expected = arrays[f"selected_idx_t{threshold}"]
    np.testing.assert_array_equal(np.asarray(indices)[: int(number)], expected)


def test_a_capacity_keeps_the_hardest(golden):
    arrays = golden("fedfr_hard_negative")
    indices, number = hard_negatives(
        jnp.asarray(arrays["local_raw"]),
        jnp.int32(0),
        jnp.int32(40),
        jnp.asarray(arrays["public_feats"]),
        threshold=0.4,
        capacity=10,
    )
    hardest = np.sort(np.argsort(-arrays["max_similarity"])[:10])
    assert int(number) == 10
    np.testing.assert_array_equal(indices, hardest)


def test_the_weighted_mean_is_the_official_average(golden):
    arrays = golden("fedfr_fedavg")
    aggregator = weighted_mean()
    names = [k.removeprefix("avg/") for k in arrays if k.startswith("avg/")]
    names = [k for k in names if not k.endswith("num_batches_tracked")]
    clients = [{n: arrays[f"client{c}/{n}"] for n in names} for c in range(3)]
    for c, client in enumerate(clients):
        client["phi"] = arrays[f"fc{c}"]
    summaries = [
        aggregator.summarize(jax.tree.map(jnp.asarray, client), jnp.float32(w))
        for client, w in zip(clients, arrays["weights"], strict=True)
    ]
    total = jax.tree.map(lambda *x: sum(x), *summaries)
    mean = aggregator.finish(total)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for name in names:
        close(mean[name], arrays[f"avg/{name}"])
    close(mean["phi"], arrays["fc_avg_p1"])
