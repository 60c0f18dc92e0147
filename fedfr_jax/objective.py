"""The forms that a loss may return, as one."""

from collections.abc import Callable


def with_aux(loss: Callable) -> Callable:
    """A loss of `Local` as one that always gives (scalar, (batch_stats, metrics))."""

    def full(variables, batch, key, **round_args):
        value = loss(variables, batch, key, **round_args)
        value, aux = value if isinstance(value, tuple) else (value, {})
        if not isinstance(aux, tuple):
            aux = variables["batch_stats"], aux
        return value, aux

    return full
