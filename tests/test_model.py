"""The model against transformers, on real checkpoints that transformers wrote; and every way in
which loading refuses."""
import json
import os
import pickle
import weakref

import huggingface_hub.constants
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM,
                          OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM)

import checkpoint as checkpoint_file
import cpu_linear
import loading
from checkpoint import (PRESETS, WORKING, find_checkpoint, load_model, random_model,
                        weight_files)
from engine import Engine
from model import ALONE, Model, ModelConfig, empty_model
from rotary_store import rotate

GPT2 = dict(vocab_size=97, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=5)
OPT = dict(vocab_size=97, max_position_embeddings=64, hidden_size=32, word_embed_proj_dim=32,
           num_hidden_layers=3,
           num_attention_heads=4, ffn_dim=72, eos_token_id=5)
LLAMA = dict(vocab_size=97, max_position_embeddings=64, hidden_size=32, num_hidden_layers=3,
             num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=56, eos_token_id=5)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)
CHECKPOINTS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "gpt2-variant": lambda: GPT2LMHeadModel(GPT2Config(**GPT2 | dict(
        n_inner=40, activation_function="relu", n_head=2, layer_norm_epsilon=1e-3,
        tie_word_embeddings=False))),
    "opt": lambda: OPTForCausalLM(OPTConfig(**OPT)),
    "opt-variant": lambda: OPTForCausalLM(OPTConfig(**OPT | dict(
        activation_function="gelu", num_attention_heads=8, tie_word_embeddings=False))),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama-variant": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(       # multi-head, 3 heads of 10
        vocab_size=101, hidden_size=30, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=41, rms_norm_eps=1e-2,
        hidden_act="gelu", tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100.0)))),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(
        rope_parameters=LLAMA3_ROPE | dict(rope_theta=500.0)))),
    "llama-biased": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(        # heads larger than width / 4
        attention_bias=True, mlp_bias=True, head_dim=10))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA | dict(tie_word_embeddings=True))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA | dict(head_dim=12))),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**LLAMA | dict(
        no_rope_layer_interval=2, pad_token_id=None, bos_token_id=0))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA | dict(
        num_key_value_heads=1, sliding_window=None, head_dim=8))),
}


def dense_attend(*lengths):
    """attend() for whole sequences of these lengths, packed: plain causal attention within each of
    them."""
    def attend(layer, q, k, v, rotation):                           # [T, H, D], [T, H_kv, D] twice
        if rotation:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        outs = []
        for sequence in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
            q_k_v = (x.transpose(0, 1)[None] for x in sequence)         # [1, heads, length, D] each
            outs.append(F.scaled_dot_product_attention(*q_k_v, is_causal=True, enable_gqa=True))
        return torch.cat([out[0].transpose(0, 1) for out in outs])          # [T, H, D]
    return attend


def run(model, *sequences):
    """The logits of every token of the sequences, in one ragged batch: a tensor [length, vocab] per
    sequence."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = model(torch.cat(sequences), positions, dense_attend(*lengths))
    return model.logits(hidden).split(lengths)


def tokens(n, seed=0, vocab=97):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


def randomised(theirs):
    """Values with which no mistake can hide: norms and biases are not 1 and 0, and attention is far
    from uniform."""
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return theirs.eval()


@pytest.fixture(params=CHECKPOINTS)
def theirs(request):
    return randomised(CHECKPOINTS[request.param]())


def assert_same(ours, theirs, *lengths):
    sequences = [tokens(n, seed=n) for n in lengths]
    for sequence, logits in zip(sequences, run(ours, *sequences)):
        with torch.no_grad():
            expected = theirs(sequence[None]).logits[0]                         # [length, vocab]
        assert logits.dtype == torch.float32 and logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_logits_equal_those_of_transformers_also_in_a_ragged_batch(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "cpu", torch.float32)
    assert_same(ours, theirs, 40)
    assert_same(ours, theirs, 1)
    assert_same(ours, theirs, 64, 1, 17)            # 64: the last position that there is


def test_shards_and_pickled_weights_load_as_well(theirs, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load_model(tmp_path, "cpu", torch.float32), theirs, 9)
    for file in tmp_path.glob("model*"):
        file.unlink()
    for legacy in (False, True):                    # both formats that torch.save has had
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin",
                   _use_new_zipfile_serialization=not legacy)
        assert_same(load_model(tmp_path, "cpu", torch.float32), theirs, 9)


def test_sharded_pickles_load(tmp_path):
    theirs = randomised(CHECKPOINTS["opt"]())
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    items = list(theirs.state_dict().items())
    shards = {"pytorch_model-1.bin": dict(items[:20]), "pytorch_model-2.bin": dict(items[20:])}
    for file, shard in shards.items():
        torch.save(shard, tmp_path / file)
    index = {"weight_map": {name: file for file, shard in shards.items() for name in shard}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(load_model(tmp_path, "cpu", torch.float32), theirs, 9)


@pytest.mark.parametrize("kind, change", [
    ("gpt2", lambda name: name.removeprefix("transformer.")),
    ("opt", lambda name: name.removeprefix("model.")),
    ("opt", lambda name: name.removeprefix("model.decoder.")),
    ("llama-variant", lambda name: name.removeprefix("model."))])
def test_names_load_without_their_prefix_and_old_buffers_are_ignored(kind, change, tmp_path):
    theirs = randomised(CHECKPOINTS[kind]())
    theirs.save_pretrained(tmp_path)
    weights = {change(name): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    if kind == "gpt2":
        weights |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    if kind == "llama-variant":
        weights |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    head = theirs.get_output_embeddings().weight.detach()       # tied: not used
    save_file(weights | {"lm_head.weight": head.clone()}, tmp_path / "model.safetensors")
    assert_same(load_model(tmp_path, "cpu", torch.float32), theirs, 9)


@pytest.mark.parametrize("rope, fields", [
    (dict(rope_theta=300.0), dict(rope_theta=300)),
    (dict(rope_theta=10000.0), dict()),
    (dict(rope_theta=300.0), dict(rope_theta=300.0, rope_scaling={"type": "default"})),
    (dict(rope_theta=300.0), dict(rope_theta=300.0, rope_parameters={"rope_theta": None})),
    (LLAMA3_ROPE | dict(rope_theta=300.0), dict(rope_theta=300.0, rope_scaling=LLAMA3_ROPE))])
def test_configurations_of_older_llamas_are_read(rope, fields, tmp_path):
    sizes = LLAMA | dict(num_key_value_heads=4, rope_parameters={"rope_type": "default"} | rope)
    theirs = randomised(LlamaForCausalLM(LlamaConfig(**sizes)))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for new in ("rope_parameters", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias",
                "tie_word_embeddings"):
        del config[new]
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    assert_same(load_model(tmp_path, "cpu", torch.float32), theirs, 64)


def test_half_precision_checkpoints_load_in_any_dtype(theirs, tmp_path):
    theirs.half().save_pretrained(tmp_path)
    assert_same(load_model(tmp_path, "cpu", torch.float32), theirs.float(), 20)
    ours = load_model(tmp_path, "cpu", torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in ours.parameters())
    assert run(ours, tokens(5))[0].dtype == torch.float32


@pytest.mark.parametrize("config, generation, expected", [
    (5, None, {5}), ([5, 6], None, {5, 6}), (None, 7, {7}), (5, [7, 8], {5, 7, 8}), (None, None, set())])
def test_eos_ids_come_from_both_configurations(config, generation, expected, tmp_path):
    CHECKPOINTS["gpt2"]().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=config)
    edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    assert load_model(tmp_path, "cpu", torch.float32).config.eos_ids == expected


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "smollm3", "llama-biased"])
def test_two_turns_are_the_greedy_ones_of_transformers(kind, tmp_path):
    theirs = randomised(CHECKPOINTS[kind]())
    theirs.save_pretrained(tmp_path)
    engine, context = Engine(str(tmp_path), device="cpu", gpu_cache_tokens=60, cpu_cache_tokens=64), []
    for prompt in (tokens(12).tolist(), tokens(9, seed=1).tolist()):
        reply = engine.generate(prompt, "c", max_tokens=8, ignore_eos=True)
        context += prompt
        with torch.no_grad():
            logits = theirs(torch.tensor([context + reply.token_ids])).logits[0, len(context) - 1:-1]
        assert reply.token_ids == logits.argmax(-1).tolist()
        context += reply.token_ids
    assert reply.usage["gpu"] == 19         # the last token of the first reply was never fed
    engine.close()


# Packed weights.

def test_packed_weights_compute_the_same_and_the_dense_ones_are_let_go(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "cpu", torch.float32)
    dense = [weakref.ref(module.weight) for module in ours.modules() if isinstance(module, nn.Linear)]
    cpu_linear.pack(ours)
    assert len(dense) >= 12 and not any(weight() is not None for weight in dense)
    assert_same(ours, theirs, 64, 1, 17)
    assert ours.logits(torch.zeros(0, ours.config.width)).shape == (0, ours.config.vocab_size)


@pytest.mark.skipif(not cpu_linear.packs(torch.bfloat16), reason="no instructions for bfloat16 here")
def test_packed_weights_in_bfloat16_are_as_near_to_the_exact_product_as_dense_ones(monkeypatch):
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40).bfloat16(), torch.randn(17, 96).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    packed = cpu_linear.PackedLinear(layer.weight.detach(), layer.bias.detach())(x)
    assert packed.dtype == torch.bfloat16
    assert (packed.double() - exact).abs().max() <= (layer(x).double() - exact).abs().max() * 1.01
    monkeypatch.setattr(loading, "SMALL_MODEL", 0)
    engine = Engine("tiny_chat", device="cpu", dtype="bfloat16", gpu_cache_tokens=64, cpu_cache_tokens=0)
    assert {type(layer.mlp.down) for layer in engine.worker.model.layers} == {cpu_linear.PackedLinear}
    assert len(engine.generate([5, 6, 7], "c", max_tokens=8, ignore_eos=True).token_ids) == 8
    engine.close()


needs_float16 = pytest.mark.skipif(not cpu_linear.multiplies_float16(),
                                   reason="this build of torch does not multiply float16 by float32")


def rounded(theirs):
    """With parameters that float16 can hold. (half() would round its rotary frequencies, too.)"""
    for parameter in theirs.parameters():
        parameter.data = parameter.data.half().float()
    return theirs


@needs_float16
def test_weights_in_float16_compute_the_same_in_float32_and_the_dense_ones_are_let_go(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "cpu", torch.float16)
    dense = [weakref.ref(module.weight) for module in ours.modules() if isinstance(module, nn.Linear)]
    cpu_linear.keep_float16(ours)
    assert len(dense) >= 12 and not any(weight() is not None for weight in dense)
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters())
    assert_same(ours, rounded(theirs), 64, 1, 17)
    assert ours.logits(torch.zeros(0, ours.config.width)).shape == (0, ours.config.vocab_size)


def served(**flags):
    """Which kinds of linear layers an engine over tiny_chat, which is stored in float16, has; and a
    reply."""
    engine = Engine("tiny_chat", device="cpu", gpu_cache_tokens=64, cpu_cache_tokens=0, **flags)
    reply = engine.generate([5, 6, 7], "c", max_tokens=8, ignore_eos=True)
    engine.close()
    kinds = {type(module) for module in engine.worker.model.modules() if "Linear" in type(module).__name__}
    assert engine.worker.dtype == torch.float32
    return kinds, reply.token_ids


def test_an_engine_packs_the_weights_of_all_but_small_models(monkeypatch):
    dense, expected = served()
    monkeypatch.setattr(loading, "SMALL_MODEL", 0)
    assert dense == {nn.Linear} and served(dtype="float32") == ({cpu_linear.PackedLinear}, expected)
    assert served(eager=True) == (dense, expected)


@needs_float16
def test_weights_that_are_stored_in_float16_stay_in_it_on_a_cpu(monkeypatch):
    _, expected = served()
    assert served(dtype="float16") == ({nn.Linear}, expected)       # a small model
    monkeypatch.setattr(loading, "SMALL_MODEL", 0)
    assert served() == served(dtype="float16") == ({cpu_linear.Float16Linear}, expected)
    assert served(dtype="float16", eager=True) == ({nn.Linear}, expected)
    monkeypatch.setattr(cpu_linear, "multiplies_float16", lambda: False)
    assert served() == ({cpu_linear.PackedLinear}, expected)


@pytest.mark.parametrize("flags, kind", [({}, cpu_linear.PackedLinear), (dict(eager=True), nn.Linear)])
def test_a_cpu_that_cannot_keep_float16_computes_in_float32_all_the_same(flags, kind, monkeypatch):
    _, expected = served(dtype="float32")
    monkeypatch.setattr(loading, "SMALL_MODEL", 0)
    monkeypatch.setattr(cpu_linear, "multiplies_float16", lambda: False)
    assert served(dtype="float16", **flags) == ({kind}, expected)


@needs_float16
def test_a_checkpoint_with_one_tensor_in_float32_is_served_in_float32(tmp_path):
    CHECKPOINTS["llama"]().half().save_pretrained(tmp_path)
    assert loading.dtype_on_cpu(tmp_path) == "float16"
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}      # no weight
    save_file(weights | buffer, file)
    assert loading.dtype_on_cpu(tmp_path) == "float16"
    save_file(weights | {"model.norm.weight": torch.ones(32)}, file)
    assert loading.dtype_on_cpu(tmp_path) == "float32"
    file.unlink()
    assert loading.dtype_on_cpu(tmp_path) == "float32"


@needs_float16
@pytest.mark.parametrize("kind", ["opt", "qwen2"])
def test_turns_with_rounded_weights_are_the_greedy_ones_of_transformers(kind, tmp_path, monkeypatch):
    """Three conversations at once, in tiers too small for them, against the rounded weights."""
    monkeypatch.setattr(loading, "SMALL_MODEL", 0)
    theirs = randomised(CHECKPOINTS[kind]())
    theirs.save_pretrained(tmp_path)
    rounded(theirs)
    engine = Engine(str(tmp_path), device="cpu", dtype="float16", gpu_cache_tokens=90, cpu_cache_tokens=64,
                    chunk_size=4, debug=True)
    contexts = {name: [] for name in "abc"}
    for turn in range(4):
        prompts = {name: tokens(4 + seed, 10 * turn + seed).tolist() for seed, name in enumerate("abc")}
        handles = {name: engine.submit(prompt, name, max_tokens=6, ignore_eos=True)
                   for name, prompt in prompts.items()}
        for name, handle in handles.items():
            reply, context = handle.result().token_ids, contexts[name] + prompts[name]
            with torch.no_grad():
                logits = theirs(torch.tensor([context + reply])).logits[0, len(context) - 1:-1]
            best = logits.topk(2).values
            for token, row, (first, second) in zip(reply, logits, best):
                if token != row.argmax():
                    assert first - second < 1e-4
                    break
            contexts[name] = context + reply
    assert engine.stats()["chunks_swapped_out"] > 0
    engine.close()


# What loading refuses: the message names the culprit.

def edit_json(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(directory):
    with pytest.raises(ValueError) as error:
        load_model(directory, "cpu", torch.float32)
    message = str(error.value)
    assert message.count(WORKING) == 1
    return message


@pytest.mark.parametrize("kind, field, value", [
    ("gpt2", "scale_attn_weights", False), ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "reorder_and_upcast_attn", True), ("gpt2", "add_cross_attention", True),
    ("gpt2", "activation_function", "tanh"), ("gpt2", "activation_function", ["relu"]),
    ("gpt2", "model_type", "mamba"), ("gpt2", "model_type", ["gpt2"]),
    ("gpt2", "n_head", 5), ("gpt2", "n_layer", 0),
    ("gpt2", "vocab_size", "97"),
    ("opt", "do_layer_norm_before", False), ("opt", "word_embed_proj_dim", 16), ("opt", "enable_bias", False),
    ("opt", "layer_norm_elementwise_affine", False), ("opt", "_remove_final_layer_norm", True),
    ("opt", "activation_function", "tanh"),
    ("llama", "head_dim", 0), ("llama", "head_dim", "16"), ("llama", "hidden_act", "tanh"),
    ("llama", "num_attention_heads", 0), ("llama", "hidden_size", 10**20),
    ("llama", "num_hidden_layers", 5000), ("llama", "intermediate_size", [1]),
    ("llama", "rope_parameters", "fast"), ("smollm3", "no_rope_layers", 5),
    ("llama", "eos_token_id", {"id": 5}),
    ("llama", "quantization_config", {"quant_method": "gptq"}), ("qwen2", "quantization_config", 8),
    ("llama", "num_key_value_heads", 0), ("gpt2", "n_inner", 0), ("gpt2", "tie_word_embeddings", "false"),
    ("llama", "per_layer_config", {"1": {"rms_norm_eps": 0.5}}),
    ("llama", "model_type", "gemma3_text"), ("mistral", "sliding_window", 4096)])
def test_unsupported_variants_are_refused_by_name(kind, field, value, tmp_path):
    CHECKPOINTS[kind]().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **{field: value})
    ours = {"n_head": "num_heads", "num_attention_heads": "num_heads", "n_layer": "num_layers",
            "num_hidden_layers": "num_layers", "hidden_act": "activation", "hidden_size": "width",
            "intermediate_size": "ffn_width", "n_inner": "ffn_width", "num_key_value_heads": "num_kv_heads",
            "quantization_config": "quantised"}.get(field, field)
    message = refusal(tmp_path)
    assert ours.removesuffix("_function") in message and "config.json" in message
    assert str(value) in message


def test_a_window_that_is_stated_but_unused(tmp_path):
    """As in the config.json of Qwen2.5."""
    theirs = randomised(CHECKPOINTS["qwen2"]())
    theirs.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", sliding_window=16, use_sliding_window=False)
    assert_same(load_model(tmp_path, "cpu", torch.float32), theirs, 40)
    edit_json(tmp_path / "config.json", use_sliding_window=True)
    assert "sliding_window = 16" in refusal(tmp_path)


def test_a_field_that_is_missing_is_named(tmp_path):
    CHECKPOINTS["opt"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["ffn_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "'ffn_dim'" in refusal(tmp_path)


@pytest.mark.parametrize("fields, named", [
    (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "'yarn'"),
    (dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), "'linear'"),
    (dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}), "'low_freq_factor'"),
    (dict(rope_parameters=LLAMA3_ROPE | dict(factor="twice")), ": factor must be a number above 0 and below "
                                                               "2**63, not 'twice'"),
    (dict(rope_parameters=LLAMA3_ROPE | dict(high_freq_factor=1.0)), "low_freq_factor 1.0 must be below"),
    (dict(rope_parameters=dict(rope_theta="fast")), ": rope_theta must be a number"),
    (dict(rope_parameters=dict(rope_theta=10**20)), "not 100000000000000000000"),
    (dict(rope_scaling=LLAMA3_ROPE, rope_parameters=LLAMA3_ROPE | dict(rope_theta=500.0)),
     "rope_scaling and rope_parameters differ"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor = 0.5"),
    (dict(rms_norm_eps="small"), ": norm_eps must be a number"),
    (dict(num_attention_heads=32, head_dim=1), "even head size")])
def test_rotary_positions_that_we_do_not_know_are_refused(fields, named, tmp_path):
    CHECKPOINTS["llama"]().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    assert named in refusal(tmp_path) and "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_corrupt_config_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("shards, named", [
    ("x", "weight_map must be a dict, not 'x'"), ({"norm": [1]}, "[1]")])
def test_a_corrupt_index_of_shards_is_refused(shards, named, tmp_path):
    CHECKPOINTS["opt"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=shards)))
    assert named in refusal(tmp_path)


@pytest.mark.parametrize("shard", ["/dev/zero", "pipe", "device", "..", "../weights.safetensors", "gone",
                                   "in/../../weights.safetensors"])
def test_an_index_names_files_beside_it(shard, tmp_path):
    (directory := tmp_path / "model").mkdir()
    CHECKPOINTS["opt"]().save_pretrained(directory)
    (directory / "model.safetensors").rename(tmp_path / "weights.safetensors")
    os.mkfifo(directory / "pipe")
    (directory / "device").symlink_to("/dev/zero")
    (directory / "in").mkdir()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map=dict(norm=shard))))
    assert "which is no file beside it" in refusal(directory)
    (directory / "as-in-a-hubs-cache").symlink_to("../weights.safetensors")
    index.write_text(json.dumps(dict(weight_map=dict(norm="as-in-a-hubs-cache"))))
    assert weight_files(directory) == [directory / "as-in-a-hubs-cache"]


def test_a_config_that_never_ends_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "config.json cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("kind, name", [("gpt2", "transformer.h.1.mlp.c_proj.bias"),
                                        ("gpt2-variant", "lm_head.weight"),
                                        ("opt", "model.decoder.layers.2.self_attn.k_proj.weight"),
                                        ("llama", "model.layers.0.self_attn.v_proj.weight"),
                                        ("llama", "model.layers.1.mlp.up_proj.weight")])
def test_missing_unexpected_and_misshapen_tensors_are_named(kind, name, tmp_path):
    CHECKPOINTS[kind]().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    good = weights.pop(name)
    short = name.removeprefix("transformer.").removeprefix("model.").removeprefix("decoder.")
    shape = list(good.shape)

    save_file(weights, file)
    assert f"'{short}'" in refusal(tmp_path) and "missing" in refusal(tmp_path)
    save_file(weights | {name: torch.ones(1, *shape)}, file)
    assert f"'{short}'" in refusal(tmp_path) and str(shape) in refusal(tmp_path)
    assert str([1, *shape]) in refusal(tmp_path)
    save_file(weights | {name: good.to(torch.int8)}, file)
    assert f"'{short}'" in refusal(tmp_path) and "int8" in refusal(tmp_path)
    save_file(weights | {name: good, name + "_scale": good.clone()}, file)
    assert f"'{short}_scale'" in refusal(tmp_path) and "unexpected" in refusal(tmp_path)
    if short != name:
        save_file(weights | {name: good, short: good.clone()}, file)
        assert f"'{short}'" in refusal(tmp_path) and "twice" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_that_config_json_does_not_mention_are_named(dtype, tmp_path):
    CHECKPOINTS["llama"]().save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights |= {f"model.{name}": weights[f"model.{name}"].to(dtype), f"model.{name}_scale": torch.ones(1)}
    save_file(weights, file)
    assert f"{file}: its weights are quantised (tensor '{name}' is {dtype}); " in refusal(tmp_path)


def test_truncated_and_garbled_files_are_refused(tmp_path):
    theirs = CHECKPOINTS["gpt2"]()
    theirs.save_pretrained(tmp_path)
    good = tmp_path / "model.safetensors"
    safetensors, bin = good.read_bytes(), tmp_path / "pytorch_model.bin"
    for content in (safetensors[:-1000], safetensors[:100], safetensors[:4], b"", b"\xff" * 1000):
        good.write_bytes(content)
        assert "model.safetensors" in refusal(tmp_path)
    good.unlink()
    for legacy in (False, True):
        torch.save(theirs.state_dict(), bin, _use_new_zipfile_serialization=not legacy)
        content = bin.read_bytes()
        for content in (content[:-1000], content[:100], b"", b"\xff" * 1000):
            bin.write_bytes(content)
            assert "pytorch_model.bin" in refusal(tmp_path)
    torch.save([1, 2], bin)
    assert "pytorch_model.bin" in refusal(tmp_path)


def test_pickled_code_is_refused_and_does_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "boom"), "w")
    CHECKPOINTS["gpt2"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"wte.weight": Bomb()}, protocol=2))
    assert "pytorch_model.bin" in refusal(tmp_path)
    assert not (tmp_path / "boom").exists()


def test_missing_files_are_named(tmp_path):
    assert "config.json" in refusal(tmp_path)
    CHECKPOINTS["opt"]().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("config", [False, True], ids=["alone", "with a config.json"])
@pytest.mark.parametrize("file, named", [("adapter_config.json", "adapter"), ("model-q4.gguf", "GGUF")])
def test_an_adapter_and_gguf_are_named(file, named, config, tmp_path):
    (tmp_path / file).write_text("{}")
    if config:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert named in refusal(tmp_path)


@pytest.mark.parametrize("model", ["no/such/dir/model-q4.gguf", "someone/Qwen3-0.6B-GGUF"])
def test_gguf_is_named_before_anything_is_downloaded(model):
    with pytest.raises(ValueError, match="GGUF.*three that work"):
        find_checkpoint(model)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    CHECKPOINTS["gpt2"]().save_pretrained(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    assert "git lfs pull" in refusal(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_a_weight_that_is_not_finite_is_named(value, tmp_path):
    theirs, name = CHECKPOINTS["llama"](), "model.layers.1.mlp.up_proj.weight"
    theirs.get_parameter(name).data[3, 4] = value
    theirs.save_pretrained(tmp_path)
    why = ("too large for torch.float16: choose the dtype bfloat16 or float32" if value == 1e30
           else "NaN or infinity; download the checkpoint again")
    with pytest.raises(ValueError, match=f"'layers.1.mlp.up_proj.weight'.* {why}"):
        load_model(tmp_path, "cpu", torch.float16)
    if value == 1e30:
        load_model(tmp_path, "cpu", torch.float32)


# Finding checkpoints.

def test_a_directory_is_found_as_given_or_beside_the_code(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    assert find_checkpoint(str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("mine").resolve() == tmp_path / "mine"
    assert find_checkpoint("tests").samefile(checkpoint_file.__file__.replace("checkpoint.py", "tests"))


def test_a_hub_name_is_found_in_the_hubs_cache_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    CHECKPOINTS["gpt2"]().save_pretrained(repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    assert load_model(find_checkpoint("someone/tiny"), "cpu", torch.float32).config.vocab_size == 97


@pytest.mark.parametrize("name", ["gpt3-13b", "someone/nothing", "./no/such/dir"])
def test_a_model_that_is_nowhere_is_refused_with_the_fix(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="directory") as error:
        find_checkpoint(name)
    assert repr(name) in str(error.value)
    assert ("--random-weights" in str(error.value)) == (name in PRESETS)


# Presets, random weights, grouped heads.

@pytest.mark.parametrize("preset, published", [
    ("gpt2", 124e6), ("gpt3-6.7b", 6.7e9), ("gpt3-13b", 13e9), ("opt-125m", 125e6), ("opt-1.3b", 1.3e9),
    ("opt-2.7b", 2.7e9),
    ("opt-6.7b", 6.7e9), ("opt-13b", 13e9), ("opt-30b", 30e9), ("opt-66b", 66e9),
    ("llama2-7b", 6.74e9), ("llama2-13b", 13.02e9),
    ("llama2-13b-gqa", 13.02e9 - 40 * 2 * 5120 * 30 * 128), ("llama2-70b", 68.98e9)])
def test_presets_have_the_published_number_of_parameters(preset, published):
    with torch.device("meta"):
        model = Model(PRESETS[preset], ALONE.add_up)
    tolerance = 0.001 if "llama" in preset else 0.025
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published, rel=tolerance)
    matrices = [m.weight for m in model.layers.modules() if isinstance(m, nn.Linear)]
    assert sum(weight.numel() for weight in matrices) == PRESETS[preset].matmul_parameters


@pytest.mark.parametrize("kind", [
    dict(activation="relu"),
    dict(activation="silu", gated=True, norm="rms", biases=frozenset(), rope_theta=1e4)],
                         ids=["gpt", "llama"])
def test_random_models_repeat_and_their_seeds_differ(kind, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", ModelConfig(
        vocab_size=1000, num_layers=2, num_heads=4, num_kv_heads=2, width=64, ffn_width=128,
        max_context=32, **kind))
    one, same, other = (random_model("tiny", "cpu", torch.bfloat16, seed=n) for n in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.tokens.weight, other.tokens.weight)
    assert one.tokens.weight.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert run(one, tokens(3))[0].std() > 0.01
    longer = Engine("tiny", random_weights=True, max_context=70, device="cpu", gpu_cache_tokens=80)
    assert len(longer.generate([1] * 65, max_tokens=5).token_ids) == 5      # twice the preset's 32
    with pytest.raises(ValueError, match="70"):
        longer.generate([1] * 66, max_tokens=5)
    longer.close()
    with pytest.raises(ValueError, match="gpt5.*opt-13b"):
        random_model("gpt5", "cpu", torch.float32)


def test_grouped_heads_equal_full_heads_whose_keys_and_values_repeat():
    sizes = dict(vocab_size=97, num_layers=2, num_heads=6, width=48, ffn_width=64, max_context=64,
                 activation="gelu")
    grouped, full = (randomised(empty_model(ModelConfig(num_kv_heads=n, **sizes), "cpu", torch.float32))
                     for n in (2, 6))
    state, seen = grouped.state_dict(), []
    for name in [n for n in state if ".qkv." in n]:
        q, k, v = state[name].split([48, 16, 16])                               # [heads * D, ...]
        state[name] = torch.cat([q] + [x.unflatten(0, (2, 8)).repeat_interleave(3, dim=0).flatten(0, 1)
                                       for x in (k, v)])
    full.load_state_dict(state)

    def attend(layer, q, k, v, rotation):
        seen.append((layer, q.shape, k.shape, v.shape))
        return dense_attend(len(q))(layer, q, k, v, rotation)
    hidden = grouped(tokens(10), torch.arange(10), attend)
    assert seen == [(layer, (10, 6, 8), (10, 2, 8), (10, 2, 8)) for layer in range(2)]
    torch.testing.assert_close(grouped.logits(hidden), run(full, tokens(10))[0], atol=1e-4, rtol=1e-4)


def test_the_embedded_checkpoint_loads():
    directory = find_checkpoint("tests").with_name("tiny_chat")
    if not (directory / "model.safetensors").is_file():
        pytest.skip("tiny_chat is not there")
    ours = load_model(directory, "cpu", torch.float32)
    assert run(ours, tokens(8, vocab=ours.config.vocab_size))[0].isfinite().all()
