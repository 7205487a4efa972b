"""The dialogues that the embedded model is trained and measured on.

A user tells facts, the assistant notes them, and much later the user asks:

    Hi, I'm Ada.                    Your name becomes note 1: your name is Ada.
    I live in Oslo.                 Your home city becomes note 2: your home city is Oslo.
    I moved to Rome.                Your home city has changed: your home city is Rome.
    No, it's Bari.                  Your home city has changed again: your home city is Bari.
    Where do I live?                Your home city is Bari.
    What is my hobby?               Your hobby? I don't know that yet.
    What do you know about me?      Note 1: your name is Ada. Note 2: your home city is Bari. Note 3 is still
                                    empty.

A fact is a thing ("home city") and its value ("Rome"). Every answer follows from the dialogue so far. In
training, `any_word` makes up most words of values, so the model cannot learn them by heart: it must find the
note and copy it, token by token. An answer about one fact repeats the thing first ("Your home city"). The
token after it says whether there is a note: "is" or "?" after a question, "has" or "becomes" after a fact.

Of eight words (or numbers) that we could make up, training has seven, in values and things; a hash tells
which. We measure with the eighth, in values. sentences.json has what users say about facts, in three lists:
we train on "train", and measure with "choice" and "final". sentences.py has what else users say.
"""
import re
import zlib
from collections import Counter

from sentences import (AGES, ALL_NOTES, ASIDES, ASK, ASK_ENDINGS, ASK_THING, CHANGE, CHANGE_THING, CHEERFUL,
                       CONTRAST, CORRECT, FORM, HELD_OUT, LIST, LIST_ENDINGS, MEN, MORE_RELATIVES,
                       MORE_THINGS, NOT_UNDERSTOOD, OPENINGS, PETS, PHRASES, RELATIVES, RELATIVE_THINGS,
                       SMALL_TALK, STRANGE, SUMS, SUPPLY, SYSTEM, TELL, TELL_THING, THINGS, VALUE_ENDINGS,
                       WHO_ARE_YOU, WOMEN)

# ---------------------------------------------------------------------------------------------------------
# Made-up values

# The usual kind of a value, by the last word of its thing: a pet is a "noun", such as "a bluck". The value of
# any other thing is a "word".
KINDS = {"name": "name nickname surname username city friend school language film book song".split(),
         "number": ["number", "age", "size"],
         "noun": ["pet", "job", "animal", "car"]}
# A syllable has one of each. Onset and coda may be empty.
ONSETS = ("b c d f g h j k l m n p r s t v w z "
          "br ch cl cr dr fl gr kn kr pl pr qu sh sk sm sn sp st str sw th tr wh").split() + [""] * 4
VOWELS = "a e i o u y a e i o u ai au ee ea ie oo ou".split()
CODAS = "b ch ck d l ll m mp n nd ng nt p r rd rk s sh ss st t th x".split() + [""] * 20
COMMON = ("the be to of and a in that have it for on with he as you do at this but his by from they we "
          "say her she or an will one all would there their so up out if about get which go when make can "
          "like time just him know take people into year good some could them see other than look only come "
          "its over think also back after use two our work first well way even new want because any give "
          "day most us must let please very long thing need tell remember nothing myself "
          "correct").split()
# The words of COMMON and of most of our sentences ("doesn't" gives "doesn" and "t"). Words that the assistant
# often writes stand in it five more times, so that values have their tokens, too.
ENGLISH = sorted({word for sentences in (COMMON, ALL_NOTES, SMALL_TALK, SMALL_TALK.values(), MORE_THINGS,
                                         TELL["train"], CHANGE["train"], ASK["train"], LIST["train"])
                  for word in re.findall("[a-z]+", " ".join(sentences).lower())})
ENGLISH += 5 * (" ".join(THINGS + RELATIVES).split()
                + "becomes note has changed again still empty favorite color plus".split())
# One in eight words of `random_word` is one of these.
CONTRACTIONS = ("I I I I'm I've I'd I'll don't can't haven't isn't didn't let's it's that's what's here's "
                "you've there's me").split()


def core_of(sentence):
    """The part of a sentence that has the thing and the value. If the thing is first, from "my" to the value:
    of "Change my {thing} to {value} please" the part "my {thing} to {value}". Else the end of the sentence,
    from up to two words before the value on: "{value} is my {thing}", "I have {value} as my {thing}"."""
    return re.search(r"[Mm]y \{thing\}.*\{value\}|(\S+ ){,2}\{value\}.*", sentence)[0].replace("My {", "my {")


TELL_CORES, CHANGE_CORES = ([core_of(sentence) for sentence in ways["train"]] for ways in (TELL, CHANGE))
# The ends of our questions, from up to three words before "my" on: "you still know my {thing}", "what was my
# {thing} again". Most show that the user asks. If random words took the place of these three, "kosh is my
# hobby" would be a question, too.
ASK_CORES = [re.search(r"(\S+ ){,3}[Mm]y \{thing\}.*", ask)[0].replace("My {", "my {")
             for ask in ASK["train"]]
# No made-up thing ends with one of these words. They may follow a thing ("again" in "What was my hobby
# again?"), or end what the user calls all notes ("my list"), or are in COMMON, except for six of COMMON that
# are fine as things, such as "work".
NOT_LAST_IN_THINGS = ({ending.split()[0] for ending in ASK_ENDINGS}
                      | {core.split("{thing} ")[1].split()[0] for core in ASK_CORES if "{thing} " in core}
                      | {notes.split()[-1] for notes in ALL_NOTES if notes.startswith("my ")}
                      | set(COMMON) - {"people", "time", "year", "work", "day", "thing"})
# What may stand between two words of a value: "kosh and blaup", "3 kosh may blaup"
JOINERS = ("and, and, and, and the, as, at, by, de, for, from, in, in, in the, may, near, of, of, of the, "
           "on, on, past, the, to, to the, upon, van, with").split(", ")
ARTICLES = "a a a an the two".split()       # a noun has one: "a bluck"
TITLES = "The The Dr. Mr. Mrs. Ms. St.".split()     # a few names have one: "The Kosh", "Dr. Kosh"
SIGNS = ".@-_&/:,+#'"                       # may join the parts of a word: "foo@tri.be"
WORD_FORMS = "o'{} d'{} {}'s {}'{} {}+ {}++ {}# #{} ({})".split()           # "o'kosh", "kosh++"
AMOUNTS = "{}.{} {},{} {}:{} {}-{} {}/{} ${} £{} €{} {}% #{} {}+ {}'{}\"".split()    # "14.5", "$40"
# The words that stand right before or after a value in five or more of our sentences: "add", "happens"
BESIDE_VALUES = {word for word, times in Counter(re.findall(
    r"\b[a-z][a-z']*(?= \{value\})|(?<=\{value\} )[a-z][a-z']*",
    " | ".join({*TELL["train"], *CHANGE["train"]}).lower())).items() if times > 4}
# No made-up word is one of these (PHRASES have some): in "add chess as my hobby" the value is "chess", not
# "add chess". "What" and the like begin questions, and the others begin what may stand before or after a
# value: in "so chess is my hobby lol", the value is "chess". Articles and joiners are not among them,
# although they stand there, too. So the model must read on: "chess in Rome" is a value, but of "chess in case
# you need it" only "chess".
NEVER_MADE_UP = ({"what", "who", "which", "where", "when", "how"} | BESIDE_VALUES
                 | {words.split()[0].lower() for words in OPENINGS + VALUE_ENDINGS}) - {*JOINERS, *ARTICLES}
# Words of values, most of them English: "barnacle" or "watching". Each has more than three letters, and only
# one or two of our sentences have it. So users hardly ever say it beside a value.
RARE = sorted(word for word, times in Counter(
    word for sentences in (TELL, CHANGE, ASK, LIST) for sentence in set(sentences["train"])
    for word in set(re.findall("[a-z]{4,}", re.sub(r"{.*?}", "", sentence.lower())))).items()
    if times < 3 and word not in NEVER_MADE_UP)
# When we measure, no made-up word is one of these. We have REAL_VALUES for English values, and if "note for"
# were a value, nobody could find it in "note for as my hobby".
NEVER_MEASURED = NEVER_MADE_UP.union(
    COMMON, RARE, re.findall("[a-z-]+", " ".join(PETS + AGES + PHRASES).lower()))
# "I'm good" and "I'm eight" tell no name.
NOT_FIRST_IN_NAMES = {*ARTICLES, *AGES, *re.findall("[a-z]+", " ".join(SMALL_TALK).lower())}
# A sentence that names one of these does not call another relative "she".
SOMEBODY = re.compile(rf"\b({'|'.join(RELATIVES + MORE_RELATIVES)})\b")
# Parts of our sentences, of two words or more, for `part`: what stands beside "my {thing}" and
# "{value}" ("don't lose this one ok"), and whole sentences that have neither.
PARTS = [words for sentences in (TELL, CHANGE, ASK, LIST) for sentence in sentences["train"]
         for part in re.split(r"[Mm]y \{thing\}|\{value\}", sentence)
         if len(words := part.strip(" ,.:;?!-").split()) > 1]
# English words at the end of made-up things: "type", at times "doesn"
THING_WORDS = sorted(word for word in set(ENGLISH) - NOT_LAST_IN_THINGS if len(word) > 3)
# Facts about oneself, the commonest twice. After one of them `pick_thing` often picks another.
ABOUT_ONESELF = ["name", "name", "age", "age", "job", "job", "home city", "hobby", "pet"]
# What may stand between a value and words after it (apart from a comma), and between any other end of a
# sentence and such words
VALUE_SIGNS = [".", "!", "...", " -"]
END_SIGNS = [",", ",", ".", "?", "??", "...", " -"]


def is_held_out(word):
    """True if training never makes up this word, neither in a value nor in a thing: one word in eight, by a
    hash, and the last word of each of REAL_VALUES. (Words that we do not make up, such as "for", may have
    such a hash and still occur.)"""
    word = small(word)
    return zlib.crc32(word.encode()) % 8 == 0 or word in HELD_OUT


def small(word):
    """The word in small letters, and the same ones if a user has written it in capitals (as Turkish "ı")."""
    return word.upper().lower()


def any_word(rng):
    """A made-up word. In the order of the code: 5% are common English words (`draw` turns most of these
    down), and 13% rare ones. 4% are two or three words or numbers, mostly joined by signs ("foo@tri.be",
    "kle-42"), and 2% have another form ("o'kosh", "$40"). 10% are the beginning of an English word and the
    end of another: "clear" and "number" give "clember". So values have tokens, such as "mber", that no
    syllable has. 53% have one to four syllables ("skaubrie"). 13% are one to eight letters, and in a fifth of
    those one letter is foreign."""
    if (chance := rng.random()) < 0.05:
        return rng.choice(COMMON)
    if chance < 0.18:
        return rare_word(rng)
    if chance < 0.22:
        parts = [rng.choice(["", *SIGNS]) + rng.choice([any_word, any_word, any_word, any_number])(rng)
                 for _ in range(rng.choice([2, 2, 3]))]
        return "".join(parts).lstrip(SIGNS)             # without the sign before the first part
    if chance < 0.23:
        return rng.choice(WORD_FORMS).format(any_word(rng), any_word(rng))
    if chance < 0.24:
        return any_amount(rng)
    if chance < 0.34:
        first, last = rng.choice(ENGLISH), rng.choice(ENGLISH)
        return first[:rng.randint(1, len(first))] + last[rng.randrange(len(last)):]
    if chance < 0.87:
        syllables = rng.choice([1, 1, 2, 2, 2, 3, 3, 4])
        return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))
    letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.2:
        latin, greek_or_cyrillic, chinese = (0xC0, 0x180), (0x391, 0x450), (0x4E00, 0x9FFF)
        foreign = chr(rng.randrange(*rng.choice([latin, greek_or_cyrillic, chinese])))
        letters[rng.randrange(len(letters))] = foreign
    return "".join(letters).lower()


def rare_word(rng):
    return rng.choice(RARE)


def any_number(rng):
    return str(rng.randrange(10 ** rng.choice([1, 2, 2, 2, 3, 3, 4, 5, 6])))


def any_amount(rng):
    return rng.choice(AMOUNTS).format(any_number(rng), any_number(rng))


def draw(make, rng, held_out):
    """A word or number from `make` that is not in NEVER_MADE_UP. If `held_out`, training never makes it up,
    and it is not in NEVER_MEASURED."""
    avoid = NEVER_MEASURED if held_out else NEVER_MADE_UP
    while True:
        made = make(rng)
        if small(made) not in avoid and is_held_out(made) == held_out:
            return made


def a_value(thing, rng, held_out):
    """A made-up value of the thing: a number ("42", or "14.5" if it is no age), a name ("Talvor Bri", "The
    Bri"), a noun ("a bluck"), or words ("ni corst"), a quarter of these with a number ("12 corst"). Of values
    of several words, one in ten has a comma ("ni, corst") and three in ten have a joiner ("ni and corst").
    One value in ten has other capitals, drawn anew for each word ("Foo-Tri FOO"). Its kind suits the thing in
    nine cases of ten. If `held_out`, that of a name, an age or a job always does: training once had only such
    values, and we still measure with them."""
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
        words = [rng.choice([str.lower, str.capitalize, str.title, str.upper])(word) for word in words]
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
    """One of PHRASES with words and numbers that training may make up: "barnacle with kosh"."""
    def fill_in(blank):
        if blank[1] == "n":
            return draw(any_number, rng, held_out=False)
        word = draw(rng.choice([any_word, rare_word]), rng, held_out=False)
        return word.capitalize() if blank[1] == "W" else word

    return re.sub(r"\{(.)\}", fill_in, rng.choice(PHRASES))


def suits(value, thing):
    """May the value stand in a sentence of TELL_THING or CHANGE_THING? In "I'm {value}" only the value shows
    what it is: a number is the age, "a bluck" the job, anything else that begins with a letter the name. So
    for these three it must look so, and have no comma and no "from", which would end the fact: "I'm Ada, a
    nurse", "I'm Ada from Oslo". For other things any may."""
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
    """The sentence, with a question mark if it begins with one of the words below ("And my hobby?") or says
    "what is". "Tell me my hobby" gets none, nor do a few real questions ("Did I tell you my hobby")."""
    asks = re.search(r"^(what|who|what's|who's|which|where|when|how|do|can|could|would|have|and|so) |what is",
                     sentence.lower())
    return f"{sentence}?" if asks else sentence


# ---------------------------------------------------------------------------------------------------------
# Dialogues


class Dialogue:
    """A user, and an assistant that takes notes.

    `tell`, `ask`, `list_notes` and `chatter` return the user's message, without its full stop, and the
    answer; `say` adds both to `text`. split: "train", or "choice" or "final" to measure. When we measure, no
    thing is made up, and the values have only words that training never makes up."""

    def __init__(self, rng, split="train"):
        self.rng, self.split, self.training = rng, split, split == "train"
        self.facts = {}                     # thing -> its latest value, in the order of the notes
        self.changed = set()
        # The probability that a new thing takes a word from a thing with a note: one of the first `alike_to`
        # notes (None: of all).
        self.alike, self.alike_to = 0.25, None
        self.last = None                    # the thing last told or asked; None after a list or chatter
        self.introducing = False            # the user tells facts about one person: see `tell_new`
        self.casual = rng.random() < 0.3    # the user writes no capitals, except perhaps in values
        # Of a casual user: are values in small letters, too? Do sentences have apostrophes? (Training draws
        # both.)
        self.lower_values, self.apostrophes = True, True
        # Does the user write color and favorite when telling, when asking? A few mix both spellings.
        self.tells_american = rng.random() < 0.3
        self.asks_american = self.tells_american if rng.random() < 0.8 else rng.random() < 0.5
        self.bot, self.text = "Tiny", ""
        self.cheerful = False               # the assistant ends its sentences with "!"

    def system(self):
        """Begin with a system message. Some give the assistant another name, or make it cheerful, and one in
        ten has random words."""
        rng = self.rng
        message = rng.choice(SYSTEM)
        if rng.random() < 0.1:
            message = " ".join(self.word() for _ in range(rng.randint(1, 30))) + "."
        if "{}" in message:
            self.bot = self.word().capitalize()
            message = message.format(self.bot)
        if rng.random() < 0.3:
            self.cheerful = True
            message = f"{message} {rng.choice(CHEERFUL)}".lstrip()
        self.text = f"<|system|>{message}<|end|>"

    def say(self, said, answer):
        """Add a turn. Three messages in ten end without a sign."""
        said = said if self.casual else capital(said)
        if self.rng.random() < 0.3:
            said = said.removesuffix("?")
        elif not said.endswith("?"):
            said += self.rng.choice("...!")     # three full stops to one exclamation mark
        if self.cheerful:
            sentences = re.split(r"\. (?=(?:Your|Note|I|Try)\b)", answer.removesuffix("."))  # not "Dr."
            answer = "! ".join(sentences) + "!"
        self.text += f"<|user|>{said}<|end|><|assistant|>{answer}<|end|>"

    def fill_in(self, sentence, *words, **blanks):
        """The sentence as this user writes it: "I'm {value}" may become "I'm Ada", "i'm Ada" or "im Ada". In
        training some say "our hobby", which the notes call "your hobby", too."""
        if self.training and self.rng.random() < 0.05:
            sentence = sentence.replace("my {thing}", "our {thing}").replace("My {thing}", "Our {thing}")
        if self.casual:
            sentence = sentence.lower()
        if self.casual and not self.apostrophes:        # but values keep theirs: "o'kosh"
            sentence = sentence.replace("'", "")
            if "thing" in blanks:
                blanks["thing"] = blanks["thing"].replace("'s ", "s ")
        return sentence.format(*words, **blanks)

    @property
    def relative(self):
        """Whom the last fact was about: "sister", if it was the "sister's job". Else ""."""
        relative, _, owned = (self.last or "").rpartition("'s ")
        return relative if owned in RELATIVE_THINGS else ""  # not of "new year's resolution"

    def pronoun(self):
        """What the user calls the relative of the last fact. A dog, a boss or a "kosh" may be either."""
        if self.relative in WOMEN:
            return "she"
        return "he" if self.relative in MEN else self.rng.choice(["she", "he"])

    def word(self):
        return draw(any_word, self.rng, not self.training)

    def value(self, thing):
        """A made-up value, or in training at times one of PETS, AGES or PHRASES."""
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
        """Another value if this one and an earlier one are single words of the same sort (both numbers, or
        both with a capital, or both without): one in six begins as the earlier one does, "5807" after "5828".
        The model must not mistake one for the other."""
        same_sort = [other for other in self.facts.values() if " " not in other + value
                     and (other.isdigit(), other[0].isupper()) == (value.isdigit(), value[0].isupper())]
        if not same_sort or self.rng.random() > 1 / 6:
            return value
        beginning = self.rng.choice(same_sort)[:self.rng.randint(1, 4)]
        make = any_number if value.isdigit() else any_word
        return draw(lambda rng: beginning + make(rng), self.rng, not self.training)

    def pick_thing(self):
        """A thing: one of THINGS or MORE_THINGS, a relative's, or in training also a made-up one."""
        rng = self.rng
        if not self.facts and rng.random() < 0.25:
            return "name"
        # After a fact about a relative many are about the same one, and after a fact that is one of
        # ABOUT_ONESELF many are drawn from these: "I'm Ada and I live in Oslo".
        same = 0.8 if self.introducing else 0.3 if self.training else 0
        if self.relative and rng.random() < same:
            return f"{self.relative}'s {rng.choice(RELATIVE_THINGS)}"
        if (self.introducing or self.last in ABOUT_ONESELF) and rng.random() < same:
            return rng.choice(ABOUT_ONESELF)
        # Of the others, 30% are one of THINGS, 15% of MORE_THINGS, 20% a relative's, and 35% made up. When we
        # measure, none is made up, and the rest keep their proportions.
        if (chance := rng.random() * (1 if self.training else 0.65)) < 0.45:
            return rng.choice(THINGS if chance < 0.3 else MORE_THINGS)
        if chance < 0.65:
            anybody = self.training and rng.random() < 1 / 6
            whose = rng.choice([self.word(), rng.choice(MORE_RELATIVES)] if anybody else RELATIVES)
            return f"{whose}'s {rng.choice(RELATIVE_THINGS)}"
        while (thing := self.thing_word()) in NOT_LAST_IN_THINGS:
            pass
        if chance > 0.85:       # "kosh type", "kosh blaup type" or "kosh of the type"
            thing = f"{self.word()} {rng.choice(['', '', '', 'of the ', self.word() + ' '])}{thing}"
        return rng.choice(["", "", "favourite ", "first "]) + thing

    def thing_word(self):
        """A word for the end of a made-up thing: English in half of the cases."""
        make = any_word if self.rng.random() < 0.5 else lambda rng: rng.choice(THING_WORDS)
        return draw(make, self.rng, not self.training)

    def pick_unknown(self, avoid=()):
        """A thing without a note. With probability `alike` it takes its first or last word from a thing with
        a note: if there is a note of the favourite colour, "lucky number" becomes "favourite number"."""
        while True:
            thing = self.pick_thing()
            if self.facts and self.rng.random() < self.alike:
                known, other = self.rng.choice(list(self.facts)[:self.alike_to]).split(), thing.split()
                first, last = (known[0], other[-1]) if self.rng.random() < 0.5 else (other[0], known[-1])
                thing = f"{first} {last}" if first != last else thing
            if thing not in self.facts and thing not in avoid:
                return thing

    def prefix(self):
        """One or two groups of words to begin a sentence: "I'm late, so it my mof don't:"."""
        groups = [self.idle_words() + self.rng.choice(["", "", "", ",", ",", ":", ".", "?", ", so", " and"])
                  for _ in range(self.rng.choice([1, 1, 2]))]
        return " ".join(groups)

    def suffix(self, signs, words):
        """One of the signs, and the words: ", can't kosh people"."""
        sign = self.rng.choice(signs)
        words = re.sub(r"\b[Mm]y ", "", words)      # the last "my" must be that of the thing
        return f"{sign} {capital(words) if sign[-1] in '.?!' else words}"

    def more_words(self, probability):
        """What follows a question, or a fact that does not end with its value: a sign and a part of one of
        our sentences, or nothing. (Random words would not do. In "what was my hobby, kosh" the "kosh" could
        be a value, as it is in "my hobby, kosh".)"""
        return self.suffix(END_SIGNS, self.part()) if self.rng.random() < probability else ""

    def before_value(self):
        """What may stand before a value that begins its sentence: "", "btw " or "it my mof don't, "."""
        rng = self.rng
        if (chance := rng.random()) < 0.4:
            return ""
        if chance < 0.7:
            return rng.choice(OPENINGS) + rng.choice([" ", ", "])
        return self.idle_words() + rng.choice([", ", ": ", ". ", "... ", " - "])

    def after_value(self):
        """What follows a value: mostly nothing, else " btw" or the like, or a sign and some words. After a
        comma these are no random words: in "my hobby is chess, kosh" the "kosh" belongs to the value."""
        rng = self.rng
        if (chance := rng.random()) < 0.72:
            return ""
        if chance < 0.86:
            return f" {rng.choice(VALUE_ENDINGS)}"
        if chance < 0.92:
            return self.suffix([","], self.aside_or_part())
        return self.suffix(VALUE_SIGNS, self.idle_words())

    def idle_words(self):
        """Words that tell nothing: one of ASIDES, a part of one of our sentences, or one to six random words,
        each as often as the others."""
        if self.rng.random() < 2 / 3:
            return self.aside_or_part()
        return " ".join(self.random_word() for _ in range(self.rng.randint(1, 6)))

    def aside_or_part(self):
        return self.rng.choice(ASIDES) if self.rng.random() < 0.5 else self.part()

    def part(self):
        """Up to eight words of one of our sentences."""
        words = self.rng.choice(PARTS)
        start = self.rng.choice([0, self.rng.randrange(len(words))])
        return " ".join(words[start:start + 8])

    def random_word(self):
        """A common word in half of the cases. One in eight is of CONTRACTIONS, one in ten begins with "my",
        and the others are made up."""
        rng = self.rng
        if (chance := rng.random()) < 0.5:
            return rng.choice(COMMON)
        if chance < 0.62:
            return rng.choice(CONTRACTIONS)
        if chance < 0.72:
            return f"my {rng.choice([self.word(), rng.choice(RELATIVES)])}"
        return self.word()

    def sentence(self, general, special, thing):
        """A sentence about the thing. general: TELL, CHANGE or ASK. special: TELL_THING, ..., whose sentences
        suit one thing only, or {} if the value does not suit them.

        When we measure, it is one of `general`. In training, 40% of the sentences are special, if there are
        such, and nearly all while the user introduces somebody. Of the others, nine in ten questions, and
        three in four of those that tell or change, are one of `general`; the rest are `composed`. If the turn
        before was about the same relative, half of the sentences have "she" or "her job" for "my sister" or
        "my sister's job", unless they name somebody else."""
        rng = self.rng
        if not self.training:
            return rng.choice(general[self.split])
        relative, of, owned = thing.rpartition("'s ")
        again = relative and relative == self.relative and rng.random() < 0.5
        pronoun = self.pronoun() if again else None
        suited = special.get(of + owned, [])        # "sister's name" is looked up as "'s name"
        if relative in THINGS + MORE_THINGS:        # "Who is my best friend?" asks for a "best friend"
            suited = []
        if suited and rng.random() < (0.9 if self.introducing else 0.4):
            return self.special_sentence(suited, relative, pronoun)
        whole = rng.random() < (0.9 if general is ASK else 0.75)
        said = rng.choice(general["train"]) if whole else self.composed(general)
        if pronoun and not SOMEBODY.search(said.lower()):
            hers = ("her " if pronoun == "she" else "his ") + owned
            said = said.replace("my {thing}", hers).replace("My {thing}", capital(hers))
        return said

    def special_sentence(self, suited, relative, pronoun):
        """One of the sentences that suit a thing. relative: whose thing it is, or "".
        pronoun: "she", "he", or None if the sentence must name the relative."""
        rng = self.rng
        if relative and relative not in RELATIVES:      # "My kosh is 42" would tell the kosh, not its age
            suited = [said for said in suited if said not in ("{she} is {value}", "{value} is my {relative}")]
        i_am = [said for said in suited if said in ("I'm {value}", "I'm from {value}")]
        if self.introducing and i_am and rng.random() < 0.8:
            return i_am[0]
        she = pronoun or f"{rng.choice(['my'] * 9 + ['our'])} {relative}"
        said = rng.choice(suited).replace("{she}", she)
        if relative.startswith(tuple("aeiou")):
            said = said.replace("a {relative}", "an {relative}")
        said = said.replace("{relative}", relative)
        return said.replace("he is ", rng.choice(["he is ", "he's "]))      # also of "she is"

    def composed(self, general):
        """Idle words, then a core, and at times more words: "it my mof don't, my {thing} is {value}", or in a
        question: "it my mof don't, what was my {thing} again". If a core begins with the value, often nothing
        stands before it. In some questions the core is "what you have noted as my {thing}" or the like. So
        the model learns to understand sentences that it never saw."""
        rng = self.rng
        if general is ASK:
            core = rng.choice(ASK_CORES)
            if rng.random() < 0.15:     # asks for one note only: "what you have noted as my hobby"
                core = f"{rng.choice(ALL_NOTES)}{rng.choice(['', ' as', ' for', ' about'])} my {{thing}}"
            if core.endswith("{thing}") and rng.random() < 0.3:
                core += f" {rng.choice(ASK_ENDINGS)}"
            return f"{self.prefix()} {core}{self.more_words(0.2)}"
        core = rng.choice(CHANGE_CORES if general is CHANGE else TELL_CORES)
        said = self.before_value() + core if core.startswith("{value}") else f"{self.prefix()} {core}"
        return said if said.endswith("{value}") else said + self.more_words(0.4)

    def tell(self, thing, value=None):
        """The user tells a fact, or changes it if there is a note of it, and the assistant notes it. Returns
        both messages: "My hobby is chess" and "Your hobby becomes note 1: your hobby is chess.". value: if
        None, or if the note has it already, one is made up. A given one is not put into small letters, so a
        caller that gives one sets `casual` to False. At the beginning of a sentence it gets a capital."""
        known, old = thing in self.facts, self.facts.get(thing)
        while value is None or value == old:
            value = self.value(thing)
        sentence = self.telling_sentence(thing, value)
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

    def telling_sentence(self, thing, value):
        """A sentence that tells or changes the fact. In training it may be of any form, so that the model
        must look whether there is a note: "Actually, ..." also tells new facts, and those of TELL also change
        some."""
        rng, known = self.rng, thing in self.facts
        if not self.training:
            return self.sentence(CHANGE if known else TELL, {}, thing)
        if thing == self.last and rng.random() < 0.5:
            sentence = self.without_thing(value)
        elif known and rng.random() < 0.1:
            sentence = rng.choice(CONTRAST)
        elif rng.random() < 0.03:
            sentence = rng.choice(FORM)
        elif thing == "pet" and value in PETS and rng.random() < 0.5:
            return rng.choice(["I have {value}", "I've got {value}"])   # ", Kosh" after it would be its name
        else:
            change = not self.introducing and rng.random() < (0.5 if known else 0.3)
            general, special = (CHANGE, CHANGE_THING) if change else (TELL, TELL_THING)
            special = special if suits(value, thing) else {}
            sentence = self.sentence(general, special, thing)
            while not known and "my {thing} {value}" in sentence:   # nobody could know where the thing ends
                sentence = self.sentence(general, special, thing)
        if sentence.endswith("{value}"):
            sentence += self.after_value()
        if re.match("(did|have|do|can|could|would|will) (i|you) [^.?!]*$", sentence.lower()):
            sentence += rng.choice(["?", ""])       # "Did I mention my hobby is chess?"
        return sentence

    def without_thing(self, value):
        """A sentence that tells the thing of the last fact. "She is {value}" only if the thing is a
        relative's name, age or job and the value shows which: "Sister's age?" "She is 5"."""
        known = self.last in self.facts
        person = self.relative and self.last.split()[-1] in ("name", "age", "job")
        if person and suits(value, self.last) and self.rng.random() < 0.4:
            return ("No, " if known else "") + self.pronoun() + self.rng.choice([" is", "'s"]) + " {value}"
        return self.rng.choice(CORRECT if known else SUPPLY)

    def ask(self, thing):
        """The user asks for a fact. In training, one question in four is only its thing: "Hobby?" (but not
        if the model cannot know that it is one: "Kosh?")."""
        spelt = spelling(thing, self.asks_american)
        clear = " " in thing or thing in [*self.facts, *THINGS, *MORE_THINGS]
        bare = clear and self.training and self.rng.random() < 0.25
        sentence = "{thing}?" if bare else question(self.sentence(ASK, ASK_THING, thing))
        said = self.fill_in(sentence, thing=spelt)
        self.last = thing
        if thing not in self.facts:
            return said, f"Your {spelt}? I don't know that yet."
        return said, f"Your {spelt} is {self.facts[thing]}."

    def list_notes(self):
        """The user asks for all notes. In training, half of the sentences consist of `prefix`, one of
        ALL_NOTES or LIST, and at times one of LIST_ENDINGS and `more_words`."""
        rng = self.rng
        if self.training and rng.random() < 0.5:
            phrase = rng.choice(rng.choice([ALL_NOTES, ALL_NOTES, LIST["train"]]))
            ending = f" {rng.choice(LIST_ENDINGS)}" if rng.random() < 0.5 else ""
            said = f"{self.prefix()} {phrase}{ending}{self.more_words(0.4)}"
        else:
            said = rng.choice(LIST[self.split])
        notes = [f"Note {number}: your {spelling(thing, self.tells_american)} is {value}."
                 for number, (thing, value) in enumerate(self.facts.items(), 1)]
        self.last = None
        return self.fill_in(question(said)), " ".join([*notes, f"Note {len(notes) + 1} is still empty."])

    def small_talk(self):
        """One of SMALL_TALK, or the user asks who the assistant is."""
        if self.rng.random() < (0.1 if self.bot == "Tiny" else 0.4):    # users try out the name they gave
            return self.who_are_you()
        said, answer = self.rng.choice(list(SMALL_TALK.items()))
        you = f", {self.facts['name']}" if "name" in self.facts else ""
        thing = spelling(self.rng.choice([*self.facts, self.pick_thing()]), self.tells_american)
        return self.fill_in(self.rng.choice(said.split("|")), thing=thing), answer.format(you=you)

    def who_are_you(self):
        """The user asks who the assistant is."""
        return self.fill_in(self.rng.choice(WHO_ARE_YOU)), f"I'm {self.bot}, a very small language model."

    def plus(self):
        """The user asks for the sum of two digits."""
        a, b = self.rng.randrange(10), self.rng.randrange(10)
        return self.fill_in(question(self.rng.choice(SUMS)), a=a, b=b), f"{a} plus {b} is {a + b}."

    def strange(self):
        """The user says something that the assistant does not understand."""
        sentences = ASIDES if self.training and self.rng.random() < 0.2 else STRANGE
        return self.fill_in(self.rng.choice(sentences), *(self.word() for _ in range(5))), NOT_UNDERSTOOD

    def chatter(self):
        """A turn about no fact: small talk, a sum, or a sentence that the assistant does not understand."""
        chance = self.rng.random()
        self.last = None
        return self.small_talk() if chance < 0.6 else self.plus() if chance < 0.85 else self.strange()


LISTS = "all notes"     # a key of `rests_until` beside the things: lists of all notes rest, too


class TrainingDialogue(Dialogue):
    """A dialogue of about `length` tokens of `per_token` characters, whose user has random habits."""

    def __init__(self, rng, length, per_token):
        super().__init__(rng)
        self.lower_values, self.apostrophes = rng.random() < 0.5, rng.random() < 0.5
        if rng.random() < 0.3:
            self.system()
            if rng.random() < 0.3:
                self.say(*self.who_are_you())
        # The user's other habits: how many facts at most, and the probabilities in `turn`
        self.most_facts = rng.choice([1, 1, 2, 2, 3, 4, 6, 8, 12])
        self.telling = rng.choice([0.1, 0.3, 1])
        self.chatting = rng.choice([0.05, 0.1, 0.4])
        self.changing = rng.choice([0.3, 0.6])
        self.listing = rng.choice([0.1, 0.25])
        if length > 1024 and rng.random() < 0.7:    # many facts, so that many questions look far back
            self.most_facts, self.telling, self.changing = rng.randint(15, 50), rng.choice([0.4, 1]), 0.2
        if length <= 1024 and rng.random() < 0.3:   # the user tells all in a row, and wants to see the notes
            self.most_facts, self.telling, self.chatting, self.listing = rng.randint(3, 12), 1, 0.05, 0.9
        if rng.random() < 0.5:      # most things share a word, so that the model must compare whole things
            self.alike, self.alike_to = 0.6, rng.choice([1, 2, 4, None])
        self.end = per_token * length       # characters
        self.far = 0.6 if length > 1024 else 0.15       # the probability that a rest is long
        self.rests_until = {}               # thing -> the length of the text when its rest is over
        self.rest(LISTS)

    def rest(self, *things):
        """For a while the user neither asks for these things nor changes them. There are two exceptions: the
        user may change a thing in the very next turn, and a list of all notes names resting things, too.
        (Lists have a rest of their own, as LISTS.) A long rest takes at least 60% of the text still to come,
        so that the model must look far back. A short one takes up to 25% of it, and 8% on average."""
        for thing in things:
            now = len(self.text)
            share = self.rng.uniform(0.6, 1) if self.rng.random() < self.far else self.rng.random() ** 2 / 4
            self.rests_until[thing] = now + share * (self.end - now)

    def turn(self):
        """Add a turn. We try in this order: the user tells a new fact, chats, changes a fact, asks for all
        notes if there are at most 12, for a fact with a note, or for one without. If nothing is chosen, the
        user chats. (Before the first fact, half of the turns tell one.) A probability counts once its turn
        comes: a `listing` of 0.9 means nine in ten of the turns that get as far and may ask for a list."""
        rng = self.rng
        ready = [thing for thing in self.facts if self.rests_until[thing] <= len(self.text)]
        at_hand = self.last in self.facts       # the turn before was about a fact with a note
        if len(self.facts) < self.most_facts and rng.random() < (self.telling if self.facts else 0.5):
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
        """The user tells a new fact, with a probability of 0.4 a second one, and so on, until the user has
        told `most_facts`: "I'm Ada and my hobby is chess". With one message in six the user introduces
        somebody, and this probability is 0.85: "I'm Ada, a nurse, and I live in Oslo". If the user has just
        asked for a fact without a note, four times in ten that one comes first."""
        rng = self.rng
        self.introducing = rng.random() < 1 / 6
        another = 0.85 if self.introducing else 0.4
        asked = self.last and self.last not in self.facts
        thing = self.last if asked and rng.random() < 0.4 else self.pick_unknown()
        said, answer = self.tell(thing)
        self.rest(thing)
        i_am_before = self.i_am(thing, said)
        while rng.random() < another and len(self.facts) < self.most_facts:
            thing = self.pick_unknown()
            more, noted = self.tell(thing)
            i_am = self.i_am(thing, more)
            if i_am_before and i_am and thing != "name" and rng.random() < 0.8:
                elided = more[i_am.end():]      # "a nurse" of "I'm a nurse", "from Oslo"
                said += (" " if elided.startswith("from ") and rng.random() < 0.5 else ", ") + elided
            else:
                said = self.joined(said.removesuffix("?"), more, self.facts[thing])
            answer, i_am_before = f"{answer} {noted}", i_am
            self.rest(thing)
        self.introducing = False
        return said, answer

    def joined(self, said, more, value):
        """Two parts of a message as one. The second begins with a small letter, unless it begins with "I",
        with a word in capitals or with its value, which the note copies; or with a capital, after a full
        stop."""
        rng = self.rng
        if self.casual and rng.random() < 0.4 and re.match(r"(i|i'?m|my|s?he|s?he'?s) ", more):
            return f"{said} {more}"     # "my sister is called ada she's 5"
        joint = rng.choice([" and ", " and ", ", and ", ", ", ", ", ". ", ". ", "; ", " but ",
                            f". {self.fill_in(capital(rng.choice(ASIDES)))}. "])
        if joint.endswith(". "):
            more = more if self.casual else capital(more)
        elif not re.match(rf"I\b|[A-Z]{{2}}|{re.escape(value)}", more):
            more = more[0].lower() + more[1:]
        return said + joint + more

    def i_am(self, thing, said):
        """A match of "I'm " if the message ends with it and the value, or with "from" between these."""
        return re.search(rf"(^|[,!] )[Ii]'?m (?=(from )?{re.escape(self.facts[thing])}$)", said)


def dialogue(rng, length, per_token=3.5):
    """The text of a dialogue to train on: "<|user|>Hi, I'm Ada.<|end|><|assistant|>Your name becomes note 1:
    your name is Ada.<|end|><|user|>..."; some begin with "<|system|>Be cheerful.<|end|>". It has at least
    `length` tokens if `per_token` is how many characters a token has."""
    chat = TrainingDialogue(rng, length, per_token)
    while len(chat.text) < chat.end:
        chat.turn()
    return chat.text
