"""chapter_one.py and the system do the same: step by step, source by source, token by token."""
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import chapter_one
import engine
import fakes
from checkpoint import find_checkpoint
from eviction import RecomputeCost
from scheduler import SOURCES
from test_exactness import assert_exact

SOURCE = Path(chapter_one.__file__).read_text()


def test_the_system_prints_the_same_lines(capsys):
    chapter_one.main()
    *chapter, verdict = capsys.readouterr().out.splitlines()
    engine.demo()
    assert chapter == capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") for line in chapter) == 11
    assert verdict == "Every reply is that of a full recomputation."


# ---- any conversations, not only those of the demo

class Planner(chapter_one.Pensieve):
    """Decides, and computes nothing."""

    def __init__(self):
        super().__init__(SimpleNamespace(config=SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1)))

    def execute(self, spans):
        return [0] * len(spans)


def random_rounds(rng) -> list[dict[str, tuple[int, int]]]:
    """Rounds of turns, by conversation: the tokens of the prompt and of the reply. No conversation outgrows
    the GPU tier. Names are in the order of first turns, as in the demo: they decide between equal chunks."""
    names, left, rounds = [], dict.fromkeys(range(4), chapter_one.SLOTS), []
    for _ in range(rng.randint(3, 8)):
        turns = {}
        for number in rng.sample(range(4), rng.choice([1, 1, 2, 3])):
            prompt, reply = rng.randint(1, 12), rng.randint(1, 4)
            if prompt + reply <= left[number]:
                left[number] -= prompt + reply
                names += [number] * (number not in names)
                turns["abcd"[names.index(number)]] = prompt, reply
        rounds.append(turns)
    return rounds


def chapter_lines(rounds, capsys) -> list[str]:
    pensieve = Planner()
    conversations = {name: chapter_one.Conversation(name) for name in "abcd"}
    for turns in rounds:
        for name, (prompt, reply) in turns.items():
            pensieve.submit(conversations[name], [0] * prompt, reply)
        while pensieve.queue or pensieve.running:
            pensieve.step()
        for name in turns:
            print(conversations[name].sources)
    return capsys.readouterr().out.splitlines()


def system_lines(rounds) -> list[str]:
    """The real scheduler, cache and policy; each look at the clock is a second later."""
    world, now, lines = fakes.World(slots=chapter_one.SLOTS, places=chapter_one.PLACES), 0, []
    for turns in rounds:
        now += len(turns)
        requests = [world.submit(name, prompt, reply) for name, (prompt, reply) in turns.items()]
        while not all(request.finish_reason for request in requests):
            batch = world.scheduler.schedule(now + 1)
            lines.append(str(batch))
            result = world.worker.execute(batch)
            world.scheduler.launched(batch)
            world.scheduler.account(batch, result, now + 2)
            now += 2
        for request in requests:
            lines.append(" · ".join(f"{source} {request.usage[source]}" for source in SOURCES))
    return lines


def test_any_conversations_take_the_same_steps(capsys, monkeypatch):
    """But those in which a running request finds no slot: chapter one suspends nobody."""
    monkeypatch.setattr(fakes, "COST", RecomputeCost({4: 1.0, 32: 8.0}, rest=1.0))
    compared = 0
    for seed in range(300):
        rounds = random_rounds(random.Random(seed))
        try:
            chapter = chapter_lines(rounds, capsys)
        except IndexError:
            capsys.readouterr()
            continue
        assert chapter == system_lines(rounds), f"seed {seed}"
        compared += 1
    assert compared > 270


# ---- its replies

def test_every_reply_is_that_of_transformers(monkeypatch):
    turns = []

    class Recorded(chapter_one.Pensieve):
        def submit(self, conversation, prompt, reply_length):
            super().submit(conversation, prompt, reply_length)
            turns.append((conversation.tokens, len(conversation.tokens), reply_length))

    monkeypatch.setattr(chapter_one, "Pensieve", Recorded)
    chapter_one.main()
    model = AutoModelForCausalLM.from_pretrained(find_checkpoint("tiny_chat"), dtype=torch.float32).eval()
    for tokens, begin, length in turns:
        reply = tokens[begin:begin + length]
        assert len(reply) == 3
        assert_exact(model, tokens[:begin], reply)
    assert len(turns) == 4


@pytest.mark.parametrize("forget", ["slots", "copies"])
def test_its_own_check_notices_wrong_kv(monkeypatch, forget):
    class Forgetful(chapter_one.Pensieve):
        def execute(self, spans):
            if forget == "slots":
                self.gpu.zero_()
            return super().execute(spans)

        def admit(self, conversation, batch):
            for chunk in conversation.chunks:
                if forget == "copies" and chunk.copy is not None:
                    chunk.copy.zero_()
            super().admit(conversation, batch)

    monkeypatch.setattr(chapter_one, "Pensieve", Forgetful)
    with pytest.raises(AssertionError):
        chapter_one.main()


# ---- its text

def test_the_steps_that_it_quotes_are_real(capsys):
    chapter_one.main()
    printed = capsys.readouterr().out.splitlines()
    quoted = re.findall(r"step \d+  [^\n]+", SOURCE)
    assert quoted and set(quoted) <= set(printed)


def test_it_is_short_and_nothing_imports_it():
    lines = SOURCE.splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 100
    root = Path(chapter_one.__file__).parent
    for folder in (root, root / "serving", root / "experiments"):
        for file in folder.glob("*.py"):
            assert not re.search(r"^(import|from) chapter_one", file.read_text(), re.M), file
