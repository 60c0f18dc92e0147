"""How well people are found again, by one network and by every client's own.

Generic: one network on the test images of every domain. Personalised: every client's
network on the tests of the domains that it trains on; where clients are the cameras or
the people of one data set, that is the same test for all.
"""

from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import compose, mirror, normalize
from fedfr_jax.evaluation.blocks import unit
from fedfr_jax.evaluation.matches import People, count_matches, single_digit
from fedfr_jax.evaluation.rerank import check_reranking, reranked
from fedfr_jax.evaluation.retrieval import cosines, find, summary
from fedfr_jax.evaluation.single_shot import first_hits
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.schema import call
from fedfr_jax.stream import placed
from fedfr_jax.tasks.reid.judged import Evaluating, Judged
from fedfr_jax.types import Augment, Evaluation, Evaluator, Networks, PyTree


class Judge:
    """Compiled once per network function.

    Args:
      images: what is judged on.
      evaluating: how.
      plain: what happens to an image before the network sees it; None scales its bytes
        to [-1, 1].
      seed: of the galleries that are drawn.

    Raises:
      ValueError: when no query of a domain has a match under these settings, or for
        settings of re-ranking that do not fit its images.
    """

    def __init__(
        self,
        images: Judged,
        mesh: Mesh,
        evaluating: Evaluating,
        *,
        plain: Augment | None = None,
        seed: int = 0,
    ):
        if evaluating.single_digit_camera:
            cameras = single_digit(images.people.cameras)
            images = images._replace(people=images.people._replace(cameras=cameras))
        self._images = images._replace(table=placed(images.table, mesh))
        self._mesh, self._evaluating, self._compiled = mesh, evaluating, {}
        plain = plain or normalize()
        augment = compose(mirror(), plain) if evaluating.flip else plain
        self._feed = Feed(evaluating.batch_size, augment)
        self._key = jax.random.key(seed)
        self._rerank = evaluating.rerank
        if isinstance(self._rerank, bool):
            self._rerank = {} if self._rerank else None
        for name, test in images.tests.items():
            self._check(name, test)

    def _check(self, name, test):
        if not count_matches(*self.people(name))[0].any():
            raise ValueError(
                f"the queries of {name} must include one with a match under "
                f"config.evaluation, got none of {len(test.queries)}."
            )
        if self._rerank is not None:
            number = len(test.queries) + len(test.gallery)
            call("evaluation.rerank", check_reranking, self._rerank, number)

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """Generic and personalised."""
        in_rounds = self._evaluating.personalised_in_rounds
        return {
            "generic": Evaluator(self.generic),
            "personalised": Evaluator(self.personalised, in_rounds=in_rounds),
        }

    def generic(self, networks: Networks) -> Evaluation:
        """The one network on every domain; nothing where there is none."""
        if networks.variables is None:
            return Evaluation()
        found = self._on(networks.apply, networks.variables, self._images.tests)
        return Evaluation(over_domains(found, self._images.unseen))

    def personalised(self, networks: Networks) -> Evaluation:
        """Every client's network on its own domains; nan for a client without one."""
        scores, shared = [], None
        if networks.of_client is None:
            shared = self._on(networks.apply, networks.variables, self._images.tests)
        for client, own in enumerate(self._images.own_tests):
            found = shared
            if found is None and own:
                variables = networks.of_client(client)
                found = self._on(networks.client_apply, variables, own)
            scores.append(mean_of([found[name] for name in own]))
        return spread(scores)

    def _on(
        self, apply: Callable, variables: PyTree, names: Iterable[str]
    ) -> dict[str, dict[str, float]]:
        """Metrics of a network on each of some domains."""
        return {name: self.test(apply, variables, name) for name in names}

    def test(self, apply: Callable, variables: PyTree, name: str) -> dict[str, float]:
        """Metrics of a network on one domain's test."""
        evaluating, people = self._evaluating, self.people(name)
        queries, gallery = self.features(apply, variables, name)
        if self._rerank is None:
            scores = cosines(queries, gallery)
        else:
            scores = reranked(unit(queries), unit(gallery), **self._rerank)
        found = find(scores, *people, average_precision=evaluating.average_precision)
        if draws := evaluating.single_shot:
            hits = first_hits(scores, *people, self._key, draws=draws)
            found = found._replace(first_hit=hits)
        return summary(found, ranks=evaluating.ranks, divide_by=evaluating.divide_by)

    def people(self, name: str) -> tuple[People, People]:
        """Who is on a domain's queries and in its gallery."""
        identities, cameras = self._images.people
        queries, gallery = self._images.tests[name]
        of = lambda rows: People(identities[rows], cameras[rows])
        return of(queries), of(gallery)

    def features(
        self, apply: Callable, variables: PyTree, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Features [Q, D] and [G, D] of a domain, with those of mirror images added."""
        if apply not in self._compiled:
            self._compiled[apply] = build_embed(apply, self._feed, self._mesh)
        queries, gallery = self._images.tests[name]
        rows = np.concatenate([queries, gallery]).astype(np.int32)
        views = self._compiled[apply](variables, self._images.table, rows)
        features = meshes.fetch(views)[: len(rows)].sum(axis=1)
        return features[: len(queries)], features[len(queries) :]


def over_domains(
    found: Mapping[str, Mapping[str, float]], unseen: tuple[str, ...]
) -> dict[str, float]:
    """Metrics of all domains as one mapping.

    Of one domain they are its own. Of several there are means over those that clients
    train on, "unseen_..." over the others, and "<domain>_..." of each.
    """
    if len(found) == 1:
        return dict(next(iter(found.values())))
    seen = [metrics for name, metrics in found.items() if name not in unseen]
    others = [metrics for name, metrics in found.items() if name in unseen]
    named = {f"unseen_{key}": value for key, value in mean_of(others).items()}
    for name, metrics in found.items():
        named |= {f"{name}_{key}": value for key, value in metrics.items()}
    return {**mean_of(seen), **named}


def mean_of(found: list[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric, empty for none."""
    keys = found[0] if found else ()
    return {key: float(np.mean([one[key] for one in found])) for key in keys}


def spread(scores: list[Mapping[str, float]]) -> Evaluation:
    """Mean of each metric over clients, all of them, and the ends where they differ."""
    keys = next((list(one) for one in scores if one), [])
    per_client = {
        key: np.array([one.get(key, np.nan) for one in scores]) for key in keys
    }
    metrics = {}
    for key, values in per_client.items():
        metrics[key] = float(np.nanmean(values))
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if low < high:  # clients with one network and one test have one number
            metrics |= {f"{key}_min": low, f"{key}_max": high}
    return Evaluation(metrics, per_client)
