"""A traced network is the same network in ONNX, and what is none is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.preprocessing import VECTORS
from fedfr_jax.deploy.export import export
from fedfr_jax.deploy.onnx_graph import trace_graph, write_onnx
from fedfr_jax.deploy.trained_model import TrainedModel
from fedfr_jax.models import MODELS
from fedfr_jax.types import Preprocessing

pytestmark = pytest.mark.ci

SHAPE = (12, 18, 3)
SMALL = {"widths": (4, 6), "embedding_dim": 5}
NETWORKS = {
    "sphereface": {"blocks": (1, 3), **SMALL},
    "iresnet": {"blocks": (1, 4), **SMALL},
    "resnet": {"num_classes": 5, "depth": 50, "blocks": (1, 1), "widths": (4, 6)},
    "mobilenet": {"num_classes": 5, "num_blocks": 8, "width": 0.125},
    "mobilefacenet": {"blocks": (1, 2, 1), "embedding_dim": 5},
    "vit": {
        "width": 16,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 6,
        "embedding_dim": 5,
    },
    "vision_transformer": {
        **{"width": 16, "depth": 2, "num_heads": 2, "patch_size": 6},
        **{"registers": 2, "layer_scale": 0.5},
    },
    "convnext": {"blocks": (1, 4), "widths": (4, 6)},
    "reid": {"num_classes": 5, "blocks": (1,), "widths": (4,), "neck_dim": 8},
    "leaf_celeba": {"num_classes": 5, "widths": (4, 4)},
}
HEADS = ("E", "F", "GAP", "GDC", "moe")
ONE = {"blocks": (1,), "widths": (4,)}  # block


def network(name, **more):
    """A small network, with statistics that are no start."""
    settings = {**NETWORKS[name], **more}
    model = MODELS[name](SHAPE, **settings)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    normal = lambda x: rng.normal(0.1, 0.3, x.shape).astype(np.float32)
    spread = lambda x: rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
    statistics = jax.tree.map(spread, shapes["batch_stats"])
    return model, {
        "params": jax.tree.map(normal, shapes["params"]),
        "batch_stats": statistics,
    }


def run(tmp_path, function, shape=SHAPE):
    """(what onnxruntime makes of 3 images, what JAX does, kinds of nodes)."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    graph, output = trace_graph(function, shape)
    path = tmp_path / "network.onnx"
    write_onnx(graph, output, shape, {}, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).uniform(-1, 1, (3, *shape)).astype(np.float32)
    parts = [x[:1], x[1:]]  # of one and of two
    given = [{"images": part.transpose(0, 3, 1, 2)} for part in parts]
    found = np.concatenate([session.run(None, part)[0] for part in given])
    return found, jax.jit(function)(x), [node.kind for node in graph.nodes]


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


# Its layers are MobileNet's and SphereFace's, in more blocks.
LONG = pytest.param("mobilefacenet", marks=pytest.mark.slow)
OTHERS = NETWORKS.keys() - {"mobilefacenet", "iresnet"}  # of which the next test is


@pytest.mark.parametrize("name", [*sorted(OTHERS), LONG])
def test_every_kind_of_network_computes_the_same(tmp_path, name):
    model, variables = network(name)
    evaluate = lambda x: model.apply(variables, x)[0]
    found, wanted, kinds = run(tmp_path, evaluate)
    assert_close(found, wanted)
    if name == "resnet":  # a batch normalization is a factor and a summand
        assert kinds.count("Conv") > 4 and not {"Sub", "Sqrt"} & {*kinds}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_of_an_iresnet_computes_the_same(tmp_path, head):
    model, variables = network("iresnet", head=head, **({} if head == "E" else ONE))
    found, wanted, _ = run(tmp_path, lambda x: model.apply(variables, x)[0])
    assert_close(found, wanted)


def test_operations_of_other_networks(tmp_path):
    kernel = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)

    def other(x):
        x = jnp.concatenate([x[:, ::2], 2 - x[:, 1::2]], axis=3)  # [B, 6, 18, 6]
        x = jnp.pad(x, ((0, 0), (1, 2), (0, 0), (0, 0)), constant_values=0.5)
        y = jnp.einsum("bhwc,cd->bhd", jnp.square(x[..., :3]), kernel)
        y = jax.nn.softmax(y.max(1)) * jax.nn.sigmoid(y.sum(1)) ** 3
        y = jnp.clip(y, 0.01, 0.9) / jnp.sqrt(1 + jnp.sum(y**2, 1, keepdims=True))
        return jnp.where(y > 0.1, jnp.tanh(y), jnp.abs(y))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, wanted, _ = run(tmp_path, other)
    assert_close(found, wanted)


def test_statistics_and_mirror_images_are_part_of_the_exported_graph(tmp_path):
    """Whoever runs the file gives pixel / 127.5 - 1 and gets what evaluation has."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("flatbuffers")
    model, variables = network("sphereface")
    apply = jax.jit(lambda variables, x: model.apply(variables, x)[0])
    statistics = {"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}
    how = Preprocessing("stretch", kernel="bicubic", mirrored=True, **statistics)
    opened = TrainedModel(apply, variables, SHAPE, recorded=how)
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(3, *SHAPE), dtype=np.uint8)
    mean, std = (np.float32(x) for x in statistics.values())
    plain = np.float32((images - mean) / std)
    wanted = apply(variables, plain) + apply(variables, plain[:, :, ::-1])
    assert_close(opened.embed(images), wanted)
    given = np.float32(images / 127.5 - 1)
    export(opened, path := tmp_path / "network.stablehlo")
    assert_close(jax.export.deserialize(path.read_bytes()).call(given), wanted)
    export(opened, path := tmp_path / "network.onnx")
    session = onnxruntime.InferenceSession(path)
    (found,) = session.run(None, {"images": given.transpose(0, 3, 1, 2)})
    assert_close(found, wanted)
    about = session.get_modelmeta().custom_metadata_map["preprocessing"]
    left = how._replace(mean=127.5, std=127.5, mirrored=False)
    assert json.loads(about) == left._asdict()
    kernels = sum(x.size for x in jax.tree.leaves(variables["params"]))
    assert path.stat().st_size < 1.5 * 4 * kernels + 2**14


def test_vectors_are_embedded_as_they_are():
    apply = jax.jit(lambda variables, x: x @ variables)
    opened = TrainedModel(apply, np.eye(5, 2, dtype="f"), (5,), recorded=VECTORS)
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    np.testing.assert_array_equal(opened.embed(x), x[:, :2])


def test_a_network_in_training_is_refused():
    model, variables = network("iresnet", **ONE)
    with pytest.raises(
        ValueError, match="treat every image separately.* over the batch"
    ):
        trace_graph(lambda x: model.apply(variables, x, True)[0], SHAPE)


def test_an_unknown_operation_is_named():
    with pytest.raises(ValueError, match="can be exported, got sort"):
        trace_graph(lambda x: jnp.sort(x.reshape(len(x), -1), axis=1), SHAPE)
