"""Settings become typed values, or one error of all that is wrong with them."""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import pytest

from fedfr_jax.parts import (
    INLINE,
    Built,
    Factory,
    Member,
    Part,
    SectionReader,
    Several,
    call,
    choose,
    parse,
    section,
)
from fedfr_jax.ranges import Count, NonNegative, Share


def resnet(shape, *, depth: Count, act: Literal["relu", "gelu"] = "relu"):
    return "resnet", shape, depth, act


def mlp(shape, *, width: Count = 8):
    return "mlp", shape, width


def clip(*, max_norm: NonNegative = 1.0):
    if max_norm == 7:
        raise ValueError("max_norm must be lucky, got 7.")
    return "clip", max_norm


MODELS = {"resnet": resnet, "mlp": mlp}
LINKS = {"clip": clip}


@section
class Inner(NamedTuple):
    share: Share
    steps: Count = 3


@section
class Run(NamedTuple):
    model: Annotated[Part, Member(MODELS, "mlp", num_args=1), INLINE]
    links: Annotated[tuple, Several(Built(Member(LINKS)))] = ()
    inner: Inner | None = None
    flag: bool | Annotated[Part, Factory(clip)] = False
    rounds: Count = 1

    def check(self):
        if self.inner and self.rounds > 9:
            raise ValueError("rounds must be below 10 with inner.")


def test_a_section_is_typed_and_a_part_waits_for_its_arguments():
    given = {"name": "resnet", "depth": 2, "links": ["clip", {"name": "clip"}]}
    run = parse(Run, {**given, "inner": {"share": 0.5}, "flag": {"max_norm": 2}})
    assert run.model((4, 4)) == ("resnet", (4, 4), 2, "relu")
    assert run.links == (("clip", 1.0),) * 2 and run.inner == Inner(0.5)
    assert run.flag() == ("clip", 2) and run.rounds == 1
    plain = parse(Run, {"links": "clip"})
    assert plain.model(1) == ("mlp", 1, 8) and plain.links == (("clip", 1.0),)
    assert plain.inner is None and plain.flag is False


def test_every_mistake_is_in_the_message():
    wrong = {
        "name": "resnet",
        "act": "rel",
        "widht": 3,
        "links": ["clop", {"name": "clip", "max_norm": -1}],
        "inner": {"share": 2, "step": 1},
        "rounds": 0,
        "flag": "yes",
    }
    with pytest.raises(ValueError) as error:
        parse(Run, wrong)
    assert {*str(error.value).splitlines()} == {
        "config.act must be one of ['relu', 'gelu'], got 'rel' (did you mean relu?).",
        "config must have keys of ['act', 'depth'], got 'widht'.",
        "config needs the key depth.",
        "config.links[0].name must be one of ['clip'], got 'clop' (did you mean "
        "clip?).",
        "config.links[1].max_norm must be at least 0, got -1.",
        "config.inner.share must be in [0, 1], got 2.",
        "config.inner must have keys of ['share', 'steps'], got 'step' (did you mean "
        "steps?).",
        "config.rounds must be at least 1, got 0.",
        "config.flag must be true or false or a mapping, got 'yes'.",
    }


@pytest.mark.parametrize(
    "value, words",
    [
        (3, "config must be a mapping, got 3."),
        ({"links": 3}, "config.links must be a text or a mapping or a list, got 3."),
        ({"name": 3}, "config.name must be one of ['mlp', 'resnet'], got 3."),
        ({"inner": [1]}, "config.inner must be a mapping or none, got (1,)."),
        (
            {"inner": {"share": 1}, "rounds": 10},
            "config: rounds must be below 10 with inner.",
        ),
        (
            {"links": {"name": "clip", "max_norm": 7}},
            "config.links: max_norm must be lucky, got 7.",
        ),
    ],
)
def test_a_value_of_another_kind_is_one_line(value, words):
    with pytest.raises(ValueError) as error:
        parse(Run, value)
    assert str(error.value) == words


def test_a_name_alone_stands_for_its_section():
    @section
    class Way(NamedTuple):
        name: Literal["fixed", "shuffle"]
        size: Count = 2

    way = SectionReader(Way, by_name=True)
    assert parse(way, "fixed") == Way("fixed")
    assert parse(way, {"name": "shuffle", "size": 3}) == Way("shuffle", 3)


def test_what_a_part_gets_later_is_no_setting():
    def make(local, *, momentum: Share, keep: Share = 0.5, task: Callable):
        return local, momentum, keep, task

    reader = Factory(make, num_args=1, later=("momentum",), hidden=("task",))
    part = parse(reader, {"keep": 1.0})
    assert part("x", momentum=0.1, task=abs) == ("x", 0.1, 1.0, abs)
    assert parse(reader, {"momentum": 0.9})("x", momentum=0.1, task=abs)[1] == 0.9
    with pytest.raises(ValueError, match=r"keys of \['keep', 'momentum'\], got 'task'"):
        parse(reader, {"task": abs})


def broken(*, name: str = "a"):
    raise {"a": KeyError("b"), "c": OverflowError("\ntwo\nlines")}[name]


def test_whatever_a_factory_makes_of_its_settings_is_one_line():
    for settings, words in (
        ({}, "config.x must be usable as {}, got KeyError: 'b'."),
        ({"name": "c"}, "config.x must be usable as .*, got OverflowError: two lines."),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            call("config.x", broken, settings)
    with pytest.raises(ValueError, match="name must be one of .*got ..a.."):
        choose("config.x", {"a": broken}, {"name": ["a"]})
