"""Checkpoints: the files of a real model become a Model; and made-up weights for measuring.

    tiny_chat, /a/directory, owner/name on the hub  ->  config.json  ->  ModelConfig  ->  empty Model  <-  *.safetensors

An architecture is one entry of ARCHITECTURES, which says how a checkpoint spells the configuration and the parameters.
Invariant: every parameter is filled exactly once, by a tensor of exactly its shape; whatever does not fit is refused by
name.
"""
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from model import NORMS, ModelConfig, empty_model

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
