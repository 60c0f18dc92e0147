"""The value of a metric whose first round a table tells."""

from collections.abc import Mapping

from fedfr_jax.types import Evaluator


def with_target(
    evaluators: Mapping[str, Evaluator], metric: str, target: float | None
) -> dict[str, Evaluator]:
    """The evaluators, told the target of a metric; None is none."""
    targets = {} if target is None else {metric: target}
    return {name: of._replace(targets=targets) for name, of in evaluators.items()}
