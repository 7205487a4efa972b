"""The Triton kernels as machine code, built ahead of time without a GPU: tensor cores, 16-byte
asynchronous copies some tiles ahead, nothing spilled, shared memory within limits. The whole grid
of shapes runs under the mark `soak`."""
import re
import subprocess
from itertools import product

import pytest

import attention_kernel as kernel
import kv_pool

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TILES = {90: kernel.HOPPER, 80: kernel.AMPERE}
# KB that a program may have; 99: of consumer GPUs, an A100 has 163.
SHARED = {90: 227, 80: 99}
TYPES = {"scale_log2": "fp32", "partial_out": "*fp32", "partial_lse": "*fp32", "slot_table": "*i32",
         "items": "*i32", "merges": "*i32", "source_rows": "*i64", "target_rows": "*i64"}
# Capability, kind of tile, D, group.
GRID = list(product((90, 80), (0, 1, 2), (64, 80, 96, 128), (1, 4, 8)))
ALWAYS = [(90, 0, 128, 1), (90, 1, 64, 4), (90, 1, 128, 8), (90, 2, 80, 1), (90, 2, 128, 8),
          (80, 0, 64, 8), (80, 1, 128, 4), (80, 2, 128, 8)]


def build(capability, function, dtype="bf16", warps=4, stages=3, **constants):
    """The kernel compiled for a GPU that need not be there, with the alignment of arguments that
    the launcher would find."""
    names = function.arg_names
    types = TYPES | dict.fromkeys(("q", "k_cache", "v_cache", "out", "source", "target"), f"*{dtype}")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name][0] == "*" or "stride" in name}
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, constants, aligned)
    options = dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def sass(compiled, folder):
    """What the GPU will run; no register spilled."""
    (folder / "cubin").write_bytes(compiled.asm["cubin"])
    code = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-sass", folder / "cubin"],
                          capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(STL|LDL)\b", code)
    return code


def padded(D):
    return triton.next_power_of_2(D)


@pytest.mark.parametrize("capability, kind, D, group",
                         [case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.soak)
                          for case in GRID])
def test_attention(capability, kind, D, group, tmp_path):
    tile = TILES[capability][kind]
    compiled = build(capability, kernel.attention_kernel, TILE_M=tile.rows, TILE_N=tile.keys, GROUP=group,
                     D=D, TILE_D=padded(D),
                     warps=tile.warps, stages=tile.stages)
    code, hopper = sass(compiled, tmp_path), capability == 90 and tile.rows >= 64
    assert len(re.findall(r"\bHGMMA\b" if hopper else r"\bHMMA\b", code)) >= 8          # tensor cores
    copies = re.findall(r"\bLDGSTS\S*", code)
    # Asynchronous, 16 bytes each.
    assert len(copies) >= 4 and all(copy.endswith(".128") for copy in copies)
    buffers = re.findall(rf"memdesc<(\d+)x{tile.keys}x{padded(D)}xbf16", compiled.asm["ttgir"])
    # Older tensor cores read through registers.
    assert max(map(int, buffers)) == tile.stages - (not hopper)
    assert compiled.metadata.shared <= SHARED[capability] * 1024


@pytest.mark.parametrize("capability, D", [(90, 128), pytest.param(80, 80, marks=pytest.mark.soak)])
def test_merge(capability, D, tmp_path):
    code = sass(build(capability, kernel.merge_kernel, TILE_P=kernel.PIECES_AT_ONCE, GROUP=4, D=D,
                      TILE_D=padded(D)), tmp_path)
    # All values are asked for at once.
    assert len(re.findall(r"\bLDG\S*\.128", code)) == kernel.PIECES_AT_ONCE * padded(D) // (4 * 128)


def test_exact_float32(tmp_path):
    tile, = kernel.FLOAT32
    compiled = build(80, kernel.attention_kernel, "fp32", TILE_M=tile.rows, TILE_N=tile.keys, GROUP=4,
                     D=128, TILE_D=128,
                     warps=tile.warps, stages=tile.stages)
    code = sass(compiled, tmp_path)
    assert "FFMA" in code and "HMMA" not in code and compiled.metadata.shared <= SHARED[80] * 1024


@pytest.mark.parametrize("width", [1024, pytest.param(5120, marks=pytest.mark.soak)])
def test_copies_between_the_tiers(width, tmp_path):
    """All of a tile is on its way at once, 16 bytes for each thread and load."""
    TILE_W = padded(width)
    TILE_T = max(1, kv_pool.TILE_BYTES // 2 // TILE_W)
    code = sass(build(90, kv_pool.copy_kernel, WIDTH=width, TILE_T=TILE_T, TILE_W=TILE_W), tmp_path)
    loads, stores = (re.findall(rf"\b{name}\S*\.128", code) for name in ("LDG", "STG"))
    assert len(loads) == len(stores) == TILE_T * width * 2 // (128 * 16)
    assert code.rindex(loads[-1]) < code.index(stores[0])
