"""The CPU tier survives a restart: while no server runs, its KV is in a file.

    stop     both tiers -> the worthiest chunks, as many as the CPU tier has places -> FILE
    start    FILE -> CPU tier, while the server already answers: a thread reads and checks, and
             between two steps the engine takes over a few chunks

    FILE, of safetensors:    header | kv [n, layers, 2, chunk_size, H_kv, D] | sha256 of the header
        The header names the history, the layout (what the bytes of KV mean) and the weights; the
        conversations, with a digest of their tokens; and for each chunk its users and its crc32.

    all is loaded              the file stays: a server that is killed finds it again
    a conversation is deleted  the server overwrites its chunks at once (`erase`), or at the next
                               start if none ran; its name stays until the next stop, and so does
                               the digest of its tokens
    a start can use nothing    the server deletes the file at once: what a user deleted must go
    it is of another history   the server leaves it alone

Tokens that the history does not have are never written.

Invariant: a chunk comes into the CPU tier only if this version of the program has computed it, with
these weights, for these tokens, and if its bytes are those. Any other is recomputed as usual.
"""
import hashlib
import json
import os
import struct
import sys
import threading
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import torch

from checkpoint import weight_files
from config import require
from engine import Engine
from eviction import worth
from kv_cache import Chunk, Conversation
from kv_pool import KVPool
from owner import Closed
from parallel import Leader
from sharing import common_length

PORTION = 4             # chunks; of an 8B model they have 16 MiB, which take some 5 ms to copy
MOST_HEADER = 2**28     # bytes
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class SavedConversation(NamedTuple):
    name: str
    length: int             # its last chunk in the file ends here
    tokens: str             # digest of its tokens up to there
    last_active: float      # seconds since 1970
    root: str               # stands for its tenant (see beginnings.py), in hexadecimal; "": none

    def begins(self, tokens: array) -> bool:
        """Do the tokens begin with those of the file?"""
        beginning = tokens[:self.length]
        return len(beginning) == self.length and sha256_hex(beginning.tobytes()) == self.tokens


class SavedChunk(NamedTuple):
    number: int             # in its conversations: Chunk.index
    filled: int
    users: list[int]        # the numbers of saved conversations
    crc32: str              # of its bytes, eight digits


class SavedKV:
    """The file of the last stop. `read` and `erase` may run at the same time: what is erased under
    a read has another crc32."""

    def __init__(self, path: Path, layout: str, pool: KVPool):
        """An error with the reason if the file cannot be used."""
        with open(path, "rb") as file:
            header = read_header(file)
        metadata = json.loads(header[8:])["__metadata__"]
        if metadata["layout"] != layout:
            raise ValueError("it is of another model, dtype or chunk size, or a .py file beside "
                             "kv_file.py has changed")
        self.begin, self.chunk_bytes = len(header), pool.chunk_bytes
        self.weights, content = metadata["weights"], json.loads(metadata["content"])
        self.conversations = [SavedConversation(*fields) for fields in content["conversations"]]
        self.chunks = [SavedChunk(*fields) for fields in content["chunks"]]
        for chunk in self.chunks:
            begin = chunk.number * pool.chunk_size
            ends = [self.conversations[user].length for user in chunk.users]
            if not 0 <= begin < begin + chunk.filled <= min(begin + pool.chunk_size, *ends):
                raise ValueError("it is damaged")
        self.numbers = {one.name: number for number, one in enumerate(self.conversations)}
        self.file = open(path, "r+b", buffering=0)      # last: nothing fails after it

    def read(self, number: int) -> bytearray | None:
        """The bytes of a chunk; None if they are damaged, or erased."""
        data = bytearray(self.chunk_bytes)
        os.preadv(self.file.fileno(), [data], self.begin + number * self.chunk_bytes)
        return data if checksum(data) == self.chunks[number].crc32 else None

    def erase(self, name: str):
        """Overwrite the chunks of this conversation that no other one uses."""
        user = self.numbers.pop(name, None)
        for number, chunk in enumerate(self.chunks if user is not None else ()):
            if user in chunk.users:
                chunk.users.remove(user)
                if not chunk.users:
                    start = self.begin + number * self.chunk_bytes
                    os.pwrite(self.file.fileno(), bytes(self.chunk_bytes), start)


class KVFile:
    """What one engine does with the file: `load` at the start, `erase`, `close` at the end."""

    def __init__(self, path: str | os.PathLike, engine: Engine,
                 history: str | os.PathLike, tokens_of: Callable[[str], array | None]):
        """history: its file, which nobody else uses meanwhile. tokens_of: the tokens of a
        conversation, from any thread. An empty array if there is no such conversation; None while a
        turn may change them: then we neither restore nor erase.

        ValueError if this engine's KV cannot be kept in this file."""
        require(engine.directory and not engine.config.stateless and history != ":memory:"
                and not isinstance(engine.worker, Leader), "kv_file",
                "left out with random weights, with --stateless, with a history in memory, and "
                "under torchrun", str(path))
        self.path = Path(path).resolve()        # a link stays one
        require(self.path.parent.is_dir() and (self.path.is_file() or not self.path.exists()),
                "kv_file", "a file in a directory that exists", str(path))
        self.engine, self.cache = engine, engine.cache
        # The header begins with `mark`: so we know our file. The new file's name has the digest of
        # the history, too: so no other server writes to it.
        self.mark = dict(format="KV of nano-pensieve",
                         history=sha256_hex(bytes(Path(history).resolve())))
        self.new = self.path.with_name(f"{self.path.name}.{self.mark['history'][:16]}.new")
        self.pool, self.tokens_of = engine.worker.pool, tokens_of
        self.layout = layout_of(engine)
        self.weights: str | None = None         # their digest, once the thread has read them
        self.saved: SavedKV | None = None       # None: there is none that we can use
        self.restored = 0                       # chunks
        self.stopping = False                   # `close` tells the thread to end
        self.finished = False                   # it needs the file no more: we may overwrite it
        self.loader: threading.Thread | None = None

    def erase(self, conversation: str):
        """The conversation was deleted: the file forgets it, too."""
        if saved := self.saved:                     # the thread may set it to None meanwhile
            try:
                saved.erase(conversation)
            except OSError as error:
                self._discard(error)

    def _discard(self, error: Exception):
        """We cannot use the file, so what is deleted could live on in it: delete all of it."""
        self.saved = None
        self._say(f"not used, {error}")
        with suppress(OSError, ValueError):         # there is none, or it is not ours
            if self._exists():
                self.path.unlink()

    def _exists(self) -> bool:
        """ValueError if the file is not ours."""
        if not self.path.exists():
            return False
        mark = json.dumps(dict(__metadata__=self.mark)).encode()[:-2]   # without "}}": a beginning
        with open(self.path, "rb") as file:
            if file.read(8 + len(mark))[8:] != mark:
                raise ValueError("it is no KV file of this history: delete it, or name another one")
        return True

    def _say(self, text: str):
        print(f"KV file {self.path}: {text}", file=sys.stderr, flush=True)

    # ---- at the start. The loader's thread runs _load. It lets the engine's owner run _restore for
    # some chunks at a time, and at last _file_beginnings.

    def load(self):
        """Begin to load."""
        try:
            self.new.unlink(missing_ok=True)        # of a server that was killed while it stopped
            if self._exists():
                self.saved = SavedKV(self.path, self.layout, self.pool)
            else:
                self._say("there is none yet")
        except Exception as error:
            self._discard(error)
        self.loader = threading.Thread(target=self._load, daemon=True)
        self.loader.start()

    def _load(self):
        """What the loader's thread does. It hashes the weights in any case, since `close` needs
        that."""
        begin, saved = time.monotonic(), self.saved
        try:
            self.weights = self._digest_weights()
            if saved and not self.stopping:
                if saved.weights != self.weights:
                    raise ValueError("it is of other weights")
                self._load_chunks(saved)
                self._say(f"{self.restored:,} of {len(saved.chunks):,} chunks are back after "
                          f"{time.monotonic() - begin:.1f} s")
        except Exception as error:
            self._discard(error)
        self.finished = not self.stopping

    def _digest_weights(self) -> str:
        """1.2 GB in a second. We do it at every start: two models may have files of one size and
        one date, for example if an image of a container sets all dates to 0."""
        found = hashlib.sha256()
        for path in weight_files(self.engine.directory):
            with open(path, "rb") as file:
                while (block := file.read(2**20)) and not self.stopping:
                    found.update(block)
        return found.hexdigest()

    def _load_chunks(self, saved: SavedKV):
        """Erase what was deleted or changed since the file was written. Then restore as many chunks
        as there are free places, the worthiest first, as they are in the file."""
        for one in saved.conversations:
            tokens = self.tokens_of(one.name)
            if tokens is not None and not one.begins(tokens):
                self.erase(one.name)
        for start in range(0, len(saved.chunks), PORTION):
            numbers = range(start, min(start + PORTION, len(saved.chunks)))
            portion = [(saved.chunks[number], saved.read(number)) for number in numbers]
            if self.stopping or not self.cache.free_places:
                break
            self.engine.call(partial(self._restore, saved, portion))
        self.engine.call(self._file_beginnings)

    def _restore(self, saved: SavedKV, portion: list[tuple[SavedChunk, bytearray | None]]):
        """The engine's owner takes over some chunks."""
        users = {number: self._open(saved.conversations[number])    # None: it has changed
                 for chunk, _ in portion for number in chunk.users}
        for chunk, data in portion:
            present = [user for number in chunk.users if (user := users[number])]
            place = self.cache.restore(present, chunk.number, chunk.filled) if data else None
            if place is not None:
                self.pool.write_place(place, data)
                self.restored += 1

    def _open(self, saved: SavedConversation) -> Conversation | None:
        """The conversation in the cache. None if its tokens are gone, or if the file has other
        tokens or another tenant."""
        held, roots = self.cache.conversations.get(saved.name), self.cache.beginnings.roots
        tokens = held.tokens if held else self.tokens_of(saved.name)
        if tokens is None or not saved.begins(tokens):
            return None
        if not held:
            held = self.cache.open(saved.name, tokens)
            held.last_active = self.engine.clock() - max(0.0, time.time() - saved.last_active)
            if saved.root:
                roots[held] = bytes.fromhex(saved.root)
        if not held.chunks:
            self.cache.drop_all(held)       # there is nothing to drop, but now it shares the
                                            # designated prefix
        return held if roots.get(held, b"").hex() == saved.root else None

    def _file_beginnings(self):
        """Let new conversations of a tenant find what those of the same tenant have."""
        for one in self.cache.conversations.values():
            self.cache.beginnings.file(one, one.known)

    # ---- at the stop

    def close(self):
        """Write the file, after the engine has closed. It stays as it was if it has not been read
        to its end yet, and if the engine has failed: then we trust no KV."""
        self.stopping = True
        self.loader.join()
        if self.saved:
            self.saved.file.close()
        if self.finished and self.weights and isinstance(self.engine.failure, Closed):
            self._save()
        else:
            self._say("not written, since it was not read to its end, or the engine has failed")

    def _save(self):
        """To a new file, which then takes the place of the old one."""
        begin = time.monotonic()
        try:
            self._exists()                          # never overwrite what is not ours
            chunks = self._worthiest()
            private = os.open(self.new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(private, "wb") as file:
                self._write(file, chunks)
                file.flush()
                os.fsync(private)
            os.replace(self.new, self.path)
            self._say(f"{len(chunks):,} chunks, {self.path.stat().st_size / 2**20:,.1f} MiB, "
                      f"written in {time.monotonic() - begin:.1f} s")
        except Exception as error:
            self._say(f"not written, {error}")
        finally:
            with suppress(OSError):
                self.new.unlink(missing_ok=True)

    def _worthiest(self) -> dict[Chunk, list[Conversation]]:
        """The chunks, and of each one the users whose history has all of its tokens. (A client may
        have asked us to store nothing, or less. No conversation is a user of the designated
        prefix.)"""
        cache, now = self.cache, self.engine.clock()
        users: dict[Chunk, list[Conversation]] = defaultdict(list)
        for one in cache.conversations.values():
            stored = common_length(one.tokens, self.tokens_of(str(one.name)) or ())
            for chunk in one.chunks:
                if chunk.filled and one in chunk.users and self._end(chunk) <= stored:
                    users[chunk].append(one)

        def value(chunk: Chunk) -> float:
            return worth(cache.policy, cache.member(chunk, "drop"), now)
        worthiest = sorted(users, key=value, reverse=True)[:cache.num_places]
        return {chunk: users[chunk] for chunk in worthiest}

    def _end(self, chunk: Chunk) -> int:
        return chunk.index * self.pool.chunk_size + chunk.filled

    def _write(self, file: IO[bytes], chunks: dict[Chunk, list[Conversation]]):
        """The header is written twice: first without checksums, to keep its room, and again when
        all of them are known."""
        lengths: dict[Conversation, int] = {}
        for chunk, users in chunks.items():
            lengths |= {user: max(self._end(chunk), lengths.get(user, 0)) for user in users}
        numbers = {user: number for number, user in enumerate(lengths)}
        conversations = [self._describe(*item) for item in lengths.items()]
        saved = [SavedChunk(chunk.index, chunk.filled, [numbers[user] for user in users],
                            "-" * 8) for chunk, users in chunks.items()]
        file.write(self._header(conversations, saved))
        for number, chunk in enumerate(chunks):
            data = self.pool.read_chunk(chunk)
            saved[number] = saved[number]._replace(crc32=checksum(data))
            file.write(data)
        header = self._header(conversations, saved)
        file.write(hashlib.sha256(header).digest())
        file.seek(0)
        file.write(header)

    def _describe(self, one: Conversation, length: int) -> SavedConversation:
        idle = self.engine.clock() - one.last_active
        root = self.cache.beginnings.roots.get(one, b"").hex()
        return SavedConversation(str(one.name), length, sha256_hex(one.tokens[:length].tobytes()),
                                 time.time() - idle, root)

    def _header(self, conversations: list[SavedConversation], chunks: list[SavedChunk]) -> bytes:
        """Of one length, whatever the checksums are."""
        content = json.dumps(dict(conversations=conversations, chunks=chunks))
        end = len(chunks) * self.pool.chunk_bytes
        tensors = dict(
            kv=dict(dtype=DTYPES[self.pool.cpu.dtype], shape=[len(chunks), *self.pool.chunk_shape],
                    data_offsets=[0, end]),
            sha256=dict(dtype="U8", shape=[32], data_offsets=[end, end + 32]))
        metadata = self.mark | dict(layout=self.layout, weights=self.weights, content=content)
        text = json.dumps(dict(__metadata__=metadata) | tensors).encode()
        text += b" " * (-len(text) % 8)             # as safetensors wants it
        return struct.pack("<Q", len(text)) + text


def read_header(file: IO[bytes]) -> bytes:
    """With its length in front. ValueError if it is damaged."""
    size = 8 + int.from_bytes(file.read(8), "little")
    file.seek(0)
    header = file.read(min(size, MOST_HEADER))
    file.seek(-32, os.SEEK_END)
    if hashlib.sha256(header).digest() != file.read():
        raise ValueError("it is damaged")
    return header


def layout_of(engine: Engine) -> str:
    """A digest of all that decides, beside weights and tokens, what the bytes of a chunk mean. It
    changes by itself: with the model's configuration (its positions included), with dtypes and
    sizes, and with any .py file beside this one. (Those in serving/ do not touch KV. A file that a
    user puts here counts, too: to lose the KV once costs less than to trust a wrong one.)"""
    model, pool = engine.worker.model, engine.worker.pool
    config = json.dumps(asdict(model.config), default=sorted)   # sets have no order
    settings = [config, str(model), engine.config.dtype, str(pool.cpu.dtype), str(pool.chunk_shape)]
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return sha256_hex(json.dumps(settings).encode() + b"".join(sources))


def sha256_hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def checksum(data) -> str:
    return f"{zlib.crc32(data):08x}"
