"""Accuracy of one network, and of every client's own on its own test images.

Generic: one network on all test images. Personalised: each client's network on the
client's test images; the mean is over clients, whatever their sizes, as FedPer plots it
(Arivazhagan et al. 2019, arXiv:1912.00818, section 4), beside its spread.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.outputs import build_embed
from fedfr_jax.feed import Feed
from fedfr_jax.stream import Stream, placed
from fedfr_jax.types import Dataset, Evaluation, Evaluator, Networks, PyTree


class Accuracy:
    """Compiled once per network function.

    Args:
      table: the clients' test images, grouped, with their labels.
      offsets: [N + 1] of each client's among them.
      feed: how images are decoded; its batch size is per device.
    """

    def __init__(
        self, table: Dataset | Stream, offsets: np.ndarray, mesh: Mesh, feed: Feed
    ):
        self._table, self._offsets = placed(table, mesh), offsets
        self._labels = np.asarray(table.labels)
        self._mesh, self._feed, self._compiled = mesh, feed, {}

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """Generic and personalised."""
        return {
            "generic": Evaluator(self.generic),
            "personalised": Evaluator(self.personalised),
        }

    def generic(self, networks: Networks) -> Evaluation:
        """The one network on all test images; nothing where there is none."""
        if networks.variables is None:
            return Evaluation()
        is_right = self._is_right(networks.apply, networks.variables, self._all())
        return Evaluation({"accuracy": float(is_right.mean())})

    def personalised(self, networks: Networks) -> Evaluation:
        """Every client's network on its own test images; who has none is left out."""
        bounds = list(zip(self._offsets[:-1], self._offsets[1:], strict=True))
        if networks.of_client is None:
            right = self._is_right(networks.apply, networks.variables, self._all())
            parts = [right[low:high] for low, high in bounds]
        else:
            parts = [
                self._is_right(
                    networks.client_apply,
                    networks.of_client(client),
                    np.arange(low, high),
                )
                if high > low
                else np.zeros(0)
                for client, (low, high) in enumerate(bounds)
            ]
        per_client = np.array([x.mean() if len(x) else np.nan for x in parts])
        return Evaluation(spread(per_client), {"accuracy": per_client})

    def _all(self):
        return np.arange(len(self._labels))

    def _is_right(self, apply: Callable, variables: PyTree, rows: np.ndarray):
        """Whether each of table rows [n] is told right, [n] bool."""
        if apply not in self._compiled:
            best = jax.jit(lambda v, x: apply(v, x).argmax(1, keepdims=True))
            self._compiled[apply] = build_embed(best, self._feed, self._mesh)
        found = self._compiled[apply](variables, self._table, rows.astype(np.int32))
        return meshes.fetch(found)[: len(rows), 0, 0] == self._labels[rows]


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean, deviation, extremes and worst decile of values [N], nan being left out.

    Nothing, where none is left: no client has a test image.
    """
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return {}
    tenth = known[: max(len(known) // 10, 1)]
    return {
        "accuracy": float(known.mean()),
        "accuracy_std": float(known.std()),
        "accuracy_min": float(known[0]),
        "accuracy_max": float(known[-1]),
        "accuracy_worst_decile": float(tenth.mean()),
    }
