"""Lab 6: what attention_kernel becomes as machine code for GPUs that need not be there.

    python builds.py exact_float32          {"exact_float32": {"registers": 67, ...}}

A program of its own, because Triton compiles nothing in a process in which it interprets.
"""
import json
import re
import sys
import tempfile
from pathlib import Path

from attention_plan import AMPERE, FLOAT32, HOPPER

SECONDS = 25                # of CPU time, for this program and for each that it calls
D, GROUP = 128, 4

# capability, tile, type of q, k and v
BUILDS = {f"sm_{capability}_tile_of_{tile.rows}_rows": (capability, tile, "bf16")
          for capability, tiles in ((90, HOPPER), (80, AMPERE[::2])) for tile in tiles}
BUILDS["exact_float32"] = 80, FLOAT32[0], "fp32"


def figures(capability, tile, dtype):
    """What `build` in grading.py compares."""
    from test_kernel_builds import build_attention, dump, usage     # where Triton does not interpret
    compiled = build_attention(capability, tile, D, GROUP, dtype)
    with tempfile.TemporaryDirectory() as folder:
        used = usage(capability, compiled, Path(folder))
        code = dump("-sass", compiled, Path(folder))
    copies, products = (re.findall(rf"\b{name}\S*", code) for name in ("LDGSTS", "HG?MMA"))
    wide = sum(copy.endswith(".128") for copy in copies)
    return {"registers": used.registers, "spilled": used.stack, "16-byte copies": wide,
            "smaller copies": len(copies) - wide, "tensor cores": len(products),
            "TF32": sum("TF32" in product for product in products),
            "shared KB": used.shared // 1024, "programs": used.resident}


def innermost(error: Exception) -> Exception:
    """Where Triton fails in a function that the kernel calls: there is one error for each of them."""
    while isinstance(error.__cause__, type(error)):
        error = error.__cause__
    return error


if __name__ == "__main__":
    import resource             # Linux has it
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        print(json.dumps({name: figures(*BUILDS[name]) for name in sys.argv[1:]}))
    except Exception as error:
        sys.exit(str(innermost(error)))
