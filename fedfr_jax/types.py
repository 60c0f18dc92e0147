"""The contracts between the rooms: what a model, a source and an algorithm are.

Shape letters, the same everywhere: N clients in the population, K clients in a
round's cohort, L lanes trained side by side on a device, S local steps, B batch,
T examples in a table, H W C image, D embedding, M classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class Model(NamedTuple):
    """A network that maps images to embeddings; the only view of it outside models/."""

    init: Callable[[jax.Array], PyTree]  # key -> {"params": ..., "batch_stats": ...}
    apply: Callable[..., tuple[jax.Array, PyTree]]
    # (variables, x [B, H, W, C] in [-1, 1], train) -> (embedding [B, D], batch_stats)
    image_shape: tuple[int, int, int]  # (H, W, C)
    embedding_dim: int  # D


class Source(NamedTuple):
    """A labelled set of images, decoded on demand and all of one size."""

    read: Callable[[np.ndarray], np.ndarray]  # [n] int -> uint8 [n, H, W, C]
    labels: np.ndarray  # [T] int32 identity in [0, M)
    names: tuple[str, ...]  # M identity names
    image_shape: tuple[int, int, int]  # (H, W, C)
    landmarks: np.ndarray | None = None  # [T, 5, 2] float32 x, y pixels of `read`
    cameras: np.ndarray | None = None  # [T] int32 camera (or drawer, or session)
    pairs: "Pairs | None" = None  # the set's own verification protocol


class Pairs(NamedTuple):
    """Verification pairs by example index."""

    indices: np.ndarray  # [P, 2] int32
    is_same: np.ndarray  # [P] bool


class Batch(NamedTuple):
    """The examples of one local step, gathered and augmented on the device."""

    images: jax.Array  # [B, H, W, C] in [-1, 1]
    labels: jax.Array  # [B] int32: the client's own class, or the public class
    is_valid: jax.Array  # [B] bool, False for padding
    is_extra: jax.Array  # [B] bool, True for examples added by the server
    example: jax.Array  # [B] int32 row of the example table
    position: jax.Array  # [B] int32 place in the client's list of examples
    is_flipped: jax.Array  # [B] bool, mirrored left-right


class Client(NamedTuple):
    """One client's work in one round, built by the engine inside its lane."""

    id: jax.Array  # [] int32
    round: jax.Array  # [] int32
    num_local: jax.Array  # [] int32 own examples
    num_extra: jax.Array  # [] int32 examples added by the server
    num_classes: jax.Array  # [] int32 own classes
    num_steps: jax.Array  # [] int32 local steps S
    epoch: Callable[[jax.Array], jax.Array]  # step -> epoch, [] int32
    # step [] int32 -> shuffled, augmented batch
    batch: Callable[[jax.Array], Batch]
    span: Callable[..., Batch]  # (start, is_flipped) -> positions [start, start + B)
    num_positions: int  # static bound on the examples of any client, whole batches
    num_flips: int  # static: 2 when batches are mirrored at random, else 1
    tables: PyTree  # what `prepare` made for this round


class Cohort(NamedTuple):
    """The clients of one round in host memory, before they are scheduled."""

    ids: np.ndarray  # [K] int32
    round: int


class Extra(NamedTuple):
    """What the server computes for a cohort before it trains."""

    tables: PyTree  # replicated, handed to every client
    examples: jax.Array  # [K, X] int32 rows added to each client, X may be 0
    num_examples: jax.Array  # [K] int32 how many of them count


class ClientOutput(NamedTuple):
    """What one client sends back."""

    update: PyTree  # summed over clients after `summarize`
    weight: jax.Array  # []
    personal: PyTree  # stays with the client
    metrics: PyTree  # {name: []}
    upload: PyTree = ()  # kept per client, [K, ...] on the server


class Aggregator(NamedTuple):
    """A streamed reduction: finish(sum over clients of summarize(update, weight))."""

    summarize: Callable[[PyTree, jax.Array], PyTree]
    finish: Callable[[PyTree], PyTree]


class RoundResult(NamedTuple):
    """What the server sees of a round."""

    aggregate: PyTree
    upload: PyTree  # [K, ...] in the cohort's order
    metrics: PyTree  # {name: [K]} in the cohort's order
    weights: jax.Array  # [K]
    round: jax.Array  # [] int32


class Algorithm(NamedTuple):
    """Pure functions, each written for one client: no K, no mesh, no collective."""

    init: Callable[[PyTree], PyTree]  # variables -> server
    init_personal: Callable[..., PyTree]  # (key, server) -> personal
    client_update: Callable[..., ClientOutput]  # (key, server, personal, client)
    aggregator: Aggregator
    server_update: Callable[[PyTree, RoundResult], PyTree]  # -> server
    personalize: Callable[[PyTree, PyTree], PyTree]  # (server, personal) -> variables
    # (server, simulation, cohort); also traced for its shapes before the first round.
    prepare: Callable[..., Extra] | None = None
