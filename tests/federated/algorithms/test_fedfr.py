"""Three rounds of the official FedFR server, replayed as a config's rows would be."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment.photometric import certain
from fedfr_jax.data.batching import Batching
from fedfr_jax.runs.stages import start_stage, trained_models
from fedfr_jax.tasks.faces.frozen_features import hard_negatives
from fedfr_jax.types import Model
from tests.federated.toys import simulate_round
from tests.tasks.faces import given
from tests.tasks.faces.given import experiment_of, partition_of, source_of

SETS = ("client0", "client1", "public")
NUM_CLASSES = (3, 4, 6)
NUM_SEEN = 21 + 24 + 48  # images; the clients' come first


def apply_backbone(variables, x, train, key=None):
    """conv3x3 stride 2, PReLU, linear over C, H, W: the network of the golden file."""
    del train, key
    p = variables["params"]
    conv = partial(jax.lax.conv_general_dilated, window_strides=(2, 2))
    x = conv(
        x.astype(p["conv"].dtype),
        p["conv"],
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
    )
    x = x + p["conv_bias"].reshape(1, 1, 1, -1)
    x = jnp.where(x > 0, x, p["slope"].reshape(1, 1, 1, -1) * x)
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return x @ p["fc"].T + p["fc_bias"][None], variables["batch_stats"]


SIZES = {
    "conv": (4, 3, 3, 3),
    "conv_bias": (4,),
    "slope": (4,),
    "fc": (16, 64),
    "fc_bias": (16,),
}


def shapes_of(key):
    """Zeros in the place of the file's weights."""
    del key
    return {"params": {k: jnp.zeros(x) for k, x in SIZES.items()}, "batch_stats": {}}


MODEL = Model(shapes_of, apply_backbone, input_shape=(8, 8, 3), embedding_dim=16)


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


def pictures(arrays):
    """(images [T, H, W, C], people [T], is_test [T]): what is trained on, then judged.

    The file has no test images: its own once more, the public ones as other people.
    """
    images = np.concatenate([arrays[f"{s}/images"] for s in SETS]).transpose(0, 2, 3, 1)
    first = np.cumsum([0, *NUM_CLASSES])
    labels = [arrays[f"{s}/labels"] + n for s, n in zip(SETS, first[:-1], strict=True)]
    labels = np.concatenate(labels).astype(np.int32)
    again = np.where(labels < first[2], labels, labels + NUM_CLASSES[2])
    is_test = np.repeat([False, True], len(labels))
    return np.concatenate([images, images]), np.append(labels, again), is_test


def build(arrays, dtype, phi_update, num_devices, lanes):
    """The experiment of a config with one row, FedFR's defaults but for its rate."""
    row = {"learning_rate": float(arrays["lr"]), "decay_epochs": 3}
    settings = {
        "methods": {
            "fedfr": {
                **row,
                "algorithm": {"name": "fedfr", "public_classes_update": phi_update},
            }
        },
        "federation": {
            "local_epochs": (5, 4, 4),
            "batch_size": NUM_SEEN,
            "flip_probability": 0.0,
            "clients_per_device": lanes,
        },
    }
    images, labels, is_test = pictures(arrays)
    source = source_of((images * 127.5 + 127.5).astype(dtype), labels)
    who = {"public": range(7, 13), "unseen": range(13, 19)}
    partition = partition_of(labels, is_test, (range(3), range(3, 7)), **who)
    experiment = experiment_of(settings, MODEL, source, partition, (num_devices, 1))
    if dtype == "float64":  # a config's images are no more than float32
        exactly = certain(lambda image: image / 127.5 - 1)
        experiment = experiment._replace(batching=Batching(NUM_SEEN, exactly))
    return experiment


def start(experiment, trainer, arrays, dtype, folder):
    """(simulation, server, store) with the file's own random first clients."""
    first = backbone(arrays, "init/global_backbone", dtype)
    phi = arrays["init/phi_g"].astype(dtype)
    params = {"backbone": first["params"], "phi": phi}
    begun = start_stage(
        experiment, trainer, {"params": params, "batch_stats": {}}, folder
    )
    begun.checkpointer.close()
    drawn = begun.sim.algorithm.init_personal(jax.random.key(0), begun.server)
    rows = [
        given.with_own(
            drawn,
            local_params(arrays, f"init/client{c}", dtype),
            backbone(arrays, f"init/client{c}/last_model", dtype),
        )
        for c in range(2)
    ]
    begun.store.scatter(np.arange(2), jax.tree.map(lambda *x: np.stack(x), *rows), 0)
    return begun.sim, begun.server, begun.store


def recording(sim, kept):
    """`sim`, whose every preparation is appended to `kept` too."""

    def prepare(server, context):
        kept.append(sim.algorithm.prepare(server, context))
        return kept[-1]

    return sim._replace(algorithm=sim.algorithm._replace(prepare=prepare))


def check_negatives(extra, arrays, prefix):
    """The very images: the public ones follow the clients' 45 in the table."""
    for c in range(2):
        chosen = np.asarray(extra.added_rows[c])[: extra.num_added[c]] - 45
        np.testing.assert_array_equal(chosen, arrays[f"{prefix}/client{c}/hn_idx"])


def check_clients(outcome, store, arrays, prefix, close):
    prefixes = [f"{prefix}/client{c}" for c in range(2)]
    losses = [arrays[f"{name}/mean_total_loss"] for name in prefixes]
    # Their logarithm has 1e-8 inside: 5e-10 per branch loss, weighted by 10.
    close(outcome.metrics["loss"], losses, atol=1e-8)
    for c, name in enumerate(prefixes):
        rows, _ = store.gather(np.array([c]))
        row = jax.tree.map(lambda x: x[0], rows)
        jax.tree.map(
            close, given.previous(row), backbone(arrays, f"{name}/backbone", float)
        )
        expected = local_params(arrays, name, float, NUM_CLASSES[c])
        jax.tree.map(lambda x, y: close(x[: len(y)], y), given.own(row), expected)


def check_deployed(networks, arrays, dtype, close):
    """What is judged: the one network, and the clients' own behind their converters."""
    images = pictures(arrays)[0][:8].astype(dtype)
    features = lambda name: apply_backbone(
        backbone(arrays, f"round2/{name}", dtype), images, False
    )[0]
    embedded = networks.apply(networks.variables, images)
    close(embedded, features("global_backbone"))
    for c in range(2):
        own = local_params(arrays, f"round2/client{c}", dtype)["branch"]["converter"]
        expected = features(f"client{c}/backbone") @ own["kernel"] + own["bias"][None]
        close(networks.client_apply(networks.client_variables(c), images), expected)


@pytest.mark.parametrize(
    "dtype, tolerance, phi_update, num_devices, lanes",
    [
        pytest.param("float32", 1e-5, "average", 1, 1, marks=pytest.mark.ci),
        pytest.param("float64", 1e-9, "average", 1, 1, marks=pytest.mark.slow),
        pytest.param("float64", 1e-9, "frozen", 1, 2, marks=pytest.mark.ci),
        ("float64", 1e-9, "average", 2, 1),
    ],
)
def test_a_row_of_a_config_reproduces_the_official_server(
    golden, tmp_path, dtype, tolerance, phi_update, num_devices, lanes
):
    arrays, prepared = golden("fedfr_round"), []
    close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    with jax.enable_x64(dtype == "float64"):
        experiment = build(arrays, dtype, phi_update, num_devices, lanes)
        trainer = experiment.stages["fedfr"].trainer
        sim, server, store = start(experiment, trainer, arrays, dtype, tmp_path)
        sim = recording(sim, prepared)
        for r in range(3):
            sent = given.phi(server)
            server, outcome = simulate_round(sim, server, store, r)
            check_negatives(prepared[-1], arrays, f"round{r}")
            check_clients(outcome, store, arrays, f"round{r}", close)
            expected = backbone(arrays, f"round{r}/global_backbone", dtype)
            jax.tree.map(close, jax.device_get(given.backbone(server)), expected)
            if phi_update == "frozen":
                close(given.phi(server), arrays[f"round{r}/phi_g_sent_next_round"])
            else:  # which the official code computes, and sends the first again
                close(given.phi(server), arrays[f"round{r}/phi_g_averaged_but_unused"])
                params = {**given.variables(server)["params"], "phi": sent}
                variables = {**given.variables(server), "params": params}
                inner = server.inner._replace(variables=variables)
                server = server._replace(inner=inner)
        networks = trained_models(experiment, trainer, sim, server, store)
        check_deployed(networks, arrays, dtype, close)


@pytest.mark.parametrize("threshold", ["0.20", "0.40", "0.60", "0.99"])
def test_hard_negatives_are_the_official_ones(golden, threshold):
    arrays = golden("fedfr_hard_negative")
    padding = np.ones((7, 32), np.float32)  # another client's rows
    features = np.concatenate([padding, arrays["local_raw"], padding])
    run = jax.jit(partial(hard_negatives, threshold=float(threshold)))
    indices, number = run(features, np.int32(7), np.int32(40), arrays["public_feats"])
    expected = arrays[f"selected_idx_t{threshold}"]
    np.testing.assert_array_equal(np.asarray(indices)[: int(number)], expected)
