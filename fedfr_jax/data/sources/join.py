"""Sources side by side: images of one after the other, identities never merged."""

from collections.abc import Mapping

import numpy as np

from fedfr_jax.data.sources import stored
from fedfr_jax.data.sources.images import check_rows
from fedfr_jax.types import Source


def join_sources(parts: Mapping[str, Source]) -> Source:
    """One source of several; names are <part>/<name>.

    People in more than one part count as different ones: join sets that share nobody.
    Pairs and masks are dropped; landmarks, test parts, cameras and roles stay when
    every source has them. Cameras keep their numbers: the camera 1 of two parts is two
    cameras. Preprocessing stays where it is the same for all.

    Raises:
      ValueError: without parts, or when their images differ in shape.
    """
    shapes = {name: part.image_shape for name, part in parts.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"parts must have images of one shape, got {shapes}.")
    sources = list(parts.values())
    starts = np.cumsum([0, *(len(s.labels) for s in sources)])
    first = np.cumsum([0, *(len(s.names) for s in sources)])
    shape = sources[0].image_shape

    def read(indices):
        rows = check_rows(indices, int(starts[-1]))
        images = np.empty((len(rows), *shape), np.uint8)
        owner = np.searchsorted(starts, rows, side="right") - 1
        for i, source in enumerate(sources):
            is_here = owner == i
            if is_here.any():
                images[is_here] = source.read(rows[is_here] - starts[i])
        return images

    labels = [s.labels + n for s, n in zip(sources, first[:-1], strict=True)]
    names = [f"{part}/{name}" for part, s in parts.items() for name in s.names]

    preparations = {s.preprocessing for s in sources}

    def joined(arrays):
        """One array of those of all parts, None where one has none."""
        return None if any(x is None for x in arrays) else np.concatenate(arrays)

    return Source(
        read=read,
        labels=np.concatenate(labels).astype(np.int32),
        names=tuple(names),
        image_shape=shape,
        landmarks=joined([s.landmarks for s in sources]),
        is_test=joined([s.is_test for s in sources]),
        cameras=joined([s.cameras for s in sources]),
        roles=joined([s.roles for s in sources]),
        passed_over="\n".join(s.passed_over for s in sources if s.passed_over),
        preprocessing=preparations.pop() if len(preparations) == 1 else None,
        stored=stored.joined(parts),
    )


def names_from(names: tuple[str, ...], part: str, key: str) -> np.ndarray:
    """Identities [M] bool whose name starts with `part`/.

    Raises:
      ValueError: naming `key` and the parts there are, when there is none.
    """
    parts = np.array([name.partition("/")[0] for name in names])
    if part not in parts:
        known = sorted(set(parts.tolist()))
        shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
        raise ValueError(f"{key} must be a part of the source ({shown}), got {part}.")
    return parts == part
