"""The example that the chat page plays with --demo: what is said, and tiers that fit it.

Four chats talk in turn. Then the first one and the second one go on. chat.html tells the story:

    chat     1  2  3  4   1  2  1
    texts    8  8  8  8   1  1  1      Example.said

Every kind of move is seen if the four chats need a little more than both tiers have. So the sizes
of the tiers follow from the chats, counted with the tokenizer of the model that will answer. The
page ends an act early when its chat fills two thirds of the GPU tier.

    the longest chat    245 tokens of tiny_chat, if each answer has 16
    GPU tier            1.5 chats, in whole chunks: 384 tokens
    CPU tier            twice as much: 768 tokens
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
@TOY@])
NOTES = Example(answer_tokens=8, said=[
@NOTES@])
