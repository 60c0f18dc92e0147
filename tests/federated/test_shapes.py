"""The first round is compiled once, beside what the server prepares for it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import compose
from fedfr_jax.federated import model_parallel, programs
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    simulate_round,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.faces.frozen_features import prepare_features
from tests.contracts import test_algorithms as contracts
from tests.federated import test_stream, toys
from tests.federated.test_engine import MESHES
from tests.tasks.faces import given

pytestmark = pytest.mark.ci


def build(name, mesh="1x1", change=lambda algorithm: algorithm, **options):
    algorithm, variables = toys.TOYS[name]()
    mesh = make_mesh(*MESHES[mesh])
    sim = build_simulation(
        *(change(algorithm), toys.feed(), *toys.problem()),
        **{"mesh": mesh, "cohort_size": 3, **options},
    )
    return sim, start_simulation(sim, variables)


def thread():
    return threading.current_thread().name.partition("_")[0]


def first_round(sim, server):
    """{compiled function: [thread of each compilation]}."""
    with toys.compilations(lambda name: (name, thread())) as found:
        simulate_round(sim, server, open_store(sim, server), 0)
    names = {name for name, _ in found}
    return {name: [t for n, t in found if n == name] for name in names}


def test_a_prepared_round_is_compiled_once_on_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr(model_parallel, "SMALLEST", 16)  # the toy's leaves are cut too
    threads = first_round(*build("fedfr", "4x2"))
    assert threads["jit(whole)"] == ["compile"]
    assert threads["jit(device)"] == ["MainThread"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"clients_per_device": 2}, {"reproducible_sum": True}]
)
def test_lanes_and_shards_are_those_of_the_round(options):
    assert first_round(*build("fedfr", "2x1", **options))["jit(whole)"] == ["compile"]


def test_whatever_is_prepared_has_the_shapes_that_were_compiled():
    """Class-level hard negatives, and the gradients of FedDANE."""
    embed = lambda variables, x: toys.linear_model().apply(variables, x, False)[0]
    by_class = prepare_features(embed, threshold=0.6, level="class")
    prepare = lambda server, context: by_class(server.inner, context)
    change = lambda algorithm: algorithm._replace(prepare=prepare)
    assert first_round(*build("fedfr", change=change))["jit(whole)"] == ["compile"]
    sim = contracts.simulated.__wrapped__("feddane", 1, 1)
    server = start_simulation(sim, contracts.MEMBERS["feddane"].variables)
    assert first_round(sim, server)["jit(whole)"] == ["compile"]


def test_the_thread_computes_in_the_dtype_and_precision_of_the_caller():
    double = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        algorithm, variables = toys.TOYS["fedfr"]()
        double_images = toys.always(lambda image: image.astype(jnp.float64))
        feed = toys.feed(augment=compose(double_images, toys.MIRROR))
        options = {"mesh": make_mesh(1), "cohort_size": 3}
        sim = build_simulation(algorithm, feed, *toys.problem(), **options)
        server = start_simulation(sim, double(variables))
        assert given.phi(server).dtype == jnp.float64
        assert first_round(sim, server)["jit(whole)"] == ["compile"]


def test_nothing_is_compiled_beside_without_a_preparation_or_for_a_stream():
    assert first_round(*build("fedavg"))["jit(whole)"] == ["MainThread"]
    threads = first_round(*test_stream.build("fedfr", streamed={}))
    assert "compile" not in sum(threads.values(), [])


def test_a_preparation_that_asks_for_values_is_called_as_it_is():
    def change(algorithm):
        def prepare(*arguments):
            extra = algorithm.prepare(*arguments)
            assert np.asarray(extra.num_added).shape == (3,)
            return extra

        return algorithm._replace(prepare=prepare)

    assert first_round(*build("fedfr", change=change))["jit(whole)"] == ["MainThread"]


def test_a_round_that_cannot_fit_is_refused_before_anything_is_compiled(monkeypatch):
    sim, server = build("fedfr")
    monkeypatch.setattr(programs, "free_bytes", lambda mesh: 1)
    with toys.compilations() as found:
        for _ in range(2):
            with pytest.raises(MemoryError, match="are free"):
                simulate_round(sim, server, open_store(sim, server), 0)
    assert not {"jit(whole)", "jit(device)"} & {*found}


def test_a_round_that_cannot_be_traced_fails_before_the_server_prepares():
    def client_update(*_):
        raise ZeroDivisionError("a client's own fault")

    broken = lambda algorithm: algorithm._replace(client_update=client_update)
    sim, server = build("fedfr", change=broken)
    with toys.compilations() as found, pytest.raises(ZeroDivisionError, match="own"):
        simulate_round(sim, server, open_store(sim, server), 0)
    assert "jit(device)" not in found


def test_what_the_compiler_refuses_on_the_thread_is_asked_for_again(monkeypatch):
    refused = []

    class Program:
        def compile(self):
            refused.append(thread())
            raise MemoryError

    honest = programs.lowered
    lowered = lambda *of: honest(*of) if refused else Program()
    monkeypatch.setattr(programs, "lowered", lowered)
    assert first_round(*build("fedfr"))["jit(whole)"] == ["MainThread"]
    assert refused == ["compile"]
