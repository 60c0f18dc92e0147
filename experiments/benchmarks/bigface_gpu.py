"""Large face networks on one accelerator: convolutions, images per second, memory.

    python experiments/benchmarks/bigface_gpu.py [--parts=convolutions,steps]
        [--cases=r50_93k,...] [--forms=gpu] [--profile=FOLDER] [--peak=989e12]
    python experiments/benchmarks/bigface_gpu.py --smoke    # tiny, on a CPU

convolutions: every one of IResNet-50 and -100 at 112 pixels, bfloat16, forward and both
gradients, as a share of the peak; a mean of 0.42 is needed for 31 % MFU of R100.
steps: a central step with CosFace, images per second and MFU. The batch is halved until
it fits the memory. What the figures must reach, and should, are those of GOALS: eight
V100 and eight A100 with arcface_torch at 93 k classes; 10 M classes by full softmax
at 25 % MFU, and the 4,840 images per second that Partial FC's authors print for 64
GPUs. MFU counts 6 operations per multiply-add of backbone and class weights, nothing
that is computed again. Beside them stands what `fedfr plan` says of the same step.

A row is a JSON line; all go to results/<device>_bigface.json, in place of those of the
same part and case. --profile traces an epoch of each case and adds where its time went.
"""

import argparse
import collections
import json
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import device_trace
import jax
import jax.numpy as jnp
import results_file
from central_step import Running, trainer_of
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from run import choice_of

from fedfr_jax.central.settings import Training
from fedfr_jax.convolutions import FORMS, fast, use_forms
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.plan.devices import DEVICES
from fedfr_jax.plan.needs import central_needs
from fedfr_jax.tasks.faces.loss import COSFACE
from fedfr_jax.types import CentralTrainer

PARTS = ("convolutions", "steps")
PEAK = 989e12  # of an H200 in bfloat16, dense
WF42M, GOAL_OF_CONVOLUTIONS = 2_059_906, 0.42
GOALS = {  # case: images per second that it must reach, and should
    "r50_93k": (5552, 6482),
    "r100_93k": (3407, 4164),
    "r50_10m": (3605, 4840),
}


class Case(NamedTuple):
    """A network and a number of classes."""

    depth: int
    classes: int
    batch: int  # the first that is tried
    class_dtype: str | None = "bfloat16"
    chunk: int = 0  # classes whose logits exist at once
    remat: bool | str = False
    micro_batches: int = 1


CASES = {
    "r50_93k": Case(50, 93_431, 1024),
    "r100_93k": Case(100, 93_431, 1024),
    "r50_2m": Case(50, WF42M, 1024, chunk=65_536),
    "r100_2m": Case(100, WF42M, 1024, chunk=65_536),
    "r50_10m": Case(50, 10_000_000, 1024, chunk=65_536),
    "r600_93k": Case(600, 93_431, 512, remat="convolutions"),
    "r1200_93k": Case(1200, 93_431, 512, remat=True),
}
SMOKE = {"smoke": Case(18, 100, 8, chunk=32, remat="convolutions", micro_batches=2)}
TINY = {"blocks": (2, 1), "widths": (4, 8), "embedding_dim": 16}


def main():
    args = parse_arguments()
    rows = []
    for part in args.parts:
        made = convolution_rows(args) if part == "convolutions" else step_rows(args)
        for row in made:
            print(json.dumps(row), flush=True)
            rows.append(row)
            save(rows, args)


def parse_arguments():
    """Flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, writes no results")
    parser.add_argument("--parts", type=choice_of(PARTS), default=list(PARTS))
    parser.add_argument("--cases", type=choice_of(CASES), default=list(CASES))
    parser.add_argument("--forms", type=choice_of(FORMS), default=["gpu"])
    parser.add_argument("--steps", type=int, default=16, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=3, help="epochs, after one")
    parser.add_argument("--batch", type=int, default=256, help="of convolutions")
    parser.add_argument("--peak", type=float, default=PEAK, help="operations a second")
    parser.add_argument("--profile", type=pathlib.Path, help="folder of the traces")
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file")
    args = parser.parse_args()
    args.networks = {"smoke": 18} if args.smoke else {"r50": 50, "r100": 100}
    args.todo = SMOKE if args.smoke else {name: CASES[name] for name in args.cases}
    if args.smoke:
        args.batch, args.steps, args.rounds, args.peak = 4, 2, 1, 1e11
    return args


def network(args, depth: int, **others):
    """The IResNet of a depth in bfloat16, or a toy."""
    size = 16 if args.smoke else 112
    settings = {"depth": depth, "dtype": jnp.bfloat16, **others}
    settings |= TINY if args.smoke else {}
    return MODELS["iresnet"]((size, size, 3), **settings)


class Convolution(NamedTuple):
    """Shapes of one convolution of an image."""

    image: tuple[int, ...]  # (H, W, C)
    kernel: tuple[int, ...]  # (h, w, C, C')
    stride: int
    padding: int

    @property
    def flops(self) -> int:
        """Forward, of an image; zeros of the padding count."""
        side = -(-self.image[0] // self.stride)
        return (
            2
            * side**2
            * self.kernel[0]
            * self.kernel[1]
            * self.kernel[2]
            * (self.kernel[3])
        )


def convolutions_of(model) -> dict[Convolution, int]:
    """{convolution: how often it is in the network}."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.input_shape), jnp.float32)
    program = jax.make_jaxpr(model.apply)(variables, image)
    found = collections.Counter()

    def walk(jaxpr, times):
        for equation in jaxpr.eqns:
            inputs = [variable.aval for variable in equation.invars]
            if equation.primitive.name == "conv_general_dilated":
                stride, padding = (
                    equation.params[key][0] for key in ("window_strides", "padding")
                )
                shapes = inputs[0].shape[1:], inputs[1].shape
                found[Convolution(*shapes, stride, padding[0])] += times
            own = times * equation.params.get("length", 1)
            for body in jaxprs_in_params(equation.params):
                walk(body, own)

    walk(program.jaxpr, 1)
    return dict(found)


def convolution_rows(args):
    """A row per convolution and form, then one of each network."""
    for name, depth in args.networks.items():
        listed = convolutions_of(network(args, depth))
        for forms in args.forms:
            spent = 0.0
            row = {
                "part": "convolutions",
                "case": name,
                "forms": forms,
            }
            for one, count in listed.items():
                seconds = seconds_of(one, forms, args.batch)
                spent += count * seconds
                rate = 3 * args.batch * one.flops / seconds
                shapes = {"image": one.image, "kernel": one.kernel}
                yield {
                    **row,
                    **shapes,
                    **{"stride": one.stride, "count": count, "seconds": seconds},
                    "share_of_peak": rate / args.peak,
                }
            flops = sum(count * one.flops for one, count in listed.items())
            mean = 3 * args.batch * flops / spent / args.peak
            goal = {"mean_share_of_peak": mean, "goal": GOAL_OF_CONVOLUTIONS}
            yield {**row, **goal, "seconds_of_all": spent}


def seconds_of(one: Convolution, forms: str, batch: int) -> float:
    """Of a forward and both gradients, the fastest of some calls."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (batch, *one.image), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], one.kernel, jnp.bfloat16)

    @fast
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (one.stride, one.stride),
            [(one.padding, one.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    @jax.jit
    def run(x, kernel):
        # The output is its own cotangent: nothing of the three can be left out.
        y, back = jax.vjp(convolve, x, kernel)
        return y, back(y)

    with use_forms(forms):
        return fastest(lambda: run(x, kernel))


def fastest(call: Callable, calls: int = 20, repeats: int = 3) -> float:
    """Least seconds of a call among some rows of calls."""
    jax.block_until_ready(call())
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)][-1])
        spent.append((time.perf_counter() - begin) / calls)
    return min(spent)


def step_rows(args):
    """A row per case, and where its time went."""
    for name, case in args.todo.items():
        row = {"part": "steps", "case": name, **case._asdict()}
        found, running = measured(args, case)
        if "images_per_second" in found and name in GOALS:
            found |= dict(zip(("must", "goal"), GOALS[name], strict=True))
        yield {**row, **found}
        if running and args.profile:
            with jax.profiler.trace(str(args.profile / name)):
                running.seconds()
            traced = device_trace.summary(args.profile / name)
            yield {"part": "profile", "case": name, "steps": args.steps, **traced}


def measured(args, case: Case) -> tuple[dict, Running | None]:
    """Figures of the largest batch that fits, halved from the case's own."""
    mesh, batch = make_mesh(1), case.batch
    while batch >= max(case.micro_batches, 1):
        model = network(args, case.depth, remat=case.remat)
        told = Training(
            batch_size=batch,
            loss=COSFACE.with_settings(scale=64.0),
            class_parallel=True,
            class_chunk_size=case.chunk,
            class_dtype=case.class_dtype,
            gradient_accumulation_steps=case.micro_batches,
        )
        try:
            trainer = trainer_of(model, case.classes, told, args.steps, mesh)
            running = Running(trainer, mesh)
            found = figures(args, case, model, batch, running)
            rate = found["images_per_second"]
            return {**found, **planned(trainer, mesh, rate)}, running
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                return {"failure": str(error).splitlines()[0][:200]}, None
        running, batch = None, batch // 2
    return {"failure": "no batch fits the memory"}, None


def figures(args, case: Case, model, batch: int, running: Running) -> dict:
    """Times of a step, images per second, MFU and the most memory in use."""
    times = running.times(args.rounds)
    rate = batch / times.median
    backbone, head = model.count_flops(), 2 * model.embedding_dim * case.classes
    used = jax.local_devices()[0].memory_stats() or {}
    return {
        "batch": batch,
        "step_seconds": times.median,
        "step_seconds_min": times.least,
        "images_per_second": rate,
        "mfu": 3 * (backbone + head) * rate / args.peak,
        "peak_bytes": used.get("peak_bytes_in_use"),
        "loss": times.loss,
    }


def planned(trainer: CentralTrainer, mesh: Mesh, images_per_second: float) -> dict:
    """What the plan says of memory and rate; on an unknown device, of an H200."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    needs = central_needs(trainer, mesh, jax.tree.map(shape, trainer.dataset))
    kind = jax.devices()[0].device_kind.lower()
    device = DEVICES[next((name for name in DEVICES if name in kind), "h200")]
    rate = needs.images / needs.seconds(device)
    stored = trainer.dataset.num_examples * trainer.dataset.example_bytes
    return {
        "planned_for": device.name,
        "planned_bytes": needs.memory + stored,
        "planned_images_per_second": rate,
        "measured_over_planned": images_per_second / rate,
    }


def save(rows: list[dict], args) -> None:
    """Write the rows in place of those of the same part and case."""
    if args.smoke and not args.output:
        return
    slug = jax.devices()[0].device_kind.lower().replace(" ", "-")
    path = args.output or results_file.RESULTS / f"{slug}_bigface.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    place = lambda row: (row["part"], row["case"])
    new = {place(row) for row in rows}
    facts = results_file.facts()
    facts["rows"] = [row for row in kept if place(row) not in new] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
