"""The example that the chat page plays with --demo: what is said, and tiers that fit it.

It has seven acts. In each act one chat says some texts, one after another. Four chats talk, then
the first one and the second one go on. chat.html tells the story:

    act      1  2  3  4   5  6  7
    chat     1  2  3  4   1  2  1
    texts    8  8  8  8   1  1  1      those for tiny_chat

The sizes of the tiers follow from the longest chat, counted with the tokenizer of the model:

    the longest chat    243 tokens of tiny_chat, if each answer has 16
    GPU tier            1.5 chats, in whole chunks: 384 tokens
    CPU tier            twice as much: 768 tokens

The four chats have 961 tokens, and the tiers have room for 1,152. But chunks that lie in both tiers
count twice, up to 384 tokens. So the tiers cannot hold all four chats, and every kind of move is
seen. A model may answer at greater length: the page ends an act early when its chat fills two
thirds of the GPU tier.
"""
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from serving.tokenizer import Tokenizer

CHATS = 4
TINY_CHAT = Path(__file__).parent.parent / "tiny_chat"


@dataclass(frozen=True)
class Example:
    """said: the texts of each act. answer_tokens: of a short answer to one of them."""
    said: list[list[str]]
    answer_tokens: int

    def tiers(self, tokenizer: Tokenizer, chunk_size: int) -> tuple[int, int]:
        """Tokens of the GPU tier and of the CPU tier."""
        longest = max(self._tokens(texts, tokenizer) for texts in self.said[:CHATS])
        gpu = chunk_size * ceil(1.5 * longest / chunk_size)
        return gpu, 2 * gpu

    def _tokens(self, texts: list[str], tokenizer: Tokenizer) -> int:
        """Of a chat with these texts and short answers."""
        # The answers are empty here: they are counted below. The last prompt ends the list.
        messages = [message for text in texts
                    for message in (dict(role="user", content=text),
                                    dict(role="assistant", content=""))]
        prompts = tokenizer.turn([], messages[:-1], None)
        return len(prompts) + len(texts) * self.answer_tokens


def example_for(directory: Path) -> Example:
    """The example that the checkpoint in `directory` can answer: tiny_chat knows nothing but the
    facts that a user tells it."""
    return FACTS if directory.resolve() == TINY_CHAT.resolve() else NOTES


FACTS = Example(answer_tokens=16, said=[
    ["Hi, I'm Zorbella.", "My lucky number is 4711.", "My favourite food is ramen.",
     "My favourite colour is green.", "My home city is Oslo.", "My age is 42.",
     "My favourite animal is a turtle.", "My shoe size is 12."],
    ["Hello, my name is Linus.", "My favourite food is lasagna.", "My lucky number is 31.",
     "My favourite colour is orange.", "My home city is Nairobi.", "My age is 54.",
     "My shoe size is 99.", "My best friend is Ken."],
    ["Hey, I'm Hedy.", "My favourite food is sushi.", "My lucky number is 7.",
     "My favourite colour is teal.", "My home city is Montreal.", "My age is 29.",
     "My best friend is Radia.", "My shoe size is 64."],
    ["Hi, my name is Dennis.", "My favourite food is curry.", "My lucky number is 12.",
     "My favourite colour is purple.", "My home city is Boston.", "My age is 60.",
     "My best friend is Ada.", "My shoe size is 70."],
    ["What is my lucky number?"],
    ["What is my favourite food?"],
    ["Who am I?"]])
NOTES = Example(answer_tokens=8, said=[
    ["Here are my notes on our trip. On Friday Zorbella and I fly to Oslo. Our hotel is the "
     "Fram, room 42. On Saturday we take the boat to the island, and in the evening we eat ramen "
     "with Linus. On Sunday we fly home.\n\nWhere do we fly on Friday?",
     "What is our hotel called?", "What do we eat on Saturday evening?", "With whom do we eat?",
     "When do we fly home?", "Where does the boat go?", "On which day do we fly home?"],
    [f"What is the capital of {country}?" for country in (
        "Norway", "Italy", "France", "Spain", "Greece", "Germany", "Austria", "Portugal", "Ireland")],
    ["What is the capital of France?", *(
        f"What is the official language of {country}?" for country in (
            "France", "Brazil", "Norway", "China", "Egypt", "Mexico", "Russia", "Italy"))],
    [f"What is the capital of {country}?" for country in (
        "Japan", "Kenya", "Canada", "Egypt", "India", "Peru", "Cuba", "China", "Chile")],
    ["What is the number of our room?"],
    ["What is the capital of Norway?"],
    ["What is our hotel called?"]])
