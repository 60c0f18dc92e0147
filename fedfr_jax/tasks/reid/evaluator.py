"""Evaluation of re-identification: global, per client, and pages of results.

Generic: one network on the test images of every domain. Personalized: every client's
network on the tests of the domains that it trains on; where clients are the cameras or
the people of one data set, that is the same test for all.

Local: every client's model after a round of local training that follows the last one,
which FedPav evaluates beside the aggregate. That training has settings of its own,
config.evaluation.local_training, the same for every method: what an algorithm adds to a
client's training, such as FedProx's proximal term, is left out.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
from annotated_types import Interval, MinLen
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import compose, horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.evaluation.rerank import check_reranking, k_reciprocal_rerank
from fedfr_jax.evaluation.retrieval import (
    IdentityLabels,
    best_rank,
    cosines,
    count_matches,
    first_hits,
    rank_gallery,
    single_digit,
    summary,
)
from fedfr_jax.evaluation.score_tiles import unit_length
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.parts import INLINE, Factory, Part, raw, section
from fedfr_jax.ranges import BatchSize, Count, Whole
from fedfr_jax.tasks.data import build_dataset
from fedfr_jax.tasks.evaluators import check_one_process, client_model
from fedfr_jax.tasks.methods import LOCAL, Method, OnlyLossReader
from fedfr_jax.tasks.reid.data import ReidSplit, TestDomain, identity_labels
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.types import (
    Augment,
    Dataset,
    Evaluation,
    Evaluator,
    ImageGrid,
    PyTree,
    Source,
    TrainedModels,
)


@section
class LocalTrainingConfig(NamedTuple):
    """Keys of config.evaluation.local_training."""

    local: Annotated[Method, LOCAL, INLINE]
    loss: Annotated[Part, OnlyLossReader(reid_loss)] = raw("")
    epochs: Annotated[int, Interval(ge=1, le=10**6)] = 1
    identities_per_batch: Whole = 0  # 0: batches as they come

    def check(self) -> None:
        """Raise ValueError in a run whose processes have some clients each."""
        check_one_process()


Reranking = Annotated[Part, Factory(check_reranking, num_args=1)]


@section
class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation; the defaults are what most papers report."""

    batch_size: BatchSize = 64  # test images at once on a device
    flip_test: bool = True  # features are sums with those of mirror images
    ranks: Annotated[tuple[Count, ...], MinLen(1)] = (1, 5, 10)
    average_precision: Literal["standard", "official"] = "standard"  # see retrieval.py
    # Means over queries with a match; "all": FedReID's code
    average_over: Literal["valid", "all"] = "valid"
    single_digit_camera: bool = False  # FedReID's bug: camera 15 is taken for camera 1
    # Galleries of one image of each person for CMC; 0: the whole
    single_gallery_shot_trials: Annotated[int, Interval(ge=0, le=10**4)] = 0
    rerank: bool | Reranking = False  # or settings of rerank.py: {"k1", "k2", "weight"}
    # Queries on the page that is drawn in the end; 0 draws none
    num_visualized: Annotated[int, Interval(ge=0, le=100)] = 8
    personalized_every_evaluation: bool = False  # a test per client, or only in the end
    # Clients train before a test
    local_training: LocalTrainingConfig | None = None


class EvaluationSet(NamedTuple):
    """Test images of a scenario."""

    table: Dataset | Stream  # test images, of one domain after the other
    people: IdentityLabels  # [R], on the table's images
    tests: dict[str, TestDomain]  # rows of the table
    client_tests: tuple[tuple[str, ...], ...]  # N x the domains of a client
    unseen: tuple[str, ...]  # domains that no client trains on


def build_evaluation_set(
    source: Source, split: ReidSplit, stream_bytes: int | None = None
) -> EvaluationSet:
    """Load a scenario's test images, or stream them.

    Args:
      stream_bytes: bytes that the images may take on a device; None takes them all.
    """
    parts = [part for test in split.tests.values() for part in test]
    rows = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts])
    places = iter(np.split(np.arange(len(rows)), ends[:-1]))
    tests = {name: TestDomain(next(places), next(places)) for name in split.tests}
    table = build_dataset(source, rows, stream_bytes)
    people = identity_labels(source, rows)
    return EvaluationSet(table, people, tests, split.client_tests, split.unseen)


class ReidEvaluator:
    """Evaluator of re-identification; compiled once per model function.

    Args:
      images: of the tests.
      plain: what happens to an image before the network sees it; None scales its bytes
        to [-1, 1].
      seed: of the galleries that are drawn.

    Raises:
      ValueError: when no query of a domain has a match under these settings, or for
        settings of re-ranking that do not fit its images.
    """

    def __init__(
        self,
        images: EvaluationSet,
        mesh: Mesh,
        config: EvaluationConfig,
        *,
        plain: Augment | None = None,
        seed: int = 0,
    ):
        if config.single_digit_camera:
            cameras = single_digit(images.people.cameras)
            images = images._replace(people=images.people._replace(cameras=cameras))
        self._images = images._replace(table=place_examples(images.table, mesh))
        self._config, self._key = config, jax.random.key(seed)
        plain = plain or normalize()
        augment = compose(horizontal_flip(), plain) if config.flip_test else plain
        batching = Batching(config.batch_size, augment)
        # One compiled program for each function
        self._embedder = functools.cache(lambda x: build_embed(x, batching, mesh))
        rerank = Part(check_reranking) if config.rerank is True else config.rerank
        self._rerank = rerank or None
        for name, test in images.tests.items():
            if not count_matches(*self.people(name))[0].any():
                raise ValueError(
                    f"{name} must have a query with a match under config.evaluation, "
                    f"got none among {len(test.queries)} queries."
                )
            if self._rerank:
                self._rerank(len(test.queries) + len(test.gallery))

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic and personalized."""
        in_rounds = self._config.personalized_every_evaluation
        return {
            "generic": Evaluator(self.generic),
            "personalized": Evaluator(self.personalized, during_training=in_rounds),
        }

    def generic(self, models: TrainedModels) -> Evaluation:
        """Evaluate the global model on every domain; empty without one."""
        if models.variables is None:
            return Evaluation()
        metrics = self._on(models.apply, models.variables, self._images.tests)
        return Evaluation(mean_over_domains(metrics, self._images.unseen))

    def personalized(self, models: TrainedModels) -> Evaluation:
        """Evaluate every client's model on its domains; nan for a client without
        one.
        """
        scores, shared = [], {}
        if models.client_variables is None:
            shared = self._on(models.apply, models.variables, self._images.tests)
        for client, domains in enumerate(self._images.client_tests):
            if domains and models.client_variables is not None:
                shared = self._on(*client_model(models, client), domains)
            scores.append(mean_result([shared[name] for name in domains]))
        return retrieval_summary(scores)

    def _on(
        self, apply: Callable, variables: PyTree, names: Iterable[str]
    ) -> dict[str, dict[str, float]]:
        """Metrics of a model on each of `names`."""
        return {name: self.test(apply, variables, name) for name in names}

    def test(self, apply: Callable, variables: PyTree, name: str) -> dict[str, float]:
        """Metrics of a model on one domain's test."""
        config, people = self._config, self.people(name)
        queries, gallery = self.features(apply, variables, name)
        if self._rerank is None:
            scores = cosines(queries, gallery)
        else:
            scores = k_reciprocal_rerank(
                unit_length(queries), unit_length(gallery), **self._rerank.settings
            )
        ranking = rank_gallery(
            scores, *people, average_precision=config.average_precision
        )
        if draws := config.single_gallery_shot_trials:
            hits = first_hits(scores, *people, self._key, draws=draws)
            ranking = ranking._replace(first_hit=hits)
        return summary(ranking, ranks=config.ranks, divide_by=config.average_over)

    def people(self, name: str) -> tuple[IdentityLabels, IdentityLabels]:
        """Identities and cameras of a domain's queries and gallery."""
        identities, cameras = self._images.people
        queries, gallery = self._images.tests[name]
        labels_of = lambda rows: IdentityLabels(identities[rows], cameras[rows])
        return labels_of(queries), labels_of(gallery)

    def features(
        self, apply: Callable, variables: PyTree, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Features [Q, D] and [G, D] of a domain, with mirror images added."""
        queries, gallery = self._images.tests[name]
        rows = np.concatenate([queries, gallery]).astype(np.int32)
        views = self._embedder(apply)(variables, self._images.table, rows)
        features = meshes.fetch(views)[: len(rows)].sum(axis=1)
        return features[: len(queries)], features[len(queries) :]


def mean_over_domains(
    by_domain: Mapping[str, Mapping[str, float]], unseen: tuple[str, ...]
) -> dict[str, float]:
    """Average the metrics over domains, and name those of each.

    Of one domain they are its own. Of several there are means over those that clients
    train on, "unseen_..." over the others, and "<domain>_..." of each.
    """
    if len(by_domain) == 1:
        return dict(next(iter(by_domain.values())))
    trained = [metrics for name, metrics in by_domain.items() if name not in unseen]
    untrained = [metrics for name, metrics in by_domain.items() if name in unseen]
    named = {f"unseen_{key}": value for key, value in mean_result(untrained).items()}
    for name, metrics in by_domain.items():
        named |= {f"{name}_{key}": value for key, value in metrics.items()}
    return {**mean_result(trained), **named}


def mean_result(results: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric, {} for none."""
    keys = results[0] if results else ()
    return {key: float(np.mean([one[key] for one in results])) for key in keys}


def retrieval_summary(scores: list[Mapping[str, float]]) -> Evaluation:
    """Summarize metrics over clients: means, and extremes if they differ."""
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


def evaluate_equals_once(
    personalized: Evaluator, num_clients: int, classifier: str
) -> Evaluator:
    """Wrap an evaluator of clients' models to evaluate once if all are equal.

    Args:
      classifier: the leaves that features do not depend on, a key of the params.
    """

    def body(variables):
        params = {k: x for k, x in variables["params"].items() if k != classifier}
        return jax.tree.leaves((params, variables["batch_stats"]))

    def evaluate(models: TrainedModels) -> Evaluation:
        shared, client_variables = models.variables, models.client_variables
        if shared is not None and client_variables is not None:
            pairs = (
                zip(body(shared), body(client_variables(client)), strict=True)
                for client in range(num_clients)
            )
            if all(np.array_equal(x, y) for leaves in pairs for x, y in leaves):
                models = models._replace(client_variables=None)
        return personalized.evaluate(models)

    return personalized._replace(evaluate=evaluate)


NUM_SHOWN = 10  # gallery images beside a query
RIGHT, WRONG, QUERY = (0, 140, 60), (205, 30, 30), (120, 120, 120)  # of frames


def retrieval_sheets(
    evaluator: ReidEvaluator, images: EvaluationSet, names: tuple[str, ...], count: int
) -> Evaluator:
    """Build the evaluator that draws `count` queries of every domain at the end.

    The queries are spread evenly over those with a match. They are looked for by the
    global model, or where there is none by that of the first client who trains on the
    domain.

    Args:
      images: what `evaluator` was made of.
      names: of the identities.
    """

    def evaluate(models: TrainedModels) -> Evaluation:
        pages = {}
        for domain in images.tests:
            apply, variables = models.apply, models.variables
            if variables is None:
                tests = enumerate(images.client_tests)
                owners = [client for client, own in tests if domain in own]
                owner = owners[0] if owners else 0
                apply, variables = client_model(models, owner)
            features = evaluator.features(apply, variables, domain)
            found = results(*features, *evaluator.people(domain), count=count)
            pages[domain] = result_grid(found, images, domain, names)
        return Evaluation(image_grids=pages)

    return Evaluator(evaluate, during_training=False)


class Result(NamedTuple):
    """Retrieval result of one query."""

    query: int  # row of the queries
    nearest: np.ndarray  # [n] rows of the gallery, best first, without junk
    is_right: np.ndarray  # [n] bool
    first_hit: int  # images ahead of the first match


def results(
    queries: np.ndarray,
    gallery: np.ndarray,
    people: IdentityLabels,
    gallery_people: IdentityLabels,
    *,
    count: int,
) -> list[Result]:
    """Nearest gallery images of `count` queries, by features [Q, D] and [G, D]."""
    valid = np.flatnonzero(count_matches(people, gallery_people)[0])
    chosen = valid[np.unique(np.linspace(0, len(valid) - 1, count).astype(int))]
    of_chosen = IdentityLabels(people.identities[chosen], people.cameras[chosen])
    scores = cosines(queries[chosen], gallery)
    hits = rank_gallery(scores, of_chosen, gallery_people).first_hit
    retrieved = []
    for place, query in enumerate(chosen):
        query_label = IdentityLabels(
            *(values[place : place + 1] for values in of_chosen)
        )
        score = np.asarray(scores(np.array([place])))[0]
        nearest = best_rank(score, query_label, gallery_people, NUM_SHOWN)
        is_right = gallery_people.identities[nearest] == query_label.identities
        retrieved.append(Result(int(query), nearest, is_right, int(hits[place])))
    return retrieved


def result_grid(
    found: list[Result], images: EvaluationSet, domain: str, names: tuple[str, ...]
) -> ImageGrid:
    """Queries and their nearest images, best first, without junk; one row each."""
    queries, gallery = images.tests[domain]
    pictures, captions = [], []
    for result in found:
        rows = np.array([queries[result.query], *gallery[result.nearest]])
        colors = [QUERY, *(RIGHT if right else WRONG for right in result.is_right)]
        pictures.append(with_frames(images.table.take(rows).images, np.array(colors)))
        people, cameras = (labels[rows] for labels in images.people)
        texts = [
            f"{names[person].rpartition('/')[2]}\ncamera {camera}"
            for person, camera in zip(people, cameras, strict=True)
        ]
        captions.append(
            [f"{texts[0]}\nfirst match: {result.first_hit + 1}", *texts[1:]]
        )
    titles = ["query", *map(str, range(1, max(map(len, captions))))]
    # A row may be shorter than others.
    blank = np.full_like(pictures[0][0], 255)
    columns = map(np.stack, zip_longest(*pictures, fillvalue=blank))
    return ImageGrid(
        images=dict(zip(titles, columns, strict=True)),
        legend={"right": RIGHT, "wrong": WRONG},
        captions=dict(zip(titles, zip_longest(*captions, fillvalue=""), strict=True)),
    )


def with_frames(images: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Frame images [n, H, W, C] in colors [n, 3], uint8 [n, H + 2F, W + 2F, 3]."""
    number, height, width, _ = images.shape
    frame = max(height // 32, 1)
    framed = np.empty((number, height + 2 * frame, width + 2 * frame, 3), np.uint8)
    framed[:] = colors[:, None, None]
    framed[:, frame:-frame, frame:-frame] = images
    return framed
