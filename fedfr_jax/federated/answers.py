"""Answers of remote clients, checked where they arrive.

An answer is untrusted: it has exactly the arrays and metrics that the server
expects of the algorithm, each of the expected dtype, shape and number of bytes, and
numbers that a client can have. Anything else is a ValueError that says what is wrong;
nothing is decoded or allocated before its size is known.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated import sums
from fedfr_jax.federated.engine import LaneOutput
from fedfr_jax.ranges import MAX
from fedfr_jax.text import printable
from fedfr_jax.types import Dataset, PerClient, PyTree

LARGEST = 1e15  # size of any number, whose square and sums stay finite in float32
MAX_RATIO = 100  # of a weight to the median of its round
MAX_TEXT, MAX_EXAMPLE = 120, 10_000  # characters: in a log line, of JSON
DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16")
DTYPES += ("float32", "float64")  # of examples


class SentArray(Protocol):
    """An array of NumPy, or one that has travelled."""

    dtype: Any  # or its name
    shape: Any
    data: Any  # in C order; of one that has travelled bytes


class ClientReply(NamedTuple):
    """A client's answer, as it travels."""

    run: str  # as of the task, with `round`
    round: int
    arrays: Mapping[str, SentArray]
    metrics: Mapping[str, float]  # none of a private algorithm


class Answer(NamedTuple):
    """A client's answer that has been checked."""

    total: PyTree  # its terms of the sums
    lane: LaneOutput
    # of its weight, each time that the answer has it, the same number for all clients
    weights: tuple[float, ...]


def quote(value) -> str:
    """Text of an untrusted value for a log line: printable and short."""
    text = printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def to_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Convert a tree to arrays in host memory by name: "params/dense/kernel"."""
    leaves = trees.by_name(jax.device_get(tree))
    return {name: np.asarray(x) for name, x in leaves.items()}


def from_arrays(arrays: Mapping[str, SentArray], template: PyTree) -> PyTree:
    """Convert arrays by name to a tree like `template`.

    Raises:
      ValueError: for an array that is missing, too much, or not like the template's.
    """
    check_names("arrays", arrays, [*trees.by_name(template)])

    def read(path, leaf):
        name = trees.path_name(path)
        return _read_array(name, arrays[name], leaf)

    return jax.tree_util.tree_map_with_path(read, template)


def _read_array(name: str, x: SentArray, leaf) -> np.ndarray:
    dtype = np.dtype(leaf.dtype)
    if isinstance(x, np.ndarray) and x.dtype.kind == "V":  # a file's bfloat16
        x = x.view(dtype)
    num_bytes = x.nbytes if isinstance(x, np.ndarray) else len(x.data)
    actual = str(x.dtype), tuple(x.shape), num_bytes
    expected = str(dtype), tuple(leaf.shape), math.prod(leaf.shape) * dtype.itemsize
    if actual != expected:
        raise ValueError(
            f"{name} must have dtype, shape and bytes {expected}, got {quote(actual)}. "
            "Build server and clients from the same algorithm, variables and version "
            "of fedfr_jax."
        )
    if isinstance(x, np.ndarray):
        return x
    if dtype.kind == "b" and max(x.data, default=0) > 1:
        raise ValueError(f"{name} must be bytes 0 or 1, got {max(x.data)}.")
    return np.frombuffer(x.data, dtype).reshape(leaf.shape)


def check_names(kind: str, actual: Iterable[str], expected: Iterable[str]) -> None:
    """Raise ValueError unless an answer has exactly the expected names."""
    actual, expected = set(actual), set(expected)
    if actual != expected:
        lost, more = (
            ", ".join(map(quote, sorted(x)[:3])) or "nothing"
            for x in (expected - actual, actual - expected)
        )
        raise ValueError(
            f"its {kind} must be those of the algorithm, got {len(actual)} in place of "
            f"{len(expected)}: {lost} is missing and {more} is too much."
        )


def check_round_of(reply: ClientReply, run: str, round: int) -> None:
    """Raise ValueError for an answer to another round or training."""
    actual = reply.run, reply.round
    if actual != (run, round) or isinstance(reply.round, bool):
        raise ValueError(
            f"it must answer round {round + 1} of this training, got one for "
            f"{quote(actual)}."
        )


def read_metrics(metrics: Mapping[str, float], shapes: PyTree) -> dict:
    """Read metrics by name, each a number, in the dtypes of `shapes`."""
    check_names("metrics", metrics, shapes)
    return {name: _number(name, metrics[name], x.dtype) for name, x in shapes.items()}


def _number(name: str, value, dtype) -> np.ndarray:
    is_number = type(value) in (int, float) and abs(value) <= LARGEST
    if np.issubdtype(dtype, np.integer):
        is_number = is_number and value % 1 == 0 and abs(value) <= np.iinfo(dtype).max
    if not is_number:
        raise ValueError(
            f"{name} must be a {np.dtype(dtype)} of size at most {LARGEST:g}, got "
            f"{quote(value)}."
        )
    return np.asarray(value, dtype)


def check_numbers(sent: PyTree) -> None:
    """Raise ValueError for a number that is not finite or too large.

    The log of an empty `LogScaled` is minus infinity.
    """

    def filled(x):
        return x._replace(log=np.where(x.log == -np.inf, 0, x.log))

    sent = jax.tree.map(
        lambda x: filled(x) if sums.is_scaled(x) else x, sent, is_leaf=sums.is_scaled
    )
    for name, x in trees.by_name(sent).items():
        size = float(np.abs(x).max(initial=0)) if x.dtype.kind != "b" else 0.0
        if not size <= LARGEST:
            raise ValueError(
                f"{name} must be finite, of size at most {LARGEST:g}, got {size:g}. "
                "Lower the learning rate."
            )


def check_is_kept(lane: LaneOutput) -> None:
    """Raise ValueError for an update that the client itself says is not to be used."""
    if not lane.is_finite or np.any(lane.metrics.get("dropped", 0) > 0):
        raise ValueError(
            "its update must be finite and within max_norm, but it says that it is not."
        )


def check_counts(extra: PyTree) -> None:
    """Raise ValueError for a private client's count that is not one client's.

    See `privacy.mechanism.next_clip_norm`.
    """
    if any(np.any(np.abs(x) != 0.5) for x in jax.tree.leaves(extra)):
        raise ValueError(
            f"its count of unclipped updates must be 0.5 or -0.5, got {quote(extra)}."
        )


def weights_of(total: PyTree, lane: LaneOutput, is_sent: bool) -> tuple[float, ...]:
    """A client's weight, each time that its answer has it.

    Args:
      is_sent: whether it sends the weight for itself too.

    Raises:
      ValueError: for one that is negative or zero.
    """
    summary = sums.with_kept(total[0], lane.kept)
    is_kept = lambda x: isinstance(x, PerClient)
    kept = jax.tree.leaves(summary.extra, is_leaf=is_kept)
    places = [summary.weight, *(x.tree for x in kept if is_kept(x))]
    places += [lane.weight] if is_sent else []
    return tuple(_positive_weight(tree) for tree in places)


def _positive_weight(tree: PyTree) -> float:
    arrays = sums.arrays_of(tree)
    total = float(sum(np.sum(x, dtype=np.float64) for x in arrays))
    if not total > 0 or min(np.min(x, initial=0) for x in arrays) < 0:
        raise ValueError(f"its weight must be positive, got {total:g}.")
    return total


def check_weights(
    answers: Mapping[int, Answer], max_weight: float = 0.0
) -> dict[int, str]:
    """Find the answers of a round with too large a weight: {client: what is wrong}.

    Args:
      max_weight: that is not too large; 0: MAX_RATIO times the round's median.
    """
    wrong = {}
    for weights in zip(*(answer.weights for answer in answers.values()), strict=True):
        limit = max_weight or MAX_RATIO * statistics.median_low(weights)
        for client, weight in zip(answers, weights, strict=True):
            if weight > limit:
                wrong[client] = (
                    f"its weight must be at most {limit:g}, got {weight:g}. If it has "
                    f"so many examples, set max_weight={weight:g}."
                )
    return wrong


def read_example(text: str) -> Dataset:
    """Read what `remote.describe_example` wrote: shapes of a table of one example.

    Raises:
      ValueError: for any other text.
    """
    try:
        if not isinstance(text, str) or len(text) > MAX_EXAMPLE:
            raise ValueError
        parts = json.loads(text)
        if parts.keys() != {*Dataset._fields} or not all(parts.values()):
            raise ValueError
        return Dataset(**{name: _shapes(tree) for name, tree in parts.items()})
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ValueError(
            f"its examples must be shapes and dtypes by name, got {quote(text)}."
        ) from None


def _shapes(tree) -> PyTree:
    if isinstance(tree, dict):
        return {name: _shapes(x) for name, x in tree.items()}
    shape, dtype = tree
    is_shape = all(type(x) is int and 0 < x <= MAX for x in shape)
    if dtype not in DTYPES or not is_shape or math.prod(shape) > MAX:
        raise ValueError
    return jax.ShapeDtypeStruct((1, *shape), dtype)
