"""Evaluation of face models.

Generic: one network on identities that no training saw. Personalized: every client's
own network on the test images of all clients (FedFR, section 4; protocol of its code).
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

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
from fedfr_jax.parts import Part, parse
from fedfr_jax.ranges import BatchSize, Seed
from fedfr_jax.schema import checked
from fedfr_jax.tasks.faces.data import FaceData
from fedfr_jax.tasks.faces.evaluation_sets import (
    FilesReader,
    Rates,
    as_tuple,
    identification_set,
    open_evaluation_files,
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
# Key of config.evaluation -> how its metrics begin, and the files that it opens.
FILES = {
    "pairs": ("pairs_", pair_list),
    "identification": ("identification_", identification_set),
    "templates": ("ijb_", template_set),
}


Files = Part | str | os.PathLike | Mapping | None


class FaceEvaluator:
    """Evaluator of face models; compiled once per embedding function.

    Args:
      task: the images.
      mesh: images are spread over its client devices.
      batch_size: images per device and call.
      fars: false accept rates of 1:1, generic and personalized.
      fpirs: false positive identification rates of 1:N, generic and personalized.
      pairs: settings of `pair_list`, or its path alone, whose metrics "pairs_..." join
        the generic ones; None leaves it out.
      templates: settings of `template_set`, or its path alone, likewise "ijb_...".
      identification: settings of `identification_set`, or its path alone, likewise
        "identification_...".
      masked_fars: rates in (0, 1) of "mfr_..." on the unseen identities with masks, see
        `masked_scores`; None leaves it out.
      client_thresholds: of personalized 1:1, a key of CLIENT_VERIFICATIONS: exact
        order statistics, or the released evaluation's bins.
      negatives: of personalized 1:1, "all": pairs of an image of the client with any
        other identity, as the released code; "other_clients": of other clients only.
      seed: of the generic pairs.

    Raises:
      ValueError: for files and settings that do not fit, before anything is compiled.
    """

    @checked
    def __init__(
        self,
        task: FaceData,
        mesh: Mesh,
        *,
        batch_size: BatchSize = 64,
        fars: Rates = (1e-3, 1e-2),
        fpirs: Rates = (1e-2, 1e-1),
        pairs: Annotated[Files, FilesReader(pair_list)] = None,
        templates: Annotated[Files, FilesReader(template_set)] = None,
        identification: Annotated[Files, FilesReader(identification_set)] = None,
        masked_fars: Rates | None = None,
        client_thresholds: Literal["exact", "binned"] = "exact",
        negatives: str = ALL,
        seed: Seed = 0,
    ):
        verify = CLIENT_VERIFICATIONS[client_thresholds]
        self._verify = functools.partial(verify, negatives=negatives)
        self._negatives = negatives
        self._task, self._mesh = task, mesh
        self._batch_size, self._compiled = batch_size, {}
        self._plain = normalization(task.alignment)
        self._mirrored = compose(horizontal_flip(), self._plain)
        self._covered = compose(face_mask(fixed_per_image=True), self._plain)
        self._fars, self._fpirs = as_tuple(fars), as_tuple(fpirs)
        self._masked_fars = None if masked_fars is None else as_tuple(masked_fars)
        self._pairs = balanced_pairs(task.partition.unseen_labels, MAX_PAIRS, seed)
        self._files = _open_files(
            task,
            mesh,
            pairs=pairs,
            identification=identification,
            templates=templates,
        )
        self._tables = (
            place_examples(task.table, mesh),
            place_examples(task.evaluation_set, mesh),
        )

    @property
    def passed_over(self) -> str:
        """Files that the evaluation sets ignored, a line each."""
        ignored = (files.passed_over for files, _ in self._files.values())
        return "\n".join(filter(None, ignored))

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic and personalized, which embeds for every client."""

        def generic(networks: TrainedModels) -> Evaluation:
            return self.generic(networks.apply, networks.variables)

        def personalized(networks: TrainedModels) -> Evaluation:
            of_client = networks.client_variables
            embed = networks.client_apply if of_client else networks.apply
            return self.personalized(embed, of_client, networks.variables)

        return {
            "generic": Evaluator(generic),
            "personalized": Evaluator(personalized, during_training=False),
        }

    def generic(self, embed: Callable, variables: PyTree) -> Evaluation:
        """Evaluate one model on the unseen identities.

        Args:
          embed: (variables, images [B, H, W, C]) -> [B, D]; keep one object per
            network, it names the compiled function.
        """
        num_test = len(self._task.test_identities)
        labels = self._task.partition.unseen_labels
        rows = num_test + np.arange(len(labels))
        features = self._embed(embed, variables, 1, rows)
        metrics = generic_verification(features, labels, fars=self._fars)
        metrics |= generic_identification(features, labels, fpirs=self._fpirs)
        indices, is_same = self._pairs
        folds = ten_fold(features[indices.reshape(-1)], is_same)
        metrics["accuracy"] = folds["accuracy"]
        for prefix, (files, table) in self._files.items():
            rows = np.arange(files.num_images)
            augment = self._mirrored if files.is_mirrored else self._plain
            values = files.metrics(self._views(embed, variables, table, rows, augment))
            metrics |= {f"{prefix}{name}": value for name, value in values.items()}
        if self._masked_fars is not None:
            metrics |= self._of_masked(embed, variables)
        return Evaluation(
            metrics,
            curves={"roc": roc_curve(features, labels)},
            samples=functools.partial(self._samples, features),
        )

    def _samples(self, features: np.ndarray) -> Samples:
        """Wrong pairs of unseen identities, and a map of some embeddings."""
        indices, is_same = self._pairs
        labels = self._task.partition.unseen_labels
        names = [f"identity {label}" for label in labels]
        unit = unit_rows(features)
        scores = (unit[indices[:, 0]] * unit[indices[:, 1]]).sum(axis=1)
        worst, threshold = worst_pairs(scores, is_same, NUM_WRONG_PAIRS)
        rows = indices[worst].ravel() + len(self._task.test_identities)
        size = self._task.evaluation_set.input_shape
        images = self._task.evaluation_set.take(rows).images if len(rows) else ()
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
        labels = self._task.partition.unseen_labels
        rows = len(self._task.test_identities) + np.arange(len(labels))
        views = self._views(embed, variables, self._tables[1], rows, self._covered)
        kind = 1 + np.arange(len(labels)) % 2
        masked = views[np.arange(len(labels)), kind]
        scores = masked_scores(views[:, 0], masked, labels, fprs=self._masked_fars)
        return {f"mfr_{name}": value for name, value in scores.items()}

    def personalized(
        self, embed: Callable, variables_of: Callable | None, variables: PyTree = None
    ) -> Evaluation:
        """Evaluate every client's model, or one model for all clients.

        Args:
          variables_of: client -> variables; None judges `variables` for everybody.
        """
        task = self._task
        test = np.arange(len(task.test_identities))
        train = np.arange(len(task.train_identities))
        shared = None
        if variables_of is None:
            shared = (
                self._embed(embed, variables, 1, test),
                self._embed(embed, variables, 0, train),
            )
        results = []
        for client, own in enumerate(task.partition.identities):
            low, high = task.population.offsets[client : client + 2]
            if shared is None:
                network = variables_of(client)
                queries = self._embed(embed, network, 1, test)
                gallery = self._embed(embed, network, 0, train[low:high])
            else:
                queries, gallery = shared[0], shared[1][low:high]
            results.append(self._judge_client(own, queries, gallery, low, high))
        over = mean_over_clients(results)
        own = task.partition.identities
        fewest = min_negatives(task.test_identities, own, self._negatives)

        def named(found):
            found = flag_unsupported(found, "tar@far", self._fars, fewest)
            return flag_unsupported(
                found, "tpir@fpir", self._fpirs, len(test)
            )  # as `pair_tpir`

        return Evaluation(named(over.mean), named(over.per_client))

    def _judge_client(self, identities, queries, gallery, low, high):
        labels = self._task.test_identities
        is_own = np.isin(labels, identities)
        verified = self._verify(queries, labels, is_own, fars=self._fars)
        identified = client_identification(
            queries,
            labels,
            gallery,
            self._task.train_identities[low:high],
            identities,
            fpirs=self._fpirs,
        )
        return {**verified, **identified}

    def _embed(self, embed, variables, table, rows):
        table = self._tables[table]
        return self._views(embed, variables, table, rows, self._plain)[:, 0]

    def _views(self, embed, variables, table, rows, augment):
        """Features [n, F, D] of table rows in the F views of an augment."""
        if (embed, augment) not in self._compiled:
            feed = Batching(self._batch_size, augment)
            self._compiled[embed, augment] = build_embed(embed, feed, self._mesh)
        run = self._compiled[embed, augment]
        values = run(variables, table, rows.astype(np.int32))
        return meshes.fetch(values)[: len(rows)]


def _open_files(task: FaceData, mesh: Mesh, **sets: Files):
    """Open the evaluation sets of the given keys: {prefix: (files, their images)}."""
    shape, tables = task.evaluation_set.input_shape, (task.table, task.evaluation_set)
    opened = {}
    for key, part in sets.items():
        prefix, factory = FILES[key]
        if part is None:
            continue
        if not isinstance(part, Part):
            part = parse(FilesReader(factory), part, f"config.evaluation.{key}")
        files = part(shape)
        opened[prefix] = files, open_evaluation_files(files, shape, tables, mesh)
    return opened
