"""What users say, and the answers to small talk: the words that dialogues.py fills in and puts in order.

sentences.json has most of the sentences with which users tell or change a fact, ask for one, or ask for all
notes. For each of these kinds it has three lists. We train on "train", measured with "choice" while we chose
the settings, and with "final" after that. ("final" then helped us to choose, too: see the README.) Those
of "final" are by a language model that saw none of the others. Some lists below have an entry more than once,
so that dialogues.py draws it more often.
"""
import json
import re
from pathlib import Path

# What every sentence of a kind has once, in the order of `sorted`
BLANKS = {"tell": ["my {thing}", "{value}"], "change": ["my {thing}", "{value}"], "ask": ["my {thing}"],
          "list": []}


def check(kind, sentence):
    """Raise ValueError if the sentence lacks one of its BLANKS, has others, or ends with . ? or !"""
    blanks = re.findall(r"my \{thing\}|\{.*?\}", sentence.replace("My {", "my {"))
    if sorted(blanks) != BLANKS[kind] or sentence.endswith((".", "?", "!")):
        raise ValueError(f"{sentence!r} in {kind!r} of sentences.json must have "
                         f"{' and '.join(BLANKS[kind]) or 'no braces'}, and no . ? or ! at its end")


def read_sentences():
    """Read and check sentences.json. Returns: kind -> "train", "choice" or "final" -> sentences."""
    sentences = json.loads(Path(__file__).with_name("sentences.json").read_text())
    for kind, sets in sentences.items():
        for sentence in sum(sets.values(), []):
            check(kind, sentence)
    return sentences


SENTENCES = read_sentences()
TELL, CHANGE, ASK, LIST = (SENTENCES[kind] for kind in ("tell", "change", "ask", "list"))
THINGS = ["name", "age", "home city", "job", "hobby", "pet", "car", "birthday", "language", "school",
          "lucky number", "shoe size", "best friend", "favourite colour", "favourite food", "favourite drink",
          "favourite film", "favourite book", "favourite song", "favourite animal", "favourite sport"]
# More things of everyday life; together they are drawn half as often as THINGS.
MORE_THINGS = (
    "account number, accountant, address, agent, alarm, alarm code, allergy, allergy medicine, "
    "anniversary, aquarium, backpack, backup code, badge number, band, bank, bank pin, barber, bedtime, "
    "bench press, best subject, best time, biggest fear, bike, bike lock, bike lock code, bin day, birth "
    "year, birthplace, blood pressure, blood sugar, blood type, boat, booking code, breakfast, budget, "
    "bus, bus line, bus pass, bus stop, cabin number, calendar, car colour, car key, car model, career, "
    "case number, celebrity crush, character class, cheat day, check-in time, childhood nickname, "
    "childhood pet, choir, cholesterol, church, citizenship, class, classroom, clinic, club, coat, coffee "
    "machine, coffee order, collar size, college, comfort food, commute, company, confirmation code, "
    "country, course, curfew, curtain colour, customer number, daily budget, daily goal, dance class, "
    "date of birth, deadline, degree, delivery day, dentist, department, desk, desk number, destination, "
    "diagnosis, diet, doctor's appointment, door code, dose, dream, dream job, dress size, due date, "
    "editor, electric bill, electrician, email, emergency contact, employer, engine, evening snack, exam, "
    "exam date, eye colour, family name, favourite artist, favourite author, favourite band, favourite "
    "cheese, favourite city, favourite cocktail, favourite coffee, favourite day of the week, favourite "
    "dessert, favourite emoji, favourite flower, favourite fruit, favourite game, favourite holiday, "
    "favourite ice cream, favourite month, favourite movie, favourite number, favourite pen, favourite "
    "pizza, favourite place, favourite quote, favourite season, favourite singer, favourite smell, "
    "favourite snack, favourite soup, favourite spice, favourite tea, favourite teacher, favourite team, "
    "favourite toy, favourite tree, favourite word, first car, first concert, first crush, first job, "
    "first language, first name, first pet, fitness goal, flight number, floor, frequent flyer number, "
    "front door code, full name, gamertag, garage, garden, gate, gate code, gate number, gender, gift "
    "card, glasses prescription, goal, grade, guild, guitar, gym, gym day, gym membership number, hair "
    "colour, haircut, half marathon time, handle, handwriting, hat size, heart rate, height, hero, "
    "holiday, home address, hometown, hometown team, honeymoon, hotel, hotel name, hotel room, house, "
    "house number, iban, ice cream flavour, inseam, instrument, insurance number, internet provider, "
    "jacket, jacket size, kayak, keyboard, landline, laptop, laptop model, last name, laundry day, "
    "lawyer, lesson, library card number, license plate, life motto, locker, locker code, locker number, "
    "lucky charm, lucky day, lunch, lunch break, lunch order, maiden name, major, marathon time, marital "
    "status, market day, maths teacher, mechanic, medicine, meeting, meeting room, middle name, mobile "
    "number, model, monitor, morning routine, mother tongue, motorbike, motto, mountain, moving date, "
    "museum, nationality, native country, native language, necklace, new address, new job, new phone "
    "number, new year's resolution, newspaper, next appointment, next exam, next haircut, nickname, "
    "notebook, number plate, office, office number, old car, old school, orchid, order, order number, "
    "oven temperature, paint colour, parking spot, passcode, passport number, password, pension, pension "
    "number, personal best, pet peeve, pharmacy, phone, phone model, phone number, phone pin, piano "
    "teacher, pin, pizza order, pizza topping, plant, platform, plumber, policy number, position, "
    "postcode, printer, programming language, project name, pulse, quest, reading goal, reddit name, "
    "religion, rent, repair shop, reservation, restaurant, resting pulse, ring size, ringtone, river, "
    "role model, route, router password, running club, safe word, salary, sandwich, savings goal, "
    "scooter, screen name, seat, seat number, second language, secret ingredient, shift, shoes, side job, "
    "side project, ski pass, skill, sleep goal, smartphone, snack, social security number, socks, sofa, "
    "sort code, sourdough starter, specialty, spirit animal, star sign, state, steam name, step goal, "
    "store, street, strength, student number, study subject, suitcase, superpower, surgery date, surname, "
    "swimming coach, table number, tattoo, tax number, tea, team, telephone number, tent, therapist "
    "appointment, thesis topic, title, token, town, tracking number, tractor, train pass, train platform, "
    "train time, trainers, tree, tyre pressure, university, user id, username, vaccine, van, vehicle, "
    "vet, vet appointment, video game, village shop, visa, visa number, voucher code, waist size, wake up "
    "time, wake-up time, wall colour, wallet, watch, weakness, website, wedding date, wedding song, "
    "wedding venue, weekday, weekend plan, weight, wifi code, wifi name, wifi password, wine, work "
    "address, work email, workplace, yoga class, yoga teacher, youth club, zip code, zodiac sign").split(", ")
# The user also tells facts about these, "my boss's name", of the kinds in RELATIVE_THINGS.
RELATIVE_THINGS = ["name", "name", "name", "age", "age", "job", "home city", "hobby"]
RELATIVES = ["sister", "brother", "mother", "father", "wife", "husband", "son", "daughter", "boss",
             "neighbour", "dog", "cat", "uncle", "aunt", "grandma", "grandpa", "girlfriend", "boyfriend",
             "mum", "mom", "dad", "friend", "cousin", "partner", "teacher", "doctor"]
# Training has these, too; some are things as well ("best friend"). We measure only with those of RELATIVES.
MORE_RELATIVES = ["best friend", "best mate", "pet", "niece", "nephew", "fiancé", "ex", "flatmate",
                  "roommate", "colleague", "manager", "landlord", "dentist", "therapist", "coach", "puppy",
                  "kitten", "horse", "parrot", "rabbit", "boat", "company", "stepdad", "stepmum", "baby",
                  "little sister", "older brother", "eldest son", "mother-in-law", "godson", "twin"]
WOMEN = {"sister", "mother", "wife", "daughter", "aunt", "grandma", "girlfriend", "mum", "mom", "niece",
         "stepmum", "little sister", "mother-in-law"}
MEN = {"brother", "father", "husband", "son", "uncle", "grandpa", "boyfriend", "dad", "nephew", "stepdad",
       "older brother", "eldest son", "godson"}
# Users tell these with "I have a dog", too. Training makes up other pets, and the tests have yet others.
PETS = ["a dog", "a cat", "two cats", "two dogs", "a puppy", "a kitten", "a poodle", "a labrador", "a budgie",
        "a guinea pig", "a horse", "a pony", "a tortoise", "an old cat", "a black cat", "a gecko"]

# "She is six": the numbers up to 99 in words. Only training has them, for one age in ten.
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ONES = "one two three four five six seven eight nine".split()
AGES = [*ONES, *"ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split(),
        *TENS, *(f"{ten}-{one}" for ten in TENS for one in ONES)]
# Patterns of values that have the words of real ones, only for training: "level {n}, {w} {n}". {w} becomes a
# word, {W} one with a capital, {n} a number. They need not suit the thing.
PHRASES = [
    "{n} and a half", "{n} {w} and a half", "half {w}, half {w}", "half past {n}", "quarter to {n}",
    "from {n} to {n}", "from {n} to half past {n}", "between {n} and {n}", "{n} over {n}", "{n} by {n}",
    "{n} out of {n}", "{n} {w} a {w}", "{n} a {w}", "{n} {w} every {w}", "{n} times a {w}", "{n} inches",
    "{n} kilos", "{n} euros", "{n} million {w}", "{n} percent of the {w}", "{n} minutes and {n} seconds",
    "{n} hours", "under {n} {w}", "about {n} {w}", "just over {n} {w}", "almost {n}", "up to {n} {w}",
    "every other {w}", "every {w} at {n}", "every {w} night", "every second {W}", "{W} at {n}",
    "{W} mornings", "{W} evening at {n}", "{W} and {W} nights", "{W} the {n}th", "the {n}th of {W}",
    "{W} {n}th", "{n} {W} {n}", "the last {w} of {W}", "the first {W} in {W}", "the end of {W}",
    "the night before {W}", "the {w} after {W}", "some time in {W}", "early in {W}", "late {W}",
    "{w} from {n} to {n}", "{n} in the {w}", "{w} in the {w}", "{w} before {w}", "{w} after {w}",
    "level {n}, {w} {n}", "floor {n}, room {n}", "row {n}, seat {n}", "unit {n}, {W} Park",
    "flat {n}, {n} {W} Road", "{n} {W} Street, {W}", "{n} {W} Avenue", "{n} Rue de {W}, {W}", "{W}, {W}",
    "{w} opposite the {w}", "{w} next to the {w}", "{W} Lane behind the {w}", "{w} under the {w}",
    "the {w} across the {w}", "the {w} near {W} Station", "a {w} outside {W}", "the corner of {W} and {W}",
    "a {w} at a {w}", "a {w} in a {w}", "a {w} at the {w}", "{w} in a {w} shop", "{w} at the {w}",
    "a part-time {w}", "a retired {w}", "head of {w}", "{w} manager", "{w} assistant at {W}",
    "teaching {w} to {w}", "driving a {w}", "fixing old {w}", "playing the {w}", "playing {w} with {w}",
    "watching {w} on the {w}", "making {w} out of {w}", "collecting {w}", "reading about {w}",
    "learning {W}", "jogging {n} {w}", "singing in a {w}", "walking the {w}", "growing {w} and {w}",
    "drink less {w}", "eat more {w}", "call {w} every {w}", "to see the {w} {w}", "to learn {w}",
    "to {w} by {W}", "to stop {w}", "finish the {w}", "save {n} a {w}", "less {w}, more {w}",
    "{w} but no {w}", "{w} without {w}", "{w} with {w}", "{w} with {w} and {w}",
    "{w} with extra {w}", "{w} on {w}", "{w} on the side", "a {w} with {w} {w}", "a small {w}, no {w}",
    "a large {w} {w}", "black with one {w}", "{w} and {w}, never {w}",
    "grandma's {w} {w}", "a {w} called {W}", "an old {w} named {W}", "a {w} I found", "{w} {w} by {W} {W}",
    "The {W} of {W}", "The {W} and the {W}", "{W} in the {W}", "The {W} {W}, part {n}", "{W} {n}: the {w}",
    "{w} off", "{w} down the {w}", "{w} {w} theme", "one {w} at a time",
    "never {w} a {w}", "always {w} {w}", "{w} and {w} wins the {w}",
    "{w} your {w}", "being {w}",
    "dark {w}", "a {w} shade of {w}", "{w} with {w} stripes", "{w} and white", "light {w}",
    "a {n} {W} {W}", "an old {W}", "a red {W} {W}", "a second-hand {w}",
    "{W} {n} {W}", "{W} {n}, {W}", "{n}, {n} and {n}", "{n} and {n}", "{n} or {n}",
    "{w} or {w}", "{W} or {W}", "{w}, {w} and {w}", "{W} and {W}", "{w} plus {w}", "half a {w}",
    "old {W} {W}", "Aunt {W}", "Mr {W}", "Dr {W} {W}", "two {w} and a {w}"]

# In TELL_THING, CHANGE_THING and ASK_THING: sentences that suit one thing only. ("I'm {value}" suits three: a
# number is the age, "a bluck" the job, and anything else the name. The same goes for "{she} is {value}".)
# "'s name" is the name of any relative. {she} becomes "my sister", or at times "our sister", or "she" if the
# last fact was about her. dialogues.py adds question marks.
TELL_THING = {
    "name": ["I'm {value}", "I am {value}", "Call me {value}", "Hi, I'm {value}", "Hello, I'm {value}",
             "Hi, my name is {value}", "Please call me {value}", "Hello, my name is {value}",
             "Hey, I'm {value}", "Hi! I'm {value}", "I'm called {value}", "My name's {value}",
             "You can call me {value}", "I go by {value}", "{value} here", "This is {value}",
             "Good morning! I'm {value}", "Good evening, my name is {value}", "Hi bot, I'm {value}"],
    "age": ["I'm {value} years old", "I am {value} years old", "I turned {value}", "I'm {value}"],
    "home city": ["I live in {value}", "I'm from {value}", "I come from {value}", "I live in {value}",
                  "My home is in {value}", "I moved to {value}"],
    "job": ["I work as {value}", "I'm working as {value}", "I earn my money as {value}", "I'm {value}",
            "I am {value}", "I'm {value} by profession"],
    "hobby": ["I like {value}", "In my free time I do {value}", "I love {value}", "I enjoy {value}",
              "I'm into {value}", "I do {value} in my free time"],
    "pet": ["I have {value} as a pet", "I have a pet, {value}", "I have {value} at home",
            "I've got {value} as a pet"],
    "car": ["I drive {value}", "I bought {value}"],
    "birthday": ["I was born on {value}", "I have my birthday on {value}",
                 "My birthday is on {value}"],
    "anniversary": ["My anniversary is on {value}"],
    "meeting": ["My meeting is on {value}", "My meeting is at {value}", "I have a meeting at {value}"],
    "language": ["I speak {value}"],
    "school": ["I go to {value} school", "I study at {value}"],
    "favourite food": ["I love to eat {value}", "I love eating {value}", "I like to eat {value}"],
    "favourite drink": ["I love to drink {value}", "I love drinking {value}", "I like to drink {value}"],
    "allergy": ["I'm allergic to {value}", "I have an allergy to {value}"],
    "birthplace": ["I was born in {value}"],
    "workplace": ["I work at {value}"],
    "employer": ["I work for {value}"],
    "major": ["I study {value}", "I'm studying {value}"],
    "instrument": ["I play the {value}"],
    "team": ["I support {value}"],
    "weight": ["I weigh {value}"],
    "'s name": ["{she} is called {value}", "{value} is my {relative}",
                "I have a {relative} called {value}", "{she} is {value}",
                "I have a {relative} named {value}", "I have a {relative}, {value}",
                "I have a little {relative} called {value}", "I have one {relative}, {value}",
                "We have a {relative} called {value}", "We've got a lovely {relative} called {value}",
                "I've got a {relative} called {value}", "I've got a {relative} named {value}"],
    "'s age": ["{she} is {value} years old", "{she} turned {value}", "{she} is {value}"],
    "'s home city": ["{she} lives in {value}", "{she} comes from {value}", "{she} is from {value}"],
    "'s job": ["{she} works as {value}", "{she} is {value}"],
    "'s hobby": ["{she} likes {value}", "{she} loves {value}", "{she} enjoys {value}"],
}
CHANGE_THING = {
    "name": ["Call me {value} instead", "I'm called {value} now", "Now I'm {value}"],
    "age": ["I'm {value} years old now", "Now I'm {value} years old"],
    "home city": ["I moved to {value}", "I live in {value} now", "Now I live in {value}",
                  "I've moved to {value}", "I just moved to {value}"],
    "job": ["I work as {value} now", "Now I work as {value}", "I changed jobs, I work as {value} now",
            "I'm {value} now"],
    "hobby": ["I like {value} now", "Now I like {value}"],
    "car": ["I drive {value} now", "Now I drive {value}"],
}
# In these the user names no thing, and means the thing of the last fact. If there is a note of it, the
# user corrects the note: "My age is 4." "No, it's 5." If there is none, the user has just asked for it, and
# now supplies it: "What is my age?" "It's 5."
CORRECT = ["No, it's {value}", "Sorry, I meant {value}", "I meant {value}", "No, {value}",
           "Wait, it is {value}", "No, it is {value}", "Sorry, it's {value}"]
SUPPLY = ["It's {value}", "It is {value}", "That's {value}", "Well, it's {value}", "Oh, it is {value}"]
# In these the user names the old value, too.
CONTRAST = ["My {thing} isn't {old}, it's {value}", "My {thing} is not {old}, it is {value}",
            "My {thing} isn't {old} but {value}", "My {thing} is {value}, not {old}",
            "It's {value} and not {old}, my {thing}", "Not {old}, my {thing} is {value}",
            "My {thing} was {old}, now it's {value}", "I said my {thing} is {old}, but it's {value}"]
# In these the user fills in a form: "Job: a nurse"
FORM = ["{thing}: {value}", "{thing}: {value}", "{thing} = {value}", "{thing} - {value}",
        "{thing} is {value}"]
# What may follow the thing in a question: "What is my hobby again?"
ASK_ENDINGS = ["is", "is", "is", "was", "was", "was", "again", "now", "for me", "please", "once more",
               "at all", "with me", "in your notes", "on record", "noted down", "by any chance",
               "at the moment", "so far", "already", "yet", "today", "too", "to me", "for us", "if you can",
               "from earlier", "back then", "that I told you", "I gave you", "should be", "might be",
               "would be", "is again", "was again", "right away", "somewhere", "in there", "from memory",
               "as well", "then", "saved", "handy", "real quick", "pls", "just now", "earlier", "last time",
               "though", "or not", "exactly", "by heart", "for this form", "these days", "on file", "stored",
               "in your memory", "like I said", "before", "currently", "tonight", "when we talked", "are",
               "do you know", "do you remember", "do you still know", "btw", "by the way", "lol", "thanks",
               "according to you", "I told you", "I mentioned", "written down anywhere", "stored somewhere",
               "or have you forgotten", "or did I not say", "if I may ask", "just checking", "anyway",
               "one more time", "called", "that you have noted", "you have for me", "you saved for me",
               "to be sure", "based on what I said", "can you tell me", "could you remind me", "still",
               "after all", "I forgot", "tell me", "right now", "actually", "supposed to be", "thx"]
# What may stand before a sentence that begins with a value: "btw chess is my hobby"
OPENINGS = ["btw", "btw", "by the way", "so", "so", "ok", "okay", "well", "well", "hey", "oh", "hi", "hello",
            "also", "yes", "yeah", "sorry", "actually", "right", "listen", "look", "fyi", "hmm", "ah", "um",
            "please note", "please remember", "just so you know", "for the record", "no", "no", "wait",
            "correction", "update", "as I said", "you know", "I think", "I believe", "I'd say", "and", "then"]
# What users say before or after something else, or alone: "I'm late, so my hobby is chess". Many begin as a
# fact does ("I love how this works", "my back hurts"), so the model must read on. None begins "I'm a ...":
# that would tell the job.
ASIDES = (
    "I'm stuck at work, I'm late, I'm in a hurry, I'm on the train, I'm on my phone, I'm at work, I'm bad "
    "at this, I'm terrible with details, I'm filling in a form, I'm new here, I'm not sure this works, "
    "I'm only testing, I'm typing with one hand, I'm waiting for the bus, I'm in the kitchen, I'm cooking "
    "dinner, I'm at the doctor's, I'm at the airport, I'm in a meeting, I'm half asleep, I'm home at "
    "last, I'm happy to share this, I'm sorry to bother you, I'm glad you asked, I'm getting old, I'm "
    "always losing things, I'm quite forgetful, I'm supposed to tell you, I'm told you remember things, "
    "I'm going to say this once, I'm trying to be organised, I'm just about to leave, I'm sitting in the "
    "garden, I'm out of breath, I'm walking the dog, I'm sick of forms, I'm cold and hungry, I am in a "
    "rush, I am on holiday, I am running out of time, I am so busy today, I am not good with names, I was "
    "asleep, I was told to write this down, I was wrong about you, I've had a long day, I've just got "
    "home, I've got five minutes, I've got news, I've been busy, I've forgotten everything, I've never "
    "done this before, I've got a cold, I have a headache, I have a lot on my mind, I have no pen here, I "
    "like talking to you, I love how this works, I live a busy life, I work too much, I come here a lot, "
    "I drive everyone mad with this, I need your help, I can't find anything, I don't have much time, I "
    "hope you're well, I just got back, I keep losing bits of paper, I should have said this before, I "
    "thought about it all night, it's raining here, it's late, it's been a long week, it's me again, it's "
    "nothing special, it's a bit silly, it's hot today, it's Monday again, we're in the car, we're having "
    "lunch, we're moving house, they're asking for it here, you're a machine, you're new to me, you are "
    "so helpful, this is important, this is a bit private, this is for the form, that's life, the battery "
    "is nearly empty, the baby is crying, the kettle is on, the dog ate the list, there's so much going "
    "on, there is a queue behind me, lunch is nearly over, work is crazy, time flies, nobody listens to "
    "me, somebody has to know, two things today, one more thing, first things first, long story short, "
    "before I forget, while I think of it, if you have a second, when you have a moment, after a lot of "
    "thought, between you and me, for what it's worth, as far as I know, in case I get hit by a bus, at "
    "my age you forget things, at my desk again, for my own sanity, for my own records, for my peace of "
    "mind, in my opinion it matters, in my family we write things down, in my line of work you learn to "
    "be exact, on my way home, on my lunch break, on my second coffee, to my surprise you work, sorry for "
    "my English, sorry about my spelling, excuse my typing, pardon my manners, forgive my bluntness, my "
    "doctor told me to write things down, my daughter set this up for me, my son says you remember "
    "things, my wife wants you to know this, my husband sent me here, my boss keeps asking, my friends "
    "laugh about it, my mother always asks, my teacher wants to know, my colleagues know this already, my "
    "memory fails me, my head hurts, my phone keeps ringing, my cat just walked over the keyboard, my dog "
    "wants out, my train leaves soon, my tea went cold, my glasses broke, my shift starts soon, my back "
    "hurts, my kids won't stop shouting, my neighbour gave me this app, my sister recommended you, my "
    "grandson helps me type, I can't feel my fingers, I lost my notebook, I left my glasses at home, I "
    "dropped my phone, I never remember my own things, I'm not in my office, I'm between my meetings, I'm "
    "on my break, I've got my hands full, I've lost my pen, let me finish my coffee first, while my code "
    "compiles, while my dinner cooks, before my next meeting, before my battery dies, after my long day, "
    "with my luck I'd forget it, all my notes are gone, thanks for your patience with my questions, don't "
    "laugh at my spelling, don't mind my typos, in my humble opinion you need this, from my side just "
    "this, here's one from my list, add this to my file, this goes on my list, one for my profile, "
    "something about my life, something from my past, the answer to your question, for the form at my "
    "office, ngl, lowkey, no cap, honestly, to be fair, hand on heart, good news, guess what, quick one, "
    "fun fact, true story, here's the thing, it's dad again, hi from the hostel, sorry I'm late to this, "
    "got a minute, got a second, just a thought, since you ask, since we're talking, as promised, as you "
    "asked, for the trip, for the paperwork, should anyone ask, if anyone asks, not that it matters, "
    "believe it or not").split(", ")
# What may follow a value: "My hobby is chess btw"
VALUE_ENDINGS = ["lol", "lol", "btw", "btw", "btw", "by the way", "by the way", "thanks", "thanks", "haha",
                 "please", "please", "pls", "thx", "thank you", "tbh", "fyi", "ok", "okay", "yeah", "though",
                 "too", "as well", "actually", "anyway", "I think", "I think", "I guess", "I believe",
                 "I suppose", "I hope that helps", "I swear", "if that helps", "if that helps",
                 "if that's any use to you", "if you want to know", "if you must know", "if it matters",
                 "if you need it", "if you were wondering", "in case you need it", "in case you wonder",
                 "in case that helps", "in case it comes up", "just so you know", "just fyi", "just in case",
                 "so please remember it", "so keep that in mind", "so write it down", "so remember that",
                 "so now you know", "because you asked", "since you asked", "but you knew that",
                 "but don't tell anyone", "but that may change", "for the record", "for now", "for sure",
                 "for your information", "for future reference", "for your files", "these days", "nowadays",
                 "currently", "lately", "at the moment", "right now", "after all", "as of today",
                 "as you know", "as I said", "like I said", "from now on", "from today on", "of course",
                 "to be exact", "to be honest", "and I love it", "and I want that on file",
                 "and I'm proud of it", "and I keep forgetting it", "and I need you to remember it",
                 "and not what I said before", "and that's final", "and please don't forget it", "instead",
                 "again", "still", "already", "remember that", "don't forget it", "can you remember that",
                 "can you note that", "could you save that", "would you believe it", "which is nice",
                 "which you should know", "obviously", "honestly", "really", "sorry", "don't lose it",
                 "make a note of it", "got it", "you know", "man", "bro", "mate",
                 "last week", "last month", "last year", "this week", "yesterday",
                 "or something like that", "until further notice", "with immediate effect", "that's all",
                 "that is all for now", "no matter what I said before", "in fact", "in truth", "in reality",
                 "in the end", "in my case", "in all honesty"]
ASK_THING = {
    "name": ["Who am I", "What am I called", "Do you know who I am", "Do you remember who I am"],
    "age": ["How old am I"],
    "home city": ["Where do I live", "Where am I from", "Where is my home", "Which city do I live in",
                  "What city do I live in"],
    "job": ["What do I do for a living", "What do I work as", "What is my work", "What do I do for work"],
    "hobby": ["What do I like", "What do I do in my free time", "What do I enjoy", "What do I love"],
    "car": ["What do I drive", "What car do I drive", "Which car do I drive", "What car do I have"],
    "birthday": ["When was I born", "When is my birthday"],
    "language": ["What do I speak", "Which language do I speak"],
    "school": ["Where do I study", "Where do I go to school"],
    "pet": ["Which pet do I have", "What pet do I have"],
    "best friend": ["Who is my best friend"],
    "favourite colour": ["What colour do I like", "Which colour do I like", "What colour do I like best"],
    "favourite food": ["What do I love to eat", "What do I like to eat", "What food do I like"],
    "favourite drink": ["What do I love to drink", "What do I like to drink", "What drink do I like"],
    "favourite film": ["Which film do I like best", "What film do I like"],
    "favourite book": ["Which book do I like best", "What book do I like"],
    "favourite song": ["Which song do I like best", "What song do I like"],
    "favourite animal": ["Which animal do I like best", "What animal do I like"],
    "favourite sport": ["Which sport do I like best", "What sport do I like"],
    "allergy": ["What am I allergic to"],
    "birthplace": ["Where was I born"],
    "anniversary": ["When is my anniversary"],
    "meeting": ["When is my meeting"],
    "rent": ["How much is my rent"],
    "workplace": ["Where do I work"],
    "employer": ["Who do I work for"],
    "major": ["What do I study", "What am I studying"],
    "instrument": ["What do I play", "Which instrument do I play"],
    "team": ["Which team do I support"],
    "weight": ["How much do I weigh"],
    "'s name": ["What is {she} called", "Who is {she}", "Who's my {relative}",
                "What's my {relative} called", "What's the name of my {relative}"],
    "'s age": ["How old is {she}"],
    "'s home city": ["Where does {she} live", "Where is {she} from"],
    "'s job": ["What does {she} do for a living", "What does {she} work as", "What does {she} do"],
    "'s hobby": ["What does {she} like", "What does {she} enjoy"],
}
# What users call all their notes: "Show me your notes", "Tell me about me"
ALL_NOTES = ["your notes", "everything", "what you know", "everything you know", "what you know about me",
             "everything you know about me", "all facts about me", "what I told you", "everything I told you",
             "the things I told you", "what you remember", "what you have noted", "my facts", "the notes",
             "all you know", "about me", "all my info", "my details", "my data", "my profile", "my file",
             "my info", "the facts", "the facts about me", "all the facts you have", "a recap", "a summary",
             "an overview", "a summary of what I said", "an overview of my details", "a list of my facts",
             "what you've learned", "what you've learned about me", "what you've saved",
             "what you've got on me", "what you have on me", "all you've heard from me", "all of it",
             "all of my notes", "each thing I told you", "every fact", "every detail", "everything I said",
             "everything I've said about myself", "everything you have", "the things you know",
             "the things you've noted about me", "what's in your memory", "what's in your notes",
             "what I've told you", "what we talked about", "stuff about me", "my stuff",
             "the details I gave you", "all the notes you took", "my list", "my whole list", "my record",
             "my complete record", "my whole file", "my notes", "my full profile", "the list",
             "the full list", "the whole list", "a rundown", "a complete list", "a full overview",
             "the whole record", "everything in my file", "everything on record", "what's on my list",
             "what's on file", "all entries", "all that you have stored", "the lot", "the whole lot"]
# What may follow one of ALL_NOTES: "Show me your notes again"
LIST_ENDINGS = ["again", "now", "for me", "please", "with me", "to me", "so far", "in order",
                "one by one", "as a list", "if you can", "real quick", "pls", "thanks", "at once"]
WHO_ARE_YOU = ["Who are you?", "What are you?", "What is your name?", "What's your name?", "Are you a bot?",
               "Introduce yourself"]
# The user's sentences, separated by |, and the answer to all of them. {thing} becomes a thing, with a note or
# without, and {you} becomes ", Ada" if the assistant has noted that the user's name is Ada.
SMALL_TALK = {
    "Thanks|Thank you|Thanks a lot|Thank you very much|Great, thanks|Cheers|Thx|Ty|OK, thanks|Thanks, bot|"
    "Perfect, thanks|Thanks, that's right|Thanks for your help|Thank you so much|Good bot|Many thanks":
        "You're welcome{you}.",
    "Bye|Goodbye|See you|See you later|Bye bye|Good night|See you tomorrow|Thanks, bye|Thx, bye|OK, bye|"
    "OK gtg, bye|I have to go|I have to go now, bye|Have a nice day|Have a good day|Take care|Bye for now|"
    "Thank you, bye|Talk to you later|That's all, bye":
        "Goodbye{you}.",
    "Hi|Hello|Hey|Good morning|Good evening|Hi there|Hello there|Hello again|Hiya|Yo|Good afternoon|"
    "Hello bot|Hi bot|Hey there|Hey you|Hi, I'm back|I'm back|Is anybody there?|Are you there?|Heya|Hii":
        "Hello{you}.",
    "How are you?|How are you doing?|How is it going?|Are you well?|How do you do?|How's it going?|"
    "How are things?|Hi, how are you?|Hi there, how's it going?|Hey, how are you?|How's your day?|"
    "How are you today?|Hi, how are u|How are u?|Hello, how are you?|Are you OK?|How do you feel?|"
    "Hello, how are you doing today?": "I'm fine, thank you.",
    "I'm fine|I'm good, thanks|I'm fine, thanks|Fine, thanks|I'm well|I'm happy|I'm great|Very well|"
    "I'm fine too|I'm fine, too|I'm good|Not bad|Pretty good|I'm OK":
        "I'm glad to hear that.",
    "I'm tired|I'm sad|I'm bored|I'm hungry|I'm sick|I'm not well|Not so good|I'm a bit tired|"
    "I'm so tired today|I feel sick": "I'm sorry to hear that.",
    "What can you do?|Help|Can you help me?|How can you help me?|What should I say?|How does this work?":
        "I remember what you tell me. Try: My lucky number is 7.",
    "How old are you?|When were you born?": "I was trained in 2026.",
    "Where are you from?|Who made you?|Who trained you?": "A small script has made me.",
    "OK|Okay|I see|Right|Yes|OK, cool|Haha|Lol|All right|Yep|Exactly|Hm|Sure|Yeah": "All right.",
    "Good|Great|Nice|Cool|Well done|Very good|Correct|You're good|You're smart|Wow|Awesome|Perfect|"
    "That's right|That's good for a small bot|Good memory|Nice one|Yes, that's right|Impressive":
        "I'm glad you think so.",
    "That's wrong|Wrong|That is not true|Are you sure?|Really?|No|Not at all|No, that's wrong|Nope|"
    "That's not right":
        "I may be wrong. I'm a very small model.",
    "What is your favourite colour?|What's your favorite color?|Do you like colours?":
        "I like blue, like the sky.",
    "Do you like me?|Do you like music?|Do you like books?|Do you love me?": "I like talking with you.",
    "Nice to meet you|Pleased to meet you": "Nice to meet you, too.",
    "Forget everything|Forget all that|Forget that|Delete my notes|Forget me|Forget my {thing}|"
    "Delete my {thing}|Please forget my {thing}": "I can't forget what you told me.",
    "What's new?|What's up?|What are you doing?": "I'm waiting for you to tell me something.",
    "Tell me a joke|Make me laugh|A joke, please|Do you know a joke?":
        "Why did the token cross the bus? To get to the other cache.",
    "Another joke, please|Tell me another joke|Another one|One more joke":
        "I would tell you a joke about memory, but I forgot it.",
}
# The assistant does not understand these. {} becomes a word.
STRANGE = ["What is the {} of {}?", "What is {}?", "Who is {}?", "How do I {} a {}?", "Why is the {} {}?",
           "Can you {} the {}?", "{}", "{} {}", "{} {} {}", "{} {} {} {} {}?", "Write a {} about {}",
           "Tell me about {}", "Explain {}", "Where is {}?", "How many {} are in {}?", "The {} is {}",
           "Do you know {}?", "When did {} {}?", "Translate {} to {}", "Is {} a {}?", "Let's {}",
           "I {} the {}", "I {} a {}", "Did I {} {}?", "Is my {} {}?", "I don't have {}",
           "I don't have any {}", "I have no {}", "I don't {} {}", "I'm not {}", "I never {} {}",
           "Do I have {}?", "Should I {} {}?", "I have an {} tomorrow", "I have a {} today",
           "I had a {}", "I need a {}", "I want {}", "I saw a {}", "I got {} {}", "She {} {}", "We {} the {}"]
NOT_UNDERSTOOD = "I don't understand that. I only know what you tell me."
SUMS = ["What is {a} plus {b}", "{a} plus {b}", "{a} + {b}", "What is {a} + {b}", "How much is {a} plus {b}",
        "Add {a} and {b}", "Can you add {a} and {b}", "{a}+{b}", "What is {a}+{b}", "What's {a} plus {b}",
        "What's {a} + {b}", "What's {a}+{b}"]
# The system message, or its first part. {} becomes the assistant's name.
SYSTEM = ["You are a helpful assistant.", "You are a friendly chatbot. Answer briefly.",
          "Be brief and polite.", "", "You are {}.", "Your name is {}.", "You are {}, a helpful assistant.",
          "You are called {}. Be friendly."]
CHEERFUL = ["Be cheerful.", "Be very cheerful.", "Answer cheerfully.", "Sound cheerful."]

REAL_VALUES = {  # only for measuring: no value of training has the last word of one of these
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
