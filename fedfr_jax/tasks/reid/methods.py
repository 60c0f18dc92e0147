"""Methods of re-identification: federated or central.

The key `personal` of a method is the classifier unless it is set; "." for clients that
train alone.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.federated.settings import Federation
from fedfr_jax.models.external_checkpoints import fill_resnet
from fedfr_jax.models.weights import read_weights
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import check_values, naming
from fedfr_jax.tasks.method_context import MethodContext, method_context
from fedfr_jax.tasks.model import build_network, with_name
from fedfr_jax.tasks.reid.data import ReidSplit, fill_statistics
from fedfr_jax.tasks.reid.identity_batches import identity_order, with_identity_batches
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.tasks.task_methods import CENTRAL_KEYS, TaskMethods
from fedfr_jax.tasks.trainers import (
    build_trainer,
    with_initial_weights,
)
from fedfr_jax.types import Algorithm, CentralTrainer, FederatedTrainer, Model, PyTree

METHODS = TaskMethods(
    task="reid",
    loss_of=reid_loss,
    keys=("identities_per_batch",),
    central_keys=(*CENTRAL_KEYS, "identities_per_batch"),
)


class Parts(NamedTuple):
    """What methods are built from, besides a model."""

    federation: Federation
    split: ReidSplit
    people: np.ndarray  # [n] int32 number of each training image's person, of all
    input_shape: tuple[int, ...]
    feed: Batching  # of the clients
    statistics: Callable[[], tuple]  # of their cameras
    facts: Mapping  # {"shared": Shared} where there are public images
    mesh: Mesh
    seed: int

    def balanced(self, algorithm: Algorithm, identities: int, epochs: int) -> Algorithm:
        """Balance an algorithm's batches, for rounds of at most `epochs` epochs."""
        options = {"identities": identities, "epochs": epochs, "seed": self.seed}
        return with_identity_batches(algorithm, self.split, self.feed, **options)


def model_of(settings: Mapping, input_shape, num_classes: int) -> Model:
    """Build the config's model with `num_classes` identities.

    Raises:
      ValueError: for an unknown network, or one without features or of another output.
    """
    network = {**settings, "num_classes": num_classes}
    model, logits, features = build_network(network, input_shape)
    if logits.shape != (1, num_classes) or features is None or features.ndim != 2:
        raise ValueError(
            "config.model must have features and a logit for every identity, got "
            f"{settings['name']!r}."
        )
    return gather(model)


def clients_model(settings: Mapping, parts: Parts) -> Model:
    """Build the clients' model, for the largest number of identities of a client."""
    network = {key: value for key, value in settings.items() if key != "weights"}
    num_classes = int(parts.split.num_classes.max())
    return model_of(with_name("reid", network), parts.input_shape, num_classes)


def trainers_of(
    settings: Mapping, parts: Parts
) -> dict[str, FederatedTrainer | CentralTrainer]:
    """Build {method: trainer} of config.methods; a central one has no data set yet.

    Raises:
      ValueError: naming the method, for anything wrong in it.
    """
    network = with_name("reid", settings["model"])

    def context(classes):
        return with_initial_weights(context_of(network, parts, classes), settings)

    clients = context(int(parts.split.num_classes.max()))
    central = context(int(parts.people.max()) + 1)
    return {
        name: trainer_of(name, options, clients, central, parts)
        for name, options in settings["methods"].items()
    }


def context_of(settings: Mapping, parts: Parts, num_classes: int) -> MethodContext:
    """Build the context of methods with `num_classes` identities; evaluators get
    features.
    """
    settings = dict(settings)
    weights = settings.pop("weights", "")
    model = model_of(settings, parts.input_shape, num_classes)
    context = method_context(
        METHODS,
        model,
        num_clients=parts.split.num_clients,
        num_rows=len(parts.split.train),
        mesh=parts.mesh,
        seed=parts.seed,
        facts=parts.facts,
        federation=parts.federation,
    )
    neck = context.shapes["params"].get("neck", {})
    if neck and "fc" not in neck:  # a bnneck
        facts = {k: v for k, v in context.facts.items() if k != "equal_features"}
        context = context._replace(facts=facts)
    apply = jax.jit(
        lambda variables, x: model.apply_with_features(variables, x, False)[1]
    )
    if weights:
        loaded = pretrained(context.initial(), weights)
        context = context._replace(initial=lambda: loaded)
    return context._replace(apply=apply)


def pretrained(variables: PyTree, path: str) -> PyTree:
    """Load torchvision's ResNet weights into variables.

    Args:
      path: the .pth of a torchvision ResNet, or its tensors under the same names as
        .safetensors or .npz.

    Raises:
      ValueError: naming the file, when its tensors do not fit.
    """
    with naming(path):
        loaded = fill_resnet(variables, read_weights(path).arrays)
    return jax.tree.map(jnp.asarray, loaded)


def trainer_of(
    name: str, options: Mapping, clients: MethodContext, central: MethodContext, parts
) -> FederatedTrainer | CentralTrainer:
    """Build the trainer of a method, by its key `kind`.

    Args:
      clients, central: for federated and for central methods.
      parts: see `Parts`.
    """
    options, section = dict(options), f"config.methods.{name}"
    identities = options.get("identities_per_batch", 0)
    if options.get("kind") == "central":
        batches = {"identities_per_batch": options.pop("identities_per_batch", 0)}
        check_values(f"{section}.", batches, {"identities_per_batch": Whole})
        if "augment" in options:
            options["augment"] = fill_statistics(options["augment"], parts.statistics)
        trainer = build_trainer(name, options, central)
        if identities:
            with naming(section):
                batch = trainer.batching.batch_size
                order = identity_order(parts.people, batch, identities)
            trainer = trainer._replace(batch_order=order)
        return trainer
    classifier = f"params/{clients.model.blocks[-1]}/"
    personal = options.setdefault("personal", classifier)
    trainer = build_trainer(name, options, clients)
    if personal == classifier and options.get("batch_stats") != "local":
        # People are found without it, so the server's network is one for everybody.
        trainer = trainer._replace(global_model=trainer.algorithm.global_model)
    if identities:
        with naming(section):
            epochs = int(np.max(parts.federation.epochs_of(trainer)))
            epochs += options.get("personal_epochs", 0)
            algorithm = parts.balanced(trainer.algorithm, identities, epochs)
        trainer = trainer._replace(algorithm=algorithm)
    return trainer
