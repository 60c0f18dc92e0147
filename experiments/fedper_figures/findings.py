"""What the figures say: tables, and which of the paper's findings hold.

Pure functions of {case: {seed: {row: {"personalized", "of_client", ...}}}}, as run.py
keeps it.
"""

from collections.abc import Iterator

import numpy as np
from cases import CASES, FEDPER, LAYERS, of_all_classes, parts_of, personal_row
from orderings import made, spread, verdict

FLIPS = 20_000  # of the signs of differences, for a p-value
LINEAR = {"cifar10 resnet k=4": "cifar10 linear k=4"}
LINEAR |= {"cifar100 resnet k=40": "cifar100 linear k=40"}
LINEAR |= {"cifar100 mobilenet k=40": "cifar100 linear_mobilenet k=40"}
LINEAR |= {"cifar10 resnet k=4 r=40": "cifar10 linear k=4 r=40"}
LINEAR |= {"cifar100 resnet k=40 r=40": "cifar100 linear k=40 r=40"}
Results = dict[str, dict]
Line = tuple[str, str, np.ndarray, float | None]  # finding, case, difference, p


def of_clients(results: Results, case: str, row: str) -> np.ndarray:
    """Accuracy of every client, [seeds, N]."""
    return np.array([rows[row]["of_client"] for rows in results[case].values()])


def rows_of(results: Results, case: str) -> list[str]:
    """Rows that every seed of a case has; none of a case that is not played."""
    seeds = results.get(case, {}).values()
    rows = CASES[case] if seeds else ()
    return [row for row in rows if all(row in x for x in seeds)]


def p_value(differences: np.ndarray) -> float:
    """Of a mean as large as that of `differences` [n], if their signs were chance.

    One-sided, by random flips; differences of clients of one seed share a server, so it
    is smaller than it would be for independent ones.
    """
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], (FLIPS, len(differences)))
    means = (signs * differences).mean(axis=1)
    is_as_large = means >= differences.mean() - 1e-12
    return float((1 + is_as_large.sum()) / (1 + FLIPS))


def lines(results: Results) -> Iterator[Line]:
    """The paper's findings, as far as there are rows to tell."""
    for case in results:
        classes, known = parts_of(case).k, rows_of(results, case)
        fedper = personal_row(case)
        if not {"fedavg", fedper} <= set(known) or parts_of(case).unseen:
            continue
        few = classes in (4, 40)
        if classes not in (10, 100):  # with all classes for everybody no winner is told
            yield better(results, "FedPer beats FedAvg", case, fedper, "fedavg")
        if few:
            yield from of_few_classes(results, case, known)


def of_few_classes(results: Results, case: str, known: list[str]) -> Iterator[Line]:
    """What is asked where clients have four or forty classes."""
    fedper = personal_row(case)
    for row in LAYERS[1:]:
        if row in known and row != fedper:
            text = f"K_P = {row[-1]} beats FedAvg"
            yield better(results, text, case, row, "fedavg")
    deviation = lambda case, row: of_clients(results, case, row).std(axis=1)
    narrower = deviation(case, "fedavg") - deviation(case, fedper)
    yield "FedPer's spread over clients is narrower", case, narrower, None
    other, seeds = of_all_classes(case), [*results[case]]
    if rows_of(results, other) and [*results[other]] == seeds:
        gap = lambda case: (
            of_clients(results, case, fedper) - of_clients(results, case, "fedavg")
        ).mean(axis=1)
        text = f"the gap narrows to k = {parts_of(other).k}"
        yield text, case, gap(case) - gap(other), None
        shrinks = deviation(case, "fedavg") - deviation(other, "fedavg")
        yield "FedAvg's spread shrinks with k", case, shrinks, None
    if "finetune" in known:
        yield better(results, "fine-tuning helps", case, "finetune", fedper)
    if "local" in known:
        yield better(results, "training alone is weaker", case, fedper, "local")
    linear = LINEAR.get(case)
    if linear and rows_of(results, linear) and [*results[linear]] == seeds:
        yield better(
            results, "a linear base is worse", case, FEDPER, FEDPER, worse_case=linear
        )


def better(
    results: Results, text: str, case: str, row: str, worse: str, *, worse_case=None
) -> Line:
    """A finding that one row is better than another, client by client."""
    gain = of_clients(results, case, row)
    gain = gain - of_clients(results, worse_case or case, worse)
    return text, case, gain.mean(axis=1), p_value(gain.ravel())


def findings_table(results: Results) -> str:
    """Markdown: a line per finding and case."""
    text = [
        "| the paper | case | difference in points, each seed | p | holds |",
        "|---|---|---|---|---|",
    ]
    for finding, case, difference, p in lines(results):
        shown = ", ".join(f"{100 * d:+.1f}" for d in difference)
        chance = "" if p is None else f"{p:.4f}"
        holds = verdict(difference)
        text.append(f"| {finding} | {case} | {shown} | {chance} | {holds} |")
    return "\n".join(text)


def accuracy_table(results: Results) -> str:
    """Markdown: a line per case and row, in percent."""
    text = [
        "| case | row | mean over clients | deviation over clients | worst | best "
        "| core s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in results:
        for row in rows_of(results, case):
            accuracy = of_clients(results, case, row)
            cost = [
                rows[row]["cost"]["core_seconds"] for rows in results[case].values()
            ]
            cells = [
                spread(accuracy.mean(axis=1)),
                spread(accuracy.std(axis=1)),
                spread(accuracy.min(axis=1)),
                spread(accuracy.max(axis=1)),
                f"{np.mean(cost):.0f}",
            ]
            text.append(f"| {case} | {row} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def unseen_table(results: Results) -> str:
    """Markdown: clients that no round has seen beside those that trained, in percent.

    Empty without a case of such clients.
    """
    text = [
        "| case | row | clients that trained | after fine-tuning | never seen "
        "| after fine-tuning |",
        "|---|---|---|---|---|---|",
    ]
    judged = ("of_client", "finetuned", "unseen", "unseen_finetuned")
    for case in results:
        for row in rows_of(results, case) if parts_of(case).unseen else ():
            runs = [rows[row] for rows in results[case].values()]
            means = [np.array([np.mean(run[x]) for run in runs]) for x in judged]
            text.append(f"| {case} | {row} | {' | '.join(map(spread, means))} |")
    return "\n".join(text) if len(text) > 2 else ""


def text(results: Results) -> str:
    """What stands between the markers of RESULTS.md."""
    stamps = {made(seeds) for seeds in results.values()}
    stamps = "; ".join(sorted({stamp for x in stamps for stamp in x.split("; ")}))
    tables = (findings_table(results), accuracy_table(results), unseen_table(results))
    return "\n\n".join(filter(None, (stamps, *tables)))
