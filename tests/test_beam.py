"""Beam search against that of transformers, and how little of the cache it takes."""
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from beam import beam_search
from engine import Engine
from eviction import RecomputeCost

VOCAB, CONTEXT = 61, 128
COST = RecomputeCost({32: 1e-3, 128: 3e-3}, rest=1e-3)
TINY = dict(cost=COST, gpu_cache_tokens=256, cpu_cache_tokens=128, chunk_size=8, max_batch_tokens=32,
            debug=True)
PROMPT = [(17 * i + 5) % VOCAB for i in range(21)]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    """A random model that is sure enough of some tokens for beams to differ from greedy replies."""
    torch.manual_seed(0)
    if request.param == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=48, n_layer=2,
                                           n_head=3, bos_token_id=1, eos_token_id=1))
    else:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=CONTEXT, hidden_size=48, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, intermediate_size=80, eos_token_id=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@pytest.fixture
def engine(model, tmp_path):
    model.save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), **TINY)
    yield engine
    engine.close()


def theirs(model, prompt, width, max_tokens, stop_ids=None):
    """What transformers finds. Without a penalty for length the scores are sums, and its search ends as
    ours does."""
    found = model.generate(
        torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=max_tokens,
        do_sample=False, length_penalty=0.0, early_stopping="never", eos_token_id=stop_ids, pad_token_id=-1,
        return_dict_in_generate=True, output_scores=True)
    replies = [[token for token in reply if token >= 0] for reply in found.sequences[:, len(prompt):].tolist()]
    return list(zip(replies, found.sequences_scores.tolist()))


def assert_same(ours, theirs):
    assert [reply for reply, _ in ours] == [reply for reply, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.parametrize("width, max_tokens", [(2, 1), (2, 12), (5, 20), (30, 3)])
def test_the_replies_are_those_of_transformers(model, engine, width, max_tokens):
    ours = beam_search(engine, PROMPT, width, max_tokens, ignore_eos=True)
    assert_same(ours, theirs(model, PROMPT, width, max_tokens))
    assert all(len(reply) == max_tokens for reply, _ in ours)
