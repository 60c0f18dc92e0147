"""Types of the JSON files of a run, all that lists and pages rely on.

A run is not trusted: each file is checked against its type when it is read, and a
file that does not fit is left out (see `run_files`).
"""

from typing import Annotated, Any

from annotated_types import Ge, Le, Len
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

FILE = with_config(ConfigDict(strict=True, extra="allow"))  # and all types in it


def _rule(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise PydanticCustomError("rule", "Input should be {rule}", {"rule": rule})


def _plain_name(name: str) -> str:
    """Refuse a name that leads out of the run's folder."""
    _rule(name not in ("", ".", "..") and not {*"/\0"} & {*name}, "a plain name")
    return name


def _equal_lengths(*names: str) -> AfterValidator:
    """Refuse a record whose lists of these names have different lengths."""

    def check(record: Any) -> Any:
        lengths = {len(record[name]) for name in names}
        _rule(len(lengths) == 1, f"as many {', '.join(names)}")
        return record

    return AfterValidator(check)


Float = Annotated[FiniteFloat, Strict()]
Number = Annotated[int, Le(2**53), Ge(-(2**53))] | Float
MaybeFloat = Float | None  # None: not finite
Count = Annotated[int, Ge(0), Le(2**53)]
PlainName = Annotated[str, AfterValidator(_plain_name)]
Metrics = dict[str, Number | None | list[MaybeFloat] | str]


class Data(TypedDict, total=False):
    """Section `data` of a config."""

    name: str


class Federation(TypedDict, total=False):
    """Section `federation` of a config."""

    rounds: Count


@FILE
class Config(TypedDict, total=False):
    """config.json."""

    task: str
    data: Data
    federation: Federation
    methods: dict[str, Any]


@FILE
class Summary(TypedDict, total=False):
    """summary.json."""

    methods: dict[PlainName, dict[str, Metrics]]


@FILE
class Environment(TypedDict, total=False):
    """environment.json."""

    versions: dict[str, str]


class Table(TypedDict):
    """Images of the first clients, a row each, by class."""

    train: list[list[Count]]


@FILE
class Partition(TypedDict, total=False):
    """partition.json."""

    clients: Count
    client_names: list[str]
    classes: list[str]
    kind: tuple[str, str]  # singular and plural of what the classes are called
    table: Table


def _partition(report: Partition) -> Partition:
    if "table" in report:
        _rule("clients" in report, "a table of classes and clients")
        lengths = {*map(len, report["table"]["train"])}
        count = len(report.get("classes", ()))
        _rule(lengths == {count} != {0}, "a number for each class")
    return report


@FILE
class Seconds(TypedDict, total=False):
    """seconds.json."""

    seconds: Annotated[Float, Ge(0)]


class PerClient(TypedDict):
    """A metric's numbers per client."""

    count: Count
    ids: list[Count]
    values: list[Float]  # of these clients
    quantiles: Annotated[list[Float], Len(101, 101)]
    mean: Float
    std: Float


class Curve(TypedDict):
    """A curve: values of each field, lists of one length and numbers, lists first."""

    fields: list[str]
    values: list[list[MaybeFloat] | MaybeFloat]


def _curve(curve: Curve) -> Curve:
    lists = [x for x in curve["values"] if isinstance(x, list)]
    is_first = len(lists) > 1 and curve["values"][:2] == lists[:2]
    _rule(is_first and len({*map(len, lists)}) == 1, "lists of one length, two first")
    return curve


AnyCurve = Annotated[Curve, _equal_lengths("fields", "values"), AfterValidator(_curve)]


class Pair(TypedDict):
    """A pair of images with its score."""

    image: str
    score: Float
    is_same: bool
    names: list[str]


class Pairs(TypedDict):
    """Pairs on the wrong side of a threshold."""

    threshold: Float
    shown: list[Pair]


class Map(TypedDict):
    """Embeddings in two dimensions."""

    x: list[MaybeFloat]
    y: list[MaybeFloat]
    labels: list[str]
    explained: Float


def _curves(curves: dict[str, Curve]) -> dict[str, Curve]:
    if roc := curves.get("roc"):
        values = dict(zip(roc["fields"], roc["values"], strict=True))
        counts = [values.get(name) for name in ("num_negatives", "num_positives")]
        is_counted = not any(isinstance(x, list) for x in counts)
        is_roc = is_counted and roc["fields"][:2] == ["far", "tar"]
        _rule(is_roc, "a roc of far and tar, with numbers of pairs")
    return curves


@FILE
class Evaluation(TypedDict, total=False):
    """One evaluator's part of evaluation.json, see `runs.evaluation_record`."""

    metrics: Metrics
    per_client: dict[str, Annotated[PerClient, _equal_lengths("ids", "values")]]
    curves: Annotated[dict[str, AnyCurve], AfterValidator(_curves)]
    images: dict[str, str]  # paths in the run
    pairs: dict[str, Pairs]
    maps: dict[str, Annotated[Map, _equal_lengths("x", "y", "labels")]]


def _row(row: dict) -> dict:
    """A row whose "round" is an integer, which the type made a float."""
    number = row.get("round")
    is_count = isinstance(number, float) and 0 <= number <= 2**53 and not number % 1
    _rule(is_count, 'a "round" that counts from 1')
    return {**row, "round": int(row["round"])}


CONFIG, SUMMARY = TypeAdapter(Config), TypeAdapter(Summary)
ENVIRONMENT, SECONDS = TypeAdapter(Environment), TypeAdapter(Seconds)
PARTITION = TypeAdapter(Annotated[Partition, AfterValidator(_partition)])
EVALUATIONS = TypeAdapter(dict[str, Evaluation])
Row = dict[str, Any]  # its "round" is an int
RowValues = dict[str, MaybeFloat | dict[str, str]]
ROW = TypeAdapter(Annotated[RowValues, AfterValidator(_row)])  # of metrics.jsonl
