"""config.json in every form that it takes: transformers' logits, or a refusal that names the
culprit.

The sweep leaves out every field of every architecture, makes it null, and gives it its default. So
that a wrong default shows, the models of the quick sweep have hardly a field at its default.
(Only fields that decide a tensor's shape are, since the file refutes a wrong one.) If transformers
itself refuses a config.json, we may refuse it, or read it like the one that was not changed.
`pytest tests/test_checkpoint.py -rP` prints how many cases there are."""
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import (CHECKPOINTS, GPT2, LLAMA, LLAMA3_ROPE, OPT, edit_json, randomised, refusal,
                        run, tokens)
from transformers import (AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM)

from checkpoint import ARCHITECTURES, load_model, read_config

ODD = LLAMA | dict(rms_norm_eps=1e-2, hidden_act="gelu",
                   rope_parameters=dict(rope_type="default", rope_theta=100.0))
BIASED = dict(attention_bias=True, mlp_bias=True)
UNUSUAL = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2 | dict(
        activation_function="relu", layer_norm_epsilon=1e-2))),
    "opt": lambda: OPTForCausalLM(OPTConfig(**OPT | dict(activation_function="gelu"))),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ODD | BIASED | dict(
        num_key_value_heads=4))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**ODD | dict(
        sliding_window=None, num_attention_heads=8, num_key_value_heads=8))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**ODD | dict(
        hidden_size=64, num_attention_heads=32, num_key_value_heads=32))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**ODD | dict(
        attention_bias=True, head_dim=128, num_attention_heads=32, num_key_value_heads=32))),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**ODD | BIASED | dict(
        num_key_value_heads=4, no_rope_layer_interval=2, pad_token_id=None,
        bos_token_id=0)))}
OLD_OR_FOREIGN = {
    "rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor", "head_dim", "n_ctx",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types",
    "max_window_layers", "no_rope_layers", "original_max_position_embeddings", "pretraining_tp",
    "quantization_config", "per_layer_config", "num_attention_heads", "num_key_value_heads"}
REQUIRED = {
    "vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "ffn_dim",
    "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size",
    "intermediate_size"}
OUR_NAMES = {
    "num_key_value_heads": "num_kv_heads", "n_inner": "ffn_width", "hidden_act": "activation",
    "activation_function": "activation", "rms_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps", "quantization_config": "quantised"}


class Judge:
    """Compares our model of one checkpoint with transformers' while its config.json changes."""

    def __init__(self, make, directory):
        self.directory, self.verdicts = directory, Counter()
        self.wrong, self.needed = [], set()     # needed: fields without which we refuse config.json
        self.known = {}     # transformers' configuration, or ours -> its logits [48, vocab]
        model = randomised(make())
        model.save_pretrained(directory)
        self.defaults = json.loads(type(model.config)().to_json_string(use_diff=False))
        self.config = json.loads((directory / "config.json").read_text())
        self.logits = self.theirs()

    def theirs(self):
        """transformers' logits; an exception if a parameter would be random."""
        config = AutoConfig.from_pretrained(self.directory).to_json_string(use_diff=False)
        if config not in self.known:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=torch.float32, output_loading_info=True)
            assert not loaded["missing_keys"]
            with torch.no_grad():
                self.known[config] = model(tokens(48)[None])[0][0]
        return self.known[config]

    def ours(self):
        _, config = read_config(self.directory)
        if config not in self.known:
            model = load_model(self.directory, "cpu", torch.float32)
            self.known[config], = run(model, tokens(48))
        return self.known[config]

    def try_config(self, config, **fields):
        """fields: in which it differs from self.config, with their values."""
        (self.directory / "config.json").write_text(json.dumps(config))
        names = {"tensor", *fields, *(OUR_NAMES.get(field, field) for field in fields)}
        names |= {name for value in fields.values() if isinstance(value, dict) for name in value}
        try:
            logits = self.ours()
        except ValueError as error:
            message = str(error).replace(str(self.directory), "")
            verdict = "refused" if any(name in message for name in names) else message
        else:
            try:
                expected = self.theirs()
            except Exception:           # it raises whatever comes
                expected = self.logits
            same = torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)
            verdict = "equal" if same else "other logits"
        self.verdicts[verdict] += 1
        if verdict not in ("equal", "refused"):
            self.wrong.append((fields, verdict))
        return verdict

    def sweep(self):
        for field in sorted(self.defaults.keys() | self.config.keys() | OLD_OR_FOREIGN):
            others = {name: value for name, value in self.config.items() if name != field}
            if self.try_config(others, **{field: "left out"}) == "refused":
                self.needed.add(field)
            self.try_config(others | {field: None}, **{field: None})
            if field in self.defaults and field not in REQUIRED:
                default = {field: self.defaults[field]}
                self.try_config(others | default, **default)
        print(f"{self.config['model_type']}: {dict(self.verdicts)}")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_field_left_out_or_null_or_at_its_default(kind, tmp_path):
    judge = Judge(UNUSUAL[kind], tmp_path)
    judge.sweep()
    assert not judge.wrong
    unusual = {"attention_bias", "mlp_bias", "sliding_window"}
    assert judge.needed <= REQUIRED | unusual | {"model_type"}      # all others may be left out


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_every_field_of_usual_models_too(kind, tmp_path):
    judge = Judge(CHECKPOINTS[kind], tmp_path)
    judge.sweep()
    assert not judge.wrong


OLD_LLAMA3 = LLAMA3_ROPE | {"type": "llama3"}
del OLD_LLAMA3["rope_type"]
PER_TYPE = {"full_attention": {"rope_type": "default", "rope_theta": 300.0}}
ROPES = [
    dict(rope_parameters=None), dict(rope_parameters={}), dict(rope_theta=300.0),
    dict(rope_parameters=None, rope_theta=300.0), dict(rope_parameters=None, rope_theta=None),
    dict(rope_parameters={"rope_theta": 300.0}), dict(rope_parameters={"rope_type": "default"}),
    dict(rope_parameters={"type": "default", "rope_theta": 300.0}),
    dict(rope_scaling=OLD_LLAMA3, rope_theta=300.0), dict(rope_scaling=OLD_LLAMA3),
    dict(rope_parameters=OLD_LLAMA3), dict(rope_scaling={"type": "linear", "factor": 2.0}),
    dict(rope_scaling={"rope_type": "default", "rope_theta": 300.0}), dict(rope_scaling={}),
    dict(rope_parameters=LLAMA3_ROPE | dict(rope_theta=300.0), original_max_position_embeddings=16),
    dict(rope_parameters=LLAMA3_ROPE, original_max_position_embeddings=32),
    dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
    dict(rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    dict(rope_parameters=PER_TYPE), dict(rope_scaling=PER_TYPE, layer_types=["full_attention"] * 3),
    dict(rope_scaling=OLD_LLAMA3, rope_parameters=LLAMA3_ROPE, rope_theta=300.0),
    dict(rope_scaling=OLD_LLAMA3, rope_parameters=LLAMA3_ROPE | dict(rope_theta=300.0)),
    dict(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
    dict(partial_rotary_factor=0.5), dict(partial_rotary_factor=1.0)]
WINDOWS = [
    dict(sliding_window=16), dict(sliding_window=16, use_sliding_window=False),
    dict(sliding_window=16, use_sliding_window=True), dict(use_sliding_window=True),
    dict(sliding_window=16, use_sliding_window=True, max_window_layers=1),
    dict(sliding_window=16, use_sliding_window=None), dict(layer_types=["full_attention"] * 3),
    dict(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=16),
    dict(layer_types="sliding_attention"), dict(layer_types=[["full_attention"]])]
UNROTATED = [dict(no_rope_layers=value) for value in (
    [1, 1, 0], [0, 0, 0], [1, 0, 1, 0], [], [0], ["0", "0", "0"], [[0]] * 3, "000", 5)]
UNROTATED += [dict(no_rope_layers=None, no_rope_layer_interval=value)
              for value in (1, 2, 3, 4, 0, -2, "2", None)] + [dict(no_rope_layer_interval=3)]
SWITCHES = [dict(attention_bias=True), dict(mlp_bias=True), dict(attention_bias="false"),
            dict(qkv_bias=True), dict(qk_norm=True), dict(num_key_value_heads=0),
            dict(hidden_act="tanh"), dict(tie_word_embeddings="false"),
            dict(per_layer_config={"1": {"rms_norm_eps": 0.5}}),
            dict(quantization_config={"quant_method": "gptq"}), dict(dtype="bfloat16"),
            dict(attention_dropout=0.5), dict(pretraining_tp=2), dict(logits_scaling=2.0)]
GPTS = SWITCHES + [
    dict(per_layer_config={"1": {"layer_norm_epsilon": 0.5}}),
    dict(scale_attn_weights=False), dict(scale_attn_by_inverse_layer_idx=True),
    dict(reorder_and_upcast_attn=True), dict(num_attention_heads=2), dict(num_hidden_layers=2),
    dict(max_position_embeddings=32), dict(n_inner=0), dict(n_ctx=7),
    dict(do_layer_norm_before=False), dict(enable_bias=False), dict(layerdrop=0.9),
    dict(layer_norm_elementwise_affine=False), dict(_remove_final_layer_norm=True)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_fields_that_change_the_result(kind, tmp_path):
    judge = Judge(UNUSUAL[kind], tmp_path)
    like_llama = ROPES + WINDOWS + UNROTATED + SWITCHES
    for fields in GPTS if kind in ("gpt2", "opt") else like_llama:
        judge.try_config(judge.config | fields, **fields)
    print(f"{kind}: {dict(judge.verdicts)}")
    assert not judge.wrong


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama-variant", "qwen2", "smollm3"])
def test_a_head_beside_tied_embeddings(kind, tmp_path):
    """transformers uses the head if it differs, though config.json says otherwise."""
    judge = Judge(CHECKPOINTS[kind], tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    embeddings, = (weights[name] for name in weights if "wte" in name or "embed_tokens" in name)
    save_file(weights | {"lm_head.weight": embeddings.clone()}, file)
    judge.try_config(judge.config)
    assert judge.verdicts == {"equal": 1}
    for other in (embeddings.flip(0), embeddings[1:]):
        save_file(weights | {"lm_head.weight": other.clone()}, file)
        assert "'lm_head.weight' differs" in refusal(tmp_path)
        assert '"tie_word_embeddings": false' in refusal(tmp_path)
    save_file(weights | {"lm_head.weight": embeddings.flip(0)}, file)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    logits, = run(load_model(tmp_path, "cpu", torch.float32), tokens(48))
    torch.testing.assert_close(logits, judge.logits.flip(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, fields", [
    ("mistral", {}), ("qwen2", dict(use_sliding_window=True)),
    ("qwen3", dict(use_sliding_window=True))])
def test_a_window_that_config_json_does_not_mention(kind, fields, tmp_path):
    """Of 4096 tokens, says transformers: more than this model's context, but not than others'."""
    judge = Judge(CHECKPOINTS[kind], tmp_path)
    del judge.config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(judge.config | fields))
    assert "sliding_window = 4096" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "smollm3"])
def test_a_window_is_unused_unless_config_json_says_that_it_is_used(kind, tmp_path):
    judge = Judge(CHECKPOINTS[kind], tmp_path)
    del judge.config["use_sliding_window"]
    assert judge.try_config(judge.config | dict(sliding_window=16)) == "equal"


def test_a_smollm3_that_does_not_say_which_layers_rotate(tmp_path):
    judge = Judge(UNUSUAL["smollm3"], tmp_path)
    del judge.config["no_rope_layers"], judge.config["no_rope_layer_interval"]
    assert judge.try_config(judge.config) == "equal"


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES.keys() - {"opt"}))
def test_the_epsilon_of_norms_that_is_left_out(kind, tmp_path):
    """Too small for our logits to tell."""
    judge = Judge(UNUSUAL[kind], tmp_path)
    field = "layer_norm_epsilon" if kind == "gpt2" else "rms_norm_eps"
    del judge.config[field]
    (tmp_path / "config.json").write_text(json.dumps(judge.config))
    assert read_config(tmp_path)[1].norm_eps == judge.defaults[field]
