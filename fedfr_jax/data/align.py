"""Five-point face alignment: similarity transform of landmarks to a template.

The least-squares similarity of Umeyama ("Least-squares estimation of transformation
parameters between two point patterns", PAMI 1991), which in the plane is one complex
quotient: with centered points p, q as complex numbers, scale * rotation is
sum(conj(p) q) / sum(|p|^2). Reflections are excluded by construction. The template is
ArcFace's (Deng et al., https://arxiv.org/abs/1801.07698).

Coordinates are x, y with integers at pixel centers, as OpenCV counts them.
"""

import jax
import numpy as np

# Eye at image left, eye at image right, nose, mouth left, mouth right, on 112 x 112.
ARCFACE_TEMPLATE = np.array(
    [
        [38.2946, 51.6963],
        [73.5318, 51.5014],
        [56.0252, 71.7366],
        [41.5493, 92.3655],
        [70.7299, 92.2041],
    ],
    np.float32,
)


def arcface_template(size: tuple[int, int]) -> np.ndarray:
    """ArcFace's five landmarks [5, 2] for a crop of `size`.

    A square multiple of 128 follows the wider 128-pixel convention (same scale, x + 8,
    y unchanged); every other size scales with its height and is cut or widened evenly
    left and right, so (112, 96) is the older template with x - 8.

    Args:
      size: (H, W) in pixels.

    Returns:
      [5, 2] float32 x, y.

    >>> arcface_template((112, 96))[0].round(4).astype(str).tolist()
    ['30.2946', '51.6963']
    """
    height, width = size
    if height == width and height % 128 == 0 and height % 112:
        scale, shift = height / 128, 8.0
    else:
        scale = height / 112
        shift = (width / scale - 112) / 2
    template = (ARCFACE_TEMPLATE + np.array([shift, 0.0])) * scale
    return template.astype(np.float32)


def similarity(
    landmarks: np.ndarray | jax.Array, template: np.ndarray | jax.Array
) -> np.ndarray | jax.Array:
    """Least-squares similarity M, without reflection, of landmarks to a template.

    Works on NumPy and on JAX arrays (traced too), in their own dtype.

    Args:
      landmarks: [..., 5, 2] x, y; any number of points from two on.
      template: [5, 2] x, y.

    Returns:
      [..., 2, 3] with M @ [x, y, 1] close to the template. Landmarks that all coincide
      fix no rotation; they get scale 0, so check for them before.
    """
    xp = landmarks.__array_namespace__()
    target = xp.broadcast_to(
        xp.asarray(template, dtype=landmarks.dtype), landmarks.shape
    )
    from_mean = landmarks.mean(axis=-2, keepdims=True)
    to_mean = target.mean(axis=-2, keepdims=True)
    px, py = _xy(landmarks - from_mean)
    qx, qy = _xy(target - to_mean)
    spread = (px * px + py * py).sum(axis=-1)
    spread = xp.where(spread > 0, spread, xp.ones_like(spread))
    a = (px * qx + py * qy).sum(axis=-1) / spread  # scale * cos
    b = (px * qy - py * qx).sum(axis=-1) / spread  # scale * sin
    linear = xp.stack([xp.stack([a, -b], axis=-1), xp.stack([b, a], axis=-1)], axis=-2)
    shift = to_mean[..., 0, :] - (linear * from_mean).sum(axis=-1)
    return xp.concatenate([linear, shift[..., None]], axis=-1)


def _xy(points):
    return points[..., 0], points[..., 1]


def transform(matrices: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Map points [..., P, 2] by matrices [..., 2, 3]: [..., P, 2]."""
    turned = np.einsum("...ij,...pj->...pi", matrices[..., :2], points)
    return turned + matrices[..., None, :, 2]


def rescale_points(
    points: np.ndarray, old: tuple[int, int], new: tuple[int, int]
) -> np.ndarray:
    """Rescale points [..., 2] from an image of size `old` to size `new`.

    Sizes are (H, W). Pixel areas scale, not pixel centers: x' = (x + 1/2) s - 1/2.
    """
    scale = np.array([new[1] / old[1], new[0] / old[0]], points.dtype)
    return (points + 0.5) * scale - 0.5
