"""The model: GPT-2, OPT, Llama, Mistral, Qwen and SmolLM as one plain decoder.

The batch is ragged (the paper's unified batching, §4.2): the tokens of all spans lie packed in one
dimension T, whatever request and phase they belong to. A decoder computes each token by itself,
except in attention, so T is the only batch dimension. The caller hands attention in as a function:
`attend(layer, q, k, v, rotation)` rotates q and k, stores K and V, and lets every query see its
context up to its own position. So this file knows nothing of caches, spans or batches, and a test
can run it with ten lines of dense attention.

    tokens [T] -> embeddings -> layer 0 ... layer L-1 -> norm -> hidden [T, width] -> logits
                                   |
                                   attend(0, q, k, v, rotation)

Architectures differ in a ModelConfig: Llama from GPT mainly in norm, activation, gated, biases and
rope_theta; Qwen and SmolLM from Llama in biases, head_dim, qk_norm and unrotated. checkpoint.py
reads the ModelConfig and fills the parameters.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[..., Tensor]          # see Model.forward
ACTIVATIONS: dict[str, Callable] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "silu": F.silu}
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder; the defaults are GPT's. See checkpoint.checked."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int               # fewer than num_heads: grouped-query attention
    width: int
    ffn_width: int
    max_context: int                # tokens
    activation: str                 # a key of ACTIVATIONS
    norm: str = "layer"             # a key of NORMS
    norm_eps: float = 1e-5
    gated: bool = False             # the MLP multiplies its inner values by activated gates: SwiGLU
    biases: frozenset[str] = frozenset({"qkv", "out", "mlp"})   # the projections that have biases
    head_dim: int | None = None     # None: width / num_heads
    qk_norm: bool = False           # every head's q and k are normed before they are rotated
    position_offset: int = 0        # OPT's position embedding begins with 2 unused rows
    rope_theta: float | None = None     # the base of rotary positions; None: learned positions
    rope_scaling: tuple[float, ...] | None = None       # see rotary_frequencies
    unrotated: frozenset[int] = frozenset()             # layers without any positions
    tied_embeddings: bool = True    # the token embedding is the output layer, too
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self):
        if self.head_dim is None:                       # the class is frozen, hence this detour
            object.__setattr__(self, "head_dim", self.width // self.num_heads)

    @property
    def matmul_parameters(self) -> int:
        """Of all layers: how many weights multiply every token. (For experiments/.)"""
        attention = 2 * self.width * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = (3 if self.gated else 2) * self.width * self.ffn_width
        return self.num_layers * (attention + mlp)


class Attention(nn.Module):
    """The projections around attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]       # of q, k, v
        self.head_dim, biases = config.head_dim, config.biases
        # Each head has head_dim numbers: of all q, k and v together, and of all queries' results.
        self.qkv = nn.Linear(config.width, sum(self.heads) * self.head_dim, bias="qkv" in biases)
        self.out = nn.Linear(config.num_heads * self.head_dim, config.width, bias="out" in biases)
        norm = NORMS[config.norm] if config.qk_norm else nn.Identity
        self.q_norm = norm(self.head_dim, config.norm_eps)
        self.k_norm = norm(self.head_dim, config.norm_eps)

    def q_k_v(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:            # x [T, width]
        qkv = self.qkv(x).view(len(x), sum(self.heads), self.head_dim)      # [T, H + 2 H_kv, D]
        q, k, v = qkv.split(self.heads, dim=1)                      # [T, H, D], [T, H_kv, D] twice
        return self.q_norm(q), self.k_norm(k), v


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.gated
        bias = "mlp" in config.biases
        self.up = nn.Linear(config.width, (2 if self.gated else 1) * config.ffn_width, bias=bias)
        self.activation = ACTIVATIONS[config.activation]
        self.down = nn.Linear(config.ffn_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:                                 # [T, width]
        inner = self.up(x)                                          # [T, ffn_width], or twice that
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)                               # [T, ffn_width] each
            return self.down(self.activation(gate) * up)                    # [T, width]
        return self.down(self.activation(inner))                            # [T, width]


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, add_up: Callable[[Tensor], Tensor]):
        super().__init__()
        self.add_up = add_up    # second day: on several GPUs. On one it returns its argument
        self.attn_norm = NORMS[config.norm](config.width, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = NORMS[config.norm](config.width, config.norm_eps)
        self.mlp = MLP(config)

    def before_attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:     # x [T, width]
        return self.attn.q_k_v(self.attn_norm(x))                   # [T, H, D], [T, H_kv, D] twice

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:       # [T, width], [T, H, D]
        x = x + self.add_up(self.attn.out(attended.flatten(1)))             # [T, width]
        return x + self.add_up(self.mlp(self.mlp_norm(x)))                  # [T, width]


def embedding(rows: int, width: int) -> nn.Embedding:
    """Uninitialised. (nn.Embedding itself would draw random values: 1.5 s even on "meta".)"""
    return nn.Embedding.from_pretrained(torch.empty(rows, width))


class Model(nn.Module):
    """A pre-norm decoder over packed tokens. See load_model, random_model (checkpoint.py)."""

    def __init__(self, config: ModelConfig, add_up: Callable[[Tensor], Tensor]):
        super().__init__()
        self.config = config
        self.tokens = embedding(config.vocab_size, config.width)
        if config.rope_theta is None:
            self.positions = embedding(config.max_context + config.position_offset, config.width)
        self.layers: Any = nn.ModuleList(Layer(config, add_up) for _ in range(config.num_layers))
        self.norm = NORMS[config.norm](config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        # Second day: a faster run_layers, if loading.fuse has made one.
        self.fused_layers: Callable[..., Tensor] | None = None

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [T], positions [T] (each token's index in its own context) -> hidden [T, width],
        after the final norm.

        attend(layer, q [T, H, D], k [T, H_kv, D], v [T, H_kv, D], rotation) -> [T, H, D] is called
        once per layer, in order. It rotates q and k, and caches k rotated. It scales the scores by
        D ** -0.5. rotation: cos and sin of the angles, [T, D/2] each; None if the layer does not
        rotate. q, k and v can be views into one projection: the heads of one token are contiguous,
        the tokens are not."""
        x = self.tokens(tokens)                                             # [T, width]
        if self.config.rope_theta is None:
            x = x + self.positions(positions + self.config.position_offset)  # [T, width]
        rotation = self.rotation(positions)

        def attend_rotated(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, q, k, v, None if layer in self.config.unrotated else rotation)
        return (self.fused_layers or self.run_layers)(x, attend_rotated)

    def run_layers(self, x: Tensor, attend: Attend) -> Tensor:
        """Embeddings -> hidden states, both [T, width]. attend(layer, q, k, v) -> [T, H, D]."""
        for number, layer in enumerate(self.layers):
            attended = attend(number, *layer.before_attention(x))           # [T, H, D]
            x = layer.after_attention(x, attended)                          # [T, width]
        return self.norm(x)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the angles by which rotary_store.rotate turns q and k: [T, D/2] each, in
        float32. None if the model has learned positions."""
        if self.config.rope_theta is None:
            return None
        frequencies = rotary_frequencies(self.config, positions.device)     # [D/2], second day
        angles = positions[:, None] * frequencies                           # [T, D/2]
        return angles.cos(), angles.sin()

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [N, width] -> logits [N, vocab_size] in float32. Pass only the rows that
        are sampled from."""
        if self.config.tied_embeddings:
            return F.linear(x, self.tokens.weight).float()
        return self.head(x).float()


# ---- second day: how fast rotary positions turn, several processes, memory without values

def rotary_frequencies(config: ModelConfig, device) -> Tensor:
    """By how many radians per position each pair of dimensions turns: [D/2] in float32, from 1 down
    to nearly 1 / rope_theta (before any scaling).

    rope_scaling = (factor, low, high, trained) is how Llama 3.1 reaches beyond the `trained`
    positions. A pair that turns fewer than `low` times within them is slowed down by `factor`. A
    pair that turns more than `high` times keeps its speed. Pairs between blend the two."""
    exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim  # [D/2]
    frequencies = 1 / config.rope_theta ** exponents                        # [D/2]
    if config.rope_scaling is None:
        return frequencies
    factor, low, high, trained = config.rope_scaling
    turns = trained * frequencies / (2 * math.pi)                           # [D/2]
    kept = ((turns - low) / (high - low)).clamp(0, 1)                       # [D/2]
    return frequencies * (kept + (1 - kept) / factor)


class Alone:
    """The processes (ranks) that share a model, seen by one: this one is alone. On several GPUs
    there are more: parallel.Ranks.

    Each has some of the heads and some of each MLP's inner values. A sum over all of them follows
    attn.out and mlp.down, so there only rank 0's biases are not zero. All else is the same in
    all."""
    rank, size = 0, 1

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of the parts that all processes have."""
        return part

    def smallest(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Of each number, the smallest that any process has."""
        return numbers


ALONE = Alone()


def share(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes that each of `size` processes has. With size 4, 32 query heads and 8 KV heads
    become 8 and 2. ValueError for what they cannot share evenly."""
    parts = {}
    for name in ("num_heads", "num_kv_heads", "ffn_width"):
        parts[name], rest = divmod(getattr(config, name), size)
        if rest:
            raise ValueError(f"{name} {getattr(config, name)} cannot be shared evenly by {size} "
                             "processes: start fewer (torchrun --nproc-per-node)")
    return replace(config, **parts)


def empty_model(config: ModelConfig, device, dtype: torch.dtype, ranks: Alone = ALONE) -> Model:
    """A Model whose parameters are allocated on `device` in `dtype`. They hold no values until
    checkpoint.py fills them."""
    with torch.device("meta"):      # until to_empty nothing is allocated or initialised
        model = Model(share(config, ranks.size), ranks.add_up)
    return model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
