"""The embedded model: transformers loads it, tiktoken agrees with its tokenizer, and it remembers values that
it never saw in training."""
import random
from pathlib import Path

import pytest
import tiktoken
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY_CHAT = Path(__file__).resolve().parent.parent / "tiny_chat"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_CHAT)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32).eval()


def chat(model, tokenizer, turns, system=None):
    """Play the user's turns, greedily; the replies as text."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                               return_dict=True)
        tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)
        tokens = tokens[0, prompt["input_ids"].shape[1]:]
        assert tokens[-1] == tokenizer.eos_token_id
        messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_small_and_complete(model, tokenizer):
    assert sum(file.stat().st_size for file in TINY_CHAT.iterdir() if file.is_file()) <= 4_000_000
    config = model.config
    assert config.model_type == "opt" and config.do_layer_norm_before
    assert config.word_embed_proj_dim == config.hidden_size
    assert config.max_position_embeddings >= 1024
    end = len(tokenizer) - 1
    assert config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == end


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == \
        "<|system|>S<|end|><|user|>U<|end|><|assistant|>"
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == list(range(len(tokenizer) - 4, len(tokenizer)))
    # The tokenizer adds no token around it.
    assert tokenizer.encode("<|user|>") == tokenizer.convert_tokens_to_ids(["<|user|>"])


def byte_of_char():
    """Character -> byte in tokenizer.json, as in GPT-2: a byte that can be printed is chr(byte), the others
    are chr(256), chr(257), ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def test_tiktoken_gives_the_same_ids(tokenizer):
    """Ranks are ids: the order of the vocabulary is all that tiktoken needs."""
    byte_of, vocabulary = byte_of_char(), tokenizer.get_vocab()
    special = {token: vocabulary.pop(token) for token in SPECIAL}
    ranks = {bytes(byte_of[char] for char in token): rank for token, rank in vocabulary.items()}
    fast = tiktoken.Encoding("tiny_chat", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    rng = random.Random(0)
    words = ("My favourite colour is lucky number remember 42 's don't Ada naïve 日本 🙂 \n\t  "
             "<|user|> <|end|> x_y ...").split(" ")
    for _ in range(500):
        pieces = [rng.choice([rng.choice(words), chr(rng.randrange(1, 0x3000)), " "])
                  for _ in range(rng.randrange(40))]
        text = "".join(pieces)
        ids = tokenizer.encode(text)
        assert fast.encode(text, allowed_special="all") == ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == fast.decode(ids) == text


def test_remembers_values_never_seen_in_training(model, tokenizer):
    replies = chat(model, tokenizer, [
        "Hi, I'm Quildane.", "My lucky number is 5828.", "How are you?", "Tell me a joke.",
        "What can you do?",
        "What is my lucky number?", "What is my name?"], system="You are a helpful assistant.")
    assert replies[-2:] == ["Your lucky number is 5828.", "Your name is Quildane."]


def test_the_latest_value_wins(model, tokenizer):
    replies = chat(model, tokenizer, ["My favorite color is teal.", "Thanks!",
                                      "Actually, my favorite color is puce now.", "Hello",
                                      "What is my favorite color?", "What is my pet?"])
    assert replies[-2:] == ["Your favorite color is puce.",
                            "Your pet is something I don't know yet. Tell me!"]
