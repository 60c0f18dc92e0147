"""Aggregation: the chain of links that turns clients' updates into one.

`with_aggregation(fedavg(local), clip_by_global_norm(max_norm=1.0), median())`; in a
config the key `aggregation` of a method. The contract is `types.Aggregator`, what is
made of it in `contract`.
"""

from collections.abc import Callable

from fedfr_jax.federated.aggregation.clip import (
    centered_clip,
    clip_by_global_norm,
    gaussian_noise,
)
from fedfr_jax.federated.aggregation.compress import (
    random_k,
    rotate,
    sign,
    stochastic_quantize,
    top_k,
)
from fedfr_jax.federated.aggregation.contract import chain, drop_non_finite
from fedfr_jax.federated.aggregation.exact_sum import quantize
from fedfr_jax.federated.aggregation.mean import attention, weighted_mean
from fedfr_jax.federated.aggregation.robust import (
    adaptive_robust_clipping,
    bucketing,
    bulyan,
    geometric_median,
    krum,
    median,
    nearest_neighbor_mixing,
    of_all_updates,
    rfa,
    trimmed_mean,
)
from fedfr_jax.schema import register

__all__ = ["chain", "of_all_updates"]

AGGREGATORS = {
    "adaptive_robust_clipping": adaptive_robust_clipping,
    "attention": attention,
    "bucketing": bucketing,
    "bulyan": bulyan,
    "centered_clip": centered_clip,
    "clip_by_global_norm": clip_by_global_norm,
    "drop_non_finite": drop_non_finite,
    "gaussian_noise": gaussian_noise,
    "geometric_median": geometric_median,
    "krum": krum,
    "median": median,
    "nearest_neighbor_mixing": nearest_neighbor_mixing,
    "quantize": quantize,
    "random_k": random_k,
    "rfa": rfa,
    "rotate": rotate,
    "sign": sign,
    "stochastic_quantize": stochastic_quantize,
    "top_k": top_k,
    "trimmed_mean": trimmed_mean,
    "weighted_mean": weighted_mean,
}


def register_aggregator(name: str, factory: Callable) -> None:
    """Register `factory(*, ...settings) -> Aggregator` in AGGREGATORS."""
    register(AGGREGATORS, "aggregator", name, factory)
