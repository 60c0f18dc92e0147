"""Overlap of classes by one network, and by every client's own on its own test images.

Generic: one network on all test images. Personalised: each client's network on the
client's test images; the mean is over clients, whatever their sizes. Classes that
neither the truth nor the prediction of those images has are left out of a mean.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.evaluation.segmentation import Overlap, confusion, overlap
from fedfr_jax.federated.outputs import build_sums
from fedfr_jax.feed import Feed
from fedfr_jax.stream import Stream, placed
from fedfr_jax.types import VOID, Dataset, Evaluation, Evaluator, Networks, PyTree


class Judged(NamedTuple):
    """What networks are judged on."""

    table: Dataset | Stream  # the clients' test images, grouped, with masks
    offsets: np.ndarray  # [N + 1] of each client's among them
    classes: tuple[str, ...]  # M names

    def rows(self, client: int) -> np.ndarray:
        """A client's rows of the table, [n]."""
        return np.arange(self.offsets[client], self.offsets[client + 1])

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.offsets) - 1


class Judge:
    """Compiled once per network function.

    Args:
      images: what is judged on.
      feed: how images are decoded; its batch size is per device.
    """

    def __init__(self, images: Judged, mesh: Mesh, feed: Feed):
        self._images = images._replace(table=placed(images.table, mesh))
        self._mesh, self._feed, self._compiled = mesh, feed, {}

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """Generic and personalised, and in the end the overlap of each class."""
        return {
            "generic": Evaluator(self.generic),
            "personalised": Evaluator(self.personalised),
            "iou": Evaluator(self.by_class, in_rounds=False),
        }

    def generic(self, networks: Networks) -> Evaluation:
        """The one network on all test images; nothing where there is none."""
        if networks.variables is None:
            return Evaluation()
        found = overlap(self._of_all(networks))
        return Evaluation(
            {"mIoU": found.mean_iou, "pixel_accuracy": found.pixel_accuracy}
        )

    def personalised(self, networks: Networks) -> Evaluation:
        """Every client's network on its own test images; who has none is left out."""
        counts = self._of_clients(networks)
        found = [overlap(one) for one in counts]
        per_client = {
            "mIoU": np.array([one.mean_iou for one in found]),
            "pixel_accuracy": np.array([one.pixel_accuracy for one in found]),
        }
        return Evaluation(spread(per_client), per_client)

    def by_class(self, networks: Networks) -> Evaluation:
        """The overlap of each class that there is, over all test images.

        Of the one network, or where there is none of each client's own on its images.
        """
        if networks.variables is not None:
            counts = self._of_all(networks)
        else:
            counts = np.sum(self._of_clients(networks), axis=0)
        found: Overlap = overlap(counts)
        pairs = zip(self._images.classes, found.iou.tolist(), strict=True)
        return Evaluation({name: iou for name, iou in pairs if not np.isnan(iou)})

    def _of_all(self, networks: Networks) -> np.ndarray:
        rows = np.arange(self._images.offsets[-1])
        return self._counts(networks.apply, networks.variables, rows)

    def _of_clients(self, networks: Networks) -> list[np.ndarray]:
        """A confusion matrix [M, M] per client, of zeros without a test image."""
        counts = []
        for client in range(self._images.num_clients):
            rows, apply = self._images.rows(client), networks.client_apply
            if not len(rows):
                counts.append(np.zeros([len(self._images.classes)] * 2, np.int64))
                continue
            if networks.of_client is None:
                apply, variables = networks.apply, networks.variables
            else:
                variables = networks.of_client(client)
            counts.append(self._counts(apply, variables, rows))
        return counts

    def _counts(
        self, apply: Callable, variables: PyTree, rows: np.ndarray
    ) -> np.ndarray:
        """The confusion matrix of table rows [n], which may be many."""
        if apply not in self._compiled:
            one = self._counter(apply)
            self._compiled[apply] = build_sums(one, self._feed, self._mesh)
        table = self._images.table
        return self._compiled[apply](variables, table, rows.astype(np.int32))

    def _counter(self, apply: Callable) -> Callable:
        num_classes = len(self._images.classes)

        def one(variables, inputs, targets, is_valid):
            predicted = apply(variables, inputs["image"]).argmax(axis=-1)
            truth = jnp.where(is_valid[:, None, None], targets["mask"], jnp.uint8(VOID))
            return confusion(truth, predicted, num_classes)

        return jax.jit(one)


def spread(per_client: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean of each of [N] numbers, and how far mIoU is spread; nan is left out."""
    known = {name: values[~np.isnan(values)] for name, values in per_client.items()}
    if not len(known["mIoU"]):
        return {}
    means = {name: float(values.mean()) for name, values in known.items()}
    return {
        **means,
        "mIoU_std": float(known["mIoU"].std()),
        "mIoU_min": float(known["mIoU"].min()),
    }
