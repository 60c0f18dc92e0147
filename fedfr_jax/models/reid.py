"""ResNet for re-identification: features and identity logits.

Zhuang et al. 2020, "Performance Optimization for Federated Person Re-identification via
Benchmark Analysis", arXiv:2008.11560, whose released code has between average pooling
and classifier a linear layer, batch normalization and dropout ("linear" below). Luo et
al. 2019, "Bag of Tricks", arXiv:1903.07071, section 3.5, has batch normalization alone,
whose bias stays 0, and a classifier without bias ("bnneck").

Parameters: those of `resnet` without fc, and
  linear: neck/fc/{kernel [C, D], bias [D]}, neck/bn/{scale, bias} [D],
    classifier/{kernel [D, M], bias [M]}
  bnneck: neck/bn/scale [C], classifier/kernel [C, M]
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax import linen as nn

from fedfr_jax.models.layers import LayerSettings
from fedfr_jax.models.linen import Network, from_linen, he_normal, normal, sow_features
from fedfr_jax.models.norm import BatchNorm
from fedfr_jax.models.resnet import StemKind, resnet_trunk
from fedfr_jax.ranges import BelowOne, Blocks, Count, Depth, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

FIRST_SCALE = 0.02  # deviation of a linear neck's scales from 1
FIRST_CLASSIFIER = 0.001  # deviation of the classifier's weights from 0


@checked
def reid(
    input_shape: Sequence[int],
    *,
    num_classes: Count,
    depth: Depth = 50,
    blocks: Blocks | None = None,
    widths: Widths = (64, 128, 256, 512),
    stem: StemKind = "imagenet",
    last_stride: Annotated[int, Interval(ge=1, le=2)] = 2,
    neck: Literal["linear", "bnneck"] = "linear",
    neck_dim: Width = 512,
    dropout: BelowOne = 0.5,
    dtype: Any = None,
    remat: bool = False,
) -> Model:
    """ResNet with identity logits; `apply_with_features` gives the retrieval features.

    In training of a "bnneck" they are the pooled features before normalization, which a
    metric loss compares.

    Args:
      input_shape: (H, W, C), of people usually twice as high as wide.
      num_classes: M identities, of the client with the most.
      depth, blocks, widths, stem, dtype, remat: see `resnet`.
      last_stride: of the last stage, 2, or 1 for a map twice as large.
      neck: a name of NECKS.
      neck_dim: D of a linear neck.
      dropout: share of a linear neck's outputs that training sets to 0, in [0, 1);
        training then needs a key.
    """
    trunk = resnet_trunk(depth, blocks, widths, stem, remat, last_stride)
    has_bottleneck = neck == "linear"

    def forward(network, x, train):  # [B, H, W, C] -> logits [B, M]
        last_map = trunk.maps(LayerSettings(dtype), x, train)[-1]
        pooled = jnp.mean(last_map.astype(x.dtype), (1, 2))
        dim = neck_dim if has_bottleneck else 0
        feature = Neck(dim, dropout, name="neck")(pooled, train)
        sow_features(network, pooled if train and not has_bottleneck else feature)
        classifier = nn.Dense(
            num_classes,
            use_bias=has_bottleneck,
            kernel_init=normal(FIRST_CLASSIFIER),
            name="classifier",
        )
        return classifier(feature)

    network = Network(forward)
    names = [*trunk.names, "neck", "classifier"]
    return from_linen(network, input_shape, num_classes, blocks=names)


class Neck(nn.Module):
    """Neck: from the pooled feature to the retrieval feature."""

    neck_dim: int  # 0 for a "bnneck"
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, C] -> [B, D], or [B, C] without a bottleneck."""
        if not self.neck_dim:
            return BatchNorm(use_bias=False, name="bn")(x, train)
        x = nn.Dense(self.neck_dim, kernel_init=he_normal(), name="fc")(x)
        x = BatchNorm(scale_init=near_one, name="bn")(x, train)
        return nn.Dropout(self.dropout, deterministic=not train)(x)


def near_one(key: jax.Array, shape: tuple[int, ...], dtype: Any = float) -> jax.Array:
    """Initializer of N(1, FIRST_SCALE^2)."""
    return 1 + normal(FIRST_SCALE)(key, shape, dtype)
