"""Disclosure: what leaves a client, who can see it, and what protects it.

It is computed from the traced round of a client, not declared by an algorithm.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import sums
from fedfr_jax.federated.communication import ClientTrace, Communication
from fedfr_jax.types import MEAN, Aggregator, Algorithm, Message, PyTree, Summary

MIB = 2**20


class SentArray(NamedTuple):
    """An array that a client sends, receives or keeps."""

    name: str  # "update/params/head/kernel"
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in bytes, uncompressed."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Disclosure(NamedTuple):
    """What one client of a round sends, receives and keeps."""

    summed: tuple[SentArray, ...]  # sent, and added up over the cohort
    per_client: tuple[SentArray, ...]  # sent, and used for each client alone
    prepared: tuple[SentArray, ...]  # sent before training, for a `prepare`
    prepared_first: tuple[SentArray, ...]  # the same, in the first round only
    received: tuple[SentArray, ...]  # of the server, that the client computes with
    kept: tuple[SentArray, ...]  # stays with the client
    metrics: tuple[str, ...]  # numbers that a run writes down for every client
    communication: Communication
    is_exact: bool  # the update is summed as whole numbers, as a secure sum does
    can_be_exact: bool  # it would be, with the link `quantize`
    covered: str = ""  # description of differential privacy, "" without


def disclose(algorithm: Algorithm, trace: ClientTrace, row: PyTree) -> Disclosure:
    """Compute the disclosure of a method's clients.

    Args:
      trace: of `communication.trace_client` of the same algorithm.
      row: personal state of one client, arrays or shapes.
    """
    output, summary = trace.output, trace.summary
    summed = _named({"sums": output.sums})
    per_client = _named({"per_client": output.per_client})
    if summary is not None:
        update = _named({"update": output.update})
        if bool(sums.without_kept(summary)[1]):
            per_client = [*update, *per_client]
        else:
            summed = [*update, *_named({"links": summary.extra}), *summed]
    return Disclosure(
        summed=tuple(summed),
        per_client=tuple(per_client),
        prepared=_arrays(trace.prepared.sent),
        prepared_first=_arrays(trace.prepared.sent_first),
        received=_arrays(trace.received),
        kept=tuple(_named({"personal": row})),
        metrics=tuple(sorted(output.metrics)),
        communication=trace.communication,
        is_exact=summary is not None and _is_exact(summary),
        can_be_exact=_can_quantize(algorithm.aggregator),
        covered=_covered(algorithm.privacy) if algorithm.privacy else "",
    )


def _covered(privacy: Any) -> str:
    """Describe the privacy mechanism applied to an update."""
    place = "by every client" if privacy.is_local else "by the server, on the sum"
    if privacy.skellam:
        place = "in shares by the clients, for a secure sum that hides single updates"
    quantile, bit = privacy.clip_quantile, ""
    if quantile is not None:
        bit = (
            f", at first: the norm follows their quantile {quantile:g}, for which each "
            "client sends whether it was clipped"
        )
    return (
        f"all that is summed, clipped to {privacy.clip_norm:g} as a whole{bit}, with "
        f"noise of multiplier {privacy.noise_multiplier:g} added {place}; not the "
        "numbers that are written down for every client"
    )


def format_disclosure(method: str, disclosure: Disclosure) -> str:
    """Format a disclosure as text, by who sees what."""
    up, down = disclosure.communication
    lines = [
        f"{method}",
        f"  sent up, {up / MIB:.3g} MiB per client and round",
        *_listed("for what the server prepares", disclosure.prepared, is_needed=False),
        *_listed(
            "for what it prepares in the first round only",
            disclosure.prepared_first,
            is_needed=False,
        ),
        *_listed("summed over the cohort", disclosure.summed),
        *_listed("seen client by client", disclosure.per_client),
        f"  sent down, {down / MIB:.3g} MiB",
        *_listed("read by every client of the cohort", disclosure.received),
        "  stays with the client",
        *_listed("personal state", disclosure.kept),
        f"  the server sees {_seen(disclosure)}.",
        f"  differential privacy covers {disclosure.covered or 'nothing'}.",
        f"  written down for every client: {', '.join(disclosure.metrics)}.",
    ]
    return "\n".join(lines)


def _seen(disclosure: Disclosure) -> str:
    """Describe what the server sees of a client."""
    if not (disclosure.summed or disclosure.per_client):
        seen = "nothing"
    elif any(x.name.startswith("update") for x in disclosure.per_client):
        seen = "each client's update, as its rule or links need all of them"
    elif disclosure.is_exact:
        seen = "the sum over the cohort; a secure sum can hide single updates"
    elif disclosure.can_be_exact:
        seen = (
            "each client's update, of which it needs the sum alone: with the link "
            "`quantize` a secure sum can hide single ones"
        )
    else:
        seen = "each client's update, of which it needs the sum alone"
    if disclosure.prepared or disclosure.prepared_first:
        seen += ", and before it what each client sends for what it prepares"
    return seen


def _listed(
    title: str,
    arrays: Sequence[SentArray],
    max_lines: int = 8,
    *,
    is_needed: bool = True,
) -> list[str]:
    """Lines for arrays, the largest first; for none a line if `is_needed`."""
    if not arrays:
        return [f"    {title}: nothing"] if is_needed else []
    ordered = sorted(arrays, key=lambda x: -x.num_bytes)
    size = sum(x.num_bytes for x in arrays)
    lines = [f"    {title}: {len(arrays)} arrays, {size / MIB:.3g} MiB"]
    lines += [f"      {x.name} {x.shape} {x.dtype}" for x in ordered[:max_lines]]
    rest = len(arrays) - max_lines
    return lines + ([f"      and {rest} more"] if rest > 0 else [])


def _named(tree: PyTree) -> list[SentArray]:
    return [
        _array(trees.path_name(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _arrays(named: Sequence) -> tuple[SentArray, ...]:
    return tuple(_array(name, x) for name, x in named)


def _array(name: str, x) -> SentArray:
    """`x` with its path, without the wrappers of nested algorithms."""
    parts = [part.lstrip(".") for part in name.split("/")]
    return SentArray(
        "/".join(part for part in parts if part != "inner"),
        tuple(x.shape),
        str(x.dtype),
    )


def _can_quantize(aggregator: Aggregator | None) -> bool:
    """Whether the link `quantize` may be added: not to sparse messages, nor to
    a sum that is not plain.
    """
    if aggregator is None:
        return False
    is_plain = aggregator.role == MEAN or aggregator.has_plain_mean
    one = Message((2**20,), (32,))
    return is_plain and not aggregator.compress(one).is_sparse


def _is_exact(summary: Summary) -> bool:
    """Whether the update is summed as integers."""
    leaves = jax.tree.leaves(summary.update)
    return bool(leaves) and all(jnp.issubdtype(x.dtype, jnp.integer) for x in leaves)
