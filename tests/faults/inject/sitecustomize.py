"""Ends a Python process just before its n-th change of a file under a folder.

Python imports this by itself where it lies on PYTHONPATH. FAULTS_ROOT is the folder,
FAULTS_KILL is n; 0 kills nobody and writes every event to FAULTS_LOG. FAULTS_PROCESS
names the one of several processes that is meant.
"""

import os
import signal
import sys

WRITES = os.O_WRONLY | os.O_RDWR
BY_PATH = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def is_meant():
    number = os.environ["FAULTS_PROCESS"]
    words = " ".join(sys.orig_argv)
    if "launch" in words or "--process_id=" in words:
        return f"--process_id={number}" in sys.orig_argv
    return True


def install(root, kill_at, log):
    count = 0

    def event(name, what):
        nonlocal count
        count += 1
        if log:
            with_nothing_else = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(with_nothing_else, f"{name} {what}\n".encode())
            os.close(with_nothing_else)
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_inside(path):
        return isinstance(path, str | bytes | os.PathLike) and (
            os.fsdecode(path).startswith(root)
        )

    def hook(name, args):
        if name == "open":
            if args[2] and args[2] & WRITES and is_inside(args[0]):
                event(name, args[0])
        elif name in BY_PATH and is_inside(args[0]):
            event(name, args[0])

    def counted(name):
        whole = vars(os)[name]

        def call(file, *args):
            event(name, file)
            return whole(file, *args)

        setattr(os, name, call)

    sys.addaudithook(hook)
    for name in ("pwrite", "fsync", "ftruncate", "posix_fallocate"):
        counted(name)


if "FAULTS_ROOT" in os.environ and is_meant():
    install(
        os.environ["FAULTS_ROOT"],
        int(os.environ["FAULTS_KILL"]),
        os.environ.get("FAULTS_LOG"),
    )
