"""The first round is compiled once, beside what the server prepares for it."""

import threading

import pytest

from fedfr_jax.federated import memory
from fedfr_jax.federated.simulation import open_store, play, simulation, start
from fedfr_jax.mesh import make_mesh
from tests.federated import test_stream, toys
from tests.federated.test_engine import MESHES


def build(name, mesh="1x1", change=lambda algorithm: algorithm, **options):
    algorithm, variables = toys.TOYS[name]()
    mesh = make_mesh(*MESHES[mesh])
    sim = simulation(
        *(change(algorithm), toys.feed(), *toys.problem()),
        **{"mesh": mesh, "cohort_size": 3, **options},
    )
    return sim, start(sim, variables)


def first_round(sim, server):
    """{compiled function: [thread of each compilation]}."""
    note = lambda name: (name, threading.current_thread().name.partition("_")[0])
    with toys.compilations(note) as found:
        play(sim, server, open_store(sim, server), 0)
    names = {name for name, _ in found}
    return {name: [t for n, t in found if n == name] for name in names}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_prepared_round_is_compiled_once_on_a_thread_of_its_own(mesh):
    threads = first_round(*build("fedfr", mesh))
    assert threads["jit(run)"] == ["compile"]
    assert threads["jit(gathered)"] == ["MainThread"]


@pytest.mark.parametrize("options", [{"lanes": 2}, {"reduction": "canonical"}])
def test_lanes_and_shards_are_those_of_the_round(options):
    assert first_round(*build("fedfr", "2x1", **options))["jit(run)"] == ["compile"]


def test_nothing_is_compiled_beside_without_a_preparation_or_for_a_stream():
    assert first_round(*build("fedavg"))["jit(run)"] == ["MainThread"]
    threads = first_round(*test_stream.build("fedfr", streamed={}))
    assert {"MainThread"} == set(sum(threads.values(), []))


def test_a_round_that_cannot_fit_is_refused_before_anything_is_compiled(monkeypatch):
    sim, server = build("fedfr")
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1)
    with toys.compilations() as found, pytest.raises(MemoryError, match="are free"):
        play(sim, server, open_store(sim, server), 0)
    assert not {"jit(run)", "jit(gathered)"} & {*found}


def test_what_fails_on_the_thread_is_told_by_the_round():
    def client_update(*_):
        raise ZeroDivisionError("a client's own fault")

    broken = lambda algorithm: algorithm._replace(client_update=client_update)
    sim, server = build("fedfr", change=broken)
    with pytest.raises(ZeroDivisionError, match="own fault"):
        play(sim, server, open_store(sim, server), 0)
