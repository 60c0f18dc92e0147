"""Several real processes with gloo: same numbers, any number of them, and a kill."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from fedfr_jax import distributed
from fedfr_jax import mesh as meshes
from fedfr_jax.cli import flags, launch
from fedfr_jax.federated.sampling import sample_cohort
from tests.federated import process_worker, toys

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)


def start(workdir, *flags, count, names="fedavg,fedfr"):
    """Run the worker as `count` processes to their end."""
    command = [sys.executable, "-m", "tests.federated.process_worker", *flags]
    command += [f"--workdir={workdir}", f"--algorithms={names}"]
    coordinator = f"localhost:{launch.free_port()}"
    launch.start(command, range(count), total=count, coordinator=coordinator)


def assert_same(folder, expected, atol=1e-6):
    ends, rows = process_worker.result(folder)
    wanted_ends, wanted_rows = process_worker.result(expected)
    for got, wanted in zip(ends, wanted_ends, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=atol)
    assert len(rows) == len(wanted_rows) == process_worker.ROUNDS
    for got, wanted in zip(rows, wanted_rows, strict=True):
        for name in ("padding_ratio", "idle_ratio"):
            got.pop(name), wanted.pop(name)
        assert got == pytest.approx(wanted, rel=1e-5, abs=atol)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted runs of a single process, this one."""
    folder = tmp_path_factory.mktemp("whole")
    for name in process_worker.TOYS:
        process_worker.run(name, folder / name, process_worker.ROUNDS)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes leave that train, and then disagree on a checkpoint."""
    folder = tmp_path_factory.mktemp("two")
    flags = ["--devices=2", "--model_shards=2", "--lanes=2", "--table=stream"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(ROOT)
        start(folder, *flags, "--disagree=1", count=2)
    return folder


def test_two_processes_give_the_run_of_one(two, whole):
    for name in process_worker.TOYS:  # five rounds of sums in another order
        assert_same(two / name, whole / name, atol=1e-5)
    check_reading(two / "fedavg", num_rounds=5, count=2)


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one_with_many_rounds_a_call(
    tmp_path, monkeypatch
):
    """Of streamed examples, which each reads for its own clients."""
    monkeypatch.setenv("XLA_FLAGS", "")  # bits are those of a run's programs
    alone = tmp_path / "alone"
    start(alone, "--devices=1", "--lanes=2", "--per_call=1", count=1, names="fedavg")
    flags = ["--devices=1", "--lanes=2", "--table=stream", "--per_call=2"]
    start(tmp_path, *flags, count=2, names="fedavg")
    folders = tmp_path / "fedavg", alone / "fedavg"
    found, expected = map(process_worker.result, folders)
    for got, wanted in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(found[1], expected[1], strict=True):
        for log in (got, wanted):
            del log["padding_ratio"], log["idle_ratio"]
        assert got == wanted
    for i in range(2):
        part = dict(np.load(tmp_path / "fedavg" / f"read-{i}.npz"))
        assert 0 < len(part["read"]) < toys.SIZES.sum() * process_worker.ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("per_call", [1, 2])
def test_states_in_a_bucket_stay_with_the_process_that_trains_their_client(
    tmp_path, monkeypatch, per_call
):
    """Killed and resumed, two processes without a common folder end as one.

    A process sends and receives only rows of clients that change theirs.
    """
    monkeypatch.setenv("XLA_FLAGS", "")
    alone = tmp_path / "alone"
    start(alone, "--devices=1", "--lanes=2", "--per_call=1", count=1, names="fedavg")
    flags = ["--devices=1", "--lanes=2", "--table=stream", f"--per_call={per_call}"]
    flags += [f"--bucket=file://{tmp_path}/bucket/run"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine1"))
    with pytest.raises(ChildProcessError, match="process 1 of 2 ended with signal 9"):
        start(tmp_path, *flags, "--kill=3", count=2, names="fedavg")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine2"))
    start(tmp_path, *flags, count=2, names="fedavg")
    folders = tmp_path / "fedavg", alone / "fedavg"
    found, expected = map(process_worker.result, folders)
    for got, wanted in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert [x["loss"] for x in found[1]] == [x["loss"] for x in expected[1]]
    logs = [
        json.loads((tmp_path / "fedavg" / f"moved-{i}.json").read_text())
        for i in range(2)
    ]
    assert [x[0] for x in logs[0]] == [x[0] for x in logs[1]]
    for (name, sent, received), (_, *others) in zip(*logs, strict=True):
        assert [received, sent] == others  # of two, one gets what the other sends
        if name.startswith("round") and per_call == 1:
            assert sent + received <= 4  # the cohort, of which each loads its part
    assert sum(sent + received for _, sent, received in logs[0]) > 0
    states = tmp_path / "bucket" / "run" / "states"
    assert not [path for path in states.rglob("*") if path.is_file()]
    # Of no state both machines have the newest row: each writes its own log.
    (first,) = (tmp_path / "machine2" / "fedfr_jax" / "buckets").glob("*/run")
    copies = first, first.with_name("run-1")
    of_runs = [{p.stem[10:] for p in folder.rglob("*.rows")} for folder in copies]
    assert of_runs == [{"0"}, {"1"}]


@pytest.mark.slow
def test_two_processes_killed_then_one_then_two_give_the_run_of_one(tmp_path, whole):
    message = (
        "process 1 of 2 ended with signal 9; the others were stopped. The same "
        "command starts again."
    )
    with pytest.raises(ChildProcessError, match=message):
        start(tmp_path, "--devices=2", "--kill=2", count=2, names="fedfr")
    assert not (tmp_path / "fedfr" / "result.npz").exists()
    process_worker.run("fedfr", tmp_path / "fedfr", 4)  # in this process, on 8 devices
    last = ["--devices=2", "--model_shards=2", "--lanes=2", "--table=stream"]
    start(tmp_path, *last, count=2)  # and FedAvg from its beginning
    for name in process_worker.TOYS:
        assert_same(tmp_path / name, whole / name)
    check_reading(tmp_path / "fedavg", num_rounds=5, count=2)


def check_reading(folder, *, num_rounds, count):
    """Each process read the rows of its own clients, and nobody's twice."""
    parts = [dict(np.load(folder / f"read-{i}.npz")) for i in range(count)]
    for part in parts:
        assert len(part["read"]) > 0
        np.testing.assert_array_equal(np.sort(part["read"]), np.sort(part["own"]))
    offsets = np.concatenate([[0], np.cumsum(toys.SIZES)])
    cohorts = [sample_cohort(3, r, 5, 4) for r in range(5 - num_rounds, 5)]
    wanted = [np.arange(*offsets[i : i + 2]) for ids in cohorts for i in ids]
    everything = np.concatenate([part["read"] for part in parts])
    np.testing.assert_array_equal(np.sort(everything), np.sort(np.concatenate(wanted)))


@pytest.mark.slow
def test_one_process_then_four_then_two_give_the_run_of_one(tmp_path, whole):
    for name in process_worker.TOYS:
        process_worker.run(name, tmp_path / name, 1)
    start(tmp_path, "--devices=1", "--stop=4", count=4)
    start(tmp_path, "--devices=2", count=2)
    for name in process_worker.TOYS:
        assert_same(tmp_path / name, whole / name)


def test_a_checkpoint_that_one_process_cannot_read_is_nobodys(two):
    said = [(two / f"{i}.txt").read_text() for i in range(2)]
    assert said == ["another process could not read its checkpoint.", "a bad checksum"]


def test_process_0_listens_on_this_machine_alone(two):
    loopback = {"0100007F", f"{0:016X}FFFF00000100007F", f"{0:024X}01000000"}
    assert loopback >= {*(two / "listens.txt").read_text().split()} > set()


def test_a_failing_process_is_shown_and_named(capfd):
    says = "import sys; sys.exit(print('a mistake') or 2 * (sys.argv[-1][-1] == '1'))"
    with pytest.raises(ChildProcessError, match="process 1 of 2 ended with code 2; "):
        command = [sys.executable, "-c", says]
        launch.start(command, range(2), total=2, coordinator="localhost:1")
    assert "[1] a mistake" in capfd.readouterr().out


@pytest.mark.parametrize(
    "codes, blamed",
    [
        ({0: None, 1: 1}, 1),
        ({0: 1, 1: -9, 2: 1}, 1),
        ({0: 1, 1: 0, 2: 2}, 2),
        ({0: 1, 1: -6}, 0),  # JAX aborts those whose process 0 has gone
        ({0: -6, 1: -9}, 1),
        ({0: -6, 1: 1, 2: 2}, 2),
    ],
)
def test_a_process_that_failed_with_another_is_not_blamed(codes, blamed):
    assert launch._first_failure(codes) == blamed


def fails(*flags, code=1, ids=range(1), total=1):
    """What `launch` says after a process that ends with `code` at once."""
    command = [sys.executable, "-c", f"raise SystemExit({code})", *flags]
    with pytest.raises(ChildProcessError) as error:
        launch.start(command, ids, total=total, coordinator="localhost:1")
    return str(error.value)


def test_a_failed_training_is_resumed_without_the_flag_that_trains_anew():
    says = fails("train", "--overwrite=fedfr")
    assert says.endswith("The same command without --overwrite resumes the run.")
    assert fails("train").endswith("The same command resumes the run.")
    assert "command" not in fails("train", code=2)


def test_one_of_several_hosts_stops_its_own_processes_only():
    says = fails(ids=range(2, 4), total=4)
    assert "the others on this host were stopped, those on other hosts stop by" in says
    assert f"within about {distributed.HEARTBEAT} seconds. The same" in says
    assert says.endswith("The same command on every host starts again.")
    assert "the others were stopped. " in fails(ids=range(2), total=2)
    assert "host" not in fails(ids=range(2), total=2)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "needs a command"),
        (
            ["--processes_per_host=0", "train"],
            "--processes_per_host must be at least 1",
        ),
        (["--num_hosts=2", "--host_index=2", "train"], "--host_index must be less"),
        (["--num_hosts=2", "train"], "--num_hosts needs --coordinator"),
        (["--nosuch=1", "train"], "nosuch"),
    ],
)
def test_launch_refuses_what_it_cannot_start(words, message):
    with pytest.raises(ValueError, match=message):
        flags.run("launch", launch.launch, words)


@pytest.mark.parametrize(
    "coordinator, bound",
    [("127.0.0.1:7", "127.0.0.1:7"), ("localhost:7", "localhost:7"), ("host0:7", None)],
)
def test_one_machines_coordinator_listens_on_loopback(coordinator, bound, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **x: calls.append(x))
    is_async = jax.config.read("jax_cpu_enable_async_dispatch")
    try:
        distributed.join(coordinator, 2, 0)
    finally:
        jax.config.update("jax_cpu_enable_async_dispatch", is_async)
    assert calls[0]["coordinator_bind_address"] == bound
    started = []
    monkeypatch.setattr(launch, "start", lambda *_, **x: started.append(x))
    launch.launch(["train"], typed=[])
    assert started[0]["coordinator"].startswith("127.0.0.1:")


def test_join_wants_all_places_or_none():
    with pytest.raises(ValueError, match="must all be set"):
        distributed.join("localhost:1", 2)
    with pytest.raises(ValueError, match=r"process_id must be in \[0, 1\], got 2"):
        distributed.join("localhost:1", 2, 2)


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("coordinator_address should be defined."),
        KeyError("job-name"),
        OSError("Name or service not known"),
    ],
)
def test_a_cluster_that_jax_cannot_use_is_one_clear_error(fault, monkeypatch):
    def initialize(*given, **options):
        raise fault

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    name = type(fault).__name__
    error = ConnectionError if isinstance(fault, OSError) else ValueError  # again later
    is_async = jax.config.read("jax_cpu_enable_async_dispatch")
    try:
        with pytest.raises(error, match=rf"clusters.md .*--coord.* got {name}: "):
            distributed.join()
        with pytest.raises(error, match=f"must join at host0:1, got {name}: "):
            distributed.join("host0:1", 2, 0)
    finally:
        jax.config.update("jax_cpu_enable_async_dispatch", is_async)


def test_a_single_process_has_all_shards_and_no_barrier():
    mesh = meshes.make_mesh(4)
    assert meshes.local_shards(mesh, 8).tolist() == list(range(8))
    meshes.barrier("nobody else")
    values = np.arange(8.0).reshape(8, 1)
    there = meshes.put_local(values, meshes.over_clients(mesh), 8)
    assert len(there.sharding.device_set) == 4
    np.testing.assert_array_equal(meshes.fetch_local(there), values)


@pytest.mark.parametrize(
    "environment, gpus",
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "2"}, [0, 1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),  # of CPUs
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_GPUS_ON_NODE": "2"}, None),
        ({}, None),
    ],
)
def test_the_only_process_of_a_host_takes_all_its_gpus(environment, gpus):
    assert distributed._gpus_of_host(environment) == gpus
