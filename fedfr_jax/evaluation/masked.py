"""The score of the masked face recognition challenge, on any identities.

ICCV 2021 MFR workshop: 0.25 FNMR of masked faces + 0.75 FNMR of standard ones, each at
a false positive rate, so lower is better. A masked pair is an image with a mask and
another one without; a standard pair has none.
"""

from collections.abc import Sequence

import jax
import numpy as np

from fedfr_jax.evaluation.blocks import gallery_blocks, pair_blocks, unit
from fedfr_jax.evaluation.scores import (
    check_rates,
    exact_points,
    far_ranks,
    marked_name,
)

MASKED, STANDARD = 0.25, 0.75  # weights


def masked_scores(
    plain: jax.Array, masked: jax.Array, labels, *, fprs: Sequence[float]
) -> dict[str, float]:
    """Exact FNMR and their weighted sum at each rate; an image never meets itself.

    Args:
      plain: [Q, D] of images without a mask, normalised here.
      masked: [Q, D] of the same images with one.
      labels: [Q] int.
      fprs: rates in (0, 1); names of those that so few pairs do not support end in "~".

    Returns:
      {"masked_fnmr@fpr=1e-05", "standard_fnmr@fpr=1e-05", "score@fpr=1e-05", ...}, in
      [0, 1].

    Raises:
      ValueError: without positive or negative pairs, or for bad features.
    """
    check_rates("FPR", fprs)
    everybody = np.ones(len(labels), bool)
    standard = pair_blocks(plain, labels, everybody)
    crossed = gallery_blocks(masked, labels, unit(plain), labels, is_same_set=True)
    points = [exact_points(blocks, far_ranks(fprs)) for blocks in (crossed, standard)]
    fewest = min(p.num_negatives for p in points)
    found = {}
    for i, fpr in enumerate(fprs):
        of_masked, of_standard = (float(1 - p.tar[i]) for p in points)
        score = MASKED * of_masked + STANDARD * of_standard
        values = {"masked_fnmr": of_masked, "standard_fnmr": of_standard}
        for name, value in {**values, "score": score}.items():
            found[marked_name(f"{name}@fpr", fpr, fewest)] = value
    return found
