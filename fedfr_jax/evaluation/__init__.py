"""Evaluation metrics: arrays in, {name: value} out."""

from fedfr_jax.evaluation.identification import (
    generic_identification,
    open_set_tpir,
    pair_tpir,
    rank_k,
)
from fedfr_jax.evaluation.personalized import (
    ClientSummary,
    client_identification,
    client_verification,
    client_verification_binned,
    mean_over_clients,
)
from fedfr_jax.evaluation.templates import (
    aggregate_templates,
    pair_scores,
    tar_nearest_far,
    weigh_images,
)
from fedfr_jax.evaluation.verification import (
    flip_sum,
    generic_verification,
    roc_curve,
    ten_fold,
)

# The personalized 1:1 of one client: exact order statistics, or the released bins.
CLIENT_VERIFICATIONS = {
    "binned": client_verification_binned,
    "exact": client_verification,
}

__all__ = [
    "CLIENT_VERIFICATIONS",
    "ClientSummary",
    "aggregate_templates",
    "client_identification",
    "client_verification",
    "client_verification_binned",
    "flip_sum",
    "generic_identification",
    "generic_verification",
    "mean_over_clients",
    "open_set_tpir",
    "pair_scores",
    "pair_tpir",
    "rank_k",
    "roc_curve",
    "tar_nearest_far",
    "ten_fold",
    "weigh_images",
]
