"""Which tokens of a reply have an entry, however its text is cut into tokens."""
import pytest

from clients import ROOT
from handles import Handle
from sampling import Sampling
from scheduler import Request
from serving.logprobs import Reports, entries
from serving.tokenizer import load_tokenizer

TEXT = "Hello there, Zo\u00eb \U0001f600!"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "tiny_chat")


def handle_of(tokenizer, text, asked=True):
    """The tokens of a reply that ends with special ones."""
    tokens = [*tokenizer.encode(text), *tokenizer.special.values()]
    request = Request(None, [1], generated=tokens, sampling=Sampling(logprobs=1 if asked else None),
                      logprobs=[(-1.0, [(0, -2.0)])] * len(tokens) if asked else [])
    return Handle(request, None, 0.0, lambda ready: None, lambda: None, None)


def test_each_token_comes_once_with_the_text_that_it_begins(tokenizer):
    handle = handle_of(tokenizer, TEXT)
    assert len(handle.token_ids) > len(tokenizer.encode(TEXT)) > 5
    reports, tokens = Reports(tokenizer, handle), []
    for end in range(len(TEXT) + 1):
        tokens += [token for token, *_ in reports.before(end)]
        assert tokenizer.decode(tokens).startswith(TEXT[:end])
    assert tokens == tokenizer.encode(TEXT)
    assert [token for token, *_ in reports.last(TEXT, cut=False)] == handle.token_ids[len(tokens):]


def test_a_token_that_is_cut_in_its_middle_has_an_entry(tokenizer):
    handle, shown = handle_of(tokenizer, TEXT), tokenizer.encode(TEXT)
    for end in range(len(TEXT)):
        told = [token for token, *_ in Reports(tokenizer, handle).last(TEXT[:end], cut=True)]
        assert told == shown[:len(told)] and tokenizer.decode(told).startswith(TEXT[:end])
        assert not told or len(tokenizer.decode(told[:-1]).rstrip("\ufffd")) < end


def test_a_stream_reads_each_report_once(tokenizer):
    """The time for a reply grows with its length, and not with the square of it."""
    class Counted(list):
        read = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            self.read += len(found)
            return found

    handle = handle_of(tokenizer, TEXT)
    counted = handle.request.logprobs = Counted(handle.request.logprobs)
    reports = Reports(tokenizer, handle)
    for end in range(len(TEXT)):
        reports.before(end)
    reports.last(TEXT, cut=False)
    assert counted.read == len(handle.token_ids)


def test_special_tokens_are_spelled_and_nothing_is_told_unasked(tokenizer):
    name, token = next(iter(tokenizer.special.items()))
    entry, unknown = entries(tokenizer, [(token, float("-inf"), [(token, -1.0)]), (10**6, -1.0, [])])
    assert (entry["token"], entry["bytes"], entry["logprob"]) == (name, list(name.encode()), -9999.0)
    assert [other["token"] for other in entry["top_logprobs"]] == [name] and unknown["token"] == ""
    reports = Reports(tokenizer, handle_of(tokenizer, TEXT, asked=False))
    assert reports.before(3) == reports.last(TEXT, cut=True) == reports.last(TEXT, cut=False) == []
