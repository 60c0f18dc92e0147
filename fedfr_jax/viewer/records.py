"""Types of the JSON files of a run, all that lists and pages rely on.

A run may be a stranger's: each file is checked against its type when it is read, and a
file that does not fit is left out (see `run_files`).
"""

from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    ConfigDict,
    FiniteFloat,
    Strict,
    TypeAdapter,
    with_config,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

STRICT = ConfigDict(strict=True, extra="allow")


def _plain_name(name: str) -> str:
    """Refuse a name that leads out of the run's folder."""
    _rule(name not in ("", ".", "..") and not {*"/\0"} & {*name}, "a plain name")
    return name


Number = Annotated[FiniteFloat, Strict()]
MaybeNumber = Number | None  # of a number that is not finite
Count = Annotated[int, Ge(0), Le(2**53)]
PlainName = Annotated[str, AfterValidator(_plain_name)]
Metrics = dict[str, MaybeNumber | list[MaybeNumber] | str]


@with_config(STRICT)
class Data(TypedDict, total=False):
    """Section `data` of a config."""

    name: str


@with_config(STRICT)
class Federation(TypedDict, total=False):
    """Section `federation` of a config."""

    rounds: Count


@with_config(STRICT)
class Config(TypedDict, total=False):
    """config.json."""

    task: str
    data: Data
    federation: Federation
    methods: dict[str, Any]


@with_config(STRICT)
class Summary(TypedDict, total=False):
    """summary.json."""

    methods: dict[PlainName, dict[str, Metrics]]


@with_config(STRICT)
class Environment(TypedDict, total=False):
    """environment.json."""

    versions: dict[str, str]


@with_config(STRICT)
class Table(TypedDict):
    """Images of the first clients, a row each, by class."""

    train: list[list[Count]]


@with_config(STRICT)
class Partition(TypedDict, total=False):
    """partition.json."""

    clients: Count
    client_names: list[str]
    classes: list[str]
    kind: tuple[str, str]  # singular and plural of what the classes are called
    table: Table


def _partition(report: Partition) -> Partition:
    if "table" in report:
        _rule(report.keys() >= {"clients", "classes"}, "a table of classes and clients")
        lengths = {*map(len, report["table"]["train"])}
        _rule(lengths == {len(report["classes"])} != {0}, "a number for each class")
    return report


@with_config(STRICT)
class Seconds(TypedDict, total=False):
    """seconds.json."""

    seconds: Annotated[Number, Ge(0)]


@with_config(STRICT)
class PerClient(TypedDict, total=False):
    """A metric's numbers per client; {} if none is finite."""

    count: Count
    ids: list[Count]
    values: list[Number]  # of these clients
    quantiles: list[Number]  # [101]
    mean: Number
    std: Number


@with_config(STRICT)
class Curve(TypedDict):
    """A curve: values of each field, points or one number."""

    fields: list[str]
    values: list[list[MaybeNumber] | MaybeNumber]


@with_config(STRICT)
class Pair(TypedDict):
    """A pair of images with its score."""

    image: str
    score: Number
    is_same: bool
    names: list[str]


@with_config(STRICT)
class Pairs(TypedDict):
    """Pairs on the wrong side of a threshold."""

    threshold: Number
    shown: list[Pair]


@with_config(STRICT)
class Map(TypedDict):
    """Embeddings in two dimensions."""

    x: list[MaybeNumber]
    y: list[MaybeNumber]
    labels: list[str]
    explained: Number


def _per_client(numbers: PerClient) -> PerClient:
    if numbers:
        _rule(numbers.keys() >= PerClient.__annotations__.keys(), "all numbers")
        _rule(len(numbers["ids"]) == len(numbers["values"]), "as many ids as values")
        _rule(len(numbers["quantiles"]) == 101, "101 quantiles")
    return numbers


def _curve(curve: Curve) -> Curve:
    fields, values = curve["fields"], curve["values"]
    _rule(len(fields) == len(values) >= 2, "values for each of two fields or more")
    points = [x for x in values[:2] if isinstance(x, list)]
    _rule(len({*map(len, points)}) == len(points) - 1 == 1, "two lists of one length")
    return curve


def _curves(curves: dict[str, Curve]) -> dict[str, Curve]:
    if roc := curves.get("roc"):
        _rule(roc["fields"][:2] == ["far", "tar"], "a roc of far and tar")
        counts = dict(zip(roc["fields"], roc["values"], strict=True))
        counts = [counts.get(name) for name in ("num_negatives", "num_positives")]
        _rule(not any(isinstance(x, list) for x in counts), "a number of pairs")
    return curves


def _map(points: Map) -> Map:
    lengths = {len(points[name]) for name in ("x", "y", "labels")}
    _rule(len(lengths) == 1, "as many x as y and labels")
    return points


def _row(row: dict) -> dict:
    """A row whose "round" is an integer, which the type made a float."""
    number = row.get("round")
    is_count = isinstance(number, float) and 0 <= number <= 2**53
    _rule(is_count and number.is_integer(), 'a "round" that counts from 1')
    return {**row, "round": int(number)}


def _rule(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise PydanticCustomError("rule", f"Input should be {rule}")


@with_config(STRICT)
class Evaluation(TypedDict, total=False):
    """One evaluator's part of evaluation.json, see `runs.evaluation_record`."""

    metrics: Metrics
    per_client: dict[str, Annotated[PerClient, AfterValidator(_per_client)]]
    curves: Annotated[
        dict[str, Annotated[Curve, AfterValidator(_curve)]], AfterValidator(_curves)
    ]
    images: list[tuple[str, str]]  # (name, path in the run)
    pairs: dict[str, Pairs]
    maps: dict[str, Annotated[Map, AfterValidator(_map)]]


CONFIG, SUMMARY = TypeAdapter(Config), TypeAdapter(Summary)
ENVIRONMENT, PARTITION = (
    TypeAdapter(Environment),
    TypeAdapter(Annotated[Partition, AfterValidator(_partition)]),
)
SECONDS = TypeAdapter(Seconds)
EVALUATIONS = TypeAdapter(dict[str, Evaluation])
Row = dict[str, MaybeNumber | dict[str, str]]  # its "round" is an int
ROW = TypeAdapter(Annotated[Row, AfterValidator(_row)])  # a line of metrics.jsonl
