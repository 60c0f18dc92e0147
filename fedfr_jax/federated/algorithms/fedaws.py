"""FedAwS: one class per client; the server spreads the class vectors out.

Yu, Rawat, Menon, Kumar 2020, arXiv:2004.10342, algorithm 1: clients pull features to
the row of their own class (`losses.spreadout.class_hinge`), and after averaging the
server steps down
server_learning_rate * lam * grad sum_{c != c'} max(0, margin - d(w_c, w_c'))^2
with d = 1 - cosine. Of a classifier's kernel [D, M] the rows are the columns.
"""

from collections.abc import Callable
from typing import Annotated

import jax
from annotated_types import Interval

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining

Distance = Annotated[float, Interval(ge=0, le=2)]  # of two cosines


@checked
def fedaws(
    local: LocalTraining,
    *,
    spreadout: Callable,
    classes: str,
    margin: Distance = 0.9,
    lam: NonNegative = 10.0,
    server_learning_rate: NonNegative = 0.1,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """FedAvg, then a server step that spreads out the class vectors.

    Args:
      local: the paper's loss is `class_hinge`; the others' work too.
      spreadout: (rows [M, D], margin=cosine from which two are too near) -> [].
      classes: regular expression that matches one leaf [D, M].
      margin: least distance of two classes, in [0, 2].
      lam, server_learning_rate: lambda and eta >= 0, whose product is the step.
      weighting: see `fedavg`.
    """
    base, select = fedavg(local, weighting=weighting), trees.matching(classes)
    gradient = jax.grad(lambda kernel: spreadout(kernel.T, margin=1 - margin))

    def apart(kernel):
        return kernel - lam * server_learning_rate * gradient(kernel)

    def init(variables):
        leaves = _select_classes(select, variables)
        if len(leaves) != 1 or leaves[0].ndim != 2:
            shapes = [x.shape for x in leaves]
            raise ValueError(
                f"classes must match exactly one leaf [D, M], got {shapes}."
            )
        return base.init(variables)

    def server_update(server, result):
        server = base.server_update(server, result)
        move = lambda is_chosen, x: apart(x) if is_chosen else x
        variables = server.variables
        moved = jax.tree.map(move, select(variables), variables)
        return server._replace(variables=moved)

    return base._replace(
        init=init, server_update=server_update, needs=("class_pull_loss",)
    )


def _select_classes(select, variables):
    pairs = zip(
        jax.tree.leaves(select(variables)), jax.tree.leaves(variables), strict=True
    )
    return [x for is_chosen, x in pairs if is_chosen]
