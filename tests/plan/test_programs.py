"""Programs from shapes alone, for devices that are not there, and what is read of them.

`make accelerators` has the compilers of TPUs and GPUs; here the CPU's stands in.
"""

import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import build_mesh
from fedfr_jax.config.build import build
from fedfr_jax.convolutions import fast
from fedfr_jax.data.stream import place_examples
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.simulation import open_store, start_simulation
from fedfr_jax.mesh import platform, use_described
from fedfr_jax.models import iresnet
from fedfr_jax.plan import hlo
from fedfr_jax.plan.aot import compile_stages, stage_programs
from fedfr_jax.plan.stages import format_programs
from fedfr_jax.runs.frozen_base import with_features
from fedfr_jax.runs.stages import build_stage_simulation
from tests.federated import toys

CLASSES = {
    "task": "classification",
    "data": {"name": "fake_data", "num_identities": 4, "image_size": 8},
    "partition": {"num_clients": 8},
    "model": {"name": "logistic"},
    "federation": {"batch_size": 4, "local_epochs": 1, "flip_probability": 0.0},
    "methods": {
        "fedavg": {"learning_rate": 0.1},
        "merged": {"kind": "central", "batch_size": 8},
    },
}
ON_FEATURES = {
    **CLASSES,
    "model": {"name": "cnn"},
    "methods": {
        "fedavg": {"learning_rate": 0.1, "frozen": "conv1", "features": "device"}
    },
}
FACES = {
    "data": {"name": "fake_data", "num_identities": 40, "image_size": 8},
    "partition": {
        "num_clients": 2,
        "ids_per_client": 2,
        "num_public_ids": 32,
        "num_unseen_ids": 2,
    },
    "model": {"name": "cnn", "widths": (8, 16), "embedding_dim": 16},
    "pretrain": {
        "batch_size": 16,
        "class_parallel": True,
        "sharding": (("kernel", "zero3"),),
    },
    "methods": {},
}


def here():
    """This machine's devices, as if they were not there."""
    return use_described(jax.devices(), memory=10**9)


class Lowered(Exception):
    """Stands for a program that was lowered and need not run."""


def lowered_by_a_run(config, name, play):
    """The program of the first call of a run, as text."""
    real, texts = build(config), []
    trainer = real.stages["fedavg"].trainer
    table = place_examples(real.task.dataset, real.mesh)
    variables = trainer.init_variables(None)
    parts = with_features(real, trainer, table, pathlib.Path("x"))
    sim = build_stage_simulation(real, trainer, *parts)
    server = start_simulation(sim, variables)
    program = sim.programs._asdict()[name]

    def lower(*arguments):
        texts.append(program.lower(*arguments).as_text())
        raise Lowered

    watched = types.SimpleNamespace(lower=lower, needs={}, fitting={})
    sim = sim._replace(programs=sim.programs._replace(**{name: watched}))
    with pytest.raises(Lowered):
        play(sim, server, open_store(sim, server))
    return texts


@pytest.mark.parametrize("settings", [CLASSES, ON_FEATURES])
def test_the_program_from_shapes_is_the_program_of_the_run(settings):
    with here():
        found = stage_programs(build(settings), "fedavg")
    play = lambda sim, server, store: toys.simulate_round(sim, server, store, 0)
    texts = lowered_by_a_run(settings, "run_whole", play)
    assert list(found) == ["round"] and [found["round"].as_text()] == texts


def test_a_streamed_round_on_cpus_is_compiled_by_segments():
    federation = {**CLASSES["federation"], "data_placement": "stream"}
    with here():
        found = stage_programs(build({**CLASSES, "federation": federation}), "fedavg")
    assert [*found] == ["segment", "finish"]


@pytest.mark.parametrize("place", ["device", "stream"])
def test_the_program_of_several_rounds_from_shapes_is_the_program_of_the_run(place):
    federation = {**CLASSES["federation"], "rounds": 4, "rounds_per_call": 2}
    federation["data_placement"] = place
    settings = {**CLASSES, "federation": {**federation, "checkpoint_every": 2}}
    with here():
        found = stage_programs(build(settings), "fedavg")
    play = lambda sim, server, store: advance(sim.runs, server, [store], 0, 2)
    texts = lowered_by_a_run(settings, "run_rounds", play)
    assert list(found) == ["rounds"] and [found["rounds"].as_text()] == texts


def test_a_central_step_takes_the_memory_of_the_state_that_it_would_be_given():
    with here(), jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        step = stage_programs(build(FACES), "pretrained")["step"]
    real = build(FACES)
    trainer = real.stages["pretrained"].trainer
    mesh = build_mesh(trainer.settings, real.mesh)
    state = build_epochs(trainer, mesh, real.seed).init(trainer.init(jax.random.key(0)))
    of_first = lambda x: x.addressable_shards[0].data.nbytes
    images = trainer.dataset.example_bytes * FACES["partition"]["num_public_ids"] * 10
    needed = sum(map(of_first, jax.tree.leaves(state)))
    rest = step.compile().memory_analysis().argument_size_in_bytes - needed
    # Beside the state: a device's share of an epoch's images, with numbers of rows.
    assert 0 < rest < 1.2 * images / 8 + 100


def test_a_device_too_small_is_said_to_be():
    on_device = {**CLASSES["federation"], "data_placement": "device"}
    with use_described(jax.devices(), memory=1000):
        experiment = build({**CLASSES, "federation": on_device})
        found = compile_stages(experiment, ["fedavg"])["fedavg"]["round"]
    assert not found["fits"] and found["gib"]["needed"] * 2**30 > 1000
    assert found["whole"]["collectives"] == {"all-reduce": 1}
    assert "TOO LARGE\n  collectives: 1 all-reduce (" in format_programs(
        "a", {"b": found}
    )
    with (
        here(),
        pytest.raises(ValueError, match="--methods must be one of .*'fedprox'"),
    ):
        compile_stages(build(CLASSES), ["fedprox"])


def test_what_is_chosen_by_the_kind_of_device_is_chosen_for_the_described_ones():
    def has_direct_convolution(batch):  # one each, or a trace would be known
        shapes = jnp.zeros((batch, 8, 8, 8)), jnp.zeros((8, 8, 3, 3))
        conv = fast(lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME"))
        return "conv_general_dilated" in str(jax.make_jaxpr(conv)(*shapes))

    assert not has_direct_convolution(4)
    tpu = types.SimpleNamespace(platform="tpu")
    with use_described([tpu], memory=1, has_host_memory=False):
        assert has_direct_convolution(5)
        with pytest.raises(ValueError, match="remat='offload' needs"):
            iresnet((8, 8, 3), blocks=(1,), widths=(8,), remat="offload")
    assert platform() == "cpu"


PROGRAM = """HloModule made_up

%inside (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} convolution(%a, %a), window={size=3x24 pad=0_0x0_0}, dim_labels=b01f_01io->b01f, feature_group_count=4
}

%block (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %f = f32[4,20]{0,1:T(8,128)} fusion(%p), kind=kOutput, calls=%inside, backend_config={"window_config":{"estimated_cycles":"40"}}
  %g = f32[32]{0} all-gather(%f), dimensions={0}
  ROOT %t = (s32[], f32[4]{0}) tuple(%p, %f)
}

%few (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  %n = s32[]{:T(128)} constant(5), metadata={}
  ROOT %lt = pred[] compare(%p.1, %n), direction=LT
}

%unknown (p.2: (s32[], f32[4])) -> pred[] {
  %p.2 = (s32[], f32[4]{0}) parameter(0)
  ROOT %lt.1 = pred[] compare(%p.2, %p.2), direction=LT
}

%step (p.3: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.3 = (s32[], f32[4]{0}) parameter(0)
  %w = (s32[], f32[4]{0}) while(%p.3), condition=%few, body=%block
  %r = bf16[2]{0} reduce-scatter(%w), dimensions={0}, to_apply=%inside
  ROOT %copy = (s32[], f32[4]{0}) copy(%w), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %v = (s32[], f32[4]{0}) while(%x), condition=%unknown, body=%step
  %s = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%v), to_apply=%inside
  ROOT %d = f32[4]{0} all-reduce-done(%s), backend_config={"estimated_cycles":"9223372036854775807"}
}
"""  # noqa: E501


def test_a_step_counts_its_loops_as_often_as_they_turn():
    program = hlo.parse(PROGRAM)
    step, whole = hlo.count_step(program, 8), hlo.count_program(program, 8)
    assert (step.convolutions, step.kernels) == (5, 6)
    assert step.collectives == {"all-gather": 5, "reduce-scatter": 1}
    assert (step.open_loops, whole.open_loops) == (0, 1)
    assert step.cycles == whole.cycles == 5 * 40 + 7  # loops turn five times
    # Columns of 4 lie along the 128 of a tile, 20 rows along three times eight.
    assert step.written_mb == pytest.approx((5 * 320 + 20) / 1e6, abs=1e-3)
    assert step.padded_mb == pytest.approx(5 * 24 * 128 * 4 / 1e6, abs=1e-3)
    assert step.grouped_window == 24
    assert step.megabytes == {"all-gather": 5 * 128 / 1e6, "reduce-scatter": 32 / 1e6}
    assert whole.collectives == {**step.collectives, "all-reduce": 1}
    assert whole.megabytes["all-reduce"] == 16 / 1e6


def test_a_step_is_a_turn_of_the_counted_loop_in_a_clients_loop():
    step = hlo.count_step(hlo.parse(PROGRAM), 8, steps_per_loop=5)
    assert (step.convolutions, step.kernels) == (1, 1)
    assert hlo.count_step(hlo.parse(PROGRAM), 8, steps_per_loop=4) is None
