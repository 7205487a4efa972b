"""Which chunks cache the beginning of a prompt, when nobody says where the prompt comes from.

A client resends what it once sent, with one message altered; another one begins with the same
system message. To find the KV that these contexts have in common, each full chunk of tokens gets a
key. It is a hash of the chunk's tokens and of the key before, so it stands for all tokens up to
there. The first key depends on the tenant: nobody finds what belongs to somebody else.

    tokens        [ 0 .. 31 ]     [ 32 .. 63 ]     [ 64 .. 95 ]     [ 96 .. 104
    key of        tenant, tokens  key 0, tokens    key 1, tokens    (not full)
    filed         chunk A         chunk B          nothing          -> a new prompt shares A and B

Only a conversation that has a tenant is filed and searched for.

(vLLM finds its blocks of 16 tokens in the same way. There a block behind a missing one is useless.
Here it is not: the missing chunk is recomputed. So Pensieve's order of eviction stays.)

Invariant: each user of a filed chunk has a token at every position of it, and the key stands for
their tenant and all tokens up to its end. (It may lack KV. Who shares it computes that for all.)
"""
from array import array
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b

from kv_cache import Chunk, Conversation


class Beginnings:
    """Full chunks by what a context begins with: its tenant, and its tokens up to the chunk's end.

    A method costs O(tokens of the conversation) at most, however many chunks are filed."""

    def __init__(self, chunk_size: int):
        self.chunk_size = chunk_size
        self.roots: dict[Conversation, bytes] = {}      # the key that stands for the tenant
        self.chunks: dict[bytes, Chunk] = {}
        self.keys: dict[Chunk, bytes] = {}              # the same, from chunk to key

    def own(self, conversation: Conversation, tenant: str):
        """From now on the conversation is filed, and its next prompts are searched for. It keeps
        the tenant that it had first; see `_give`."""
        self._give(conversation, digest(tenant.encode()))

    def inherit(self, conversation: Conversation, origin: Conversation):
        """A conversation that shares chunks with its origin belongs to the origin's tenant."""
        if origin in self.roots:
            self._give(conversation, self.roots[origin])

    def _give(self, conversation: Conversation, root: bytes):
        """It keeps a tenant that it has. If it shares chunks with others who have no tenant, it has
        none either."""
        alone = all(len(chunk.users) == 1 for chunk in conversation.chunks)
        if conversation not in self.roots and alone:
            self.roots[conversation] = root

    def has_tenant(self, conversation: Conversation) -> bool:
        return conversation in self.roots

    def same_tenant(self, one: Conversation, other: Conversation) -> bool:
        """True also if neither has one."""
        return self.roots.get(one) == self.roots.get(other)

    def find(self, conversation: Conversation, tokens: array,
             prefix: Sequence[Chunk] = ()) -> Iterator[Chunk]:
        """tokens: the context that the conversation will have. For each full chunk of it: the
        conversation's own chunk if that has KV, else that of `prefix`, else the chunk that is filed
        under the same key. It ends where there is none of these.

        Example: the conversation has chunk 0 (evicted), 1 and 2. Others have filed A for chunk 0
        and B for chunk 3: A, own 1, own 2, B. prefix: chunks that nobody files."""
        for index, (its_own, key) in enumerate(self._keys(conversation, tokens, len(tokens))):
            other = prefix[index] if index < len(prefix) else self.chunks.get(key)
            chunk = its_own if its_own and has_or_gets_kv(its_own) else other
            if chunk is None:
                return
            yield chunk

    def file(self, conversation: Conversation, length: int):
        """File the full chunks of the conversation's first `length` tokens, so that others find
        them. Of two chunks with one key they find the first, unless only the second has KV. (When
        the first is discarded, the second is filed after its conversation has run again.)"""
        for chunk, key in self._keys(conversation, conversation.tokens, length):
            if chunk is None:
                return
            filed = self.chunks.get(key)
            if filed and has_or_gets_kv(chunk) and not has_or_gets_kv(filed):
                self.discard(filed)
            if conversation in chunk.users and self.chunks.setdefault(key, chunk) is chunk:
                self.keys[chunk] = key

    def discard(self, chunk: Chunk):
        """Nobody finds the chunk any more: it was cut, or it has no users. (An evicted one stays
        filed.)"""
        if key := self.keys.pop(chunk, None):
            del self.chunks[key]

    def check_integrity(self, conversations: Collection[Conversation]):
        """For tests: check the books from scratch."""
        assert self.chunks == {key: chunk for chunk, key in self.keys.items()}
        assert self.roots.keys() <= {*conversations}
        in_use = {chunk for one in conversations for chunk in one.chunks if one in chunk.users}
        assert self.keys.keys() <= in_use
        for one, key in self.roots.items():
            for chunk in one.chunks[:len(one.tokens) // self.chunk_size]:
                start = chunk.index * self.chunk_size
                key = digest(key + one.tokens[start:start + self.chunk_size].tobytes())
                assert self.keys.get(chunk, key) == key

    def _keys(self, conversation: Conversation, tokens: array,
              length: int) -> Iterator[tuple[Chunk | None, bytes]]:
        """For each full chunk of the first `length` tokens, in order: the conversation's own chunk,
        if there is one, and the key. Nothing at all without a tenant.

        A chunk of the conversation that is filed has its key already: all its users have the same
        tokens."""
        key = self.roots.get(conversation)
        for index in range(length // self.chunk_size if key else 0):
            its_own = conversation.chunks[index] if index < len(conversation.chunks) else None
            start = index * self.chunk_size
            chunk = slice(start, start + self.chunk_size)
            key = self.keys.get(its_own) or digest(key + tokens[chunk].tobytes())
            yield its_own, key


def has_or_gets_kv(chunk: Chunk) -> bool:
    """Does it have KV in a tier, or will it soon?"""
    return bool(chunk.filled or chunk.pinned)


def digest(content: bytes) -> bytes:
    """So many bits that nobody finds two contents with one digest."""
    return blake2b(content, digest_size=32).digest()
