"""Runs under torchrun, for test_parallel.py: everything that an engine does is the same on several ranks as
on one, and as in transformers. `torchrun ... parallel_program.py DIRECTORY` for its files."""
import itertools
import os
import random
import sys
from pathlib import Path

import torch

from checkpoint import PRESETS, find_checkpoint, gpt
from config import Config
from engine import Engine
from eviction import RecomputeCost
from loading import load_worker
from parallel import Follower, follow_every_engine

COST = RecomputeCost({32: 1e-3, 256: 3e-3}, rest=1e-3)
PRESETS["tiny"] = gpt(layers=2, heads=4, width=32, context=128)
SMALL = dict(cost=COST, debug=True, device="cpu", gpu_cache_tokens=64, cpu_cache_tokens=48, chunk_size=4,
             max_batch_tokens=24, max_running=3)
SWITCHES = [
    dict(policy="retention", separate_phases=True),
    dict(policy="lru", no_pipeline=True, reserve=0.0),
    dict(policy="trailing-half", swap_threshold=0.0, chunk_size=5),
    dict(policy="conversation", cpu_cache_tokens=8, max_batch_tokens=7),
    dict(policy="trailing", stateless=True),
    dict(cpu_cache_tokens=0, guesses=4)]
PRESSURE = dict(gpu_cache_tokens=200, cpu_cache_tokens=160, max_batch_tokens=24, reserve=0.0,
                swap_threshold=0.1)
SAMPLED = [dict(temperature=1.0, seed=1), dict(temperature=0.8, top_k=20, top_p=0.9, seed=2, logprobs=3),
           dict(temperature=1.0, seed=3, presence_penalty=1.0, repetition_penalty=1.3),
           dict(logit_bias={7: 5.0}, frequency_penalty=0.5)]


def alone(model, **flags):
    """The engine of one process, in the middle of several."""
    names = Config.names() & flags.keys()
    config = Config(model=str(model), **{name: flags[name] for name in names})
    directory = None if config.random_weights else find_checkpoint(config.model)
    return Engine(str(model), worker=load_worker(config, directory), **flags)


def replies(engine, depth=0):
    """Three conversations of three turns, in tiers that hold less than half of them; then choices between
    replies to one prompt. [(context, reply)], [a sampled reply, or its log probabilities]"""
    engine.depth, chance, histories, turns = depth, random.Random(1), {}, []
    for _ in range(3):
        for name, context in histories.items():     # a hint brings back what it has lost
            if name == "a":
                engine.forget(name)
            engine.warm(name, context)
            engine.step()
        prompts = {name: [chance.randrange(2, 97) for _ in range(chance.randint(1, 12))] for name in "abc"}
        handles = {name: engine.submit(prompt, name, max_tokens=7, ignore_eos=True)
                   for name, prompt in prompts.items()}
        for name, handle in handles.items():
            context = histories.get(name, []) + prompts[name]
            turns.append((context, handle.result().token_ids))
            histories[name] = context + handle.result().token_ids
    first = engine.submit(list(range(10, 30)), max_tokens=9, ignore_eos=True, **SAMPLED[0])
    choices = [first] + [engine.submit(list(range(10, 30)), like=first, max_tokens=9, ignore_eos=True, **more)
                         for more in SAMPLED[1:]]
    sampled = [choice.result().token_ids for choice in choices]
    stats = engine.stats()
    assert stats["chunks_swapped_in"] and stats["chunks_swapped_out"], stats
    assert stats["warmed_tokens_cpu"] and stats["warmed_tokens_recomputed"], stats
    engine.close()
    return turns, sampled, [[round(own, 3) for own, _ in choice.logprobs or []] for choice in choices]


def every_architecture(directory):
    from test_exactness import assert_exact
    from test_model import CHECKPOINTS, randomised
    for number, kind in enumerate(sorted(CHECKPOINTS.keys() - {"llama-variant", "mistral"})):
        theirs = randomised(CHECKPOINTS[kind]())
        model = directory / kind
        theirs.save_pretrained(model, max_shard_size="20KB")
        turns, *sampled = replies(Engine(str(model), **SMALL), depth=number % 2)
        for context, reply in turns:
            assert_exact(theirs, context, reply)
        print(kind, flush=True)
    # Rank 0 alone samples, whatever the architecture: so one of them is enough.
    assert (turns, *sampled) == replies(alone(model, **SMALL)), kind


def random_weights():
    flags = SMALL | dict(random_weights=True)
    assert replies(Engine("tiny", **flags)) == replies(alone("tiny", **flags))


def every_switch(directory):
    from test_exactness import assert_exact, converse
    from test_model import LLAMA, LlamaConfig, LlamaForCausalLM, randomised
    theirs = randomised(LlamaForCausalLM(LlamaConfig(**LLAMA | dict(max_position_embeddings=256))))
    theirs.save_pretrained(directory / "long")
    for switches in SWITCHES + [PRESSURE]:
        flags = dict(gpu_cache_tokens=256, cpu_cache_tokens=160, chunk_size=8, max_batch_tokens=48,
                     max_running=4)
        engine = Engine(str(directory / "long"), cost=COST, debug=True, device="cpu",
                        clock=itertools.count().__next__, **flags | switches)
        for context, reply in converse(engine, rounds=10 if switches is PRESSURE else 3, seed=2):
            assert_exact(theirs, context, reply)
        stats = engine.stats()
        engine.close()
        print(switches, flush=True)
    for name in ("suspensions", "cancelled", "chunks_swapped_in", "chunks_swapped_out", "chunks_dropped"):
        assert stats[name] > 0, name


def control(directory):
    """With the weights of one rank's layers zeroed, answers change."""
    model = directory / "llama"
    healthy = replies(Engine(str(model), **SMALL))
    (directory / "zero").touch()
    assert replies(Engine(str(model), **SMALL)) != healthy


def follow_and_sometimes_sabotage(directory):
    """On ranks other than 0 this does not return."""
    follow = Follower.follow

    def sabotaged(follower):
        if (directory / "zero").exists():
            for parameter in follower.model.layers.parameters():
                parameter.zero_()
        follow(follower)
        assert len(follower.pool.flights) < 5, "copies that rank 0 has seen land are forgotten"
    Follower.follow = sabotaged
    follow_every_engine()


if __name__ == "__main__":
    torch.set_num_threads(1)
    files = Path(sys.argv[1])
    follow_and_sometimes_sabotage(files)
    assert os.environ["RANK"] == "0"
    every_architecture(files)
    random_weights()
    every_switch(files)
    control(files)
    print("all the same", flush=True)
