"""The embedded model remembers values that training never made up; the script trains."""
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from serving.tokenizer import load_tokenizer

TINY_CHAT = Path(__file__).resolve().parent.parent / "tiny_chat"
sys.path.append(str(TINY_CHAT))                 # as its scripts find each other
import dialogues
import train
from dialogues import SAID, dialogue


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_CHAT)


@pytest.fixture(scope="module")
def embedded():
    return train.load(TINY_CHAT)        # the model, and the tokenizer without transformers


def test_small_and_complete(embedded, tokenizer):
    model, end = embedded[0], len(tokenizer) - 1
    assert sum(file.stat().st_size for file in TINY_CHAT.glob("*.safetensors")) <= 8_000_000
    config = model.config
    assert config.model_type == "llama" and config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == tokenizer.model_max_length == 4096
    assert config.eos_token_id == tokenizer.eos_token_id == end
    assert model.generation_config.eos_token_id == end


def test_chat_template(tokenizer):
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"
    assert tokenizer.convert_tokens_to_ids(train.SPECIAL) == [*range(len(tokenizer))][-4:]
    assert tokenizer.encode("<|user|>") == tokenizer.convert_tokens_to_ids(["<|user|>"])


def test_tiktoken_gives_the_same_ids(tokenizer):
    """The server encodes with tiktoken, which takes ranks as ids."""
    ours, rng = load_tokenizer(TINY_CHAT), random.Random(0)
    assert ours.special == dict(zip(train.SPECIAL, tokenizer.convert_tokens_to_ids(train.SPECIAL)))
    words = "My favourite colour lucky 42 's don't Ada naïve 日本 🙂 \n\t   x_y ...".split(" ")
    for _ in range(500):
        text = "".join(rng.choice([rng.choice(words), chr(rng.randrange(1, 0x3000)), " "])
                       for _ in range(rng.randrange(40)))
        assert ours.encode(text) == (ids := tokenizer.encode(text))
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids) == text


# Each is a system message in brackets, and then in each line "message => reply".
CONVERSATIONS = re.findall(r"^\[(.*)\]\n((?:[^\[].*\n)+)", Path(__file__).with_name(
    "tiny_chat_conversations.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("system, turns", CONVERSATIONS)
def test_remembers_what_it_was_told(embedded, tokenizer, system, turns):
    """One pass tells the likeliest token behind every token. The reply is made of these if each of them
    is the next one."""
    messages, replies = [{"role": "system", "content": system}] if system else [], []
    for said, expected in (line.split(" => ") for line in turns.splitlines()):
        messages.append({"role": "user", "content": said})
        begin = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        messages.append({"role": "assistant", "content": expected})
        end = len(tokenizer.apply_chat_template(messages)["input_ids"])
        replies.append((expected, begin, end))
    tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        likeliest = embedded[0](**tokens).logits[0].argmax(-1)
    for expected, begin, end in replies:
        assert tokenizer.decode(likeliest[begin - 1:end - 1]) == expected + "<|end|>"


def test_training_made_up_none_of_most_values_in_these_conversations():
    values = "Quildane 5828 42 teal Oslo Ada chess Pip Rex ada@example.com".split()
    assert all(map(dialogues.is_held_out, values))
    # Training has these, whatever their hash, so no value that we measure with has them.
    given = {*re.findall("[a-z-]+", " ".join(SAID["pets"] + SAID["ages"] + SAID["phrases"]).lower())}
    assert given <= dialogues.NEVER_MEASURED and not given & dialogues.HELD_OUT


def test_every_answer_follows_from_the_dialogue():
    """Replays the notes of a thousand dialogues of training, in another way than dialogues.py."""
    rng, seen = random.Random(5), Counter()
    for _ in range(1000):
        notes, changes = {}, set()
        for said, answer in re.findall(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>(.*?)<\|end\|>",
                                       dialogue(rng, 256)):
            told = re.findall(r"Your (.*?) (?:has (changed)( again)?|becomes note (\d+)): "
                              r"your (.*?) is (.*?)[.!](?= Your|$)", answer)
            asked = re.fullmatch(r"Your (.*?)(?: is (.*)[.!]|\? I don't know that yet[.!])", answer)
            if answer.startswith("Note"):
                listed = re.findall(r"Note (\d+): your (.*?) is (.*?)[.!](?= Note|$)", answer)
                assert re.search(rf"Note {len(notes) + 1} is still empty[.!]$", answer)
                assert listed == [(str(n), *fact) for n, fact in enumerate(notes.items(), 1)]
                seen["list"] += 1
            for thing, changed, again, number, repeated, value in told:
                assert thing == repeated and value.lower() in said.lower()
                assert " " in value or value in SAID["ages"] or not dialogues.is_held_out(value)
                assert thing.split()[-1] not in dialogues.NOT_LAST_IN_THINGS
                assert changed if thing in notes else int(number) == len(notes) + 1
                assert bool(again) == (thing in changes)
                changes |= {thing} if changed else set()
                notes[thing] = value
                seen["changed" if changed else "noted"] += 1
            if asked and not told:
                values = {dialogues.spelling(thing, True): notes[thing] for thing in notes}
                assert values.get(dialogues.spelling(asked[1], True)) == asked[2]
                seen["unknown" if asked[2] is None else "known"] += 1
    assert min(seen[kind] for kind in ("list", "noted", "changed", "known", "unknown")) > 200, seen


def test_we_measure_with_sentences_that_training_has_not():
    for kind in dialogues.BLANKS:
        ours, final = ({re.sub(r"[^a-z ]", "", way.lower()) for way in SAID[kind][use]}
                       for use in ("train", "final"))
        assert not ours & final


def test_we_measure_with_facts_that_a_reader_understands(embedded):
    """Once, a user said "note for as my boss's age": nobody could find the value "for"."""
    known = {*dialogues.THINGS, *SAID["more things"], *(
        f"{who}'s {what}" for who in SAID["relatives"] for what in dialogues.RELATIVE_THINGS)}
    rng, seen = random.Random(4), 0
    for column in ["words", "numbers", "changed", "list"] * 50:
        text, _ = train.told_and_asked(rng, embedded[1], column, 0)
        for thing, value in re.findall(r": your (.*?) is (.*?)\.(?:<| Note)", text):
            words, seen = {*value.lower().split()}, seen + 1
            words -= {*dialogues.JOINERS, *dialogues.ARTICLES}
            assert thing in known and not words & {*dialogues.WORDS["common"]}
            assert not thing.endswith({"words": "age", "numbers": "name"}.get(column, "?"))
    assert seen > 300


def test_long_dialogues_look_far_back():
    """Many answers are about a thing that no answer named in the last 3,000 characters."""
    far = 0
    for seed in range(50):
        named = {}                          # thing -> where the last answer named its value
        for answer in re.finditer(r"<\|assistant\|>(.*?)<", dialogue(random.Random(seed), 4096)):
            for thing in re.findall(r"[Yy]our ([^.!?:]*) (?:is|has changed)", answer[1]):
                far += answer.start() - named.get(thing, answer.start()) > 3000
                named[thing] = answer.start()
    assert far > 5 * 50


def test_a_gap_in_the_positions_hides_nothing(embedded):
    """Without a mask, transformers takes a gap for the start of another text."""
    ids = torch.arange(64)[None]
    positions = ids + 500 * (ids >= 30)
    before = train.logits_of(embedded[0], ids, positions)
    after = train.logits_of(embedded[0], ids.where(ids != 5, 99), positions)
    assert (before != after).any(dim=-1)[positions >= 530].all()


def test_trains_saves_and_evaluates(embedded, tokenizer, tmp_path, capsys):
    torch.manual_seed(1)
    train.train(train.new_model(512), embedded[1], 20 * [(4, 64, 1)], 0.2, tmp_path)
    train.evaluate(tmp_path, distances=[0], samples=1)
    assert capsys.readouterr().out.splitlines()[2].startswith("| 0 | ")
    ids, next_ids, _ = train.encode(embedded[1], [dialogue(random.Random(9), 64)], 64)
    models = train.new_model(512), train.load(tmp_path)[0]
    before, after = (F.cross_entropy(model(ids).logits.mT, next_ids) for model in models)
    assert after < before - 0.5
    assert AutoTokenizer.from_pretrained(tmp_path).encode("Hello") == tokenizer.encode("Hello")


@pytest.mark.parametrize("column", train.COLUMNS)
def test_the_evaluation_finds_the_embedded_model_right(embedded, column):
    assert train.share_right(*embedded, column, distance=0, samples=20) > 0.85


@pytest.mark.parametrize("arguments, complaint", [
    ([], "--directory"), (["--evaluate", "--directory", "nowhere"], "no model in nowhere"),
    (["--tune", "--directory", "nowhere"], "no model in nowhere"),
    (["--directory", "x", "--steps", "0"], "--steps 0"), (["--setps"], "--setps")])
def test_a_wrong_command_gets_one_line(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and complaint in line


@pytest.mark.parametrize("kind, wrong", [
    ("tell", "I'm a teacher"), ("change", "my {thing} is {value}."), ("ask", "what is my {value}"),
    ("ask", "where is the {thing}"), ("list", "tell me my {thing}")])
def test_a_wrong_sentence_is_named(kind, wrong, tmp_path, capsys):
    said = {use: {"train": [wrong] if use == kind else [], "final": []} for use in dialogues.BLANKS}
    (file := tmp_path / "sentences.json").write_text(json.dumps(said))
    with pytest.raises(SystemExit) as stop:
        dialogues.read_sentences(file)
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and wrong in line and f"in '{kind}' must have" in line
