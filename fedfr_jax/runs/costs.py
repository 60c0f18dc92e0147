"""What a stage's rounds cost: bytes, privacy, energy, rounds to a target."""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedfr_jax.federated.disclosure import count_communication
from fedfr_jax.federated.privacy.accountant import Accountant
from fedfr_jax.federated.systems.failures import num_trained
from fedfr_jax.metric_names import NOT_PRIVATE
from fedfr_jax.runs.loop import StageState
from fedfr_jax.runs.report.run_charts import SIMULATED
from fedfr_jax.runs.sinks import read_jsonl, write_json
from fedfr_jax.types import Evaluation, Evaluator, Experiment

Evaluations = Mapping[str, Evaluation]  # by evaluator
MEGABYTE = 1e6
SPENT = ("energy_kwh", "co2_kg", "price")  # of rounds, see `systems.footprint`
PRIVACY_FILE = "privacy.json"
PRIVACY_NOTE = MappingProxyType(
    {
        "private": ["the global model", "epsilon", "delta", "clip_norm"],
        NOT_PRIVATE: {
            "clients.jsonl": "numbers of single clients",
            "metrics.jsonl": "all but epsilon, delta and clip_norm: exact means over "
            "clients",
            "evaluation.json": "what is marked there: measured on clients' own data",
            "store": "the clients' own state, which never leaves a client",
            "plots and tables": "what is made of these",
        },
    }
)


def with_spent(
    experiment: Experiment,
    evaluations: Evaluations,
    folder: pathlib.Path,
    state: StageState | None,
) -> dict[str, Evaluation]:
    """Add what a federated stage's rounds cost to its evaluations."""
    if state is None:
        return dict(evaluations)
    accountant, rounds = state.sim.accountant, experiment.federation.rounds
    if accountant:  # fewer are trained where the privacy budget ends
        rounds = accountant.rounds_within_budget(rounds)
    rows, evaluators = read_metrics(folder), experiment.task.evaluators
    result = {}
    for name, evaluation in evaluations.items():
        costs = cost_of_target(name, evaluators[name], rows, evaluation)
        result[name] = evaluation._replace(metrics={**evaluation.metrics, **costs})
    if sent := communication(state, rounds):
        result["communication"] = Evaluation(sent)
    if spent := footprint(rows):
        result["footprint"] = Evaluation(spent)
    if accountant and is_private(accountant):
        epsilon, delta = accountant.epsilon_bound(rounds), accountant.mechanism.delta
        result["privacy"] = Evaluation({"epsilon": epsilon, "delta": delta})
    return result


def cost_of_target(
    name: str, evaluator: Evaluator, rows: Sequence[Mapping], evaluation: Evaluation
) -> dict[str, float | None]:
    """{"rounds_to_TARGET": first round, from 1, whose evaluation reached the target}.

    Where clients take time there is "simulated_seconds_to_TARGET" too, the time at the
    end of that round. None if no round reached it; {} if the evaluator gave no such
    metric.
    """
    costs = {}
    is_timed = any(SIMULATED in row for row in rows)
    for metric, target in evaluator.targets.items():
        if metric not in evaluation.metrics:
            continue
        values = ((row, row.get(f"{name}/{metric}")) for row in rows)
        reached = (row for row, x in values if x is not None and x >= target)
        first = next(reached, {})
        costs[f"rounds_to_{target:g}"] = first.get("round")
        if is_timed:
            costs[f"{SIMULATED}_to_{target:g}"] = first.get(SIMULATED)
    return costs


def communication(state: StageState, rounds: int) -> dict[str, float]:
    """Megabytes per client and round, uploaded and downloaded, and in total."""
    sim = state.sim
    sizes = count_communication(sim, state.server, state.store.template)
    if sizes is None:
        return {}
    settings = sim.settings
    # The dropped ones only receive.
    senders = num_trained(settings.stragglers, settings.cohort_size)
    total = (sizes.up * senders + sizes.down * sim.num_places) * rounds
    megabytes = {"upload_mb": sizes.up, "download_mb": sizes.down, "total_mb": total}
    return {name: size / MEGABYTE for name, size in megabytes.items()}


def footprint(rows: Sequence[Mapping]) -> dict[str, float]:
    """Energy, CO2 and price of all rounds that were logged; {} if none has any.

    Args:
      rows: lines of metrics.jsonl.
    """
    costs = [row for row in rows if SPENT[0] in row]
    return {name: sum(row[name] for row in costs) for name in SPENT if costs}


def read_metrics(folder: pathlib.Path) -> list[dict]:
    """Lines of a stage's metrics.jsonl; [] if it has none yet."""
    try:
        return read_jsonl(folder / "metrics.jsonl")
    except FileNotFoundError:
        return []


def is_private(accountant: Accountant) -> bool:
    """Whether rounds are private: clipping without noise is not."""
    return accountant.mechanism.noise_multiplier > 0


def note_privacy(accountant: Accountant | None, folder: pathlib.Path) -> None:
    """Write privacy.json of a private method: what in its folder is private."""
    if accountant and is_private(accountant):
        neighbors = {"neighbors": accountant.mechanism.neighbors}
        write_json(folder / PRIVACY_FILE, neighbors | {**PRIVACY_NOTE})
