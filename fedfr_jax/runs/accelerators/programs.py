"""What a run's stages hand to the compiler, from shapes alone.

Nothing is put on a device, so the devices need not be there, see `devices.described`.
"""

import functools

import jax

from fedfr_jax import mesh as meshes
from fedfr_jax.central.settings import mesh_of
from fedfr_jax.federated import model_axis
from fedfr_jax.federated.compiling import lowered
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.layout import fit
from fedfr_jax.federated.shapes import extra_shapes, on_mesh, round_arguments
from fedfr_jax.federated.simulation import cohort_of
from fedfr_jax.federated.state import Simulation
from fedfr_jax.runs.begin import simulation_of
from fedfr_jax.runs.central_stage import epochs_of
from fedfr_jax.runs.tuning import Setting
from fedfr_jax.stream import Stream, placed
from fedfr_jax.types import Central, Experiment, Federated, PyTree

Programs = dict[str, jax.stages.Lowered]


def programs_of(experiment: Experiment, name: str) -> Programs:
    """A stage's programs by what they do: `step` of a central stage, `round` of a
    federated one, or its `segment` and `finish` where examples are streamed."""
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, Central):
        mesh = mesh_of(trainer.settings, experiment.mesh)
        epochs = epochs_of(trainer, mesh, experiment.seed)
        first = functools.partial(trainer.init, jax.random.key(experiment.seed))
        return {"step": epochs.lower(first, trainer.dataset)}
    sim = _simulation(experiment, trainer)
    return round_programs(sim, server_shapes(experiment, name, sim))


def _simulation(experiment: Experiment, trainer: Federated) -> Simulation:
    table = placed(experiment.task.dataset, experiment.mesh)
    lanes = experiment.federation.first_lanes
    return simulation_of(experiment, trainer, table, Setting(lanes=lanes))


def server_shapes(experiment: Experiment, name: str, sim: Simulation) -> PyTree:
    """A federated stage's server as shapes, each with its place."""
    stage = experiment.stages[name]
    before = stage.start_from and end_shapes(experiment, stage.start_from)
    begin = lambda variables: sim.algorithm.init(stage.trainer.start(variables))
    server = jax.eval_shape(begin, before)
    return meshes.shapes_at(server, model_axis.places(sim.mesh, server))


def end_shapes(experiment: Experiment, name: str) -> PyTree:
    """Variables at the end of a stage, as shapes."""
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, Federated):
        sim = _simulation(experiment, trainer)
        return jax.eval_shape(trainer.network, server_shapes(experiment, name, sim))
    variables = jax.eval_shape(trainer.init, jax.random.key(0))
    if table := trainer.table:  # without its padding
        rows = variables["params"][table.path]
        rows = jax.ShapeDtypeStruct((len(table.names), *rows.shape[1:]), rows.dtype)
        variables["params"] = {**variables["params"], table.path: rows}
    return variables


def round_programs(sim: Simulation, server: PyTree) -> Programs:
    """The programs of a round of `sim`, which `server` (shapes) begins.

    Raises:
      jax.errors.JAXTypeError: where the algorithm's `prepare` asks for values.
    """
    extra = on_mesh(sim.mesh, no_extra(sim.cohort_size))
    if sim.algorithm.prepare:
        context = sim.context(cohort_of(sim, 0))._replace(dataset=_resident(sim))
        extra = extra_shapes(sim.algorithm.prepare, server, context)
    key = jax.random.key(sim.seed)
    row = jax.eval_shape(sim.algorithm.init_personal, key, server)
    arguments = round_arguments(
        sim.mesh,
        cohort_size=sim.cohort_size,
        lanes=sim.lanes,
        shards=sim.shards,
        server=server,
        row=row,
        extra=extra,
        table=sim.table,
        key=sim.key,
        hyper=sim.hyper,
    )
    if not sim.source.is_streamed:
        return {"round": lowered(sim.programs.whole, *arguments)}
    return _segment_programs(sim, *arguments)


def _resident(sim):
    """All examples as shapes on the devices, also those of a stream."""
    table = sim.table
    if not isinstance(table, Stream):
        return table
    count = table.num_examples
    of = lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
    return on_mesh(sim.mesh, jax.tree.map(of, table.example))


def _segment_programs(sim, server, rows, slots, order, table, shared) -> Programs:
    """A segment of as many waves as the stream's memory has room for, and the end."""
    del table
    waves, lanes = slots.shape[1:3]
    room = shared[0].examples.shape[1]
    size = fit(
        sim.table,
        sim.largest.cumsum(),
        memory=sim.table.memory,
        lanes=lanes,
        waves=waves,
        room=room,
    )
    of = lambda x: jax.ShapeDtypeStruct(
        (x.shape[0], size.waves, *x.shape[2:]), x.dtype, sharding=x.sharding
    )
    segment = *jax.tree.map(of, (rows, slots)), sim.source.shapes(size), shared
    cut = meshes.over_clients(sim.mesh)
    at = lambda tree: meshes.shapes_at(tree, jax.tree.map(lambda _: cut, tree))
    run, finish = sim.programs.run, sim.programs.finish
    total = at(jax.eval_shape(sim.programs.start, server, *segment))
    _, output = jax.eval_shape(run, total, server, *segment)
    outputs = [at(output._replace(personal=()))] * size.segments
    return {
        "segment": lowered(run, total, server, *segment),
        "finish": lowered(finish, server, total, outputs, order, shared),
    }
