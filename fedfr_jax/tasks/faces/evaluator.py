"""Evaluation of face models.

Generic: one network on identities that no training saw. Personalized: every client's
own network on the test images of all clients (FedFR, section 4; protocol of its code).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import compose, face_mask, horizontal_flip
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import place_examples
from fedfr_jax.evaluation.error_rates import flag_unsupported
from fedfr_jax.evaluation.identification import generic_identification
from fedfr_jax.evaluation.personalized import (
    CLIENT_VERIFICATIONS,
    client_identification,
    mean_over_clients,
)
from fedfr_jax.evaluation.samples import embedding_map, unit_rows, worst_pairs
from fedfr_jax.evaluation.score_tiles import ALL
from fedfr_jax.evaluation.verification import (
    generic_verification,
    masked_scores,
    roc_curve,
    ten_fold,
)
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.parts import Part, section
from fedfr_jax.ranges import BatchSize
from fedfr_jax.tasks.evaluators import client_model, evaluate_clients
from fedfr_jax.tasks.faces.data import FaceData
from fedfr_jax.tasks.faces.evaluation_sets import (
    FilesReader,
    Rates,
    as_tuple,
    identification_set,
    pair_list,
    template_set,
)
from fedfr_jax.types import (
    Evaluation,
    Evaluator,
    PyTree,
    Samples,
    ScoredPairs,
    TrainedModels,
)


def balanced_pairs(labels: np.ndarray, max_pairs: int, seed: int):
    """Sample balanced pairs of a labeled set, half same, in ten blocks as LFW's.

    Args:
      labels: [U] int identities.
      max_pairs: upper bound on the number of pairs P.

    Returns:
      (indices [P, 2] int, is_same [P] bool), drawn with the seed; P is a multiple
      of 20.

    Raises:
      ValueError: when the labels give fewer than ten pairs of either kind.
    """
    if not len(labels):
        raise ValueError("partition.num_unseen_ids must be at least 2, got 0.")
    rng = np.random.default_rng(seed)
    first = rng.integers(len(labels), size=8 * max_pairs)
    order = np.argsort(labels, kind="stable")
    start = np.searchsorted(labels, labels[first], sorter=order)
    count = np.bincount(labels)[labels[first]]
    same = order[start + rng.integers(count)]
    different = rng.integers(len(labels), size=8 * max_pairs)
    draws = [
        _distinct(first, same, same != first),
        _distinct(first, different, labels[first] != labels[different]),
    ]
    half = min(*(len(d) for d in draws), max_pairs // 2) // 10 * 10
    if half < 10:
        raise ValueError(
            "partition.num_unseen_ids must give at least 10 same and 10 different "
            f"pairs, got {len(draws[0])} and {len(draws[1])}."
        )
    blocks = [d[:half].reshape(10, -1, 2) for d in draws]
    indices = np.concatenate(blocks, axis=1).reshape(-1, 2)
    is_same = np.tile(np.repeat([True, False], half // 10), 10)
    return indices, is_same


def _distinct(first, second, is_wanted):
    pairs = np.sort(np.stack([first, second], axis=1)[is_wanted], axis=1)
    _, places = np.unique(pairs, axis=0, return_index=True)
    return pairs[np.sort(places)]


def min_negatives(
    labels: np.ndarray,
    client_identities: Sequence[np.ndarray],
    negatives: Literal["all", "other_clients"] = ALL,
) -> int:
    """Smallest number, over clients, of negative pairs with an image of the client.

    Args:
      labels: [E] identities of all clients' images.
      client_identities: a client's own identities, for each client.
      negatives: of `pair_tiles`.
    """
    counts = []
    for identities in client_identities:
        sizes = np.bincount(labels[np.isin(labels, identities)]).astype(np.int64)
        num_own, same = sizes.sum(), (sizes * (sizes - 1) // 2).sum()
        num_others = len(labels) - num_own
        within = num_own * (num_own - 1) // 2 - same
        counts.append(num_own * num_others + (within if negatives == ALL else 0))
    return int(min(counts))


MAX_PAIRS = 6000  # the size of LFW's ten-fold protocol
NUM_WRONG_PAIRS, NUM_MAPPED = 24, 15  # pairs and identities that a report shows


@section
class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: BatchSize = 64  # images at once on a device
    fars: Rates = (1e-3, 1e-2)  # false accept rates of 1:1, generic and personalized
    # False positive identification rates of 1:N, generic and personalized
    fpirs: Rates = (1e-2, 1e-1)
    # Each of these three is a path, or settings with a path, see
    # tasks/faces/evaluation_sets.py; its metrics join the generic ones, as "pairs_...",
    # "identification_..." and "ijb_...".
    pairs: Annotated[Part | None, FilesReader(pair_list)] = None
    identification: Annotated[Part | None, FilesReader(identification_set)] = None
    templates: Annotated[Part | None, FilesReader(template_set)] = None
    # Rates of "mfr_..." on the unseen identities with masks, see `masked_scores`
    masked_fars: Rates | None = None
    # Of personalized 1:1: exact order statistics, or the released evaluation's bins
    client_thresholds: Literal["exact", "binned"] = "exact"
    # Of personalized 1:1, pairs of an image of the client with any other identity, as
    # the released code, or with one of another client
    negatives: Literal["all", "other_clients"] = ALL


class FaceEvaluator:
    """Evaluator of face models; compiled once per embedding function.

    Args:
      task: the images.
      mesh: images are spread over its client devices.
      seed: of the generic pairs.

    Raises:
      ValueError: for files and settings that do not fit, before anything is compiled.
    """

    def __init__(
        self, task: FaceData, mesh: Mesh, config: EvaluationConfig, seed: int = 0
    ):
        self._task, self._config = task, config
        self._train_identities = task.partition.train_identities
        verify = CLIENT_VERIFICATIONS[config.client_thresholds]
        self._verify = functools.partial(verify, negatives=config.negatives)
        self._fars, self._fpirs = as_tuple(config.fars), as_tuple(config.fpirs)
        self._pairs = balanced_pairs(task.partition.unseen.labels, MAX_PAIRS, seed)
        plain = normalization(task.alignment)
        self._augments = {
            "plain": plain,
            "mirrored": compose(horizontal_flip(), plain),
            "covered": compose(face_mask(fixed_per_image=True), plain),
        }
        tables = task.train, task.tests
        shape = task.tests.input_shape
        self._files = {
            prefix: (files := part(shape), files.open(tables, mesh))
            for prefix, part in {
                "pairs": config.pairs,
                "identification": config.identification,
                "ijb": config.templates,
            }.items()
            if part is not None
        }
        self._train, self._test = (place_examples(table, mesh) for table in tables)

        @functools.cache
        def embedder(embed: Callable, view: str):
            batching = Batching(config.batch_size, self._augments[view])
            return build_embed(embed, batching, mesh)

        self._embedder = embedder

    @property
    def passed_over(self) -> str:
        """Files that the evaluation sets ignored, a line each."""
        ignored = (files.source.passed_over for files, _ in self._files.values())
        return "\n".join(filter(None, ignored))

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic and personalized, which embeds for every client."""

        def generic(models: TrainedModels) -> Evaluation:
            return self.generic(models.apply, models.variables)

        return {
            "generic": Evaluator(generic),
            "personalized": Evaluator(self.personalized, during_training=False),
        }

    def generic(self, embed: Callable, variables: PyTree) -> Evaluation:
        """Evaluate one model on the unseen identities.

        Args:
          embed: (variables, images [B, H, W, C]) -> [B, D]; keep one object per
            network, it names the compiled function.
        """
        labels = self._task.partition.unseen.labels
        rows = self._task.first_unseen + np.arange(len(labels))
        features = self._embed(embed, variables, self._test, rows)
        metrics = generic_verification(features, labels, fars=self._fars)
        metrics |= generic_identification(features, labels, fpirs=self._fpirs)
        indices, is_same = self._pairs
        folds = ten_fold(features[indices.reshape(-1)], is_same)
        metrics["accuracy"] = folds["accuracy"]
        for prefix, (files, table) in self._files.items():
            rows = np.arange(len(files.source.labels))
            view = "mirrored" if files.is_mirrored else "plain"
            values = files.metrics(self._views(embed, variables, table, rows, view))
            metrics |= {f"{prefix}_{name}": value for name, value in values.items()}
        if self._config.masked_fars is not None:
            metrics |= self._of_masked(embed, variables)
        return Evaluation(
            metrics,
            curves={"roc": roc_curve(features, labels)},
            samples=functools.partial(self._samples, features),
        )

    def _samples(self, features: np.ndarray) -> Samples:
        """Wrong pairs of unseen identities, and a map of some embeddings."""
        indices, is_same = self._pairs
        labels = self._task.partition.unseen.labels
        names = [f"identity {label}" for label in labels]
        unit = unit_rows(features)
        scores = (unit[indices[:, 0]] * unit[indices[:, 1]]).sum(axis=1)
        worst, threshold = worst_pairs(scores, is_same, NUM_WRONG_PAIRS)
        rows = indices[worst].ravel() + self._task.first_unseen
        size = self._task.tests.input_shape
        images = self._task.tests.take(rows).images if len(rows) else ()
        pairs = ScoredPairs(
            np.asarray(images, np.uint8).reshape(-1, 2, *size),
            scores[worst],
            is_same[worst],
            [(names[i], names[j]) for i, j in indices[worst]],
            threshold,
        )
        mapped = np.flatnonzero(np.isin(labels, np.unique(labels)[:NUM_MAPPED]))
        positions = embedding_map(unit[mapped], [names[i] for i in mapped])
        return Samples({"wrong pairs": pairs}, {"unseen identities": positions})

    def _of_masked(self, embed, variables) -> dict[str, float]:
        """Scores of the unseen identities, with a mask on every second image."""
        labels = self._task.partition.unseen.labels
        rows = self._task.first_unseen + np.arange(len(labels))
        views = self._views(embed, variables, self._test, rows, "covered")
        kind = 1 + np.arange(len(labels)) % 2
        masked = views[np.arange(len(labels)), kind]
        rates = as_tuple(self._config.masked_fars)
        scores = masked_scores(views[:, 0], masked, labels, fprs=rates)
        return {f"mfr_{name}": value for name, value in scores.items()}

    def personalized(self, models: TrainedModels) -> Evaluation:
        """Evaluate every client's model on the test images of all clients."""
        task = self._task
        test = np.arange(task.first_unseen)
        train = np.arange(task.first_public)
        shared = None
        if models.client_variables is None:
            model = models.apply, models.variables
            features = self._embed(*model, self._test, test)
            shared = features, self._embed(*model, self._train, train)
        identities = task.partition.identities

        def embed(client):
            low, high = task.partition.train.offsets[client : client + 2]
            if shared is None:
                model = client_model(models, client)
                queries = self._embed(*model, self._test, test)
                gallery = self._embed(*model, self._train, train[low:high])
            else:
                queries, gallery = shared[0], shared[1][low:high]
            return identities[client], queries, gallery, low, high

        results = evaluate_clients(len(identities), embed, self._evaluate_client)
        over = mean_over_clients(results)
        fewest = min_negatives(
            task.partition.test_identities, identities, self._config.negatives
        )

        def named(found: Mapping[str, Any]) -> dict[str, Any]:
            found = flag_unsupported(found, "tar@far", self._fars, fewest)
            # As `pair_tpir`
            return flag_unsupported(found, "tpir@fpir", self._fpirs, len(test))

        return Evaluation(named(over.mean), named(over.per_client))

    def _evaluate_client(self, identities, queries, gallery, low, high):
        labels = self._task.partition.test_identities
        is_own = np.isin(labels, identities)
        verified = self._verify(queries, labels, is_own, fars=self._fars)
        identified = client_identification(
            queries,
            labels,
            gallery,
            self._train_identities[low:high],
            identities,
            fpirs=self._fpirs,
        )
        return {**verified, **identified}

    def _embed(self, embed, variables, table, rows):
        return self._views(embed, variables, table, rows, "plain")[:, 0]

    def _views(self, embed, variables, table, rows, view: str):
        """Features [n, F, D] of table rows in the F views of an augment."""
        run = self._embedder(embed, view)
        return meshes.fetch(run(variables, table, rows.astype(np.int32)))[: len(rows)]
