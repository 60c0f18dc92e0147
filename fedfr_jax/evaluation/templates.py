"""IJB-style templates: one vector for a set of images of one subject.

The IJB-C protocol (Maze et al., 2018) as InsightFace runs it: images of one medium (a
video, a photograph) are averaged, media are summed, the sum is normalized. The released
FedFR evaluation is the same without flip and with the detector's score as weight.

1:1 takes the TAR at the ROC point whose FAR is nearest to the requested one, which may
exceed it; `drop_intermediate` thins the ROC before, as the original does by
scikit-learn's default, which changes the result. 1:N is in identification.py.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.error_rates import by_rate
from fedfr_jax.evaluation.score_tiles import check_features, to_float64, unit_length
from fedfr_jax.files import check_list, read_list
from fedfr_jax.schema import naming

FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_PAIRS_AT_ONCE = 8192


class Templates(NamedTuple):
    """Normalized templates, sorted by id."""

    features: jax.Array  # [U, D], unit rows
    ids: np.ndarray  # [U] int64

    def rows(self, template_ids) -> np.ndarray:
        """Rows [n] of the template ids [n]; raises ValueError for an unknown id."""
        template_ids = np.asarray(template_ids)
        rows = np.searchsorted(self.ids, template_ids).clip(0, len(self.ids) - 1)
        unknown = template_ids[self.ids[rows] != template_ids]
        if len(unknown):
            raise ValueError(
                f"template ids must be among the {len(self.ids)} aggregated ones, "
                f"got {np.unique(unknown)[:5].tolist()}."
            )
        return rows


class TemplateImages(NamedTuple):
    """Template id and media id of each image."""

    names: tuple[str, ...]  # T image files
    template_ids: np.ndarray  # [T] int64
    media_ids: np.ndarray  # [T] int64


class Subjects(NamedTuple):
    """Gallery or probe list: template id and subject id per row."""

    template_ids: np.ndarray  # [U] int64, ascending
    subject_ids: np.ndarray  # [U] int64


def weigh_images(
    features, *, flipped=None, detector_scores=None, keep_norm: bool = True
) -> jax.Array:
    """Weight image features [T, D] before they are averaged to templates.

    Args:
      features: [T, D], not normalized.
      flipped: [T, D] features of the mirrored images, added when given.
      detector_scores: [T] weights ("faceness"), multiplied when given.
      keep_norm: False normalizes each image before it is weighed.
    """
    x = jnp.asarray(features)
    x = x if flipped is None else x + jnp.asarray(flipped).astype(x.dtype)
    x = x if keep_norm else unit_length(x)
    if detector_scores is None:
        return x
    return x * jnp.asarray(detector_scores).astype(x.dtype)[:, None]


def aggregate_templates(features, template_ids, media_ids) -> Templates:
    """Build templates: normalized sum over media of the mean over a medium's images.

    Args:
      features: [T, D] from `weigh_images`.
      template_ids: [T] int.
      media_ids: [T] int; the same medium in two templates is two media.
    """
    check_features("image features", features, template_ids)
    ids, template = np.unique(np.asarray(template_ids), return_inverse=True)
    pairs = np.stack([template, np.asarray(media_ids)], axis=1)
    media, medium, counts = np.unique(
        pairs, axis=0, return_inverse=True, return_counts=True
    )
    x = to_float64(jnp.asarray(features))
    total = jax.ops.segment_sum(x, jnp.asarray(medium.ravel()), len(media))
    means = total / jnp.asarray(counts, x.dtype)[:, None]
    sums = jax.ops.segment_sum(means, jnp.asarray(media[:, 0]), len(ids))
    return Templates(unit_length(sums), ids)


@jax.jit
def _pair_scores(features, pairs):
    score = lambda pair: jnp.sum(features[pair[0]] * features[pair[1]])
    return jax.lax.map(score, pairs, batch_size=_PAIRS_AT_ONCE)


def pair_scores(templates: Templates, pairs) -> np.ndarray:
    """Cosines [P] of pairs of template ids [P, 2]."""
    pairs = np.asarray(pairs)
    rows = np.stack([templates.rows(pairs[:, i]) for i in (0, 1)], axis=1)
    return np.asarray(_pair_scores(templates.features, jnp.asarray(rows, jnp.int32)))


def roc_points(
    is_same, scores, *, drop_intermediate: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """ROC: FAR [n] and TAR [n] at each distinct score, both ascending from (0, 0).

    Args:
      is_same: [P] bool.
      scores: [P], larger is more alike.
      drop_intermediate: leave out points on a straight line between their neighbors.
    """
    is_same, scores = np.asarray(is_same, bool), np.asarray(scores)
    if not is_same.any() or is_same.all() or not np.isfinite(scores).all():
        raise ValueError(
            "scores must be finite, with at least one same and one different pair, got "
            f"{int(is_same.sum())} same pairs among {len(is_same)}."
        )
    order = np.argsort(-scores, kind="stable")
    is_last = np.append(np.diff(scores[order]) != 0, True)
    accepted = np.flatnonzero(is_last) + 1
    true = np.cumsum(is_same[order])[is_last]
    false = accepted - true
    if drop_intermediate and len(true) > 2:
        bends = (np.diff(false, 2) != 0) | (np.diff(true, 2) != 0)
        keep = np.concatenate([[True], bends, [True]])
        true, false = true[keep], false[keep]
    far, tar = np.append(0, false) / false[-1], np.append(0, true) / true[-1]
    return far, tar


def tar_nearest_far(
    is_same,
    scores,
    *,
    fars: Sequence[float] = FARS,
    drop_intermediate: bool = True,
) -> dict[str, float]:
    """TAR in [0, 1] at the ROC point whose FAR is nearest to each of `fars`.

    Points equally near give the larger FAR, and at one FAR the larger TAR. Arguments
    and errors are those of `roc_points`.
    """
    far, tar = roc_points(is_same, scores, drop_intermediate=drop_intermediate)
    far, tar = far[::-1], tar[::-1]
    return by_rate("tar@far", fars, [tar[np.argmin(abs(far - x))] for x in fars])


def area_under_curve(is_same, scores) -> float:
    """Area under the ROC in [0, 1]; arguments and errors as in `roc_points`."""
    far, tar = roc_points(is_same, scores, drop_intermediate=False)
    return float(np.trapezoid(tar, far))


def merge(*lists: Subjects) -> Subjects:
    """Concatenate galleries in the given order."""
    return Subjects(*(np.concatenate(column) for column in zip(*lists, strict=True)))


def _read_table(path, dtype, num_columns: int, **options) -> np.ndarray:
    """Read a table [n, num_columns] of numbers or words, by NumPy's parser in C."""
    check_list(path)
    source = path
    if dtype is str:  # names in NFC
        source = [line for line in read_list(path).splitlines() if line.strip()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # the file holds no row
            table = np.loadtxt(source, dtype, ndmin=2, encoding="utf-8-sig", **options)
    except (ValueError, UserWarning) as error:
        raise ValueError(f"{path} must be a table of numbers, got: {error}.") from None
    if table.shape[1] != num_columns:
        raise ValueError(
            f"{path} must have {num_columns} columns, got {table.shape[1]}."
        )
    return table


def read_template_media(path) -> TemplateImages:
    """Read `ijbc_face_tid_mid.txt`: image, template and medium per line."""
    table = _read_table(path, str, 3, comments=None)
    with naming(path):
        ids = table[:, 1:].astype(np.int64)
    return TemplateImages(tuple(table[:, 0].tolist()), ids[:, 0], ids[:, 1])


def read_landmarks(path) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Read `ijbc_name_5pts_score.txt`: image, five points and detector score per line.

    Returns:
      T names, landmarks [T, 5, 2] float32 (x, y in pixels of the loose crop) and
      detector scores [T] float32.
    """
    table = _read_table(path, str, 12, comments=None)
    with naming(path):
        values = table[:, 1:].astype(np.float32)
    return tuple(table[:, 0].tolist()), values[:, :10].reshape(-1, 5, 2), values[:, 10]


def read_pairs(path) -> tuple[np.ndarray, np.ndarray]:
    """Read `ijbc_template_pair_label.txt`: two templates and 1 or 0 per line.

    Returns:
      Template id pairs [P, 2] int64 and is_same [P] bool.
    """
    table = _read_table(path, np.int64, 3)
    if not np.isin(table[:, 2], (0, 1)).all():
        labels = np.unique(table[:, 2])[:5]
        raise ValueError(f"{path} must have 0 or 1 per line, got labels {labels}.")
    return table[:, :2], table[:, 2] == 1


def read_subjects(path) -> Subjects:
    """Read files such as `ijbc_1N_gallery_G1.csv`: a header, then one row per image.

    The first two columns are the template and its subject; the rest is ignored.
    """
    options = {"delimiter": ",", "quotechar": '"', "comments": None}
    table = _read_table(path, np.int64, 2, skiprows=1, usecols=(0, 1), **options)
    table = np.unique(table, axis=0)
    ids, counts = np.unique(table[:, 0], return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"{path} must have one subject per template, "
            f"got {counts.max()} for template {ids[counts.argmax()]}."
        )
    return Subjects(table[:, 0], table[:, 1])
