"""Draw identities, none twice, and lay their rows out by client and class."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Partition(NamedTuple):
    """Rows of a source for every part of a federated run.

    Rows of client c are `train[train_offsets[c]:train_offsets[c + 1]]`, and the same
    for test. A device table of `train ++ global_examples` therefore has client c at
    positions `train_offsets[c]:train_offsets[c + 1]` and public image g at position
    `len(train) + g`. "Identity" is always the source's own label.
    """

    train: np.ndarray  # [C] int32 rows, grouped by client, then by class
    train_offsets: np.ndarray  # [N + 1] int32
    train_labels: np.ndarray  # [C] int32 the client's own class
    num_classes: np.ndarray  # [N] int32
    test: np.ndarray  # [E] int32 rows, grouped like train
    test_offsets: np.ndarray  # [N + 1] int32
    test_labels: np.ndarray  # [E] int32 the client's own class
    test_identities: np.ndarray  # [E] int32
    identities: tuple[np.ndarray, ...]  # N x [num_classes[c]] int32, in class order
    global_examples: np.ndarray  # [G] int32 rows
    global_labels: np.ndarray  # [G] int32 in [0, K_g)
    global_identities: np.ndarray  # [K_g] int32
    unseen_examples: np.ndarray  # [U] int32 rows that no training sees
    unseen_labels: np.ndarray  # [U] int32 in [0, K_u)
    unseen_identities: np.ndarray  # [K_u] int32
    left_out: dict[str, int]  # identities and images that no part uses, by reason


def check_labels(labels: np.ndarray, num_identities: int = 0) -> np.ndarray:
    """Return labels [T] as int32, or raise.

    Args:
      labels: [T] int.
      num_identities: M; 0 leaves the upper end open.

    Raises:
      ValueError: not one axis, not integers, empty, negative, or not below M.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            "labels must be one axis of integers, got "
            f"shape {labels.shape} of {labels.dtype}."
        )
    if labels.size == 0:
        raise ValueError("labels must name at least one image, got none.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > np.iinfo(np.int32).max or 0 < num_identities <= high:
        end = num_identities or "2**31"
        raise ValueError(f"labels must lie in [0, {end}), got {low} to {high}.")
    return labels.astype(np.int32)


def client_sizes(
    num_clients: int, ids_per_client: int | Sequence[int], num_images: int
) -> np.ndarray:
    """[N] identities of each client; every client has one of `num_images` images."""
    if not 1 <= num_clients <= num_images:
        raise ValueError(
            f"num_clients must lie in [1, {num_images}], the images, got {num_clients}."
        )
    sizes = np.asarray(ids_per_client)
    is_right_shape = sizes.shape in ((), (num_clients,))
    if not is_right_shape or not np.issubdtype(sizes.dtype, np.integer):
        raise ValueError(
            f"ids_per_client must be one whole number or {num_clients} of them "
            f"(num_clients), got {ids_per_client}."
        )
    if sizes.min() < 1:
        raise ValueError(
            f"ids_per_client must be at least 1, or a client has no image, "
            f"got {int(sizes.min())}."
        )
    return np.broadcast_to(sizes, (num_clients,))


class Need(NamedTuple):
    """One part's demand for identities."""

    keys: str  # to lower when it cannot be met
    number: int
    pool: np.ndarray  # [M] bool


def draw(order: np.ndarray, *needs: Need) -> list[np.ndarray]:
    """Give every need its first identities in `order`, none twice."""
    free = np.ones(len(needs[0].pool), bool)
    drawn = {}
    # The choosiest first: otherwise the others may take what only it can use.
    for i in sorted(range(len(needs)), key=lambda i: (int(needs[i].pool.sum()), i)):
        keys, number, pool = needs[i]
        usable = order[(pool & free)[order]]
        if not 0 <= number <= len(usable):
            raise ValueError(
                f"identities must suffice for {keys}: {number} are needed, got "
                f"{len(usable)} free ones of {int(pool.sum())} that qualify, among "
                f"{len(order)}; lower {keys}."
            )
        drawn[i] = usable[:number].astype(np.int32)
        free[drawn[i]] = False
    return [drawn[i] for i in range(len(needs))]


def group(labels: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [T] sorted by label, then key; starts [M + 1] of each label among them."""
    order = np.lexsort((keys, labels)).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels))])
    return order, starts


def assemble(
    client_ids: Sequence[np.ndarray],
    global_ids: np.ndarray,
    unseen_ids: np.ndarray,
    rows_of: Callable,  # identity -> [n] rows
    split: Callable,  # rows [n] -> (train rows, test rows)
    counts: np.ndarray,  # [M] images per identity
    fewest: int,  # images that an identity must have to be of any use
) -> Partition:
    """Lay out the rows of the identities that were drawn."""
    halves = [[split(rows_of(i)) for i in identities] for identities in client_ids]
    train, train_offsets, train_labels = _clients([[h[0] for h in c] for c in halves])
    test, test_offsets, test_labels = _clients([[h[1] for h in c] for c in halves])
    test_sizes = [len(h[1]) for c in halves for h in c]
    public, public_labels = _classes([rows_of(i) for i in global_ids])
    unseen, unseen_labels = _classes([rows_of(i) for i in unseen_ids])
    num_rows = len(train) + len(test) + len(public) + len(unseen)
    num_ids = sum(map(len, client_ids)) + len(global_ids) + len(unseen_ids)
    num_poor = int(np.sum((counts > 0) & (counts < fewest)))
    left_out = {
        "identities with too few images": num_poor,
        "identities not needed": int(np.sum(counts > 0)) - num_poor - num_ids,
        "images": int(counts.sum()) - num_rows,
    }
    return Partition(
        train=train,
        train_offsets=train_offsets,
        train_labels=train_labels,
        num_classes=np.array([len(c) for c in client_ids], np.int32),
        test=test,
        test_offsets=test_offsets,
        test_labels=test_labels,
        test_identities=np.repeat(np.concatenate(client_ids), test_sizes),
        identities=tuple(client_ids),
        global_examples=public,
        global_labels=public_labels,
        global_identities=global_ids,
        unseen_examples=unseen,
        unseen_labels=unseen_labels,
        unseen_identities=unseen_ids,
        left_out=left_out,
    )


def _clients(groups):
    """Rows [.], offsets [N + 1], own labels [.] from rows by client and class."""
    rows, labels = zip(*[_classes(classes) for classes in groups], strict=True)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
    return np.concatenate(rows), offsets.astype(np.int32), np.concatenate(labels)


def _classes(groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows [.] in file order within a class, and their class [.]."""
    if not groups:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    labels = np.repeat(np.arange(len(groups), dtype=np.int32), [len(g) for g in groups])
    return np.concatenate([np.sort(g) for g in groups]), labels
