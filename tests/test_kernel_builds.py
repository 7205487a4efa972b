"""The Triton kernels as machine code, built ahead of time without a GPU: tensor cores, 16-byte
asynchronous copies some tiles ahead, nothing spilled, shared memory within limits. The whole grid
of shapes runs under the mark `slow`. Run as a program, with PYTHONPATH=., this file prints what
each kernel takes of a processor, as a table in Markdown."""
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import attention_kernel as kernel
import attention_plan
import rotary_store
import tier_copies

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TILES = {90: attention_plan.HOPPER, 80: attention_plan.AMPERE}
# KB that a program may have; 99: of consumer GPUs, an A100 has 163.
SHARED = {90: 227, 80: 99}
# KB that the programs on a processor of an H100 or an A100 share, 1 of each for the system.
PROCESSOR_SHARED = {90: 228, 80: 164}
TYPES = {"scale_log2": "fp32", "partial_out": "*fp32", "partial_lse": "*fp32", "slot_table": "*i32",
         "items": "*i32", "merges": "*i32", "slots": "*i64", "cos": "*fp32", "sin": "*fp32",
         "source_rows": "*i64", "target_rows": "*i64"}
# Capability, kind of tile, D, group.
GRID = list(product((90, 80), (0, 1, 2), (64, 80, 96, 128), (1, 4, 8)))
ALWAYS = [(90, 0, 128, 1), (90, 1, 64, 4), (90, 2, 80, 1), (90, 2, 128, 8), (80, 1, 128, 4)]


def build(capability, function, dtype="bf16", warps=4, stages=3, **constants):
    """The kernel compiled for a GPU that need not be there, with the alignment of arguments that
    the launcher would find."""
    names = function.arg_names
    tensors = "q", "k", "v", "rotated", "k_cache", "v_cache", "out", "source", "target"
    types = TYPES | dict.fromkeys(tensors, f"*{dtype}")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name][0] == "*" or "stride" in name}
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, constants, aligned)
    options = dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def dump(what, compiled, folder):
    """What NVIDIA's cuobjdump tells of a build."""
    (folder / "cubin").write_bytes(compiled.asm["cubin"])
    return subprocess.run([triton.knobs.nvidia.cuobjdump.path, what, folder / "cubin"],
                          capture_output=True, text=True, check=True).stdout


def sass(compiled, folder):
    """What the GPU will run; no register spilled."""
    code = dump("-sass", compiled, folder)
    assert not re.search(r"\b(STL|LDL)\b", code)
    return code


class Usage(NamedTuple):
    registers: int      # of a thread
    stack: int          # bytes of memory of a thread: what is spilled lies there
    shared: int         # bytes of a program
    resident: int       # programs that a processor has room for


def usage(capability, compiled, folder):
    report = dump("-res-usage", compiled, folder)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)       # in eights, for 32 threads a warp
    by_shared = PROCESSOR_SHARED[capability] * 1024 // (shared + 1024)
    return Usage(registers, stack, shared, min(by_registers, by_shared, 64 // warps))


def padded(D):
    return triton.next_power_of_2(D)


def build_attention(capability, tile, D, group, dtype="bf16"):
    return build(capability, kernel.attention_kernel, dtype, tile.warps, tile.stages,
                 TILE_M=tile.rows, TILE_N=tile.keys, GROUP=group, D=D, TILE_D=padded(D))


def build_merge(capability, D, group):
    return build(capability, kernel.merge_kernel, TILE_P=kernel.PIECES_AT_ONCE, GROUP=group, D=D,
                 TILE_D=padded(D))


def build_store(capability, D, heads, kv_heads, rotate=True):
    tile_h = triton.cdiv(rotary_store.ELEMENTS, padded(D))
    angles = {} if rotate else dict(cos=None, sin=None)
    return build(capability, rotary_store.rotate_and_store_kernel, HEADS=heads, KV_HEADS=kv_heads,
                 KV_TILES=triton.cdiv(kv_heads, tile_h), D=D, TILE_H=tile_h, TILE_D=padded(D),
                 ROTATE=rotate, **angles)


@pytest.mark.parametrize("capability, kind, D, group",
                         [case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.slow)
                          for case in GRID])
def test_attention(capability, kind, D, group, tmp_path):
    tile = TILES[capability][kind]
    compiled = build_attention(capability, tile, D, group)
    code, hopper = sass(compiled, tmp_path), capability == 90 and tile.rows >= 64
    assert len(re.findall(r"\bHGMMA\b" if hopper else r"\bHMMA\b", code)) >= 8      # tensor cores
    copies = re.findall(r"\bLDGSTS\S*", code)
    # Asynchronous, 16 bytes each.
    assert len(copies) >= 4 and all(copy.endswith(".128") for copy in copies)
    buffers = re.findall(rf"memdesc<(\d+)x{tile.keys}x{padded(D)}xbf16", compiled.asm["ttgir"])
    # Older tensor cores read through registers.
    assert max(map(int, buffers)) == tile.stages - (not hopper)
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    if D == 128:
        assert usage(capability, compiled, tmp_path).resident == tile.resident


@pytest.mark.parametrize("capability, D", [(90, 128), pytest.param(80, 80, marks=pytest.mark.slow)])
def test_merge(capability, D, tmp_path):
    code = sass(build_merge(capability, D, 4), tmp_path)
    # All values are asked for at once.
    assert len(re.findall(r"\bLDG\S*\.128", code)) == kernel.PIECES_AT_ONCE * padded(D) // (4 * 128)


def test_exact_float32(tmp_path):
    tile, = attention_plan.FLOAT32
    compiled = build_attention(80, tile, 128, 4, "fp32")
    code = sass(compiled, tmp_path)
    assert "FFMA" in code and "HMMA" not in code and compiled.metadata.shared <= SHARED[80] * 1024
    assert usage(80, compiled, tmp_path).resident == tile.resident


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_larger_heads_fit_into_shared_memory(capability):
    tile, = attention_plan.wanted_items(1, 256, torch.bfloat16, torch.device("cpu"))
    compiled = build_attention(capability, tile, 256, 4)
    assert compiled.metadata.shared <= SHARED[capability] * 1024


@pytest.mark.parametrize("capability, D, rotate", [
    (90, 128, True), pytest.param(80, 80, True, marks=pytest.mark.slow),
    pytest.param(90, 64, False, marks=pytest.mark.slow)])
def test_rotate_and_store(capability, D, rotate, tmp_path):
    """Heads are loaded, their partners, too, and stored, 16 bytes for each thread."""
    code = sass(build_store(capability, D, 32, 8, rotate), tmp_path)
    assert len(re.findall(r"\bLDG\S*\.128", code)) == (5 if rotate else 3)
    assert re.findall(r"\bSTG\S*", code) == 3 * ["STG.E.128"]


@pytest.mark.parametrize("width", [1024, pytest.param(5120, marks=pytest.mark.slow)])
def test_copies_between_the_tiers(width, tmp_path):
    """All of a tile is on its way at once, 16 bytes for each thread and load."""
    TILE_W = padded(width)
    TILE_T = max(1, tier_copies.TILE_BYTES // 2 // TILE_W)
    warps, sizes = tier_copies.COPYING_WARPS, dict(WIDTH=width, TILE_T=TILE_T, TILE_W=TILE_W)
    code = sass(build(90, tier_copies.copy_kernel, warps=warps, **sizes), tmp_path)
    loads, stores = (re.findall(rf"\b{name}\S*\.128", code) for name in ("LDG", "STG"))
    at_once = 32 * warps * 8                    # elements that all threads load together
    rows = max(1, at_once // width)             # of the tile, in these
    assert len(loads) == len(stores) == TILE_T // rows * triton.cdiv(width, at_once)
    assert code.rindex(loads[-1]) < code.index(stores[0])


def table():
    """What each kernel takes of a processor: a row of the table for each kernel and head size."""
    columns = "kernel", "tile", "D", "GPU", "registers", "stack", "shared KB", "programs per processor"
    yield columns
    yield ["---"] * len(columns)
    for capability, D in product((90, 80), (64, 128)):
        builds = [("attention", f"{tile.rows} x {tile.keys}", build_attention(capability, tile, D, 4))
                  for tile in TILES[capability]]
        builds += [("merge", "", build_merge(capability, D, 4)),
                   ("rotate and store", "", build_store(capability, D, 32, 8)),
                   ("store", "", build_store(capability, D, 32, 32, rotate=False))]
        for name, tile, compiled in builds:
            with tempfile.TemporaryDirectory() as folder:
                found = usage(capability, compiled, Path(folder))
            yield (name, tile, D, f"sm_{capability}", found.registers, found.stack,
                   f"{found.shared / 1024:.0f}", found.resident)


if __name__ == "__main__":
    for row in table():
        print("|", " | ".join(map(str, row)), "|", flush=True)
