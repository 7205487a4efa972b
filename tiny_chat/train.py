"""Make a chat model like the embedded one: a small Llama that remembers what you told it.

    python tiny_chat/train.py --directory my_chat                       # trains a new model
    python my_sentences/train.py --tune --directory my_sentences        # trains a copy further
    python tiny_chat/train.py --evaluate                                # prints README's table

dialogues.py makes dialogues. Here they become token ids, a Llama learns to predict the answers, and
the evaluation asks for facts told long ago. Training begins with dialogues of 256 tokens, and goes
on with longer ones. In half of all, the positions jump, so that the model meets distances of up to
5,120 tokens early. It saves the model every 500 steps.
"""
import argparse
import copy
import json
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from dialogues import REAL_VALUES, Dialogue, dialogue, draw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
CONTEXT = 4096
LONGEST = 5120          # tokens of the longest dialogues: above CONTEXT, so that it often looks far
MIXTURE = 3 * [512, 512, 1024, 512] + [1024, LONGEST]       # lengths of the later dialogues
OUTSIDE_WEIGHT = 0.2    # of the mean loss on tokens outside answers, beside 1 for answers
PEAKS = 0.007, 0.0021   # highest learning rates of Muon and AdamW
VOCABULARY = 1024       # of a new tokenizer
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]     # the last ids, in this order
CHAT_TEMPLATE = ("{% for message in messages %}"
                 "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
                 "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")

# ------------------------------------------------------------------------------------------------
# From texts to tensors


def train_tokenizer(texts):
    """GPT-2's byte-level BPE, but small. Ids: the 256 bytes, the merges in order, SPECIAL."""
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
    """Token ids, the ids after them, and whether these belong to an answer: all [B, length].

    Texts are cut, or padded with <|end|>. Of "<|user|>Hi.<|end|><|assistant|>Hello.<|end|>" only
    "Hello." and the last <|end|> belong to an answer: the latest special token before them is
    <|assistant|>."""
    end, assistant = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|assistant|>")
    rows = [encoding.ids[:length + 1] for encoding in tokenizer.encode_batch(texts)]
    ids = torch.tensor([row + [end] * (length + 1 - len(row)) for row in rows])   # [B, length + 1]
    position = torch.arange(length + 1).expand_as(ids)                            # [B, length + 1]
    special = ids >= tokenizer.get_vocab_size() - len(SPECIAL)
    last_special = torch.where(special, position, 0).cummax(dim=1).values         # [B, length + 1]
    return ids[:, :-1], ids[:, 1:], ids.gather(1, last_special)[:, :-1] == assistant


def positions_with_gaps(rng, ids, user):
    """Positions [B, length] of the ids. In half of the rows they jump at up to four of the user's
    turns; the last position is at most LONGEST - 1. user: the id of <|user|>.

    If the second turn begins at index 3, with a gap of 100 before it: 0 1 2 103 104 105 ..."""
    increments = torch.ones_like(ids)
    for row, increment in zip(ids, increments):
        turns = (row == user).nonzero().flatten().tolist()[1:]      # no fact is before the first
        spare = rng.randint(0, LONGEST - len(row)) if rng.random() < 0.5 else 0
        for turn in rng.sample(turns, min(len(turns), rng.randint(1, 4))):
            gap = rng.randint(0, spare)
            increment[turn] += gap
            spare -= gap
    return increments.cumsum(dim=1) - 1


# ------------------------------------------------------------------------------------------------
# The model and its optimizer


def new_model(vocabulary):
    """A Llama whose slowest nine of 16 rotary angles turn 8 times as slowly as usual, as in Llama
    3.1. Some hardly turn within the context: so the model finds a note by its words, however far
    away it is."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 1024},
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=None,
        eos_token_id=vocabulary - 1))


def has_bfloat16(device):
    """Has the device instructions for bfloat16? A CPU without them computes faster in float32."""
    abilities = getattr(torch.cpu, "get_capabilities", dict)()      # older torch cannot say
    return device.type == "cuda" or abilities.get("avx512_bf16", False)


def logits_of(model, ids, positions):
    """The logits [B, length, V] after each of the ids [B, length]. Each token sees all before it.
    Without the mask, transformers would take a jump in the positions for the start of another text.
    """
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=has_bfloat16(ids.device)):
        return model(ids, attention_mask=torch.ones_like(ids), position_ids=positions,
                     use_cache=False).logits.float()


def orthogonal(matrix):
    """The matrix [R, C] with its singular values moved to about 0.7 to 1.2.

    We divide by the Frobenius norm, so that no singular value is above 1. Then each of five
    Newton-Schulz steps replaces every singular value s by 3.4445 s - 4.7750 s^3 + 2.0315 s^5: 0.1
    becomes 0.34, 0.99, 0.71, 1.11, and at last 0.71. Very small ones stay below."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.bfloat16() if has_bfloat16(x.device) else x
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.mT                                                             # [R, R], R <= C
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov's momentum, made orthogonal (Jordan et al., 2024). torch.optim.Muon would compute in
    bfloat16 even where that is slow."""

    def __init__(self, matrices, lr):
        super().__init__(matrices, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for matrix in self.param_groups[0]["params"]:
            lr, (R, C), state = self.param_groups[0]["lr"], matrix.shape, self.state[matrix]
            if not state:
                state["smoothed"] = torch.zeros_like(matrix)
            smoothed = state["smoothed"].lerp_(matrix.grad, 0.05)
            update = orthogonal(matrix.grad.lerp(smoothed, 0.95))
            matrix.mul_(1 - 0.01 * lr).add_(update, alpha=-lr * max(1, R / C) ** 0.5)


# ------------------------------------------------------------------------------------------------
# Training


def schedule(steps, tune):
    """For each step: how many dialogues it has, their length in tokens, and the learning rates as a
    share of PEAKS. The rates rise for 200 steps, and fall in the last 35%. A tuning has more tokens
    a step, no phase of short dialogues, and rates that rise to nearly 0.7 and then fall.

    schedule(10_900, tune=False) begins with (8, 256, 0.005): eight dialogues of 256 tokens."""
    short, tokens, top, cool_down = int(0.41 * steps), 2048, 1, 0.35
    if tune:
        short, tokens, top, cool_down = 0, 8192, 0.7, 1
    lengths = [256 if step < short else MIXTURE[step % len(MIXTURE)] for step in range(steps)]
    rates = [min(top, (step + 1) / 200, top * max(0.02, (steps - step) / steps / cool_down))
             for step in range(steps)]
    return [(max(1, tokens // length), length, rate) for length, rate in zip(lengths, rates)]


def train(model, tokenizer, steps, outside_weight, directory):
    """Train the model through all steps of a schedule, and save it in the directory.

    outside_weight: of the mean loss on tokens outside answers. Nobody will ask the model to predict
    what the user says, but a model that learns it understands more of it."""
    device, user = model.device, tokenizer.token_to_id("<|user|>")
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    optimizers = [Muon(matrices, PEAKS[0]),
                  torch.optim.AdamW(others, PEAKS[1], betas=(0.9, 0.95), weight_decay=0.0)]
    start = time.time()
    for step, (count, length, rate) in enumerate(steps, 1):
        rng = random.Random(f"step {step}")
        ids, next_ids, in_answer = (tensor.to(device) for tensor in encode(
            tokenizer, [dialogue(rng, length) for _ in range(count)], length))      # [B, length]
        positions = positions_with_gaps(rng, ids, user)
        logits = logits_of(model, ids, positions)                                   # [B, length, V]
        losses = F.cross_entropy(logits.mT, next_ids, reduction="none")             # [B, length]
        loss = losses[in_answer].mean()
        (loss + outside_weight * losses[~in_answer].mean()).backward()
        for optimizer, peak in zip(optimizers, PEAKS):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            right = (logits.argmax(-1) == next_ids)[in_answer].float().mean()
            print(f"step {step:5}  {time.time() - start:5.0f} s  length {length:4}  "
                  f"loss {loss.item():.4f}  right {right:.2%}", flush=True)
        if step % 500 == 0 or step == len(steps):
            save(model, tokenizer, directory)


def save(model, tokenizer, directory):
    """Write the files of a Hugging Face checkpoint, the weights in float16."""
    model = copy.deepcopy(model).half().cpu()
    model.generation_config.pad_token_id = model.config.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False,
              "eos_token": "<|end|>", "pad_token": "<|end|>", "model_max_length": CONTEXT,
              "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------
# Evaluation

COLUMNS = ["words", "numbers", "real words", "changed", "never told", "list"]
DISTANCES = [0, 1000, 2500, 3900]       # tokens


def told_and_asked(rng, tokenizer, column, distance):
    """The text of a dialogue, and how many of its first answers note the facts that we measure.

    The user tells a fact (for "changed" twice, for "list" one to six, for "never told" none), talks
    about other things for about `distance` tokens, and asks. For "list" and "changed" the facts
    count as part of the distance, so that all fits into the context. No measured fact is the user's
    name, because "Goodbye, Ada." would repeat it on the way."""
    chat = Dialogue(rng, training=False)
    chat.casual = chat.tells_american = chat.asks_american = False      # as REAL_VALUES is written
    chat.alike = 0
    thing = rng.choice([*REAL_VALUES]) if column == "real words" else chat.pick_unknown({"name"})
    unfit = {"words": "age", "numbers": "name"}.get(column)     # no age is a word, no name a number
    while unfit and thing.endswith(unfit):
        thing = chat.pick_unknown({"name"})
    if column == "list":
        for _ in range(rng.randint(1, 6)):
            chat.say(*chat.tell(chat.pick_unknown({"name"})))
    elif column != "never told":
        for _ in range(2 if column == "changed" else 1):
            chat.say(*chat.tell(thing, value_for(column, thing, chat)))
    told = chat.text.count("<|assistant|>")
    between = len(tokenizer.encode(chat.text).ids) if column in ("list", "changed") else 0  # tokens
    # We stop 60 tokens early: a turn has about 30, at times 200, and all must fit in CONTEXT.
    while between < distance - 60:
        start = len(chat.text)
        talk_about_others(chat, thing, may_tell=column != "list")
        between += len(tokenizer.encode(chat.text[start:]).ids)
    chat.say(*(chat.list_notes() if column == "list" else chat.ask(thing)))
    return chat.text, told


def value_for(column, thing, chat):
    """The value of a column's facts. None for "changed": `tell` then makes one up."""
    if column == "words":
        return " ".join(chat.word() for _ in range(chat.rng.choice([1, 2])))
    if column == "numbers":
        return draw(lambda rng: str(rng.randrange(10, 10 ** rng.choice([2, 3, 4, 5]))),
                    chat.rng, held_out=True)
    return chat.rng.choice(REAL_VALUES[thing]) if column == "real words" else None


def talk_about_others(chat, thing, may_tell):
    """Add a turn that is not about the thing, nor about a fact that has a note."""
    chance, other = chat.rng.random(), chat.pick_unknown({thing})
    if chance < 0.1 and may_tell:
        chat.say(*chat.tell(other))
    elif chance < 0.3:
        chat.say(*chat.ask(other))
    else:
        chat.say(*chat.chatter())


@torch.no_grad()
def right_answers(model, tokenizer, text):
    """For each answer: is each of its tokens the model's first choice after the text before it?"""
    length = len(tokenizer.encode(text).ids) - 1
    ids, next_ids, in_answer = encode(tokenizer, [text], length)                    # [1, length]
    wrong = ((model(ids).logits.argmax(-1) != next_ids) & in_answer)[0]             # [length]
    number = (ids[0] == tokenizer.token_to_id("<|assistant|>")).cumsum(0)           # [length]
    return [not wrong[number == n].any() for n in range(1, number[-1] + 1)]


def share_right(model, tokenizer, column, distance, samples):
    """The share of dialogues in which the notes and the last answer are right to the letter."""
    rng, right = random.Random(f"final {column} {distance}"), 0
    for _ in range(samples):
        text, told = told_and_asked(rng, tokenizer, column, distance)
        answers = right_answers(model, tokenizer, text)
        right += all(answers[:told]) and answers[-1]
    return right / samples


def evaluate(directory, distances=DISTANCES, samples=200):
    """Print README's table for the model in the directory."""
    model, tokenizer = load(directory)
    print(f"| distance | {' | '.join(COLUMNS)} |\n|---:{len(COLUMNS) * '|---:'}|")
    for distance in distances:
        shares = [share_right(model, tokenizer, column, distance, samples) for column in COLUMNS]
        print(f"| {distance:,} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)


# ------------------------------------------------------------------------------------------------
# The command


def load(directory):
    """The model and the tokenizer in the directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def begin(directory, tune):
    """The model and the tokenizer before the first step: those in the directory, or new ones."""
    torch.manual_seed(1)
    if tune:
        return load(directory)
    rng = random.Random(1)
    tokenizer = train_tokenizer([dialogue(rng, 1024) for _ in range(1000)])
    return new_model(VOCABULARY), tokenizer


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the model is, or will be written")
    parser.add_argument("--tune", action="store_true",
                        help="train the model in --directory further")
    parser.add_argument("--evaluate", action="store_true",
                        help="only measure the model in --directory (default: the embedded one)")
    parser.add_argument("--steps", type=int, help="default: 10,900, and 4,000 with --tune")
    args = parser.parse_args(arguments)
    if not args.directory and not args.evaluate:
        parser.error("training writes a model: say where with --directory DIRECTORY")
    directory = args.directory or HERE
    if (args.tune or args.evaluate) and not (directory / "model.safetensors").exists():
        parser.error(f"there is no model in {directory}: train one, or copy {HERE}")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1 is needed")
    if args.evaluate:
        return evaluate(directory)
    torch.set_flush_denormal(True)      # numbers below 1e-38 become 0: a step is 2.7 times as fast
    model, tokenizer = begin(directory, args.tune)
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    steps = schedule(args.steps or (4000 if args.tune else 10_900), args.tune)
    outside_weight = 0 if args.tune else OUTSIDE_WEIGHT     # not tried with --tune
    train(model, tokenizer, steps, outside_weight, directory)


if __name__ == "__main__":
    main()
