"""Ahead-of-time compilation of a run's stages for devices that are not attached.

Programs are lowered from shapes alone, so nothing is put on a device, see
`mesh.use_described`.
"""

import functools
import time
from collections.abc import Iterable

import jax

from fedfr_jax import mesh as meshes
from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import build_mesh
from fedfr_jax.data.stream import place_examples
from fedfr_jax.federated.privacy.accountant import affordable_rounds
from fedfr_jax.federated.programs import call_shapes, round_arguments
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.streaming import capacity_for, fit_waves
from fedfr_jax.plan import hlo
from fedfr_jax.runs.frozen_base import planned_features
from fedfr_jax.runs.loop import longest_call
from fedfr_jax.runs.shapes import server_shapes
from fedfr_jax.runs.stages import build_stage_simulation
from fedfr_jax.schema import check_choice
from fedfr_jax.types import CentralTrainer, Experiment, FederatedTrainer, PyTree

Programs = dict[str, jax.stages.Lowered]


def stage_programs(experiment: Experiment, name: str) -> Programs:
    """Lower a stage's programs: central `step`, federated `round`.

    Several rounds in a call are `rounds`; streamed examples have a `segment` and a
    `finish` in place of a `round`.
    """
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, CentralTrainer):
        mesh = build_mesh(trainer.settings, experiment.mesh)
        epochs = build_epochs(trainer, mesh, experiment.seed)
        first = functools.partial(trainer.init, jax.random.key(experiment.seed))
        return {"step": epochs.lower(first, trainer.dataset)}
    sim = _simulation(experiment, trainer)
    server, federation = server_shapes(experiment, name, sim), experiment.federation
    rounds = affordable_rounds(sim.accountant, federation.rounds)
    return round_programs(sim, server, longest_call(federation, rounds))


def _simulation(experiment: Experiment, trainer: FederatedTrainer) -> Simulation:
    dataset = experiment.task.dataset
    dataset, batching = planned_features(experiment, trainer, dataset)
    dataset = place_examples(dataset, experiment.mesh)
    return build_stage_simulation(experiment, trainer, dataset, batching)


def check_saved(experiment: Experiment, names: Iterable[str] = ()) -> None:
    """Raise ValueError for stages whose programs a run decides by its free memory."""
    for name in names or experiment.stages:
        trainer = experiment.stages[name].trainer
        if isinstance(trainer, FederatedTrainer) and trainer.frozen_model is not None:
            if trainer.features.place == "auto":
                raise ValueError(
                    f"config.methods.{name}.features must be device, host, disk or off "
                    "for programs that are saved, got 'auto': a run decides by its "
                    "free memory."
                )


def round_programs(sim: Simulation, server: PyTree, max_rounds: int = 1) -> Programs:
    """Lower the programs of a round of `sim`, from the server's shapes.

    Args:
      max_rounds: rounds of a call.
    """
    try:
        arguments = round_arguments(sim, server)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "a method whose server prepares by values of the data cannot be compiled "
            "ahead of its run."
        ) from error
    if max_rounds > 1:
        run = sim.programs.run_rounds
        return {"rounds": run.lower(*call_shapes(sim, arguments, max_rounds))}
    if not sim.data.is_streamed:
        return {"round": sim.programs.run_whole.lower(*arguments)}
    return _segment_programs(sim, *arguments)


def _segment_programs(sim, server, rows, slots, order, dataset, constants) -> Programs:
    """Lower a segment as long as the stream's memory allows, and the finish."""
    del dataset
    waves, lanes = slots.shape[1:3]
    # Room for as many added examples as a client has; a run makes more when needed.
    added, largest = constants.extra.added_rows, int(sim.largest[0])
    num_clients, capacity = added.shape
    room = capacity_for(capacity, min(capacity, largest), largest, set())
    added = jax.ShapeDtypeStruct(
        (num_clients, room), added.dtype, sharding=added.sharding
    )
    extra = constants.extra._replace(added_rows=added)
    constants = constants._replace(extra=extra)
    size = fit_waves(
        sim.device_data,
        sim.largest.cumsum(),
        memory=sim.device_data.memory,
        lanes=lanes,
        waves=waves,
        room=room,
    )

    def cut_waves(x):
        shape = x.shape[0], size.waves, *x.shape[2:]
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    def shard(tree):
        sharding = meshes.over_clients(sim.mesh)
        return meshes.shapes_at(tree, jax.tree.map(lambda _: sharding, tree))

    rows, slots = jax.tree.map(cut_waves, (rows, slots))
    segment = rows, slots, sim.data.shapes(size), constants
    run, finish = sim.programs.run, sim.programs.finish
    total = shard(sim.programs.start.shapes(server, *segment))
    _, output = run.shapes(total, server, *segment)
    outputs = [shard(output._replace(personal=()))] * size.segments
    return {
        "segment": run.lower(total, server, *segment),
        "finish": finish.lower(server, total, outputs, order, constants),
    }


GIB = 2**30


def compile_stages(experiment: Experiment, names: Iterable[str] = ()) -> dict:
    """Compile the programs of stages: {stage: {program: result of `compile_programs`}}.

    Args:
      names: of stages; (): all.
    """
    names = list(names) or list(experiment.stages)
    for name in names:
        check_choice("--methods", name, experiment.stages)
    results = {}
    for name in names:
        steps = stage_steps_per_loop(experiment, name)
        results[name] = {
            label: compile_programs(program, experiment.mesh.size, steps)
            for label, program in stage_programs(experiment, name).items()
        }
    return results


def stage_steps_per_loop(experiment: Experiment, name: str) -> tuple[int, ...]:
    """Local steps of a stage's counted loops; () of a central one."""
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, CentralTrainer):
        return ()
    return _simulation(experiment, trainer).steps_per_loop


def compile_programs(
    program: jax.stages.Lowered, num_devices: int, steps_per_loop: tuple[int, ...] = ()
) -> dict:
    """Compile a program; return the compiler's numbers: memory, cost, time.

    Args:
      steps_per_loop: local steps of its counted loops, descending.

    Returns:
      compile_seconds; fits; gib: of a device by use, `needed` in total; whole and step:
      see `hlo.Counts`, step None if there is none. If the program does not fit, only
      fits (false) and the compiler's message, `says`.
    """
    start = time.perf_counter()
    try:
        compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fits": False, "says": _used(str(error))}
    seconds = time.perf_counter() - start
    memory = memory_gib(compiled.memory_analysis())
    text = hlo.parse(compiled.as_text() or "")
    step = hlo.count_step(text, num_devices, max(steps_per_loop, default=1))
    limit = meshes.memory()  # None of a CPU
    return {
        "compile_seconds": round(seconds, 1),
        "fits": limit is None or memory["needed"] * GIB <= limit,
        "gib": {name: round(size, 6) for name, size in memory.items()},
        "whole": hlo.count_program(text, num_devices)._asdict(),
        "step": step and step._asdict(),
        "steps_per_loop": steps_per_loop,
    }


def memory_gib(memory) -> dict[str, float]:
    """Memory of a program on a device in GiB, by purpose."""
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {
        "arguments": memory.argument_size_in_bytes / GIB,
        "results": max(results, 0) / GIB,  # without those in place of arguments
        "temporaries": memory.temp_size_in_bytes / GIB,
    }
    return {**parts, "needed": sum(parts.values())}


def _used(text: str) -> str:
    """Line of a TPU compiler's message that states the memory used."""
    lines = [line for line in text.splitlines() if "Used" in line]
    return (lines or text.splitlines())[0].strip()
