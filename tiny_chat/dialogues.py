"""The dialogues that the embedded model is trained and measured on.

A user tells facts, the assistant notes them, and much later the user asks:

    Hi, I'm Ada.                    Your name becomes note 1: your name is Ada.
    I live in Oslo.                 Your home city becomes note 2: your home city is Oslo.
    I moved to Rome.                Your home city has changed: your home city is Rome.
    Where do I live?                Your home city is Rome.
    What is my hobby?               Your hobby? I don't know that yet.
    What do you know about me?      Note 1: your name is Ada. Note 2: your home city is Rome. Note 3
                                    is still empty.

A fact is a thing ("home city") and its value ("Rome"). Each answer follows from the dialogue so
far. Most words of values are made up, so the model cannot learn values by heart: it must find the
note and copy it. A hash keeps one made-up word in eight out of training; we measure with those.
"""
import json
import re
import sys
import zlib
from pathlib import Path

# ------------------------------------------------------------------------------------------------
# What users say: sentences.json

# The blanks of every sentence of a kind, sorted
BLANKS = {"tell": ["my {thing}", "{value}"], "change": ["my {thing}", "{value}"],
          "ask": ["my {thing}"], "list": []}


def read_sentences(file):
    """The content of sentences.json. A mistake in the file ends the program with one line."""
    try:
        said = json.loads(file.read_text())
        for kind, blanks in BLANKS.items():
            for sentence in said[kind]["train"] + said[kind]["final"]:
                found = re.findall(r"my \{thing\}|\{.*?\}", sentence.replace("My {", "my {"))
                if sorted(found) != blanks or sentence.endswith((".", "?", "!")):
                    needed = " and ".join(blanks) or "no braces"
                    raise ValueError(f"{sentence!r} in {kind!r} must have {needed}, "
                                     "and no . ? or ! at its end")
    except ValueError as error:
        print(f"{file}: {error}", file=sys.stderr)
        sys.exit(2)
    return said


SAID = read_sentences(Path(__file__).with_name("sentences.json"))
WORDS = {use: " ".join(lines).split() for use, lines in SAID["words"].items()}
THINGS, RELATIVES, PETS, AGES = (SAID[key] for key in ("things", "relatives", "pets", "ages"))
REAL_VALUES = SAID["real values"]       # thing -> values of real life: only to measure with
RELATIVE_THINGS = ["name", "name", "name", "age", "age", "job", "home city", "hobby"]
# Facts about oneself, the commonest twice. After one of them the user often tells another.
ABOUT_ONESELF = ["name", "name", "age", "age", "job", "job", "home city", "hobby", "pet"]

# ------------------------------------------------------------------------------------------------
# Made-up values

# The usual kind of a value, by the last word of its thing. Any other thing has a "word".
KINDS = {"name": ["name", "nickname", "surname", "username", "city", "friend", "school", "language",
                  "film", "book", "song"],
         "number": ["number", "age", "size"],
         "noun": ["pet", "job", "animal", "car"]}
# A syllable has one of each. Onset and coda may be empty.
ONSETS = ("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kn kr pl pr qu sh sk sm sn sp "
          "st str sw th tr wh").split() + [""] * 4
VOWELS = "a e i o u y a e i o u ai au ee ea ie oo ou".split()
CODAS = "b ch ck d l ll m mp n nd ng nt p r rd rk s sh ss st t th x".split() + [""] * 20
# Words of our sentences. Those that the assistant often writes come five more times.
ENGLISH = sorted(WORDS["rare"] + WORDS["other"]) + 5 * (
    " ".join(THINGS + RELATIVES).split()
    + "becomes note has changed again still empty favorite color plus".split())
# What may stand between two words of a value: "kosh and blaup"
JOINERS = ("and, and, and, and the, as, at, by, de, for, from, in, in, in the, may, near, of, of, "
           "of the, on, on, past, the, to, to the, upon, van, with").split(", ")
ARTICLES = "a a a an the two".split()       # a noun has one: "a bluck"
TITLES = "The The Dr. Mr. Mrs. Ms. St.".split()     # a few names have one: "Dr. Kosh"
SIGNS = ".@-_&/:,+#'"                       # may join the parts of a word: "foo@tri.be"
WORD_FORMS = "o'{} d'{} {}'s {}'{} {}+ {}++ {}# #{} ({})".split()
AMOUNTS = "{}.{} {},{} {}:{} {}-{} {}/{} ${} £{} €{} {}% #{} {}+ {}'{}\"".split()
# No made-up word is one of these: in "add chess as my hobby" the value is "chess", not "add chess".
NEVER_MADE_UP = {*WORDS["beside values"]}
# When we measure, none is one of these either: nobody finds the value in "note for as my hobby".
NEVER_MEASURED = NEVER_MADE_UP.union(
    WORDS["common"], WORDS["rare"],
    re.findall("[a-z-]+", " ".join(PETS + AGES + SAID["phrases"]).lower()))
HELD_OUT = {value.split()[-1].lower() for values in REAL_VALUES.values() for value in values}
# "I'm good" and "I'm eight" tell no name.
NOT_FIRST_IN_NAMES = {*ARTICLES, *AGES,
                      *re.findall("[a-z]+", " ".join(sum(SAID["small talk"].values(), [])).lower())}
# No made-up thing ends with a word that may follow a thing: "again" in "What was my hobby again?"
NOT_LAST_IN_THINGS = {*WORDS["after things"], *WORDS["common"]} - {
    "people", "time", "year", "work", "day", "thing"}
THING_WORDS = sorted(word for word in {*ENGLISH} - NOT_LAST_IN_THINGS if len(word) > 3)


def is_held_out(word):
    """True if training never makes up this word: one in eight, and the last of REAL_VALUES."""
    word = small(word)
    return zlib.crc32(word.encode()) % 8 == 0 or word in HELD_OUT


def small(word):
    """The word in small letters; the same for Turkish "ı", whose capital is "I"."""
    return word.upper().lower()


def any_word(rng):
    """A made-up word. In the order of the code: 5% common words (`draw` refuses most of these), 13%
    rare ones; 4% of several parts ("foo@tri.be"), 2% of another form ("o'kosh", "$40"); 10% the
    beginning of an English word and the end of another ("clember"), 53% one to four syllables
    ("skaubrie"); 13% one to eight letters, at times one of them foreign."""
    if (chance := rng.random()) < 0.05:
        return rng.choice(WORDS["common"])
    if chance < 0.18:
        return rng.choice(WORDS["rare"])
    if chance < 0.22:
        makers = [any_word, any_word, any_word, any_number]
        parts = [rng.choice(["", *SIGNS]) + rng.choice(makers)(rng)
                 for _ in range(rng.choice([2, 2, 3]))]
        return "".join(parts).lstrip(SIGNS)
    if chance < 0.23:
        return rng.choice(WORD_FORMS).format(any_word(rng), any_word(rng))
    if chance < 0.24:
        return any_amount(rng)
    if chance < 0.34:
        first, last = rng.choice(ENGLISH), rng.choice(ENGLISH)
        return first[:rng.randint(1, len(first))] + last[rng.randrange(len(last)):]
    if chance < 0.87:
        syllables = rng.choice([1, 1, 2, 2, 2, 3, 3, 4])
        return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
                       for _ in range(syllables))
    letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.2:
        latin, greek_or_cyrillic, chinese = (0xC0, 0x180), (0x391, 0x450), (0x4E00, 0x9FFF)
        foreign = chr(rng.randrange(*rng.choice([latin, greek_or_cyrillic, chinese])))
        letters[rng.randrange(len(letters))] = foreign
    return "".join(letters).lower()


def any_number(rng):
    return str(rng.randrange(10 ** rng.choice([1, 2, 2, 2, 3, 3, 4, 5, 6])))


def any_amount(rng):
    return rng.choice(AMOUNTS).format(any_number(rng), any_number(rng))


def draw(make, rng, held_out):
    """A word or number from `make`. held_out: whether it is one that training never makes up."""
    avoid = NEVER_MEASURED if held_out else NEVER_MADE_UP
    while True:
        made = make(rng)
        if small(made) not in avoid and is_held_out(made) == held_out:
            return made


def a_value(thing, rng, held_out):
    """A made-up value: a number ("42"), a name ("Talvor Bri"), a noun ("a bluck"), or words ("12 ni
    corst"). In most cases its kind suits the thing. If `held_out`, that of a name, an age or a job
    always does. Some words have a comma, a joiner ("ni and corst") or other capitals."""
    last = thing.split()[-1]
    kind = next((kind for kind, things in KINDS.items() if last in things), "word")
    if rng.random() < 0.15 and not (held_out and last in ("name", "age", "job")):
        kind = rng.choice(["name", "number", "noun", "word"])
    number = any_number if last == "age" else rng.choice([any_number] * 4 + [any_amount])
    if kind == "number":
        return draw(number, rng, held_out)
    words = [draw(any_word, rng, held_out) for _ in range(rng.choice([1, 1, 1, 1, 1, 2, 2, 3, 6]))]
    if kind == "name":
        words = [word.capitalize() for word in words]
    if rng.random() < 0.1:
        cases = [str.lower, str.capitalize, str.title, str.upper]
        words = [rng.choice(cases)(word) for word in words]
    if len(words) > 1 and rng.random() < 0.1:
        words[rng.randrange(len(words) - 1)] += ","
    if len(words) > 1 and rng.random() < 0.3:
        words.insert(rng.randrange(1, len(words)), rng.choice(JOINERS))
    if kind == "noun":
        words.insert(0, rng.choice(ARTICLES))
    if kind == "name" and rng.random() < 0.1:
        words.insert(0, rng.choice(TITLES))
    if kind == "word" and rng.random() < 0.25:
        words.insert(rng.choice([0, 0, len(words)]), draw(number, rng, held_out))
    return " ".join(words)


def a_phrase(rng):
    """A pattern of real values, filled in: "level {n}, {w} {n}" becomes "level 3, kosh 5"."""
    def fill_in(blank):
        word = draw(any_number if blank[1] == "n" else any_word, rng, held_out=False)
        return word.capitalize() if blank[1] == "W" else word

    return re.sub(r"\{(.)\}", fill_in, rng.choice(SAID["phrases"]))


def shows_its_thing(value, thing):
    """Does "I'm {value}" tell this thing? A number tells the age, "a bluck" the job, and anything
    else that begins with a letter the name. A comma or "from" would end the fact ("I'm Ada, a
    nurse"). Sentences about other things name them."""
    words, last = value.lower().split(), thing.split()[-1]
    if last not in ("name", "age", "job"):
        return True
    looks = {"name": words[0][0].isalpha() and words[0] not in NOT_FIRST_IN_NAMES,
             "age": value.isdigit() or value in AGES, "job": words[0] in ARTICLES}
    return looks[last] and "," not in value and "from" not in words


def spelling(thing, american):
    return thing.replace("favourite", "favorite").replace("colour", "color") if american else thing


def capital(sentence):
    return sentence[:1].upper() + sentence[1:]


def question(sentence):
    """The sentence, with a question mark if it begins as a question does ("And my hobby")."""
    asks = re.search(r"^(what|who|what's|who's|which|where|when|how|do|can|could|would|have|and|so)"
                     r" |what is", sentence.lower())
    return f"{sentence}?" if asks else sentence


# ------------------------------------------------------------------------------------------------
# Dialogues


class Dialogue:
    """A user, and an assistant that takes notes.

    `tell`, `ask`, `list_notes` and `chatter` return the user's message, without its full stop, and
    the answer; `say` adds both to `text`. training: if False, we measure: no thing is made up, and
    sentences and values are such as training never has. README's table depends on the order in
    which these methods then draw from `rng`."""

    def __init__(self, rng, training):
        self.rng, self.training = rng, training
        self.facts = {}                     # thing -> its latest value, in the order of the notes
        self.changed = set()
        self.last = None                    # the thing last told or asked; None after other talk
        self.alike = 0.25                   # how often a new thing shares a word with a noted one
        self.casual = rng.random() < 0.3    # the user writes no capitals, except perhaps in values
        self.lower_values, self.apostrophes = True, True        # of a casual user
        self.tells_american = rng.random() < 0.3
        self.asks_american = self.tells_american if rng.random() < 0.8 else rng.random() < 0.5
        self.bot, self.cheerful, self.text = "Tiny", False, ""

    def system(self):
        """Begin with a system message, which may name the assistant or ask it to be cheerful."""
        message = self.rng.choice(SAID["system"])
        if "{}" in message:
            self.bot = self.word().capitalize()
        self.cheerful = self.rng.random() < 0.3
        mood = self.rng.choice(SAID["cheerful"]) if self.cheerful else ""
        self.text = f"<|system|>{message.format(self.bot)} {mood}".strip() + "<|end|>"

    def say(self, said, answer):
        """Add a turn. Three messages in ten end without a sign."""
        said = said if self.casual else capital(said)
        if self.rng.random() < 0.3:
            said = said.removesuffix("?")
        elif not said.endswith("?"):
            said += self.rng.choice("...!")     # three full stops to one exclamation mark
        if self.cheerful:
            answer = re.sub(r"\.( (?=(?:Your|Note|I|Try)\b)|$)", r"!\1", answer)   # not "Dr. Kosh"
        self.text += f"<|user|>{said}<|end|><|assistant|>{answer}<|end|>"

    def fill_in(self, sentence, *words, **blanks):
        """The sentence as this user writes it: "I'm {value}" as "I'm Ada" or "im ada"."""
        if self.training and self.rng.random() < 0.05:
            sentence = re.sub(r"\b[Mm]y \{thing\}", "our {thing}", sentence)
        if self.casual:
            sentence = sentence.lower()
        if self.casual and not self.apostrophes:        # but values keep theirs: "o'kosh"
            sentence = sentence.replace("'", "")
            if "thing" in blanks:
                blanks["thing"] = blanks["thing"].replace("'s ", "s ")
        return sentence.format(*words, **blanks)

    # ---- values and things

    def word(self):
        return draw(any_word, self.rng, not self.training)

    def value(self, thing):
        """A made-up value, or in training at times one of PETS, AGES or the phrases."""
        rng, last = self.rng, thing.split()[-1]
        chance = rng.random() if self.training else 1
        if last == "age" and chance < 0.1:
            value = rng.choice(AGES)
        elif last not in ("name", "age") and chance < 0.15:
            value = a_phrase(rng)
        elif thing == "pet" and chance < 0.45:
            value = rng.choice(PETS)
        else:
            value = self.perhaps_alike(a_value(thing, rng, not self.training))
        return value.lower() if self.casual and self.lower_values else value

    def perhaps_alike(self, value):
        """One value in six begins as an earlier one of its sort does: "5807" after "5828". So the
        model must copy to the end."""
        same_sort = [other for other in self.facts.values() if " " not in other + value and
                     (other.isdigit(), other[0].isupper()) == (value.isdigit(), value[0].isupper())]
        if not same_sort or self.rng.random() > 1 / 6:
            return value
        beginning = self.rng.choice(same_sort)[:self.rng.randint(1, 4)]
        make = any_number if value.isdigit() else any_word
        return draw(lambda rng: beginning + make(rng), self.rng, not self.training)

    @property
    def relative(self):
        """Whom the last fact was about: "sister", if it was the "sister's job". Else ""."""
        relative, _, owned = (self.last or "").rpartition("'s ")
        return relative if owned in RELATIVE_THINGS else ""     # not of "new year's resolution"

    def pick_thing(self):
        """A thing: 30% are common, 15% of everyday life, 20% a relative's, 35% made up (when we
        measure none, and the rest keep their proportions)."""
        rng, training = self.rng, self.training
        if not self.facts and rng.random() < 0.25:
            return "name"
        same = 0.3 if training else 0
        if self.relative and rng.random() < same:
            return f"{self.relative}'s {rng.choice(RELATIVE_THINGS)}"
        if self.last in ABOUT_ONESELF and rng.random() < same:
            return rng.choice(ABOUT_ONESELF)
        if (chance := rng.random() * (1 if training else 0.65)) < 0.45:
            return rng.choice(THINGS if chance < 0.3 else SAID["more things"])
        if chance < 0.65:
            anybody = training and rng.random() < 1 / 6
            whose = [self.word(), *SAID["more relatives"]] if anybody else RELATIVES
            return f"{rng.choice(whose)}'s {rng.choice(RELATIVE_THINGS)}"
        thing = rng.choice([rng.choice(THING_WORDS), self.word()])
        if chance > 0.85:
            thing = f"{self.word()} {thing}"
        if thing.split()[-1] in NOT_LAST_IN_THINGS:
            return self.pick_thing()
        return rng.choice(["", "", "favourite ", "first "]) + thing

    def pick_unknown(self, avoid=()):
        """A thing without a note. Some share a word with a noted thing: "favourite number" with
        "favourite colour". So the model must compare whole things."""
        while True:
            thing = self.pick_thing()
            if self.facts and self.rng.random() < self.alike:
                known, other = self.rng.choice(list(self.facts)).split(), thing.split()
                known, other = (known, other) if self.rng.random() < 0.5 else (other, known)
                thing = f"{known[0]} {other[-1]}" if known[0] != other[-1] else thing
            if thing not in self.facts and thing not in avoid:
                return thing

    # ---- facts

    def sentence(self, kind, thing, may_be_special=True):
        """A sentence of the kind "tell", "change" or "ask". When we measure, it is of the list
        "final". In training, 40% suit one thing only ("I live in {value}"), if there are such, and
        some others begin with words that tell nothing ("I'm late, so my {thing} is {value}")."""
        rng = self.rng
        if not self.training:
            return rng.choice(SAID[kind]["final"])
        relative, of, owned = thing.rpartition("'s ")
        suited = SAID[f"{kind} one thing"].get(of + owned, [])      # "sister's job" is in "'s job"
        suited = suited if may_be_special and relative in ["", *RELATIVES] else []
        if suited and rng.random() < 0.4:
            # "She" is the relative of the last fact, whoever it is: the model needs no more.
            known = relative == self.relative and rng.random() < 0.5
            she = rng.choice(["she", "he"]) if known else f"my {relative}"
            return rng.choice(suited).replace("{she}", she).replace("{relative}", relative)
        said = rng.choice(SAID[kind]["train"])
        if rng.random() < (0.07 if kind == "ask" else 0.17):
            aside = rng.choice(SAID["asides"]) + rng.choice([", ", ", so ", ". ", " and ", ": "])
            said = aside + said.replace("My {", "my {")
        return said

    def telling(self, thing, value):
        """A sentence that tells or changes the fact. In training those of "change" tell some new
        facts, and those of "tell" change some: the model must look whether there is a note."""
        rng, known = self.rng, thing in self.facts
        if not self.training:
            return self.sentence("change" if known else "tell", thing)
        if thing == self.last and rng.random() < 0.5:       # "My age is 4." "No, it's 5."
            said = rng.choice(SAID["correct" if known else "supply"])
        elif known and rng.random() < 0.1:                  # "My age isn't 4, it's 5"
            return rng.choice(SAID["contrast"])
        elif thing == "pet" and value in PETS and rng.random() < 0.5:
            return "I have {value}"
        else:
            kind = "change" if rng.random() < (0.5 if known else 0.3) else "tell"
            said = self.sentence(kind, thing, shows_its_thing(value, thing))
        if said.endswith("{value}") and rng.random() < 0.2:
            said += rng.choice([" ", " ", ", ", " - "]) + rng.choice(SAID["value endings"])
        return said

    def tell(self, thing, value=None):
        """The user tells or changes a fact, and the assistant notes it. If the value is None, or if
        the note has it already, we make one up. It gets a capital where it begins a sentence."""
        known, old = thing in self.facts, self.facts.get(thing)
        while value is None or value == old:
            value = self.value(thing)
        sentence = self.telling(thing, value)
        if sentence.startswith("{value}") and not self.casual:
            value = capital(value)      # the note copies it
        again = " again" if thing in self.changed else ""
        if known:
            self.changed.add(thing)
        self.facts[thing], self.last = value, thing
        note = f"has changed{again}" if known else f"becomes note {len(self.facts)}"
        spelt = spelling(thing, self.tells_american)
        return (self.fill_in(sentence, thing=spelt, value=value, old=old),
                f"Your {spelt} {note}: your {spelt} is {value}.")

    def ask(self, thing):
        """The user asks for a fact. In training, one question in four is only "Hobby?"."""
        spelt = spelling(thing, self.asks_american)
        clear = " " in thing or thing in [*self.facts, *THINGS, *SAID["more things"]]
        bare = clear and self.training and self.rng.random() < 0.25
        sentence = "{thing}?" if bare else question(self.sentence("ask", thing))
        said = self.fill_in(sentence, thing=spelt)
        self.last = thing
        if thing not in self.facts:
            return said, f"Your {spelt}? I don't know that yet."
        return said, f"Your {spelt} is {self.facts[thing]}."

    def list_notes(self):
        """The user asks for all notes. The answer ends with an empty note: so the model need not
        know which note is the last before it has looked for the next."""
        said = self.rng.choice(SAID["list"]["train" if self.training else "final"])
        notes = [f"Note {number}: your {spelling(thing, self.tells_american)} is {value}."
                 for number, (thing, value) in enumerate(self.facts.items(), 1)]
        self.last = None
        return (self.fill_in(question(said)),
                " ".join([*notes, f"Note {len(notes) + 1} is still empty."]))

    # ---- other talk

    def small_talk(self):
        """Small talk, or the user asks who the assistant is."""
        rng = self.rng
        if rng.random() < (0.1 if self.bot == "Tiny" else 0.4):     # users try out a name they gave
            return self.who_are_you()
        answer, said = rng.choice(list(SAID["small talk"].items()))
        you = f", {self.facts['name']}" if "name" in self.facts else ""
        thing = spelling(rng.choice([*self.facts, self.pick_thing()]), self.tells_american)
        return self.fill_in(rng.choice(said), thing=thing), answer.format(you=you)

    def who_are_you(self):
        return (self.fill_in(self.rng.choice(SAID["who are you"])),
                f"I'm {self.bot}, a very small language model.")

    def plus(self):
        """The user asks for the sum of two digits."""
        a, b = self.rng.randrange(10), self.rng.randrange(10)
        said = self.fill_in(question(self.rng.choice(SAID["sums"])), a=a, b=b)
        return said, f"{a} plus {b} is {a + b}."

    def strange(self):
        """The user says something that the assistant does not understand."""
        sentences = SAID["asides" if self.training and self.rng.random() < 0.2 else "strange"]
        said = self.fill_in(self.rng.choice(sentences), *(self.word() for _ in range(5)))
        return said, "I don't understand that. I only know what you tell me."

    def chatter(self):
        """A turn about no fact."""
        chance = self.rng.random()
        self.last = None
        if chance < 0.6:
            return self.small_talk()
        return self.plus() if chance < 0.85 else self.strange()


LISTS = "all notes"     # a key of `rests_until` beside the things


class TrainingDialogue(Dialogue):
    """A dialogue of about `length` characters, whose user has random habits."""

    def __init__(self, rng, length, long):
        super().__init__(rng, training=True)
        self.lower_values, self.apostrophes = rng.random() < 0.5, rng.random() < 0.5
        if rng.random() < 0.3:
            self.system()
            if rng.random() < 0.3:
                self.say(*self.who_are_you())
        # How many facts at most, and the probabilities in `turn`
        self.most_facts = rng.choice([1, 1, 2, 2, 3, 4, 6, 8, 12])
        self.telling_new, self.chatting = rng.choice([0.1, 0.3, 1]), rng.choice([0.05, 0.1, 0.4])
        self.changing, self.listing = rng.choice([0.3, 0.6]), rng.choice([0.1, 0.25])
        if long and rng.random() < 0.7:         # many facts, so that many questions look far back
            self.most_facts, self.telling_new, self.changing = rng.randint(15, 50), 0.4, 0.2
        if not long and rng.random() < 0.3:     # the user tells all in a row, and wants the list
            self.most_facts, self.telling_new = rng.randint(3, 12), 1
            self.chatting, self.listing = 0.05, 0.9
        if rng.random() < 0.5:
            self.alike = 0.6
        self.end, self.far = length, 0.6 if long else 0.15      # how often a rest is long
        self.rests_until = {}               # thing -> the length of the text when its rest is over
        self.rest(LISTS)

    def rest(self, *things):
        """For a while the user does not ask for these things. Without rests, nearly all questions
        are about something said a moment ago, and the model does not learn to look far back. A long
        rest takes at least 60% of the text still to come, a short one at most 25%."""
        for thing in things:
            now, rng = len(self.text), self.rng
            share = rng.uniform(0.6, 1) if rng.random() < self.far else rng.random() ** 2 / 4
            self.rests_until[thing] = now + share * (self.end - now)

    def turn(self):
        """Add a turn. We try in this order: the user tells new facts, chats, changes a fact, asks
        for all notes (of at most 12), for a fact with a note, for one without; else chats."""
        rng = self.rng
        ready = [thing for thing in self.facts if self.rests_until[thing] <= len(self.text)]
        at_hand = self.last in self.facts       # the turn before was about a fact with a note
        if (len(self.facts) < self.most_facts
                and rng.random() < (self.telling_new if self.facts else 0.5)):
            self.say(*self.tell_new())
        elif rng.random() < self.chatting:
            self.say(*self.chatter())
        elif (ready or at_hand) and rng.random() < self.changing:
            right_away = at_hand and (not ready or rng.random() < 0.5)
            thing = self.last if right_away else rng.choice(ready)
            self.say(*self.tell(thing))
            self.rest(thing)
        elif (self.rests_until[LISTS] <= len(self.text) and len(self.facts) <= 12
              and rng.random() < self.listing):
            self.say(*self.list_notes())
            self.rest(*self.rests_until)        # all things with a note, and LISTS
        elif ready and rng.random() < 0.8:
            thing = rng.choice(ready)
            self.say(*self.ask(thing))
            self.rest(thing)
        elif rng.random() < 0.2:
            self.say(*self.ask(self.pick_unknown()))
        else:
            self.say(*self.chatter())

    def tell_new(self):
        """One message with a new fact, often with more: "I'm Ada and my hobby is chess". Often it
        begins with a fact that the user has just asked for in vain."""
        rng = self.rng
        asked = self.last and self.last not in self.facts and rng.random() < 0.4
        thing = self.last if asked else self.pick_unknown()
        said, answer = self.tell(thing)
        self.rest(thing)
        while rng.random() < 0.4 and len(self.facts) < self.most_facts:
            thing = self.pick_unknown()
            more, noted = self.tell(thing)
            joint = rng.choice([" and ", " and ", ", and ", ", ", ", ", ". ", ". ", "; ", " but "])
            if joint == ". ":
                more = more if self.casual else capital(more)
            elif not re.match(rf"I\b|[A-Z]{{2}}|{re.escape(self.facts[thing])}", more):
                more = more[0].lower() + more[1:]       # but the note copies the value as it is
            said, answer = said.removesuffix("?") + joint + more, f"{answer} {noted}"
            self.rest(thing)
        return said, answer


def dialogue(rng, length, characters_per_token=4):
    """The text of a dialogue to train on: "<|user|>Hi, I'm Ada.<|end|><|assistant|>Your name
    becomes note 1: your name is Ada.<|end|><|user|>...". It has at least `length` tokens if a token
    has at most `characters_per_token`."""
    chat = TrainingDialogue(rng, characters_per_token * length, long=length > 1024)
    while len(chat.text) < chat.end:
        chat.turn()
    return chat.text
