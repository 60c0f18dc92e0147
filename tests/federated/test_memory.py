"""What does not fit is refused with what it needs, and nothing that fits is."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedfr_jax import mesh as mesh_module
from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated import programs
from fedfr_jax.federated.engine import Program
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.simulation import open_store
from tests.federated import test_engine, test_stream, toys

LANES = 2


class Counted(Program):
    """A program that nobody has asked yet what it needs."""

    def __init__(self, run):
        super().__init__(run)
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        return super().__call__(*arguments)


@functools.cache  # compiled once for several tests
def compiled(table, lanes):
    build = test_engine.build if table == "resident" else test_stream.build
    options = {} if table == "resident" else {"streamed": {}}
    return build("fedavg", lanes=lanes, cohort_size=3, **options)


def fresh(table, lanes=LANES):
    """(sim, its counted program, server)."""
    sim, server = compiled(table, lanes)
    run = Counted(sim.programs.run_whole)  # a stream that fits has one segment too
    return sim._replace(programs=sim.programs._replace(run_whole=run)), run, server


def play_one(sim, server):
    return toys.simulate_round(sim, server, open_store(sim, server), 0)


def give(monkeypatch, free):
    monkeypatch.setattr(programs, "free_bytes", lambda mesh: free)


def needs_of(*what):
    """Bytes that a round takes beside its arguments."""
    sim, run, server = fresh(*what)
    play_one(sim, server)
    (needed,) = run.needs.values()
    return sum(programs._after_collection(needed))


@pytest.mark.parametrize("table", ["resident", "stream"])
def test_a_round_is_refused_when_its_program_needs_more_than_is_free(
    monkeypatch, table
):
    needed = needs_of(table)
    sim, run, server = fresh(table)
    give(monkeypatch, needed - 1)
    for _ in range(2):  # the second time too
        with pytest.raises(MemoryError, match="got 2.* to train, .*about 1 fit"):
            play_one(sim, server)
    assert run.calls == 0
    give(monkeypatch, needed)
    play_one(sim, server)
    assert run.calls == 1


@pytest.mark.parametrize("table", ["resident", "stream"])
def test_what_was_let_through_is_not_asked_again_and_more_than_that_is(
    monkeypatch, table
):
    sim, run, server = fresh(table)
    play_one(sim, server)
    give(monkeypatch, 0)
    play_one(sim, server)
    calls = run.calls
    with pytest.raises(MemoryError, match="got 3.* to train, .*about 0 fit"):
        more = sim.settings._replace(clients_per_device=LANES + 1)
        play_one(sim._replace(settings=more), server)
    assert run.calls == calls > 1


@pytest.mark.parametrize("table", ["resident", "stream"])
def test_running_out_of_memory_says_what_the_round_needs(monkeypatch, table):
    def exhausted(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    sim, _, server = fresh(table)
    monkeypatch.setattr(meshes, "fetch_local", exhausted)
    with pytest.raises(MemoryError, match="got 2.* GiB to train, .* are free after"):
        play_one(sim, server)


def test_a_round_that_was_asked_what_it_needs_compiles_once(caplog):
    sim, server = test_engine.build("fedavg", lanes=3)
    store = open_store(sim, server)
    with jax.log_compiles():
        for round in range(2):
            server, _ = toys.simulate_round(sim, server, store, round)
    line = "Finished XLA compilation of jit(whole)"
    assert sum(line in record.getMessage() for record in caplog.records) == 1


def test_client_states_that_cannot_fit_are_refused_before_a_compile(monkeypatch):
    sim, server = test_engine.build("fedavg", mesh=(4, 1), personal="head")
    store = open_store(sim, server)
    give(monkeypatch, trees.num_bytes(store.template) - 1)  # a client on each device
    with pytest.raises(MemoryError, match="cohort_size must fit .*, got 3: the client"):
        toys.simulate_round(sim, server, store, 0)
    assert sim.programs.run_whole.num_compiled() == 0
    with pytest.raises(MemoryError, match="rounds_per_call must fit .*, got 2: the"):
        advance(sim.runs, server, [store], 0, 2)


def test_the_devices_of_a_cpu_share_what_the_machine_has_available(
    monkeypatch, tmp_path
):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9999 kB\nMemFree:  1 kB\nMemAvailable:    4096 kB\n")
    monkeypatch.setattr(mesh_module, "MEMINFO", meminfo)
    free = [mesh_module.free_bytes(meshes.make_mesh(count)) for count in (1, 4)]
    assert free == [4 * 2**20, 2**20]
    meminfo.write_text("MemTotal:  9999 kB\n")  # a kernel before 3.14
    assert mesh_module.free_bytes(meshes.make_mesh(1)) is None
    meminfo.unlink()
    assert mesh_module.free_bytes(meshes.make_mesh(1)) is None


@pytest.mark.parametrize(
    "free, machines, is_shared, expected",
    [
        ([100, 90], [7, 7], True, 45),  # each will take its part
        ([100, 90, 40], [7, 7, 8], True, 40),
        ([100, 90], [7, 7], False, 90),  # an accelerator of its own each
        ([100, -1], [7, 8], True, None),
    ],
)
def test_processes_have_what_the_poorest_of_them_has(
    free, machines, is_shared, expected
):
    found = mesh_module.min_across_processes(np.array([free, machines]).T, is_shared)
    assert found == (expected and expected * 2**20)


def test_an_accelerator_is_asked_for_its_own_memory_only():
    def free(stats):
        device = SimpleNamespace(memory_stats=lambda: stats, platform="gpu")
        return mesh_module.free_bytes(SimpleNamespace(local_devices=[device] * 2))

    assert free({"bytes_limit": 100, "bytes_in_use": 30}) == 70
    assert free(None) is None
