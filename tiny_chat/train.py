"""Make the embedded model: a small Llama that remembers what you told it.

This script and dialogues.py made every other file of their directory. Training begins with dialogues of 256
tokens and ends with a few of 4,096. From the start, the positions of a short dialogue have random gaps
between its turns, so that the model meets every distance up to 4,096 tokens long before it meets a context
of that length. The base of the rotary positions is large (500,000): half of the angles hardly turn within
4,096 tokens, so whether a note is found depends on its words and not on its distance.

    torchrun --nproc-per-node 2 tiny_chat/train.py      # train on two cores, save beside this script
    python tiny_chat/train.py --evaluate choice         # measure, with the sentences for choosing a recipe
    python tiny_chat/train.py --evaluate final          # measure, with sentences never looked at until then

Training saves its state in training.pt every 200 steps, and continues from there when it is started again.
"""
import argparse
import json
import os
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dialogues import REAL_VALUES, Dialogue, any_number, dialogue, from_split

HERE = Path(__file__).resolve().parent
CONTEXT = 4096
# Cycles of the learning rate; in each, phases of so many steps with dialogues of so many tokens.
CYCLES = [[(256, 2300), (1024, 800), (CONTEXT, 450)], [(512, 1200), (CONTEXT, 200)], [(CONTEXT, 430)],
          [(CONTEXT, 240)]]
AVERAGED = 3                                            # cycles whose last models are averaged
TOKENS = 4096                                           # of one process in one step
WARM_UP, COOL_DOWN = 100, 0.4                           # steps; the share of a cycle in which the rate falls
SAVE_EVERY = 200                                        # steps
VOCABULARY = 512
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]     # the last ids, in this order
CHAT_TEMPLATE = ("{% for message in messages %}"
                 "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
                 "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")

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

    Texts are cut, or padded with <|end|>. A target is the next id if that belongs to an answer, else -100."""
    end, assistant = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|assistant|>")
    rows = [encoding.ids[:length + 1] for encoding in tokenizer.encode_batch(texts)]
    ids = torch.tensor([row + [end] * (length + 1 - len(row)) for row in rows])         # [B, length + 1]
    position = torch.arange(length + 1).expand_as(ids)                                  # [B, length + 1]
    special = ids >= VOCABULARY - len(SPECIAL)
    last_special = torch.where(special, position, 0).cummax(dim=1).values               # [B, length + 1]
    in_answer = ids.gather(1, last_special)[:, :-1] == assistant                        # [B, length]
    return ids[:, :-1], torch.where(in_answer, ids[:, 1:], -100)


def positions(rng, ids, user):
    """Positions [B, length] of the ids: in half of the rows they jump at up to four of the user's turns, such
    that the last position is at most CONTEXT - 1."""
    steps = torch.ones_like(ids)
    for row, step in zip(ids, steps):
        turns = (row == user).nonzero().flatten().tolist()
        spare = rng.randint(0, CONTEXT - len(row)) if rng.random() < 0.5 else 0
        for turn in rng.sample(turns, min(len(turns), rng.randint(1, 4))):
            gap = rng.randint(0, spare)
            step[turn] += gap
            spare -= gap
    return steps.cumsum(dim=1) - 1


# ---------------------------------------------------------------------------------------------------------
# Training


def new_model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=256, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=None, eos_token_id=VOCABULARY - 1))


def orthogonal(matrix):
    """A matrix [R, C] near this one whose singular values are all about 1, by five Newton-Schulz steps."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Jordan et al., 2024).

    torch.optim.Muon computes in bfloat16, which is 100 times slower than float32 on many CPUs."""

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(matrices, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def schedule(cycles):
    """For each step the length of its dialogues and the share of the peak learning rate. In a cycle of N
    steps the rate rises for 100 steps, stays at its peak (half as high in later cycles) and falls towards a
    fiftieth in the last 0.4 N."""
    for number, phases in enumerate(cycles):
        lengths = [length for length, steps in phases for _ in range(steps)]
        for step, length in enumerate(lengths):
            falling = max(0.02, min(1, (len(lengths) - step) / (COOL_DOWN * len(lengths))))
            yield length, min((step + 1) / WARM_UP, falling) / (2 if number else 1)


def average_gradients(parameters):
    """Replace all gradients by their mean over all processes."""
    gradients = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(gradients)
    means = (gradients / dist.get_world_size()).split([p.numel() for p in parameters])
    for p, mean in zip(parameters, means):
        p.grad.copy_(mean.view_as(p))


def train(tokenizer, state_file):
    """Train a model through all CYCLES, or continue from `state_file`.

    Returns the average of the models at the ends of the last three cycles, which is better than each of
    them: the last cycles trade what is near for what is far."""
    model = new_model()
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    optimizers = {Muon(matrices, lr=0.02): 0.02,
                  torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0): 0.003}
    steps = list(schedule(CYCLES))
    cycle_ends = {sum(steps for cycle in CYCLES[:number + 1] for _, steps in cycle)
                  for number in range(len(CYCLES))}
    first, ends, user, start = 0, [], tokenizer.token_to_id("<|user|>"), time.time()
    if state_file.exists():
        state = torch.load(state_file)
        first, ends = state["step"], state["ends"]
        model.load_state_dict(state["model"])
        for optimizer, moments in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(moments)
    for step in range(first, len(steps)):
        length, share = steps[step]
        rng = random.Random(step * dist.get_world_size() + dist.get_rank())
        ids, targets = encode(tokenizer, [dialogue(rng, length) for _ in range(TOKENS // length)], length)
        logits = model(ids, position_ids=positions(rng, ids, user), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        average_gradients(matrices + others)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            right = (logits.argmax(-1) == targets)[targets != -100].float().mean()
            print(f"step {step + 1:5}  {time.time() - start:5.0f} s  length {length:4}  "
                  f"loss {loss.item():.4f}  right {right:.2%}", flush=True)
        if step + 1 in cycle_ends:
            ends.append({name: value.clone() for name, value in model.state_dict().items()})
        if dist.get_rank() == 0 and ((step + 1) % SAVE_EVERY == 0 or step + 1 == len(steps)):
            state = dict(step=step + 1, ends=ends, tokenizer=tokenizer.to_str(), model=model.state_dict(),
                         optimizers=[optimizer.state_dict() for optimizer in optimizers])
            torch.save(state, f"{state_file}.new")
            os.replace(f"{state_file}.new", state_file)
    model.load_state_dict({name: torch.stack([end[name] for end in ends[-AVERAGED:]]).mean(0)
                           for name in ends[-1]})
    return model


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


def told_and_asked(rng, wordings, tokenizer, column, distance):
    """The text of a dialogue of at least `distance` tokens, and how many of its first answers are about what
    the last one must tell.

    The user tells a fact (or several, or none), talks about other things for `distance` tokens, and asks."""
    chat = Dialogue(rng, wordings, held_out=True)
    chat.casual = False
    thing = rng.choice(list(REAL_VALUES)) if column == "real words" else chat.pick_thing()
    if column == "list":
        for _ in range(rng.randint(1, 6)):
            chat.say(*chat.tell(chat.pick_unknown()))
    elif column != "never told":
        value = {"words": lambda: " ".join(chat.word() for _ in range(rng.choice([1, 2]))),
                 "numbers": lambda: from_split(any_number, rng, True),
                 "real words": lambda: rng.choice(REAL_VALUES[thing])}.get(column, lambda: None)
        for _ in range(2 if column == "changed" else 1):
            chat.say(*chat.tell(thing, value()))
    told, start = chat.text.count("<|assistant|>"), 0 if column == "list" else len(chat.text)
    while len(tokenizer.encode(chat.text[start:]).ids) < distance:
        fill(chat, thing, more_facts=column != "list")
    chat.say(*(chat.list() if column == "list" else chat.ask(thing)))
    return chat.text, told


def fill(chat, thing, more_facts):
    """A turn that says nothing about the thing, and nothing about the facts so far."""
    kind = chat.rng.random()
    other = chat.pick_unknown(avoid={thing})
    if kind < 0.1 and more_facts:
        chat.say(*chat.tell(other))
    elif kind < 0.3:
        chat.say(*chat.ask(other))
    else:
        chat.say(*chat.chatter())


@torch.no_grad()
def right_answers(model, tokenizer, text):
    """For each answer of the text whether it is, token for token, the model's greedy one."""
    ids, targets = encode(tokenizer, [text], len(tokenizer.encode(text).ids) - 1)       # [1, L], [1, L]
    wrong = ((model(ids).logits.argmax(-1) != targets) & (targets != -100))[0]          # [L]
    number = (ids[0] == tokenizer.token_to_id("<|assistant|>")).cumsum(0)               # [L]
    return [not wrong[number == n].any() for n in range(1, number[-1] + 1)]


def evaluate(directory, wordings, samples=200):
    """Print the share of dialogues whose first answers (the notes) and last one are right, by distance."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    columns = ["words", "numbers", "real words", "changed", "never told", "list"]
    print("| tokens in between | " + " | ".join(columns) + " |\n|---:" + "|---:" * len(columns) + "|")
    for distance in [0, 1000, 2500, 3900]:
        shares = []
        for column in columns:
            rng, right = random.Random(f"{wordings} {column} {distance}"), 0
            for _ in range(samples):
                text, told = told_and_asked(rng, wordings, tokenizer, column, distance)
                answers = right_answers(model, tokenizer, text)
                right += all(answers[:told]) and answers[-1]
            shares.append(right / samples)
        print(f"| {distance:,} | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", choices=["choice", "final"], help="only measure, with these sentences")
    parser.add_argument("--directory", type=Path, default=HERE,
                        help="where the checkpoint is, or will be written (default: beside this script)")
    args = parser.parse_args()
    if args.evaluate:
        return evaluate(args.directory, args.evaluate)
    if "RANK" not in os.environ:
        parser.error("training needs torchrun: torchrun --nproc-per-node 2 tiny_chat/train.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    state_file = args.directory / "training.pt"
    if state_file.exists():
        tokenizer = Tokenizer.from_str(torch.load(state_file)["tokenizer"])
    else:
        rng = random.Random(1)
        tokenizer = train_tokenizer([dialogue(rng, 1024) for _ in range(1000)])
    model = train(tokenizer, state_file)
    if dist.get_rank() == 0:
        save(model, tokenizer, args.directory)


if __name__ == "__main__":
    main()
