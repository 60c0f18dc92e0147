"""Opened networks are those that were judged; what does not exist is refused."""

import json
import shutil

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import loading, manifest
from fedfr_jax.cli.main import main
from fedfr_jax.config.build import build
from fedfr_jax.deploy.export import export, torch_arrays
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.loading import read_only
from fedfr_jax.models import MODELS
from fedfr_jax.models.saved_model import named_arrays
from fedfr_jax.models.weights import read_weights, write_weights
from fedfr_jax.parts import choose, parse
from fedfr_jax.runs import loop, stages
from fedfr_jax.runs.stages import load_models
from fedfr_jax.runs.workdir import stored_config
from fedfr_jax.schema import with_tuples
from fedfr_jax.tasks.faces.distillation import Distill, DummyTeacher
from fedfr_jax.types import Evaluation
from tests.deploy.conftest import MODEL, play, settings

pytestmark = pytest.mark.ci


def images(number=5):
    rng = np.random.default_rng(1)
    return rng.integers(256, size=(number, 12, 12, 3), dtype=np.uint8)


@pytest.mark.parametrize("stage", ["pretrained", "own"])
def test_an_opened_network_is_the_one_that_is_judged(run, experiment, stage, request):
    found = load_models(experiment, "fedfr" if stage == "own" else stage, run)
    x = (images() / 127.5 - 1).astype(np.float32)
    variables, apply = found.variables, found.apply
    if stage == "own":
        variables, apply = found.client_variables(1), found.client_apply
    wanted = np.asarray(apply(variables, x))
    got = request.getfixturevalue(stage).embed(images(), batch_size=3)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())


def test_a_loaded_model_is_the_runs_own(run, server):
    """Weights to the bit, embeddings but for how convolutions are computed."""
    config = with_tuples(stored_config(run))
    found = load_models(build(config), "fedfr", run)
    variables = jax.device_get(unpack(found.variables))
    wanted = named_arrays(variables)
    jax.tree.map(np.testing.assert_array_equal, server.weights.arrays, wanted)
    x = (images() / 127.5 - 1).astype(np.float32)
    wanted = jax.jit(found.apply)(variables, x)
    found = server.apply(server.variables, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_two_files_in_an_empty_folder_are_the_model(run, server, tmp_path):
    for name in ("weights.safetensors", "model.json"):
        shutil.copy(run / "fedfr" / name, tmp_path)
    moved, network = ff.load_model(tmp_path), server
    assert moved.fingerprint == network.fingerprint
    assert moved.roc().thresholds.tolist() == network.roc().thresholds.tolist()
    words = ["export", f"--weights={tmp_path}", f"--output={tmp_path}/a.safetensors"]
    assert main(words) == 0
    again = ff.load_model(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(again.embed(images()), network.embed(images()))
    record = manifest.read_object(tmp_path / "model.json")
    assert (record["task"], record["method"]) == ("faces", "fedfr")


def start_from(folder, faces):
    config = settings(faces, methods={})
    config["pretrain"] = {**config["pretrain"], "init": str(folder)}
    return build(with_tuples(config))


@pytest.mark.parametrize("name", ["weights.safetensors", "model.json"])
def test_a_flipped_byte_in_a_models_files_ends_in_one_line(run, faces, tmp_path, name):
    folder = shutil.copytree(run / "fedfr", tmp_path / "fedfr")
    damaged = bytearray((folder / name).read_bytes())
    damaged[-9] ^= 1
    (folder / name).write_bytes(damaged)
    for of in (lambda: ff.load_model(folder), lambda: start_from(folder, faces)):
        with pytest.raises(ValueError, match=f"{name} must be as it was written") as e:
            of()
        assert "\n" not in str(e.value)
    for other in ("weights.safetensors", "model.json"):  # both of another stage
        shutil.copy(run / "pretrained" / other, folder)
    with pytest.raises(ValueError, match=r"model\.json must be as it was written"):
        ff.load_model(folder)


def test_a_stage_that_trains_on_takes_its_model_away(
    run, server, faces, tmp_path, monkeypatch
):
    """And an evaluation that fails afterwards costs no model."""
    folder = shutil.copytree(run, tmp_path / "run")
    config = settings(faces)
    config["federation"] = {**config["federation"], "rounds": 2}
    seen, ended = [], []
    train = loop.train

    def watched(*args):
        seen.append((folder / "fedfr" / "model.json").exists())
        ended.append(train(*args))
        return ended[-1]

    def fail(evaluators, networks):
        if ended:
            raise RuntimeError("no evaluation")
        return dict.fromkeys(evaluators, Evaluation())

    monkeypatch.setattr(loop, "train", watched)
    monkeypatch.setattr(stages, "evaluate", fail)
    with pytest.raises(RuntimeError, match="no evaluation"):
        play(config, folder)
    network = ff.load_model(folder)
    assert seen == [False] and network.fingerprint != server.fingerprint
    assert network.roc() is None


@pytest.fixture
def unjudged(monkeypatch):
    """Networks are trained and not judged."""
    nothing = lambda evaluators, models: dict.fromkeys(evaluators, Evaluation())
    monkeypatch.setattr(stages, "evaluate", nothing)


def test_what_does_not_exist_is_refused(run, pretrained, own, tmp_path):
    for options, says in [
        ({"method": "moon"}, "method must be one of .*pretrained.*, got 'moon'"),
        ({"client": 2}, r"client must be in \[0, 2\), got 2"),
    ]:
        with pytest.raises(ValueError, match=says):
            ff.load_model(run, **options)
    with pytest.raises(
        ValueError, match="must be the folder of a run, got no config.json"
    ):
        ff.load_model(tmp_path)
    with pytest.raises(ValueError, match=r"images must be uint8 \[n, 12, 12, 3\]"):
        pretrained.embed(np.zeros((1, 12, 12), np.uint8))
    with pytest.raises(ValueError, match="branch|personal layers"):
        export(own, tmp_path / "own.pt")


def test_an_opened_run_writes_nothing_that_its_config_names(run, tmp_path, monkeypatch):
    """Not its caches, and not its teacher's run, which need not be there."""
    config = stored_config(run)
    other = str(tmp_path / "other")
    config["pretrain"]["distill"] = {"teacher": {"weights": other}}
    config["partition"]["cache"] = str(tmp_path / "index")
    config["methods"]["kept"] = {"distill": {"cache": str(tmp_path / "teacher.npy")}}
    found = read_only(config)
    assert "cache" not in found["partition"]
    assert isinstance(found["methods"].pop("kept")["distill"]["cache"], DummyTeacher)
    build(with_tuples(found))
    assert not [*tmp_path.iterdir()]
    absent = {"name": "tfds", "dataset": "mnist", "data_dir": other}
    for data in (absent, {"name": "concat", "sources": {"a": absent}}):
        with pytest.raises(
            ValueError, match="must be prepared before a model is loaded"
        ):
            read_only({**config, "data": data})
    opened = []
    of = lambda settings: opened.append(settings) or read_only(settings)
    monkeypatch.setattr(loading, "read_only", of)
    ff.load_model(run, client=1)
    assert opened


@pytest.mark.parametrize("names", ["ours", "PyTorch's"])
def test_a_file_of_weights_is_the_network_again(
    run, server, pretrained, tmp_path, names
):
    network = pretrained
    path = tmp_path / "network.safetensors"
    if names == "ours":
        export(network, path)
        about = read_weights(path).about
        assert json.loads(about["image_shape"]) == [12, 12, 3]
        assert (about["method"], about["from"]) == ("pretrained", str(run))
    else:
        write_weights(path, torch_arrays(network))
    again = ff.load_model(path)
    # A gallery belongs to weights and preprocessing, of which others have no record.
    is_recorded = names == "ours"
    assert (again.fingerprint == network.fingerprint) == is_recorded
    assert again.recorded == (network.recorded if is_recorded else None)
    np.testing.assert_array_equal(again.embed(images()), network.embed(images()))
    assert server.fingerprint != network.fingerprint


def test_training_starts_from_given_weights_and_leaves_the_frozen(
    server, faces, unjudged, tmp_path
):
    before = server.weights.arrays
    init = tmp_path / "start.safetensors"  # below from a run's folder
    write_weights(init, before)
    config = settings(faces, methods={})
    pretrain = {"init": str(init), "frozen": "backbone/(stem|stage1)/"}
    config["pretrain"] = {**config["pretrain"], **pretrain}
    play(config, tmp_path / "tuned")
    after = ff.load_model(tmp_path / "tuned").weights.arrays
    for name, array in before.items():
        if name.startswith("params/"):
            is_same = np.array_equal(array, after[name])
            assert is_same == name.startswith(("params/stem/", "params/stage1/")), name


def test_a_run_teaches_another_from_its_work_folder(run, server, faces, tmp_path):
    told = {"teacher": {"weights": str(run)}}
    student = choose("config.model", MODELS, with_tuples(MODEL), (12, 12, 3))
    teacher = parse(Distill, told).open(student, "method").teacher
    x = (images() / 127.5 - 1).astype(np.float32)
    found = jax.jit(lambda v: teacher.model.apply(v, x, False)[0])(teacher.variables)
    np.testing.assert_allclose(found, server.embed(images()), atol=1e-5)
    config = settings(faces, methods={})
    config["pretrain"] = {**config["pretrain"], "distill": told}
    loss = build(with_tuples(config)).stages["pretrained"].trainer.loss
    assert "with_distillation" in loss.__qualname__


def test_exported_files_run_without_the_library(server, own, tmp_path):
    pytest.importorskip("flatbuffers")
    export(own, tmp_path / "own.stablehlo")
    opened = jax.export.deserialize((tmp_path / "own.stablehlo").read_bytes())
    x = (images() / 127.5 - 1).astype(np.float32)
    wanted = own.embed(images())
    np.testing.assert_allclose(opened.call(x), wanted, atol=1e-4)
    np.testing.assert_allclose(opened.call(x[:2]), wanted[:2], atol=1e-4)
    pytest.importorskip("onnxruntime")
    assert "off by" in export(own, tmp_path / "own.onnx")
    assert "off by" in export(server, tmp_path / "server.onnx")


def test_a_run_on_other_data_is_opened_only_where_that_is_meant(run, faces, tmp_path):
    """One more person takes the place of an unseen one: thresholds would be wrong."""
    accept = {"client": 1, "data_changed": "accept"}
    shutil.copytree(run, tmp_path / "run")
    with np.load(faces) as stored:
        arrays = dict(stored)
    more = np.concatenate([arrays["images"], arrays["images"][:6][:, ::-1]])
    labels = np.concatenate([arrays["labels"], np.full(6, 13)])
    np.savez(tmp_path / "more.npz", images=more, labels=labels)
    config = manifest.read_object(run / "config.json")
    config["data"]["path"] = str(tmp_path / "more.npz")
    manifest.write_object(tmp_path / "run" / "config.json", config)
    with pytest.raises(ValueError, match="images differ: .*unseen"):
        ff.load_model(tmp_path / "run", client=1)
    assert ff.load_model(tmp_path / "run", **accept).roc() is not None
    assert ff.load_model(tmp_path / "run").roc() is not None  # of the training


def test_a_clients_adapter_is_merged_into_its_network(faces, tmp_path):
    method = {
        "learning_rate": 0.1,
        "adapter": {"name": "lora", "rank": 2, "targets": "fc"},
        "personal": "lora_b$",
    }
    config = settings(
        faces,
        task="classification",
        partition={"name": "iid", "num_clients": 2},
        model={"name": "mlp", "hidden_dim": 4},
        pretrain={},
        evaluation={},
        methods={"x": method},
    )
    experiment = play(config, tmp_path / "run")
    models = load_models(experiment, "x", tmp_path / "run")
    x = (images() / 127.5 - 1).astype(np.float32)
    for client in (0, 1):
        network = ff.load_model(tmp_path / "run", client=client)
        assert not any("lora" in name for name in named_arrays(network.variables))
        clients = np.full(experiment.mesh.size, client)
        lanes = models.client_variables(clients)  # with A and B
        own = jax.tree.map(lambda x: x[0], lanes)
        assert any("lora" in name for name in named_arrays(own))
        expected = models.client_apply(own, x)
        np.testing.assert_allclose(network.embed(images()), expected, atol=1e-4)
    assert export(network, tmp_path / "client.safetensors")
