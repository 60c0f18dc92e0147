"""Margin losses of the literature, built by the contract of `losses/contract.py`."""

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedfr_jax.losses.binary import binary_cross_entropy, spread_out
from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.margin import add_angle, label_entry
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.ranges import MAX, NonNegative, OpenShare, Positive, PositiveShare, Share
from fedfr_jax.schema import checked


@checked
def arcface(*, scale: Positive = 64.0, margin: NonNegative = 0.5) -> Margin:
    """ArcFace: logits scale * cos(angle + margin at the label), exact gradient.

    Deng et al. 2019, https://arxiv.org/abs/1801.07698, equation 3. Deviation: their
    first code uses another margin when angle + margin exceeds pi. Like the later
    released code, this one does not, so that the logit is not monotone there.

    d logit / d cosine of the label is scale * sin(angle + margin) / sin(angle), which
    is unbounded near cosine = +-1. At +-1 itself, where the direction of the gradient
    is undefined, scale * cos(margin) is used.
    """

    def target(inputs, state):
        del state
        return add_angle(inputs.cosine, margin)

    return Margin(scale, target)


@checked
def arcface_straight_through(
    *, scale: Positive = 64.0, margin: NonNegative = 0.5
) -> Margin:
    """ArcFace logits whose gradient ignores the margin (straight-through).

    The released code computes the margin in place, outside automatic differentiation,
    so that d logit / d cosine = scale for every entry, the label's too. The values are
    those of `arcface`, the gradients are not.
    """

    def target(inputs, state):
        del state
        step = add_angle(inputs.cosine, margin) - inputs.cosine
        return inputs.cosine + jax.lax.stop_gradient(step)

    return Margin(scale, target)


@checked
def cosface(*, scale: Positive = 64.0, margin: NonNegative = 0.4) -> Margin:
    """CosFace: logits scale * (cosine - margin at the label).

    Wang et al. 2018, https://arxiv.org/abs/1801.09414, equation 4.
    """

    def target(inputs, state):
        del state
        return inputs.cosine - margin

    return Margin(scale, target)


@checked
def class_hinge(*, margin: NonNegative = 0.4) -> Margin:
    """FedFace's pull to class vectors that stay, max(0, 1 - margin - cosine)^2.

    Aggarwal, Zhou, Jain 2021, https://arxiv.org/abs/2104.03008. Other classes count for
    nothing.
    """

    def target(inputs, state):
        del state
        return inputs.cosine

    def pull(logits, labels, class_mask, params):
        del class_mask, params
        return jnp.square(jax.nn.relu(1 - margin - label_entry(logits, labels)))

    return Margin(1.0, target, loss=pull, fixes_classes=True)


@checked
def curricularface(
    *, scale: Positive = 64.0, margin: NonNegative = 0.5, ema_rate: Share = 0.01
) -> Margin:
    """CurricularFace: ArcFace whose hard negative classes get more and more weight.

    Huang et al. 2020, https://arxiv.org/abs/2004.00288, equations 8 to 11, and the
    released code. The state is t, the running mean of the cosine with the true class.
    Another class whose cosine c is above cos(angle + margin) of the true class has
    scale * c (t + c). Where angle + margin passes pi the true class has scale * (cosine
    - margin sin(margin)), while others are still compared with cos(angle + margin).

    Args:
      ema_rate: weight of a batch's mean cosine in t, in [0, 1].
    """

    def move(state, inputs):
        mean = masked_mean(jnp.clip(inputs.cosine, -1, 1), inputs.is_valid)
        return {"t": ema_rate * mean + (1 - ema_rate) * state["t"]}

    def target(inputs, state):
        del state
        below = inputs.cosine - margin * math.sin(margin)
        is_inside = inputs.cosine > -math.cos(margin)
        return jnp.where(is_inside, add_angle(inputs.cosine, margin), below)

    def others(cosine, inputs, state):
        is_hard = cosine > add_angle(inputs.cosine, margin)[:, None]
        return jnp.where(is_hard, cosine * (state["t"] + cosine), cosine)

    return Margin(scale, target, others, state={"t": 0.0}, update_state=move)


@checked
def uniface(
    *,
    scale: Positive = 64.0,
    margin: NonNegative = 0.4,
    negative_weight: NonNegative = 1.0,
) -> Margin:
    """UniFace: binary cross entropy per class of scale * cosine - bias.

    Zhou et al. 2023, "UniFace: Unified Cross-Entropy Loss for Deep Face Recognition",
    ICCV 2023, equation 9, and the released code. Deviation: softplus in place of
    log(1 + e^x). The bias is the threshold, the same for all classes; it is learned and
    starts at log(10 M). Logits are clipped to +-scale, without gradient outside.

    Args:
      negative_weight: of the other classes' sum, at least 0; the paper's l.
    """

    def target(inputs, state):
        del state
        return inputs.cosine - margin

    def classify(logits, labels, class_mask, params):
        above = logits - jnp.reshape(params["bias"], (1, -1)).astype(logits.dtype)
        return binary_cross_entropy(
            jnp.clip(above, -scale, scale),
            labels,
            class_mask,
            weights=(1.0, negative_weight),
        )

    start = lambda num_classes: {"bias": jnp.float32(math.log(10 * num_classes))}
    return Margin(scale, target, params=start, loss=classify)


@checked
def elasticface(
    *,
    scale: Positive = 64.0,
    margin: NonNegative = 0.5,
    std: NonNegative = 0.05,
    margin_on: Literal["angle", "cosine"] = "angle",
    plus: bool = False,
) -> Margin:
    """ElasticFace: ArcFace or CosFace with a margin from N(margin, std^2) per example.

    Boutros et al. 2022, https://arxiv.org/abs/2109.09416, equations 4 to 7. Deviation:
    with `plus` the k-th smallest margin goes to the example with the k-th largest
    cosine, as the paper has it; the released code indexes the sorted margins with the
    order of the cosines.

    Args:
      margin: mean of the margins; the paper has 0.5 on the angle, 0.35 on the cosine.
      std: their deviation, at least 0; the paper has 0.05, with `plus` 0.0175 on the
        angle and 0.025 on the cosine.
      margin_on: angle (ElasticFace-Arc) or cosine (ElasticFace-Cos).
      plus: the larger an example's cosine, the smaller its margin.
    """

    def target(inputs, state):
        del state
        margins = margin + std * draw(inputs)
        if plus:
            margins = in_order(margins, inputs)
        if margin_on == "angle":
            return add_angle(inputs.cosine, margins)
        return inputs.cosine - margins

    return Margin(scale, target)


def draw(inputs):
    """Sample standard normal values [B] with the step's key."""
    if inputs.key is None:
        raise ValueError("elasticface needs a key to sample its margins, got None.")
    return jax.random.normal(inputs.key, inputs.cosine.shape, inputs.cosine.dtype)


def in_order(margins, inputs):
    """Sort margins [B], the smallest to the largest cosine, padding last."""
    cosine = jnp.where(inputs.is_valid, inputs.cosine, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-jax.lax.stop_gradient(cosine)))
    return jnp.sort(margins)[rank]


NORMS = (1e-3, 100.0)  # of lengths that count
MAX_COSINE = 0.999
MIN_ANGLE = 1e-3


@checked
def adaface(
    *,
    scale: Positive = 64.0,
    margin: NonNegative = 0.4,
    h: Positive = 0.333,
    ema_rate: PositiveShare = 0.01,
) -> Margin:
    """AdaFace: logits scale * (cos(angle - margin v) - margin - margin v) at the label.

    Kim, Jain, Liu 2022, https://arxiv.org/abs/2204.00964, equations 10 to 15, and the
    released code. v = clip(h (length - mean) / deviation, -1, 1) is the image quality
    by the feature's length: a long feature gets a margin that stresses hard examples, a
    short one a margin that stresses easy ones. The length is a constant for the
    gradient; the running mean and deviation of lengths are the state. Cosines are
    clipped to +-0.999 and the shifted angle to [0.001, pi - 0.001], without gradient
    outside.

    Args:
      margin: m, at least 0.
      h: deviations of length that make the margin's full change are 1 / h; positive.
      ema_rate: weight of a batch's mean and deviation in the running ones, in (0, 1];
        the released code's `t_alpha`.
    """

    def move(state, inputs):
        mean, deviation = _moments(jnp.clip(inputs.norm, *NORMS), inputs.is_valid)
        deviation = jnp.where(inputs.is_valid.sum() > 1, deviation, state["deviation"])
        batch = {"mean": mean, "deviation": deviation}
        return {k: ema_rate * batch[k] + (1 - ema_rate) * state[k] for k in state}

    def target(inputs, state):
        length = jnp.clip(jax.lax.stop_gradient(inputs.norm), *NORMS)
        v = h * (length - state["mean"]) / (state["deviation"] + 1e-3)
        v = jnp.clip(v, -1, 1)
        angle = jnp.arccos(_inside(inputs.cosine)) - margin * v
        angle = jnp.clip(angle, MIN_ANGLE, jnp.pi - MIN_ANGLE)
        return jnp.cos(angle) - margin - margin * v

    def others(cosine, inputs, state):
        del inputs, state
        return _inside(cosine)

    start = {"mean": 20.0, "deviation": 100.0}
    return Margin(scale, target, others, state=start, update_state=move)


def _inside(cosine):
    return jnp.clip(cosine, -MAX_COSINE, MAX_COSINE)


def _moments(values, is_valid):
    """Mean and unbiased standard deviation [] of the valid entries of values [B]."""
    count = is_valid.sum().astype(values.dtype)
    mean = jnp.where(is_valid, values, 0).sum() / jnp.maximum(count, 1)
    square = jnp.where(is_valid, jnp.square(values - mean), 0).sum()
    return mean, jnp.sqrt(square / jnp.maximum(count - 1, 1))


@checked
def magface(
    *,
    scale: Positive = 64.0,
    margin: NonNegative = 0.45,
    max_margin: float = 0.8,
    min_norm: Positive = 10.0,
    max_norm: float = 110.0,
    norm_penalty_weight: NonNegative = 35.0,
    easy_margin: bool = True,
) -> Margin:
    """MagFace: logits scale * cos(angle + m(length) at the label), m linear.

    Meng et al. 2021, https://arxiv.org/abs/2103.06627, equations 4 to 6, and the
    released code. The loss has norm_penalty_weight * (length / max_norm^2 + 1 / length)
    added, which falls up to max_norm. The gradient flows through the length, in margin
    and penalty, and is 0 along a feature whose length is outside the bounds.

    Args:
      margin: radians, at a length of `min_norm`.
      max_margin: radians, at a length of `max_norm`; at least `margin`.
      min_norm: shorter features count as this long; positive.
      max_norm: longer features count as this long.
      norm_penalty_weight: weight of the pull, at least 0.
      easy_margin: no margin where the cosine is not positive; otherwise cosine - m
        sin(m) where angle + m passes pi.
    """
    if max_margin < margin:
        raise ValueError(f"max_margin must be at least {margin}, got {max_margin}.")
    if max_norm <= min_norm:
        raise ValueError(f"max_norm must be above {min_norm}, got {max_norm}.")
    slope = (max_margin - margin) / (max_norm - min_norm)

    def target(inputs, state):
        del state
        length = jnp.clip(inputs.norm, min_norm, max_norm)
        m = margin + slope * (length - min_norm)
        added = add_angle(inputs.cosine, m)
        if easy_margin:
            return jnp.where(inputs.cosine > 0, added, inputs.cosine)
        below = inputs.cosine - m * jnp.sin(m)
        return jnp.where(inputs.cosine > -jnp.cos(m), added, below)

    def pull(norm):
        length = jnp.clip(norm, min_norm, max_norm)
        return norm_penalty_weight * (length / max_norm**2 + 1 / length)

    return Margin(scale, target, penalty=pull)


@checked
def sphereface2(
    *,
    scale: Positive = 40.0,
    margin: NonNegative = 0.4,
    t: Annotated[float, Interval(ge=1, le=MAX)] = 3.0,
    positive_weight: OpenShare = 0.7,
    loss_weight: NonNegative = 50.0,
) -> Margin:
    """SphereFace2: weighted binary cross entropies of scale * (g(c) -+ margin) + b.

    Wen et al. 2022, https://arxiv.org/abs/2108.01513, equations 5 to 8, type C.
    Deviation: the gradient flows through g; the released code takes a slope of 1. See
    `binary.binary_branch` for FedFR's form.

    g(c) = 2 ((c + 1) / 2)^t - 1 for every cosine c; the margin is subtracted for the
    true class and added for the others. The bias b starts where the two weighted sums
    are balanced at c = 0.

    Args:
      scale: r, positive.
      margin: m, of the adjusted cosine.
      t: at least 1; spreads the similarities of wrong classes.
      positive_weight: lambda, of the positive against the negatives, in (0, 1).
      loss_weight: of the whole loss; the released code's `lw`.
    """
    shares = (positive_weight, 1 - positive_weight)

    def target(inputs, state):
        del state
        return spread_out(inputs.cosine, t) - margin

    def others(cosine, inputs, state):
        del inputs, state
        return spread_out(cosine, t) + margin

    def classify(logits, labels, class_mask, params):
        logits = logits + jnp.reshape(params["bias"], (1, 1)).astype(logits.dtype)
        losses = binary_cross_entropy(logits, labels, class_mask, weights=shares)
        return loss_weight / scale * losses

    def start(num_classes):
        middle = 2 * 0.5**t - 1
        own_logit, other_logit = scale * (middle - margin), scale * (middle + margin)
        bias = balance_positives(own_logit, other_logit, num_classes, *shares)
        return {"bias": jnp.float32(bias)}

    return Margin(scale, target, others, params=start, loss=classify)


def balance_positives(
    own_logit: float,
    other_logit: float,
    num_classes: int,
    positive: float,
    negative: float,
) -> float:
    """Initial bias at which the weighted positive and negative gradients are equal.

    Args:
      own_logit, other_logit: without a bias, of the true and of other classes.
    """
    k = positive / (negative * max(num_classes - 1, 1))
    root = math.sqrt((1 - k) ** 2 + 4 * k * math.exp(own_logit - other_logit))
    return math.log(2 * k) - other_logit - math.log(1 - k + root)
