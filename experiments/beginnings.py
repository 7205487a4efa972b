"""What is cached when a client resends its history in another form: `python -m experiments.beginnings`.

Seven kinds of clients play against an engine with room for everything. Beside what our engine had
cached of the last prompt stands what vLLM's rule would have had of the same token ids: every full
block of 16 tokens of any earlier context, if all blocks before it are the same, too; but never the
last token of the prompt. (By the rule, not by a run of vLLM. It tokenises a reply anew, so its ids
may differ from those that the model sampled; then it has less. A turn that is cancelled leaves
nothing with us; vLLM keeps its full blocks.)
"""
from serving.sessions import LiveTurn, Sessions

BLOCK = 16          # tokens
TURNS, MANY_TURNS = 8, 20


def user(text: str) -> dict:
    return dict(role="user", content=text)


def assistant(text: str) -> dict:
    return dict(role="assistant", content=text)


SYSTEM = dict(role="system", content="Be brief, and be kind to all who ask you for anything. " * 12)
EXAMPLES = [user("Change the greeting. " * 8), assistant("Here is the change. " * 8),
            user("These are the files. " * 16), assistant("Ok.")]


def question(n: int) -> dict:
    return user(f"Question {n}: " + "what do you think of it, and why? " * 4)


class Client:
    """A client, and the server that it talks to."""

    def __init__(self):
        self.sessions = Sessions("tiny_chat", gpu_cache_tokens=2**14, cpu_cache_tokens=2**14,
                                 device="cpu", dtype="float32")
        # Each reply consists of one token, again and again: " you you you you".
        self.token, = self.sessions.tokenizer.encode(" you")
        self.blocks: set[tuple] = set()             # contexts of full blocks: vLLM's cache

    def submit(self, messages: list[dict], **options) -> LiveTurn:
        return self.sessions.respond(messages, max_tokens=4, ignore_eos=True,
                                     logit_bias={self.token: 100.0}, **options)

    def ask(self, messages: list[dict], **options) -> str:
        turn = self.submit(messages, **options)
        answer, context = turn.result(), self.context(turn)
        self.cached = answer.usage["gpu"] + answer.usage["cpu"]
        self.prompt = len(context)
        ends = range(BLOCK, len(context), BLOCK)    # one token is left to compute
        self.vllm = max((end for end in ends if tuple(context[:end]) in self.blocks), default=0)
        self.keep_blocks(context + answer.token_ids[:-1])
        return answer.text

    def hang_up(self, messages: list[dict]):
        turn = self.submit(messages)
        next(turn.progress())
        turn.cancel()
        self.keep_blocks(self.context(turn))

    def context(self, turn: LiveTurn) -> list[int]:
        """Up to the reply."""
        after = turn.plan.after if turn.plan.context_length else None
        return (self.sessions.history.tokens(after.id).tolist() if after else []) + turn.plan.prompt

    def keep_blocks(self, context: list[int]):
        self.blocks.update(tuple(context[:end]) for end in range(BLOCK, len(context) + 1, BLOCK))


# ---- the seven kinds

def trims(client: Client, turns: int, trim=str.strip, **options):
    told = [SYSTEM]
    for n in range(turns):
        told.append(question(n))
        told.append(assistant(trim(client.ask(told, **options))))


def stops(client: Client, turns: int):
    """The stop string begins within a token."""
    trims(client, turns, trim=str, stop="u you you")


def regenerates(client: Client, turns: int):
    client.ask([SYSTEM, question(1)])
    client.ask([SYSTEM, question(1)])


def begins_another_chat(client: Client, turns: int):
    client.ask([SYSTEM, question(1)])
    client.ask([SYSTEM, user("Something else: " + "who are you? " * 4)])


def retries(client: Client, turns: int):
    client.hang_up([SYSTEM, question(1)])
    client.ask([SYSTEM, question(1)])


def alters(client: Client, turns: int):
    """Nine messages stay, the tenth is another one each time."""
    told = [SYSTEM, *(message for n in range(4) for message in (question(n), assistant("Well.")))]
    for n in range(turns):
        client.ask([*told, question(n)])


def reminds(client: Client, turns: int):
    """As aider does: the last message ends with a reminder, which it does not have when it is
    resent."""
    told = [SYSTEM, *EXAMPLES]
    for n in range(turns):
        reminder = user(question(n)["content"] + "Remember to answer in the form of the examples.")
        told += [question(n), assistant(client.ask([*told, reminder]))]


KINDS = {"trims the replies, turn 8": trims, "stop strings end the replies, turn 8": stops,
         "first answer regenerated": regenerates,
         "second chat under one system message": begins_another_chat,
         "first turn again after a hang-up": retries,
         "last message altered, nine in common": alters, "aider-like: a reminder goes, turn 8": reminds}


def measure(play) -> tuple[int, int, int, int]:
    """Tokens of the last prompt: cached, of how many, by vLLM's rule; slots after MANY_TURNS."""
    client = Client()
    play(client, TURNS)
    row = client.cached, client.prompt, client.vllm
    client.sessions.close()
    client = Client()
    play(client, MANY_TURNS)
    stats = client.sessions.engine.stats()
    client.sessions.close()
    return *row, stats["slots_total"] - stats["slots_free"]


def main():
    print(f"| client | cached of prompt | vLLM's rule | slots in the end (of {MANY_TURNS} turns) |")
    print("|---|---:|---:|---:|")
    for name, play in KINDS.items():
        cached, prompt, vllm, slots = measure(play)
        print(f"| {name} | {cached}/{prompt} | {vllm} | {slots:,} |", flush=True)


if __name__ == "__main__":
    main()
