"""Which values a factory's annotations let pass."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from fedfr_jax.schema import call, choose, has_kind, naming


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


def factory(*, rounds: int = 1, fars: Sequence[float] = (), name: str = "a"):
    raise {"a": KeyError("b"), "c": OverflowError("\ntwo\nlines")}[name]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rounds": 2.5}, "config.x.rounds must be a whole number, got 2.5."),
        ({"fars": "a"}, "config.x.fars must be a list of finite numbers, got 'a'."),
        ({}, "config.x must be usable as {}, got KeyError: 'b'."),
        ({"name": "c"}, "config.x must be usable as .*, got OverflowError: two lines."),
    ],
)
def test_whatever_a_factory_makes_of_its_settings_is_one_line(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call("x", factory, settings)
    with pytest.raises(ValueError, match="name must be one of .*got ..a.."):
        choose("x", {"a": factory}, {"name": ["a"]})


def test_a_seed_is_one_that_every_generator_takes():
    def drawn(*, seed=0):
        return np.random.RandomState(seed).random()

    assert call("x", drawn, {"seed": 2**32 - 1}) != call("x", drawn, {})
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=r"^config.x.seed must .*2\*\*32\), got"):
            call("x", drawn, {"seed": seed})
    assert call("x", lambda seed=None: seed, {"seed": None}) is None


def test_a_file_is_named_once():
    with pytest.raises(ValueError, match="^a.npz: b$"):
        with naming("a.npz"), naming("a.npz"):
            raise ValueError("b")
