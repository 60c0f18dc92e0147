"""What a federated stage has cost: rounds to a target, and bytes sent."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.stragglers import num_trained
from fedfr_jax.federated.traffic import traffic
from fedfr_jax.runs.begin import Begun
from fedfr_jax.types import Evaluation, Evaluator

MEGABYTE = 1e6


def with_costs(
    found: Mapping[str, Evaluation],
    evaluators: Mapping[str, Evaluator],
    rows: Sequence[Mapping[str, Any]],
    begun: Begun,
    rounds: int,
) -> dict[str, Evaluation]:
    """The evaluations, with rounds to their targets, and a section "communication".

    Args:
      rows: of the stage's metrics.jsonl; where it has lost some, no round to a target
        is told, and a line says so.
      rounds: of the whole stage.
    """
    told = dict(found)
    if lost := set(range(1, rounds + 1)) - {row["round"] for row in rows}:
        _say_lost(lost)
    else:
        for name, of in found.items():
            reached = rounds_to(name, evaluators[name], rows, of)
            told[name] = of._replace(metrics={**of.metrics, **reached})
    sent = communication(begun, rounds)
    return {**told, "communication": Evaluation(sent)} if sent else told


def _say_lost(rounds: set[int]) -> None:
    if meshes.is_first():
        first = ", ".join(map(str, sorted(rounds)[:3]))
        print(
            f"metrics.jsonl has lost {len(rounds)} rounds ({first}...): the rounds "
            "to a target are left out.",
            flush=True,
        )


def rounds_to(
    name: str, evaluator: Evaluator, rows: Sequence[Mapping], found: Evaluation
) -> dict[str, int | None]:
    """{"rounds_to_TARGET": round, from 1, of the first evaluation that reached it}.

    None where none did; nothing where the evaluator has found nothing.
    """

    def first(metric, target):
        values = ((row["round"], row.get(f"{name}/{metric}")) for row in rows)
        reached = (i for i, x in values if x is not None and x >= target)
        return next(reached, None)

    return {
        f"rounds_to_{target:g}": first(metric, target)
        for metric, target in evaluator.targets.items()
        if metric in found.metrics
    }


def communication(begun: Begun, rounds: int) -> dict[str, float]:
    """Megabytes per client and round up and down, and of all clients and rounds."""
    sim = begun.sim
    each = traffic(sim, begun.server, begun.store.template)
    if each is None:
        return {}
    senders = num_trained(sim.stragglers, sim.cohort_size)  # the dropped only receive
    total = (each.up * senders + each.down * sim.cohort_size) * rounds
    sizes = {"up_mb": each.up, "down_mb": each.down, "total_mb": total}
    return {name: size / MEGABYTE for name, size in sizes.items()}
