"""An experiment on given images, put together as that of a config."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.partition.identities import (
    IdentityPartition,
    assemble,
    rank_rows,
)
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.parts import parse
from fedfr_jax.runs.central_stage import train_central
from fedfr_jax.runs.stages import start_stage
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.experiment import build_experiment
from fedfr_jax.tasks.faces import methods as faces
from fedfr_jax.tasks.faces import stages
from fedfr_jax.tasks.faces.data import FaceData
from fedfr_jax.tasks.faces.methods import (
    METHODS,
    Counts,
    backbone_features,
    face_method,
    terms_of,
)
from fedfr_jax.types import Batch, Experiment, FederatedTrainer, Model, PyTree, Source
from tests.federated import toys


def source_of(images: np.ndarray, labels: np.ndarray) -> Source:
    """Images [T, H, W, C] of people `labels` [T], as any set of files would be."""
    names = tuple(map(str, range(labels.max() + 1)))
    return Source(lambda rows: images[rows], labels, names, images.shape[1:])


def partition_of(
    labels: np.ndarray, is_test: np.ndarray, clients: Sequence[Sequence[int]], **others
) -> IdentityPartition:
    """Who has whom, people by their labels, and which rows [T] are for tests.

    Args:
      others: `public` and `unseen` people.
    """
    people = lambda given: np.asarray(given, np.int32)
    mine = np.concatenate([people(own) for own in clients])
    num_test = np.bincount(labels, weights=is_test).astype(np.int64)[mine]
    num_train = np.bincount(labels)[mine] - num_test
    return assemble(
        rank_rows(labels, is_test),  # training rows first
        np.array([len(own) for own in clients]),
        mine,
        people(others["public"]),
        people(others["unseen"]),
        cut=num_train,
        end=num_train + num_test,
        fewest=1,
    )


def experiment_of(
    settings: Mapping,
    model: Model,
    source: Source,
    partition: IdentityPartition,
    grid: tuple[int, int] = (1, 1),
) -> Experiment:
    """What a config of `settings` runs, had it opened `source` and split it so."""
    settings = {
        "seed": 0,
        "data": {"name": "source_object", "source": source},
        "partition": {"num_clients": 1, "ids_per_client": 1, "num_public_ids": 1},
        "model": {"name": "mlp"},
        "evaluation": {},
        "federation": {},
        "pretrain": {},
        **settings,
    }
    mesh, facts = (
        make_mesh(*grid),
        stages.FaceFacts(model, backbone_features(model)),
    )
    spec = stages.SPEC._replace(
        open=lambda config, _: stages.describe(config, mesh, source, partition),
        facts=lambda opened, part: facts,
    )
    return build_experiment(spec, settings)


def batch_of(images, labels, *, num_classes=0, is_valid=None, **fields) -> Batch:
    """A batch of images [B, ...] with labels [B], in order; all are valid and own."""
    number = jnp.arange(len(labels), dtype=jnp.int32)
    nobody = jnp.zeros(len(labels), bool)
    batch = Batch(
        inputs={"image": images},
        targets={"label": labels},
        num_classes=np.int32(num_classes),
        is_valid=~nobody if is_valid is None else is_valid,
        is_added=nobody,
        row=number,
        position=number,
        view_index=jnp.zeros_like(number),
    )
    return batch._replace(**fields)


def linear_model(shape: Sequence[int], dim: int, scale: float = 0.1) -> Model:
    """One linear layer over the pixels."""

    def init(key):
        kernel = scale * jax.random.normal(key, (math.prod(shape), dim))
        return {"params": {"kernel": kernel}, "batch_stats": {}}

    def apply(variables, x, train=False, key=None):
        del train, key
        kernel = variables["params"]["kernel"]
        found = jnp.matmul(x.reshape(len(x), -1), kernel, precision="highest")
        return found, variables["batch_stats"]

    return Model(init, apply, tuple(shape), dim)


def pretrain(experiment: Experiment, folder) -> PyTree:
    """Variables after the central stage, on the host."""
    trainer = experiment.stages["pretrained"].trainer
    with jax.numpy_dtype_promotion("standard"):  # which optax's schedules need
        found = train_central(trainer, experiment.mesh, folder, seed=0)
    return jax.tree.map(np.asarray, found)


def first_round(experiment: Experiment, name: str, start: PyTree, folder):
    """(trainer, server before, server after, rows of all clients) of a method."""
    trainer = experiment.stages[name].trainer
    begun = start_stage(experiment, trainer, start, folder)
    begun.checkpointer.close()
    before = jax.device_get(begun.server)
    end = toys.play_rounds(begun.sim, begun.server, store=begun.store)
    return trainer, before, end.server, end.rows


# --- A method alone, and what its states hold


TERMS = {*faces.FaceTerms._fields, "contrastive_weight", "contrastive_temperature"}


def nested(options: Mapping) -> dict:
    """A method as configs have it, whose algorithm's keys stand beside the others."""
    name = options.get("algorithm", "fedfr")
    if not isinstance(name, str) or options.get("kind") == "central":
        return dict(options)
    own = TERMS | {*keywords(ALGORITHMS.get(name, fedfr))} - {"momentum"}
    settings = {key: value for key, value in options.items() if key in own}
    others = {key: value for key, value in options.items() if key not in own}
    return {**others, "algorithm": {"name": name, **settings}}


def method_of(
    model: Model, *, num_classes: int, num_clients: int = 0, **options
) -> SimpleNamespace:
    """The parts of a method of faces: algorithm, init_variables(backbone, phi), ..."""
    counts = Counts(num_classes, parse(Federation, {}), num_clients)
    where = "config.methods.row"
    method = parse(METHODS, nested(options), where)
    trainer = face_method(method, model, counts, where)

    def start(backbone, phi):
        params = {"backbone": backbone["params"], "phi": phi}
        return trainer.init_variables({**backbone, "params": params})

    return SimpleNamespace(
        algorithm=trainer.algorithm,
        init_variables=start,
        embed=trainer.apply,
        generic=trainer.global_model,
        final_adaptation=trainer.final_adaptation,
        init_head_from_class_means=terms_of(method).init_head_from_class_means,
        trainer=trainer,
    )


def trainer_of(
    options: Mapping, model: Model, partition: IdentityPartition, name: str = "row"
) -> FederatedTrainer:
    """The trainer of a method on the clients of a partition."""
    where = f"config.methods.{name}"
    counts = Counts(
        int(partition.num_classes.max()),
        parse(Federation, {}),
        len(partition.num_classes),
        len(partition.public.identities),
    )
    return face_method(parse(METHODS, options, where), model, counts, where)


def population_of(task: FaceData) -> Population:
    """The clients of a task's images."""
    p = task.partition
    return Population(p.train.offsets, p.num_classes)


def variables(server: PyTree) -> PyTree:
    """What a server of FedFR averages."""
    while not hasattr(server, "variables"):
        server = server.inner
    return server.variables


def backbone(server: PyTree) -> PyTree:
    """The backbone's variables in a server of FedFR."""
    shared = variables(server)
    stats = shared["batch_stats"]
    return {"params": shared["params"]["backbone"], "batch_stats": stats}


def phi(server: PyTree):
    """The public class embeddings, None without any."""
    return variables(server)["params"].get("phi")


def previous(rows: PyTree) -> PyTree:
    """The backbones that clients trained last."""
    while hasattr(rows, "leaves"):
        rows = rows.inner
    return rows


def own(rows: PyTree) -> PyTree:
    """Class embeddings and branches of clients."""
    params = rows.leaves["params"]
    return {name: params[name] for name in ("head", "branch") if name in params}


def with_own(row: PyTree, params: PyTree, before: PyTree) -> PyTree:
    """A client's row with other params of its own and another backbone of before."""
    leaves = {**row.leaves, "params": {**row.leaves["params"], **params}}
    return row._replace(inner=before, leaves=leaves)
