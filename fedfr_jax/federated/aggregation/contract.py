"""Chains of aggregators: the contract of their links.

    chain(clip_by_global_norm(1.0), stochastic_quantize(bits=8), weighted_mean())

A client's update goes through `summarize` of the links from the first to the last, and
what the last one gives is summed over the cohort. The sum comes back through `finish`
from the last link to the first: weighted_mean divides it by the weights, centered_clip
adds its center to the mean. So a link after weighted_mean sees weighted updates and
their sum, one before it updates and their mean.

Links change params and whatever else is trained; running statistics, below a key
"batch_stats", they hand on, see `split`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.types import (
    LAST,
    LINK,
    MEAN,
    Aggregator,
    Algorithm,
    LogScaled,
    PerClient,
    PyTree,
    Summary,
)


class Server(NamedTuple):
    """An algorithm's server, and the state of the links around it."""

    inner: PyTree
    links: PyTree


def chain(*links: Aggregator) -> Aggregator:
    """Aggregators one after the other, as one.

    Raises:
      ValueError: when a link follows one that must stand last, or two are means.
    """
    for number, link in enumerate(links[:-1], 1):
        if link.role == LAST:
            raise ValueError(
                f"aggregation must end with link {number}, which stands in the place "
                f"of the mean, got {len(links) - number} more behind it."
            )
    roles = [link.role for link in links if link.role != LINK]
    if len(roles) > 1:
        raise ValueError(f"aggregation must have one mean, got {len(roles)}.")

    def init(like):
        return tuple(link.init(like) for link in links)

    def summarize(key, state, update, weight):
        extra, metrics = [], {}
        for i, link in enumerate(links):
            given = jax.random.fold_in(key, i), state[i] if state else ()
            summary, found = link.summarize(*given, update, weight)
            update, weight = summary.update, summary.weight
            extra.append(summary.extra)
            metrics = {**found, **metrics}
        return Summary(update, weight, tuple(extra)), metrics

    def finish(key, state, total):
        aggregate, after, metrics = total.update, [*state], {}
        for i, link in reversed([*enumerate(links)]):
            own = total._replace(update=aggregate, extra=total.extra[i])
            given = jax.random.fold_in(key, i), state[i] if state else ()
            aggregate, new, found = link.finish(*given, own)
            after[i : i + 1] = [new] if state else []
            metrics = {**found, **metrics}
        return aggregate, tuple(after), metrics

    # A mean with links around it is no plain one that another may take the place of.
    role = (LAST if len(links) > 1 else roles[0]) if roles else LINK
    return Aggregator(
        no_state if all(link.init is no_state for link in links) else init,
        summarize,
        finish,
        role=role,
        min_clients=max((link.min_clients for link in links), default=1),
    )


def with_aggregation(algorithm: Algorithm, *links: Aggregator) -> Algorithm:
    """`algorithm` whose clients' updates go through `links`.

    Its own mean is the last of them, unless one of them is a mean or stands in the
    place of it.

    Raises:
      ValueError: when the algorithm has no sum of updates, or another than one mean
        where a link would take its place; once `init` has seen the variables, for links
        with a state around an algorithm with several server models.
    """
    if not links:
        return algorithm
    own = algorithm.aggregator
    if own is None:
        raise ValueError(
            f"aggregation must go with updates that are summed, got {algorithm}."
        )
    if own.init is not no_state:
        raise ValueError(
            "aggregation must be one chain, got another around one that has a state. "
            "Give with_aggregation all links at once."
        )
    has_mean = any(link.role != LINK for link in links)
    if has_mean and own.role != MEAN:
        raise ValueError(
            f"aggregation must leave the last place to {algorithm}, which has no plain "
            "mean, but one of its links would take it."
        )
    whole = chain(*links) if has_mean else chain(*links, own)

    def check_cohort(number):
        algorithm.check_cohort(number)
        if number < whole.min_clients:
            raise ValueError(
                f"federation.cohort_size must be at least {whole.min_clients} for this "
                f"aggregation, got {number}. Choose a larger cohort, or other numbers "
                "of clients in `aggregation`."
            )

    chained = algorithm._replace(aggregator=whole, check_cohort=check_cohort)
    return chained if whole.init is no_state else _with_state(chained)


def _with_state(algorithm: Algorithm) -> Algorithm:
    """`algorithm` with the state of its aggregator beside its server."""

    def init(variables):
        inner = algorithm.init(variables)
        like = jax.eval_shape(lambda server: update_like(algorithm, server), inner)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return Server(inner, algorithm.aggregator.init(zeros))

    def server_update(server, result):
        return Server(algorithm.server_update(server.inner, result), result.link_state)

    def prepare(server, context):
        return algorithm.prepare(server.inner, context)

    return algorithm._replace(
        init=init,
        init_personal=lambda key, server: algorithm.init_personal(key, server.inner),
        client_update=lambda key, server, *args: algorithm.client_update(
            key, server.inner, *args
        ),
        server_update=server_update,
        personalize=lambda server, row: algorithm.personalize(server.inner, row),
        global_model=lambda server: algorithm.global_model(server.inner),
        prepare=prepare if algorithm.prepare else None,
        cohort_metrics=_inner_report(algorithm) if algorithm.cohort_metrics else None,
        update_like=lambda server: update_like(algorithm, server.inner),
        link_state=lambda server: server.links,
    )


def _inner_report(algorithm: Algorithm) -> Callable:
    return lambda server, result: algorithm.cohort_metrics(server.inner, result)


def update_like(algorithm: Algorithm, server: PyTree) -> PyTree:
    """A tree with the shapes of a client's update."""
    if algorithm.update_like:
        return algorithm.update_like(server)
    return variable_split.shared(algorithm.global_model(server))


def no_state(like: PyTree) -> PyTree:
    """`Aggregator.init` of a link that keeps nothing."""
    del like
    return ()


def hand_on(key, state, update: PyTree, weight: PyTree) -> tuple[Summary, dict]:
    """`Aggregator.summarize` of a link that changes no update."""
    del key, state
    return Summary(update, weight), {}


def keep(key, state, total: Summary) -> tuple[PyTree, PyTree, dict]:
    """`Aggregator.finish` of a link that does nothing after the sum."""
    del key
    return total.update, state, {}


def split(tree: PyTree) -> tuple[list, list, Callable[[list, list], PyTree]]:
    """(leaves that links change, running statistics, what joins both to such a tree).

    Args:
      tree: an update, or what became of it; `LogScaled` and `PerClient` are leaves.
    """
    is_leaf = lambda x: isinstance(x, LogScaled | PerClient)
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    names = [trees.path_name(path).split("/") for path, _ in found]
    is_change = ["batch_stats" not in name for name in names]
    leaves = [x for _, x in found]

    def part(kind):
        return [x for x, is_of in zip(leaves, is_change, strict=True) if is_of == kind]

    def join(change, statistics):
        parts = {True: iter(change), False: iter(statistics)}
        return structure.unflatten(next(parts[kind]) for kind in is_change)

    return part(True), part(False), join
