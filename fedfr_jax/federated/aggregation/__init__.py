"""Aggregation: the chain of links that turns clients' updates into one.

`with_aggregation(fedavg(local), clip_by_global_norm(max_norm=1.0), median())`; in a
config the key `aggregation` of a method. The contract is `types.Aggregator`.
"""

from collections.abc import Callable, Mapping, Sequence

from fedfr_jax.federated.aggregation.clip import (
    centered_clip,
    clip_by_global_norm,
    gaussian_noise,
    with_update_checks,
)
from fedfr_jax.federated.aggregation.compress import (
    random_k,
    rotate,
    sign,
    stochastic_quantize,
    top_k,
)
from fedfr_jax.federated.aggregation.contract import (
    chain,
    drop_non_finite,
    with_aggregation,
)
from fedfr_jax.federated.aggregation.exact_sum import quantize
from fedfr_jax.federated.aggregation.mean import attention, weighted_mean
from fedfr_jax.federated.aggregation.mixing import (
    adaptive_robust_clipping,
    bucketing,
    nearest_neighbor_mixing,
)
from fedfr_jax.federated.aggregation.robust import (
    bulyan,
    geometric_median,
    krum,
    median,
    of_all_updates,
    rfa,
    trimmed_mean,
)
from fedfr_jax.parts import choose
from fedfr_jax.schema import register
from fedfr_jax.types import Aggregator

__all__ = ["chain", "of_all_updates", "with_aggregation", "with_update_checks"]

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


def build_links(
    section: str, links: str | Mapping | Sequence = ()
) -> tuple[Aggregator, ...]:
    """Build the links of a config's `aggregation`.

    Args:
      section: of the key, such as "methods.fedavg.aggregation".
      links: a name of AGGREGATORS, {"name": ..., settings}, or a list of those.
    """
    links = (links,) if isinstance(links, str | Mapping) else links
    named = [{"name": link} if isinstance(link, str) else link for link in links]
    return tuple(
        choose(f"config.{section}", AGGREGATORS, settings) for settings in named
    )


def register_aggregator(name: str, factory: Callable) -> None:
    """Register `factory(*, ...settings) -> Aggregator` in AGGREGATORS."""
    register(AGGREGATORS, "aggregator", name, factory)
