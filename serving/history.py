"""The persistent store: the raw tokens of every turn, a tree in SQLite.

KV-tokens are only a cache; these ids are what dropped ones are recomputed from (the paper's persistent store of raw tokens).
Turns are like commits: each has a parent and holds only what it added, a conversation is a name for its last turn, a branch is
a second name. A turn keeps the ids that the model sampled, since tokenising the visible reply again may give others. A turn whose
beginning differs from what its parent's context began with (other instructions, a cut-off front) starts a *context of its own*.

A client that resends its whole history is recognised without a name: a turn stores a rolling hash of all visible messages up
to it. A turn whose ids are not vouched for by its visible text has no hash, and neither has any turn after it.

Owners need no column: a conversation's name begins with its owner's prefix, and so does whatever is asked for by that owner.

Invariants: every turn is needed by a conversation or by a later turn; what `commit` returned survives a crash (WAL,
synchronous=FULL); a commit whose parent is not the conversation's last turn changes nothing."""
import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from array import array
from contextlib import contextmanager
from typing import Iterable, NamedTuple

SCHEMA_VERSION = 2
BUSY_SECONDS = 5            # for which a write waits while another process holds the file
SCHEMA = f"""
CREATE TABLE meta (fingerprint TEXT NOT NULL);
CREATE TABLE turn (
    id TEXT PRIMARY KEY,
    parent TEXT REFERENCES turn(id),
    conversation TEXT NOT NULL,     -- in which it was committed
    length INTEGER NOT NULL,        -- tokens of its context up to here
    last_token INTEGER NOT NULL,
    prompt BLOB NOT NULL,           -- int32 ids
    reply BLOB NOT NULL,            -- int32 ids
    messages TEXT NOT NULL,         -- JSON: the new visible messages, then the reply
    carried INTEGER,                -- NULL: goes on from its parent's context, else starts one of its own with so many older messages
    note TEXT NOT NULL,             -- JSON: what its caller wants to know of it later
    hidden INTEGER NOT NULL DEFAULT 0,      -- deleted, but later turns need it
    hash BLOB,                      -- of all visible messages of its context up to here (NULL: never matched)
    created REAL NOT NULL);
CREATE TABLE conversation (
    name TEXT PRIMARY KEY,
    head TEXT REFERENCES turn(id),  -- NULL: no turn yet
    metadata TEXT,                  -- JSON (NULL: it was not asked for, it came with its first turn)
    waiting TEXT NOT NULL,          -- JSON: visible messages that its next turn begins with
    created REAL NOT NULL,
    active REAL NOT NULL);
CREATE INDEX turn_parent ON turn(parent);
CREATE INDEX turn_hash ON turn(hash);
CREATE INDEX conversation_head ON conversation(head);
CREATE INDEX conversation_active ON conversation(active);
PRAGMA user_version = {SCHEMA_VERSION}"""
TURNS = ("SELECT id, parent, coalesce(name, conversation), length, last_token, note, turn.created "
         "FROM turn LEFT JOIN conversation ON head = id")
CONTEXT, ANCESTRY = "CASE WHEN carried IS NULL THEN parent END", "parent"      # two ways up: as far as the model reads, and to the root


class Turn(NamedTuple):
    """A stored turn. conversation: one whose head it is, else the one in which it was committed.
    length: tokens of its context up to here; last_token: the last of them, sampled but never fed to the model.
    note: JSON, what `commit` was told; created: seconds since 1970."""
    id: str
    parent: str | None
    conversation: str
    length: int
    last_token: int
    note: str
    created: float


class ConversationRecord(NamedTuple):
    """metadata: None for a conversation that came with its first turn; waiting: messages that its next turn begins with."""
    name: str
    head: str | None
    metadata: dict | None
    waiting: list[dict]
    created: float
    active: float


class StaleTurn(LookupError):
    """The turn to build on is gone, or its conversation has gone on without us."""


class History:
    """Any thread may call any method."""

    def __init__(self, path=":memory:", fingerprint: str = ""):
        """fingerprint: the tokenizer's. ValueError if the file belongs to another tokenizer, another version of this program, or is
        no history at all."""
        if path != ":memory:":          # private conversations; SQLite gives -wal and -shm the mode of the file
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.chmod(path, 0o600)
        self._root_hash = digest(b"", fingerprint)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._open(path, fingerprint)
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} cannot be used as a history ({error}): name another file") from error

    def _open(self, path, fingerprint: str):
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES (?)", (fingerprint,))
        version, = self._db.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: name another file")
        if self._db.execute("SELECT fingerprint FROM meta").fetchone() != (fingerprint,):
            raise ValueError(f"{path} was written with another tokenizer or chat template, so its token ids mean something else "
                             "here: name another file for this model, or delete this one")
        for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 20"):
            self._db.execute(f"PRAGMA {setting}")

    def head(self, conversation: str) -> Turn | None:
        """The last turn of a conversation; None if it has none, or does not exist."""
        with self._lock:
            return self._head(conversation)

    def turn(self, turn_id: str) -> Turn | None:
        """None if it is gone or was deleted."""
        with self._lock:
            row = self._db.execute(f"{TURNS} WHERE id = ? AND NOT hidden", (turn_id,)).fetchone()
        return Turn(*row) if row else None

    def tokens(self, turn_id: str) -> array:
        """The raw ids of the context up to the end of this turn, array('i'). StaleTurn if it is gone."""
        with self._lock:
            return array("i", b"".join(prompt + reply for prompt, reply in self._up(CONTEXT, turn_id, "prompt, reply")))

    def messages(self, turn_id: str) -> list[dict]:
        """The visible messages of the context up to the end of this turn. StaleTurn if it is gone."""
        with self._lock:
            return [message for text, in self._up(CONTEXT, turn_id, "messages") for message in json.loads(text)]

    def commit(self, conversation: str, parent: str | None, prompt: Iterable[int], reply: Iterable[int], messages: Iterable[dict] = (),
               text: str | None = None, exact: bool = True, carried: int | None = None, note: dict = {}, id: str | None = None) -> Turn:
        """Appends a turn to a conversation whose head is `parent` (None: that has no turn yet); durable on return.

        prompt, reply: its ids. messages: its visible messages, {"role", "content"}, before the reply, whose visible text is
        `text` (None: a turn of raw tokens). exact: decoding `reply` gives `text`; where it does not (a stop string was cut
        off), a resent history never matches this turn. carried: the ids start a context of their own, and so many of its messages
        are older than this turn. StaleTurn if parent is gone or is not the head any more."""
        prompt, reply, visible = array("i", prompt), array("i", reply), list(messages)
        if text is not None:
            visible.append({"role": "assistant", "content": text})
        if not prompt and not reply:
            raise ValueError("a turn needs at least one token")
        with self._writing():
            length, before = self._end_of(conversation, parent)
            if carried is not None:
                length, before = 0, self._root_hash
            vouched = before and text is not None and exact
            turn = Turn(id or new_id(), parent, conversation, length + len(prompt) + len(reply), (prompt + reply)[-1], json.dumps(note), time.time())
            self._db.execute("INSERT INTO turn VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?)", (
                *turn[:5], prompt, reply, json.dumps(visible), carried, turn.note, rolled(before, visible)[-1] if vouched else None, turn.created))
            self._db.execute("INSERT INTO conversation VALUES (:name, :head, NULL, '[]', :now, :now) ON CONFLICT (name) DO UPDATE "
                             "SET head = :head, waiting = '[]', active = :now", dict(name=conversation, head=turn.id, now=turn.created))
        return turn

    def match(self, messages: list[dict], hint: str | None = None, owner: str = "") -> tuple[Turn, int] | None:
        """For a client that resends its history: the turn whose visible messages are the longest proper prefix of `messages`
        that ends with an assistant message, and the length of that prefix. Among equal turns one of the hinted conversation is
        preferred, then the head of any, then the newest. Only conversations whose name begins with `owner` are looked at."""
        hashes = rolled(self._root_hash, messages)
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] == "assistant":
                with self._lock:
                    row = self._db.execute(
                        f"{TURNS} WHERE hash = :hash AND NOT hidden AND substr(conversation, 1, length(:owner)) = :owner "
                        "ORDER BY :hint IN (name, conversation) DESC, name = :hint DESC, name IS NOT NULL DESC, turn.rowid DESC",
                        dict(hash=hashes[count - 1], hint=hint, owner=owner)).fetchone()
                if row:
                    return Turn(*row), count
        return None

    def branch(self, turn_id: str, conversation: str) -> Turn:
        """Starts a conversation whose head is an existing turn; nothing is copied. StaleTurn if the turn is gone; ValueError if
        the conversation exists."""
        with self._writing():
            self._up(ANCESTRY, turn_id, "id")       # raises if it is gone
            self._insert(conversation, turn_id, None, [])
            return self._head(conversation)

    def forget(self, conversation: str) -> list[str]:
        """Drops a conversation and its turns that no other conversation or turn needs. An unknown name is no error. Returns the
        conversations that are not what they were, as `delete` does."""
        with self._writing():
            if (record := self._record(conversation)) is None:
                return []
            self._db.execute("DELETE FROM conversation WHERE name = ?", (conversation,))
            return [conversation] + self._release(record.head)

    def delete(self, turn_id: str) -> list[str]:
        """Drops a turn: conversations that end with it end with its parent then; without one they go, unless they were asked for. They
        are returned. A turn that later ones build on is hidden, and goes with the last of these."""
        with self._writing():
            self._db.execute("UPDATE turn SET hidden = 1 WHERE id = ?", (turn_id,))
            return self._release(turn_id)

    # ---- conversations as such

    def create(self, conversation: str, metadata: dict, messages: Iterable[dict] = ()):
        """A conversation without a turn; `messages` are what its first one will begin with. ValueError if it exists."""
        with self._writing():
            self._insert(conversation, None, metadata, list(messages))

    def record(self, conversation: str) -> ConversationRecord | None:
        with self._lock:
            return self._record(conversation)

    def update(self, record: ConversationRecord):
        """Stores its metadata and waiting messages; from now on it counts as asked for."""
        with self._writing():
            self._db.execute("UPDATE conversation SET metadata = ?, waiting = ?, active = ? WHERE name = ?",
                             (json.dumps(record.metadata or {}), json.dumps(record.waiting), time.time(), record.name))

    def items(self, conversation: str) -> list[dict]:
        """Every visible message of a conversation once, in order, each with an "id" of its own; those of deleted turns are left out."""
        with self._lock:
            if (record := self._record(conversation)) is None:
                return []
            turns = self._up(ANCESTRY, record.head, "id, messages, coalesce(carried, 0), hidden") if record.head else []
        items = []
        for turn_id, text, carried, hidden in turns:
            messages = [] if hidden else json.loads(text)[carried:]
            names = [f"msg_{turn_id}_{i}" for i in range(len(messages) - 1)] + [f"msg_{turn_id}"]      # the reply's has no number
            items += [dict(id=name) | message for name, message in zip(names, messages)]
        return items + record.waiting

    def oldest(self, before: float, max_bytes: float) -> str | None:
        """The least recently active conversation, if it was not active since `before` (seconds since 1970), or if all that is stored
        takes more than max_bytes."""
        with self._lock:
            name, active = self._db.execute("SELECT name, active FROM conversation ORDER BY active LIMIT 1").fetchone() or (None, before)
            size, pages, free = (self._db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_size", "page_count", "freelist_count"))
        return name if active < before or size * (pages - free) > max_bytes else None

    def conversations(self) -> list[str]:
        """The names of all conversations, sorted."""
        with self._lock:
            return [name for name, in self._db.execute("SELECT name FROM conversation ORDER BY name")]

    def close(self):
        """Closes the file; the history must not be used after."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self):
        """A transaction: all or nothing, and nobody else writes meanwhile."""
        self._begin()
        try:
            with self._db:
                yield
        finally:
            self._lock.release()

    def _begin(self):
        """Takes the lock and begins a transaction. While another process holds the file, we try again for BUSY_SECONDS, and give up
        the lock in between: our readers need not wait."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            self._lock.acquire()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except BaseException as error:
                self._lock.release()
                is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def _head(self, conversation: str) -> Turn | None:
        row = self._db.execute(f"{TURNS} WHERE name = ?", (conversation,)).fetchone()
        return Turn(*row) if row else None

    def _record(self, conversation: str) -> ConversationRecord | None:
        row = self._db.execute("SELECT * FROM conversation WHERE name = ?", (conversation,)).fetchone()
        return row and ConversationRecord(row[0], row[1], *(text and json.loads(text) for text in row[2:4]), *row[4:])

    def _insert(self, conversation: str, head: str | None, metadata: dict | None, waiting: list[dict]):
        if self._record(conversation):
            raise ValueError(f"conversation {conversation!r} exists already: use a new name")
        now, metadata = time.time(), None if metadata is None else json.dumps(metadata)
        self._db.execute("INSERT INTO conversation VALUES (?, ?, ?, ?, ?, ?)", (conversation, head, metadata, json.dumps(waiting), now, now))

    def _release(self, turn_id: str | None) -> list[str]:
        """Drops a turn, and those above it, that nobody needs: no later turn, nor, unless it is hidden, a conversation that ends with
        it. Returns the conversations that end earlier now."""
        moved = []
        while turn_id and not self._db.execute("SELECT 1 FROM turn WHERE parent = ?", (turn_id,)).fetchone():
            names = self._db.execute("SELECT name FROM conversation WHERE head = ?", (turn_id,)).fetchall()
            parent, hidden = self._db.execute("SELECT parent, hidden FROM turn WHERE id = ?", (turn_id,)).fetchone() or (None, False)
            if names and not hidden:
                break
            self._db.execute("UPDATE conversation SET head = ? WHERE head = ?", (parent, turn_id))
            self._db.execute("DELETE FROM turn WHERE id = ?", (turn_id,))
            turn_id, moved = parent, moved + [name for name, in names if name not in moved]
        self._db.execute("DELETE FROM conversation WHERE head IS NULL AND metadata IS NULL")
        return moved

    def _end_of(self, conversation: str, parent: str | None) -> tuple[int, bytes | None]:
        """Length and hash of a conversation that ends with `parent`."""
        head = self._head(conversation)
        if (head and head.id) != parent:
            raise StaleTurn(f"conversation {conversation!r} does not end with {parent or 'nothing'} any more: "
                            f"{'its last turn is ' + head.id if head else 'it was forgotten'}; read its head and try again")
        if parent is None:
            return 0, self._root_hash
        return self._db.execute("SELECT length, hash FROM turn WHERE id = ?", (parent,)).fetchone()

    def _up(self, way: str, turn_id: str, columns: str) -> list[tuple]:
        """These columns of every turn on the way up from turn_id, the topmost first."""
        rows = self._db.execute(f"""
            WITH RECURSIVE chain(link, above, depth) AS (
                SELECT id, {way}, 0 FROM turn WHERE id = ?
                UNION ALL SELECT id, {way}, depth + 1 FROM turn JOIN chain ON id = above)
            SELECT {columns} FROM chain JOIN turn ON id = link ORDER BY depth DESC""", (turn_id,)).fetchall()
        if not rows:
            raise StaleTurn(f"turn {turn_id} is gone")
        return rows


def new_id() -> str:
    """96 random bits: nobody guesses it."""
    return secrets.token_hex(12)


def digest(previous: bytes, *texts: str) -> bytes:
    """sha256 over a digest (or nothing) and texts, written so that their borders count."""
    return hashlib.sha256(previous + json.dumps(texts).encode()).digest()


def rolled(start: bytes, messages: list[dict]) -> list[bytes]:
    """The rolling hash after each message: h_i = sha256(h_{i-1}, role, content)."""
    hashes = [start]
    for message in messages:
        hashes.append(digest(hashes[-1], message["role"], message["content"]))
    return hashes[1:]
