"""Old names of flags, kept for one version: the error names the new one."""

_WEIGHTS = {"network": "weights"}
RENAMED = {  # command: {old flag: new flag}; since 0.3
    "train": {"rows": "methods"},
    "plan": {
        "devices": "num_devices",
        "rows": "methods",
        "hard_negatives": "assume_hard_negatives",
    },
    "prepare": {"verify": "checksums"},
    "sweep": {"together": "vmap", "retry": "retry_failed"},
    "scaling": {"draws": "num_resamples", "arrows": "compare", "data": "data_column"},
    "launch": {
        "processes": "processes_per_host",
        "hosts": "num_hosts",
        "host": "host_index",
    },
    "export": {**_WEIGHTS, "to": "output"},
    "embed": {**_WEIGHTS, "to": "output"},
    "verify": _WEIGHTS,
    "enroll": _WEIGHTS,
    "identify": {**_WEIGHTS, "most": "top_k", "search": "search_backend"},
    "convert": {"from": "input", "to": "output", "image_shape": "input_shape"},
}


def check_renamed(prog: str, word: str) -> None:
    """Raise ValueError for the old name of a flag."""
    flag = word.partition("=")[0]
    new = RENAMED.get(prog.removeprefix("fedfr "), {}).get(flag.removeprefix("--"))
    if word.startswith("--") and new:
        raise ValueError(f"{prog}: {flag} is now --{new}.")
