"""The rows of config.methods of faces: FedFR's, classical ones, central ones."""

from collections.abc import Mapping

from fedfr_jax.central.settings import Training
from fedfr_jax.data.identities import Partition
from fedfr_jax.federated.settings import check_epochs
from fedfr_jax.schema import call, naming
from fedfr_jax.tasks.faces.classical import UNFIT, classical_faces
from fedfr_jax.tasks.faces.distilled import open_distill
from fedfr_jax.tasks.faces.methods import FaceMethod, federated_faces
from fedfr_jax.tasks.options import algorithm_maker, keywords
from fedfr_jax.types import Model


def methods_of(settings: Mapping, model: Model, partition: Partition) -> dict:
    """{row: method} of config.methods."""
    return {
        name: build_method(name, options, settings["pretrain"], model, partition)
        for name, options in settings["methods"].items()
    }


def build_method(
    name: str,
    options: Mapping,
    pretraining: Mapping,
    model: Model,
    partition: Partition,
) -> FaceMethod | Training:
    """A row of the result: `kind` federated (the default), or central on all images.

    A federated row is FedFR with its terms as options, or another `algorithm` with the
    options of its factory; it may have `local_epochs` of its own, and a teacher,
    `distill`. A central row takes the keys of `pretrain` that it does not set itself.
    """
    section, options = f"methods.{name}", dict(options)
    kind = options.pop("kind", "federated")
    if kind == "central":
        inherited = dict(pretraining)
        if "margin_loss" in options:
            inherited.pop("margin_options", None)  # of another loss
        return call(section, Training, {**inherited, **options})
    if kind != "federated":
        raise ValueError(
            f"config.{section}.kind must be federated or central, got {kind!r}."
        )
    counts = {
        "num_classes": int(partition.num_classes.max()),
        "num_clients": len(partition.num_classes),
    }
    algorithm = options.pop("algorithm", "fedfr")
    told = open_distill(section, options.pop("distill", None), model)
    epochs = options.pop("local_epochs", None)
    if epochs is not None:
        check_epochs(f"config.{section}.local_epochs", epochs)
    if algorithm in UNFIT:
        raise ValueError(
            f"config.{section}.algorithm must not need {UNFIT[algorithm]}, got "
            f"{algorithm!r}."
        )
    with naming(f"config.{section}"):
        if algorithm == "fedfr":
            method = call(
                section, federated_faces, options, model, distill=told, **counts
            )
            return method._replace(local_epochs=epochs)
        others = keywords(classical_faces).keys() - {"num_classes", "distill"}
        make, rest = algorithm_maker(section, algorithm, options, others, counts)
        fixed = {"num_classes": counts["num_classes"], "distill": told}
        method = call(section, classical_faces, rest, model, make, **fixed)
        return method._replace(local_epochs=epochs)


def with_lowered(
    row: str, method: FaceMethod | Training, lowered: Mapping[str, Mapping]
) -> FaceMethod | Training:
    """A federated method with itself on other networks, {lowering: {row: method}}."""
    if isinstance(method, Training):
        return method
    others = {lowering: methods[row] for lowering, methods in lowered.items()}
    return method._replace(lowered=others)
