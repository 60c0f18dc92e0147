"""Which of the paper's claims hold.

Numbers of the paper are those of arXiv:2205.12144, rank-1 in percent.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from orderings import p_value, verdict
from reid_cases import CAMERA, CENTER, IDENTITY, PARTS, PRETRAINED
from reid_measures import (
    Results,
    large,
    last,
    late,
    local,
    peak,
    small,
    swing,
    values_of,
)

SCENARIOS = (CAMERA, IDENTITY, PARTS)
ALL_STARTS = (*SCENARIOS, PRETRAINED)


class Claim(NamedTuple):
    """That one measure of a row is above a measure of another."""

    text: str
    paper: str  # its numbers
    cases: tuple[str, ...]
    above: tuple[Callable, str]  # (measure, row)
    below: tuple[Callable, str]


CLAIMS = (
    Claim(
        "KD removes the fluctuation",
        "without it, Market: the last of 30 tests 55, best 84.6",
        ALL_STARTS,
        (swing, "fedpav"),
        (swing, "kd"),
    ),
    Claim(
        "KD + CDW removes the fluctuation",
        "Market: the last of 30 tests 87, best 87.2",
        ALL_STARTS,
        (swing, "fedpav"),
        (swing, "kd_cdw"),
    ),
    Claim(
        "KD ends above FedPav",
        "no last tests of KD alone",
        ALL_STARTS,
        (last, "kd"),
        (last, "fedpav"),
    ),
    Claim(
        "KD is above FedPav in the second half of the rounds",
        "not asked",
        (PRETRAINED,),
        (late, "kd"),
        (late, "fedpav"),
    ),
    Claim(
        "CDW is above FedPav in the second half of the rounds",
        "not asked",
        (PRETRAINED,),
        (late, "cdw"),
        (late, "fedpav"),
    ),
    Claim(
        "KD + CDW ends above FedPav",
        "last tests: 41, 75, 87, 78 against 18, 40, 55, 48",
        ALL_STARTS,
        (last, "kd_cdw"),
        (last, "fedpav"),
    ),
    Claim(
        "KD lowers the peak",
        "38.2, 73.3, 83.8, 79.8 against 41.7, 75.6, 84.6, 83.9",
        ALL_STARTS,
        (peak, "fedpav"),
        (peak, "kd"),
    ),
    Claim(
        "KD + CDW raises the peak",
        "42.1, 76.3, 87.2, 79.4 against 41.7, 75.6, 84.6, 83.9",
        ALL_STARTS,
        (peak, "kd_cdw"),
        (peak, "fedpav"),
    ),
    Claim(
        "the center is above FedPav",
        "Market 88.9 against 61.1 by camera, 85.7 by identity; 91.7 against 83.4",
        SCENARIOS,
        (last, "merged"),
        (last, "fedpav"),
    ),
    Claim(
        "local models are above the global one",
        "on all nine sets, by 0.2 to 13.0",
        SCENARIOS,
        (local, "fedpav"),
        (last, "fedpav"),
    ),
    Claim(
        "federation pays small clients",
        "+11.6 to +32.7 on four sets",
        (PARTS,),
        (small, "fedpav"),
        (small, "standalone"),
    ),
    Claim(
        "federation costs large clients",
        "-1.3 to -9.8 on five sets",
        (PARTS,),
        (large, "standalone"),
        (large, "fedpav"),
    ),
    Claim(
        "CDW pays large clients too",
        "+1.2 to +7.3 on five sets",
        (PARTS,),
        (large, "cdw"),
        (large, "standalone"),
    ),
    Claim(
        "CDW is above FedPav, local models",
        "mean gain over standalone 11.3 against 6.8",
        ALL_STARTS,
        (local, "cdw"),
        (local, "fedpav"),
    ),
    Claim(
        "clustering pays large clients",
        "mean gain over standalone 2.2 against -4.6",
        (PARTS,),
        (large, "clustering"),
        (large, "fedpav"),
    ),
    Claim(
        "clustering costs small clients",
        "7.1 against 21.0",
        (PARTS,),
        (small, "fedpav"),
        (small, "clustering"),
    ),
    Claim(
        "by identity is easier than by camera",
        "Market 85.7 against 61.1",
        (IDENTITY,),
        (last, "fedpav"),
        (last, f"{CAMERA}/fedpav"),
    ),
    Claim(
        "the first client's statistics swing more than the mean's",
        "not asked",
        (PARTS,),
        (swing, "fedpav_first"),
        (swing, "fedpav"),
    ),
    Claim(
        "KD calms FedPav with the first client's statistics",
        "as released, where KD renews them too",
        (PARTS,),
        (swing, "fedpav_first"),
        (swing, "kd_first"),
    ),
    Claim(
        "averaging statistics calms more than KD",
        "not asked",
        (PARTS,),
        (swing, "kd_first"),
        (swing, "fedpav"),
    ),
    Claim(
        "clients' own statistics swing less than the mean's",
        "not asked",
        (PARTS,),
        (swing, "fedpav"),
        (swing, "fedpav_local"),
    ),
    Claim(
        "a strong center is above the plain one",
        "fast-reid 94.4 against 88.9",
        (CENTER,),
        (last, "merged_strong"),
        (last, "merged"),
    ),
)


def lines(results: Results) -> Iterator[tuple[Claim, str, np.ndarray]]:
    """(claim, case, difference [seeds]) as far as there are rows to tell."""
    for claim in CLAIMS:
        for case in claim.cases:
            sides = (claim.above, claim.below)
            pair = [values_of(results, case, row, of) for of, row in sides]
            if all(len(values) for values in pair):
                difference = pair[0] - pair[1]
                if np.isfinite(difference).all():
                    yield claim, case, difference


def claims_table(results: Results) -> str:
    """Markdown: a line per claim and case."""
    text = [
        "| claim | the paper | case | difference in points, each seed | p | holds |",
        "|---|---|---|---|---|---|",
    ]
    for claim, case, difference in lines(results):
        shown = ", ".join(f"{100 * d:+.1f}" for d in difference)
        found = f"{p_value(difference):.3f} | {verdict(difference)}"
        text.append(f"| {claim.text} | {claim.paper} | {case} | {shown} | {found} |")
    return "\n".join(text)
