"""Make the embedded model: a small Llama that remembers what you told it.

Training begins with dialogues of 256 tokens, and goes on with a mixture of 512, 1,024 and 5,120. In half of
those shorter than 5,120 the positions have random gaps between turns, so that the model meets every distance
up to 5,120 tokens before it meets dialogues that long. With --tune, training begins with the finished weights
in the directory, and goes on with such a mixture. So a copy of tiny_chat can learn the sentences that you
have added to its sentences.json: this script takes those beside it.

    torchrun --nproc-per-node 2 tiny_chat/train.py --directory my_chat      # on two cores
    torchrun --nproc-per-node 1 tiny_chat/train.py --directory my_chat      # on one GPU (not tried)
    torchrun --nproc-per-node 2 my_sentences/train.py --tune                # train a copy's weights further
    python tiny_chat/train.py --evaluate choice             # measure while you choose settings
    python tiny_chat/train.py --evaluate final              # measure afterwards, with other sentences

All processes train one model: each computes the gradients of its own dialogues, and all take a step along
their mean. Training saves its state in training.pt every 200 steps, and continues from there when it is
started again, also on other hardware.
"""
import argparse
import ctypes
import json
import os
import random
import re
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dialogues import Dialogue, dialogue, draw
from sentences import REAL_VALUES

HERE = Path(__file__).resolve().parent
CONTEXT = 4096
LONGEST = 5120      # tokens of the longest dialogue: above CONTEXT, so that distances of 3,900 are common
# Phases: (steps, about how many tokens a step has, lengths of a dialogue in tokens). All dialogues of a step
# have one length, and the lengths take turns. A step has at least two dialogues: 10,240 tokens of LONGEST.
PHASES = [(4500, 2048, [256]), (6400, 2048, 3 * [512, 512, 1024, 512] + [1024, LONGEST])]
OUTSIDE_WEIGHT = 0.2                # of the mean loss on tokens outside answers, beside 1 for answers
TUNING = [(4000, 8192, [512, 512, 1024, 512, 512, LONGEST])]       # of --tune
PEAKS = 0.007, 0.0021               # highest learning rates of Muon and AdamW
WARM_UP, COOL_DOWN = 200, 0.35      # steps to the full rate; the share of steps in which it falls
SAVE_EVERY = 200                    # steps
VOCABULARY = 1024                   # of a new tokenizer
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
    """Token ids, the ids after them, and whether these next ids belong to an answer: all [B, length].

    Texts are cut, or padded with <|end|>. Of "<|user|>Hi.<|end|><|assistant|>Hello.<|end|>" only "Hello." and
    the last <|end|> belong to an answer: before them, the latest special token is <|assistant|>."""
    end, assistant = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|assistant|>")
    rows = [encoding.ids[:length + 1] for encoding in tokenizer.encode_batch(texts)]
    ids = torch.tensor([row + [end] * (length + 1 - len(row)) for row in rows])         # [B, length + 1]
    position = torch.arange(length + 1).expand_as(ids)                                  # [B, length + 1]
    special = ids >= tokenizer.get_vocab_size() - len(SPECIAL)
    last_special = torch.where(special, position, 0).cummax(dim=1).values               # [B, length + 1]
    return ids[:, :-1], ids[:, 1:], ids.gather(1, last_special)[:, :-1] == assistant


def positions_with_gaps(rng, ids, user):
    """Positions [B, length] of the ids: in half of the rows they jump at up to four of the user's turns, such
    that the last position is at most LONGEST - 1. user: the id of <|user|>.

    If the second turn begins at index 3, with a gap of 100 before it: 0 1 2 103 104 105 ..."""
    increments = torch.ones_like(ids)
    for row, increment in zip(ids, increments):
        turns = (row == user).nonzero().flatten().tolist()[1:]      # before the first there is no fact
        spare = rng.randint(0, LONGEST - len(row)) if rng.random() < 0.5 else 0
        for turn in rng.sample(turns, min(len(turns), rng.randint(1, 4))):
            gap = rng.randint(0, spare)
            increment[turn] += gap
            spare -= gap
    return increments.cumsum(dim=1) - 1


# ---------------------------------------------------------------------------------------------------------
# Training


def attend_in_blocks(module, query, key, value, attention_mask, scaling, **_):
    """Causal attention in blocks of 128 queries, or of length / 20 if that is more. No block computes scores
    for keys after its end. transformers calls this in every layer.

    We ignore attention_mask: each token sees all before it, also across a gap in the positions. query [B, H,
    length, D]; key, value [B, G, length, D]: each of the G serves H / G heads of query. Returns [B, length,
    H, D], and None for the weights. We compute in value's type: during training bfloat16, if the CPU has
    instructions for it. On such a CPU, compared with float32 and torch's own attention, a step of a
    narrower model took half the time with dialogues of 512 tokens, and two thirds with 5,120."""
    B, H, length, D = query.shape
    G, block = key.shape[1], max(128, length // 20)
    query = (query * scaling).to(value.dtype).reshape(B * G, H // G, length, D)
    key, value = key.to(value.dtype).reshape(B * G, length, D), value.reshape(B * G, length, D)
    later = torch.full((block, block), float("-inf"), dtype=value.dtype).triu(1)        # [block, block]
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        queries = query[:, :, start:end].flatten(1, 2)          # [B * G, N = H / G * (end - start), D]
        scores = queries @ key[:, :end].mT                                              # [B * G, N, end]
        with torch.no_grad():       # scores + constant has the gradient of scores
            scores.unflatten(1, (H // G, -1))[..., start:] += later[:end - start, :end - start]
        outputs.append((scores.softmax(-1) @ value[:, :end]).unflatten(1, (H // G, -1)))
    return torch.cat(outputs, dim=2).view(B, H, length, D).transpose(1, 2), None


def attend_on_gpu(module, query, key, value, attention_mask, scaling, **_):
    """What attend_in_blocks does, by one of torch's kernels. Under autocast torch casts all three."""
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                              enable_gqa=True)                          # [B, H, length, D]
    return attended.transpose(1, 2), None


def new_model(vocabulary):
    """A Llama whose slowest nine of 16 rotary angles turn 8 times as slowly as usual, as in Llama 3.1. Six of
    them now turn by less than 10 degrees within 4,096 tokens. With these the model can find a note by its
    words, however far away it is. No pad_token_id: we pad with <|end|>, and a pad token's embedding gets no
    gradient."""
    AttentionInterface.register("in blocks", attend_in_blocks)
    AttentionInterface.register("on a GPU", attend_on_gpu)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 1024},
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=None, eos_token_id=vocabulary - 1))
    model.set_attn_implementation("in blocks")
    return model


def has_bfloat16(device):
    """Does the device have instructions for bfloat16? A CPU without them takes 100 times as long as
    in float32."""
    abilities = getattr(torch.cpu, "get_capabilities", dict)()      # older versions of torch cannot say
    return device.type == "cuda" or abilities.get("avx512_bf16", False)


def orthogonal(matrices):
    """Returns the matrices [N, R, C] with their singular vectors kept, and their singular values moved to
    about 0.7 to 1.2.

    We divide each matrix by its Frobenius norm, so that no singular value is above 1. Then each of five
    Newton-Schulz steps replaces every singular value s by 3.4445 s - 4.7750 s^3 + 2.0315 s^5 (Jordan's
    numbers): 0.1 becomes 0.34, 0.99, 0.71, 1.11, and at last 0.71. Very small ones stay below."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT                                                                 # [N, R, R], R <= C
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def shared(function, matrices):
    """function(matrices) [N, R, C], of which each process computes an equal part. N is even here, and there
    are at most two processes."""
    part = function(matrices.chunk(dist.get_world_size())[dist.get_rank()]).contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)


class Muon(torch.optim.Optimizer):
    """Nesterov's momentum; we make its steps orthogonal (Jordan et al., 2024).

    Matrices with more rows than columns take larger steps. We compute those of one shape together, because a
    GPU is faster at few large operations than at many small ones. We do not use torch.optim.Muon: it computes
    in bfloat16 even where that is slow."""

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.01):
        of_shape = {}
        for matrix in matrices:
            of_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [dict(params=same) for same in of_shape.values()]
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            matrices = group["params"]
            grads = torch.stack([matrix.grad for matrix in matrices])                   # [N, R, C]
            state, (_, R, C) = self.state[matrices[0]], grads.shape     # one state for the whole group
            if not state:
                state["smoothed"] = torch.zeros_like(grads)
            smoothed = state["smoothed"]        # mean of all gradients; the older, the less they count
            smoothed.lerp_(grads, 1 - group["momentum"])
            ahead = grads.lerp(smoothed, group["momentum"])
            updates = shared(orthogonal, ahead.bfloat16() if has_bfloat16(ahead.device) else ahead)
            for matrix, update in zip(matrices, updates):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1, R / C) ** 0.5)


def schedule(phases, top=1, cool_down=COOL_DOWN):
    """A list with a tuple for each step: how many dialogues it has (at least two, as there may be two
    processes), their length, and the learning rate as a share of PEAKS. The rate rises by 0.005 a step to
    `top`, stays there, and in the last part of the steps, 35% by default, it falls to top / 50. (With a
    cool_down of 1 it rises to just below `top`, and falls from then on.) The first tuple for PHASES is
    (8, 256, 0.005): eight dialogues of 256 tokens."""
    sizes = [(max(2, round(tokens / length)), length) for steps, tokens, lengths in phases
             for length in (lengths * steps)[:steps]]
    rates = [min(top, (step + 1) / WARM_UP, top * max(0.02, (len(sizes) - step) / len(sizes) / cool_down))
             for step in range(len(sizes))]
    return [(count, length, rate) for (count, length), rate in zip(sizes, rates)]


class Batches(Dataset):
    """What one of the processes trains on: for each step what `encode` returns, and positions [B, length]."""

    def __init__(self, steps, tokenizer):
        self.steps, self.tokenizer = steps, tokenizer
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        texts = [dialogue(random.Random(n), 1024) for n in range(20)]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
        # Characters per token, and a tenth more, so that we pad few dialogues: `encode` cuts the others.
        self.per_token = 1.1 * sum(map(len, texts)) / tokens

    def __getitem__(self, step):
        count, length, _ = self.steps[step]
        rng = random.Random(f"step {step} process {self.rank}")
        texts = [dialogue(rng, length, self.per_token) for _ in range(count // self.processes)]
        ids, next_ids, in_answer = encode(self.tokenizer, texts, length)
        positions = positions_with_gaps(rng, ids, self.tokenizer.token_to_id("<|user|>"))
        return ids, next_ids, in_answer, positions


def average(tensors):
    """Replace each tensor by its mean over all processes."""
    total = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means):
        tensor.copy_(mean.view_as(tensor))


def logits_of(model, ids, positions):
    """The logits [B, length, V] after each of the ids [B, length]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=has_bfloat16(ids.device)):
        return model(ids, position_ids=positions, use_cache=False).logits.float()


def begin(directory, state_file, tune):
    """The model, the tokenizer and the schedule of a training, before `train` loads the state, if there is
    one. With `tune` the first two are those of the checkpoint in the directory. Else the model is new, and so
    is the tokenizer, unless the state has one."""
    torch.manual_seed(1)                # the weights are the same in all processes
    if tune:
        finished = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model = new_model(finished.config.vocab_size)
        model.load_state_dict(finished.state_dict())
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return model, tokenizer, schedule(TUNING, top=0.7, cool_down=1)
    if state_file.exists():
        tokenizer = Tokenizer.from_str(torch.load(state_file, map_location="cpu")["tokenizer"])
    else:
        rng = random.Random(1)
        tokenizer = train_tokenizer([dialogue(rng, 1024) for _ in range(1000)])
    return new_model(VOCABULARY), tokenizer, schedule(PHASES)


def train(model, tokenizer, steps, outside_weight, state_file, device):
    """Train the model through all steps of a schedule, from `state_file` on if that exists. All processes
    begin with the same weights and take the same steps, so they end with the same weights.

    outside_weight: the weight of the mean loss on tokens outside answers, beside 1 for that on answers. Most
    of these tokens are the user's, and nobody will ask the model to predict them. But a briefly trained model
    that learnt to do so understood more of the user's sentences."""
    model.to(device)
    if device.type == "cuda":
        model.set_attn_implementation("on a GPU")
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    optimizers = [Muon(matrices, PEAKS[0]),
                  torch.optim.AdamW(others, PEAKS[1], betas=(0.9, 0.95), weight_decay=0.0)]
    done, start = load_state(state_file, steps, model, optimizers), time.time()
    todo = range(done, len(steps))
    batches = DataLoader(Batches(steps, tokenizer), batch_size=None, sampler=todo,
                         num_workers=min(8, os.cpu_count() - 1) if device.type == "cuda" else 0)
    for step, batch in zip(todo, batches):
        ids, next_ids, in_answer, positions = (tensor.to(device) for tensor in batch)
        logits = logits_of(model, ids, positions)                           # [B, length, V]
        losses = F.cross_entropy(logits.flatten(0, 1), next_ids.flatten(), reduction="none").view_as(ids)
        loss = losses[in_answer].mean()
        (loss + outside_weight * losses[~in_answer].mean()).backward()
        average([p.grad for p in model.parameters()])
        for optimizer, peak in zip(optimizers, PEAKS):
            for group in optimizer.param_groups:
                group["lr"] = peak * steps[step][2]
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            right = (logits.argmax(-1) == next_ids)[in_answer].float().mean()
            print(f"step {step + 1:5}  {time.time() - start:5.0f} s since start  length {ids.shape[1]:4}  "
                  f"loss {loss.item():.4f}  right {right:.2%}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            save_state(state_file, step + 1, steps, tokenizer, model, optimizers)


def save_state(state_file, done, steps, tokenizer, model, optimizers):
    """Write the state after `done` of the steps. As all processes have the same state, the first one writes.
    After a crash the file is whole: the old or the new one."""
    if dist.get_rank() == 0:
        state = dict(done=done, steps=steps, tokenizer=tokenizer.to_str(), model=model.state_dict(),
                     optimizers=[one.state_dict() for one in optimizers])
        torch.save(state, f"{state_file}.new")
        os.replace(f"{state_file}.new", state_file)


def load_state(state_file, steps, model, optimizers):
    """Load the state of an interrupted training, if there is one. Returns the number of steps done."""
    if not state_file.exists():
        return 0
    state = torch.load(state_file, map_location="cpu")
    if state["steps"] != steps:
        raise SystemExit(f"{state_file} is of a training with other steps. Delete it to begin anew.")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["done"]


def save_checkpoint(model, tokenizer, directory):
    """Write Hugging Face's files, each at once, so that nobody who loads the model reads half a file."""
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        model.generation_config.pad_token_id = model.config.eos_token_id
        model.half().cpu().save_pretrained(fresh)
        tokenizer.save(f"{fresh}/tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False,
                  "eos_token": "<|end|>", "pad_token": "<|end|>", "model_max_length": CONTEXT,
                  "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
        Path(fresh, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in Path(fresh).iterdir():
            file.chmod(0o644)               # safetensors lets only the owner read its file
            os.replace(file, directory / file.name)


# ---------------------------------------------------------------------------------------------------------
# Measuring


def told_and_asked(rng, split, tokenizer, column, distance):
    """The text of a dialogue, and how many of its first answers note the facts that we measure.

    The user tells a fact (for "changed" twice, for "list" one to six, for "never told" none), talks about
    other things for about `distance` tokens, and asks. column: one of the table's, see `evaluate`. For "list"
    and "changed" the facts count as part of the distance, so that all fits into the context. No measured
    fact is the user's name: "Goodbye, Ada." would repeat it on the way."""
    chat = Dialogue(rng, split)
    chat.casual = chat.tells_american = chat.asks_american = False      # as REAL_VALUES is written
    chat.alike = 0                                      # no things such as "wifi colour"
    thing = rng.choice(list(REAL_VALUES)) if column == "real words" else chat.pick_unknown(avoid={"name"})
    unfit = {"words": "age", "numbers": "name"}.get(column)     # no age is a word, and no name a number
    while unfit and thing.endswith(unfit):
        thing = chat.pick_unknown(avoid={"name"})
    if column == "list":
        for _ in range(rng.randint(1, 6)):
            chat.say(*chat.tell(chat.pick_unknown(avoid={"name"})))
    elif column != "never told":
        for _ in range(2 if column == "changed" else 1):
            chat.say(*chat.tell(thing, value_for(column, thing, chat)))
    told = chat.text.count("<|assistant|>")
    between = len(tokenizer.encode(chat.text).ids) if column in ("list", "changed") else 0      # tokens
    # We stop 60 tokens early: one more turn has about 30, at times 200, and all must fit into 4,096.
    while between < distance - 60:
        start = len(chat.text)
        fill(chat, thing, more_facts=column != "list")
        between += len(tokenizer.encode(chat.text[start:]).ids)
    chat.say(*(chat.list_notes() if column == "list" else chat.ask(thing)))
    return chat.text, told


def value_for(column, thing, chat):
    """The value of a column's facts. None for "changed": `tell` then makes one up."""
    if column == "words":
        return " ".join(chat.word() for _ in range(chat.rng.choice([1, 2])))
    if column == "numbers":
        return draw(lambda rng: str(rng.randrange(10, 10 ** rng.choice([2, 3, 4, 5]))), chat.rng, True)
    return chat.rng.choice(REAL_VALUES[thing]) if column == "real words" else None


def fill(chat, thing, more_facts):
    """Add a turn about something else: not about the thing, and about no fact that has a note."""
    chance, other = chat.rng.random(), chat.pick_unknown(avoid={thing})
    if chance < 0.1 and more_facts:
        chat.say(*chat.tell(other))
    elif chance < 0.3:
        chat.say(*chat.ask(other))
    else:
        chat.say(*chat.chatter())


@torch.no_grad()
def right_answers(model, tokenizer, text):
    """For each answer: is each of its tokens the model's first choice after the text before it?"""
    ids, next_ids, in_answer = encode(tokenizer, [text], len(tokenizer.encode(text).ids) - 1)   # all [1, L]
    wrong = ((model(ids).logits.argmax(-1) != next_ids) & in_answer)[0]                 # [L]
    number = (ids[0] == tokenizer.token_to_id("<|assistant|>")).cumsum(0)               # [L]
    return [not wrong[number == n].any() for n in range(1, number[-1] + 1)]


def evaluate(directory, split, samples=200):
    """Print the table: the share of dialogues whose notes and last answer are right to the letter."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    columns = ["words", "numbers", "real words", "changed", "never told", "list"]
    print("| distance | " + " | ".join(columns) + " |\n|---:" + "|---:" * len(columns) + "|")
    for distance in [0, 1000, 2500, 3900]:
        shares = []
        for column in columns:
            rng, right = random.Random(f"{split} {column} {distance}"), 0
            for _ in range(samples):
                text, told = told_and_asked(rng, split, tokenizer, column, distance)
                answers = right_answers(model, tokenizer, text)
                right += all(answers[:told]) and answers[-1]
            shares.append(right / samples)
        print(f"| {distance:,} | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True)


def keep_freed_memory():
    """Let glibc's malloc keep all freed memory for later tensors. By default it takes each large block from
    Linux and returns it, with a system call each, and Linux fills every page with zeros. On a CPU without
    bfloat16 instructions, a narrower model's step with a dialogue of 5,120 tokens took 4.4 s by default, and
    3.3 s with this."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)                 # M_MMAP_MAX: no block comes from a call of its own
        libc.mallopt(-1, 2**31 - 1)         # M_TRIM_THRESHOLD: returns nothing before 2 GiB are free


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", choices=["choice", "final"], help="only measure, with these sentences")
    parser.add_argument("--tune", action="store_true", help="train the checkpoint in --directory further")
    parser.add_argument("--directory", type=Path, default=HERE,
                        help="where the checkpoint is, or will be written (default: beside this script)")
    args = parser.parse_args()
    if args.evaluate:
        return evaluate(args.directory, args.evaluate)
    if args.tune and not (args.directory / "model.safetensors").exists():
        parser.error(f"--tune needs a checkpoint in {args.directory}, for example a copy of {HERE}")
    most = min(2, torch.cuda.device_count() or 2)       # a step with the longest dialogues has two of them
    if not 1 <= int(os.environ.get("WORLD_SIZE", 0)) <= most:
        parser.error(f"training needs torchrun, with at most {most} processes here. Begin the command with "
                     f"torchrun --nproc-per-node {most}; the script and its arguments follow as they are")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)      # makes numbers below 1e-38 zero: else a step takes 2.7 times as long
    keep_freed_memory()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    args.directory.mkdir(parents=True, exist_ok=True)
    state_file = args.directory / "training.pt"
    model, tokenizer, steps = begin(args.directory, state_file, args.tune)
    outside_weight = 0 if args.tune else OUTSIDE_WEIGHT     # not tried with --tune
    train(model, tokenizer, steps, outside_weight, state_file, device)
    if dist.get_rank() == 0:
        save_checkpoint(model, tokenizer, args.directory)
        state_file.unlink(missing_ok=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
