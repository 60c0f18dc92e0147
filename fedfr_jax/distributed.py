"""Multi-process runs: joining, number of cores, common exit.

JAX finds the other processes under Slurm, Open MPI, Kubernetes and on TPU pods; on
plain hosts a coordinator address is needed. All have to join within STARTUP seconds. No
process waits for one that has ended: JAX's coordinator stops all of them when one has
been silent for HEARTBEAT seconds, and `launch` and schedulers sooner.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping

HEARTBEAT, STARTUP = 60, 900  # seconds
TERMINAL = (signal.SIGINT, signal.SIGHUP)  # sent to a launcher's children as well
WATCHED = "FEDFR_ENDS_WITH_INPUT"  # set for the processes of `launch`
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
DEVICES_FLAG = "--xla_force_host_platform_device_count"
CLUSTER = (
    "in a cluster that JAX knows, see docs/how-to/clusters.md (on plain hosts set "
    "--coordinator, --num_processes and --process_id)"
)
# Else XLA's CPU devices abort if one trains a minute longer than the others.
EXIT_TIMEOUT = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 3600,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 7 * 86400,
    "--xla_cpu_collective_timeout_seconds": 7 * 86400,
}


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the processes of a run; call it before anything is computed.

    Args:
      coordinator: host:port of process 0; None, as for the numbers, if JAX finds them
        in the cluster's environment.
    """
    import jax

    address = (coordinator, num_processes, process_id)
    if None in address and address != (None, None, None):
        raise ValueError(
            "coordinator, num_processes and process_id must all be set or all be None, "
            f"got {address}."
        )
    if process_id is not None and process_id not in range(num_processes or 0):
        raise ValueError(
            f"process_id must be in [0, {(num_processes or 0) - 1}], got {process_id}."
        )
    # Two programs dispatched to a CPU device at once could meet those of other
    # processes in another order, a deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # It would handle SIGTERM itself, and the process would not end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *address,
            coordinator_bind_address=_bind_address(coordinator),
            cluster_detection_method="deactivate" if coordinator else None,
            initialization_timeout=STARTUP,
            heartbeat_timeout_seconds=HEARTBEAT,
            local_device_ids=_gpus_of_host(os.environ),
        )
    except Exception as error:  # of any kind, by a cluster's variables and servers
        location = f"at {coordinator}" if coordinator else CLUSTER
        # What does not answer, or not in time, may do so later.
        is_later = isinstance(error, OSError | RuntimeError)
        kind = ConnectionError if is_later else ValueError
        raise kind(
            f"the processes must join {location}, got {type(error).__name__}: {error}"
        ) from error


def _gpus_of_host(environment: Mapping[str, str]) -> list[int] | None:
    """All GPUs for the only process of a host under Slurm, where JAX takes one.

    None leaves them to JAX, as where several processes share a host.

    >>> _gpus_of_host({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "2"})
    [0, 1]
    """
    is_alone = re.fullmatch(
        r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    )
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    if is_alone and count.isdecimal() and "JAX_LOCAL_DEVICE_IDS" not in environment:
        return list(range(int(count))) or None
    return None


def _bind_address(coordinator: str | None) -> str | None:
    """Address on which process 0 listens; None for JAX's default, every interface."""
    host = (coordinator or "").rpartition(":")[0]
    return coordinator if host in LOOPBACK else None


def num_cores() -> int:
    """Number of cores that this process may use; on macOS and Windows all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_every_core(
    environment: MutableMapping[str, str] = os.environ, *, num_processes: int = 1
) -> None:
    """Make one JAX device per CPU core, unless XLA_FLAGS sets another number.

    The cores of the machine are divided among `num_processes` processes, and a device
    waits for the others for as long as their clients take.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    set_flags = {word.partition("=")[0] for word in flags}
    cores = max(num_cores() // num_processes, 1)
    for flag, value in {DEVICES_FLAG: cores, **EXIT_TIMEOUT}.items():
        if flag not in set_flags:
            flags.append(f"{flag}={value}")
    environment["XLA_FLAGS"] = " ".join(flags)


def exit_with_parent() -> None:
    """Exit when the `launch` process that started this one has ended.

    The launcher holds the other end of this process's input, and handles the signals
    that a terminal sends to both.
    """
    if not os.environ.pop(WATCHED, None):
        return

    def watch():
        while os.read(0, 1):
            pass
        os._exit(1)

    for number in TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL)  # blocked by the launcher
    threading.Thread(target=watch, daemon=True).start()


def exit_process(code: int) -> None:
    """Exit; a failed process among several does not wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    jax = sys.modules.get("jax")
    if code and jax and jax.distributed.is_initialized():
        os._exit(code)  # sys.exit would wait for processes that wait for this one
    sys.exit(code)
