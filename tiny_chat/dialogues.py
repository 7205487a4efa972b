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
training, values consist of random syllables, letters and digits, and one word in ten is a common English one.
So the model cannot learn values by heart: it must find the note and copy it, token by token. An answer about
one fact repeats the thing first ("Your home city"). Only the token after it depends on whether there is a
note: "is" or "?" after a question, "has" or "becomes" after a fact.

A hash keeps one word in eight out of the values and the made-up things of training. The sentences that tell,
change, ask and list come in three sets: we train on "train", measured with "choice" while we chose the
recipe, and with "final" after that.
"""
import re
import zlib

THINGS = ["name", "age", "home city", "job", "hobby", "pet", "car", "birthday", "language", "school",
          "lucky number", "shoe size", "best friend", "favourite colour", "favourite food", "favourite drink",
          "favourite film", "favourite book", "favourite song", "favourite animal", "favourite sport"]
RELATIVES = ["sister", "brother", "mother", "father", "wife", "husband", "son", "daughter", "boss",
             "neighbour", "dog", "cat"]
RELATIVE_THINGS = ["name", "name", "name", "age", "job", "home city", "hobby"]
# The usual kind of a value, by how its thing ends. The first line that fits counts, so "language" has a
# "name" although it ends with "age". Any other thing has a "word".
KINDS = {"name": ("name", "home city", "best friend", "school", "language", "film", "book", "song"),
         "number": ("number", "age", "size"),
         "noun": ("pet", "job", "animal", "car")}

# The user's sentences. Those of ..._THING suit one thing only ("I'm {value}" two: a number is the age).
TELL = {
    "train": ["My {thing} is {value}"] * 6 + [
        "By the way, my {thing} is {value}", "Remember that my {thing} is {value}",
        "Please note: my {thing} is {value}", "You should know that my {thing} is {value}",
        "Remember: my {thing} is {value}", "Well, my {thing} is {value}", "I think my {thing} is {value}",
        "For your information, my {thing} is {value}", "Let me tell you: my {thing} is {value}",
        "Hi, my {thing} is {value}", "Hello! My {thing} is {value}", "{value} is my {thing}",
        "My {thing}? It's {value}"],
    "choice": ["Keep in mind that my {thing} is {value}", "Just so you know, my {thing} is {value}",
               "Write down that my {thing} is {value}", "I want you to know that my {thing} is {value}",
               "Don't forget: my {thing} is {value}", "One more thing: my {thing} is {value}",
               "Make a note that my {thing} is {value}", "It may help you that my {thing} is {value}"],
    "final": ["Oh, and my {thing} is {value}", "To start with, my {thing} is {value}",
              "While I think of it, my {thing} is {value}", "As it happens, my {thing} is {value}",
              "Add to your notes that my {thing} is {value}",
              "Something else worth knowing: my {thing} is {value}"],
}
# "'s name" is the name of any relative.
TELL_THING = {
    "name": ["I'm {value}", "I am {value}", "Call me {value}", "Hi, I'm {value}", "Hello, I'm {value}",
             "Hi, my name is {value}", "Please call me {value}", "Hello, my name is {value}",
             "Hey, I'm {value}", "Hi! I'm {value}", "I'm called {value}"],
    "age": ["I'm {value} years old", "I am {value} years old", "I turned {value}", "I'm {value}"],
    "home city": ["I live in {value}", "I'm from {value}", "I come from {value}", "I live in {value}",
                  "My home is in {value}", "I moved to {value}"],
    "job": ["I work as {value}", "I'm working as {value}", "I earn my money as {value}"],
    "hobby": ["I like {value}", "In my free time I do {value}"],
    "pet": ["I have {value} as a pet", "I have a pet, {value}"],
    "car": ["I drive {value}", "I bought {value}"],
    "birthday": ["I was born on {value}", "I have my birthday on {value}"],
    "language": ["I speak {value}"],
    "school": ["I go to {value} school", "I study at {value}"],
    "favourite food": ["I love to eat {value}"],
    "favourite drink": ["I love to drink {value}"],
    "'s name": ["My {relative} is called {value}", "{value} is my {relative}",
                "I have a {relative} called {value}", "My {relative} is {value}"],
    "'s age": ["My {relative} is {value} years old", "My {relative} turned {value}"],
    "'s home city": ["My {relative} lives in {value}", "My {relative} comes from {value}"],
    "'s job": ["My {relative} works as {value}"],
    "'s hobby": ["My {relative} likes {value}"],
}
CHANGE = {
    "train": ["Actually, my {thing} is {value} now", "Actually, my {thing} is {value}",
              "My {thing} is now {value}", "My {thing} is {value} now", "No, my {thing} is {value}",
              "I changed my mind, my {thing} is {value}", "My new {thing} is {value}",
              "Sorry, my {thing} is {value}", "Correction: my {thing} is {value}",
              "That was wrong, my {thing} is {value}"],
    "choice": ["Hold on, my {thing} is {value}", "I have to correct myself: my {thing} is {value}",
               "Oops, my {thing} is {value}", "I was mistaken, my {thing} is {value}",
               "Update: my {thing} is {value}", "From today on my {thing} is {value}"],
    "final": ["Things are different now: my {thing} is {value}",
              "Silly me, I should have said that my {thing} is {value}",
              "Apologies, I made a mistake: my {thing} is {value}",
              "You've got the wrong one, my {thing} is {value}",
              "As of this morning my {thing} is {value}",
              "Please correct your notes: my {thing} is {value}"],
}
CHANGE_THING = {
    "name": ["Call me {value} instead", "I'm called {value} now", "Now I'm {value}"],
    "age": ["I'm {value} years old now", "Now I'm {value} years old"],
    "home city": ["I moved to {value}", "I live in {value} now", "Now I live in {value}"],
    "job": ["I work as {value} now", "Now I work as {value}", "I changed jobs, I work as {value} now"],
    "hobby": ["I like {value} now", "Now I like {value}"],
    "car": ["I drive {value} now", "Now I drive {value}"],
}
# In these the user names no thing and means the last one of the turn before. If there is a note of it, the
# user corrects the note: "My age is 4." "No, it's 5." If there is none, the user has just asked for it, and
# now supplies it: "What is my age?" "It's 5."
CORRECT = ["No, it's {value}", "Sorry, I meant {value}", "I meant {value}", "No, {value}",
           "Wait, it is {value}", "No, it is {value}", "Sorry, it's {value}"]
SUPPLY = ["It's {value}", "It is {value}", "That's {value}", "Well, it's {value}", "Oh, it is {value}"]
ASK = {
    "train": ["What is my {thing}"] * 5 + ["What's my {thing}"] * 3 + [
        "Do you remember my {thing}", "Do you know my {thing}", "And what is my {thing}", "And my {thing}",
        "Can you tell me my {thing}", "So what is my {thing}", "What was my {thing}", "Tell me my {thing}",
        "Please remind me: what is my {thing}", "Remind me of my {thing}", "I forgot my {thing}",
        "What did I say about my {thing}", "Have I told you my {thing}", "Say my {thing}", "My {thing}",
        "Could you remind me what my {thing} is", "Do you know what my {thing} is", "Which is my {thing}"],
    "choice": ["Could you tell me what my {thing} is", "What did I say my {thing} was", "Name my {thing}",
               "Quick question: what is my {thing}", "Would you remind me of my {thing}",
               "Let me test you: what is my {thing}", "Please repeat my {thing}",
               "Can you recall what my {thing} was", "Do you still know my {thing}",
               "I wonder what my {thing} is", "Once more: what is my {thing}", "Help me with my {thing}"],
    "final": ["I can't think what my {thing} is", "Just checking, what is my {thing}",
              "Hang on, what was my {thing}", "Are you able to tell me my {thing}",
              "Have you got a note of my {thing}", "I keep forgetting what my {thing} is",
              "Try to remember my {thing}", "According to your notes, what is my {thing}"],
}
ASK_ENDINGS = ["is", "is", "was", "was", "again", "now", "for me", "please", "once more"]
ASK_THING = {
    "name": ["Who am I", "What am I called", "Do you know who I am", "Do you remember who I am"],
    "age": ["How old am I"],
    "home city": ["Where do I live", "Where am I from", "Where is my home"],
    "job": ["What do I do for a living", "What do I work as", "What is my work"],
    "hobby": ["What do I like", "What do I do in my free time"],
    "car": ["What do I drive"],
    "birthday": ["When was I born", "When is my birthday"],
    "language": ["What do I speak", "Which language do I speak"],
    "school": ["Where do I study", "Where do I go to school"],
    "pet": ["Which pet do I have", "What pet do I have"],
    "best friend": ["Who is my best friend"],
    "favourite food": ["What do I love to eat"],
    "favourite drink": ["What do I love to drink"],
    "'s name": ["What is my {relative} called", "Who is my {relative}", "Who's my {relative}"],
    "'s age": ["How old is my {relative}"],
    "'s home city": ["Where does my {relative} live", "Where is my {relative} from"],
    "'s job": ["What does my {relative} do for a living", "What does my {relative} work as"],
    "'s hobby": ["What does my {relative} like"],
}
NOTES = ["your notes", "everything", "what you know", "everything you know", "what you know about me",
         "everything you know about me", "all facts about me", "what I told you", "everything I told you",
         "the things I told you", "what you remember", "what you have noted", "my facts", "the notes",
         "all you know", "about me"]
LIST_ENDINGS = [" again", " now", " for me", " please", " with me", " to me"]
LIST = {
    "train": ["What do you know", "What do you remember", "What did I tell you", "What have I told you",
              "What do you know about me so far", "Tell me about myself", "What have you noted"]
             + [f"{what} about me" for what in ("What do you know", "What do you remember",
                                                "What have you noted", "What did I tell you",
                                                "What have I told you")]
             + [f"{verb} {notes}" for verb in ("Tell me", "Repeat", "List", "Show me", "Give me", "Read me")
                for notes in NOTES],
    "choice": ["Say everything you know about me", "What are your notes about me",
               "Recite all you remember about me", "Please show all your notes",
               "Sum up what you know about me", "What have you learnt about me", "I want to see your notes"],
    "final": ["Talk me through what I've told you", "Summarise what you know about me",
              "Put together a list of what you've noted about me",
              "Can I see everything you have on me", "Run through all your notes for me",
              "Bring up all the facts you have about me"],
}
WHO_ARE_YOU = ["Who are you?", "What are you?", "What is your name?", "What's your name?", "Are you a bot?",
               "Introduce yourself"]
# The user's sentences, separated by |, and the answer to all of them. {you} becomes ", Ada" if the assistant
# has noted that the user's name is Ada.
SMALL_TALK = {
    "Thanks|Thank you|Thanks a lot|Thank you very much|Great, thanks|Cheers": "You're welcome{you}.",
    "Bye|Goodbye|See you|See you later|Bye bye|Good night|See you tomorrow": "Goodbye{you}.",
    "Hi|Hello|Hey|Good morning|Good evening|Hi there|Hello there|Hello again": "Hello{you}.",
    "How are you?|How are you doing?|How is it going?|Are you well?|How do you do?": "I'm fine, thank you.",
    "I'm fine|I'm good, thanks|I'm fine, thanks|Fine, thanks|I'm well|I'm happy|I'm great|Very well":
        "I'm glad to hear that.",
    "I'm tired|I'm sad|I'm bored|I'm hungry|I'm sick|I'm not well|Not so good": "I'm sorry to hear that.",
    "What can you do?|Help|Can you help me?|How can you help me?|What should I say?|How does this work?":
        "I remember what you tell me. Try: My lucky number is 7.",
    "How old are you?|When were you born?|Where are you from?|Who made you?":
        "I was trained on two CPU cores in 2026.",
    "OK|Okay|I see|Good|Great|Nice|Cool|All right|Well done|Very good|Right|Correct|Yes":
        "I'm glad you think so.",
    "That's wrong|Wrong|That is not true|Are you sure?|Really?|No|Not at all":
        "I may be wrong. I'm a very small model.",
    "What is your favourite colour?|What's your favorite color?|Do you like colours?":
        "I like blue, like the sky.",
    "Do you like me?|Do you like music?|Do you like books?|Do you love me?": "I like talking with you.",
    "Nice to meet you|Pleased to meet you": "Nice to meet you, too.",
    "Forget everything|Forget all that|Forget that|Delete my notes|Forget me":
        "I can't forget what you told me.",
    "What's new?|What's up?|What are you doing?": "I'm waiting for you to tell me something.",
    "Tell me a joke|Make me laugh|A joke, please|Do you know a joke?":
        "Why did the token cross the bus? To get to the other cache.",
    "Another joke, please|Tell me another joke|Another one|One more joke":
        "I would tell you a joke about memory, but I forgot it.",
}
STRANGE = ["What is the {} of {}?", "What is {}?", "Who is {}?", "How do I {} a {}?", "Why is the {} {}?",
           "Can you {} the {}?", "{}", "{} {}", "{} {} {}", "{} {} {} {} {}?", "Write a {} about {}",
           "Tell me about {}", "Explain {}", "Where is {}?", "How many {} are in {}?", "The {} is {}",
           "Do you know {}?", "When did {} {}?", "Translate {} to {}", "Is {} a {}?", "Let's {}",
           "I {} the {}", "I {} a {}", "Did I {} {}?", "Is my {} {}?"]
NOT_UNDERSTOOD = "I don't understand that. I only know what you tell me."
SUMS = ["What is {a} plus {b}", "{a} plus {b}", "{a} + {b}", "What is {a} + {b}", "How much is {a} plus {b}",
        "Add {a} and {b}", "Can you add {a} and {b}"]
SYSTEM = ["You are a helpful assistant.", "You are a friendly chatbot. Answer briefly.",
          "Be brief and polite.", "", "You are {}.", "Your name is {}.", "You are {}, a helpful assistant.",
          "You are called {}. Be friendly."]
CHEERFUL = ["Be cheerful.", "Be very cheerful.", "Answer cheerfully.", "Sound cheerful."]

REAL_VALUES = {  # only for measuring: training never draws the last word of one of these
    "best friend": ("Ada Grace Linus Barbara Edsger Margaret Alan Katherine Dennis Frances Donald Radia Ken "
                    "Hedy Guido Yoshua").split(),
    "favourite colour": "teal purple orange crimson turquoise green magenta yellow indigo violet".split(),
    "home city": "Paris Zurich Nairobi Lima Kyoto Oslo Montreal Sydney Cairo Rotterdam Athens Boston".split(),
    "hobby": "chess sailing knitting cycling gardening pottery judo astronomy origami running".split(),
    "pet": ["a hamster", "a goldfish", "a parrot", "a python", "a rabbit", "a turtle", "a donkey"],
    "favourite food": "pizza ramen sushi lasagna falafel curry pancakes tacos fondue risotto".split(),
    "job": ["a teacher", "a baker", "a nurse", "a plumber", "a pilot", "a surgeon", "a librarian"],
}
HELD_OUT = {word.split()[-1].lower() for words in REAL_VALUES.values() for word in words}

# ---------------------------------------------------------------------------------------------------------
# Made-up values

ONSETS = ("b c d f g h j k l m n p r s t v w z "
          "br ch cl cr dr fl gr kr pl pr qu sh sk sp st th tr").split() + [""] * 4
VOWELS = "a e i o u y a e i o u ai au ee ea ie oo ou".split()
COMMON = ("the be to of and a in that have it for on with he as you do at this but his by from they we "
          "say her she or an will one all would there their so up out if about get which go when make can "
          "like time just him know take people into year good some could them see other than look only come "
          "its over think also back after use two our work first well way even new want because any give "
          "day most us must let please very long thing need tell remember nothing myself "
          "correct").split()
OPENERS = ("I I I I'm I've I'd I'll don't can't haven't isn't didn't let's it's that's what's here's you've "
           "there's me").split()
CODAS = "b ck d l ll m n ng nt p r rd rk s ss st t x".split() + [""] * 16


def is_held_out(word):
    """True if no value and no made-up thing of training has this word: one in eight, by a hash, and those of
    REAL_VALUES. (Other parts of a sentence may have it.)"""
    return zlib.crc32(word.casefold().encode()) % 8 == 0 or word.casefold() in HELD_OUT


def any_word(rng):
    """A made-up word: 73% have one to four syllables ("skaubrie"), 13% one to eight letters, of which one may
    not be English; 10% are common English words, and 4% two or three words joined, mostly by signs
    ("foo@tri.be")."""
    if (kind := rng.random()) < 0.1:
        return rng.choice(COMMON)
    if kind < 0.14:
        return "".join(rng.choice(["", *".@-_&/"]) + any_word(rng) for _ in range(rng.choice([2, 2, 3]))
                       ).lstrip(".@-_&/")
    if kind < 0.87:
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


def draw(make, rng, held_out):
    """A word or number from `make`: one for training, or, if `held_out`, one that we use only to measure."""
    while True:
        made = make(rng)
        if made != "is" and is_held_out(made) == held_out:      # "is" ends the thing
            return made


def a_value(thing, rng, held_out):
    """A made-up value of the thing: a number ("42"), a name ("Talvor Bri"), a noun ("a bluck") or words ("ni
    corst and tavo"). Its kind suits the thing in nine cases of ten, and always if the thing ends with "name"
    or "age", because "I'm 5" must tell the age and "I'm Ada" the name."""
    kind = next((kind for kind, endings in KINDS.items() if thing.endswith(endings)), "word")
    if rng.random() < 0.15 and not thing.endswith(("name", "age")):
        kind = rng.choice(["name", "number", "noun", "word"])
    if kind == "number":
        return draw(any_number, rng, held_out)
    words = [draw(any_word, rng, held_out) for _ in range(rng.choice([1, 1, 1, 1, 1, 2, 2, 3, 6]))]
    if kind == "name":
        words = [word.capitalize() for word in words]
    if len(words) > 1 and rng.random() < 0.15:
        words.insert(-1, "and")
    if kind == "noun":
        words.insert(0, rng.choice(["a", "a", "a", "an", "the", "two"]))
    if kind == "word" and rng.random() < 0.1:
        words.append(draw(any_number, rng, held_out))
    return " ".join(words)


def capital(sentence):
    return sentence[:1].upper() + sentence[1:]


def question(sentence):
    """The sentence, with a question mark if it begins as a question or says "what is"."""
    asks = re.search(r"^(what|who|what's|who's|which|where|when|how|do|can|could|would|have|and|so) |what is",
                     sentence.lower())
    return f"{sentence}?" if asks else sentence


# ---------------------------------------------------------------------------------------------------------
# Dialogues


class Dialogue:
    """A user, and an assistant that takes notes.

    `tell`, `ask`, `list_notes`, `chatter` and the methods that it calls return the user's message, without
    its full stop, and the answer; `say` adds both to `text`. wordings: "train", "choice" or "final".
    held_out: make up only words and numbers that training never makes up."""

    def __init__(self, rng, wordings="train", held_out=False):
        self.rng, self.wordings, self.held_out = rng, wordings, held_out
        self.facts = {}                     # thing -> its latest value, in the order of the notes
        self.changed = set()
        # How probable it is that a new thing shares a word with one that has a note. Only the first
        # `alike_to` notes count (None: all).
        self.alike, self.alike_to = 0.25, None
        self.last = None                    # the thing that the turn before told or asked
        self.casual = rng.random() < 0.2    # the user writes without capitals
        self.american = rng.random() < 0.3  # the user writes color and favorite
        self.bot, self.text = "Tiny", ""
        self.stop = "."                     # of the assistant's sentences; "!" if it is cheerful

    def system(self):
        """Begin with a system message; some give the assistant another name, or make it cheerful."""
        rng = self.rng
        message = rng.choice(SYSTEM)
        if rng.random() < 0.1:
            message = " ".join(self.word() for _ in range(rng.randint(1, 30))) + "."
        if "{}" in message:
            self.bot = self.word().capitalize()
            message = message.format(self.bot)
        if rng.random() < 0.3:
            self.stop = "!"
            message = f"{message} {rng.choice(CHEERFUL)}".lstrip()
        self.text = f"<|system|>{message}<|end|>"

    def say(self, said, answer):
        """Add a turn. The user may leave out capitals and the final stop."""
        said = said.lower() if self.casual else capital(said)
        if self.rng.random() < 0.3:
            said = said.removesuffix("?")
        elif not said.endswith("?"):
            said += self.rng.choice("...!")     # three full stops to one exclamation mark
        if self.stop == "!":
            answer = answer.removesuffix(".").replace(". ", "! ") + "!"
        self.text += f"<|user|>{said}<|end|><|assistant|>{answer}<|end|>"

    def word(self):
        return draw(any_word, self.rng, self.held_out)

    def value(self, thing):
        value = a_value(thing, self.rng, self.held_out)
        return value.lower() if self.casual else value

    def spell(self, thing):
        return thing.replace("favourite", "favorite").replace("colour", "color") if self.american else thing

    def pick_thing(self):
        """A thing: 45% of THINGS, 20% of a relative, 35% made up. While there is no fact, a quarter of the
        picks is the user's name."""
        rng = self.rng
        if not self.facts and rng.random() < 0.25:
            return "name"
        if (kind := rng.random()) < 0.45:
            return self.spell(rng.choice(THINGS))
        if kind < 0.65:
            return f"{rng.choice(RELATIVES)}'s {rng.choice(RELATIVE_THINGS)}"
        thing = self.word() if kind < 0.85 else f"{self.word()} {self.word()}"
        return self.spell(rng.choice(["", "", "favourite ", "first "])) + thing

    def pick_unknown(self, avoid=()):
        """A thing without a note. A share of `alike` has a word of a thing that has a note: "favourite
        number" beside "favourite colour"."""
        while True:
            thing = self.pick_thing()
            if self.facts and self.rng.random() < self.alike:
                known, other = self.rng.choice(list(self.facts)[:self.alike_to]).split(), thing.split()
                first, last = (known[0], other[-1]) if self.rng.random() < 0.5 else (other[0], known[-1])
                thing = f"{first} {last}" if first != last else thing
            if thing not in self.facts and thing not in avoid:
                return thing

    def prefix(self):
        """One to six times a word, or "my" and a word, to begin a sentence with: "it my mof don't,"."""
        words = [self.opening_word() for _ in range(self.rng.randint(1, 6))]
        return " ".join(words) + self.rng.choice(["", "", ",", ":"])

    def opening_word(self):
        """Half of these are common words, one in eight is of OPENERS, and one in ten begins with "my"."""
        if (kind := self.rng.random()) < 0.5:
            return self.rng.choice(COMMON)
        if kind < 0.62:
            return self.rng.choice(OPENERS)
        return f"my {self.word()}" if kind < 0.72 else self.word()

    def wording(self, ways, ways_of_thing, thing):
        """A sentence about the thing: one of `ways`, or in training of `ways_of_thing`.

        In training, 40% of the sentences suit this thing only, if there are such. 40% of the others begin
        with random words and end with "my {thing} is {value}" (a question: "my {thing}", two of three times
        with one of ASK_ENDINGS), so that the model learns to understand sentences that it never saw."""
        rng = self.rng
        if self.wordings != "train":
            return rng.choice(ways[self.wordings])
        relative = thing.partition("'s ")[0]
        # "sister's name" is looked up as "'s name".
        special = ways_of_thing.get(thing.replace("favorite", "favourite").replace(relative + "'s", "'s"))
        if special and rng.random() < 0.4:
            return rng.choice(special).replace("{relative}", relative)
        way = rng.choice(ways["train"])
        if rng.random() < 0.4:
            endings = [" my {thing}"] * 5 + [f" my {{thing}} {word}" for word in ASK_ENDINGS]
            way = self.prefix() + (rng.choice(endings) if ways is ASK else " my {thing} is {value}")
        return way

    def tell(self, thing, value=None):
        """The user tells or changes a fact, and the assistant notes it. value: None makes one up."""
        rng, known = self.rng, thing in self.facts
        value = value or self.value(thing)
        if thing == self.last and self.wordings == "train" and rng.random() < 0.3:
            way = rng.choice(CORRECT if known else SUPPLY)
        elif self.sounds_like_a_change(known):
            way = self.wording(CHANGE, CHANGE_THING, thing)
        else:
            way = self.wording(TELL, TELL_THING, thing)
        if way.startswith("{value}") and not self.casual:
            value = capital(value)
        again = " again" if thing in self.changed else ""
        if known:
            self.changed.add(thing)
        self.facts[thing], self.last = value, thing
        note = f"has changed{again}" if known else f"becomes note {len(self.facts)}"
        return way.format(thing=thing, value=value), f"Your {thing} {note}: your {thing} is {value}."

    def sounds_like_a_change(self, known):
        """True if the sentence is drawn from CHANGE ("Actually, ..."), False if from TELL. In training it is
        True for half of the changes, and for three in ten of the new facts. So the words alone do not tell
        whether there is a note, and the model must look for it."""
        if self.wordings != "train":
            return known
        return self.rng.random() < (0.5 if known else 0.3)

    def ask(self, thing):
        """The user asks for a fact."""
        said = question(self.wording(ASK, ASK_THING, thing).format(thing=thing))
        self.last = thing
        if thing in self.facts:
            return said, f"Your {thing} is {self.facts[thing]}."
        return said, f"Your {thing}? I don't know that yet."

    def list_notes(self):
        """The user asks for all notes; in training, 40% of the sentences begin with random words."""
        said = self.rng.choice(LIST[self.wordings])
        if self.wordings == "train" and self.rng.random() < 0.4:
            ending = self.rng.choice([""] * 6 + LIST_ENDINGS)
            said = f"{self.prefix()} {self.rng.choice(NOTES)}{ending}"
        notes = [f"Note {number}: your {thing} is {value}."
                 for number, (thing, value) in enumerate(self.facts.items(), 1)]
        self.last = None
        return question(said), " ".join([*notes, f"Note {len(notes) + 1} is still empty."])

    def small_talk(self):
        if self.rng.random() < (0.1 if self.bot == "Tiny" else 0.4):
            return self.introduction()
        said, answer = self.rng.choice(list(SMALL_TALK.items()))
        you = f", {self.facts['name']}" if "name" in self.facts else ""
        return self.rng.choice(said.split("|")), answer.format(you=you)

    def introduction(self):
        """The user asks who the assistant is."""
        return self.rng.choice(WHO_ARE_YOU), f"I'm {self.bot}, a very small language model."

    def plus(self):
        a, b = self.rng.randrange(10), self.rng.randrange(10)
        return question(self.rng.choice(SUMS).format(a=a, b=b)), f"{a} plus {b} is {a + b}."

    def strange(self):
        return self.rng.choice(STRANGE).format(*(self.word() for _ in range(5))), NOT_UNDERSTOOD

    def chatter(self):
        """A turn about no fact: small talk, a sum, or a sentence that the assistant does not understand."""
        kind = self.rng.random()
        self.last = None
        return self.small_talk() if kind < 0.6 else self.plus() if kind < 0.85 else self.strange()


ALL_NOTES = "all notes"         # stands for a list in `rests_until`: lists rest as things do


class TrainingDialogue(Dialogue):
    """A dialogue of about `length` tokens whose user has random habits. A token is about three characters."""

    def __init__(self, rng, length):
        super().__init__(rng)
        if rng.random() < 0.3:
            self.system()
            if rng.random() < 0.3:
                self.say(*self.introduction())
        # The user's habits: how many facts at most, and how probable each kind of turn is when `turn` comes
        # to it.
        self.most_facts = rng.choice([1, 1, 2, 2, 3, 4, 6, 8, 12])
        self.telling, self.chatting = rng.choice([0.1, 0.3, 1]), rng.choice([0.05, 0.1, 0.4])
        self.changing, self.listing = rng.choice([0.3, 0.6]), rng.choice([0.1, 0.25])
        if length > 1024 and rng.random() < 0.7:    # many facts, so that many questions look far back
            self.most_facts, self.telling, self.changing = rng.randint(15, 50), rng.choice([0.4, 1]), 0.2
        if length <= 1024 and rng.random() < 0.3:   # the user tells all at once, and wants to see the notes
            self.most_facts, self.telling, self.chatting, self.listing = rng.randint(3, 8), 1, 0.05, 0.9
        if rng.random() < 0.5:      # most things share a word, so that the model must compare whole things
            self.alike, self.alike_to = 0.6, rng.choice([1, 2, 4, None])
        self.end = 2.9 * length             # characters
        self.far = 0.6 if length > 1024 else 0.15       # how probable it is that a rest is long
        self.rests_until = {}               # thing -> the length of the text when its rest is over
        self.rest(ALL_NOTES)

    def rest(self, *things):
        """For a while the user neither asks for these things nor changes them, unless at once. (A list names
        them all the same; it rests as ALL_NOTES.) A long rest takes at least 60% of the text still to come,
        so that the model must look far back; a short one takes 8% of it on average."""
        for thing in things:
            now = len(self.text)
            share = self.rng.uniform(0.6, 1) if self.rng.random() < self.far else self.rng.random() ** 2 / 4
            self.rests_until[thing] = now + share * (self.end - now)

    def rested(self):
        """The things whose rest is over."""
        return [thing for thing, until in self.rests_until.items() if until <= len(self.text)]

    def turn(self):
        """Add a turn: the user tells a new fact, chats, changes a fact, asks for all notes, for one, or for a
        fact without a note."""
        rng, rested = self.rng, self.rested()
        facts = [thing for thing in rested if thing != ALL_NOTES]
        changes = rng.random() < self.changing      # drawn even if unused: else all dialogues would be others
        if len(self.facts) < self.most_facts and rng.random() < (self.telling if self.facts else 0.5):
            self.say(*self.tell_new())
        elif rng.random() < self.chatting:
            self.say(*self.chatter())
        elif changes and (facts or self.last in self.facts):
            at_once = self.last in self.facts and rng.random() < 0.5
            thing = self.last if at_once else rng.choice(facts or [self.last])
            self.say(*self.tell(thing))
            self.rest(thing)
        elif ALL_NOTES in rested and len(self.facts) <= 12 and rng.random() < self.listing:
            self.say(*self.list_notes())
            self.rest(*self.rests_until)
        elif facts and rng.random() < 0.8:
            thing = rng.choice(facts)
            self.say(*self.ask(thing))
            self.rest(thing)
        elif rng.random() < 0.5:
            self.say(*self.ask(self.pick_unknown()))
        else:
            self.say(*self.chatter())

    def tell_new(self):
        """The user tells a new fact, at times the one just asked for; one message in four tells more."""
        rng = self.rng
        asked = self.last if self.last not in self.facts and rng.random() < 0.4 else None
        thing = asked or self.pick_unknown()
        said, answer = self.tell(thing)
        self.rest(thing)
        while rng.random() < 0.3 and len(self.facts) < self.most_facts:
            thing = self.pick_unknown()
            more, noted = self.tell(thing)
            joint = rng.choice([" and ", " and ", ". ", ", and "])
            if joint == ". ":
                more = capital(more)
            elif not more.startswith(("I ", "I'm", self.facts[thing])):
                more = more[0].lower() + more[1:]       # a value keeps the capital that the note copies
            said, answer = said + joint + more, f"{answer} {noted}"
            self.rest(thing)
        return said, answer


def dialogue(rng, length):
    """The text of a dialogue to train on: "<|user|>Hi, I'm Ada.<|end|><|assistant|>Your name becomes note 1:
    your name is Ada.<|end|><|user|>..."; some begin with "<|system|>Be cheerful.<|end|>"."""
    chat = TrainingDialogue(rng, length)
    while len(chat.text) < chat.end:
        chat.turn()
    return chat.text
