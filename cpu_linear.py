"""Linear layers on a CPU: how their weights lie in memory.

A decode multiplies few rows by every weight, so it takes as long as the weights take to read.
nn.Linear keeps rows, and MKL copies them into an order of its own in every call. Here we store the
weights in the order in which they are multiplied:

    weights in    module           multiplied by
    float32       PackedLinear     oneDNN
    bfloat16      PackedLinear     oneDNN, where the CPU has instructions for it
    float16       Float16Linear    FBGEMM, which pads each row to a multiple of 512: 4,096 numbers
                                   need none, 768 take the place of 1,024

A PackedLinear takes and returns numbers of its weights' type. A Float16Linear takes float32,
computes in float32, and returns float32: only the weights are rounded to float16. For a checkpoint
that is stored in float16 this changes no value.

Invariant: a layer's dense weights are let go before the next layer is packed, so the model is never
in memory twice.
"""
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Model


def multiplies_float16() -> bool:
    """Whether this build of torch, on this machine, has the operators of Float16Linear. (They need
    an x86 CPU with AVX2.)"""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN, on this machine, multiplies packed weights of this type faster than dense
    ones. (bfloat16 needs an x86 CPU with AVX-512, or an Arm CPU with instructions for it.)"""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """A linear layer whose weights lie in tiles of some 16 by 64. Both operators are those that
    torch.compile uses for frozen weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        few_rows = 32           # a hint for oneDNN; any number of rows may come
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, few_rows)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:                                 # [T, in] -> [T, out]
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Float16Linear(nn.Module):
    """A linear layer whose weights lie in tiles, in float16. FBGEMM widens each weight when it
    multiplies it by float32, and sums in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        bias = None if bias is None else bias.float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def forward(self, x: Tensor) -> Tensor:                                 # [T, in] -> [T, out]
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class Float16Embedding(nn.Module):
    """Rows in float16, looked up as float32."""

    def __init__(self, table: Tensor):                                      # [rows, width]
        super().__init__()
        self.table = table      # a plain attribute: Model.float() leaves it in float16

    def forward(self, tokens: Tensor) -> Tensor:                            # [T] -> [T, width]
        return F.embedding(tokens, self.table).float()


def pack(model: Model):
    """Pack the linear layers of a model whose type oneDNN packs.

    An embedding that is also the output layer stays dense, since its rows are looked up. We store
    it by columns: the output layer then reads it in order, and a copy is not needed."""
    replace_linears(model, PackedLinear)
    if model.config.tied_embeddings:
        table = model.tokens.weight                                         # [vocab, width]
        table.data = table.t().contiguous().t()


def keep_float16(model: Model):
    """A model in float16 keeps these weights and computes in float32 from now on.

    An embedding that is also the output layer is needed twice, since we cannot look up a row in
    packed weights: as a table, and packed as an output layer of its own."""
    table = model.tokens.weight.detach()                                    # [vocab, width]
    model.add_module("tokens", Float16Embedding(table))
    if model.config.tied_embeddings:
        model.add_module("head", Float16Linear(table, None))
        model.config = replace(model.config, tied_embeddings=False)
    replace_linears(model, Float16Linear)
    model.float()           # norms, and learned positions


def replace_linears(model: Model, kind: Callable[[Tensor, Tensor | None], nn.Module]):
    for module in model.modules():
        for name, child in module.named_children():     # `child` keeps one alive
            if isinstance(child, nn.Linear):
                setattr(module, name, kind(child.weight.detach(), child.bias))
