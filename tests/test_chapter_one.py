"""chapter_one.py and the system do the same: step by step, source by source, token by token."""
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import chapter_one
import engine
from checkpoint import find_checkpoint
from test_exactness import assert_exact


@pytest.fixture
def replies(monkeypatch):
    """(context, reply) of each turn that chapter one plays, once the next turn or `main` has ended."""
    turns = []

    class Recorded(chapter_one.Pensieve):
        def submit(self, conversation, prompt, reply_length):
            super().submit(conversation, prompt, reply_length)
            turns.append((conversation, len(conversation.tokens), reply_length))

    monkeypatch.setattr(chapter_one, "Pensieve", Recorded)
    chapter_one.main()
    return [(conversation.tokens[:length], conversation.tokens[length:length + reply_length])
            for conversation, length, reply_length in turns]


def test_the_system_prints_the_same_lines(capsys):
    chapter_one.main()
    *chapter, verdict = capsys.readouterr().out.splitlines()
    engine.demo()
    assert chapter == capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") for line in chapter) == 18
    assert verdict == "Every reply is that of a full recomputation."


def test_every_reply_is_that_of_transformers(replies):
    model = AutoModelForCausalLM.from_pretrained(find_checkpoint("tiny_chat"), dtype=torch.float32).eval()
    assert [len(reply) for _, reply in replies] == [3] * 7
    for context, reply in replies:
        assert_exact(model, context, reply)


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


def test_the_steps_that_its_docstring_quotes_are_real(capsys):
    chapter_one.main()
    printed = capsys.readouterr().out.splitlines()
    quoted = re.findall(r"step \d+  [^\n]+", chapter_one.__doc__)
    assert quoted and set(quoted) <= set(printed)


def test_it_is_short_and_nothing_imports_it():
    root = Path(chapter_one.__file__).parent
    lines = Path(chapter_one.__file__).read_text().splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 100
    others = [file for folder in (".", "serving", "experiments") for file in (root / folder).glob("*.py")]
    assert not [file for file in others if re.search(r"^(import|from) chapter_one", file.read_text(), re.M)]
