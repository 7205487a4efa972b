"""The model: GPT-2, GPT-3, OPT and Llama as one plain decoder, and the loading of their real checkpoints.

The batch is ragged (the paper's unified batching): the tokens of all spans lie packed in one dimension T, whatever
request and phase they belong to. All that a decoder does, but for attention, it does token by token, so T is the
only batch dimension there is. Attention is the one place where tokens meet, and it is handed in as a function:
`attend(layer, q, k, v)` stores K and V and lets every query see what its span sees. So this file knows nothing of
caches, spans or batches, and a test can run it with ten lines of dense attention.

Architectures differ in a ModelConfig, whose switches are all that Llama does otherwise than GPT (norm, gated, bias,
rope_theta), and in one entry of ARCHITECTURES, which says how a checkpoint spells the configuration and the parameters.
Invariant of loading: every parameter is filled exactly once, by a tensor of exactly its shape; whatever does not fit is
refused by name.
"""
import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "silu": F.silu}
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder; the defaults are GPT's. ValueError if they do not fit together."""
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
    bias: bool = True               # the projections have biases
    position_offset: int = 0        # OPT's table of positions begins with 2 unused rows
    rope_theta: float | None = None                     # the base of rotary positions; None: a learned table of positions
    rope_scaling: tuple[float, ...] | None = None       # (factor, low, high, trained) of rotary_frequencies
    tied_embeddings: bool = True    # the token embedding is the output layer too
    eos_ids: frozenset[int] = frozenset()

    @property
    def head_dim(self):
        return self.width // self.num_heads

    @property
    def matmul_parameters(self):
        """How many weights every token is multiplied with, at 2 FLOP each: the matrices of all layers. The output layer,
        vocab_size * width more, is only for tokens that are sampled from."""
        attention = 2 * self.width * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + (3 if self.gated else 2) * self.width * self.ffn_width)

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "width", "ffn_width", "max_context"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        for name, unit in (("width", "num_heads"), ("num_heads", "num_kv_heads")):
            if getattr(self, name) % getattr(self, unit):
                raise ValueError(f"{name} {getattr(self, name)} must be a multiple of {unit} {getattr(self, unit)}")
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head size, not width / num_heads = {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")


def rotary_frequencies(config, device):
    """Radians per position by which each pair of dimensions turns, [D/2] in float32: from 1 down to nearly 1 / rope_theta.

    rope_scaling (factor, low, high, trained) is how Llama 3.1 reaches beyond the `trained` positions: pairs that turn fewer
    than `low` times within them slow down by `factor`, those that turn more than `high` times do not, between is a blend."""
    frequencies = 1 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
    if config.rope_scaling is None:
        return frequencies
    factor, low, high, trained = config.rope_scaling
    turns = trained * frequencies / (2 * math.pi)                                       # [D/2]
    kept = ((turns - low) / (high - low)).clamp(0, 1)                                   # [D/2]
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x, cos, sin):
    """Rotary embedding: dimensions i and i + D/2 of a head are a point in a plane, turned by its token's i-th angle. So
    q . k depends on the distance between two tokens, not on where they stand.

    x [T, heads, D], cos and sin [T, 1, D/2] of the angles, in float32 -> [T, heads, D], computed in float32."""
    a, b = x.chunk(2, dim=-1)                                                           # [T, heads, D/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]       # of q, k, v
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.width, sum(self.heads) * self.head_dim, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x, attend):                                                       # [T, width]
        qkv = self.qkv(x).view(len(x), sum(self.heads), self.head_dim)                  # [T, H + 2 H_kv, D]
        q, k, v = qkv.split(self.heads, dim=1)                                          # [T, H, D], [T, H_kv, D] twice
        return self.out(attend(self.layer, q, k, v).flatten(1))                         # [T, width]


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.gated
        self.up = nn.Linear(config.width, (2 if self.gated else 1) * config.ffn_width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.down = nn.Linear(config.ffn_width, config.width, bias=config.bias)

    def forward(self, x):                                                               # [T, width]
        inner = self.up(x)                                                              # [T, ffn_width], or twice that
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)                                           # [T, ffn_width] each
            return self.down(self.activation(gate) * up)                                # [T, width]
        return self.down(self.activation(inner))                                        # [T, width]


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = NORMS[config.norm](config.width, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = NORMS[config.norm](config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, attend):                                                       # [T, width]
        x = x + self.attn(self.attn_norm(x), attend)
        return x + self.mlp(self.mlp_norm(x))                                           # [T, width]


def table(rows, width):
    return nn.Embedding.from_pretrained(torch.empty(rows, width))   # else it is initialised, and on "meta" that takes a second


class Model(nn.Module):
    """A pre-norm decoder over packed tokens. Build it with `load_model` or `random_model`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = table(config.vocab_size, config.width)
        if config.rope_theta is None:
            self.positions = table(config.max_context + config.position_offset, config.width)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = NORMS[config.norm](config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens, positions, attend):
        """tokens [T], positions [T] (int64, each token's place in its own sequence) -> hidden [T, width], after the
        final norm.

        attend(layer, q [T, H, D], k [T, H_kv, D], v [T, H_kv, D]) -> [T, H, D] is called once per layer, in order. It
        scales by D ** -0.5. q, k and v can be views into one projection: a token's heads are contiguous, tokens are not.
        """
        x = self.tokens(tokens)                                                         # [T, width]
        if self.config.rope_theta is None:
            x = x + self.positions(positions + self.config.position_offset)             # [T, width]
        else:
            attend = self.rotary(attend, positions)
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def rotary(self, attend, positions):
        """attend(), but q and k are rotated first, by their tokens' positions. So keys are cached rotated."""
        angles = positions[:, None, None] * rotary_frequencies(self.config, positions.device)   # [T, 1, D/2]
        cos, sin = angles.cos(), angles.sin()
        return lambda layer, q, k, v: attend(layer, *self.rotate_both(q, k, cos, sin), v)

    @staticmethod
    def rotate_both(q, k, cos, sin):
        """Of one layer. It is a member so that worker.fuse can put a compiled one in its place."""
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def logits(self, x):
        """Hidden states [N, width] -> logits [N, vocab_size], float32. Pass only the rows that are sampled from."""
        head = self.tokens if self.config.tied_embeddings else self.head
        return F.linear(x, head.weight).float()


def empty_model(config, device, dtype):
    """A Model whose parameters are allocated on `device` in `dtype`, but hold no values yet."""
    with torch.device("meta"):                                      # no memory and no initialisation before to_empty
        model = Model(config)
    return model.to(dtype).to_empty(device=device).requires_grad_(False).eval()


# ---------------------------------------------------------------------------------------------------------------------
# Random weights, for measuring: speed does not depend on the values.

def gpt(layers, heads, width, context):
    return ModelConfig(50257, layers, heads, heads, width, 4 * width, context, "gelu_new", eos_ids=frozenset({50256}))


def opt(layers, heads, width):
    return ModelConfig(50272, layers, heads, heads, width, 4 * width, 2048, "relu", position_offset=2, eos_ids=frozenset({2}))


def llama2(layers, heads, kv_heads, width, ffn_width):
    return ModelConfig(32000, layers, heads, kv_heads, width, ffn_width, 4096, "silu", norm="rms", gated=True, bias=False,
                       rope_theta=10000.0, tied_embeddings=False, eos_ids=frozenset({2}))


PRESETS = {
    "gpt2": gpt(12, 12, 768, 1024),
    "gpt3-6.7b": gpt(32, 32, 4096, 2048),       # dense attention in every layer; GPT-3's own alternates with a sparse one
    "gpt3-13b": gpt(40, 40, 5120, 2048),        # the paper's table says 5140, which 40 heads of 128 do not make
    "opt-125m": opt(12, 12, 768),
    "opt-1.3b": opt(24, 32, 2048),
    "opt-2.7b": opt(32, 32, 2560),
    "opt-6.7b": opt(32, 32, 4096),
    "opt-13b": opt(40, 40, 5120),
    "opt-30b": opt(48, 56, 7168),
    "opt-66b": opt(64, 72, 9216),
    "llama2-7b": llama2(32, 32, 32, 4096, 11008),
    "llama2-13b": llama2(40, 40, 40, 5120, 13824),
    "llama2-13b-gqa": llama2(40, 40, 10, 5120, 13824),          # the paper's: grouped to show what smaller KV-tokens bring
    "llama2-70b": llama2(80, 64, 8, 8192, 28672),
}


def random_model(preset, device, dtype, seed=0):
    """The Model of that PRESET with weights drawn from N(0, 0.02), the same for the same seed and device."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    model = empty_model(PRESETS[preset], device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(std=0.02, generator=generator)
    for module in model.modules():
        if isinstance(module, tuple(NORMS.values())):
            module.reset_parameters()                               # weight 1, bias 0
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: what each architecture calls things.

def require(config, **supported):
    """Refuse the variants of an architecture that we do not implement: ValueError unless every field that is present
    has its one supported value."""
    for field, value in supported.items():
        if config.get(field) not in (None, value):
            raise ValueError(f"{field} = {config[field]!r} is not supported, only {value!r}; choose another checkpoint")


def read_gpt2(config):
    require(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False,
            add_cross_attention=False)
    return ModelConfig(
        vocab_size=config["vocab_size"], num_layers=config["n_layer"], num_heads=config["n_head"], num_kv_heads=config["n_head"],
        width=config["n_embd"], ffn_width=config.get("n_inner") or 4 * config["n_embd"], max_context=config["n_positions"],
        activation=config.get("activation_function", "gelu_new"), norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.get("tie_word_embeddings", True), eos_ids=config["eos_ids"])


def read_opt(config):
    require(config, do_layer_norm_before=True, word_embed_proj_dim=config["hidden_size"], enable_bias=True,
            layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    return ModelConfig(
        vocab_size=config["vocab_size"], num_layers=config["num_hidden_layers"], num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_attention_heads"], width=config["hidden_size"], ffn_width=config["ffn_dim"],
        max_context=config["max_position_embeddings"], activation=config.get("activation_function", "relu"), position_offset=2,
        tied_embeddings=config.get("tie_word_embeddings", True), eos_ids=config["eos_ids"])


def read_llama(config):
    heads = config["num_attention_heads"]
    ours = ModelConfig(
        vocab_size=config["vocab_size"], num_layers=config["num_hidden_layers"], num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads, width=config["hidden_size"],
        ffn_width=config["intermediate_size"], max_context=config["max_position_embeddings"],
        activation=config.get("hidden_act", "silu"), norm="rms", norm_eps=config.get("rms_norm_eps", 1e-6), gated=True,
        bias=False, tied_embeddings=config.get("tie_word_embeddings", False), eos_ids=config["eos_ids"], **read_rope(config))
    require(config, attention_bias=False, mlp_bias=False, sliding_window=None, head_dim=ours.head_dim)
    return ours


def read_rope(config):
    """ModelConfig's rope_theta and rope_scaling: one dictionary in new checkpoints, a number and a dictionary in old ones."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type = {kind!r} is not supported, only 'default' and 'llama3'; choose another checkpoint")
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_theta": rope["rope_theta"], "rope_scaling": tuple(rope[f] for f in fields) if kind == "llama3" else None}


@dataclass(frozen=True)
class Architecture:
    read: Callable[[dict], ModelConfig]     # config.json, with "eos_ids" put in
    names: dict[str, str]                   # our module -> theirs, {} being the layer; "q k v" where ours joins several
    transposed: tuple[str, ...] = ()        # the ends of their names whose weights are stored [in, out]


ARCHITECTURES = {
    "gpt2": Architecture(read_gpt2, {
        "tokens": "wte",
        "positions": "wpe",
        "layers.{}.attn_norm": "h.{}.ln_1",
        "layers.{}.attn.qkv": "h.{}.attn.c_attn",
        "layers.{}.attn.out": "h.{}.attn.c_proj",
        "layers.{}.mlp_norm": "h.{}.ln_2",
        "layers.{}.mlp.up": "h.{}.mlp.c_fc",
        "layers.{}.mlp.down": "h.{}.mlp.c_proj",
        "norm": "ln_f",
        "head": "lm_head",
    }, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
    "opt": Architecture(read_opt, {
        "tokens": "embed_tokens",
        "positions": "embed_positions",
        "layers.{}.attn_norm": "layers.{}.self_attn_layer_norm",
        "layers.{}.attn.qkv": "layers.{}.self_attn.q_proj layers.{}.self_attn.k_proj layers.{}.self_attn.v_proj",
        "layers.{}.attn.out": "layers.{}.self_attn.out_proj",
        "layers.{}.mlp_norm": "layers.{}.final_layer_norm",
        "layers.{}.mlp.up": "layers.{}.fc1",
        "layers.{}.mlp.down": "layers.{}.fc2",
        "norm": "final_layer_norm",
        "head": "lm_head",
    }),
    "llama": Architecture(read_llama, {
        "tokens": "embed_tokens",
        "layers.{}.attn_norm": "layers.{}.input_layernorm",
        "layers.{}.attn.qkv": "layers.{}.self_attn.q_proj layers.{}.self_attn.k_proj layers.{}.self_attn.v_proj",
        "layers.{}.attn.out": "layers.{}.self_attn.o_proj",
        "layers.{}.mlp_norm": "layers.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "layers.{}.mlp.gate_proj layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "layers.{}.mlp.down_proj",
        "norm": "norm",
        "head": "lm_head",
    }),
}
ARCHITECTURES["mistral"] = ARCHITECTURES["llama"]
PREFIX = re.compile(r"^((transformer|model|decoder)\.)+")           # depends on the class that was saved
NOT_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")    # constants that old checkpoints carry


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: finding, reading, filling.

def find_checkpoint(model):
    """The directory of a checkpoint: `model` as given, or relative to this file, or else downloaded as a name on the
    Hugging Face hub (safetensors; pytorch_model*.bin only where there are none). ValueError if it is nowhere."""
    for directory in (Path(model), Path(__file__).parent / model):
        if directory.is_dir():
            return directory
    download = partial(snapshot_download, model)
    try:
        directory = Path(download(allow_patterns=["*.json", "*.txt", "*.jinja", "model*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            download(allow_patterns=["pytorch_model*.bin"])
        return directory
    except (OSError, ValueError) as error:                          # no network, unknown, gated, or not a name at all
        preset = "it is a preset: add --random-weights to measure with it; or " if model in PRESETS else ""
        raise ValueError(f"model {model!r} is not a directory, and the Hugging Face hub gave {type(error).__name__}: {preset}"
                         "give a checkpoint's directory, or a hub name (owner/name), online, whose licence you have accepted "
                         "(`hf auth login`)") from error


def load_model(directory, device, dtype):
    """The Model of a checkpoint directory: config.json and *.safetensors, or pytorch_model*.bin. Tensors stream one by
    one into parameters that are already in place, converted to `dtype`. ValueError, naming the file, the tensor or the
    field, for anything that is missing, unexpected, corrupt, of a wrong shape, or of a kind that we do not implement."""
    directory = Path(directory)
    architecture, config = read_config(directory)
    model = empty_model(config, device, dtype)
    waiting = destinations(model, architecture)
    for file in weight_files(directory):
        for name, tensor in read_tensors(file):
            name = PREFIX.sub("", name)
            if name.endswith(NOT_PARAMETERS) or name == "lm_head.weight" and config.tied_embeddings:
                continue
            if name not in waiting:
                raise ValueError(f"{file}: tensor {name!r} is unexpected: unknown to this architecture, or there twice")
            fill(waiting.pop(name), tensor, f"{file}: tensor {name!r}")
    if waiting:
        raise ValueError(f"{directory}: {len(waiting)} tensors are missing, the first is {next(iter(waiting))!r}; "
                         "download the checkpoint again")
    return model


def read_config(directory):
    """config.json (and the end-of-sequence ids of generation_config.json) -> (Architecture, ModelConfig)."""
    file, generation_file = directory / "config.json", directory / "generation_config.json"
    config = read_json(file)
    ends = [config.get("eos_token_id"), read_json(generation_file).get("eos_token_id") if generation_file.is_file() else None]
    config["eos_ids"] = frozenset().union(*(ids if isinstance(ids, list) else [ids] for ids in ends)) - {None}
    architecture = ARCHITECTURES.get(config.get("model_type"))
    if architecture is None:
        raise ValueError(f"{file}: unknown model_type {config.get('model_type')!r}; known: {', '.join(ARCHITECTURES)}")
    try:
        return architecture, architecture.read(config)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def read_json(file):
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {content!r:.40}")
    return content


def weight_files(directory):
    """The files that hold the weights: safetensors before pytorch_model.bin, the shards of an index before one file."""
    for single in (directory / "model.safetensors", directory / "pytorch_model.bin"):
        index = single.with_name(single.name + ".index.json")
        if index.is_file():
            return [directory / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        if single.is_file():
            return [single]
    raise ValueError(f"{directory} holds neither model.safetensors nor pytorch_model.bin, nor an index of their shards")


def read_tensors(file):
    """Yield (name, tensor on the CPU) of a weight file, memory-mapped where the format allows. No pickled code runs."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
            yield from dict(content).items()
    except Exception as error:                                      # a garbled pickle can raise anything
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error


def destinations(model, architecture):
    """Their name -> the view of our parameter that takes their tensor, shaped as theirs: turned where they store
    [in, out], some of the rows where ours joins several. Together the views cover every parameter exactly once."""
    views, config = {}, model.config
    qkv_rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for name, parameter in model.named_parameters():                # layers.3.attn.qkv.weight
        module, leaf = name.rsplit(".", 1)
        layer = re.findall(r"\d+", module)                          # ["3"], or [] outside the layers
        names = architecture.names[re.sub(r"\d+", "{}", module)].split()
        parts = parameter.split(qkv_rows) if len(names) == 3 else parameter.chunk(len(names))
        for their, part in zip(names, parts, strict=True):
            their = f"{their.format(*layer)}.{leaf}"
            views[their] = part.t() if their.endswith(architecture.transposed) else part
    return views


def fill(view, tensor, what):
    """Copy a checkpoint's tensor into the view of a parameter; `what` names it in the ValueError of a mismatch."""
    if tensor.shape != view.shape or not tensor.is_floating_point():
        raise ValueError(f"{what}: expected floats of shape {list(view.shape)}, found {tensor.dtype} of {list(tensor.shape)}")
    view.copy_(tensor.to(view.device))                              # in the file's dtype: the device converts faster
