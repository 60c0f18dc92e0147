"""Which values a factory's annotations let pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.parts import Factory, parse
from fedfr_jax.ranges import (
    BelowOne,
    ByRound,
    Count,
    NonNegative,
    Positive,
    PositiveShare,
    Seed,
)
from fedfr_jax.schema import broken_rule, checked, has_kind, naming


@pytest.mark.parametrize(
    "kind, right, wrong",
    [
        (int, [3, np.int64(3)], [2.5, 3.0, True, "3", None, (3,)]),
        (float, [3, 2.5], [float("nan"), float("inf"), True, "2.5", None, 10**400]),
        (Sequence[int], [(1, 2), []], [b"x", bytearray(b"x"), "12"]),
        (bool, [True], [1, "true"]),
        (int | tuple[int, ...], [3, (1, 2), [1]], [(1, "a"), (1.5,), {}]),
        (tuple[int, int], [(1, 2)], [(1,), (1, 2, 3), 1]),
        (Sequence[float], [(0.1,), []], [0.1, "0.1", (None,)]),
        (str | Mapping | None, ["a", {}, None], [3, ("a",)]),
        (str | Callable, ["a", print], [3]),
        (np.ndarray | None, [np.zeros(3), (1, 2), None], [3, "a"]),
        ("int", ["an annotation that is text"], []),
    ],
)
def test_a_value_is_of_the_kind_that_the_annotation_names(kind, right, wrong):
    assert [value for value in right if not has_kind(kind, value)] == []
    assert [value for value in wrong if has_kind(kind, value)] == []


@pytest.mark.parametrize(
    "kind, value, rule",
    [
        (Positive, 0, "be positive"),
        (Positive | tuple[Positive, ...], (1.0, -2.0), "be positive"),
        (Positive, 1e-40, "be positive in float32"),
        (PositiveShare, 0, "be in (0, 1]"),
        (BelowOne, jnp.float32(1.0), "be in [0, 1)"),
        (Count, 2**31, "be below 2**31"),
        (Count | None, 0, "be at least 1"),
        (Count | None, "0", "be a whole number or none"),
        (ByRound, (), "have an entry"),
        (Seed, 2**32, "be in [0, 2**32)"),
        (Mapping[str, NonNegative] | None, {"stem": -1}, "be at least 0"),
        (Literal["a", "b"] | None, "c", "be one of ['a', 'b'] or none"),
    ],
)
def test_a_value_out_of_range_is_told_the_range(kind, value, rule):
    assert broken_rule(kind, value) == rule


def test_a_function_that_is_checked_says_the_same_as_a_config():
    @checked
    def sgd(loss, *, momentum: BelowOne = 0.0, kind: Literal["heavy", "nag"] = "nag"):
        return loss, momentum, kind

    assert sgd(None, momentum=np.float32(0.5)) == (None, 0.5, "nag")
    for settings, message in (
        ({"momentum": 1}, r"momentum must be in \[0, 1\), got 1.$"),
        (
            {"kind": "heavi"},
            r"kind must be one of .*, got 'heavi' \(did you mean heavy",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            sgd(None, **settings)
        with pytest.raises(ValueError, match=f"^config.x.{message}"):
            parse(Factory(sgd, num_args=1), settings, "config.x")


def test_a_traced_number_passes_where_a_number_may_stand():
    @jax.jit
    def run(x):
        assert broken_rule(Positive | None, x) == broken_rule(Mapping, {"mu": x}) == ""
        assert broken_rule(Count, x) == "be a whole number"
        return x

    run(jnp.float32(-1.0))


def test_a_file_is_named_once():
    with pytest.raises(ValueError, match="^a.npz: b$"):
        with naming("a.npz"), naming("a.npz"):
            raise ValueError("b")
