"""Classical federated algorithms on faces, judged beside FedFR by the same protocols.

The backbone is trained by an entry of ALGORITHMS on a margin softmax over each client's
own classes; class embeddings stay with the client, as in the FedAvg row of FedFR's
tables, which `algorithm: fedavg` equals. The server's backbone is the generic network,
what the algorithm deploys at a client the personalised one.

Left out: FedDANE, whose server takes the gradient of every client's loss before a round
and would need the class embeddings that stay with them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.aggregators import equally
from fedfr_jax.federated.algorithms.fedatt import l2_norm, spectral_norm
from fedfr_jax.federated.algorithms.fedavg import by_examples, fedavg
from fedfr_jax.federated.algorithms.fednova import momentum_norm, sgd_norm
from fedfr_jax.federated.algorithms.local import local_sgd, sgd, step_decay
from fedfr_jax.federated.algorithms.robust import coordinate_median, trimmed_mean
from fedfr_jax.federated.algorithms.server_optimizers import (
    fedadagrad,
    fedadam,
    fedavgm,
    fedyogi,
)
from fedfr_jax.federated.private import (
    descend,
    hide,
    private_leaves,
    reveal,
)
from fedfr_jax.losses import LOSSES
from fedfr_jax.losses.margin import cosine, softmax_cross_entropy
from fedfr_jax.tasks.face_loss import init_local, masked_mean, personal_features
from fedfr_jax.tasks.methods import FaceMethod
from fedfr_jax.tasks.option_ranges import check_numbers
from fedfr_jax.types import Algorithm, Model, PyTree


class Local(NamedTuple):
    """What local training is made of."""

    loss: Callable
    optimizer: optax.GradientTransformation
    learning_rate: Callable  # (round, epoch) -> []
    rate: float  # of the first epoch
    momentum: float
    num_clients: int

    @property
    def sgd(self) -> tuple:
        """Arguments of `local_sgd`."""
        return self.loss, self.optimizer, self.learning_rate

    @property
    def train(self) -> Callable:
        """Plain local training."""
        return local_sgd(*self.sgd)


# What an algorithm's factory is given before its options.
ARGUMENTS = {
    "apfl": lambda local: local.sgd,
    "ditto": lambda local: local.sgd,
    "fedatt": lambda local: (local.train,),
    "fedavg": lambda local: (local.train,),
    "fednova": lambda local: (local.train,),
    "fedprox": lambda local: local.sgd,
    "fedrep": lambda local: local.sgd,
    "fesem": lambda local: (local.train,),
    "ifca": lambda local: (local.train, local.loss),
    "pfedme": lambda local: local.sgd,
    "qfedavg": lambda local: (local.train, local.loss),
    "robust": lambda local: (fedavg(local.train),),
    "scaffold": lambda local: local.sgd,
}
# Options that follow from the others and are not asked for.
FIXED = {
    "fednova": {
        "norm": lambda local: (
            momentum_norm(local.momentum) if local.momentum else sgd_norm
        )
    },
    "qfedavg": {"learning_rate": lambda local: local.rate},
    "scaffold": {"population": lambda local: local.num_clients},
}
# Options that are functions, by name.
CHOICES = {
    "combine": {"median": lambda: coordinate_median, "trimmed_mean": trimmed_mean},
    "norm": {"l2": lambda: l2_norm, "spectral": lambda: spectral_norm},
    "server_optimizer": {
        "fedadagrad": fedadagrad,
        "fedadam": fedadam,
        "fedavgm": fedavgm,
        "fedyogi": fedyogi,
    },
    "weigh": {"equally": lambda: equally, "examples": lambda: by_examples},
}
CLUSTERED = ("fesem", "ifca")


def classical_faces(
    model: Model,
    name: str,
    make: Callable[[Callable, Mapping[str, Any], tuple, Mapping[str, Any]], Algorithm],
    *,
    num_classes: int,
    num_clients: int,
    options: Mapping[str, Any],
    learning_rate: float = 1e-3,
    decay_epochs: int | tuple[int, ...] = (8, 6, 4, 3),
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    scale: float = 30.0,
    margin: float = 0.4,
    margin_loss: str = "cosface",
    groups: int = 2,
    spread: float = 0.05,
) -> FaceMethod:
    """An entry of ARGUMENTS as a row of the result.

    Args:
      make: (factory, options, arguments, fixed) -> algorithm, which checks the options.
      num_classes: M, the most identities of any client.
      options: of the algorithm's factory.
      learning_rate, decay_epochs, momentum, weight_decay: local SGD of backbone and
        class embeddings, as for `federated_faces`.
      groups, spread: of IFCA and FeSEM: J networks that start from the pretrained one
        plus normal noise of `spread` times the standard deviation of each leaf. Their
        generic network is the mean of all.

    Raises:
      ValueError: for an unknown name or an option out of range.
    """
    check_numbers("", locals())  # every argument that has a range
    if margin_loss not in LOSSES:
        raise ValueError(
            f"margin_loss must be one of {list(LOSSES)}, got {margin_loss!r}."
        )
    if name == "scaffold" and momentum:
        raise ValueError(f"momentum must be 0 with scaffold, got {momentum}.")
    optimizer = sgd(momentum=momentum, weight_decay=weight_decay)
    rate = step_decay(learning_rate, every=decay_epochs)
    loss = own_classes_loss(model, optimizer, LOSSES[margin_loss], scale, margin)
    local = Local(loss, optimizer, rate, learning_rate, momentum, num_clients)
    fixed = {key: of(local) for key, of in FIXED.get(name, {}).items()}
    inner = make(ALGORITHMS[name], options, ARGUMENTS[name](local), fixed)
    init_leaves = init_local(num_classes, model.embedding_dim, branch=None)
    leaves = jax.eval_shape(init_leaves, jax.random.key(0))

    def start(backbone: PyTree, phi: jax.Array) -> PyTree:
        del phi  # no public classes
        server = hide(backbone, leaves, optimizer)
        return several(server, groups, spread) if name in CLUSTERED else server

    algorithm = private_leaves(inner, init_leaves, optimizer, rate)
    deploy = algorithm.personalize
    return FaceMethod(
        algorithm._replace(
            personalize=lambda server, row: {"backbone": deploy(server, row)}
        ),
        start,
        personal_features(model),
        generic=mean_backbone if name in CLUSTERED else one_backbone,
    )


def own_classes_loss(model, optimizer, logits_of, scale, margin) -> Callable:
    """Loss of `local_sgd` over backbone params; it moves the private class embeddings.

    Returns:
      loss(variables, batch, key) of a `PrivateBatch`, with variables of `hide`.
    """

    def criterion(leaves, features, batch):
        head = leaves["head"]
        mask = jnp.arange(len(head), dtype=jnp.int32) < batch.num_classes
        logits = logits_of(
            cosine(features, head), batch.labels, scale=scale, margin=margin
        )
        losses = softmax_cross_entropy(logits, batch.labels, mask)
        return masked_mean(losses, batch.is_valid)

    def loss_fn(variables, batch, key):
        del key
        place = variables["batch_stats"]["private"]
        place = jax.lax.stop_gradient(place)
        features, stats = model.apply(reveal(variables), batch.images, True)
        value = criterion(place["leaves"], features, batch)
        still = jax.lax.stop_gradient(features)
        gradient = jax.grad(criterion)(place["leaves"], still, batch)
        moved = descend(place, gradient, optimizer, batch.rate)
        metrics = {"classification": value}
        return value, ({"shared": stats, "private": moved}, metrics)

    return loss_fn


def several(variables: PyTree, groups: int, spread: float) -> PyTree:
    """`groups` copies [J, ...] of variables, the params of each a little different."""
    leaves, structure = jax.tree.flatten(variables["params"])
    random = np.random.default_rng(0)

    def stack(x):
        noise = random.standard_normal((groups, *x.shape)).astype(x.dtype)
        return x[None] + spread * jnp.std(x) * noise

    params = jax.tree.unflatten(structure, [stack(x) for x in leaves])
    stats = jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (groups, *x.shape)),
        variables["batch_stats"],
    )
    return {"params": params, "batch_stats": stats}


def one_backbone(server: PyTree) -> PyTree:
    """Backbone variables of a server of one network."""
    return reveal(server if isinstance(server, dict) else server.variables)


def mean_backbone(server: PyTree) -> PyTree:
    """Mean of the networks [J, ...] of a server."""
    return jax.tree.map(lambda x: x.mean(0), reveal(server))
