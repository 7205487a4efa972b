"""GGUF, the files of llama.cpp: configuration, tokenizer and quantised weights in one file.

    model.gguf    header:  metadata, such as "llama.block_count": 30    ->  read_config
                           and in it the vocabulary and merges          ->  read_tokenizer
                           name, shape, type and offset of each tensor
                  values of the tensors, quantised                      ->  read_tensors

We compute in floats with every weight that we have read. So GGUF saves download, not memory: 98 MB
of SmolLM2-135M become 269 MB in float16, 538 in float32. llama.cpp computes with quantised
activations, too; so its replies differ from ours, and ours are those of transformers.

Invariant: the file is a stranger's. No size in its header makes us loop or allocate beyond what the
file holds, and whatever we do not implement is refused by its name before any weights are read.
"""
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

MOST_HEADER = 2**25     # bytes; a vocabulary of 262,144 tokens takes half of it
MOST_LETTERS = 256      # of one token of SentencePiece, whose own limit is 16 by default
# The types of metadata: numbers, with their codes in struct and numpy; strings; arrays.
NUMBERS = dict(zip([*range(8), 10, 11, 12], "BbHhIif?Qqd"))
STRING, ARRAY = 8, 9

# Our module -> theirs, as in checkpoint.ARCHITECTURES. Every matrix is stored [out, in].
LLAMA = {
    "tokens": "token_embd",
    "layers.{}.attn_norm": "blk.{}.attn_norm",
    "layers.{}.attn.qkv": "blk.{}.attn_q blk.{}.attn_k blk.{}.attn_v",
    "layers.{}.attn.q_norm": "blk.{}.attn_q_norm",
    "layers.{}.attn.k_norm": "blk.{}.attn_k_norm",
    "layers.{}.attn.out": "blk.{}.attn_output",
    "layers.{}.mlp_norm": "blk.{}.ffn_norm",
    "layers.{}.mlp.up": "blk.{}.ffn_gate blk.{}.ffn_up",
    "layers.{}.mlp.down": "blk.{}.ffn_down",
    "norm": "output_norm",
    "head": "output",
}
GPT2 = LLAMA | {"positions": "position_embd", "layers.{}.attn.qkv": "blk.{}.attn_qkv",
                "layers.{}.mlp.up": "blk.{}.ffn_up"}
NAMES = {"llama": LLAMA, "smollm3": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
# We rotate dimensions i and i + D/2 of a head together. For these architectures llama.cpp rotates
# neighbours, so its rows of q and k have another order. With D = 6:  ours 0 1 2 3 4 5,
#                                                                   theirs 0 3 1 4 2 5
INTERLEAVED = "llama", "smollm3"
FIELDS = {      # of the metadata, behind "llama." -> of config.json: Llama's name, then GPT-2's
    "embedding_length": "hidden_size n_embd",
    "block_count": "num_hidden_layers n_layer",
    "feed_forward_length": "intermediate_size n_inner",
    "context_length": "max_position_embeddings n_positions",
    "attention.head_count": "num_attention_heads n_head",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


# ---- the header

class Place(NamedTuple):
    """Where the values of a tensor lie in the file."""
    shape: list[int]    # [rows, columns], or [columns]
    kind: Any           # gguf.GGMLQuantizationType
    offset: int         # bytes from the start of the file
    size: int           # bytes


class Cursor:
    """Takes values off the start of a file, one after another. ValueError behind its last byte."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self.content) - self.at:
            raise ValueError(f"its header is cut off, or larger than {MOST_HEADER} bytes")
        self.at += size
        return self.content[self.at - size:self.at]

    def number(self, code: str) -> Any:
        """code: of struct, for example "Q" for 8 bytes without a sign."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """Its length stands before it."""
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """A number, a string, a list of strings, or a numpy array. KeyError for an unknown kind."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        number = np.dtype("<" + NUMBERS[kind])
        return np.frombuffer(self.take(count * number.itemsize), number)


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    """The metadata, and the place of each tensor. ValueError if the file is not a whole GGUF file
    of version 2 or 3; other errors if its header is damaged, see read_config."""
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape
    with open(file, "rb") as opened:
        cursor = Cursor(opened.read(MOST_HEADER))
    magic, version, num_tensors = cursor.take(4), cursor.number("I"), cursor.number("Q")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r} and version {version:#x}, not with b'GGUF' and "
                         "version 2 or 3, little-endian")
    metadata, tensors = {}, {}
    for _ in range(cursor.number("Q")):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) > 1:
        raise ValueError("it is one of several: merge them by llama-gguf-split --merge")
    for _ in range(num_tensors):
        name, dimensions = cursor.string(), cursor.number("I")
        if name in tensors or dimensions not in (1, 2):
            raise ValueError(f"tensor {name!r:.100} is there twice, or is no vector or matrix")
        shape = [cursor.number("Q") for _ in range(dimensions)][::-1]
        kind = GGMLQuantizationType(cursor.number("I"))
        size = math.prod(quant_shape_to_byte_shape(shape, kind))
        tensors[name] = Place(shape, kind, cursor.number("Q"), size)
    alignment, end = metadata.get("general.alignment", 32), file.stat().st_size
    start = cursor.at + -cursor.at % alignment          # offsets count from here
    for name, place in tensors.items():
        tensors[name] = place = place._replace(offset=start + place.offset)
        if place.offset + place.size > end:
            raise ValueError(f"tensor {name!r:.100} lies beyond the end")
    return metadata, tensors


# ---- the configuration

def read_config(file: Path) -> dict[str, Any]:
    """What the config.json of the same model would say. ValueError, with the name of the file, if
    its header is damaged, and for what we do not implement in the model or in its tokenizer."""
    try:
        return config_of(file, *read_header(file))
    except ImportError as error:
        raise ValueError(f"{file}: to read GGUF, pip install gguf ({error})") from error
    except (OSError, TypeError, UnicodeError, LookupError, ArithmeticError) as error:
        # not its repr: a UnicodeDecodeError's contains all bytes that it could not decode
        raise ValueError(f"{file}: its header is damaged ({type(error).__name__}: "
                         f"{error})") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def config_of(file: Path, metadata: dict[str, Any], tensors: dict[str, Place]) -> dict[str, Any]:
    """What read_config promises, but for its errors."""
    kind, model, pre = (str(metadata.get(key, "default")) for key in (
        "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind not in NAMES:
        raise ValueError(f"unknown architecture {kind!r:.100}; known: {', '.join(NAMES)}")
    if model != "llama" and (model != "gpt2" or pre not in SPLITS):
        raise ValueError(f"unknown tokenizer {model!r:.100} with pre {pre!r:.100}; known: llama, "
                         f"and gpt2 with pre {', '.join(SPLITS)}")
    head_dim = head_dim_of(metadata)
    for key, supported in {"rope.scaling.type": "none", "rope.scale_linear": 1.0,
                           "rope.dimension_count": head_dim, "attention.sliding_window": 0}.items():
        value = metadata.get(f"{kind}.{key}", supported)
        if value != supported:
            raise ValueError(f"{key} = {value!r:.100} is not supported, only {supported!r}")
    config = {name: metadata.get(f"{kind}.{key}")
              for key, names in FIELDS.items() for name in names.split()}
    theta = metadata.get(f"{kind}.rope.freq_base", 10000.0)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config |= dict(
        model_type=kind, vocab_size=len(metadata["tokenizer.ggml.tokens"]), head_dim=head_dim,
        rope_theta=theta, tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_output.bias" in tensors, mlp_bias="blk.0.ffn_up.bias" in tensors,
        eos_token_id=[token for token in ends if token is not None])
    if place := tensors.get("rope_freqs.weight"):
        config["rope_scaling"] = llama3_scaling(file, place, theta, head_dim)
    return config


def head_dim_of(metadata: dict[str, Any]) -> int:
    """The size of a head: as stated, or else its share of the width."""
    kind = metadata["general.architecture"]
    heads, width = metadata[f"{kind}.attention.head_count"], metadata[f"{kind}.embedding_length"]
    return metadata.get(f"{kind}.attention.key_length") or heads and width // heads


def llama3_scaling(file: Path, place: Place, theta: float, head_dim: int) -> dict[str, Any]:
    """The rope_scaling of config.json. The file holds only by how much each frequency is divided:
    from 1 up to the factor. ValueError unless this is what Llama 3.1 does with that factor: see
    model.rotary_frequencies."""
    if place.shape != [head_dim // 2]:
        raise ValueError("rope_freqs.weight does not fit the size of a head")
    divisors = read_values(file, place)                                     # [D/2]
    factor, low, high, trained = float(divisors.max()), 1.0, 4.0, 8192
    turns = trained / (2 * np.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)    # [D/2]
    kept = ((turns - low) / (high - low)).clip(0, 1)                        # [D/2]
    if not np.allclose(divisors * (kept + (1 - kept) / factor), 1, atol=1e-3):
        raise ValueError("rope_freqs.weight does not scale positions as Llama 3.1 does")
    return dict(rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
                original_max_position_embeddings=trained)


# ---- the weights

def read_tensors(file: Path, shapes: Mapping[str, list[int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, float32 tensor), one after another. ValueError, before any values are read, for
    a name that `shapes` lacks or another shape."""
    metadata, tensors = read_header(file)
    tensors.pop("rope_freqs.weight", None)
    for name, place in tensors.items():
        if place.shape != shapes.get(name):
            raise ValueError(f"tensor {name!r:.100} has shape {place.shape}; expected is "
                             f"{shapes.get(name, 'no such tensor')}")
    interleaved = metadata["general.architecture"] in INTERLEAVED
    for name, place in tensors.items():
        values = read_values(file, place)
        if interleaved and re.search(r"attn_[qk]\.", name):
            pairs = values.reshape(-1, head_dim_of(metadata) // 2, 2, *place.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(place.shape)
        yield name, torch.from_numpy(values)


def read_values(file: Path, place: Place) -> np.ndarray:
    """One tensor in float32, of the shape that `place` states."""
    from gguf import dequantize
    stored = np.fromfile(file, np.uint8, place.size, offset=place.offset)
    with np.errstate(all="ignore"):     # checkpoint.fill refuses NaN and infinity, by name
        return dequantize(stored.reshape(*place.shape[:-1], -1), place.kind)


# ---- the tokenizer

def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Splits a text by one pattern after another, and writes its bytes as letters."""
    return pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)        # GPT-2's
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {      # tokenizer.ggml.pre -> how a text is split before the parts are merged
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
    "default": split(r"[\p{P}\$\+<=>\^~\|]+",
                     r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                     r"\p{N}+", "[0-9][0-9][0-9]"),
}
UNKNOWN, CONTROL, USERS = 2, 3, 4       # in tokenizer.ggml.token_type


def read_tokenizer(file: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer that the tokenizer.json of the same model would describe, and what its
    tokenizer_config.json would say. If the metadata do not make a tokenizer, any Exception."""
    metadata, _ = read_header(file)
    ours = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    is_llama, tokens = ours["model"] == "llama", ours["tokens"]
    config = {f"{name[:3]}_token": tokens[ours[f"{name}_token_id"]]
              for name in ("bos", "eos", "padding", "unknown") if f"{name}_token_id" in ours}
    config |= dict(add_bos_token=ours.get("add_bos_token", is_llama),
                   chat_template=metadata.get("tokenizer.chat_template"))
    ids = {text: i for i, text in enumerate(tokens)}
    tokenizer = sentencepiece(ours, ids, config) if is_llama else byte_level(ours, ids)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=bool(kind != USERS))
                          for text, kind in zip(tokens, ours.get("token_type", ()))
                          if kind in (UNKNOWN, CONTROL, USERS)])
    return tokenizer, config


def byte_level(ours: dict[str, Any], ids: dict[str, int]) -> Tokenizer:
    """BPE over bytes that are written as letters, as GPT-2 has it."""
    pre = ours.get("pre", "default")
    merges = [merge.partition(" ")[::2] for merge in ours["merges"]]    # "t h" is ("t", "h")
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[pre], decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece(ours: dict[str, Any], ids: dict[str, int], config: dict[str, Any]) -> Tokenizer:
    """SentencePiece joins the two neighbours that make the token of the highest score. So the
    merges are all pairs of tokens that make a token, those of high scores first. Of equal scores
    the pair with the longer left half comes first, as transformers has it."""
    scores, begins = ours["scores"], ours.get("add_space_prefix", True)
    halves = [(text[:n], text[n:]) for text in ids for n in range(1, min(len(text), MOST_LETTERS))
              if text[:n] in ids and text[n:] in ids]
    halves.sort(key=lambda pair: (scores[ids["".join(pair)]], len(pair[0])), reverse=True)
    tokenizer = Tokenizer(models.BPE(ids, halves, unk_token=config.get("unk_token"), fuse_unk=True,
                                     byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if begins else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer
