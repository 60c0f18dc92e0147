"""Laws of an error that falls as networks and data sets grow.

Each is L = E + sum over j of A_j x_j^-alpha_j, where x is the number of parameters N,
perhaps with the number of images D (Hoffmann et al., Training Compute-Optimal Large
Language Models, 2022, equation 2). A pure power law has one term and no offset E
(Kaplan et al., Scaling Laws for Neural Language Models, 2020, equation 1.1).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Law(NamedTuple):
    """Which terms a law has."""

    name: str
    num_inputs: int  # 1: of N; 2: of N and D
    has_offset: bool

    @property
    def num_coefficients(self) -> int:
        """Exponents, factors and the offset."""
        return 2 * self.num_inputs + self.has_offset

    @property
    def num_points(self) -> int:
        """Different inputs that a fit needs, so that it can miss one."""
        return self.num_coefficients + 1 + self.has_offset


POWER = Law("power", 1, False)
SATURATING = Law("saturating", 1, True)
JOINT = Law("joint", 2, True)
LAWS: Mapping[str, Law] = MappingProxyType(
    {law.name: law for law in (POWER, SATURATING, JOINT)}
)
LEAST_SIZES = 3  # different values of each input
LEAST_FACTOR = 1e-300  # of a term that the runs do not show; its logarithm exists


class Coefficients(NamedTuple):
    """Numbers of a law with d inputs; arrays may have leading axes, as of resamples."""

    exponents: np.ndarray  # [..., d] alpha
    factors: np.ndarray  # [..., d] A, positive
    offset: np.ndarray  # [...] E, 0 without one


def predict(at: Coefficients, inputs: np.ndarray) -> np.ndarray:
    """The error [..., n] of a law at inputs [n, d]."""
    logs = np.log(inputs)  # [n, d]
    powers = -at.exponents[..., None, :] * logs
    terms = np.exp(np.log(at.factors)[..., None, :] + powers)
    return at.offset[..., None] + terms.sum(-1)


def check_points(law: Law, inputs: np.ndarray, errors: np.ndarray) -> None:
    """Raise ValueError for points that the law cannot be fitted to.

    Runs of one size count once: only another size tells an offset from a power.

    Args:
      inputs: [n, d], positive.
      errors: [n], positive.
    """
    if inputs.shape != (len(errors), law.num_inputs):
        want = (len(errors), law.num_inputs)
        raise ValueError(f"inputs must have the shape {want}, got {inputs.shape}.")
    for name, values in (("sizes", inputs), ("errors", errors)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            bad = values[~(np.isfinite(values) & (values > 0))][0]
            raise ValueError(f"{name} must be positive and finite, got {bad}.")
    found = len(np.unique(inputs, axis=0))
    if found < law.num_points:
        raise ValueError(
            f"a {law.name} law must have points of {law.num_points} different sizes, "
            f"got {found}."
        )
    fewest = min(len(np.unique(column)) for column in inputs.T)
    if fewest < LEAST_SIZES:
        raise ValueError(
            f"a {law.name} law must have {LEAST_SIZES} different values of each size, "
            f"got {fewest}."
        )
    if law.num_inputs > 1 and abs(np.corrcoef(np.log(inputs).T)[0, 1]) > 0.999:
        raise ValueError(
            "a joint law must have parameters and data that vary apart, got one that "
            "is a power of the other."
        )
