"""What users say, and the answers to small talk: the words that dialogues.py fills in and puts in order.

The sentences that tell, change, ask and list come in three sets: we train on "train", measured with "choice"
while we chose the recipe, and with "final" after that. Those of "final" were written for us by somebody who
saw none of the others. When we measured, we had read no more than the first of each list.
"""
THINGS = ["name", "age", "home city", "job", "hobby", "pet", "car", "birthday", "language", "school",
          "lucky number", "shoe size", "best friend", "favourite colour", "favourite food", "favourite drink",
          "favourite film", "favourite book", "favourite song", "favourite animal", "favourite sport"]
RELATIVES = ["sister", "brother", "mother", "father", "wife", "husband", "son", "daughter", "boss",
             "neighbour", "dog", "cat", "uncle", "aunt", "grandma", "grandpa", "girlfriend", "boyfriend"]
RELATIVE_THINGS = ["name", "name", "name", "age", "age", "job", "home city", "hobby"]

# For training: openings of sentences that tell and change, and more sentences that ask and list, separated
# by |. None begins with the same two words as a sentence of "choice" or shares half of its words with one.
OPENINGS = {
    "tell": "I guess it matters that|So yeah,|For the record,|Hey there,|Quick note for later,|"
            "Please remember that|Could you jot down that|Well, as of today|"
            "I'd like you to keep in mind that|Fun fact,|Guess what,|Not that anyone asked, but|"
            "Mum says I should tell you|Okay so basically|Let it be noted that|Here's something useful,|"
            "In case it ever comes up,|Allow me to mention that|FYI|Speaking of which,|"
            "Everybody at school knows|Honestly,|It would help if you remembered|Kindly record that|"
            "I should probably mention|Oh, before I forget,|Store this for me please,|"
            "People often ask, and|Between you and me,|Um, hi,|Since we're chatting,|"
            "My friends all laugh because|Right then,|There's one more detail,|Truth be told,|"
            "Did I ever say that|When you need it,|To be perfectly clear,|Listen up,|Yo,|"
            "I'm happy to say that|Something you'll need someday,|At the moment|"
            "With any luck you'll recall that|These days,|Gonna tell you a secret,|"
            "Would you mind remembering that|Believe it or not,|Now then, please file away that|"
            "This may sound silly, but",
    "change": "Scratch that,|It turns out that|Actually no,|Sorry, I got that wrong,|Correction,|"
              "Things have changed and now|I misspoke earlier,|Wait,|Since last week|"
              "Forget what I told you before,|Hang on, I meant to say|Not anymore,|My mistake,|"
              "Let me fix that,|I've changed my mind, so|Nope,|Ignore the earlier answer because|"
              "There has been a change,|That's out of date,|Could you correct the record,|"
              "What I said was false,|Whoops, typo,|Hmm, on second thoughts|Replace what you have,|"
              "Big news,|After checking properly, I see|We need to amend that,|"
              "Apologies for the confusion, but|I lied,|Instead of what I said,|"
              "Cross out the previous one,|Don't use the old value,|Contrary to what I told you,|"
              "Starting today|Ah, hold up,|No longer true,|Just double-checked and|"
              "Mind changing that for me,|Overwrite it please,|Dad just told me that really|"
              "Good grief, I muddled it up,|Everything's different now,|Tiny edit,|"
              "To set the record straight,",
}
MORE_WAYS_TO = {
    "ask": "Look up my {thing}|Any idea about my {thing}|Give me my {thing}|Read back my {thing}|"
           "I've completely forgotten my {thing}|Right, what about my {thing}|"
           "Could I trouble you for my {thing}|Quick, I need my {thing}|Show my {thing}|"
           "Let's hear my {thing}|Someone wants to know my {thing}|Please retrieve my {thing}|"
           "Mind telling me my {thing}|Check your notes for my {thing}|"
           "Refresh my memory regarding my {thing}|So what exactly is my {thing}|"
           "Bet you can't name my {thing}|Where did you write down my {thing}|"
           "I'm trying to think of my {thing}|Fetch my {thing}|Did I ever tell you my {thing}|"
           "Might I ask you for my {thing}|Hey, say my {thing}|My brain won't give me my {thing}|"
           "Time to test you on my {thing}|Find my {thing}|Nobody here remembers my {thing}|"
           "Recite for me my {thing}|Which one is my {thing}|Pull up whatever you saved as my {thing}|"
           "I would be grateful for my {thing}|Ok computer, name my {thing}|"
           "It slipped my mind what my {thing} is|You know what my {thing} is, right|"
           "Do tell what my {thing} is|Wondering what my {thing} might be|Go on, guess what my {thing} is|"
           "Have a look at what my {thing} is currently|Please confirm what my {thing} is|"
           "Am I right that you know what my {thing} is|There's a form asking what my {thing} is|"
           "Work out what my {thing} is for me|I'd love to know what my {thing} is these days|"
           "Blimey, I've lost track of what my {thing} is|For the quiz, what my {thing} is again|"
           "Perhaps you could say what my {thing} is|Didn't I mention what my {thing} was|"
           "Well, my {thing} is what exactly|Is my {thing} in your notes|"
           "Has my {thing} been saved anywhere|Was my {thing} something I told you|"
           "Sorry to bother you, but what my {thing} was|Dunno what my {thing} is anymore|"
           "Say what my {thing} is right now|Think back to what my {thing} was|"
           "Grandma keeps asking what my {thing} is|Spell out what my {thing} is|"
           "What would you say my {thing} is|Whatever my {thing} is, say it|Tell us what my {thing} is|"
           "I need reminding what my {thing} is",
    "list": "Lay out all that you have on file about me|What sort of things do you know about me|"
            "List everything known about me|Show me my notes|Tell me all the stuff I've told you|"
            "Which facts have you saved so far|Give a full summary of what I've shared|"
            "Read out the notes you've been taking|How much do you know about me|"
            "Could you run through all my details|Recap what you've learned about me|"
            "I'd like to review all my stored information|Please print every fact you're keeping|"
            "So what have you got on me|Dump all notes|Go over all the things I mentioned|"
            "Let me see the complete set of notes|Spill everything you've learnt about yours truly|"
            "Would you mind listing what you remember|Describe me using all your notes|"
            "What info of mine is on record|Have you written anything down about me|My whole file, please|"
            "Name every single thing I taught you|Are there any facts you hold about me|All my facts, now|"
            "Repeat back everything that I've said about myself|Might I have an overview of my records|"
            "Hey, what all did I tell you|Open up your notebook and read me the lot|"
            "Kindly enumerate the particulars you have recorded for me|"
            "I forgot what I told you, show the lot|Walk me through what you've stored|"
            "Let's go through your notes together|Prove you were listening, list all my facts|"
            "Pull together whatever you've collected on me|Where are we with the notes about me|"
            "Display saved facts|Is there a list of what I've told you|"
            "Got anything about me in your memory|Share the full contents of your notes|"
            "In total, which details do you have of mine|Tell us what's in your memory",
}
# The user's sentences. Those of ..._THING suit one thing only ("I'm {value}" two: a number is the age).
TELL = {
    "train": ["My {thing} is {value}"] * 12 + [
        "By the way, my {thing} is {value}", "Remember that my {thing} is {value}",
        "Please note: my {thing} is {value}", "You should know that my {thing} is {value}",
        "Remember: my {thing} is {value}", "Well, my {thing} is {value}", "I think my {thing} is {value}",
        "For your information, my {thing} is {value}", "Let me tell you: my {thing} is {value}",
        "Hi, my {thing} is {value}", "Hello! My {thing} is {value}", "{value} is my {thing}",
        "My {thing}? It's {value}"]
        + [f"{opening} my {{thing}} is {{value}}" for opening in OPENINGS["tell"].split("|")],
    "choice": ["Keep in mind that my {thing} is {value}", "Just so you know, my {thing} is {value}",
               "Write down that my {thing} is {value}", "I want you to know that my {thing} is {value}",
               "Don't forget: my {thing} is {value}", "One more thing: my {thing} is {value}",
               "Make a note that my {thing} is {value}", "It may help you that my {thing} is {value}",
               "Oh, and my {thing} is {value}", "To start with, my {thing} is {value}",
               "While I think of it, my {thing} is {value}", "As it happens, my {thing} is {value}",
               "Add to your notes that my {thing} is {value}",
               "Something else worth knowing: my {thing} is {value}"],
    "final": ["Could you keep in mind that my {thing} is {value}", "Hi there, my {thing} is {value}",
              "For future reference, my {thing} is {value}",
              "Something else you might find useful, my {thing} is {value}",
              "It may help you to know that my {thing} is {value}",
              "Write this down for me, my {thing} is {value}",
              "Since we are chatting anyway, my {thing} is {value}",
              "You might find it useful that my {thing} is {value}",
              "If anyone ever asks you, my {thing} is {value}",
              "All of my friends already know that my {thing} is {value}",
              "Here is something about me, my {thing} is {value}",
              "Before we carry on, my {thing} is {value}",
              "One thing you should know is that my {thing} is {value}",
              "People are often surprised that my {thing} is {value}",
              "Could you keep in mind that my {thing} is {value}",
              "It may help to know that my {thing} is {value}",
              "Funnily enough, it turns out my {thing} is {value}",
              "We have not talked about this yet but my {thing} is {value}",
              "Make a note for later that my {thing} is {value}",
              "As far as I can tell my {thing} is {value}",
              "Speaking of which, I should mention my {thing} is {value}",
              "Everyone at home knows that my {thing} is {value}",
              "Did I ever tell you that my {thing} is {value}",
              "To give you some background, my {thing} is {value}",
              "I would love you to remember that my {thing} is {value}"],
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
              "That was wrong, my {thing} is {value}"]
        + [f"{opening} my {{thing}} is {{value}}" for opening in OPENINGS["change"].split("|")],
    "choice": ["Hold on, my {thing} is {value}", "I have to correct myself: my {thing} is {value}",
               "Oops, my {thing} is {value}", "I was mistaken, my {thing} is {value}",
               "Update: my {thing} is {value}", "From today on my {thing} is {value}",
               "Things are different now: my {thing} is {value}",
               "Silly me, I should have said that my {thing} is {value}",
               "Apologies, I made a mistake: my {thing} is {value}",
               "You've got the wrong one, my {thing} is {value}", "As of this morning my {thing} is {value}",
               "Please correct your notes: my {thing} is {value}"],
    "final": ["Please update your notes, as my {thing} is {value}",
              "I made a mistake earlier, my {thing} is {value}",
              "No, that's not right, my {thing} is {value}", "From now on my {thing} is {value}",
              "You need to change what you have, because these days my {thing} is {value}",
              "What I told you before is out of date, my {thing} is {value}",
              "Could you correct that for me, my {thing} is {value}",
              "Wait, I meant to say that my {thing} is {value}",
              "Since we last spoke there has been a change and my {thing} is {value}",
              "Things have moved on and now my {thing} is {value}",
              "What I said earlier was wrong, my {thing} is {value}",
              "Since we last spoke things have changed and my {thing} is {value}",
              "Could you update that, because now my {thing} is {value}",
              "Oh no, I got that wrong, my {thing} is {value}",
              "That is no longer true, these days my {thing} is {value}",
              "You will need to fix your notes because my {thing} is {value}",
              "It used to be different but now my {thing} is {value}",
              "As of this week, my {thing} is {value}"],
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
    "train": ["What is my {thing}"] * 10 + ["What's my {thing}"] * 6 + [
        "Do you remember my {thing}", "Do you know my {thing}", "And what is my {thing}", "And my {thing}",
        "Can you tell me my {thing}", "So what is my {thing}", "What was my {thing}", "Tell me my {thing}",
        "Please remind me: what is my {thing}", "Remind me of my {thing}", "I forgot my {thing}",
        "What did I say about my {thing}", "Have I told you my {thing}", "Say my {thing}", "My {thing}",
        "Could you remind me what my {thing} is", "Do you know what my {thing} is", "Which is my {thing}"]
        + MORE_WAYS_TO["ask"].split("|"),
    "choice": ["Could you tell me what my {thing} is", "What did I say my {thing} was", "Name my {thing}",
               "Quick question: what is my {thing}", "Would you remind me of my {thing}",
               "Let me test you: what is my {thing}", "Please repeat my {thing}",
               "Can you recall what my {thing} was", "Do you still know my {thing}",
               "I wonder what my {thing} is", "Once more: what is my {thing}", "Help me with my {thing}",
               "I can't think what my {thing} is", "Just checking, what is my {thing}",
               "Hang on, what was my {thing}", "Are you able to tell me my {thing}",
               "Have you got a note of my {thing}", "I keep forgetting what my {thing} is",
               "Try to remember my {thing}", "According to your notes, what is my {thing}"],
    "final": ["Do you remember what my {thing} is", "Remind me what my {thing} is again",
              "I've forgotten what my {thing} is", "So what was my {thing} again",
              "Could you please remind me of my {thing}", "Any idea what my {thing} is",
              "Did I ever mention my {thing} to you", "Have you got my {thing} written down",
              "Would you mind telling me what my {thing} is", "Quick question, what's my {thing}",
              "Please look up my {thing} for me", "my {thing} please",
              "Let's see if you still remember my {thing}", "Give me my {thing} again"],
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
                for notes in NOTES]
             + MORE_WAYS_TO["list"].split("|"),
    "choice": ["Say everything you know about me", "What are your notes about me",
               "Recite all you remember about me", "Please show all your notes",
               "Sum up what you know about me", "What have you learnt about me", "I want to see your notes",
               "Talk me through what I've told you", "Summarise what you know about me",
               "Put together a list of what you've noted about me", "Can I see everything you have on me",
               "Run through all your notes for me", "Bring up all the facts you have about me"],
    "final": ["Tell me everything you remember about me", "List all the facts you have about me",
              "Can you show me all your notes on me",
              "Could you please go through everything I have told you so far",
              "Show me everything you have noted down about me",
              "I'd like to see all the information you have on me",
              "Please give me a summary of all you know about me",
              "Which things about me have you written down so far", "Everything you know about me please",
              "Let me see all the notes you have taken about me",
              "Remind me of everything I have told you about myself",
              "Would you mind reading back all that you have saved about me",
              "Have a look at your notes and tell me all the things I have shared with you"],
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
