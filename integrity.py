"""Are the books of a KVCache right? For tests, and for Engine(debug=True).

Every slot and every place is free, or in exactly one chunk, or held by a copy in flight alone. The
slot table agrees with the chunks, and the indexes of victims too. (Whether the KV is there, these
integers cannot say.) We derive all of it from scratch. AssertionError if it does not hold."""
from collections import Counter


def check(cache, conversations: list):
    """conversations: all that have chunks of the cache (kv_cache.KVCache). O(everything)."""
    chunks = {chunk for conversation in conversations for chunk in conversation.chunks}
    for conversation in conversations:
        check_conversation(cache, conversation)
    everyone = {*conversations}
    for chunk in chunks:
        check_chunk(cache, chunk, everyone)
    check_owners(cache, chunks)
    check_indexes(cache, chunks)
    named = cache.conversations.values()
    assert {one for one in named if one.row is not None} == {*cache.running.values()}
    cold = {one for one in named if cache.is_cold(one)}
    assert {*cache.cold_conversations()} == cold


def check_owners(cache, chunks: set):
    """Each slot, place and row has one owner."""
    slots = Counter([*cache.free_slots, *(slot for chunk in chunks for slot in chunk.slots)])
    places = Counter([*cache.free_places,
                      *(chunk.place for chunk in chunks if chunk.place is not None)])
    for ticket in cache.in_flight:
        assert ticket.chunk.ticket is ticket
        slots.update(ticket.orphans)
        places.update([ticket.place] if ticket.chunk.place != ticket.place else [])
    rows = [conversation.row for conversation in cache.running.values()] + cache.free_rows
    assert slots == Counter(range(cache.num_slots)), "a slot is lost, or owned twice"
    assert places == Counter(range(cache.num_places)), "a CPU place is lost, or owned twice"
    assert sorted(rows) == list(range(len(cache.table))), "a row is lost, or owned twice"


def check_chunk(cache, chunk, conversations: set):
    assert chunk.users and all(user in conversations for user in chunk.users)
    assert all(user.chunks[chunk.index:chunk.index + 1] == [chunk] for user in chunk.users)
    assert chunk.filled <= cache.chunk_size
    assert len(chunk.slots) in (0, chunk.filled) or chunk.pinned and len(chunk.slots) > chunk.filled
    assert (chunk.filled or chunk.place is None) and (chunk.state or not chunk.filled)
    assert chunk.ticket is None or chunk.ticket in cache.in_flight
    assert chunk.ticket is None or chunk.place in (None, chunk.ticket.place)


def check_conversation(cache, conversation):
    runs = conversation.row is not None
    assert runs == (cache.running.get(conversation.order) is conversation)
    for index, chunk in enumerate(conversation.chunks):
        first = chunk.users[0]
        of_prefix = first.pinned and first.row is None          # the designated one, see sharing.py
        assert chunk.index == index and (conversation in chunk.users or of_prefix)
        assert runs or index * cache.chunk_size < len(conversation.tokens), "beyond its tokens"
        if chunk.filled and chunk.users == (conversation,):
            end = index * cache.chunk_size + chunk.filled
            assert end <= min(conversation.known, len(conversation.tokens))
    if runs:
        slots = [slot for chunk in conversation.chunks for slot in chunk.slots]
        assert conversation.pinned and conversation.room == len(slots)
        row = cache.table[conversation.row, :len(slots)].tolist()
        assert row == slots, "the slot table disagrees"


def check_indexes(cache, chunks: set):
    """Each chunk stands in the index of its next move, as it is now, and in no other."""
    cache.refile()
    for chunk in chunks:
        assert (chunk.member is None) == (chunk.next_move is None)
        if not chunk.pinned:            # while a user runs, the policy's key may change
            move = chunk.next_move
            assert chunk.member == (cache.member(chunk, move) if move else None)
    for move, index in cache.indexes.items():
        members = [member for heap in index.heaps.values() for member in heap]
        filed = {member.chunk for member in members if not member.stale}
        assert filed == {chunk for chunk in chunks if chunk.next_move == move}, move
    slots = sum(len(chunk.slots) for chunk in chunks if chunk.next_move == "reclaim")
    assert cache.reclaimable == slots == sum(chunk.reclaimable for chunk in chunks)
