"""What a task offers to its methods."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from fedfr_jax.federated.settings import Federation
from fedfr_jax.tasks.contrastive import with_contrastive_loss
from fedfr_jax.types import Model, PyTree

# Around a method's loss, by the need of its algorithm.
TERMS = MappingProxyType({"contrastive_loss": with_contrastive_loss})


class MethodContext(NamedTuple):
    """What a task offers to its methods."""

    model: Model  # over the variables that an algorithm trains
    apply: Callable  # (variables that a client deploys, images) -> output, compiled
    initial: Callable[[], PyTree]  # variables that every method starts from, drawn anew
    shapes: PyTree  # of them
    # (model, *, settings) -> loss of `LocalTraining`; the settings are keys of a method
    # below `loss`
    loss_of: Callable
    num_rows: int  # training images of all clients together
    mesh: Mesh | None
    facts: Mapping  # values for algorithms that ask, by the names of their needs
    task: str = ""  # its name
    # {need: (model, **keys below `algorithm`) -> loss}, for algorithms whose clients
    # need another loss
    losses: Mapping[str, Callable] = MappingProxyType({})
    terms: Mapping[str, Callable] = TERMS
    loss_name: str = ""  # of `loss_of` in a config, where it has others beside it
    # {"name" of LOSSES, settings} -> (model) -> loss; None: the task has one loss
    other_losses: Callable | None = None
    defaults: Mapping = MappingProxyType({})  # of keys of a federated method
    keys: Collection[str] = ()  # of TASK_KEYS of a method, those that the task knows
    terms_keys: Collection[str] = ()  # of an algorithm that the task itself reads
    algorithm_defaults: Mapping = MappingProxyType({})  # of keys that it knows
    prefix: str = ""  # where the network's params lie, such as "backbone/"
    kept: str = ""  # pattern of leaves that stay with clients whatever a method says
    federation: Federation = Federation()  # for privacy
    seed: int = 0  # draws attackers
    draw: Callable | None = None  # key -> variables; None is the model's own
    draw_kept: Callable | None = None  # key -> those that are `kept`
    start: Callable | None = None  # (variables of the stage before) -> variables
    # (variables of the server) -> those of the evaluated network, where there is one
    # though clients keep leaves
    network: Callable | None = None

    @property
    def offers(self) -> Mapping:
        """Everything that the task offers to algorithms, by the names of their
        needs.
        """
        return {**self.facts, **self.losses, **self.terms}


def method_context(
    model: Model,
    loss_of: Callable,
    *,
    num_clients: int,
    num_rows: int,
    mesh: Mesh,
    seed: int,
    facts: Mapping | None = None,
    **others,
) -> MethodContext:
    """Method context of a task whose model is initialized from the seed.

    Args:
      facts: further offers of the task, by the names of the needs.
      others: fields of `MethodContext`.
    """
    key = jax.random.key(seed)
    return MethodContext(
        model=model,
        apply=jax.jit(lambda variables, x: model.apply(variables, x, False)[0]),
        initial=lambda: model.init(key),
        shapes=jax.eval_shape(model.init, key),
        loss_of=loss_of,
        num_rows=num_rows,
        mesh=mesh,
        facts={
            "num_clients": num_clients,
            "model": model,
            "server_classifier": True,
            "equal_features": True,
            **({"features": True} if model.apply_with_features else {}),
            **(facts or {}),
        },
        seed=seed,
        **others,
    )
