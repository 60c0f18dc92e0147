"""Correlated noise: each round cancels part of the noise of earlier rounds.

Noise C^-1 z instead of z, with a lower triangular strategy C of one row a round: what
the server sums over rounds has less noise at the same epsilon, provided that a client
waits for `min_separation` rounds before it takes part again (`cyclic` sampling).
Pillutla et al. 2025, "Correlated noise mechanisms", arXiv:2506.08201. The matrices are
jax_privacy's.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.parts import section
from fedfr_jax.ranges import Count
from fedfr_jax.schema import checked


def unit_sensitivity(rounds: int) -> float:
    """Sensitivity of columns of norm 1, of which a client's are orthogonal."""
    del rounds
    return 1.0


@section
class Strategy(NamedTuple):
    """A strategy matrix C for a fixed number of rounds."""

    name: str
    rounds: int  # at most
    min_separation: int  # rounds from one participation of a client to the next
    is_banded: bool  # of orthogonal columns that far apart: amplified by sampling
    noising: Any = None  # C^-1, a `jax_privacy` StreamingMatrix
    # Of C times a client's updates of norm 1, over that many rounds; a participation's
    # own where the strategy is banded.
    sensitivity: Callable[[int], float] = unit_sensitivity


STORED = ("name", "rounds", "min_separation", "is_banded")  # of a strategy in a ledger


@checked
def banded_noise(*, rounds: Count, bands: Count = 8) -> Strategy:
    """Banded Toeplitz strategy, with columns of norm 1.

    Choquette-Choo et al. 2023, arXiv:2306.08153: the mean squared error of prefix sums
    is minimized. Keeps bands - 1 models of noise.

    Args:
      rounds: T, for which it is made.
      bands: in [1, T]; 1 is independent noise.
    """
    from jax_privacy.matrix_factorization import toeplitz

    if bands > rounds:
        raise ValueError(f"bands must be at most the {rounds} rounds, got {bands}.")
    with _plain_float64():
        coef = np.asarray(toeplitz.optimize_banded_toeplitz(rounds, bands))
    return banded_strategy(coef, rounds)


@contextlib.contextmanager
def _plain_float64() -> Iterator[None]:
    """Context for jax_privacy's optimizers: x64 with standard promotion."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def banded_strategy(coef: np.ndarray, rounds: int) -> Strategy:
    """Banded strategy from coefficients [bands] of norm 1, with columns of norm 1."""
    from jax_privacy.matrix_factorization import toeplitz

    return Strategy(
        name="banded",
        rounds=rounds,
        min_separation=len(coef),
        is_banded=True,
        noising=toeplitz.inverse_as_streaming_matrix(
            jnp.float32(coef), column_normalize_for_n=rounds
        ),
    )


@checked
def blt_noise(*, rounds: Count, min_separation: Count = 1) -> Strategy:
    """Buffered linear Toeplitz strategy, with the memory of a few models for any T.

    Dvijotham et al. 2024, arXiv:2404.16706; for several participations McMahan et al.
    2024, arXiv:2408.08868. The largest squared error of prefix sums is minimized. All
    rounds are one Gaussian release: sampling amplifies nothing.

    Args:
      rounds: T, for which it is made.
      min_separation: rounds from one participation of a client to the next, at least.
    """
    from jax_privacy.matrix_factorization import buffered_toeplitz

    max_participations = -(-rounds // min_separation)
    with _plain_float64():
        blt = buffered_toeplitz.optimize(
            n=rounds, min_sep=min_separation, max_participations=max_participations
        )
        coef = np.asarray(blt.toeplitz_coefs(rounds))
    return blt_strategy(blt, coef, min_separation)


def blt_strategy(blt, coef: np.ndarray, min_separation: int) -> Strategy:
    """Strategy of a `BufferedToeplitz` whose first column is `coef` [T]."""
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    def sensitivity(rounds):
        with _plain_float64():
            squared = toeplitz.minsep_sensitivity_squared(
                jnp.asarray(coef[:rounds]), min_separation
            )
        return math.sqrt(float(squared))

    builder = buffered_toeplitz.StreamingMatrixBuilder(
        buf_decay=np.asarray(blt.buf_decay, np.float32),
        output_scale=np.asarray(blt.output_scale, np.float32),
    )
    return Strategy(
        name="blt",
        rounds=len(coef),
        min_separation=min_separation,
        is_banded=False,
        noising=builder.build_inverse(),
        sensitivity=sensitivity,
    )
