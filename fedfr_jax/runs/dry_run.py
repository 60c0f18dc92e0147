"""What one federated round will need, without images, memory or training.

The round is lowered and compiled from shapes alone. Memory is the compiler's.
Floating-point operations are the compiler's for one step and one image, times how often
they happen; it counts a loop's body once, so networks are unrolled for the count, and
the loops are multiplied here. Left out is what else happens once per round: the
server's update, a client's start and class means, what IFCA and q-FedAvg ask of all its
images. Data that is not there is made up, with the same counts.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.identities import Partition
from fedfr_jax.data.partition import ms1m_order
from fedfr_jax.data.sources.images import parse_size
from fedfr_jax.data.sources.recordio import rec_path, write_stand_in
from fedfr_jax.federated.compiling import lowered
from fedfr_jax.federated.engine import build_round
from fedfr_jax.federated.settings import Federation
from fedfr_jax.federated.shapes import round_arguments
from fedfr_jax.federated.store import VERSIONS
from fedfr_jax.runs import step_cost
from fedfr_jax.runs.round_shapes import RoundShapes, round_shapes
from fedfr_jax.tasks.faces.methods import FaceMethod, backbone_features
from fedfr_jax.types import Model, Source

GIB = 2**30


def made_up_labels(
    *,
    num_clients: int = 40,
    ids_per_client: int = 100,
    num_global_ids: int = 6000,
    num_unseen_ids: int = 0,
    client_images: tuple[int, int] = (100, 110),
    global_images: tuple[int, int] = (60, 80),
    seed: int = 100,
    **others,
) -> np.ndarray:
    """Labels [T] int32 of a set that `ms1m` with these settings can split.

    Every identity has the number of images in the middle of its interval.
    """
    del others
    half = max(num_clients * ids_per_client, num_global_ids + num_unseen_ids)
    order = ms1m_order(np.arange(2 * half), seed=seed)
    counts = np.empty(2 * half, np.int64)
    counts[order[:half]] = sum(client_images) // 2
    counts[order[half:]] = sum(global_images) // 2
    return np.repeat(np.arange(2 * half, dtype=np.int32), counts)


@contextlib.contextmanager
def stand_in(settings: Mapping, *, say: Callable = print) -> Iterator[Mapping]:
    """The settings, with a set of the same counts where their .rec is not there.

    Only for `recordio` data that `ms1m` splits. The set lies in a temporary folder for
    as long as the context.
    """
    data, counts = settings["data"], settings["partition"]
    is_split = data.get("name") == "recordio" and counts.get("name") == "ms1m"
    if not is_split or "path" not in data or rec_path(data["path"]).exists():
        yield settings
        return
    with tempfile.TemporaryDirectory() as folder:
        labels = made_up_labels(**counts)
        size = parse_size(data.get("image_size") or 112)
        write_stand_in(rec_path(folder), labels, image_size=size)
        megabytes = sum(p.stat().st_size for p in pathlib.Path(folder).iterdir()) / 1e6
        say(
            f"{data['path']} is not there: {len(labels)} made-up images of "
            f"{labels[-1] + 1} people, {megabytes:.0f} MB, stand in for it.\n"
        )
        # The set's own index must not be kept as that of the one it stands in for.
        yield {**settings, "data": {**data, "path": folder, "cache": None}}


def unread(source: Source) -> Source:
    """The source with black images, for whoever only needs to know their shape."""
    shape = source.image_shape
    return source._replace(read=lambda rows: np.zeros((len(rows), *shape), np.uint8))


def lower_round(
    model: Model,
    method: FaceMethod,
    partition: Partition,
    federation: Federation,
    mesh: Mesh,
):
    """`jax.stages.Lowered` of a round, and the shape of one client's personal row."""
    shapes = round_shapes(model, method, partition, federation, mesh)
    return lower(shapes, method, federation, mesh), shapes.row


def lower(
    shapes: RoundShapes, method: FaceMethod, federation: Federation, mesh: Mesh
) -> jax.stages.Lowered:
    """The round of these shapes."""
    run = build_round(
        lambda hyper: method.algorithm,
        shapes.feed,
        mesh,
        max_local=shapes.max_local,
        shards=federation.fixed_shards,
    )
    return lowered(
        run.whole,
        *round_arguments(
            mesh,
            cohort_size=shapes.cohort_size,
            lanes=federation.first_lanes,
            shards=federation.fixed_shards,
            server=shapes.server,
            row=shapes.row,
            extra=shapes.extra,
            table=shapes.table,
            key=shapes.key,
        ),
    )


def memory(compiled) -> dict[str, float]:
    """GiB per device of a compiled round, by what it is for."""
    found = compiled.memory_analysis()
    number = {
        "arguments": found.argument_size_in_bytes / GIB,
        "results": found.output_size_in_bytes / GIB,
        "results in place of arguments": found.alias_size_in_bytes / GIB,
        "temporary": found.temp_size_in_bytes / GIB,
    }
    needed = sum(number.values()) - 2 * number["results in place of arguments"]
    return {**number, "the round, per device": needed}


def operations(
    unrolled: Model,
    method: FaceMethod,
    partition: Partition,
    federation: Federation,
    *,
    hard_negatives: int,
) -> dict[str, float]:
    """Floating-point operations of round 0, by what they are for.

    Args:
      unrolled: the model without scans.
      method: built on it.
      hard_negatives: that every client is assumed to select.
    """
    mesh = meshes.make_mesh(1)
    shapes = round_shapes(unrolled, method, partition, federation, mesh)
    program, output = step_cost.trace_client(
        method.algorithm,
        shapes.feed,
        shapes.max_local,
        shapes.server,
        shapes.row,
        shapes.extra,
        shapes.table,
        shapes.key,
    )
    batch, num_flips = federation.batch_size, max(shapes.feed.num_views, 1)
    images = jax.ShapeDtypeStruct((batch, *unrolled.image_shape), jnp.float32)
    backbone = jax.eval_shape(unrolled.init, jax.random.key(0))
    embed = jax.jit(backbone_features(unrolled))
    forward = step_cost.flops(embed.lower(backbone, images))
    step = step_cost.step_flops(program)
    own = np.diff(partition.train_offsets)
    has_extra = shapes.extra.examples.shape[1] > 0
    total = own + (hard_negatives if has_extra else 0)
    own_epochs = method.local_epochs
    epochs = federation.local_epochs if own_epochs is None else own_epochs
    epochs = np.ravel(epochs)[0]
    steps = int((shapes.feed.steps_per_epoch(total) * epochs).sum())
    number = {"steps": float(steps), "local steps": steps * step}
    num_public = len(partition.global_examples)
    if "contrastive" in output.metrics:
        blocks = num_flips * int((-(-total // batch)).sum())
        number["previous networks' features"] = blocks * forward
    if method.algorithm.prepare:
        images = int(own.sum()) + (num_public if has_extra else 0)
        number["global network's features"] = num_flips * images * forward / batch
    if has_extra:
        similarity = 2.0 * unrolled.embedding_dim * float(own.sum()) * num_public
        number["similarities"] = similarity
    return number


def report(
    lowered, row, partition: Partition, flops: Mapping[str, float], compiled=None
) -> dict:
    """Everything as plain numbers."""
    count = {k: v for k, v in flops.items() if k != "steps"}
    personal = trees.num_bytes(row)
    server = trees.num_bytes(lowered.in_avals[0][0])
    images = trees.num_bytes(lowered.in_avals[0][4])
    return {
        "GiB": {
            "server": server / GIB,
            "images and labels, per device": images / GIB,
            "personal rows on disk": VERSIONS
            * len(partition.num_classes)
            * personal
            / GIB,
            **({} if compiled is None else memory(compiled)),
        },
        "FLOP": {**count, "round 0": sum(count.values())},
        "local steps of round 0": int(flops["steps"]),
    }


def format_report(numbers: Mapping) -> str:
    """The report as lines of text."""
    lines = [f"{k:<42}{v:>12.3f} GiB" for k, v in numbers["GiB"].items()]
    lines += [f"{k:<42}{v:>12.3e} FLOP" for k, v in numbers["FLOP"].items()]
    lines += [f"{'local steps of round 0':<42}{numbers['local steps of round 0']:>12}"]
    return "\n".join(lines)
