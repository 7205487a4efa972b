"""The example of the chat page: what is said, and the tiers that fit it."""
import pytest

import server
from clients import ROOT, make_checkpoint
from serving.example import FACTS, NOTES, example_for
from serving.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Its tokenizer has a token for each character."""
    directory = tmp_path_factory.mktemp("ascii")
    make_checkpoint(directory)
    return directory


def test_tiny_chat_has_an_example_of_its_own(checkpoint, tmp_path):
    (tmp_path / "link").symlink_to(ROOT / "tiny_chat")
    assert example_for(ROOT / "tiny_chat") is example_for(tmp_path / "link") is FACTS
    assert example_for(checkpoint) is NOTES
    acts = {tuple(len(texts) > 1 for texts in example.said) for example in (FACTS, NOTES)}
    assert acts == {(True,) * 4 + (False,) * 3}


@pytest.mark.parametrize("chunk_size", [32, 48])
def test_the_tiers_follow_from_the_longest_chat_in_the_model_s_tokens(checkpoint, chunk_size):
    tokenizer = load_tokenizer(checkpoint)
    chats = []
    for texts in NOTES.said[:4]:
        prompts = "".join(f"<|user|>{text}<|end|><|assistant|>" for text in texts)
        markers, ends = 3 * len(texts), len(texts) - 1          # an <|end|> after each earlier answer
        chats.append(len(prompts) - len("<|user|><|end|><|assistant|>") * len(texts) + markers + ends
                     + NOTES.answer_tokens * len(texts))
    gpu, cpu = NOTES.tiers(tokenizer, chunk_size)
    assert 0 <= gpu - 1.5 * max(chats) < chunk_size and gpu % chunk_size == 0 and cpu == 2 * gpu


def test_flags_that_are_given_count_more_than_the_demo_s(checkpoint):
    demo = server.parse_flags(["--demo"])
    assert (demo.gpu_cache_tokens, demo.cpu_cache_tokens, demo.history) == (384, 768, ":memory:")
    sizes = NOTES.tiers(load_tokenizer(checkpoint), 16)
    other = ["--demo", "--model", str(checkpoint), "--chunk-size", "16"]
    demo = server.parse_flags(other)
    assert (demo.gpu_cache_tokens, demo.cpu_cache_tokens) == sizes != (384, 768)
    demo = server.parse_flags([*other, "--gpu-cache-tokens", "64", "--history", "mine"])
    assert (demo.gpu_cache_tokens, demo.cpu_cache_tokens, demo.history) == (64, sizes[1], "mine")


def test_a_demo_needs_a_tokenizer(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match="model must be a checkpoint with tokenizer.json"):
        server.parse_flags(["--demo", "--model", str(tmp_path)])
