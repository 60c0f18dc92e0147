"""Bits of the server after a job's rounds: on other numbers of devices, after a kill.

Its rounds run in processes of their own: on one device, on two, and on two where the
process is killed after its first round and another resumes from the checkpoint.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import jax
import numpy as np
import ours
import workloads

import fedfr_jax as ff

CASES = {"1 device": 1, "2 devices": 2, "killed after a round, on 2 devices": 2}
FLAG = "--xla_force_host_platform_device_count="


def train(work, data, num_rounds: int, folder: str, is_killed: bool) -> None:
    """Go on from the folder's last round; prints the digest of the server."""
    algorithm, variables, _, feed = ours.maker(work)(work)
    num_rows = work.population * work.examples
    images = data.images.reshape(num_rows, *work.input_shape)
    owners = np.repeat(np.arange(work.population), work.examples)
    clients = ff.FederatedDataset.from_client_ids(
        images, data.labels.reshape(-1), owners
    )
    run = ff.init(
        algorithm,
        clients,
        variables,
        batch_size=work.batch_size,
        batching=feed,
        cohort_size=work.cohort,
        local_epochs=work.epochs,
        reproducible_sum=True,
    )
    path = pathlib.Path(folder, "state.npz")
    run = ff.resume(run, path) if path.exists() else run
    while run.round_number < num_rounds:
        run, _ = ff.run_round(run)
        ff.save(run, path)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
    print(ours.digest_of(run.variables))


def digest_of_case(name: str, words: list[str]) -> str:
    """Digest that the case's process prints, the second one's after a kill."""
    settings = {**os.environ, "XLA_FLAGS": f"{FLAG}{CASES[name]}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *words, f"--folder={folder}"]
        runs = [[*command, "--kill"], command] if "killed" in name else [command]
        for run in runs:
            done = subprocess.run(run, env=settings, capture_output=True, text=True)
            is_killed = done.returncode == -signal.SIGKILL
            if is_killed != ("--kill" in run) or not is_killed and done.returncode:
                sys.exit(done.stderr[-1000:])
    return done.stdout.split()[-1]


def main():
    flags = {"kill": {"action": "store_true"}, "folder": {"default": ""}}
    args = workloads.arguments(__doc__, **flags)
    if args.folder:
        work, data = workloads.inputs(args)
        train(work, data, 1 + args.rounds, args.folder, args.kill)
        return
    clock, digests = workloads.Clock(), {}
    for name in CASES:
        with clock:
            digests[name] = digest_of_case(name, sys.argv[1:])
    clock.peak = workloads.peak_mib_of_children()
    facts = workloads.compared(digests)
    workloads.report(f"jax {jax.__version__}", clock, **facts)


if __name__ == "__main__":
    main()
