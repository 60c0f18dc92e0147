"""Kinds of settings: numbers with their ranges, as annotations of keyword arguments.

`schema` checks them; a choice of words is a `Literal`. A number without an upper bound
has that of int32.

>>> def sgd(*, learning_rate: Positive, momentum: BelowOne = 0.0): ...
"""

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from annotated_types import Interval, MinLen, Predicate

MAX = 2**31 - 1
TINY = 2.0**-126  # smallest positive normal number of float32

Positive = Annotated[float, Interval(ge=TINY, le=MAX)]
NonNegative = Annotated[float, Interval(ge=0, le=MAX)]
Number = Annotated[float, Interval(ge=-MAX, le=MAX)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(ge=TINY, le=1)]
OpenShare = Annotated[float, Interval(gt=0, lt=1)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
Cosine = Annotated[float, Interval(ge=-1, le=1)]

Whole = Annotated[int, Interval(ge=0, le=MAX)]  # 0, 1, 2, ...
Count = Annotated[int, Interval(ge=1, le=MAX)]  # 1, 2, ...
Seed = Annotated[int, Interval(ge=0, lt=2**32)]  # as of NumPy's generators
BatchSize = Annotated[int, Interval(ge=1, le=2**16)]
Width = Annotated[int, Interval(ge=1, le=2**16)]  # of a layer
Widths = Annotated[Sequence[Width], MinLen(1)]
Depth = Annotated[int, Interval(ge=1, le=2**12)]  # layers or blocks
BlockCount = Annotated[int, Interval(ge=0, le=2**12)]  # of a stage
Blocks = Sequence[BlockCount]  # of every stage


class Noun(NamedTuple):
    """What an annotation is called in errors and tables of keys."""

    text: str


def pattern_error(text: str) -> str:
    """Why a text is no regular expression, "" for one."""
    try:
        re.compile(text)
    except re.error as error:
        return str(error)
    return ""


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression."""
    return not pattern_error(text)


Pattern = Annotated[str, Predicate(is_pattern), Noun("regular expression")]

ByRound = Count | Annotated[tuple[Count, ...], MinLen(1)]  # the last entry stays
