"""Faces: pretraining on public identities, then every method."""

from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.data.partition import PARTITIONS, format_report, report
from fedfr_jax.data.partition.identities import IdentityPartition
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation
from fedfr_jax.models.external_checkpoints import convert_variables
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.parts import Part
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import (
    PartitionReader,
    build_preprocessing,
    client_batching,
    open_data,
    split,
)
from fedfr_jax.tasks.experiment import Config, Opened, TaskSpec
from fedfr_jax.tasks.faces.data import FaceData, build_face_data
from fedfr_jax.tasks.faces.distillation import Distill, cache_embeddings
from fedfr_jax.tasks.faces.evaluator import EvaluationConfig, FaceEvaluator
from fedfr_jax.tasks.faces.loss import backbone_of
from fedfr_jax.tasks.faces.methods import (
    METHODS,
    Counts,
    backbone_features,
    face_method,
    terms_of,
)
from fedfr_jax.tasks.faces.public_classes import (
    FaceFacts,
    public_means,
    public_population,
    public_training,
)
from fedfr_jax.tasks.methods import Method
from fedfr_jax.tasks.model import NetworkConfig, build_network
from fedfr_jax.types import (
    DataUsage,
    Evaluator,
    FederatedTrainer,
    Preprocessing,
    PyTree,
    Source,
    Stage,
    UsedRows,
)

PRETRAINED = "pretrained"


def check_config(config: Config) -> None:
    """Raise ValueError for methods that exclude pretraining, or each other."""
    if PRETRAINED in config.methods:
        raise ValueError(
            f"config.methods cannot have the name {PRETRAINED!r}, that of pretraining."
        )
    federated = [x for x in config.methods.values() if isinstance(x, Method)]
    if federated and config.pretrain.adapter:
        raise ValueError(
            "pretrain.adapter needs central methods only, got federated methods, which "
            "start from all of its network. Give it to them."
        )
    teachers = [x.distill for x in (config.pretrain, *federated) if x.distill]
    if federated and any(teacher.unlabeled_source for teacher in teachers):
        raise ValueError(
            "distill.unlabeled_source needs central methods only, got federated "
            "methods. Remove one of them."
        )


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    source = open_data(config.data)
    opened = describe(config, mesh, source, split(config.partition, source))
    num_public = len(opened.split.public.rows)
    for where, training in config.trainings.items():
        num_own = 0 if training is config.pretrain else len(opened.split.train.rows)
        check_training(training, f"config.{where}", num_public + num_own, mesh)
    return opened


def describe(
    config: Config, mesh: Mesh, source: Source, partition: IdentityPartition
) -> Opened:
    """What methods and evaluators may know of a partition."""
    facts = report(partition)
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=partition,
        population=Population(partition.train.offsets, partition.num_classes),
        batching=client_batching(config.federation),
        used=data_usage(source, partition),
        report=facts,
        report_text=format_report(facts),
    )


def build_facts(opened: Opened, network: Part) -> FaceFacts:
    """Build the backbone, and load the weights that central trainings start from."""
    shape = opened.source.input_shape
    model = build_network(network, shape).model
    weights = {}
    for where, training in opened.config.trainings.items():
        if training.init is not None:
            with naming(f"config.{where}.init"):
                loaded = load_weights(training.init)
                weights[where] = convert_variables(loaded, network.section, shape)
    return FaceFacts(model, backbone_features(model), weights)


def build_method(
    method: Method | Training, facts: FaceFacts, opened: Opened, where: str
) -> FederatedTrainer | None:
    """Build the trainer of a federated method; a central one needs the images."""
    if isinstance(method, Training):
        return None
    partition, config = opened.split, opened.config
    counts = Counts(
        num_classes=int(partition.num_classes.max()),
        num_clients=len(partition.num_classes),
        num_public=len(partition.public.identities),
        federation=config.federation,
        seed=config.seed,
    )
    return face_method(method, facts.model, counts, where)


def load(opened: Opened, facts: FaceFacts, stream_bytes: int | None) -> FaceData:
    """Load the images, with landmarks if masks are drawn."""
    config = opened.config
    central = config.trainings
    augments = [config.federation.augment, *(x.augment for x in central.values())]
    name_of = lambda entry: entry if isinstance(entry, str) else entry.get("name")
    images = build_face_data(
        opened.source,
        opened.split,
        stream_bytes,
        with_landmarks=any(name_of(x) == "face_mask" for one in augments for x in one),
        with_evaluation_landmarks=config.evaluation.masked_fars is not None,
        preprocessing=build_preprocessing(config.augments, opened.source),
    )
    teachers: dict[str, tuple[Distill | None, Training | Federation]] = {
        where: (training.distill, training) for where, training in central.items()
    }
    for name, method in config.methods.items():
        if isinstance(method, Method):
            teachers[f"methods.{name}"] = method.distill, config.federation
    return cache_embeddings(images, teachers, opened.source, facts.model, opened.mesh)


def pretraining(opened: Opened, facts: FaceFacts, images: FaceData) -> dict:
    """The stage of pretraining, by its name."""
    return {PRETRAINED: Stage(public_training(opened, "pretrain", facts, images))}


def build_stage(
    opened: Opened,
    name: str,
    trainer: FederatedTrainer | None,
    facts: FaceFacts,
    images: FaceData,
) -> Stage:
    """Stage of a method, whose federated trainer starts from the pretrained network."""
    method = opened.config.methods[name]
    if trainer is None or isinstance(method, Training):
        everything, where = public_population(images), f"methods.{name}"
        return Stage(public_training(opened, where, facts, everything))
    if method.adapter is None:
        trainer = trainer._replace(apply_global=facts.embed)
    terms = terms_of(method)
    if not (terms.init_head_from_class_means and terms.use_public_data):
        return Stage(trainer, PRETRAINED)

    def start(variables: PyTree) -> PyTree:
        phi = public_means(facts.model, images, opened.mesh, backbone_of(variables))
        params = {**variables["params"], "phi": phi}
        return trainer.init_variables({**variables, "params": params})

    return Stage(trainer._replace(init_variables=start), PRETRAINED)


def build_evaluators(
    opened: Opened, facts: FaceFacts, images: FaceData, preprocessing: Preprocessing
) -> tuple[dict[str, Evaluator], str]:
    """Build the evaluators generic and personalized."""
    del facts, preprocessing  # `images` have it
    config = opened.config
    evaluator = FaceEvaluator(images, opened.mesh, config.evaluation, config.seed)
    return evaluator.evaluators, evaluator.passed_over


def data_usage(source: Source, p: IdentityPartition) -> DataUsage:
    """Images of clients, of public and of unseen identities, by use."""
    parts = {
        "train": UsedRows(p.train.rows, p.train.client, p.train.labels),
        "test": UsedRows(p.test.rows, p.test.client, p.test.labels),
        "public": UsedRows(p.public.rows, None, p.public.labels),
        "unseen": UsedRows(p.unseen.rows, None, p.unseen.labels),
    }
    return DataUsage(source, parts)


SPEC = TaskSpec(
    name="faces",
    summary="Faces: pretraining on public identities, then the methods.",
    sections={
        "partition": PartitionReader(PARTITIONS, "by_identity"),
        "model": NetworkConfig,
        "pretrain": METHODS.central,
        "evaluation": EvaluationConfig,
    },
    methods=METHODS,
    open=open_task,
    facts=build_facts,
    method=build_method,
    load=load,
    stage=build_stage,
    evaluators=build_evaluators,
    check=check_config,
    first_stages=pretraining,
    inherits_pretrain=True,
)
