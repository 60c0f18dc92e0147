"""XLA's flags of the tests, for JAX's versions: an unknown one ends the process."""

from importlib.metadata import version

KNOWS_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12)
# LLVM's lowest level, a program in one piece, and no MLIR below XLA's own passes, which
# stay as they are: half of the CPU time.
COMPILE_FAST = "--xla_backend_optimization_level=0"
COMPILE_FAST += " --xla_cpu_parallel_codegen_split_count=1"
if KNOWS_EMITTERS:
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
AS_A_RUN = {"xla_cpu_use_fusion_emitters": True} if KNOWS_EMITTERS else {}
