"""Weights go in and out, and nothing that a file holds is run."""

import functools
import json
import pathlib
import pickle
import sys
import types
import zipfile

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import (
    convert_variables,
    detect_model,
    to_torch,
)
from fedfr_jax.models.weights import Weights, read_weights, write_weights
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.trees import by_name

SHAPE = (32, 32, 3)
NETWORKS = {
    "iresnet": {"blocks": [1, 2], "widths": [4, 6], "embedding_dim": 5},
    "sphereface": {"blocks": [1, 0, 2], "widths": [4, 6, 8], "embedding_dim": 5},
    "resnet": {
        "num_classes": 5,
        "depth": 50,
        "blocks": [1, 2],
        "widths": [4, 6],
        "stem": "cifar",
    },
}
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
SUFFIXES = [".safetensors", ".npz"]


@functools.cache
def shapes_of(name, **more):
    model = MODELS[name](SHAPE, **NETWORKS[name], **more)
    return jax.eval_shape(model.init, jax.random.key(0))


def drawn(name, **more):
    """Variables of a network, every entry another value, variances above 0."""
    leaves, structure = jax.tree.flatten(shapes_of(name, **more))
    rng = np.random.default_rng(0)
    values = [rng.uniform(0.5, 1.5, x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(structure, values)


def test_equal_weights_are_equal_bytes_in_whatever_order_they_come(tmp_path):
    arrays = {name: np.full(3, ord(name), np.float32) for name in "cab"}
    about = {f"key {i}é": str(i) for i in range(20)}
    reverse = lambda mapping: dict(reversed(mapping.items()))
    write_weights(tmp_path / "a.safetensors", arrays, about)
    write_weights(tmp_path / "b.safetensors", reverse(arrays), reverse(about))
    data = (tmp_path / "a.safetensors").read_bytes()
    assert data == (tmp_path / "b.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 8 == 0  # numbers are aligned
    assert list(json.loads(data[8:end])["__metadata__"]) == sorted(about)
    found = read_weights(tmp_path / "a.safetensors")
    assert found.about == about and found.arrays["a"].tolist() == [97.0] * 3


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_arrays_come_back_bit_by_bit(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    rng = np.random.default_rng(0)
    arrays = {
        "a.weight": rng.standard_normal((2, 3, 1, 5)).astype(np.float32),
        "b": np.array(3, np.int64),
        "c": np.zeros((0, 4), np.float16),
        "d": rng.standard_normal((4, 6)).T,  # not contiguous
    }
    write_weights(path, arrays, {"made": "here"})
    found = read_weights(path)
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert found.about == ({"made": "here"} if suffix == ".safetensors" else {})


def test_a_file_of_pytorchs_own_is_read():
    """Made by torch.save of PyTorch 2.13: a parameter, views of it, other kinds."""
    pytest.importorskip("torch")
    found = read_weights(GOLDEN / "torch_save_2_13.pt").arrays
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "layer.weight": whole,
        "layer.turned": whole.T,
        "layer.part": whole[1:3, 2:5],
        "half": np.arange(3, dtype=np.float16),
        "bn.num_batches_tracked": np.array(7),
    }
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert np.shares_memory(found["layer.weight"], found["layer.turned"])


class Tensor:
    """What stands for PyTorch's."""

    def __init__(self, array):
        self.array, self.dtype = array, str(array.dtype)

    def detach(self):
        return self

    def numpy(self):
        return self.array


@pytest.fixture
def torch_load(monkeypatch):
    """Sets what torch.load returns, or raises, for any file."""
    given = []

    def load(path, *, map_location, weights_only):
        assert weights_only and map_location == "cpu"
        if isinstance(given[-1], Exception):
            raise given[-1]
        return given[-1]

    fake = types.SimpleNamespace(load=load, Tensor=Tensor, bfloat16="bfloat16")
    monkeypatch.setitem(sys.modules, "torch", fake)
    return given.append


ONE, TWO = np.ones(2, np.float32), np.full(2, 2, np.float32)


@pytest.mark.parametrize("suffix", ["pt", "pth", "pth.tar", "ckpt", "bin"])
def test_a_state_dict_is_found_by_key_and_without_wrappers(
    suffix, tmp_path, torch_load
):
    path = tmp_path / f"w.{suffix}"
    path.write_bytes(bytes(99))
    found = lambda *key: {k: x[0] for k, x in read_weights(path, *key).arrays.items()}
    wrapped = {
        "module._orig_mod.a": Tensor(ONE),
        "_orig_mod.module.b": Tensor(TWO),
        "c": Tensor(ONE),
    }
    torch_load(wrapped)
    assert found() == {"a": 1, "b": 2, "c": 1}
    torch_load({"a": Tensor(ONE), "module.a": Tensor(TWO)})
    with pytest.raises(ValueError, match="must have a once, got a and module.a"):
        found()
    torch_load({"epoch": 3, "state_dict": wrapped})
    assert found() == found("state_dict") == {"a": 1, "b": 2, "c": 1}
    torch_load({"net": {"a": Tensor(ONE)}, "ema": {"a": Tensor(TWO)}})
    assert found("net") == {"a": 1} and found("ema") == {"a": 2}
    with pytest.raises(
        ValueError, match=r"got the keys \['ema', 'net'\]. Choose .* --key=NAME"
    ):
        found()
    with pytest.raises(ValueError, match=r"--key must be one of .*'net'\], got 'best'"):
        found("best")
    torch_load({"state_dict": {"model.a": Tensor(ONE), "head.a": Tensor(TWO)}})
    assert found("state_dict/model") == {"a": 1}
    assert found("state_dict/head") == {"a": 2}


def test_what_torch_refuses_and_what_grows_is_refused_by_name(tmp_path, torch_load):
    path = tmp_path / "w.pt"
    path.write_bytes(bytes(99))
    for given, message in [
        (
            pickle.UnpicklingError("Weights only\nload failed"),
            "got objects that torch.load",
        ),
        ([Tensor(ONE)], "must hold a state dict, got a list"),
        ({"a": Tensor(np.float32([1, np.nan]))}, "a must hold finite numbers, got 1 "),
        (
            RuntimeError("invalid\nheader"),
            "must be usable, got RuntimeError: invalid h",
        ),
    ]:
        torch_load(given)
        with pytest.raises(ValueError, match=f"w.pt.*{message}") as error:
            read_weights(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "about, message",
    [
        ({"model": "{", "image_shape": "[32, 32, 3]"}, "model must be readable JSON"),
        ({"model": "[]", "image_shape": "[32, 32, 3]"}, "model must be a JSON object"),
        ({"model": "{}", "image_shape": "[1e9, 2]"}, "image_shape must be a list of"),
        (
            {"model": "{}", "image_shape": "[32, 99999, 3]"},
            r"image_shape must be in \[",
        ),
        ({"model": '{"blocks": [1000000]}'}, "at most 1, .* got 1000000"),
        (
            {"model": '{"blocks": [9, 9]}'},
            "must be at most 1, .* file's arrays, got 18",
        ),
        ({"model": '{"name": "vit", "depth": 4000}'}, "got 4000 blocks"),
    ],
)
def test_what_a_file_says_of_its_network_is_bounded_by_the_file(about, message):
    weights = Weights({"params/a": ONE}, {"image_shape": "[32, 32, 3]", **about})
    with pytest.raises(ValueError, match=message):
        detect_model(weights)


def test_damaged_and_unknown_files_are_refused_by_name(tmp_path):
    path = tmp_path / "weights.safetensors"
    write_weights(path, {"a": np.ones(9, np.float32)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="must be usable, got .*not fully"):
        read_weights(path)
    with zipfile.ZipFile(tmp_path / "bytes.npz", "w") as file:
        file.writestr("a.npy", b"no array")
    with pytest.raises(ValueError, match=r"bytes.npz must hold only arrays, got .*'a'"):
        read_weights(tmp_path / "bytes.npz")
    with pytest.raises(ValueError, match="weights must .*suffix"):
        read_weights(tmp_path / "weights.onnx")
    for wrong in (1, "", ["w.npz"]):
        with pytest.raises(ValueError, match="weights must .*suffix") as error:
            read_weights(wrong)
        assert str(error.value).endswith(f"got {wrong!r}.")


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_of_a_state_dict_is_found_from_names_and_shapes(name):
    variables, settings = drawn(name), NETWORKS[name]
    weights = Weights(to_torch(name, variables, SHAPE, **settings), {})
    model, shape = detect_model(weights)
    assert model == {"name": name, **settings}
    if name != "resnet":
        assert shape == SHAPE
    back = convert_variables(weights, model, shape)
    jax.tree.map(np.testing.assert_array_equal, back, variables)


def as_ir(arrays, has_middle):
    """InsightFace's names as TreB1eN's, blocks numbered through."""
    layers = ["bn1", "conv1", *["bn2"] * has_middle, "prelu", "conv2", "bn3"]
    tops = {"conv1": "input_layer.0", "bn1": "input_layer.1", "prelu": "input_layer.2"}
    tops |= {"bn2": "output_layer.0", "fc": "output_layer.3"}
    tops["features"] = "output_layer.4"
    places, renamed = {}, {}
    for name, array in arrays.items():
        parts = name.split(".")
        if not parts[0].startswith("layer"):
            renamed[f"{tops[parts[0]]}.{parts[1]}"] = array
            continue
        number = places.setdefault((parts[0], parts[1]), len(places))
        inner = ".".join(parts[2:-1])
        if inner == "bn2" and not has_middle:
            continue
        place = inner.replace("downsample", "shortcut_layer")
        if inner in layers:
            place = f"res_layer.{layers.index(inner)}"
        renamed[f"body.{number}.{place}.{parts[-1]}"] = array
    return renamed


@pytest.mark.parametrize("has_middle", [True, False])
def test_an_ir_network_computes_what_its_scale_and_missing_norm_say(has_middle):
    pooled = {"shortcut": "pool"}
    variables = drawn("iresnet", **pooled)
    settings = NETWORKS["iresnet"] | pooled
    arrays = to_torch("iresnet", variables, SHAPE, **settings)
    scale = np.linspace(0.5, 2, 5, dtype=np.float32)
    renamed = as_ir(arrays | {"features.weight": scale}, has_middle)
    weights = Weights(renamed, {})
    model, shape = detect_model(weights)
    assert (model, shape) == ({"name": "iresnet", **settings}, SHAPE)
    net = MODELS["iresnet"](SHAPE, **settings)
    x = np.random.default_rng(1).uniform(-1, 1, (2, *SHAPE)).astype(np.float32)
    if not has_middle:
        for stage in [v for k, v in variables["params"].items() if "stage" in k]:
            for block in stage.values():
                block["bn2"] = jax.tree.map(np.zeros_like, block["bn2"])
                block["bn2"]["scale"] += 1
        for stage in [v for k, v in variables["batch_stats"].items() if "stage" in k]:
            for block in stage.values():
                block["bn2"]["mean"] *= 0
                block["bn2"]["var"] = np.full_like(block["bn2"]["var"], 1 - 1e-5)
    bias = variables["params"]["bn_out"]["bias"]
    wanted = scale * (np.asarray(jax.jit(net.apply)(variables, x)[0]) - bias) + bias
    found = jax.jit(net.apply)(convert_variables(weights, model, shape), x)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_name_the_leaf():
    settings = NETWORKS["iresnet"]
    arrays = by_name(by_block_name(drawn("iresnet")))
    model = {"name": "iresnet", **settings}
    fitted = convert_variables(Weights(arrays, {}), model, SHAPE)
    jax.tree.map(np.testing.assert_array_equal, fitted, drawn("iresnet"))
    wide = model | {"embedding_dim": 6}
    with pytest.raises(ValueError, match=r"bn_out/mean must be \(6,\), got \(5,\)"):
        convert_variables(Weights(arrays, {}), wide, SHAPE)
    del arrays["params/stage2/block2/conv1/kernel"]
    with pytest.raises(ValueError, match=r"block2/conv1/kernel must be .* got none"):
        convert_variables(Weights(arrays, {}), model, SHAPE)
    with pytest.raises(ValueError, match="name the network"):
        detect_model(Weights({"a": np.ones(1)}, {}))
