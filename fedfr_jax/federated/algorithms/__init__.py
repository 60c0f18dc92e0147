"""Federated algorithms, as pure functions for one client each."""

from collections.abc import Callable

from fedfr_jax.federated.algorithms.afl import afl
from fedfr_jax.federated.algorithms.apfl import apfl
from fedfr_jax.federated.algorithms.cdw import cdw
from fedfr_jax.federated.algorithms.ditto import ditto
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedaws import fedaws
from fedfr_jax.federated.algorithms.feddane import feddane
from fedfr_jax.federated.algorithms.feddyn import feddyn
from fedfr_jax.federated.algorithms.fedfr import fedfr
from fedfr_jax.federated.algorithms.fedmargin import fedmargin
from fedfr_jax.federated.algorithms.fednova import fednova
from fedfr_jax.federated.algorithms.fedprox import fedprox
from fedfr_jax.federated.algorithms.fedrep import fedrep
from fedfr_jax.federated.algorithms.finch import finch
from fedfr_jax.federated.algorithms.ifca import fesem, hypcluster, ifca
from fedfr_jax.federated.algorithms.kd import kd
from fedfr_jax.federated.algorithms.mime import mime, mimelite
from fedfr_jax.federated.algorithms.moon import moon
from fedfr_jax.federated.algorithms.perfedavg import perfedavg
from fedfr_jax.federated.algorithms.pfedme import pfedme
from fedfr_jax.federated.algorithms.qfedavg import qfedavg
from fedfr_jax.federated.algorithms.scaffold import scaffold
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
