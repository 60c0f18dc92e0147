"""Federated algorithms, as pure functions for one client each."""

from collections.abc import Callable

from fedfr_jax.federated.algorithms import (
    clusters,
    corrections,
    fair,
    fedavg,
    fedfr,
    fedmargin,
    fedreid,
    one_shot,
    personal_models,
    phases,
    proximal,
    spreadout,
)
from fedfr_jax.schema import register

ALGORITHMS = {
    "afl": fair.afl,
    "apfl": personal_models.apfl,
    "cdw": fedreid.cdw,
    "ditto": personal_models.ditto,
    "fedavg": fedavg.fedavg,
    "fedaws": spreadout.fedaws,
    "feddane": corrections.feddane,
    "feddyn": proximal.feddyn,
    "fedfr": fedfr.fedfr,
    "fedmargin": fedmargin.fedmargin,
    "fednova": proximal.fednova,
    "fedprox": proximal.fedprox,
    "fedrep": phases.fedrep,
    "fesem": clusters.fesem,
    "finch": clusters.finch,
    "hypcluster": clusters.hypcluster,
    "ifca": clusters.ifca,
    "kd": fedreid.kd,
    "mime": corrections.mime,
    "mimelite": corrections.mimelite,
    "moon": proximal.moon,
    "one_shot": one_shot.one_shot,
    "perfedavg": personal_models.perfedavg,
    "pfedme": personal_models.pfedme,
    "qfedavg": fair.qfedavg,
    "scaffold": corrections.scaffold,
}


def register_algorithm(name: str, factory: Callable) -> None:
    """Register `factory(local, *, ...hyper) -> Algorithm` in ALGORITHMS."""
    register(ALGORITHMS, "algorithm", name, factory)
