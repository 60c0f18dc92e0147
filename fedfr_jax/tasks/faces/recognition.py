"""Face recognition: how networks are judged.

Generic: one network on identities that no training saw. Personalised: every client's
own network on the test images of all clients (FedFR, section 4; protocol of its code).
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import compose, face_mask, mirror
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.evaluation import CLIENT_VERIFICATIONS
from fedfr_jax.evaluation.blocks import ALL, NEGATIVES
from fedfr_jax.evaluation.enrolment import generic_identification
from fedfr_jax.evaluation.masked import masked_scores
from fedfr_jax.evaluation.personalized import client_identification, mean_over_clients
from fedfr_jax.evaluation.scores import marked
from fedfr_jax.evaluation.verification import (
    generic_verification,
    roc_curve,
    ten_fold,
)
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.schema import AT_ONCE, call, check_choice, check_ranges
from fedfr_jax.stream import placed
from fedfr_jax.tasks.faces.drawn_pairs import balanced_pairs, fewest_negatives
from fedfr_jax.tasks.faces.face_images import Recognition
from fedfr_jax.tasks.faces.judged_files import held, rates_of, settings_of
from fedfr_jax.tasks.faces.pair_list import pair_list
from fedfr_jax.tasks.faces.search_set import search_set
from fedfr_jax.tasks.faces.template_set import template_set
from fedfr_jax.types import (
    Evaluation,
    Evaluator,
    Networks,
    PyTree,
)

MAX_PAIRS = 6000  # the size of LFW's ten-fold protocol
# Key of config.evaluation -> how its metrics begin, and the files that it opens.
FILES = {
    "pairs": ("pairs_", pair_list),
    "search": ("search_", search_set),
    "templates": ("ijb_", template_set),
}


class Judge:
    """Embeds and scores; compiled once per embedding function.

    Args:
      task: the images.
      mesh: images are spread over its client devices.
      batch_size: images per device and call.
      fars: false accept rates of 1:1, generic and personalised.
      fpirs: false positive identification rates of 1:N, generic and personalised.
      pairs: settings of `pair_list`, or its path alone, whose metrics "pairs_..." join
        the generic ones; None leaves it out.
      templates: settings of `template_set`, or its path alone, likewise "ijb_...".
      search: settings of `search_set`, or its path alone, likewise "search_...".
      masked: rates in (0, 1) of "mfr_..." on the unseen identities with masks, see
        `masked_scores`; None leaves it out.
      personalised: thresholds of personalised 1:1, a key of CLIENT_VERIFICATIONS: exact
        order statistics, or the released evaluation's bins.
      negatives: of personalised 1:1, "all": pairs of an image of the client with any
        other identity, as the released code; "other_clients": of other clients only.
      seed: of the generic pairs.

    Raises:
      ValueError: for files and settings that do not fit, before anything is compiled.
    """

    def __init__(
        self,
        task: Recognition,
        mesh: Mesh,
        *,
        batch_size: int = 64,
        fars: float | Sequence[float] = (1e-3, 1e-2),
        fpirs: float | Sequence[float] = (1e-2, 1e-1),
        pairs: str | os.PathLike | Mapping | None = None,
        templates: str | os.PathLike | Mapping | None = None,
        search: str | os.PathLike | Mapping | None = None,
        masked: float | Sequence[float] | None = None,
        personalised: str = "exact",
        negatives: str = ALL,
        seed: int = 0,
    ):
        check_choice(
            "config.evaluation.personalised", personalised, CLIENT_VERIFICATIONS
        )
        check_choice("config.evaluation.negatives", negatives, NEGATIVES)
        check_ranges(
            "config.evaluation.", {"batch_size": batch_size}, {"batch_size": AT_ONCE}
        )
        verify = CLIENT_VERIFICATIONS[personalised]
        self._verify = functools.partial(verify, negatives=negatives)
        self._negatives = negatives
        self._task, self._mesh = task, mesh
        self._batch_size, self._compiled = batch_size, {}
        self._plain = normalization(task.how)
        self._mirrored = compose(mirror(), self._plain)
        self._covered = compose(face_mask(fixed=True), self._plain)
        self._fars = rates_of("evaluation.fars", fars)
        self._fpirs = rates_of("evaluation.fpirs", fpirs)
        self._masked = None
        if masked is not None:
            self._masked = rates_of("evaluation.masked", masked)
        self._pairs = balanced_pairs(task.partition.unseen_labels, MAX_PAIRS, seed)
        self._files = _open_files(
            task, mesh, pairs=pairs, search=search, templates=templates
        )
        self._tables = placed(task.table, mesh), placed(task.judged, mesh)

    @property
    def passed_over(self) -> str:
        """What the sets of files passed over, a line each."""
        found = (files.passed_over for files, _ in self._files.values())
        return "\n".join(filter(None, found))

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """Generic and personalised, which embeds for every client."""

        def generic(networks: Networks) -> Evaluation:
            return self.generic(networks.apply, networks.variables)

        def personalised(networks: Networks) -> Evaluation:
            of_client = networks.of_client
            embed = networks.client_apply if of_client else networks.apply
            return self.personalised(embed, of_client, networks.variables)

        return {
            "generic": Evaluator(generic),
            "personalised": Evaluator(personalised, in_rounds=False),
        }

    def generic(self, embed: Callable, variables: PyTree) -> Evaluation:
        """Judge one network on the unseen identities.

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
            seen = self._mirrored if files.is_mirrored else self._plain
            found = files.metrics(self._views(embed, variables, table, rows, seen))
            metrics |= {f"{prefix}{name}": value for name, value in found.items()}
        if self._masked is not None:
            metrics |= self._of_masked(embed, variables)
        return Evaluation(metrics, curves={"roc": roc_curve(features, labels)})

    def _of_masked(self, embed, variables) -> dict[str, float]:
        """Scores of the unseen identities, every second image with either mask."""
        labels = self._task.partition.unseen_labels
        rows = len(self._task.test_identities) + np.arange(len(labels))
        views = self._views(embed, variables, self._tables[1], rows, self._covered)
        kind = 1 + np.arange(len(labels)) % 2
        masked = views[np.arange(len(labels)), kind]
        found = masked_scores(views[:, 0], masked, labels, fprs=self._masked)
        return {f"mfr_{name}": value for name, value in found.items()}

    def personalised(
        self, embed: Callable, variables_of: Callable | None, variables: PyTree = None
    ) -> Evaluation:
        """Judge every client's own network, or one network for all.

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
        fewest = fewest_negatives(task.test_identities, own, self._negatives)

        def named(found):
            found = marked(found, "tar@far", self._fars, fewest)
            return marked(found, "tpir@fpir", self._fpirs, len(test))  # as `pair_tpir`

        return Evaluation(named(over.mean), named(over.per_client))

    def _judge_client(self, own, queries, gallery, low, high):
        labels = self._task.test_identities
        is_own = np.isin(labels, own)
        verified = self._verify(queries, labels, is_own, fars=self._fars)
        identified = client_identification(
            queries,
            labels,
            gallery,
            self._task.train_identities[low:high],
            own,
            fpirs=self._fpirs,
        )
        return {**verified, **identified}

    def _embed(self, embed, variables, table, rows):
        table = self._tables[table]
        return self._views(embed, variables, table, rows, self._plain)[:, 0]

    def _views(self, embed, variables, table, rows, augment):
        """Features [n, F, D] of table rows in the F views of an augment."""
        if (embed, augment) not in self._compiled:
            feed = Feed(self._batch_size, augment)
            self._compiled[embed, augment] = build_embed(embed, feed, self._mesh)
        run = self._compiled[embed, augment]
        values = run(variables, table, rows.astype(np.int32))
        return meshes.fetch(values)[: len(rows)]


def _open_files(task: Recognition, mesh: Mesh, **given):
    """{prefix: (files, their images)} of the wanted keys of FILES."""
    judged = task.judged
    shape = judged.image_shape
    opened = {}
    for key, settings in given.items():
        prefix, open_set = FILES[key]
        if settings is not None:
            section = f"evaluation.{key}"
            settings = settings_of(section, settings)
            opened[prefix] = call(section, open_set, settings, shape)
    tables = task.table, judged
    return {p: (f, held(f, shape, tables, mesh)) for p, f in opened.items()}
