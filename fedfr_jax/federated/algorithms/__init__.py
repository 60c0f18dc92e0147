"""Federated algorithms, as pure functions for one client each."""

from collections.abc import Callable

from fedfr_jax.federated.algorithms.apfl import apfl
from fedfr_jax.federated.algorithms.clusters import fesem, finch, hypcluster, ifca
from fedfr_jax.federated.algorithms.corrections import feddane, mime, mimelite, scaffold
from fedfr_jax.federated.algorithms.fair import afl, qfedavg
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.algorithms.fedmargin import fedmargin
from fedfr_jax.federated.algorithms.fednova import fednova
from fedfr_jax.federated.algorithms.fedreid import cdw, kd
from fedfr_jax.federated.algorithms.perfedavg import perfedavg
from fedfr_jax.federated.algorithms.phases import fedrep
from fedfr_jax.federated.algorithms.proximal import (
    ditto,
    feddyn,
    fedprox,
    moon,
    pfedme,
)
from fedfr_jax.federated.algorithms.spreadout import fedaws
from fedfr_jax.schema import register

ALGORITHMS = {
    "afl": afl,
    "apfl": apfl,
    "cdw": cdw,
    "ditto": ditto,
    "fedavg": fedavg,
    "fedaws": fedaws,
    "feddane": feddane,
    "feddyn": feddyn,
    "fedfr": fedfr,
    "fedmargin": fedmargin,
    "fednova": fednova,
    "fedprox": fedprox,
    "fedrep": fedrep,
    "fesem": fesem,
    "finch": finch,
    "hypcluster": hypcluster,
    "ifca": ifca,
    "kd": kd,
    "mime": mime,
    "mimelite": mimelite,
    "moon": moon,
    "perfedavg": perfedavg,
    "pfedme": pfedme,
    "qfedavg": qfedavg,
    "scaffold": scaffold,
}


def register_algorithm(name: str, factory: Callable) -> None:
    """Register `factory(local, *, ...hyper) -> Algorithm` in ALGORITHMS."""
    register(ALGORITHMS, "algorithm", name, factory)
