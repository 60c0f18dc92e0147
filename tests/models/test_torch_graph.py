"""The graph of a PyTorch module without PyTorch: golden numbers, strange graphs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from fedfr_jax.config.files import restore
from fedfr_jax.deploy.export import convert
from fedfr_jax.loading import load_model
from fedfr_jax.models import MODELS, build_model
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.saved_model import named_arrays
from fedfr_jax.models.torch_graph import (
    find_operator,
    from_json,
    state_arrays,
    stored,
    to_json,
    tree_of,
)
from fedfr_jax.models.weights import Weights
from fedfr_jax.schema import check_without_code
from fedfr_jax.tasks.classification import class_pull

SHAPE = (12, 12, 3)


@pytest.fixture
def net(golden):
    """(arrays of the golden file, the graph as JSON, model, variables)."""
    arrays = golden("torch_module")
    graph = json.loads(arrays["graph"].tobytes())
    network = from_json(graph)
    state = {
        network.state_dict[k[6:]]: x for k, x in arrays.items() if k[:6] == "state/"
    }
    leaves = {path: jnp.asarray(stored(state[path])) for path in network.shapes}
    return arrays, graph, MODELS["torch"](SHAPE, graph=graph), tree_of(leaves)


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_a_graph_alone_has_pytorchs_outputs_gradients_and_statistics(net, mode):
    arrays, _, model, variables = net

    def loss(params):
        given = {**variables, "params": params}
        output, stats = model.apply(given, arrays["x"], mode == "train")
        return (output * arrays["cotangent"]).sum(), (output, stats)

    grads, (output, stats) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    np.testing.assert_allclose(output, arrays[f"{mode}/output"], rtol=1e-5, atol=1e-5)
    network = from_json(model.config["graph"])
    found = state_arrays(network, {"params": grads, "batch_stats": stats})
    wanted = {k[len(mode) + 4 :]: x for k, x in arrays.items() if f"{mode}/of/" in k}
    assert len(wanted) == len(jax.tree.leaves(variables))
    largest = max(np.abs(x).max() for x in wanted.values())
    for name, array in wanted.items():
        scale = max(np.abs(array).max(), 1e-2 * largest)
        assert np.abs(found[name] - array).max() <= 1e-5 * scale, name


def test_a_file_of_weights_has_its_network(net):
    arrays, graph, model, variables = net
    assert to_json(from_json(graph)) == graph
    about = {"model": json.dumps(model.config), "image_shape": json.dumps(SHAPE)}
    weights = Weights(named_arrays(variables), about)
    section, shape = detect_model(weights)
    again = build_model(section, shape)
    outputs = [
        jax.jit(one.output)(convert_variables(weights, section, shape), arrays["x"])
        for one in (model, again)
    ]
    assert (outputs[0] == outputs[1]).all() and again.embedding_dim == 10
    one, other = (model.init(jax.random.key(seed)) for seed in (0, 1))
    assert jax.tree.structure(one) == jax.tree.structure(variables)
    assert (one["params"]["fc"]["weight"] != other["params"]["fc"]["weight"]).all()
    assert (one["batch_stats"]["bn1"]["running_var"] == 1).all()


def test_a_loss_of_class_vectors_wants_a_network_of_ours(net):
    with pytest.raises(ValueError, match=r"kernel \[D, M\] .*, got torch. Choose"):
        class_pull(net[2])
    class_pull(MODELS["cnn"](SHAPE, num_classes=3))


def test_a_strange_graph_is_refused(net):
    _, graph, _, _ = net
    nodes = [[*graph["train"]["nodes"][0]]]
    nodes[0][1] = "system.default"
    with pytest.raises(ValueError, match="known operators, got system.default"):
        from_json({**graph, "train": {**graph["train"], "nodes": nodes}})
    for numbers in ([7, 300_000_000], [[0], 10**10]):
        with pytest.raises(TypeError, match="are known here"):
            find_operator("number.mul" if numbers[0] == [0] else "number.pow")(*numbers)
    with pytest.raises(ValueError, match="graph must be that of a PyTorch module"):
        from_json({"train": graph["train"]})


def changed(graph, *path, to):
    """A copy of JSON with another value at a place."""
    copy = json.loads(json.dumps(graph))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return copy


def test_a_strange_graph_is_one_line(net):
    _, graph, _, _ = net
    leaf = next(iter(graph["train"]["leaves"]))
    path = next(iter(graph["shapes"]))
    fewer = {k: x for k, x in graph["shapes"].items() if k != path}
    last = graph["evaluate"]["nodes"][-1][0]
    swapped = graph["train"]["nodes"][::-1]
    cases = [
        (("train", "output"), "no" * 2000, "none for 'nono"),
        (("evaluate", "output"), ["a"], "none for"),
        (("train", "leaves", leaf), "params/no", "none for 'params/no'"),
        (("shapes",), fewer, f"none for '{path}'"),
        (("train", "nodes"), swapped, "none for"),
        (("evaluate", "nodes", 0, 2, 0), {"ref": last}, f"none for '{last}'"),
        (("train", "nodes", 0, 2, 0), {"ref": ["a"]}, "none for"),
        (("train", "updates"), {"batch_stats/no": last}, "none for"),
        (("state_dict",), {"a": "params/no"}, "none for 'params/no'"),
        (("train", "nodes", 0), ["no" * 2000] * 3, "of a PyTorch module"),
        (("shapes", path), ["no" * 2000], "of a PyTorch module"),
        (("train", "nodes", 0, 1), "no" * 2000, "known operators"),
        (("train", "inputs"), [], "none for"),
    ]
    for place, value, rule in cases:
        with pytest.raises(ValueError, match=rule) as info:
            from_json(changed(graph, *place, to=value))
        assert len(str(info.value)) < 300 and "\n" not in str(info.value), place
    with pytest.raises(ValueError, match="input_shape must have 1 inputs"):
        MODELS["torch"]({"a": (4,), "b": (4,)}, graph=graph)


def test_the_stored_config_of_a_run_names_no_code(tmp_path):
    model = {"name": "torch", "file": "evil.py:Net"}
    for config in ({"model": model}, {"methods": {"a": {"teachers": [model]}}}):
        with pytest.raises(ValueError, match="name no code, got .*evil.py:Net"):
            check_without_code(config, "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model": model}))
    with pytest.raises(ValueError, match="config.json must name no code"):
        restore(tmp_path / "config.json")
    check_without_code({"model": {"name": "torch", "graph": {}}}, "config.json")


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_of_weights_runs_no_code(nested, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = {"name": "torch", "file": f"{tmp_path}/evil.py:Net"}
    model = {"name": "segmenter", "encoder": model} if nested else model
    about = {"model": json.dumps(model), "image_shape": json.dumps(SHAPE)}
    path = tmp_path / "net.safetensors"
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, path, about)
    for load in (load_model, lambda path: convert(path, tmp_path / "net.npz")):
        with pytest.raises(ValueError, match="must name no code, got .*evil.py:Net"):
            load(path)
    assert not (tmp_path / "ran").exists()
