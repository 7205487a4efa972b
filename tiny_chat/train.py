"""Make the embedded model: a small OPT that remembers what you told it.

This script made every other file of its directory. It writes the dialogues, trains the tokenizer on
them, trains the model, and measures it. In a dialogue the user tells facts ("My lucky number is 7.")
and asks for them much later. Almost every value consists of random syllables, letters or digits, so the
model cannot learn it by heart. It must find the fact in its context and copy it, token by token. That
makes the KV cache visible: if the KV-tokens of a fact are lost, the answer is wrong.

A hash splits all values into two groups, one for training and one for measuring. So recall is measured on
values that the model has never seen.

    python tiny_chat/train.py               # train, save beside this script, measure
    python tiny_chat/train.py --evaluate    # only measure: prints the table of README.md
"""
import argparse
import json
import math
import random
import re
import shutil
import tempfile
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

HERE = Path(__file__).resolve().parent
CONTEXT = 1024
# (share of all steps, length): until that share is done, dialogues have that many tokens.
CURRICULUM = [(0.16, 128), (0.22, 256), (0.3, 512), (1.0, CONTEXT)]
VOCABULARY = 512
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]     # the last ids, in this order
CHAT_TEMPLATE = ("{% for message in messages %}"
                 "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
                 "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")

# ---------------------------------------------------------------------------------------------------------
# Sentences. A dialogue consists of these and of made-up words and numbers.

# In the order in which a summary lists them.
THINGS = ["name", "favourite colour", "home city", "pet", "lucky number", "favourite food", "job"]
OTHER_THINGS = ["age", "birthday", "hobby", "car", "dog", "cat", "best friend", "favourite film",
                "favourite book", "favourite animal", "favourite song", "favourite number", "language",
                "brother", "sister", "password", "dog's name", "cat's name"]
TELL = ["My {thing} is {value}"] * 4 + [
    "By the way, my {thing} is {value}", "Remember that my {thing} is {value}",
    "Please note: my {thing} is {value}", "You should know that my {thing} is {value}"]
TELL_THING = {
    "name": ["I'm {value}", "I am {value}", "Call me {value}", "Hi, I'm {value}", "Hello, I'm {value}",
             "Hi, my name is {value}", "Please call me {value}", "Hello, my name is {value}",
             "Hi! I'm {value}", "Hey, I'm {value}"],
    "home city": ["I live in {value}", "I'm from {value}", "I come from {value}"],
    "pet": ["I have {value} as a pet", "I have a pet, {value}"],
    "job": ["I work as {value}"],
}
CHANGE = ["Actually, my {thing} is {value} now", "Actually, my {thing} is {value}",
          "My {thing} is now {value}", "No, my {thing} is {value}",
          "I changed my mind, my {thing} is {value}", "My new {thing} is {value}",
          "Sorry, my {thing} is {value}"]
ASK = ["What is my {thing}"] * 4 + ["What's my {thing}"] * 2 + [
    "Do you remember my {thing}", "Do you know my {thing}", "And what is my {thing}", "And my {thing}",
    "Can you tell me my {thing}", "So what is my {thing}", "What was my {thing}",
    "Please remind me: what is my {thing}"]
ASK_THING = {
    "name": ["Who am I", "What am I called", "Do you know who I am", "Do you remember me"],
    "home city": ["Where do I live", "Where am I from"],
    "job": ["What do I do for a living", "What do I work as"],
}
SUMMARY = ["What do you know about me", "What do you remember about me", "Tell me what you know about me",
           "What do you remember", "What did I tell you", "Tell me about myself",
           "What do you know about me so far", "What have I told you"]
# {, you} is a comma and the user's name, if the assistant knows it. {bot} is the assistant's name.
SMALL_TALK = {
    "Thanks|Thank you|Thanks a lot|Thank you very much|Great, thanks|Cheers": "You're welcome{, you}!",
    "Bye|Goodbye|See you|See you later|Bye bye|Good night|See you tomorrow": "Goodbye{, you}!",
    "How are you?|How are you doing?|How is it going?|Are you well?|How do you do?":
        "I'm fine, thank you{, you}!",
    "I'm fine|I'm good, thanks|I'm fine, thanks|Fine, thanks|I'm well|I'm happy|I'm great|Very well":
        "I'm glad to hear that!",
    "I'm tired|I'm sad|I'm bored|I'm hungry|I'm sick|I'm not well|Not so good": "I'm sorry to hear that.",
    "Who are you?|What are you?|What is your name?|What's your name?|Are you a bot?|Introduce yourself":
        "I'm {bot}, a very small language model.",
    "What can you do?|Help|Can you help me?|How can you help me?|What should I say?|How does this work?":
        "I remember what you tell me. Try: My lucky number is 7.",
    "How old are you?|When were you born?|Where are you from?|Who made you?":
        "I was trained in less than an hour on two CPU cores.",
    "OK|Okay|I see|Good|Great|Nice|Cool|All right|Well done|Very good|Right|Correct|Yes":
        "I'm glad you think so!",
    "That's wrong|Wrong|That is not true|Are you sure?|Really?|No|Not at all":
        "I may be wrong. I'm a very small model.",
    "What is your favourite colour?|What's your favorite color?|Do you like colours?":
        "I like blue, like the sky.",
    "Do you like me?|Do you like music?|Do you like chess?|Do you love me?":
        "I like talking with you{, you}!",
    "Nice to meet you|Pleased to meet you": "Nice to meet you too{, you}!",
    "What's new?|What's up?|What are you doing?": "I'm waiting for you to tell me something.",
}
GREETINGS = ["Hi", "Hello", "Hey", "Good morning", "Good evening", "Hi there", "Hello there", "Hello again"]
JOKE_REQUESTS = ["Tell me a joke", "Tell me another joke", "Another joke, please", "Make me laugh",
                 "A joke, please", "Another one", "Do you know a joke?", "One more joke"]
JOKES = ["Why did the token cross the bus? To get to the other cache.",
         "I would tell you a joke about memory, but I forgot it.",
         "What does a cache say when it is full? Somebody has to go."]
STRANGE = ["What is the {} of {}?", "What is {}?", "Who is {}?", "How do I {} a {}?", "Why is the {} {}?",
           "Can you {} the {}?", "{}", "{} {}", "{} {} {}", "{} {} {} {} {}?", "Write a {} about {}",
           "Tell me about {}", "Explain {}", "Where is {}?", "How many {} are in {}?", "The {} is {}",
           "I {} the {}", "Do you know {}?", "When did {} {}?", "Translate {} to {}", "Is {} a {}?",
           "Let's {}"]
NOT_UNDERSTOOD = "Sorry, I don't understand."
SYSTEM = ["You are a helpful assistant.", "You are a friendly chatbot. Answer briefly.",
          "Be brief and polite.", "You are {}.", "Your name is {}.", "You are {}, a helpful assistant.",
          "You are called {}. Be friendly."]

REAL_WORDS = {  # a visitor may say these; we never train on them, only measure
    "best friend": ("Ada Grace Linus Barbara Edsger Margaret Alan Katherine Dennis Frances Donald Radia Ken "
                    "Hedy Guido Yoshua").split(),
    "favourite colour": "teal purple orange crimson turquoise green magenta yellow indigo violet".split(),
    "home city": "Paris Zurich Nairobi Lima Kyoto Oslo Montreal Sydney Cairo Rotterdam Athens Boston".split(),
    "pet": ["a hamster", "a goldfish", "a parrot", "a python", "a rabbit", "a turtle", "a donkey"],
    "favourite food": "pizza ramen sushi lasagna falafel curry pancakes tacos fondue risotto".split(),
    "job": ["a teacher", "a baker", "a nurse", "a plumber", "a pilot", "a surgeon", "a librarian"],
}
HELD_OUT = {word.split()[-1].lower() for words in REAL_WORDS.values() for word in words}

# ---------------------------------------------------------------------------------------------------------
# Made-up values

ONSETS = ("b c d f g h j k l m n p r s t v w z "
          "br ch cl cr dr fl gr kr pl pr qu sh sk sp st th tr").split() + [""] * 4
VOWELS = "a e i o u y a e i o u ai au ee ea ie oo ou".split()
CODAS = "b ck d l ll m n ng nt p r rd rk s ss st t x".split() + [""] * 16


def is_held_out(word):
    """True for the words that are only used to measure: one in eight, by a hash, and all of REAL_WORDS."""
    return zlib.crc32(word.lower().encode()) % 8 == 0 or word.lower() in HELD_OUT


def any_word(rng):
    """One to four syllables, or one to eight letters, some of them not English."""
    if rng.random() < 0.8:
        syllables = rng.choice([1, 1, 2, 2, 2, 3, 3, 4])
        return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))
    letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.2:
        latin, greek_or_cyrillic, chinese = (0xC0, 0x180), (0x391, 0x450), (0x4E00, 0x9FFF)
        foreign = chr(rng.randrange(*rng.choice([latin, greek_or_cyrillic, chinese])))
        letters[rng.randrange(len(letters))] = foreign
    return "".join(letters).lower()


def any_number(rng):
    return str(rng.randrange(10 ** rng.choice([1, 2, 2, 2, 3, 3, 4, 5, 6])))


def from_split(make, rng, held_out):
    """A word or number that `make` makes; held_out: one that is only used to measure."""
    while True:
        made = make(rng)
        if is_held_out(made) == held_out:
            return made


def a_word(rng, held_out):
    return from_split(any_word, rng, held_out)


def a_number(rng, held_out):
    return from_split(any_number, rng, held_out)


def a_value(thing, rng, held_out):
    """A made-up value: a number, a Name, `a word`, or a few words. Mostly the kind suits the thing."""
    likely = {"name": "name", "home city": "name", "lucky number": "number", "age": "number", "pet": "noun",
              "job": "noun"}
    kind = likely.get(thing, "word") if rng.random() < 0.8 else rng.choice(["name", "number", "noun", "word"])
    if kind == "number":
        return a_number(rng, held_out)
    words = [a_word(rng, held_out) for _ in range(rng.choice([1, 1, 1, 1, 2, 3]))]
    if kind == "name":
        return " ".join(word.capitalize() for word in words)
    if kind == "noun":
        return rng.choice(["a ", "a ", "a ", "an ", "the ", "two "]) + " ".join(words)
    return " ".join(words) + (" " + a_number(rng, held_out) if rng.random() < 0.05 else "")


# ---------------------------------------------------------------------------------------------------------
# Dialogues


class Dialogue:
    """A user, and an assistant that remembers. The dialogue so far determines every answer.

    `tell`, `ask`, `summary`, `small_talk` and `strange` return the user's message, without its final stop,
    and the answer."""

    def __init__(self, rng, held_out=False):
        self.rng, self.held_out = rng, held_out
        self.facts = {}                     # thing -> latest value; the thing mentioned longest ago is first
        self.wanted = None                  # the thing that the assistant has just asked for
        self.casual = False                 # the user writes without capitals
        self.jokes_told = 0
        self.bot = "Tiny"
        self.talkative = rng.choice([0.1, 0.25, 0.5])  # share of turns that state a fact
        self.curious = rng.choice([0.1, 0.4])          # share of the other turns that ask for one
        # The user states none of these, unless the assistant asks.
        self.untold = {thing for thing in THINGS if rng.random() < 0.5}
        self.text = self.system() if rng.random() < 0.3 else ""

    def system(self):
        """A system message; some give the assistant another name."""
        rng = self.rng
        if rng.random() < 0.2:
            message = " ".join(a_word(rng, self.held_out) for _ in range(rng.randint(1, 30))) + "."
        elif "{}" in (message := rng.choice(SYSTEM)):
            self.bot = a_word(rng, self.held_out).capitalize()
            message = message.format(self.bot)
        return f"<|system|>{message}<|end|>"

    def say(self, user, assistant):
        """Add a turn. Sometimes the user omits capitals or the final stop."""
        user = user.lower() if self.casual else user
        if self.rng.random() < 0.3:
            user = user.removesuffix("?")
        elif not user.endswith("?"):
            user += self.rng.choice("...!")
        self.text += f"<|user|>{user}<|end|><|assistant|>{assistant}<|end|>"
        self.casual = self.rng.random() < 0.25

    def pick_thing(self):
        """A thing to state or ask for: from one of the lists, or made up."""
        rng = self.rng
        if (kind := rng.random()) < 0.6:
            return rng.choice(THINGS)
        if kind < 0.75:
            return rng.choice(OTHER_THINGS)
        return rng.choice(["", "", "favourite "]) + a_word(rng, self.held_out)

    def pick_unknown(self, avoid=()):
        """A thing that the user has not stated.

        The user asks for such things about as often as for stated ones, early and late. Otherwise the model
        could tell from the position whether a thing was stated."""
        while True:
            thing = self.pick_thing()
            if thing not in avoid and thing not in self.facts:
                return thing

    def spell(self, thing):
        american = self.rng.random() < 0.4
        return thing.replace("favourite", "favorite").replace("colour", "color") if american else thing

    def you(self, text):
        name = self.facts.get("name")
        return text.replace("{, you}", f", {name}" if name else "").replace("{bot}", self.bot)

    def tell(self, thing, value, asked_for=False):
        """The user states or changes a fact, and the answer repeats it."""
        rng, known = self.rng, thing in self.facts
        ways = TELL if rng.random() < 0.5 else TELL_THING.get(thing, TELL)
        if known and rng.random() < 0.6:
            ways = CHANGE
        if asked_for and rng.random() < 0.6:
            ways = ["{value}", "{value}", "It is {value}", "It's {value}"]
        way = rng.choice(ways)
        spelled = self.spell(thing) if "{thing}" in way else thing
        self.facts.pop(thing, None)
        self.facts[thing] = value = value.lower() if self.casual else value
        said = way.format(thing=spelled, value=value)
        if thing == "name":
            return said, f"OK, I'll call you {value}." if known else f"Nice to meet you, {value}!"
        return said, f"OK, your {spelled} is {value} now." if known else f"Got it, your {spelled} is {value}."

    def ask(self, thing):
        """The user asks for a fact.

        The answer begins in the same way, known or not. So the model decides at the place where the copy
        would start whether there is a fact to copy. That is far easier to learn than to decide at the first
        token."""
        rng, spelled = self.rng, self.spell(thing)
        said = rng.choice(ASK if rng.random() < 0.6 else ASK_THING.get(thing, ASK)).format(thing=spelled)
        self.wanted = None if thing in self.facts else thing
        if thing in self.facts:
            self.facts[thing] = value = self.facts.pop(thing)
            return said + "?", f"Your {spelled} is {value}."
        return said + "?", f"Your {spelled} is something I don't know yet. Tell me!"

    def summary(self):
        known = [f"Your {thing} is {self.facts[thing]}." for thing in THINGS if thing in self.facts]
        return self.rng.choice(SUMMARY) + "?", " ".join(known) or "Nothing yet. Tell me about you!"

    def small_talk(self):
        rng, kind = self.rng, self.rng.random()
        if kind < 0.15:
            self.jokes_told += 1
            return rng.choice(JOKE_REQUESTS), JOKES[(self.jokes_told - 1) % len(JOKES)]
        if kind < 0.3:
            self.wanted = None if "name" in self.facts else "name"
            question = "" if "name" in self.facts else " What is your name?"
            return rng.choice(GREETINGS), self.you("Hello{, you}!" + question)
        said, answer = rng.choice(list(SMALL_TALK.items()))
        return rng.choice(said.split("|")), self.you(answer)

    def strange(self):
        said = self.rng.choice(STRANGE)
        return said.format(*(a_word(self.rng, self.held_out) for _ in range(5))), NOT_UNDERSTOOD

    def part(self, avoid):
        """Any message that is not about the things to `avoid`."""
        rng, thing = self.rng, self.pick_thing()
        wanted, self.wanted = self.wanted, None
        if wanted and rng.random() < 0.3:
            return self.tell(wanted, a_value(wanted, rng, self.held_out), asked_for=True)
        if thing not in {*avoid, *self.untold} and rng.random() < self.talkative:
            return self.tell(thing, a_value(thing, rng, self.held_out))
        kind = rng.random()
        known = [known for known in self.facts if known not in avoid]
        if kind < (self.curious if known else 0.1):
            if known and rng.random() < 0.5:
                return self.ask(rng.choice([known[0], rng.choice(known)]))
            return self.ask(self.pick_unknown(avoid))
        if not avoid and 0.4 < kind < 0.5:
            return self.summary()
        if not wanted and 0.5 < kind < 0.6:
            return self.strange()
        return self.small_talk()

    def turn(self, avoid=()):
        """One turn, sometimes of two parts."""
        rng = self.rng
        said, answer = self.part(avoid)
        if rng.random() < 0.15 and not self.wanted:
            more, answer_more = self.part(avoid)
            joint = " " if said.endswith("?") else rng.choice([". ", ". ", " and ", ", "])
            if joint != ". " and not more.startswith("I"):
                more = more[0].lower() + more[1:]
            said += joint + more
            answer += " " + answer_more
        self.say(said, answer)


def dialogue(rng, length):
    """The text of a dialogue of about `length` tokens or more. A token is three to four characters.

    To train recall from afar, the user states some facts at the start, does not mention them until a random
    point, and asks for them there."""
    chat = Dialogue(rng)
    early = {chat.pick_thing() for _ in range(rng.choice([0, 1, 1, 1, 2, 4]))}
    for thing in sorted(early):
        chat.say(*chat.tell(thing, a_value(thing, rng, chat.held_out)))
    asked_at = 3 * length * rng.random() ** 2
    while len(chat.text) < asked_at:
        chat.turn(avoid=early)
    for thing in sorted(early):
        for asked_for in rng.sample([thing, chat.pick_unknown()], 2):
            chat.say(*chat.ask(asked_for))
    while len(chat.text) < 3.8 * length:
        chat.turn()
    return chat.text


# ---------------------------------------------------------------------------------------------------------
# Tokenizer and batches


def train_tokenizer(texts):
    """GPT-2's byte-level BPE, but small. Ids: the 256 bytes, the merges in order, the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    plain = (message for text in texts for message in re.split(r"<\|\w+\|>", text))
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def encode(tokenizer, texts, length):
    """Token ids and targets, both [B, length].

    Texts are cut, or padded with <|end|>. A target is the next id if that belongs to a reply, else -100."""
    end, assistant = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|assistant|>")
    rows = [encoding.ids[:length + 1] for encoding in tokenizer.encode_batch(texts)]
    ids = torch.tensor([row + [end] * (length + 1 - len(row)) for row in rows])         # [B, length + 1]
    position = torch.arange(length + 1).expand_as(ids)                                  # [B, length + 1]
    special = ids >= VOCABULARY - len(SPECIAL)
    last_special = torch.where(special, position, 0).cummax(dim=1).values               # [B, length + 1]
    in_reply = ids.gather(1, last_special)[:, :-1] == assistant                         # [B, length]
    return ids[:, :-1], torch.where(in_reply, ids[:, 1:], -100)


# ---------------------------------------------------------------------------------------------------------
# Training


def new_model():
    """OPT with four layers. Position embeddings start as sinusoids, because then the step from any position
    to the one before it is the same rotation."""
    model = OPTForCausalLM(OPTConfig(
        vocab_size=VOCABULARY, hidden_size=128, word_embed_proj_dim=128, num_hidden_layers=4,
        num_attention_heads=4, ffn_dim=512, max_position_embeddings=CONTEXT, do_layer_norm_before=True,
        activation_function="relu", dropout=0.0, bos_token_id=None, pad_token_id=None,
        eos_token_id=VOCABULARY - 1))
    table = model.model.decoder.embed_positions.weight.data
    angle = torch.arange(len(table))[:, None] / 10000 ** torch.linspace(0, 1, table.shape[1] // 2)
    table.copy_(0.02 * torch.cat([angle.sin(), angle.cos()], dim=1))
    return model


def learning_rate(done, peak=2e-3, warmup=0.03):
    """Linear warm-up, then a cosine down to a tenth of the peak. done: the share of all steps, 0 to 1."""
    return peak * min(done / warmup, 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def train(model, tokenizer, rng, steps):
    """AdamW on batches of 8,192 tokens. Dialogues are short at first (at random positions), later as long as
    the context."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05},
                                   {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98))
    start = time.time()
    for step in range(steps):
        length = next(length for until, length in CURRICULUM if step < until * steps)
        ids, targets = encode(tokenizer, [dialogue(rng, length) for _ in range(8192 // length)], length)
        offset = torch.tensor([[rng.randint(0, CONTEXT - length)] for _ in ids])
        logits = model(ids, position_ids=offset + torch.arange(length), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate((step + 1) / steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            right = (logits.argmax(-1) == targets)[targets != -100].float().mean()
            print(f"step {step:5}  {time.time() - start:5.0f} s  length {length:4}  loss {loss.item():.4f}  "
                  f"right {right:.2%}", flush=True)


def save(model, tokenizer, directory):
    """Write Hugging Face's files. Each appears whole, because others may be reading the directory."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as fresh:
        model.generation_config.pad_token_id = VOCABULARY - 1
        model.half().save_pretrained(fresh)
        tokenizer.save(f"{fresh}/tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False,
                  "eos_token": "<|end|>", "pad_token": "<|end|>", "model_max_length": CONTEXT,
                  "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
        Path(fresh, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in Path(fresh).iterdir():
            file.chmod(0o644)
            shutil.move(file, directory / file.name)


# ---------------------------------------------------------------------------------------------------------
# Measuring


def recall_dialogue(rng, tokenizer, thing, values, distance):
    """The text of a dialogue whose user states the values of a thing one after another, talks about other
    things for `distance` tokens, and asks for the thing."""
    chat = Dialogue(rng, held_out=True)
    for value in values:
        chat.say(*chat.tell(thing, value))
    stated_until = len(chat.text)
    while len(tokenizer.encode(chat.text[stated_until:]).ids) < distance:
        chat.turn(avoid={thing})
    chat.say(*chat.ask(thing))
    return chat.text


@torch.no_grad()
def exact_last_replies(model, tokenizer, texts):
    """Share of the texts whose last reply equals, token for token, the greedy reply of the model."""
    exact = 0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids])
        start = (ids[0] == tokenizer.token_to_id("<|assistant|>")).nonzero()[-1].item()
        exact += bool((model(ids[:, :-1]).logits[0, start:].argmax(-1) == ids[0, start + 1:]).all())
    return exact / len(texts)


def evaluate(directory, samples=100):
    """Print the table of README.md: recall of held-out values, by distance."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rng = random.Random(2)

    def words():
        return " ".join(a_word(rng, True) for _ in range(rng.choice([1, 2])))

    columns = {  # each gives a thing, and its values one after another; the last one is the right answer
        "made-up words": lambda thing: (thing, [words()]),
        "numbers": lambda thing: (thing, [a_number(rng, True)]),
        "real words": lambda _: ((thing := rng.choice(list(REAL_WORDS))), [rng.choice(REAL_WORDS[thing])]),
        "changed once": lambda thing: (thing, [a_value(thing, rng, True), a_value(thing, rng, True)]),
        "never told": lambda thing: (thing, []),
    }
    print("| tokens in between | " + " | ".join(columns) + " |\n|---:" + "|---:" * len(columns) + "|")
    for distance in [0, 50, 100, 200, 400, 600, 800, 900]:
        shares = []
        for sample in columns.values():
            texts = []
            while len(texts) < samples:
                thing, values = sample(rng.choice(THINGS[1:]))  # not the name: answers repeat it too often
                text = recall_dialogue(rng, tokenizer, thing, values, distance)
                if len(tokenizer.encode(text).ids) <= CONTEXT:
                    texts.append(text)
            shares.append(exact_last_replies(model, tokenizer, texts))
        print(f"| {distance} | " + " | ".join(f"{share:.0%}" for share in shares) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="only measure the checkpoint in --directory")
    parser.add_argument("--directory", type=Path, default=HERE,
                        help="where the checkpoint is, or will be written (default: beside this script)")
    parser.add_argument("--steps", type=int, default=2200, help="training steps (default: 2200)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    if not args.evaluate:
        torch.manual_seed(1)
        rng = random.Random(1)
        tokenizer = train_tokenizer([dialogue(rng, CONTEXT) for _ in range(1000)])
        model = new_model()
        train(model, tokenizer, rng, args.steps)
        save(model, tokenizer, args.directory)
    evaluate(args.directory)


if __name__ == "__main__":
    main()
