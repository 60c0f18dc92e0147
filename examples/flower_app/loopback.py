"""Flower's processes on this machine: a SuperLink and a SuperNode for each client."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

BIN = pathlib.Path(sys.executable).parent
CONNECTION = """[superlink]
default = "loopback"
[superlink.loopback]
address = "127.0.0.1:{port}"
insecure = true
"""


def free_ports(number):
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@contextlib.contextmanager
def running(folder, num_clients):
    """Yield (environment of `flwr`, processes), without TLS: nothing leaves here.

    Args:
      folder: for apps, compiled programs, logs and what the server saves.
    """
    port, *ports = free_ports(1 + num_clients)
    (folder / "config.toml").write_text(CONNECTION.format(port=port))
    names = {"SAVE_TO": "variables.npz", "JAX_COMPILATION_CACHE_DIR": "programs"}
    paths = {name: str(folder / word) for name, word in names.items()}
    paths["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # of Flower's commands
    environment = {**os.environ, "FLWR_HOME": str(folder), **paths}
    link = f"flower-superlink --insecure --port {port}"
    commands = [f"{link} --disable-runtime-dependency-installation"]
    for client, own in enumerate(ports):
        node = f"flower-supernode --insecure --superlink 127.0.0.1:{port} --port {own}"
        commands.append(f"{node} --node-config partition-id={client}")
    processes = []
    try:
        for number, command in enumerate(commands):
            name, *words = command.split()
            with (folder / f"{number}.log").open("w") as log:
                output = {"stdout": log, "stderr": subprocess.STDOUT}
                started = subprocess.Popen(
                    [BIN / name, *words], env=environment, **output
                )
            processes.append(started)
            if name == "flower-superlink":
                wait_for(port, started)
        yield environment, processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def wait_for(port, process):
    """Until the process listens on the port."""
    while process.poll() is None:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.5)
    raise RuntimeError(f"the SuperLink has ended, with code {process.returncode}.")


def run_command(app, **config):
    """Words of `flwr run` for the app's folder, with the server's log."""
    words = [
        f'{k}="{x}"' if isinstance(x, str) else f"{k}={x}" for k, x in config.items()
    ]
    command = [BIN / "flwr", "run", app, "loopback", "--stream"]
    return [*command, "--run-config", " ".join(words).replace("_", "-")]


def run(app, environment, **config):
    """`flwr run` of the app's folder until its end; prints the server's log."""
    subprocess.run(run_command(app, **config), env=environment, check=True)
