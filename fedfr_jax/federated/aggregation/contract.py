"""Chains of aggregators, and the contract of their links.

    chain(clip_by_global_norm(max_norm=1.0), top_k(fraction=0.1), weighted_mean())

A client's update goes through `summarize` of the links from the first to the last, and
the last summary is added up over the cohort. The sum goes through `finish` from the
last link to the first: weighted_mean divides it by the weights, centered_clip adds its
center to the mean. So a link after weighted_mean sees weighted updates and their sum,
one before it updates and their mean.

A link with `mix` needs all updates at once: it and the links after it run on the
server, over the rows that it makes of the updates.

Links change params and whatever else is trained, but not running statistics, which are
below a key "batch_stats", see `split`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import sums, variable_split
from fedfr_jax.federated.contract_checks import check_returned, check_same
from fedfr_jax.types import (
    LAST,
    LINK,
    MEAN,
    SUM,
    Aggregator,
    Algorithm,
    ClientLinks,
    LinkState,
    LogScaled,
    Message,
    PerClient,
    PyTree,
    Summary,
    no_state,
)

FINISHED = "aggregate", "state", "metrics"  # what `finish` of a link returns


class ServerWithLinks(NamedTuple):
    """An algorithm's server state, and the state of its aggregation links."""

    inner: PyTree
    links: PyTree


class PersonalWithLinks(NamedTuple):
    """An algorithm's personal state, and the client state of its aggregation links."""

    inner: PyTree
    links: ClientLinks


def chain(*links: Aggregator) -> Aggregator:
    """Combine aggregators to one, applied in order."""
    for number, link in enumerate(links[:-1], 1):
        if link.role == LAST:
            raise ValueError(
                f"aggregation must end with link {number}, which replaces the mean, "
                f"got {len(links) - number} links after it."
            )
    means = [link.role for link in links if link.role in (MEAN, LAST)]
    if len(means) > 1:
        raise ValueError(f"aggregation must have exactly one mean, got {len(means)}.")
    for number, link in enumerate(links):
        if link.mix:
            rest = chain(*links[number + 1 :])
            if rest.role == LINK:
                raise ValueError(
                    "aggregation needs a mean, or a rule that replaces it, after link "
                    f"{number + 1}, in the same chain."
                )
            mixed = on_all_updates(link, rest)
            return chain(*links[:number], drop_non_finite(), mixed)

    stateless = ((),) * len(links)

    def init(like):
        return tuple(link.init(like) for link in links)

    def init_personal(like):
        return tuple(x.init_personal(like) if x.init_personal else () for x in links)

    def summarize(key, state, update, weight):
        extra, personal, metrics = [], [], {}
        shared, own = state if isinstance(state, LinkState) else (state, ())
        for i, link in enumerate(links):
            link_state = (shared or stateless)[i]
            if link.init_personal:
                link_state = LinkState(link_state, own[i])
            link_key = jax.random.fold_in(key, i)
            returned = link.summarize(link_key, link_state, update, weight)
            where = f"summarize of aggregation's link {i + 1}"
            summary, found = check_returned(where, returned, ("Summary", "metrics"))
            if link.role == LINK:
                check_same(f"the update of {where}", summary.update, update)
            update, weight = summary.update, summary.weight
            extra.append(summary.extra)
            personal.append(summary.personal)
            metrics = {**found, **metrics}
        return Summary(update, weight, tuple(extra), tuple(personal)), metrics

    def finish(key, state, total):
        aggregate, states, metrics = total.update, list(state or stateless), {}
        for i, link in reversed([*enumerate(links)]):
            link_key = jax.random.fold_in(key, i)
            link_total = total._replace(update=aggregate, extra=total.extra[i])
            returned = link.finish(link_key, states[i], link_total)
            where = f"finish of aggregation's link {i + 1}"
            new, states[i], found = check_returned(where, returned, FINISHED)
            if link.role == LINK:
                check_same(f"the aggregate of {where}", new, aggregate)
            aggregate = new
            metrics = {**found, **metrics}
        return aggregate, state and tuple(states), metrics

    def compress(message):
        return functools.reduce(lambda x, link: link.compress(x), links, message)

    role = SUM if any(link.role == SUM for link in links) else LINK
    if means:  # a mean with links around it cannot be replaced by another one
        role = LAST if len(links) > 1 else means[0]
    return Aggregator(
        no_state if all(link.init is no_state for link in links) else init,
        summarize,
        finish,
        role,
        min_clients=max((link.min_clients for link in links), default=1),
        max_clients=min((link.max_clients for link in links), default=math.inf),
        init_personal=init_personal if any(x.init_personal for x in links) else None,
        max_malicious=lambda number: min(x.max_malicious(number) for x in links),
        compress=compress,
        has_plain_mean=any(x.role == MEAN or x.has_plain_mean for x in links),
    )


def on_all_updates(link: Aggregator, rest: Aggregator) -> Aggregator:
    """Apply `link.mix` to all clients' updates, then aggregate by `rest`.

    On the server, with K updates in memory; random numbers of the links of `rest` are
    functions of (seed, round, row).
    """
    mix, size = link.mix, link.clients_per_row
    assert mix
    if rest.init_personal:
        raise ValueError(
            "aggregation must have links with error feedback before those that need "
            "all updates, got one after. Put it first, or set error_feedback=False."
        )

    def finish(key, state, total):
        mix_key, rows_key, rest_key = jax.random.split(key, 3)
        updates, weights = mix(mix_key, total.update.tree, total.extra.tree)
        rows = jnp.arange(len(jax.tree.leaves(weights)[0]), dtype=jnp.int32)

        def summarize_row(row, update, weight):
            row_key = jax.random.fold_in(rows_key, row)
            summary, metrics = rest.summarize(row_key, state, update, weight)
            # `PerClient` parts must not be summed over the rows.
            return *sums.without_kept(summary), metrics

        summary, single, metrics = jax.vmap(summarize_row)(rows, updates, weights)
        total = sums.with_kept(sums.over_lanes(summary), single)
        aggregate, state, rest_metrics = rest.finish(rest_key, state, total)
        means = {name: x.mean() for name, x in metrics.items() if name != "dropped"}
        return aggregate, state, {**means, **rest_metrics}

    def max_malicious(number):
        num_rows = -(-number // size)
        return min(link.max_malicious(number), rest.max_malicious(num_rows))

    return Aggregator(
        rest.init,
        keep_update,
        finish,
        role=LAST,
        min_clients=max(link.min_clients, (rest.min_clients - 1) * size + 1),
        max_clients=rest.max_clients * size,
        max_malicious=max_malicious,
        compress=rest.compress,
    )


def keep_update(key, state, update: PyTree, weight: PyTree) -> tuple[Summary, dict]:
    """Keep an update and its weight, unsummed, as `Aggregator.summarize`."""
    del key, state
    return Summary(PerClient(update), weight, PerClient(weight)), {}


def drop_non_finite() -> Aggregator:
    """Give updates with nan or infinity the weight 0.

    The metric `dropped` is 1 for such a client, 0 for the others.
    """

    def summarize(key, state, update, weight):
        del key, state
        sent = Summary(update, weight)
        is_finite = trees.is_finite(sent)
        dropped = jnp.where(is_finite, 0.0, 1.0)
        return trees.where(is_finite, sent, sums.zero_sums(sent)), {"dropped": dropped}

    return Aggregator(summarize=summarize)


def with_aggregation(algorithm: Algorithm, *links: Aggregator) -> Algorithm:
    """Apply `links` to the updates of an algorithm's clients.

    The algorithm's mean comes after them, unless one of them is a mean or replaces it.

    Raises:
      ValueError: when the algorithm has no sum of updates, or another than one mean
        where a link would take its place; once `init` has seen the variables, for links
        with a state around an algorithm with several server models.
    """
    if not links:
        return algorithm
    for number, link in enumerate(links, 1):
        if not isinstance(link, Aggregator):
            kind = type(link).__name__
            raise ValueError(
                f"link {number} of the aggregation must be an Aggregator, got a {kind}."
            )
    mean, parts = aggregator_of(algorithm, "aggregation"), [*links]
    if mean.init is not no_state:
        raise ValueError(
            "aggregation must be one chain, got a second one around a chain with "
            "state. Pass all links to one call of with_aggregation."
        )
    has_mean = any(link.role in (MEAN, LAST) for link in links)
    if (has_mean or any(link.mix for link in links)) and mean.role != MEAN:
        raise ValueError(
            f"aggregation cannot replace the mean of {algorithm}, whose aggregation is "
            "not a plain mean. Remove the link that replaces it."
        )
    if not has_mean:  # in front of the links that change the sum
        parts = sorted([*links, mean], key=lambda link: link.role == SUM)
    whole = chain(*parts)
    whole.compress(Message((2**20,), (32,)))  # raises for links that do not fit

    def check_cohort(number):
        algorithm.check_cohort(number)
        if number < whole.min_clients:
            raise ValueError(
                f"federation.cohort_size must be at least {whole.min_clients} for this "
                f"aggregation, got {number}. Choose a larger cohort, or fewer "
                "malicious clients or clients to keep in `aggregation`."
            )
        if number > whole.max_clients:
            raise ValueError(
                f"federation.cohort_size must be at most {whole.max_clients} for this "
                f"aggregation, got {number}: its sum could overflow 32 bits. Choose a "
                "smaller cohort, or fewer levels of quantize."
            )

    chained = algorithm._replace(aggregator=whole, check_cohort=check_cohort)
    if whole.init_personal:
        chained = _with_personal_state(chained, whole.init_personal)
    return chained if whole.init is no_state else _with_state(chained, whole.init)


def aggregator_of(algorithm: Algorithm, what: str) -> Aggregator:
    """The aggregator of an algorithm; ValueError that `what` needs one without it."""
    if algorithm.aggregator is None:
        raise ValueError(
            f"{what} needs an algorithm whose updates are summed, got {algorithm}."
        )
    return algorithm.aggregator


def _with_personal_state(algorithm: Algorithm, init: Callable) -> Algorithm:
    """Add the links' state at a client to an algorithm's personal state.

    The engine updates it after `summarize`, see `keep_at_client`.
    """

    def init_personal(key, server):
        links = ClientLinks(init(zero_update(algorithm, server)))
        return PersonalWithLinks(algorithm.init_personal(key, server), links)

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal.inner, client)
        return output._replace(personal=personal._replace(inner=output.personal))

    return algorithm._replace(
        init_personal=init_personal,
        client_update=client_update,
        personalize=lambda server, own: algorithm.personalize(server, own.inner),
    )


def _with_state(algorithm: Algorithm, init_links: Callable) -> Algorithm:
    """Add the state of the links to an algorithm's server state."""
    inside = on_inner(algorithm)

    def init(variables):
        inner = algorithm.init(variables)
        return ServerWithLinks(inner, init_links(zero_update(algorithm, inner)))

    def server_update(server, result):
        server = inside.server_update(server, result)
        return server._replace(links=result.link_state)

    return inside._replace(
        init=init,
        server_update=server_update,
        link_state=lambda server: server.links,
    )


def state_at_client(algorithm: Algorithm, server: PyTree, personal: PyTree) -> PyTree:
    """State that the aggregator's `summarize` receives at a client."""
    shared = algorithm.link_state(server)
    for node in jax.tree.leaves(personal, is_leaf=_is_links):
        if _is_links(node):
            return LinkState(shared, node.state)
    return shared


def keep_at_client(personal: PyTree, state: PyTree) -> PyTree:
    """Replace the links' state in `personal` by `state`, if they have any."""
    replace = lambda x: ClientLinks(state) if _is_links(x) else x
    return jax.tree.map(replace, personal, is_leaf=_is_links)


def _is_links(x) -> bool:
    return isinstance(x, ClientLinks)


def on_inner(algorithm: Algorithm) -> Algorithm:
    """Apply an algorithm to the field `inner` of another server's state."""

    def server_update(server, result):
        return server._replace(inner=algorithm.server_update(server.inner, result))

    def inside(function, place=0):
        """The function, whose argument at `place` is a server's state."""
        if function is None:
            return None

        @functools.wraps(function)  # errors name the factory of the algorithm
        def call(*args):
            return function(*args[:place], args[place].inner, *args[place + 1 :])

        return call

    return algorithm._replace(
        init_personal=inside(algorithm.init_personal, place=1),
        client_update=inside(algorithm.client_update, place=1),
        server_update=server_update,
        personalize=inside(algorithm.personalize),
        global_model=inside(algorithm.global_model),
        prepare=inside(algorithm.prepare),
        cohort_metrics=inside(algorithm.cohort_metrics),
        update_like=lambda server: update_like(algorithm, server.inner),
        link_state=inside(algorithm.link_state),
    )


def update_like(algorithm: Algorithm, server: PyTree) -> PyTree:
    """Tree with the shapes of a client's update."""
    if algorithm.update_like:
        return algorithm.update_like(server)
    return variable_split.shared(algorithm.global_model(server))


def zero_update(algorithm: Algorithm, server: PyTree) -> PyTree:
    """Zeros with the shapes of a client's update."""
    like = jax.eval_shape(lambda server: update_like(algorithm, server), server)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def split(tree: PyTree) -> tuple[list, list, Callable[[list, list], PyTree]]:
    """Split a tree: (leaves that links change, running statistics, their inverse).

    Args:
      tree: an update, or what became of it; `LogScaled` and `PerClient` are leaves.
    """
    is_leaf = lambda x: isinstance(x, LogScaled | PerClient)
    named, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    is_statistic = [
        "batch_stats" in trees.path_name(path).split("/") for path, _ in named
    ]
    parts = [], []
    for is_second, (_, x) in zip(is_statistic, named, strict=True):
        parts[is_second].append(x)

    def join(change, statistics):
        both = iter(change), iter(statistics)
        return structure.unflatten(next(both[is_second]) for is_second in is_statistic)

    return *parts, join


def on_change(function: Callable[[list], list], tree: PyTree) -> PyTree:
    """Apply `function` to the leaves of a tree that links change, see `split`."""
    change, statistics, join = split(tree)
    return join(function(change), statistics)
