"""The rows of config.methods of faces: FedFR's, classical ones, central ones."""

from collections.abc import Mapping
from functools import partial

from fedfr_jax.central.settings import Training
from fedfr_jax.data.identities import Partition
from fedfr_jax.federated.aggregation import build_links
from fedfr_jax.federated.settings import check_epochs
from fedfr_jax.schema import call, check_choice, check_keys, check_kinds, naming
from fedfr_jax.tasks.faces.classical import (
    TERMS,
    classical_faces,
    classifier,
)
from fedfr_jax.tasks.faces.distilled import open_distill
from fedfr_jax.tasks.faces.methods import FaceMethod, federated_faces
from fedfr_jax.tasks.needs import needs_of
from fedfr_jax.tasks.options import algorithm_maker, algorithm_of, keywords
from fedfr_jax.tasks.row_keys import OWN, own_of
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
    check_choice(f"config.{section}.kind", kind, ("federated", "central"))
    if kind == "central":
        inherited = dict(pretraining)
        if "margin_loss" in options:
            inherited.pop("margin_options", None)  # of another loss
        return call(section, Training, {**inherited, **options})
    counts = {
        "num_classes": int(partition.num_classes.max()),
        "num_clients": len(partition.num_classes),
    }
    algorithm, options = algorithm_of(section, options, "fedfr")
    told = open_distill(section, options.pop("distill", None), model)
    epochs = options.pop("local_epochs", None)
    if epochs is not None:
        check_epochs(f"config.{section}.local_epochs", epochs)
    with naming(f"config.{section}"):
        if algorithm == "fedfr":
            check_of_fedfr(options)
            links = build_links(
                f"{section}.aggregation", options.pop("aggregation", ())
            )
            fixed = {"distill": told, "links": links}
            method = call(section, federated_faces, options, model, **fixed, **counts)
            return method._replace(local_epochs=epochs)
        method = _classical(section, algorithm, options, model, counts, told)
        return method._replace(local_epochs=epochs)


def check_of_fedfr(options: Mapping) -> None:
    """Raise ValueError for a key that rows of all other algorithms have."""
    for key in options.keys() & {*OWN[:4], "optimizer", "layer_rates"}:
        raise ValueError(
            f"{key} must go with another algorithm than fedfr, whose clients keep "
            f"class embeddings, branch and previous network, got {options[key]!r}."
        )


def _classical(section, algorithm, options, model, counts, told) -> FaceMethod:
    """A row of another algorithm than FedFR."""
    fixed = {"num_classes": counts["num_classes"], "distill": told}
    fixed["algorithm"] = algorithm
    facts = {"num_clients": counts["num_clients"], "model": classifier(model)}
    offers = {**facts, **TERMS}
    make, asked = algorithm_maker(section, algorithm, options, offers, "faces")
    terms = [TERMS[need] for need in needs_of(make) if need in TERMS]
    of_loss = {k: p for term in terms for k, p in keywords(term).items()}
    training = keywords(classical_faces).keys() - {*fixed, "own", "terms"}
    others = {*training, *of_loss, *OWN}
    check_keys(f"config.{section}", options, {*asked, *others})
    rest = {key: value for key, value in options.items() if key in others}
    own = own_of(section, rest)
    extra = {key: rest.pop(key) for key in of_loss if key in rest}
    check_kinds(f"config.{section}.", extra, of_loss)
    optimizer = rest.get("optimizer", {})
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    if isinstance(optimizer, Mapping) and optimizer.get("name", "sgd") != "sgd":
        rest = {"momentum": 0.0, "weight_decay": 0.0, **rest}  # the defaults are SGD's
    fixed |= {"own": own, "terms": [partial(term, **extra) for term in terms]}
    return call(section, classical_faces, rest, model, make, **fixed)


def with_implementations(
    row: str, method: FaceMethod | Training, implementations: Mapping[str, Mapping]
) -> FaceMethod | Training:
    """A federated method with itself on others, {implementation: {row: method}}."""
    if isinstance(method, Training):
        return method
    others = {
        implementation: methods[row]
        for implementation, methods in implementations.items()
    }
    return method._replace(implementations=others)
