"""What a compiler has said, as lines for a terminal."""

from collections.abc import Mapping


def lines_of(name: str, programs: Mapping[str, Mapping]) -> str:
    """A stage's programs, see `compiled.compiled`."""
    return "\n".join(_line(f"{name}, {what}", of) for what, of in programs.items())


def _line(name, of):
    if "gib" not in of:
        return f"{name}: does not fit. {of['says']}"
    size, step = of["gib"], of["step"] or {}
    parts = [
        f"{size['needed']:.2f} GiB a device ({size['arguments']:.2f} arguments, "
        f"{size['temporaries']:.2f} temporary)" + ("" if of["fits"] else ", TOO LARGE"),
        "collectives: " + _collectives(of["whole"]),
    ]
    if step:
        parts.append(
            f"a step: {step['kernels']} kernels, {step['convolutions']} of convolutions"
            f", collectives: {_collectives(step)}"
        )
    if seconds := of["optimal_seconds"]:
        parts.append(f"{1e3 * seconds:.2f} ms with each loop turned once (estimate)")
    return "\n  ".join([f"{name}:", *parts])


def _collectives(counts):
    found = counts["collectives"].items()
    said = [f"{n} {kind} ({counts['megabytes'][kind]:,.1f} MB)" for kind, n in found]
    return ", ".join(said) or "none"
