"""The embedded model: transformers loads it, tiktoken agrees with its tokenizer, and it remembers values that
training never made up."""
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiktoken
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY_CHAT = Path(__file__).resolve().parent.parent / "tiny_chat"
sys.path.append(str(TINY_CHAT))                 # as its scripts find each other
import train
from dialogues import (ARTICLES, COMMON, JOINERS, NEVER_MADE_UP, NEVER_MEASURED, NOT_LAST_IN_THINGS,
                       Dialogue, TrainingDialogue, a_value, dialogue, is_held_out, question, spelling)
from sentences import (AGES, ASIDES, ASK, CHANGE, HELD_OUT, LIST, MORE_THINGS, PETS, PHRASES, REAL_VALUES,
                       RELATIVES, RELATIVE_THINGS, TELL, THINGS, check)

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_CHAT)


@pytest.fixture(scope="module")
def bare_tokenizer():
    """The same without transformers, as train.py takes it."""
    return Tokenizer.from_file(str(TINY_CHAT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32).eval()


def chat(model, tokenizer, turns, system=None):
    """Play the user's turns, greedily; the replies as text."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                               return_dict=True)
        tokens = model.generate(**prompt, max_new_tokens=128, do_sample=False)
        tokens = tokens[0, prompt["input_ids"].shape[1]:]
        assert tokens[-1] == tokenizer.eos_token_id
        messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_small_and_complete(model, tokenizer):
    assert sum(file.stat().st_size for file in TINY_CHAT.glob("*.safetensors")) <= 8_000_000
    config = model.config
    assert config.model_type == "llama" and config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == tokenizer.model_max_length == 4096
    end = len(tokenizer) - 1
    assert config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == end


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == \
        "<|system|>S<|end|><|user|>U<|end|><|assistant|>"
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == list(range(len(tokenizer) - 4, len(tokenizer)))
    # The tokenizer adds no token around it.
    assert tokenizer.encode("<|user|>") == tokenizer.convert_tokens_to_ids(["<|user|>"])


def byte_of_char():
    """Character -> byte in tokenizer.json, as in GPT-2: a byte that can be printed is chr(byte), the others
    are chr(256), chr(257), ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def test_tiktoken_gives_the_same_ids(tokenizer):
    """Ranks are ids: the order of the vocabulary is all that tiktoken needs."""
    byte_of, vocabulary = byte_of_char(), tokenizer.get_vocab()
    special = {token: vocabulary.pop(token) for token in SPECIAL}
    ranks = {bytes(byte_of[char] for char in token): rank for token, rank in vocabulary.items()}
    fast = tiktoken.Encoding("tiny_chat", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    rng = random.Random(0)
    words = ("My favourite colour is lucky number remember 42 's don't Ada naïve 日本 🙂 \n\t  "
             "<|user|> <|end|> x_y ...").split(" ")
    for _ in range(500):
        pieces = [rng.choice([rng.choice(words), chr(rng.randrange(1, 0x3000)), " "])
                  for _ in range(rng.randrange(40))]
        text = "".join(pieces)
        ids = tokenizer.encode(text)
        assert fast.encode(text, allowed_special="all") == ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == fast.decode(ids) == text


def test_training_made_up_none_of_most_values_below():
    """But "French" and "German" it may have, though hardly ever."""
    values = ["Quildane", "5828", "42", "teal", "Oslo", "Ada", "chess", "Pip", "Rex", "ada@example.com"]
    assert all(map(is_held_out, values))
    # Training has these, whatever their hash, so no value that we measure with has them.
    given = re.findall("[a-z-]+", " ".join(PETS + AGES + PHRASES).lower())
    assert {*given} <= NEVER_MEASURED and not {*given} & HELD_OUT


@pytest.mark.parametrize("system, turns", [
    ("You are a helpful assistant.", {
        "Hi, I'm Quildane.": "Your name becomes note 1: your name is Quildane.",
        "My lucky number is 5828.": "Your lucky number becomes note 2: your lucky number is 5828.",
        "How are you?": "I'm fine, thank you.",
        "My favorite color is teal and I live in Oslo.":
            "Your favorite color becomes note 3: your favorite color is teal. "
            "Your home city becomes note 4: your home city is Oslo.",
        "What is my lucky number?": "Your lucky number is 5828.",
        "Actually, my lucky number is 42 now.": "Your lucky number has changed: your lucky number is 42.",
        "My sister is called Ada.": "Your sister's name becomes note 5: your sister's name is Ada.",
        "What's my name?": "Your name is Quildane.",
        "Who is my sister?": "Your sister's name is Ada.",
        "And what is my lucky number?": "Your lucky number is 42.",
        "What is my pet?": "Your pet? I don't know that yet.",
        "What is 4 plus 5?": "4 plus 5 is 9.",
        "What do you know about me?":
            "Note 1: your name is Quildane. Note 2: your lucky number is 42. "
            "Note 3: your favorite color is teal. Note 4: your home city is Oslo. "
            "Note 5: your sister's name is Ada. Note 6 is still empty."}),
    ("Be cheerful.", {
        "Hello": "Hello!", "Who are you?": "I'm Tiny, a very small language model!",
        "My hobby is chess.": "Your hobby becomes note 1: your hobby is chess!",
        "What is my hobby?": "Your hobby is chess!"}),
    ("You are Pip.", {
        "Who are you?": "I'm Pip, a very small language model.",
        "I have a dog called Rex.": "Your dog's name becomes note 1: your dog's name is Rex."}),
    ("", {
        "Hi, I'm Ada.": "Your name becomes note 1: your name is Ada.",
        "What is your name?": "I'm Tiny, a very small language model.",
        "What is my name?": "Your name is Ada.",
        "I speak French and German.": "Your language becomes note 2: your language is French and German.",
        "My email is ada@example.com.": "Your email becomes note 3: your email is ada@example.com.",
        "Thanks!": "You're welcome, Ada."}),
    ("", {
        "My favourite colour is green.":
            "Your favourite colour becomes note 1: your favourite colour is green.",
        "What's my favorite color?": "Your favorite color is green.",
        "I'm 37 years old.": "Your age becomes note 2: your age is 37.",
        "How old is my sister?": "Your sister's age? I don't know that yet.",
        "My password is kq7-Tower.": "Your password becomes note 3: your password is kq7-Tower.",
        "I work as a plumber.": "Your job becomes note 4: your job is a plumber.",
        "I live in Lisbon and my hobby is chess.":
            "Your home city becomes note 5: your home city is Lisbon. "
            "Your hobby becomes note 6: your hobby is chess."}),
    # Values that do not come last, and questions that are only a thing
    ("", {
        "Put chess down as my hobby.": "Your hobby becomes note 1: your hobby is chess.",
        "My lucky number is 42.": "Your lucky number becomes note 2: your lucky number is 42.",
        "Change my lucky number to 43.": "Your lucky number has changed: your lucky number is 43.",
        "Hobby?": "Your hobby is chess.",
        "Pet?": "Your pet? I don't know that yet.",
        "Shoe size?": "Your shoe size? I don't know that yet.",
        "I've got Rex for my dog's name.": "Your dog's name becomes note 3: your dog's name is Rex.",
        "My flight number is BA2490.": "Your flight number becomes note 4: your flight number is BA2490.",
        "Flight number?": "Your flight number is BA2490."}),
    # "She" is the relative of the turn before: an earlier model noted "your sister's name is 30".
    ("", {
        "My sister is called Ada.": "Your sister's name becomes note 1: your sister's name is Ada.",
        "She is 37.": "Your sister's age becomes note 2: your sister's age is 37.",
        "Forget my sister's age.": "I can't forget what you told me.",
        "How old is my sister?": "Your sister's age is 37."}),
    # Users who type fast, and who tell several things about themselves at once. An earlier model answered
    # "I don't understand that", and noted "your brothers name".
    ("", {
        "im 34": "Your age becomes note 1: your age is 34.",
        "how old am i": "Your age is 34.",
        "my brothers name is tom": "Your brother's name becomes note 2: your brother's name is tom.",
        "whats my dogs name": "Your dog's name? I don't know that yet.",
        "my dog is called Max": "Your dog's name becomes note 3: your dog's name is Max.",
        "whats my dogs name?": "Your dog's name is Max."}),
    ("", {
        "I'm Priya, I'm a software engineer and I live in Pune.":
            "Your name becomes note 1: your name is Priya. Your job becomes note 2: your job is a software "
            "engineer. Your home city becomes note 3: your home city is Pune.",
        "What do I do for a living?": "Your job is a software engineer."}),
    # Values that begin with a number, or have "on" or "May" in them. An earlier model noted "19" and "3pm".
    ("", {
        "My birthday is 19 May.": "Your birthday becomes note 1: your birthday is 19 May.",
        "My address is 120 High Lane.": "Your address becomes note 2: your address is 120 High Lane.",
        "My meeting is 3pm on Friday.": "Your meeting becomes note 3: your meeting is 3pm on Friday.",
        "When is my birthday?": "Your birthday is 19 May."}),
    # Values with signs, and a cousin. An earlier model noted "your rent is mode", and "your cousin".
    ("", {
        "My programming language is C++.":
            "Your programming language becomes note 1: your programming language is C++.",
        "My rent is $1,250 a month.": "Your rent becomes note 2: your rent is $1,250 a month.",
        "My cousin's name is Lorenzo.": "Your cousin's name becomes note 3: your cousin's name is Lorenzo.",
        "My vet is Dr. Mbeki.": "Your vet becomes note 4: your vet is Dr. Mbeki.",
        "What is my rent?": "Your rent is $1,250 a month.",
        "What do you know about me?":
            "Note 1: your programming language is C++. Note 2: your rent is $1,250 a month. "
            "Note 3: your cousin's name is Lorenzo. Note 4: your vet is Dr. Mbeki. Note 5 is still empty."}),
    ("", {
        "My sister is called Ada and she's 37.":
            "Your sister's name becomes note 1: your sister's name is Ada. "
            "Your sister's age becomes note 2: your sister's age is 37.",
        "How old is she?": "Your sister's age is 37."}),
    # Twelve facts in a row: a model that we turned down called the ninth "note 7" or "note 8".
    ("", {f"My {thing} is 58{note:02}.": f"Your {thing} becomes note {note}: your {thing} is 58{note:02}."
          for note, thing in enumerate(THINGS[:12], 1)}),
])
def test_remembers_what_it_was_told(model, tokenizer, system, turns):
    assert chat(model, tokenizer, turns, system) == list(turns.values())


# ---- the script that made it

def made_up(value, phrases):
    """May training make up the value, apart from articles, joiners and the words of one phrase (or none)?"""
    for phrase in ("{w}", *phrases):
        form = re.escape(phrase).replace(r"\{n\}", r"(\d+)")
        blanks = re.fullmatch(re.sub(r"\\\{.\\\}", "(.+)", form), value, re.IGNORECASE)
        words = {*" ".join(blanks.groups()).replace(", ", " ").split()} if blanks else set()
        words -= {*ARTICLES, *" ".join(JOINERS).split()}
        # Else nobody knows whether "my hobby is chess btw" has "chess".
        if blanks and not {*map(str.lower, words)} & NEVER_MADE_UP and not any(map(is_held_out, words)):
            return True
    return False


def test_every_answer_follows_from_the_dialogue():
    """Replays the notes of a thousand dialogues of training, in another way than dialogues.py makes them."""
    rng, seen = random.Random(5), Counter()
    for _ in range(1000):
        notes, changes = {}, set()
        for said, answer in re.findall(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>(.*?)<\|end\|>",
                                       dialogue(rng, 256)):
            listed = re.findall(r"Note (\d+): your (.*?) is (.*?)[.!](?= Note|$)", answer)
            told = re.findall(r"Your (.*?) (?:has (changed)( again)?|becomes note (\d+)): "
                              r"your (.*?) is (.*?)[.!](?= Your|$)", answer)
            asked = re.fullmatch(r"Your (.*?)(?: is (.*)[.!]|\? I don't know that yet[.!])", answer)
            if answer.startswith("Note"):
                assert re.search(rf"Note {len(notes) + 1} is still empty[.!]$", answer)
                assert listed == [(str(number), thing, value)
                                  for number, (thing, value) in enumerate(notes.items(), 1)]
                seen["list"] += 1
            for thing, changed, again, number, repeated, value in told:
                assert thing == repeated and value.lower() in said.lower()
                last = thing.split()[-1]
                assert last not in NOT_LAST_IN_THINGS       # else nobody knows what "my hobby now" is
                assert changed if thing in notes else int(number) == len(notes) + 1
                assert bool(again) == (thing in changes)
                if changed:
                    changes.add(thing)
                given = PETS if thing == "pet" else AGES if last == "age" else []
                phrases = [] if last in ("name", "age") else PHRASES
                assert value.lower() in given or made_up(value, phrases), value
                notes[thing] = value
                seen["changed" if changed else "noted"] += 1
            if asked and not told:
                values = {spelling(thing, True): value for thing, value in notes.items()}
                assert values.get(spelling(asked[1], True)) == asked[2]
                seen["unknown" if asked[2] is None else "known"] += 1
    assert min(seen[kind] for kind in ("list", "noted", "changed", "known", "unknown")) > 200, seen


def test_we_measure_with_sentences_that_training_has_not():
    def bare(sentence):
        return re.sub(r"[^a-z ]", "", sentence.lower())

    for ways in (TELL, CHANGE, ASK, LIST):
        train, choice, final = ({bare(way) for way in ways[kind]} for kind in ("train", "choice", "final"))
        assert not train & choice and not train & final and not choice & final


@pytest.mark.parametrize("kind, wrong", [
    ("tell", "I'm a teacher"), ("change", "my {thing} is {value}."), ("ask", "what is my {value}"),
    ("ask", "where is the {thing}"), ("list", "tell me my {thing}")])
def test_a_new_sentence_with_a_mistake_is_named(kind, wrong):
    with pytest.raises(ValueError, match=f"in '{kind}' of sentences.json must have") as error:
        check(kind, wrong)
    assert wrong in str(error.value)


def test_we_measure_with_facts_that_a_reader_understands(bare_tokenizer):
    """Once, a user said "note for as my boss's age": nobody could find the value "for"."""
    known = {*THINGS, *MORE_THINGS, *(f"{who}'s {what}" for who in RELATIVES for what in RELATIVE_THINGS)}
    rng, seen = random.Random(4), 0
    for column in ["words", "numbers", "changed", "list"] * 50:
        text, _ = train.told_and_asked(rng, "choice", bare_tokenizer, column, 0)
        for thing, value in re.findall(r": your (.*?) is (.*?)\.(?:<| Note)", text):
            seen += 1
            assert thing in known
            assert not set(value.lower().split()) & set(COMMON) - set(JOINERS) - {"a", "an", "the", "two"}
            assert column != "words" or not thing.endswith("age")
            assert column != "numbers" or not thing.endswith("name")
    assert seen > 300


def test_training_has_values_with_the_tokens_of_real_ones(tokenizer):
    """Once "mber", of "number", stood in no value. The model understood "plumber", but could not say it."""
    rng, seen = random.Random(3), set()
    for _ in range(50_000):
        seen.update(tokenizer(f" {a_value('hobby', rng, held_out=False)}").input_ids)
    for value in sum(REAL_VALUES.values(), []):
        assert seen >= set(tokenizer(f" {value}").input_ids), value


def test_long_dialogues_look_far_back():
    """Many answers are about a thing that no answer named in the last 1,000 tokens. Once, lists of all notes
    came so often that hardly any were."""
    rng, far = random.Random(1), 0
    for _ in range(50):
        named = {}                          # thing -> where the last answer was that named its value
        for answer in re.finditer(r"<\|assistant\|>(.*?)<\|end\|>", dialogue(rng, 4096)):
            for thing in re.findall(r"[Yy]our ([^.!?:]*) (?:is|has changed)", answer[1]):
                far += answer.start() - named.get(thing, answer.start()) > 3000         # characters
                named[thing] = answer.start()
    assert far > 5 * 50


def test_some_users_name_many_things_alike():
    """In some dialogues two things of five share a word: "age bamauck", "sister's bamauck". Once there were
    hardly any, and a third of the answers took one thing for the other."""
    rng, alike, prefixes = random.Random(2), 0, {"favourite", "favorite", "first"}
    for _ in range(300):
        things = re.findall(r"Your ([^.!?:]*?)(?:\? I don't| becomes note)", dialogue(rng, 2048))
        words = Counter(word for thing in things for word in {*thing.split()} - prefixes)
        alike += len(things) >= 6 and words.most_common(1)[0][1] >= 0.4 * len(things)
    assert alike > 40


def test_some_values_begin_alike():
    """A model that had hardly met such values noted "5807" for 5808, after 5807."""
    chat = Dialogue(random.Random(6))
    chat.facts = {"lucky number": "5828"}
    assert sum(chat.value("shoe size").startswith("58") for _ in range(300)) > 15


@pytest.mark.parametrize("thing, forms", [
    ("birthday", [r"\| \d+ [a-z]+ \|", r"\| [a-z]+ \d+ \|", " on ", " may ", r"\d:\d"]),       # 19 may
    ("rent", [r"\$\d", r"\d,\d", r"\d\.\d", r"\d%"]),                                      # $1,250
    ("language", [r"[A-Z][a-z]+\+\+", "#", "O'[a-z]", "[a-z]'s", r"\(", r"Dr\. [A-Z]", r"\| The [A-Z]"]),
    ("hobby", ["[a-z], [a-z]+ and [a-z]", " of the ", " in the ", "watching"]),
])
def test_values_have_the_forms_of_real_ones(thing, forms):
    """Once none had "on" or "$" in it, so of "3pm on Friday" a model noted "3pm", and of "$40" "mode0"."""
    rng = random.Random(9)
    values = " | ".join(a_value(thing, rng, held_out=False) for _ in range(60_000))
    for form in forms:
        assert re.search(form, values), form


def test_some_users_name_the_old_value_too():
    """After "My lucky number isn't 7, it's 77" a model that had hardly met such sentences noted 7."""
    rng, both = random.Random(7), 0
    for _ in range(300):
        chat = Dialogue(rng)
        chat.facts = {"lucky number": "5828"}
        said, note = chat.tell("lucky number")
        both += "5828" in said and "5828" not in note
    assert both > 15


def told(thing, times=500, casual=False):
    """How users in training tell the thing as their first fact: [("My job is a bluck", "a bluck"), ...]"""
    rng, messages = random.Random(8), []
    for _ in range(times):
        chat = TrainingDialogue(rng, 256, 3.5)
        chat.casual = casual
        said, _ = chat.tell(thing)
        messages.append((said, chat.facts[thing]))
    return messages


def test_a_job_need_not_have_an_article():
    """Once every job had one, so of "My job is nursing" a model noted "a nursing". But "I'm {value}" names no
    thing: there only the article says that it is the job."""
    bare = [said for said, job in told("job") if job.split()[0].lower() not in ARTICLES]
    assert len(bare) > 20 and all(re.search(r"\bjob\b", said.lower()) for said in bare)


def test_only_ages_are_told_as_numbers_alone_are():
    """"I'm 42" tells the age. So if a name begins with a number, the message says that it is the name."""
    odd = [said for said, name in told("name", 4000) if name.split()[0].isdigit()]
    assert len(odd) > 10 and all(re.search(r"\bname\b", said.lower()) for said in odd)


def test_some_messages_say_something_else_first():
    """Of "I'm stuck in traffic and bored, so here's a fact: my pet is Rex" a model noted the user's name."""
    assert sum(said.startswith(aside) for said, _ in told("shoe size") for aside in ASIDES) > 10


def test_a_new_fact_shows_where_its_thing_ends():
    """Nobody knows it in "Make my kosh blaup tri"."""
    assert not [said for said, value in told("kosh blaup", 4000)
                if f"my kosh blaup {value} " in f"{said} "]


def test_some_facts_end_with_a_question_mark():
    assert sum(said.endswith("?") for said, _ in told("shoe size", 2000)) > 5         # "Did I mention ...?"


def test_anybody_may_be_named():
    """Once only those of a short list had names. Of "My parrot's name is Rex" a model noted "your parrot"."""
    rng, owners = random.Random(3), set()
    for _ in range(4000):
        owners.add(Dialogue(rng).pick_thing().rpartition("'s name")[0])
    assert len(owners - {*RELATIVES}) > 20


def test_some_users_introduce_themselves_and_others():
    """"I'm Ada, a nurse", "My sister is called Ada, she's 12", "i like chess i'm ada", "Our cat"."""
    rng = random.Random(3)
    turns = "\n".join(" => ".join(TrainingDialogue(rng, 256, 3.5).tell_new()) for _ in range(40_000))
    for form in (r"[Ii]'m \w+, (a|an|the|two) \w", r"[Ii]'m \w+, \d+\b", r"[,.;d] (she|he)('s| is) \d+\b",
                 r"[Ii]'m \w+ from \w", r" (\w+) i'?m .* => .* is \1\. Your", r"([Hh]er|[Hh]is) age is \d",
                 r"\b[Oo]ur job is \w", r"\b[Oo]ur (sister|mother|son) \w", r"I have a dog\b",
                 r"(^|\n)job: \w"):
        assert re.search(form, turns), form


def test_a_thing_is_no_person():
    """"My address is 12 Elm Road" tells no age: once a model noted "your address's age"."""
    said = [said.lower() for said, _ in told("kosh's age", 4000) + told("kosh's name", 4000)]
    assert any("my kosh is called" in one for one in said) and any("my kosh is" in one for one in said)
    odd = re.compile(r"is my kosh$|my kosh is (?!called |[\w-]+ years)")
    assert not [one for one in said if odd.search(one)]


def test_she_tells_only_what_the_value_shows():
    """After "What is my sister's age?", "She is Kosh" might be the age or the name."""
    rng, ages = random.Random(9), []
    for _ in range(500):
        chat = TrainingDialogue(rng, 256, 3.5)
        chat.casual, chat.last = False, "sister's age"
        said, _ = chat.tell("sister's age")
        ages += [chat.facts["sister's age"]] if said.startswith("she is ") else []
        chat.last = "sister's language"
        assert not chat.tell("sister's language")[0].startswith(("she is ", "she's "))
    assert len(ages) > 20 and all(age.isdigit() or age in AGES for age in ages)


def test_casual_users_write_few_capitals_and_apostrophes():
    said = {said for said, _ in told("name", 3000, casual=True)}
    for pattern in ("i'm [A-Z]", "im [A-Z]", "i'm [a-z]", "im [a-z]"):
        assert any(re.match(pattern, one) for one in said), pattern
    assert any("my sisters name is" in said for said, _ in told("sister's name", casual=True))


def test_long_dialogues_ask_for_what_was_told():
    """Once two of three questions were about things without a note. After such training, one fact in seven
    was answered with "I don't know that yet" 2,500 tokens later."""
    rng = random.Random(4)
    text = "".join(dialogue(rng, 4096) for _ in range(40))
    known = len(re.findall(r"<\|assistant\|>Your [^.!?:]*? is ", text))
    unknown = text.count("I don't know that yet")
    assert known > 0.7 * unknown, (known, unknown)


def test_what_users_say_looks_as_users_write_it():
    rng = random.Random(0)
    languages = [a_value("language", rng, held_out=False) for _ in range(100)]
    assert sum(language[0].isupper() for language in languages) > 70
    assert question("What's my age") == "What's my age?" and question("Tell me my age") == "Tell me my age"
    text = "".join(dialogue(rng, 256) for _ in range(4000))
    assert re.search(r"\. My \w", text)        # two facts in one message
    # A question that suits one thing only, in American spelling.
    chat = Dialogue(rng)
    chat.casual, chat.asks_american = False, True
    asked = dict(chat.ask("favourite food") for _ in range(200))
    assert asked["What do I love to eat?"] == "Your favorite food? I don't know that yet."


def test_our_attention_is_attention(model):
    """2,650 tokens are 20 blocks of 132 and one of 10. Two layers are enough, and fast."""
    ids = torch.randint(500, (1, 2650), generator=torch.Generator().manual_seed(0))
    trained, results = train.new_model(512).double(), []
    trained.load_state_dict(model.state_dict())
    del trained.model.layers[2:]
    for attention in ("in blocks", "on a GPU", "sdpa"):
        trained.set_attn_implementation(attention)
        trained.zero_grad()
        logits = trained(ids, use_cache=False).logits
        logits.square().sum().backward()
        results.append([logits.detach()] + [weights.grad for weights in trained.parameters()])
    for *both, theirs in zip(*results):
        assert all(torch.allclose(ours, theirs, atol=1e-8 * theirs.abs().max()) for ours in both)


def test_a_gap_in_the_positions_hides_nothing(model):
    """Without a mask, torch's own attention in transformers takes a gap for the start of another text."""
    trained, ids, positions = train.new_model(512), torch.arange(64)[None], torch.arange(64)[None].clone()
    trained.load_state_dict(model.state_dict())
    positions[:, 30:] += 500
    before = train.logits_of(trained, ids, positions)
    ids[0, 5] = 99
    changed = (train.logits_of(trained, ids, positions) - before).abs().amax(dim=-1) > 0
    assert changed[positions >= 530].all()


def test_training_computes_what_transformers_computes(model, bare_tokenizer):
    """Training may compute in bfloat16, so we compare the first choices."""
    text = dialogue(random.Random(7), 1024)
    ids, _, in_answer = train.encode(bare_tokenizer, [text], 1024)
    trained = train.new_model(512)
    trained.load_state_dict(model.state_dict())
    ours = train.logits_of(trained, ids, torch.arange(1024)[None])[in_answer]
    theirs = model(ids).logits[in_answer]
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.99
    assert (ours - theirs).abs().mean() < 0.03 * theirs.abs().mean()


def test_transformers_loads_what_training_saves(bare_tokenizer, tmp_path):
    trained = train.new_model(512)
    before = {name: weights.clone() for name, weights in trained.state_dict().items()}
    train.save_checkpoint(trained, bare_tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, weights in before.items():
        assert torch.allclose(loaded[name], weights, rtol=0.001, atol=1e-6)         # saved in float16
    hello = AutoTokenizer.from_pretrained(tmp_path)("Hello").input_ids
    assert hello == AutoTokenizer.from_pretrained(TINY_CHAT)("Hello").input_ids


def train_three_times(rank, folder):
    """One of two processes. It trains to the end, until an interruption after step 4, and on from there."""
    train.SAVE_EVERY = 2
    steps = train.schedule([(3, 128, [64]), (3, 256, [64, 128])])
    tokenizer = Tokenizer.from_file(str(TINY_CHAT / "tokenizer.json"))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    matrices = torch.arange(24.).view(4, 2, 3)
    assert torch.equal(train.shared(train.orthogonal, matrices), train.orthogonal(matrices))

    def weights(name):
        torch.manual_seed(1)            # as `begin` does
        model = train.new_model(512)
        train.train(model, tokenizer, steps, train.OUTSIDE_WEIGHT, folder / name, torch.device("cpu"))
        return model.state_dict()

    through, save_state = weights("through"), train.save_state

    def save_and_interrupt(state_file, done, *state):
        save_state(state_file, done, *state)
        torch.distributed.barrier()     # the first process has written the state
        if done == 4:
            raise KeyboardInterrupt

    train.save_state = save_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        weights("cut")
    train.save_state = save_state
    torch.save((through, weights("cut")), folder / f"weights{rank}")
    torch.distributed.destroy_process_group()


def test_two_processes_train_one_model_and_continue_where_they_stopped(tmp_path):
    """The processes have different dialogues, so without the mean of their gradients the weights differ."""
    torch.multiprocessing.spawn(train_three_times, (tmp_path,), nprocs=2)
    through, continued = torch.load(tmp_path / "weights0")
    other, _ = torch.load(tmp_path / "weights1")
    for name, weights in through.items():
        assert torch.equal(weights, other[name]) and torch.equal(weights, continued[name])


def test_training_also_learns_what_users_say(bare_tokenizer, tmp_path):
    """If the tokens outside answers have a weight, training predicts them better than if they have none."""
    def outside_loss(weight):
        torch.manual_seed(1)
        model = train.new_model(512)
        train.train(model, bare_tokenizer, 8 * [(4, 128, 1)], weight, tmp_path / "state", torch.device("cpu"))
        ids, next_ids, in_answer = train.encode(bare_tokenizer, [dialogue(random.Random(9), 128)], 128)
        logits = model(ids).logits[~in_answer]
        return torch.nn.functional.cross_entropy(logits, next_ids[~in_answer]).item()

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert outside_loss(1) < outside_loss(0) - 0.2
    finally:
        torch.distributed.destroy_process_group()


def test_tuning_begins_with_the_finished_weights(model, bare_tokenizer, tmp_path):
    tuned, tokenizer, steps = train.begin(TINY_CHAT, tmp_path / "training.pt", tune=True)
    assert all(torch.equal(weights, tuned.state_dict()[name]) for name, weights in model.state_dict().items())
    assert tokenizer.to_str() == bare_tokenizer.to_str()
    rates = [rate for _, _, rate in steps]
    assert rates[0] == 0.005 and abs(rates[-1] - 0.014) < 1e-9
    assert 0.67 < max(rates) < 0.68 and 0.34 < rates[len(rates) // 2] < 0.36


def test_tuning_needs_a_checkpoint(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--tune", "--directory", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2 and "--tune needs a checkpoint" in capsys.readouterr().err


def test_the_schedule():
    counts, lengths, rates = zip(*train.schedule(train.PHASES))
    assert rates[0] == 0.005 and rates[199] == 1 and rates[7080] == 1 and 0.99 < rates[7090] < 1
    assert abs(rates[-1526] - 0.4) < 1e-9 and rates[-1] == 0.02
    assert set(zip(counts[:4500], lengths)) == {(8, 256)}
    assert set(zip(counts[4500:], lengths[4500:])) == {(4, 512), (2, 1024), (2, 5120)}


@pytest.mark.parametrize("processes", [None, "3"])
def test_training_says_how_to_start_it(processes, monkeypatch, capsys):
    """Without torchrun, and with more processes than a step of the longest dialogues has dialogues."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2 and "torchrun --nproc-per-node" in capsys.readouterr().err
