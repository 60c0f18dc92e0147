"""Where what a margin loss keeps lives, in central and in federated training.

Its running numbers (AdaFace's lengths, CurricularFace's t) lie among the running
statistics, `batch_stats`, under the name NUMBERS. So what happens to statistics happens
to them: central training averages them over devices, algorithms over clients, or every
client keeps its own (`batch_stats: local`). Every stage starts them anew. What it
learns (UniFace's threshold) lies beside the class embeddings, as params/margin, and
stays with a client.
"""

from fedfr_jax.federated.packing import Packed, pack, unpack
from fedfr_jax.losses.contract import Margin
from fedfr_jax.types import Model, PyTree

NUMBERS = "margin_loss"  # no block of a network has this name


def beside(model: Model) -> Model:
    """`model` whose statistics may hold a margin's numbers, which it hands on."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            stats = variables["batch_stats"]
            *outputs, new = function(without_numbers(variables), x, *mode, **key)
            kept = {NUMBERS: stats[NUMBERS]} if NUMBERS in stats else {}
            return *outputs, {**new, **kept}

        return call

    features = model.features and wrapped(model.features)
    return model._replace(apply=wrapped(model.apply), features=features)


def without_numbers(variables: PyTree) -> PyTree:
    """Variables of the network alone."""
    stats = variables["batch_stats"]
    own = {name: x for name, x in stats.items() if name != NUMBERS}
    return {**variables, "batch_stats": own}


def with_start(variables: PyTree, margin: Margin | None) -> PyTree:
    """Variables of a network with the numbers that the margin starts from."""
    own = without_numbers(variables)
    if margin is None or not margin.state:
        return own
    stats = {**own["batch_stats"], NUMBERS: margin.start()}
    return {**own, "batch_stats": stats}


def numbers_of(stats: PyTree) -> PyTree:
    """The running numbers {name: []} among statistics, packed or not."""
    return unpack(stats).get(NUMBERS, {})


def with_numbers(stats: PyTree, numbers: PyTree) -> PyTree:
    """Statistics with other running numbers, packed if they were."""
    if not numbers:
        return stats
    named = {**unpack(stats), NUMBERS: numbers}
    return pack(named) if isinstance(stats, Packed) else named


def learned(margin: Margin | None, num_classes: int) -> PyTree:
    """{"margin": what it learns, as it starts}, or {} where it learns nothing."""
    start = margin.params(num_classes) if margin else {}
    return {"margin": start} if start else {}
