"""What a round asks of the compiler, and how it is lowered."""

import gc
import types

import jax
import numpy as np
import pytest

from fedfr_jax.federated.engine import compiler_options
from fedfr_jax.federated.programs import lowered


def test_what_is_asked_of_the_compiler_on_a_cpu_unless_the_user_says_other(monkeypatch):
    level, passes = "xla_backend_optimization_level", "xla_disable_hlo_passes"
    mesh = lambda kind: types.SimpleNamespace(
        devices=np.array([types.SimpleNamespace(platform=kind)])
    )
    asked = lambda kind, *others: compiler_options(mesh(kind), *others)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert asked("cpu", None) == {level: 2}
    assert asked("cpu", 8) == {level: 2, passes: "cse"}
    assert asked("gpu", None) == {}
    assert asked("gpu", 8) == {passes: "cse"}
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=0 --{passes}=dce")
    assert asked("cpu", None) == {}
    assert asked("cpu", 8) == {passes: "dce,cse"}


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_rests_while_a_round_is_lowered_and_is_as_it_was(is_on):
    def fine(x):
        seen.append(gc.isenabled())
        return x

    def broken(x):
        raise RuntimeError("of the algorithm")

    seen, was_on = [], gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        lowered(jax.jit(fine), 1.0)
        assert gc.isenabled() == is_on
        with pytest.raises(RuntimeError, match="of the algorithm"):
            lowered(jax.jit(broken), 1.0)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert seen == [False]
