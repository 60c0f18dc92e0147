"""Context that methods are built in, once the task's data is open."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from fedfr_jax.federated.settings import Federation
from fedfr_jax.tasks.task_methods import TaskMethods
from fedfr_jax.types import Model, PyTree


class MethodContext(NamedTuple):
    """What methods are built from: model, shapes of variables, facts of the data."""

    task: TaskMethods
    model: Model  # over the variables that an algorithm trains
    apply: Callable  # (variables that a client deploys, images) -> output, compiled
    initial: Callable[[], PyTree]  # variables that every method starts from, drawn anew
    shapes: PyTree  # of them
    num_rows: int  # training images of all clients together
    mesh: Mesh | None
    facts: Mapping  # values for algorithms that ask, by the names of their needs
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
        return {**self.facts, **self.task.losses, **self.task.terms}


def method_context(
    task: TaskMethods,
    model: Model,
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
        task=task,
        model=model,
        apply=jax.jit(lambda variables, x: model.apply(variables, x, False)[0]),
        initial=lambda: model.init(key),
        shapes=jax.eval_shape(model.init, key),
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
