"""The scripts of examples/ run, at test size, and print what they promise."""

import importlib.util
import pathlib
import re
from functools import partial

import jax
import numpy as np
import optax
import pytest

import fedfr_jax as ff

pytestmark = pytest.mark.ci

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def as_a_user_has_it():
    """JAX without the strict settings of the library's own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def load(name):
    """The module of a script, without running it."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_short_and_shows_how_to_run_it():
    assert len(SCRIPTS) >= 6
    for name in SCRIPTS:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) <= (200 if name == "nano" else 90), name
        assert f"python examples/{name}.py" in text, name


def test_nano_has_the_numbers_of_the_engine_without_its_library():
    nano, rng = load("nano"), np.random.default_rng(1)
    assert "import fedfr" not in (FOLDER / "nano.py").read_text()
    x = rng.normal(size=(60, 6)).astype(np.float32)
    y = rng.integers(0, 3, 60).astype(np.int32)
    owners = rng.integers(0, 7, 60)
    first = {"w": np.zeros((6, 3), np.float32), "b": np.zeros(3, np.float32)}

    def loss(variables, batch, key):
        logits = nano.apply(variables["params"], batch.images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid)

    run = ff.init(
        ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.1)),
        ff.FederatedDataset.from_client_ids(x, y, owners),
        first,
        batch_size=4,
        batching=ff.Batching(4, shuffle=False),
        local_epochs=2,
    )
    clients, params = nano.group(x, y, owners), first
    steps = nano.plan_steps(clients, range(7), epochs=2, batch_size=4)
    for _ in range(3):
        run, _ = ff.run_round(run)
        params = nano.run_round(params, clients.x, clients.y, 0.1, steps, lanes=3)
    expected = run.variables["params"]
    assert np.abs(params["w"]).max() > 0.1
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), params, expected)


@pytest.mark.slow
def test_mnist_trains_two_digits_a_client_to_a_model_of_all(tmp_path, capsys):
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    x = np.uint8(digits.images * 15).repeat(2, axis=1).repeat(2, axis=2)
    x = np.pad(x, ((0, 0), (6, 6), (6, 6)))
    path = tmp_path / "mnist.npz"
    arrays = {"x_train": x[:900], "y_train": digits.target[:900]}
    np.savez(path, **arrays, x_test=x[900:1200], y_test=digits.target[900:1200])
    assert load("mnist").main(path, num_clients=5, cohort_size=5, rounds=6) > 0.3
    assert "test accuracy of the global model: 0." in capsys.readouterr().out


def test_an_own_algorithm_trains_beside_fedavg():
    found = load("own_algorithm").main(rounds=5)
    assert found.keys() == {"fedavg", "inverse_norm"}
    assert min(found.values()) > 0.8


def test_an_own_algorithm_takes_personal_layers():
    example = load("own_algorithm")
    data = ff.FederatedDataset.from_client_ids(*example.clients_with_noise(4))
    training = ff.LocalTraining(example.loss, optax.sgd, learning_rate=0.1)
    personal = ff.with_personal_layers(example.inverse_norm(training), "params/w")
    run = ff.init(personal, data, {"w": np.zeros((16, 2), np.float32)}, batch_size=5)
    run, _ = ff.run_round(run)
    assert ff.evaluate(run, example.logits, data)["accuracy_of_clients"] > 0.6


def test_personal_layers_learn_what_one_model_cannot():
    found = load("personal_layers").main(rounds=4)
    assert found["personal classifier"] > found["fedavg"] + 0.2


@pytest.mark.slow
def test_lora_learns_new_digits_and_sends_less_than_all(tmp_path, capsys):
    sizes = {"rounds": 5, "epochs": 3, "num_clients": 100}
    found = load("foundation_model").main(**sizes, folder=tmp_path)
    sent = [int(x) for x in re.findall(r"(\d+) kB", capsys.readouterr().out)]
    assert found["LoRA"] > 0.3  # of five digits
    assert sent[0] < sent[1] < sent[2] / 4
    assert (tmp_path / "adapter_config.json").exists()


def test_a_sweep_ends_in_a_scaling_law(capsys):
    best = load("scaling_law").main(widths=(2, 6, 18), rounds=4)
    assert best.coefficients.exponents[0] > 0
    assert "## Laws" in capsys.readouterr().out


@pytest.mark.slow
def test_faces_of_a_folder_are_federated(tmp_path, capsys):
    found = load("faces_folder").main(workdir=tmp_path, rounds=1, epochs=1)
    assert found.keys() == {"pretrained", "fedavg", "fedfr"}
    assert all(0 <= rate <= 1 for rate in found.values())
    assert "of genuine pairs accepted" in capsys.readouterr().out


@pytest.mark.slow
def test_a_big_network_is_sharded_over_the_devices(tmp_path, capsys):
    assert 0 <= load("big_faces").main(people=40, epochs=1, workdir=tmp_path) <= 1
    assert "devices: 8" in capsys.readouterr().out


def test_canaries_prove_less_than_epsilon_and_much_without_noise():
    audit = load("privacy_audit").audit
    proved, epsilon = audit(0.0)
    assert proved > 2 and epsilon == np.inf
    proved, epsilon = audit(0.6)
    assert 0.5 < proved < epsilon < 8
