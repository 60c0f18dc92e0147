"""Evaluation of re-identification, global and per client.

Generic: one network on the test images of every domain. Personalized: every client's
network on the tests of the domains that it trains on; where clients are the cameras or
the people of one data set, that is the same test for all.

Every client's local model: what its own training makes of what it was handed.

FedPav judges the models (w_k, v_k) right after local training beside the aggregate.
Nobody keeps them for that: they are what a round of local training after the last one
leaves. That training is of its own settings, those of config.evaluation.local_training,
and the same for every row: what an algorithm adds to a client's training is left out,
such as FedProx's proximal term, so that rows differ in what they hand to the clients
alone.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
from annotated_types import Interval, MinLen
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import compose, horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples, stream
from fedfr_jax.evaluation.rerank import check_reranking, k_reciprocal_rerank
from fedfr_jax.evaluation.retrieval import (
    IdentityLabels,
    cosines,
    count_matches,
    first_hits,
    rank_gallery,
    single_digit,
    summary,
)
from fedfr_jax.evaluation.score_tiles import unit_length
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.parts import INLINE, Factory, Part, section
from fedfr_jax.ranges import BatchSize, Count, Whole
from fedfr_jax.tasks.config import Opened
from fedfr_jax.tasks.finetuning import finetune_clients
from fedfr_jax.tasks.methods import LocalReader, Method
from fedfr_jax.tasks.output_loss import OnlyLossReader
from fedfr_jax.tasks.reid.data import ReidSplit, TestDomain, identity_labels
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.types import (
    Algorithm,
    Augment,
    Dataset,
    Evaluation,
    Evaluator,
    PyTree,
    Source,
    TrainedModels,
)


@section
class LocalTrainingConfig(NamedTuple):
    """Keys of config.evaluation.local_training."""

    local: Annotated[Method, LocalReader(), INLINE]
    loss: Annotated[Part, OnlyLossReader(reid_loss)] = ""
    epochs: Annotated[int, Interval(ge=1, le=10**6)] = 1
    identities_per_batch: Whole = 0  # 0: batches as they come

    def check(self) -> None:
        """Raise ValueError in a run whose processes have some clients each."""
        if jax.process_count() > 1:
            raise ValueError(
                "local training cannot be evaluated in a multi-process run."
            )


Reranking = Annotated[Part, Factory(check_reranking, num_args=1)]


@section
class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation; the defaults are what most papers report."""

    batch_size: BatchSize = 64  # test images at once on a device
    flip_test: bool = True  # features are sums with those of mirror images
    ranks: Annotated[tuple[Count, ...], MinLen(1)] = (1, 5, 10)
    average_precision: Literal["standard", "official"] = (
        "standard"  # or "official", see retrieval.py
    )
    average_over: Literal["valid", "all"] = (
        "valid"  # means over queries with a match; "all": FedReID's code
    )
    single_digit_camera: bool = False  # FedReID's bug: camera 15 is taken for camera 1
    single_gallery_shot_trials: Annotated[int, Interval(ge=0, le=10**4)] = (
        0  # galleries of one image of each person for CMC; 0: the whole
    )
    rerank: bool | Reranking = False  # or settings of rerank.py: {"k1", "k2", "weight"}
    num_visualized: Annotated[int, Interval(ge=0, le=100)] = (
        8  # queries on the page that is drawn in the end; 0 draws none
    )
    personalized_every_evaluation: bool = False  # a test per client, or only in the end
    local_training: LocalTrainingConfig | None = (
        None  # clients train before a test, see `local_models`
    )


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
    labels = source.labels[rows].astype(np.int32)
    if stream_bytes is None:
        table = Dataset.from_arrays(source.read(rows), labels)
    else:
        table = stream(lambda i: source.read(rows[i]), labels, memory=stream_bytes)
    people = identity_labels(source, rows)
    return EvaluationSet(table, people, tests, split.client_tests, split.unseen)


class ReidEvaluator:
    """Evaluator of re-identification; compiled once per model function.

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
        images: EvaluationSet,
        mesh: Mesh,
        evaluating: EvaluationConfig,
        *,
        plain: Augment | None = None,
        seed: int = 0,
    ):
        if evaluating.single_digit_camera:
            cameras = single_digit(images.people.cameras)
            images = images._replace(people=images.people._replace(cameras=cameras))
        self._images = images._replace(table=place_examples(images.table, mesh))
        self._mesh, self._evaluating, self._compiled = mesh, evaluating, {}
        plain = plain or normalize()
        augment = compose(horizontal_flip(), plain) if evaluating.flip_test else plain
        self._feed = Batching(evaluating.batch_size, augment)
        self._key = jax.random.key(seed)
        rerank = evaluating.rerank
        self._rerank = Part(check_reranking) if rerank is True else rerank or None
        for name, test in images.tests.items():
            self._check(name, test)

    def _check(self, name, test):
        if not count_matches(*self.people(name))[0].any():
            raise ValueError(
                f"{name} must have a query with a match under config.evaluation, got "
                f"none among {len(test.queries)} queries."
            )
        if self._rerank is not None:
            number = len(test.queries) + len(test.gallery)
            self._rerank(number)

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic and personalized."""
        in_rounds = self._evaluating.personalized_every_evaluation
        return {
            "generic": Evaluator(self.generic),
            "personalized": Evaluator(self.personalized, during_training=in_rounds),
        }

    def generic(self, networks: TrainedModels) -> Evaluation:
        """Evaluate the global model on every domain; empty without one."""
        if networks.variables is None:
            return Evaluation()
        metrics = self._on(networks.apply, networks.variables, self._images.tests)
        return Evaluation(mean_over_domains(metrics, self._images.unseen))

    def personalized(self, networks: TrainedModels) -> Evaluation:
        """Evaluate every client's model on its domains; nan for a client without
        one.
        """
        scores, shared = [], None
        if networks.client_variables is None:
            shared = self._on(networks.apply, networks.variables, self._images.tests)
        for client, domains in enumerate(self._images.client_tests):
            metrics = shared
            if metrics is None and domains:
                variables = networks.client_variables(client)
                metrics = self._on(networks.client_apply, variables, domains)
            scores.append(mean_result([metrics[name] for name in domains]))
        return retrieval_summary(scores)

    def _on(
        self, apply: Callable, variables: PyTree, names: Iterable[str]
    ) -> dict[str, dict[str, float]]:
        """Metrics of a model on each of `names`."""
        return {name: self.test(apply, variables, name) for name in names}

    def test(self, apply: Callable, variables: PyTree, name: str) -> dict[str, float]:
        """Metrics of a model on one domain's test."""
        evaluating, people = self._evaluating, self.people(name)
        queries, gallery = self.features(apply, variables, name)
        if self._rerank is None:
            scores = cosines(queries, gallery)
        else:
            scores = k_reciprocal_rerank(
                unit_length(queries), unit_length(gallery), **self._rerank.settings
            )
        ranking = rank_gallery(
            scores, *people, average_precision=evaluating.average_precision
        )
        if draws := evaluating.single_gallery_shot_trials:
            hits = first_hits(scores, *people, self._key, draws=draws)
            ranking = ranking._replace(first_hit=hits)
        return summary(
            ranking, ranks=evaluating.ranks, divide_by=evaluating.average_over
        )

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
        if apply not in self._compiled:
            self._compiled[apply] = build_embed(apply, self._feed, self._mesh)
        queries, gallery = self._images.tests[name]
        rows = np.concatenate([queries, gallery]).astype(np.int32)
        views = self._compiled[apply](variables, self._images.table, rows)
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


def cache_first_call(
    personalized: Evaluator, num_clients: int, classifier: str
) -> Evaluator:
    """Wrap an evaluator of clients' models to evaluate once if all are equal.

    Args:
      classifier: the leaves that features do not depend on, a key of the params.
    """

    def body(variables):
        params = {k: x for k, x in variables["params"].items() if k != classifier}
        return jax.tree.leaves((params, variables["batch_stats"]))

    def are_equal(networks: TrainedModels) -> bool:
        shared = body(networks.variables)
        return all(
            np.array_equal(x, y)
            for client in range(num_clients)
            for x, y in zip(
                shared, body(networks.client_variables(client)), strict=True
            )
        )

    def evaluate(networks: TrainedModels) -> Evaluation:
        is_known = (
            networks.variables is not None and networks.client_variables is not None
        )
        if is_known and are_equal(networks):
            networks = networks._replace(client_variables=None)
        return personalized.evaluate(networks)

    return personalized._replace(evaluate=evaluate)


def local_models(
    evaluator: ReidEvaluator, algorithm: Algorithm, epochs: int, opened: Opened, train
) -> Evaluator:
    """Build the evaluator of clients' models after local training, at the end.

    Args:
      algorithm: of `build_finetuning`.
    """
    simulations = []

    def finetune(networks: TrainedModels) -> TrainedModels:
        if not simulations:
            sim = build_simulation(
                algorithm,
                opened.batching,
                train,
                opened.population,
                mesh=opened.mesh,
                local_epochs=epochs,
                clients_per_device=opened.config.federation.clients_per_device,
                seed=opened.config.seed,
            )
            simulations.append(sim)
        return finetune_clients(simulations[0], networks)

    def evaluate(networks: TrainedModels) -> Evaluation:
        if networks.client_variables is None:  # central: no client's classifier
            return Evaluation()
        return evaluator.personalized(finetune(networks))

    return Evaluator(evaluate, during_training=False)
