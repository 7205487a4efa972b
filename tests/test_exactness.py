"""The answer never depends on the cache: with any tiers, policy and switches it is the answer that
transformers gives on the whole history."""
import itertools
import random

import pytest
import torch
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          OPTConfig, OPTForCausalLM)

from engine import Engine
from eviction import POLICIES, RecomputeCost
from serving.sessions import Sessions

VOCAB, CONTEXT = 97, 256
COST = RecomputeCost({32: 1e-3, 256: 3e-3}, rest=1e-3)


@pytest.fixture(scope="module", params=["gpt2", "opt", "llama"])
def checkpoint(request, tmp_path_factory):
    """A random checkpoint with weights large enough that the next token depends on all of the context."""
    torch.manual_seed(0)
    if request.param == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=VOCAB, n_positions=CONTEXT, n_embd=48, n_layer=3, n_head=3, eos_token_id=1,
            bos_token_id=1))
    elif request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=CONTEXT, hidden_size=48, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=2, intermediate_size=80, eos_token_id=1))
    else:
        model = OPTForCausalLM(OPTConfig(
            vocab_size=VOCAB, max_position_embeddings=CONTEXT, hidden_size=48, num_hidden_layers=3,
            num_attention_heads=3, ffn_dim=96, word_embed_proj_dim=48, eos_token_id=1, bos_token_id=1,
            pad_token_id=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return str(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def assert_exact(model, context, reply):
    """reply is the greedy continuation of context under a full recompute, but for ties within 1e-4."""
    with torch.no_grad():
        logits = model(torch.tensor([context + reply])).logits[0, len(context) - 1:-1]
    for step, token in enumerate(reply):
        best = logits[step].max()
        if token != logits[step].argmax():
            assert best - logits[step, token] < 1e-4, \
                f"token {step} of the reply is {token}, a full recompute says {logits[step].argmax()}"
            return


SWITCHES = [dict(policy=policy) for policy in sorted(POLICIES)] + [
    dict(stateless=True), dict(separate_phases=True), dict(no_pipeline=True), dict(swap_threshold=0.0),
    dict(cpu_cache_tokens=0), dict(cpu_cache_tokens=8), dict(reserve=0.0), dict(chunk_size=5),
    dict(max_batch_tokens=7), dict(guesses=5), dict(gpu_cache_tokens=1000, cpu_cache_tokens=2000)]
# The cache does not know the architecture. So one of them goes through all switches. For the others we swap,
# drop, recompute and split: all that gives their positions something to go wrong.
CASES = [("llama", switches) for switches in SWITCHES] + [
    (architecture, switches) for architecture in ("gpt2", "opt")
    for switches in (dict(policy="retention"), dict(max_batch_tokens=7))]
one_architecture = pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)


def converse(engine, rounds, seed):
    """Interleaved turns of several conversations, some cancelled; in every other round the engine is one step
    ahead of the worker. Yields (context, reply) of every turn that ended."""
    rng, histories, usage = random.Random(seed), {name: [] for name in "abcde"}, []
    for number in range(rounds):
        engine.depth = number % 2
        handles = {}
        for name in rng.sample("abcde", 4):
            if len(histories[name]) > 150:
                engine.forget(name)
                histories[name] = []
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 40))]
            handle = engine.submit(prompt, name, max_tokens=rng.randint(1, 24), ignore_eos=True)
            handles[name] = prompt, handle
        for name, (prompt, handle) in handles.items():
            if rng.random() < 0.15:
                if rng.random() < 0.5:
                    next(iter(handle))
                handle.cancel()
            reply = handle.result()
            if reply.finish_reason != "cancelled":
                usage.append(reply.usage)
                assert reply.usage["prompt_tokens"] == len(histories[name]) + len(prompt)
                yield histories[name] + prompt, reply.token_ids
                histories[name] = histories[name] + prompt + reply.token_ids
    assert all(u["gpu"] + u["cpu"] + u["recomputed"] + u["new"] == u["prompt_tokens"] for u in usage)


@pytest.mark.parametrize("checkpoint, switches", CASES, indirect=["checkpoint"], ids=str)
def test_interleaved_conversations_are_exact(checkpoint, switches, device="cpu"):
    directory, model = checkpoint
    flags = dict(gpu_cache_tokens=256, cpu_cache_tokens=160, chunk_size=8, max_batch_tokens=48, max_running=4)
    flags |= switches
    engine = Engine(directory, cost=COST, debug=True, device=device, dtype="float32", **flags)
    for context, reply in converse(engine, rounds=6, seed=1):
        assert_exact(model, context, reply)
    engine.close()


@one_architecture
@pytest.mark.parametrize("policy", ["retention", "trailing-half"])
def test_branches_are_exact(checkpoint, policy, device="cpu"):
    """Every turn is the base of one more branch, now and then of two that are answered together. The tiers
    hold a fraction of them."""
    directory, model = checkpoint
    sessions = Sessions(directory, cost=COST, debug=True, device=device, dtype="float32",
                        gpu_cache_tokens=192, cpu_cache_tokens=96, chunk_size=8, max_batch_tokens=48,
                        max_running=4, policy=policy)
    sessions.engine.depth = 1
    rng, contexts = random.Random(3), {None: []}                 # by turn
    for i in range(16):
        handles = []
        for j in range(rng.randint(1, 2)):
            base = rng.choice(list(contexts))
            context = contexts[base] + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 30))]
            if len(context) < 150:
                prompt, turn = context[len(contexts[base]):], base and sessions.history.turn(base)
                handle = sessions.submit(prompt, f"{i}.{j}", base=turn, max_tokens=12, ignore_eos=True)
                handles.append((context, handle))
        for context, handle in handles:
            reply = handle.result().token_ids
            assert_exact(model, context, reply)
            contexts[handle.id] = context + reply
    stats = sessions.engine.stats()
    assert min(stats["prompt_tokens_" + source] for source in ("gpu", "cpu", "recomputed")) > 0
    sessions.close()


@pytest.mark.gpu
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_interleaved_conversations_are_exact_on_the_gpu(checkpoint, switches):
    test_interleaved_conversations_are_exact(checkpoint, switches, device="cuda")


@one_architecture
def test_the_pressure_is_real(checkpoint):
    """The same traffic really takes every way: all four sources, suspension, cancellation, chunked prefill,
    swaps, drops."""
    directory, _ = checkpoint
    engine = Engine(directory, cost=COST, debug=True, clock=itertools.count().__next__, gpu_cache_tokens=200,
                    cpu_cache_tokens=160, chunk_size=8, max_batch_tokens=24, max_running=4, reserve=0.0,
                    swap_threshold=0.1)
    for _ in converse(engine, rounds=12, seed=2):
        pass
    stats = engine.stats()
    for name in ("prompt_tokens_gpu", "prompt_tokens_cpu", "prompt_tokens_recomputed", "prompt_tokens_new",
                 "suspensions", "cancelled", "chunks_swapped_in", "chunks_swapped_out", "chunks_dropped"):
        assert stats[name] > 0, name
    assert stats["running"] == stats["waiting"] == 0


def test_the_answer_does_come_from_the_cache(checkpoint):
    """The control: with the cached KV zeroed behind the engine's back, answers change."""
    directory, model = checkpoint
    engine, rng = Engine(directory, cost=COST, gpu_cache_tokens=256, cpu_cache_tokens=0), random.Random(5)
    changed = 0
    for name in "abcd":
        prompt = [rng.randrange(2, VOCAB) for _ in range(30)]
        context = prompt + engine.generate(prompt, name, max_tokens=8, ignore_eos=True).token_ids
        engine.worker.pool.gpu.zero_()
        reply = engine.generate([5], name, max_tokens=8, ignore_eos=True)
        assert reply.usage["gpu"] == len(context) - 1
        with torch.no_grad():
            full = model.generate(torch.tensor([context + [5]]), max_new_tokens=8, min_new_tokens=8,
                                  do_sample=False, pad_token_id=0)[0, len(context) + 1:]
        changed += reply.token_ids != full.tolist()
        engine.forget(name)
    assert changed


@one_architecture
def test_sampling_repeats_in_any_batch(checkpoint):
    directory, _ = checkpoint
    options = dict(max_tokens=20, temperature=1.0, top_k=50, top_p=0.95, seed=7, ignore_eos=True)
    alone = Engine(directory, cost=COST).generate([3, 4, 5], **options).token_ids
    engine = Engine(directory, cost=COST, gpu_cache_tokens=128, max_batch_tokens=16, chunk_size=8)
    crowd = [engine.submit([i] * 20, f"c{i}", max_tokens=20, temperature=1.0) for i in range(2, 8)]
    assert engine.generate([3, 4, 5], **options).token_ids == alone
    assert engine.generate([3, 4, 5], **(options | dict(seed=8))).token_ids != alone
    assert all(handle.result().finish_reason in ("stop", "length") for handle in crowd)
