"""What a round of every row needs, on the same path as a run up to its images."""

import hashlib
import inspect
from collections.abc import Sequence

import ml_collections

from fedfr_jax.build import sections
from fedfr_jax.data.partition import format_report, report
from fedfr_jax.models import MODELS
from fedfr_jax.runs import dry_run as dry
from fedfr_jax.schema import choose
from fedfr_jax.tasks.faces.method_rows import build_method
from fedfr_jax.tasks.faces.methods import FaceMethod
from fedfr_jax.tasks.faces.recognition import recognition
from fedfr_jax.tasks.faces.stages import Plan, assemble, plan


def dry_run(
    config: ml_collections.ConfigDict,
    *,
    rows: Sequence[str] = (),
    compile: bool = True,
    hard_negatives: int = 10_000,
) -> dict[str, dict]:
    """Print and return what a round of every row needs; no image is read.

    The data is opened and split and the run put together as ever; `dry.stand_in` makes
    up a set that is not there. Central rows have no rounds, and the last round of the
    adapted rows is not counted.

    Args:
      rows: of `config.methods`; none: all.
      compile: the round, for the memory that it takes.
      hard_negatives: images that every client is assumed to select.

    Raises:
      ValueError: as `build`, and for an unknown row.
    """
    settings = sections(config)
    if settings["task"] != "faces":
        task = settings["task"]
        raise ValueError(f"config.task must be faces for a dry run, got {task!r}.")
    with dry.stand_in(settings) as settings:
        parts = plan(settings)
        check_rows(rows, parts)
        blank = dry.unread(parts.source)
        assemble(parts, recognition(blank, parts.partition, 2**30))
        print(format_report(report(parts.partition)))
        if parts.stream_bytes is not None:
            print(
                "\nA run streams the images from the host, "
                f"{parts.federation.table_gib:g} GiB at a time; below they are on the "
                "device."
            )
        return report_rows(
            parts, rows or parts.methods, compile=compile, hard_negatives=hard_negatives
        )


def check_rows(rows: Sequence[str], parts: Plan) -> None:
    """Raise ValueError for a row that the config does not have."""
    for name in rows:
        if name not in parts.methods:
            known = sorted(parts.methods)
            raise ValueError(f"--rows must be of {known}, got {name!r}.")


def report_rows(
    parts: Plan, rows: Sequence[str], *, compile: bool, hard_negatives: int
) -> dict[str, dict]:
    """Print and return {row: `dry.report`}; equal rounds are compiled once."""
    counted, found, first = unrolled(parts), {}, {}
    shared = parts.partition, parts.federation
    for name in rows:
        method = parts.methods[name]
        if not isinstance(method, FaceMethod):
            continue
        lowered, row = dry.lower_round(parts.model, method, *shared, parts.mesh)
        digest = hashlib.sha256(lowered.as_text().encode()).digest()
        if digest in first:
            found[name] = found[first[digest]]
            print(f"\n{name}: the round of {first[digest]}", flush=True)
            continue
        first[digest] = name
        options = parts.settings["methods"][name], parts.settings["pretrain"]
        of_counted = build_method(name, *options, counted, parts.partition)
        flops = dry.operations(
            counted, of_counted, *shared, hard_negatives=hard_negatives
        )
        compiled = lowered.compile() if compile else None
        found[name] = dry.report(lowered, row, parts.partition, flops, compiled)
        text = dry.format_report(found[name])
        print(f"\n{name}, on {parts.mesh.size} devices\n{text}", flush=True)
    return found


def unrolled(parts: Plan):
    """The model whose operations are counted: plain convolutions, no scans."""
    given = parts.settings["model"]
    known = inspect.signature(MODELS[given["name"]]).parameters
    plainly = {"scan": False, "lowering": "im2col"}
    given = {**given, **{k: v for k, v in plainly.items() if k in known}}
    return choose("model", MODELS, given, parts.source.image_shape)
