"""The stateful API through the unmodified openai client: responses, branches, conversations,
cancellation, deletion, owners."""
import json
import threading
import urllib.request

import pytest

from serving.answers import Cache, Portrait
from serving.operations import OPERATIONS, ChatBody, CompletionBody, ItemsBody, ResponseBody
from serving.sessions import Sessions
from clients import CONTEXT, ask, connect, eventually, fetch, numbered, serving, user

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")

SOURCES = ("gpu", "cpu", "recomputed", "new")


@pytest.fixture(scope="module")
def server(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=3 * CONTEXT, cpu_cache_tokens=3 * CONTEXT,
                        max_running=4)
    with serving(sessions) as server:
        yield server


@pytest.fixture
def empty(checkpoint):
    """Another server, with nothing in it, and a check that there is nothing in it again."""
    with serving(Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=CONTEXT,
                          debug=True)) as server:
        def nothing_left():
            stats = server.engine.stats()
            free = stats["slots_free"], stats["cpu_chunks_free"]
            return free == (stats["slots_total"], stats["cpu_chunks_total"]) and stored(server) == 0
        with connect(server.url) as client:
            yield client, server, nothing_left


def respond(client, text, **options):
    usual = dict(model="ascii", max_output_tokens=12, extra_body=dict(ignore_eos=True))
    return client.responses.create(**dict(usual, input=text) | options)


def cached(response):
    """After a look at the accounting."""
    details, usage = response.usage.input_tokens_details, response.usage
    assert sum(getattr(details, source) for source in SOURCES) == usage.input_tokens
    assert details.cached_tokens == details.gpu + details.cpu
    assert details.cache_write_tokens == details.recomputed + details.new
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    return details.cached_tokens


def items(client, conversation):
    listed = client.conversations.items.list(conversation, order="asc")
    return [(item.role, item.content[0].text) for item in listed]


def refuses(client, **follows):
    """What the body names is not there: the error names the field, and is not that of a path."""
    field, = follows
    with pytest.raises(openai.BadRequestError, match=f"there is no .*{follows[field]}") as error:
        respond(client, "x", **follows)
    code = dict(conversation="conversation_not_found",
                previous_response_id="previous_response_not_found")[field]
    assert (error.value.param, error.value.code) == (field, code)
    assert error.value.type == "invalid_request_error"


def stored(server):
    return server.sessions.history._db.execute("SELECT count(*) FROM turn").fetchone()[0]


# ---- responses

def test_a_response_in_one_piece(client, server, checkpoint):
    made = respond(client, "Hello", metadata=dict(a="b"), temperature=0.5, top_p=0.9, user="me")
    assert (made.object, made.status, made.model, made.error) == ("response", "incomplete", "ascii", None)
    assert made.incomplete_details.reason == "max_output_tokens" and made.usage.output_tokens == 12
    item, = made.output
    assert ((item.type, item.role, item.status, item.content[0].type)
            == ("message", "assistant", "incomplete", "output_text"))
    assert len(made.output_text) <= 12 and item.content[0].annotations == []
    assert ((made.metadata, made.temperature, made.top_p, made.truncation)
            == (dict(a="b"), 0.5, 0.9, "disabled"))
    assert ((made.tools, made.tool_choice, made.parallel_tool_calls, made.previous_response_id)
            == ([], "none", False, None))
    assert cached(made) == 0
    assert client.responses.retrieve(made.id) == made
    ended = respond(client, "Hello", max_output_tokens=300, temperature=2, extra_body=dict(seed=1))
    assert ended.status == "completed" and ended.incomplete_details is None
    assert ended.output[0].status == "completed"


def test_events_are_complete_and_in_order(client):
    made = respond(client, "The same")
    *events, last = respond(client, "The same", stream=True)
    assert numbered([event.model_dump() for event in events + [last]])
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == ["created", "in_progress", "output_item.added", "content_part.added",
                     *["output_text.delta"] * len(deltas), "output_text.done", "content_part.done",
                     "output_item.done"]
    assert last.type == "response.incomplete"
    text = "".join(event.delta for event in deltas)
    assert text == made.output_text == events[-3].text == last.response.output_text
    assert events[0].response.status == "in_progress" and events[0].response.id == last.response.id
    assert events[-1].item == last.response.output[0]
    assert {event.item_id for event in deltas} == {events[-1].item.id}
    assert client.responses.retrieve(last.response.id) == last.response


def test_the_clients_own_accumulation(client):
    with client.responses.stream(model="ascii", input="Say it", temperature=2, max_output_tokens=300,
                                 extra_body=dict(seed=1)) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text and final.status == "completed"
    assert client.responses.retrieve(final.id).output_text == text


def test_only_what_is_new_is_sent(client):
    """Ten turns by previous_response_id: all that was fed before is cached, and the answers are those
    of a client that resends all."""
    previous, messages, length = None, [], 0
    for turn in range(10):
        made = respond(client, f"message {turn}", previous_response_id=previous, stream=False)
        assert cached(made) == max(length - 1, 0) and made.previous_response_id == previous
        messages.append(user(f"message {turn}"))
        resent = ask(client, messages, max_tokens=12, extra_body=dict(ignore_eos=True))
        assert resent[0] == made.output_text
        messages.append(dict(role="assistant", content=made.output_text))
        previous, length = made.id, made.usage.total_tokens


def test_items_in_all_their_forms(client):
    text = respond(client, "one text")
    content = [dict(type="input_text", text="one "), dict(type="input_text", text="text")]
    parts = [dict(role="user", content=content)]
    typed = [dict(type="message", role="user", content="one text", id="msg_x", status="completed")]
    for form in (parts, typed):
        assert respond(client, form).output_text == text.output_text
    text = respond(client, "one text", top_logprobs=1)
    # as the client gives items back
    resent = [user("one text"), *(item.to_dict() for item in text.output), user("and?")]
    assert (respond(client, resent).output_text
            == respond(client, "and?", previous_response_id=text.id).output_text)


def test_two_answers_to_one_response_are_two_branches(client):
    first = respond(client, "once")
    hill = respond(client, "upon a hill", previous_response_id=first.id)
    sea = respond(client, "upon a sea", previous_response_id=first.id)
    assert cached(hill) > 0 and hill.conversation.id == first.conversation.id != sea.conversation.id
    for branch in (hill, sea):
        after = respond(client, "and", previous_response_id=branch.id)
        assert after.conversation.id == branch.conversation.id
        assert cached(after) == branch.usage.total_tokens - 1
    assert ([text for role, text in items(client, sea.conversation.id) if role == "user"]
            == ["once", "upon a sea", "and"])


def test_what_is_not_stored_leaves_nothing(client, server):
    first = respond(client, "keep this")
    before, names = stored(server), server.sessions.history.conversations()
    for previous in (None, first.id):
        made = respond(client, "forget this", previous_response_id=previous, store=False)
        assert made.output_text and not made.store and made.conversation is None
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
    assert (stored(server), server.sessions.history.conversations()) == (before, names)
    assert respond(client, "go on", previous_response_id=first.id).conversation.id == first.conversation.id


def test_what_is_not_stored_stays_cached(empty, monkeypatch):
    """If the client names its session. It resends all, as codex does; its last 2 contexts stay cached."""
    monkeypatch.setattr("serving.sessions.MOST_UNSTORED", 2)
    client, server, _ = empty
    told, before = [], 0
    for turn in range(4):
        told.append(user(f"Message {turn}, which is a little longer"))
        made = respond(client, told, store=False, prompt_cache_key="mine")
        assert before - 1 <= cached(made) and (cached(made) > 0) == (turn > 0)
        told.append(made.output[0].to_dict())
        before = made.usage.input_tokens
    assert len(server.engine.cache.conversations) == 2
    salted = dict(cache_salt="of somebody else", ignore_eos=True)
    assert cached(respond(client, told, store=False, extra_body=salted)) == 0


def test_a_resent_history_is_recognised(client, server):
    """Whether it was told through responses or through a chat, with the instructions or as a message."""
    first = respond(client, "once", instructions="Be brief.")
    said = first.output[0].to_dict()
    second = respond(client, [user("once"), said, user("more")], instructions="Be brief.")
    assert cached(second) == first.usage.total_tokens - 1
    assert second.output_text == respond(client, "more", previous_response_id=first.id,
                                         instructions="Be brief.").output_text
    told = [user("once"), dict(role="assistant", content=first.output_text), user("more"),
            dict(role="assistant", content=second.output_text)]
    chat = ask(client, [dict(role="system", content="Be brief."), *told, user("and?")])
    assert chat[2].prompt_tokens_details.cached_tokens == second.usage.total_tokens - 1
    third = respond(client, [*told, user("so?")], instructions="Be brief.", store=False)
    # The conversation has gone on with "and?": this is a branch. It shares full chunks and copies the rest.
    assert cached(third) == second.usage.total_tokens - 1 and third.conversation is None
    after = respond(client, "more", previous_response_id=second.id, instructions="Be brief.")
    assert [text for _, text in items(client, after.conversation.id)][::2] == ["once", "more", "more"]
    other = respond(client, [*told, user("and?")], instructions="Be long.")
    assert cached(other) < 32 and other.conversation.id != second.conversation.id


def test_a_resent_history_that_is_too_long(client):
    long = "x" * (CONTEXT // 3)
    first = respond(client, long)
    second = respond(client, [user(long), first.output[0].to_dict(), user(long + "y")])
    told = [user(long), first.output[0].to_dict(), user(long + "y"), second.output[0].to_dict()]
    with pytest.raises(openai.BadRequestError, match=f"length is {CONTEXT} tokens") as error:
        respond(client, [*told, user(long)])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    third = respond(client, [*told, user(long)], truncation="auto")
    kept = [user(long + "y"), dict(role="assistant", content=second.output_text), user(long)]
    assert third.output_text == ask(client, kept, max_tokens=12, extra_body=dict(ignore_eos=True))[0]


def test_items_that_fit_into_no_context(client):
    long = [user("x" * CONTEXT)]
    made = client.conversations.create()
    for add in (lambda: client.conversations.create(items=long),
                lambda: client.conversations.items.create(made.id, items=long)):
        with pytest.raises(openai.BadRequestError) as error:
            add()
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "items")


def test_references_to_items(client):
    """To our reply, and to a client's message, in any conversation of this client."""
    conversation = client.conversations.create().id
    first = respond(client, [user("one " * 20), user("two")], conversation=conversation)
    listed = [item.id for item in client.conversations.items.list(conversation, order="asc")]
    references = [dict(type="item_reference", id=id) for id in listed]
    second = respond(client, [*references, user("and?")])
    assert cached(second) > 0
    assert second.output_text == respond(client, "and?", conversation=conversation).output_text
    for id in ("msg_1", f"msg_{first.id[5:]}_7", first.id):
        with pytest.raises(openai.NotFoundError, match=id) as error:
            respond(client, [user("and?"), dict(type="item_reference", id=id)])
        assert error.value.param == "input[1].id"


def test_references_to_what_a_conversation_keeps(client):
    """Items that the client has stored itself. They count if the body names their conversation."""
    conversation, other = (client.conversations.create(items=[user("one ")]).id for _ in range(2))
    stored, = client.conversations.items.list(conversation)
    question = [dict(type="item_reference", id=stored.id), user("and?")]
    for body in {}, dict(conversation=other):
        with pytest.raises(openai.NotFoundError, match=stored.id):
            respond(client, question, **body)
    answer = respond(client, question, conversation=conversation)
    assert answer.output_text == respond(client, [user("one "), user("and?")], conversation=other).output_text


def test_input_items_and_their_tokens(client):
    first = respond(client, "one", instructions="Be brief.")
    asked = dict(input="two", previous_response_id=first.id, instructions="Be brief.")
    count = client.responses.input_tokens.count(model="ascii", **asked)
    second = respond(client, "two", previous_response_id=first.id, instructions="Be brief.")
    assert (count.object, count.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    anew = client.responses.input_tokens.count(model="ascii", input="two", instructions="Be long.")
    assert anew.input_tokens == respond(client, "two", instructions="Be long.").usage.input_tokens
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed] == ["one", first.output_text, "two"]
    with pytest.raises(openai.BadRequestError, match="limit has too many digits"):
        client.responses.input_items.list(second.id, limit="9" * 5000)
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].content[0].text == "two" and newest.has_more
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_never")


def test_asking_in_a_query_for_what_we_do_not_have(client):
    made, include = respond(client, "Hi"), ["reasoning.encrypted_content"]
    assert client.responses.retrieve(made.id, include=include) == made
    assert client.responses.input_items.list(made.id, include=include).data


def test_an_empty_input_is_called_so(client):
    with pytest.raises(openai.BadRequestError, match="input is missing or empty"):
        respond(client, [])


def test_counting_tokens_is_work_like_a_turn(server):
    """The same messages are rendered and tokenised, so as many may be at work."""
    assert fetch(server, "POST", "/v1/responses/input_tokens", dict(input="Hi"))[0] == 200
    eventually(lambda: not server.unsettled.total())        # a place is freed behind the answer
    with server.counted("", server.most_turns):
        assert fetch(server, "POST", "/v1/responses/input_tokens", dict(input="Hi"))[0] == 429


def test_the_first_turn_of_a_conversation_waits(client, server):
    conversation = client.conversations.create().id
    streams = [begun(client)[0] for _ in range(4)]          # as many as may run
    turn = threading.Thread(target=respond, args=(client, "Hi"), kwargs=dict(conversation=conversation))
    turn.start()
    eventually(lambda: server.engine.stats()["waiting"])
    assert client.conversations.retrieve(conversation).cache["waiting"]
    for stream in streams:
        stream.close()
    turn.join()


REQUIRED = """id object created_at completed_at status incomplete_details model previous_response_id
    instructions output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty
    frequency_penalty top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store
    background service_tier metadata safety_identifier prompt_cache_key""".split()      # Open Responses


def test_a_response_has_all_keys_of_the_specification(server):
    said = dict(user="me", presence_penalty=1.5, top_logprobs=2, prompt_cache_key="mine", tool_choice="auto")
    body = dict(input="Hi", max_output_tokens=300, temperature=2, seed=1, **said)
    answer = fetch(server, "POST", "/v1/responses", body)[1]
    assert set(REQUIRED) <= answer.keys() and said.items() <= answer.items()
    assert answer["status"] == "completed" and 0 <= answer["completed_at"] - answer["created_at"] < 60
    kept = fetch(server, "GET", f"/v1/responses/{answer['id']}")[1]
    assert kept["completed_at"] == answer["completed_at"]
    short = fetch(server, "POST", "/v1/responses", dict(body, max_output_tokens=1))[1]
    assert set(REQUIRED) <= short.keys() and short["completed_at"] is None


def test_a_response_once_more(client, server):
    """Whole, or as its events; also while it is being written, and from any event on."""
    made = respond(client, "Hello", temperature=2, extra_body=dict(seed=1))
    assert client.responses.retrieve(made.id, stream=False) == made
    *events, last = client.responses.retrieve(made.id, stream=True)
    assert numbered([event.model_dump() for event in events + [last]])
    assert last.response == made and events[0].type == "response.created"
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == made.output_text
    after = list(client.responses.retrieve(made.id, stream=True, starting_after=3))
    assert after == [*events, last][4:]
    stream, running = begun(client)
    again = client.responses.retrieve(running, stream=True)
    assert next(again).response.id == running
    again.close()                                           # who looks on ends nothing
    again = client.responses.retrieve(running, stream=True)
    assert next(event for event in again if event.type == "response.output_text.delta").delta
    from_nine = client.responses.retrieve(running, stream=True, starting_after=8)
    first, second = (event for event, _ in zip(from_nine, range(2)))
    assert first.sequence_number == 8 + len(first.delta)
    assert second.sequence_number == first.sequence_number + len(second.delta)
    from_nine.close()
    client.responses.cancel(running)
    assert list(again)[-1].response.status == list(stream)[-1].response.status == "cancelled"
    assert fetch(server, "GET", f"/v1/responses/{made.id}?stream=maybe")[0] == 400


def test_a_stream_that_broke_off_goes_on_where_it_was(client):
    """Whatever the client has: it gets each character once, and the end."""
    made = respond(client, "Hello", max_output_tokens=300, temperature=2, extra_body=dict(seed=1))
    *first, done = client.responses.retrieve(made.id, stream=True)
    assert len(made.output_text) > 10
    for number in range(done.sequence_number):
        *events, last = client.responses.retrieve(made.id, stream=True, starting_after=number)
        text = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(text) == made.output_text[max(number - 3, 0):]
        assert last == done and all(event.sequence_number > number for event in events)
        whole = [event for event in events if event.type != "response.output_text.delta"]
        assert whole == [event for event in first if event.sequence_number > number
                         and event.type != "response.output_text.delta"]
    numbers = [event.sequence_number for event in client.responses.retrieve(
        made.id, stream=True, starting_after=done.sequence_number)]
    assert numbers == [done.sequence_number]


# ---- instructions and truncation

def test_instructions_count_for_one_response(client):
    system = dict(role="system", content="Be brief.")
    def resent(*messages):
        return ask(client, list(messages), max_tokens=12, extra_body=dict(ignore_eos=True))[0]
    def said(response):
        return dict(role="assistant", content=response.output_text)
    first = respond(client, "Who?", instructions="Be brief.")
    assert first.output_text == resent(system, user("Who?")) and first.instructions == "Be brief."
    same = respond(client, "Why?", instructions="Be brief.", previous_response_id=first.id)
    assert cached(same) == first.usage.total_tokens - 1
    assert same.output_text == resent(system, user("Who?"), said(first), user("Why?"))
    # nothing is carried over, so all is computed anew
    none = respond(client, "How?", previous_response_id=same.id)
    assert cached(none) == 0 and none.instructions is None
    assert none.output_text == resent(user("Who?"), said(first), user("Why?"), said(same), user("How?"))
    again = respond(client, "So?", previous_response_id=none.id)
    assert cached(again) == none.usage.total_tokens - 1
    assert ([text for role, text in items(client, again.conversation.id) if role != "assistant"]
            == ["Who?", "Why?", "How?", "So?"])
    ids = [item.id for item in client.conversations.items.list(again.conversation.id, limit=100)]
    assert len(set(ids)) == len(ids) == 8 and {r.output[0].id for r in (first, same, none, again)} <= set(ids)


def test_other_instructions_in_a_conversation(client, server):
    """The context of a conversation may start anew under its name; a turn that is cancelled then
    leaves the old one in place."""
    conversation = client.conversations.create().id
    respond(client, "one", conversation=conversation)
    stream = respond(client, "two", conversation=conversation, instructions="Be long.", stream=True,
                     max_output_tokens=None)
    response_id = next(stream).response.id
    next(event for event in stream if event.type == "response.output_text.delta")
    client.responses.cancel(response_id)
    assert len(items(client, conversation)) == 2
    third = respond(client, "three", conversation=conversation)
    fourth = respond(client, "four", conversation=conversation, instructions="Be long.")
    fifth = respond(client, "five", conversation=conversation, instructions="Be long.")
    assert third.usage.input_tokens_details.new < third.usage.input_tokens and cached(fourth) == 0
    assert cached(fifth) == fourth.usage.total_tokens - 1
    assert ([text for role, text in items(client, conversation) if role == "user"]
            == ["one", "three", "four", "five"])


def test_truncation(client):
    long = "x" * (CONTEXT // 3)
    first = respond(client, long)
    second = respond(client, long + "y", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match=f"length is {CONTEXT} tokens"):
        respond(client, long + "z", previous_response_id=second.id)
    third = respond(client, long + "z", previous_response_id=second.id, truncation="auto",
                    max_output_tokens=40)
    kept = [user(long + "y"), dict(role="assistant", content=second.output_text), user(long + "z")]
    assert third.output_text == ask(client, kept, max_tokens=40, extra_body=dict(ignore_eos=True))[0]
    assert third.truncation == "auto" and third.usage.output_tokens == 40
    # dropped from the context, not from the conversation
    assert len(items(client, third.conversation.id)) == 6
    assert cached(respond(client, "and?", previous_response_id=third.id)) == third.usage.total_tokens - 1
    with pytest.raises(openai.BadRequestError, match=f"length is {CONTEXT} tokens"):
        respond(client, "x" * CONTEXT, truncation="auto")
    short = respond(client, "short", truncation="auto")
    assert (cached(respond(client, "too", previous_response_id=short.id, truncation="auto"))
            == short.usage.total_tokens - 1)


# ---- conversations

def test_a_conversation_from_beginning_to_end(client, server):
    made = client.conversations.create(items=[dict(type="message", role="system", content="Be."), user("Hi")],
                                       metadata=dict(topic="demo"))
    assert (made.object, made.metadata) == ("conversation", dict(topic="demo"))
    waiting = list(client.conversations.items.list(made.id, order="asc"))
    assert ([(item.role, item.status, item.content[0].type) for item in waiting]
            == [("system", "completed", "input_text"), ("user", "completed", "input_text")])
    first = respond(client, "there", conversation=made.id)
    assert first.conversation.id == made.id
    resent = [dict(role="system", content="Be."), user("Hi"), user("there")]
    assert first.output_text == ask(client, resent, max_tokens=12, extra_body=dict(ignore_eos=True))[0]
    second = respond(client, "more", conversation=made.id)
    assert cached(second) == first.usage.total_tokens - 1
    added = client.conversations.items.create(made.id, items=[user("By the way")])
    assert added.data[0].role == "user" and added.first_id == added.last_id == added.data[0].id
    third = respond(client, "so", conversation=made.id)
    listed = list(client.conversations.items.list(made.id, order="asc", limit=3))
    assert [item.id for item in listed[:2]] == [item.id for item in waiting]
    assert added.data[0].id in [item.id for item in listed]
    assert [item.content[0].text for item in listed] == [
        "Be.", "Hi", "there", first.output_text, "more", second.output_text, "By the way", "so",
        third.output_text]
    assert ([item.id for item in client.conversations.items.list(made.id)]
            == [item.id for item in reversed(listed)])
    assert (client.conversations.items.retrieve(listed[3].id, conversation_id=made.id).content[0].text
            == first.output_text)
    assert listed[3].id == first.output[0].id
    assert client.conversations.update(made.id, metadata=dict(topic="other")).metadata == dict(topic="other")
    state = client.conversations.retrieve(made.id).cache
    assert state["tokens"] == third.usage.total_tokens
    assert state["gpu"] + state["cpu"] == state["tokens"] - 1 and state["idle_seconds"] < 60
    gone = client.conversations.delete(made.id)
    assert gone.deleted and gone.id == made.id
    for lost in (lambda: client.conversations.retrieve(made.id),
                 lambda: client.responses.retrieve(first.id)):
        with pytest.raises(openai.NotFoundError) as error:
            lost()
        assert error.value.type == "invalid_request_error"
    refuses(client, conversation=made.id)
    refuses(client, previous_response_id=third.id)


def test_deleting_an_item(client):
    """The conversation ends before the item's turn now; what is left of it waits for the next turn."""
    conversation = client.conversations.create(items=[user("zero")]).id
    first, second, third = (respond(client, text, conversation=conversation)
                            for text in ("one", "two", "three"))
    before = items(client, conversation)
    wrong = next(item.id for item in client.conversations.items.list(conversation, order="asc")
                 if item.content[0].text == "two")
    assert client.conversations.items.delete(wrong, conversation_id=conversation).id == conversation
    assert items(client, conversation) == [item for item in before if item != ("user", "two")]
    client.conversations.items.create(conversation, items=[user("By the way")])
    fourth = respond(client, "four", conversation=conversation)
    assert fourth.usage.input_tokens_details.recomputed == first.usage.total_tokens - 1
    told = [dict(role=role, content=text) for role, text in items(client, conversation)[:-1]]
    assert [message["content"] for message in told][-2:] == ["By the way", "four"]
    assert fourth.output_text == ask(client, told, max_tokens=12, extra_body=dict(ignore_eos=True))[0]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    for item in list(client.conversations.items.list(conversation)):
        client.conversations.items.delete(item.id, conversation_id=conversation)
    assert items(client, conversation) == []
    assert cached(respond(client, "anew", conversation=conversation)) == 0
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete(wrong, conversation_id=conversation)


def test_what_was_asked_for_by_name_goes_on_by_name(client):
    """previous_response_id, and a chat that resends, branch off a conversation that someone created."""
    conversation = client.conversations.create()
    first = respond(client, "mine", conversation=conversation.id)
    assert respond(client, "yours", previous_response_id=first.id).conversation.id != conversation.id
    resent = [user("mine"), dict(role="assistant", content=first.output_text), user("theirs")]
    assert ask(client, resent)[3] != conversation.id
    assert len(items(client, conversation.id)) == 2


def test_turns_of_one_conversation_wait_for_each_other(client, server):
    conversation, made = client.conversations.create().id, []

    def say(text):
        made.append(respond(client, text, conversation=conversation, max_output_tokens=40))
    threads = [threading.Thread(target=say, args=(f"number {n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [text for _, text in items(client, conversation)]
    assert sorted(texts[::2]) == [f"number {n}" for n in range(5)]
    assert sorted(texts[1::2]) == sorted(r.output_text for r in made)


# ---- cancel and delete

def begun(client, **options):
    """A stream, and the id of its response, which has begun to speak and would go on for long."""
    stream = respond(client, "long", stream=True, max_output_tokens=None, **options)
    response_id = next(event.response.id for event in stream if event.type == "response.created")
    assert next(event for event in stream if event.type == "response.output_text.delta")
    return stream, response_id


def test_cancel_in_mid_stream(client, server):
    conversation = client.conversations.create().id
    stream, response_id = begun(client, conversation=conversation)
    assert client.responses.retrieve(response_id).status == "in_progress"
    with pytest.raises(openai.ConflictError):
        client.conversations.items.create(conversation, items=[user("late")])
    with pytest.raises(openai.ConflictError):
        client.conversations.items.delete("msg_1", conversation_id=conversation)
    cancelled = client.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    *_, last = stream
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)
    assert items(client, conversation) == [] and server.engine.stats()["running"] == 0
    done = respond(client, "done", conversation=conversation)
    with pytest.raises(openai.BadRequestError, match="is finished"):
        client.responses.cancel(done.id)
    assert client.responses.retrieve(done.id) == done


def test_deleting_what_runs_and_who_hangs_up(empty):
    client, server, nothing_left = empty
    for end in (client.responses.delete, lambda id: stream.close()):
        stream, response_id = begun(client)
        end(response_id)
        eventually(nothing_left)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
    conversation = client.conversations.create().id
    stream, _ = begun(client, conversation=conversation)
    client.conversations.delete(conversation)
    assert list(stream)[-1].response.status == "cancelled"
    chat = client.chat.completions.create(model="ascii", messages=[user("long")], stream=True,
                                          extra_body=dict(conversation_id="doomed", ignore_eos=True))
    next(iter(chat))
    client.conversations.delete("doomed")
    with pytest.raises(openai.APIError, match="cancelled"):
        list(chat)
    eventually(nothing_left)


def test_deleting_frees_both_tiers_and_the_store(empty):
    client, server, nothing_left = empty
    root = respond(client, "root")
    left, right = (respond(client, text, previous_response_id=root.id) for text in ("left", "right"))
    assert client.responses.delete(root.id) is None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(root.id)
    refuses(client, previous_response_id=root.id)
    assert stored(server) == 3                                           # hidden, since others build on it
    onwards = respond(client, "go on", previous_response_id=right.id)
    assert cached(onwards) == right.usage.total_tokens - 1
    assert ("user", "root") not in items(client, right.conversation.id)
    for response in (left, onwards, right):
        client.responses.delete(response.id)
    eventually(nothing_left)
    for conversation in (left, right):
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(conversation.conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(root.id)


def test_deleting_a_response_that_another_branch_builds_on(client):
    """Its own conversation goes on without it."""
    conversation = client.conversations.create().id
    first, second = (respond(client, text, conversation=conversation) for text in ("one", "two"))
    branch = respond(client, "aside", previous_response_id=second.id)
    client.responses.delete(second.id)
    third = respond(client, "three", conversation=conversation)
    alone = respond(client, "three", previous_response_id=first.id)
    assert third.usage.input_tokens == alone.usage.input_tokens and third.output_text == alone.output_text
    onwards = respond(client, "on", previous_response_id=branch.id)
    assert onwards.usage.input_tokens > branch.usage.total_tokens


@pytest.mark.parametrize("follows", ["conversation", "previous_response_id"])
def test_what_a_response_follows_is_deleted_at_that_moment(empty, follows, monkeypatch):
    """We have seen that it exists, and then it is gone. Nothing of it comes back."""
    client, server, nothing_left = empty
    conversation = client.conversations.create().id
    first, answer = respond(client, "one", conversation=conversation), server.sessions.respond
    options = {follows: dict(conversation=conversation, previous_response_id=first.id)[follows]}

    def forget_then_answer(*arguments, **options):
        server.sessions.forget(conversation)
        return answer(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(server.sessions, "respond", forget_then_answer)
        with pytest.raises(openai.ConflictError, match="(deleted|gone).* again"):
            respond(client, "two", **options)
    assert not server.sessions.turns and server.sessions.history.conversations() == []
    eventually(nothing_left)
    refuses(client, **options)


def test_deleting_the_last_response_of_a_conversation(client):
    conversation = client.conversations.create().id
    first, second = (respond(client, text, conversation=conversation) for text in ("one", "two"))
    client.responses.delete(second.id)
    assert len(items(client, conversation)) == 2
    third = respond(client, "three", conversation=conversation)
    assert third.output_text == respond(client, "three", previous_response_id=first.id).output_text
    client.responses.delete(third.id)
    client.responses.delete(first.id)
    assert items(client, conversation) == []                             # it stays: it was asked for
    assert respond(client, "anew", conversation=conversation).usage.input_tokens_details.new


# ---- what is refused

@pytest.mark.parametrize("field, value", [
    ("tools", [dict(type="web_search")]), ("background", True), ("reasoning", dict(effort="low")),
    ("max_tool_calls", 1), ("tool_choice", "required"), ("functions", [dict(name="f")]),
    ("input", [dict(role="user", content=[dict(type="input_image", image_url="x")])]),
    ("input", [dict(type="computer_call_output", call_id="1", output="x")]),
    ("text", dict(format=dict(type="xml"))), ("input", []),
    ("input", [dict(role="assistant", content="half", status="in_progress")]),
    ("max_tokens", 5), ("messages", [user("Hi")]), ("text", dict(verbosity="low")),
    ("truncation", "middle"), ("include", [5]), ("max_output_tokens", 0),
    ("prompt", dict(id="p")), ("conversation", dict(id=5)),
    ("metadata", {str(n): "x" for n in range(17)}), ("service_tier", 1), ("frequency_penalty", 3),
    ("input", None)])
def test_what_is_not_supported_is_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError) as error:
        harmless = {} if field == "input" else dict(input="Hi")
        client.responses.create(model="ascii", extra_body={field: value}, **harmless)
    assert error.value.param.startswith(field) and field in str(error.value)


def test_combinations_and_what_is_missing(client):
    conversation, response = client.conversations.create().id, respond(client, "Hi")
    for options in (dict(previous_response_id=response.id), dict(store=False)):
        with pytest.raises(openai.BadRequestError, match="conversation .*: leave out"):
            respond(client, "x", conversation=conversation, **options)
    refuses(client, previous_response_id="resp_never")
    refuses(client, previous_response_id=response.id[5:])
    refuses(client, conversation="conv_never")
    for call in (lambda: client.responses.cancel("resp_never"),
                 lambda: client.conversations.items.list("conv_never"),
                 lambda: client.conversations.items.retrieve("msg_no", conversation_id=conversation),
                 lambda: client.conversations.update("conv_never", metadata={}),
                 lambda: client.conversations.delete("conv_never"),
                 lambda: respond(client, "x", model="gpt-4")):
        with pytest.raises(openai.NotFoundError):
            call()


# ---- log probabilities

def test_logprobs(client, server):
    tokenizer = server.sessions.tokenizer
    chat = client.chat.completions.create(model="ascii", messages=[user("Hi")], max_tokens=6, logprobs=True,
                                          top_logprobs=2, extra_body=dict(ignore_eos=True))
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert all(entry.logprob <= 0 and entry.bytes == list(entry.token.encode())
               and entry.top_logprobs[0].logprob >= entry.logprob for entry in content)
    stream = client.chat.completions.create(model="ascii", messages=[user("Hi")], max_tokens=6, logprobs=True,
                                            stream=True, extra_body=dict(ignore_eos=True))
    streamed = [entry for chunk in stream for entry in chunk.choices[0].logprobs.content]
    assert ([(entry.token, entry.logprob) for entry in streamed]
            == [(entry.token, entry.logprob) for entry in content])
    response = respond(client, "Hi", max_output_tokens=6, include=["message.output_text.logprobs"],
                       top_logprobs=1)
    assert ([entry.logprob for entry in response.output[0].content[0].logprobs]
            == [entry.logprob for entry in content])
    deltas = [event for event in respond(client, "Hi", max_output_tokens=6, top_logprobs=1, stream=True)
              if event.type == "response.output_text.delta"]
    assert ([entry.logprob for event in deltas for entry in event.logprobs]
            == [entry.logprob for entry in content])
    banned = {str(token): -100 for token in tokenizer.encode(chat.choices[0].message.content)}
    biased = client.chat.completions.create(model="ascii", messages=[user("Hi")], max_tokens=6,
                                            logit_bias=banned, extra_body=dict(ignore_eos=True))
    assert not set(biased.choices[0].message.content) & set(chat.choices[0].message.content)


@pytest.mark.parametrize("stop", [None, "x"], ids=["end token", "stop string"])
def test_as_many_entries_as_tokens(client, stop):
    """Special tokens have entries like all others, each with as many alternatives as were asked for. The
    tokens of a stop string have none."""
    options = dict(model="ascii", messages=[user("Hi")], max_tokens=300, temperature=2, logprobs=True,
                   top_logprobs=5, extra_body=dict(seed=1))
    chat = client.chat.completions.create(**options)
    text = chat.choices[0].message.content
    assert chat.choices[0].finish_reason == "stop" and len(text) > 8
    if stop:
        options["stop"] = stop = text[4:7]
        chat = client.chat.completions.create(**options)
        text = chat.choices[0].message.content
        assert chat.choices[0].finish_reason == "stop" and len(text) <= 4
    content = chat.choices[0].logprobs.content
    tokens = [entry.token for entry in content]
    if stop:
        assert "".join(tokens) == text and len(tokens) == chat.usage.completion_tokens - len(stop)
    else:
        assert tokens == [*text, "<|end|>"] and len(tokens) == chat.usage.completion_tokens
        assert content[-1].bytes == list(b"<|end|>")
    assert {len(entry.top_logprobs) for entry in content} == {5}
    streamed = [choice.logprobs.content for chunk in client.chat.completions.create(**options, stream=True)
                for choice in chunk.choices]
    # the same numbers: each entry comes with the text that its token begins
    assert [entry for entries in streamed for entry in entries] == content


def test_log_probabilities_of_a_stored_response(client):
    """They are kept if the request has asked for them, and given if the reader asks, too."""
    include = ["message.output_text.logprobs"]
    options = dict(temperature=2, max_output_tokens=300, top_logprobs=2)
    whole = respond(client, "Hi", extra_body=dict(seed=1), **options)
    cut = respond(client, "Hi", extra_body=dict(seed=1, stop=whole.output_text[4:6]), **options)
    for made in (whole, cut):
        entries = made.output[0].content[0].logprobs
        told = "".join(entry.token for entry in entries).removesuffix("<|end|>")
        assert told == made.output_text and len(told) > 2
        assert client.responses.retrieve(made.id).output[0].content[0].logprobs == []
        assert client.responses.retrieve(made.id, include=include) == made
        *events, last = client.responses.retrieve(made.id, include=include, stream=True)
        assert last.response == made
    assert cut.output_text == whole.output_text[:len(cut.output_text)]
    silent = respond(client, "Hi")
    assert client.responses.retrieve(silent.id, include=include) == silent


# ---- owners

BODIES = {ChatBody: dict(messages=[user("Hi")], max_tokens=2),
          ResponseBody: dict(input="Hi", max_output_tokens=2),
          CompletionBody: dict(prompt="Hi", max_tokens=2, logprobs=2, echo=True),
          ItemsBody: dict(items=[user("more")])}          # for all others {} will do


def good_request(operation, response):
    """(path, body) for any line of the table: about this response, its reply and its conversation."""
    kind = "/".join(operation.path.split("/")[:3])
    ids = {"/v1/responses": response.id, "/v1/models": "ascii"}
    path = operation.path.format(id=ids.get(kind, response.conversation.id), item=response.output[0].id)
    return path, BODIES.get(operation.fields, {}) if operation.method == "POST" else None


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_answer_is_as_the_document_says(client, server, operation):
    response = respond(client, "Hello", conversation=client.conversations.create().id)
    path, body = good_request(operation, response)
    if operation.name == "cancel_response":                 # one that is not finished
        stream, running = begun(client)
        path = path.replace(response.id, running)
    if operation.name == "cache_events":                    # GET would never end
        request = urllib.request.Request(server.url + path, method="HEAD")
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Content-Type"] == operation.answer
        return
    status, answer = fetch(server, operation.method, path, body)
    assert status == 200, answer
    if isinstance(operation.answer, str):
        assert isinstance(answer, dict) == (operation.answer == "application/json")
    else:
        operation.answer.model_validate(answer)
    documented = fetch(server, "GET", "/openapi.json")[1]["paths"][operation.path][operation.method.lower()]
    assert documented["responses"]["200"]["content"]


def test_where_a_conversation_is_has_one_shape(client, server):
    """Whether any of its tokens are cached, or none is."""
    made = client.conversations.create().id
    states = [client.conversations.retrieve(made).cache]
    respond(client, "Hello", conversation=made)
    states.append(client.conversations.retrieve(made).cache)
    server.engine.forget(made)
    states.append(client.conversations.retrieve(made).cache)
    assert [bool(state["gpu"]) for state in states] == [False, True, False]
    for state in states:
        Portrait.model_validate(state)


def test_a_picture_with_a_one_off_is_as_the_document_says(client, server):
    stream, _ = begun(client, store=False)
    picture = fetch(server, "GET", "/cache")[1]
    assert [entry for entry in picture["conversations"] if isinstance(entry["id"], int)]
    Cache.model_validate(picture)
    stream.close()


def test_a_hint_brings_a_conversation_back(client, server, monkeypatch):
    """A hint for one that nobody knows is a 404, and one for a conversation without a turn does nothing."""
    made = client.conversations.create().id
    path = f"/v1/conversations/{made}/warm"
    nothing = dict(id=made, object="conversation.warmed", gpu=0, cpu=0, recomputed=0)
    assert fetch(server, "POST", path, {}) == (200, nothing)
    respond(client, "Hello", conversation=made)
    server.engine.forget(made)
    status, hint = fetch(server, "POST", path)
    assert (status, hint["gpu"], hint["cpu"]) == (200, 0, 0)
    eventually(lambda: client.conversations.retrieve(made).cache["gpu"] == hint["recomputed"])
    details = respond(client, "Hello", conversation=made).usage.input_tokens_details
    assert (details.cached_tokens, details.gpu) == (hint["recomputed"], hint["recomputed"])
    assert fetch(server, "POST", path.replace(made, "conv_x"))[0] == 404
    found = server.api._conversation
    with monkeypatch.context() as patch:                    # it is deleted at that moment
        patch.setattr(server.api, "_conversation", lambda *names: [
            found(*names), server.sessions.forget(made)][0])
        assert fetch(server, "POST", path)[0] == 404
    assert "nano_pensieve:warmed_tokens_recomputed_total{" in fetch(server, "GET", "/metrics")[1]


def test_a_conversation_exists_as_soon_as_its_first_turn_is_accepted(empty):
    """Though the history has it only when that turn is done."""
    client, server, nothing_left = empty
    stream, response_id = begun(client)
    name = client.responses.retrieve(response_id).conversation.id
    found = client.conversations.retrieve(name)
    assert (found.metadata, found.cache["running"], items(client, name)) == ({}, True, [])
    with pytest.raises(openai.ConflictError):
        client.conversations.items.create(name, items=[user("late")])
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve("msg_1", conversation_id=name)
    client.conversations.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(name)
    eventually(nothing_left)
    # Its metadata may be set, and then it stays, as one that the client has created.
    stream, response_id = begun(client)
    name = client.responses.retrieve(response_id).conversation.id
    assert client.conversations.update(name, metadata=dict(a="b")).metadata == dict(a="b")
    client.responses.cancel(response_id)
    assert client.conversations.retrieve(name).metadata == dict(a="b") and items(client, name) == []
    assert len(items(client, respond(client, "Hi", conversation=name).conversation.id)) == 2


def test_each_key_has_its_own_world(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with (serving(sessions, api_keys=["ada", "bob"]) as server,
          connect(server.url, "ada") as ada,
          connect(server.url, "bob") as bob):
        def ask_as_bob(operation, path, body):
            headers = {"Authorization": "Bearer bob"}
            return fetch(server, operation.method, path, body, headers)
        conversation = ada.conversations.create(items=[user("xyzzy")]).id
        response = respond(ada, "tell", conversation=conversation)
        hinted = dict(extra_body=dict(conversation_id="diary"))
        text, _, _, diary = ask(ada, [user("Dear diary")], **hinted)
        before = ada.conversations.retrieve(conversation), items(ada, conversation)
        named = [(400, dict(conversation=conversation)), (400, dict(previous_response_id=response.id)),
                 (404, dict(input=[dict(type="item_reference", id=response.output[0].id)]))]
        for operation in OPERATIONS:
            path, body = good_request(operation, response)
            if "{id}" in operation.path and operation.name != "retrieve_model":
                assert ask_as_bob(operation, path, body)[0] == 404, operation.name
            elif operation.method == "GET" and operation.name != "cache_events":
                told = json.dumps(ask_as_bob(operation, path, body))
                secrets = "xyzzy", conversation, response.id, response.output[0].id
                assert not any(secret in told for secret in secrets), operation.name
            for status, reference in named if operation.fields is ResponseBody else ():
                assert ask_as_bob(operation, path, body | reference)[0] == status, operation.name
        after = ada.conversations.retrieve(conversation), items(ada, conversation)
        assert after[1] == before[1] and after[0].metadata == before[0].metadata
        assert ada.responses.retrieve(response.id).output_text == response.output_text
        resent = [user("Dear diary"), dict(role="assistant", content=text), user("more")]
        _, _, usage, theirs = ask(bob, resent, **hinted)
        # one name, two worlds
        assert usage.prompt_tokens_details.cached_tokens == 0 and theirs == diary == "diary"
        _, _, usage, ours = ask(ada, resent, **hinted)
        assert usage.prompt_tokens_details.cached_tokens > 0 and ours == "diary"
        stream, running = begun(ada)
        for guess in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                guess(running)
        ada.responses.cancel(running)
        seen = {key: fetch(server, "GET", "/cache", headers={"Authorization": f"Bearer {key}"})[1]
                for key in ("ada", "bob")}
        assert {entry["id"] for entry in seen["bob"]["conversations"]} == {"diary"}
        assert {turn["conversation"] for turn in seen["bob"]["turns"]} == {"diary"}
        assert {entry["id"] for entry in seen["ada"]["conversations"]} == {"diary", conversation}


def test_a_reply_of_token_ids_has_no_text(client, server):
    """Not that of the reply before it."""
    made = client.conversations.create().id
    assert respond(client, "Hello", conversation=made).output_text
    raw = server.sessions.submit([5, 6, 7], made, max_tokens=2)
    raw.result()
    assert client.responses.retrieve(f"resp_{raw.id}").output_text == ""


# ---- the live picture

def test_the_cache_as_it_changes(checkpoint, monkeypatch):
    """Someone watches while three conversations share tiers that are too small: every kind of move is
    told, and the last picture is that of GET /cache."""
    monkeypatch.setattr("serving.live.STILL_SECONDS", 0.2)
    sessions = Sessions(checkpoint, gpu_cache_tokens=256, cpu_cache_tokens=128, chunk_size=16, debug=True)
    engine, events, between = sessions.engine, [], []          # between: pictures between the turns
    with serving(sessions) as server, connect(server.url) as client:
        def watch():
            with urllib.request.urlopen(server.url + "/cache/events", timeout=30) as feed:
                events.extend(json.loads(line[6:]) for line in feed if line.startswith(b"data: "))

        def still(picture):
            return {entry["id"]: (entry["chunks"], entry["tokens"]) for entry in picture["conversations"]}

        def agrees():
            between.append(fetch(server, "GET", "/cache")[1])
            return still(events[-1]) == still(between[-1])
        assert engine.watchers == []
        watcher = threading.Thread(target=watch)
        watcher.start()
        eventually(lambda: engine.watchers and events)
        names = [client.conversations.create().id for _ in range(3)]
        for turn in range(5):
            for name in names:
                respond(client, f"this is message {turn}", conversation=name, max_output_tokens=8)
                eventually(agrees)      # else a chunk may move twice between two pictures
        final, seen = between[-1], len(events)
        eventually(lambda: len(events) > seen + 1)          # the picture is sent without a step, too
        server.drain()
        watcher.join(10)
        assert not watcher.is_alive() and engine.watchers == []
    moves = [move for event in events for move in event["transfers"]]
    assert {move["kind"] for move in moves} == {"swap_in", "swap_out", "recompute", "reclaim", "drop"}
    assert all(0 <= move["start"] < move["end"] and move["conversation"] in names for move in moves)
    letters = {letter for picture in events + between for entry in picture["conversations"]
               for letter in entry["chunks"]}
    assert {"G", "C", "."} <= letters <= set("GBCR.")
    assert still(events[-1]) == still(final)
    assert events[-1]["stats"]["finished"] == final["stats"]["finished"] == 15
    assert final["chunk_size"] == 16 and len(final["recompute_seconds"]) == 16
    assert final["recompute_seconds"] == sorted(final["recompute_seconds"])
    assert all(entry["idle_seconds"] > 0 and entry["gpu"] + entry["cpu"] <= entry["tokens"]
               for entry in final["conversations"])
    assert [entry["chunks"][entry["leaves_next"]] in "GB" for entry in final["conversations"]
            if entry["leaves_next"] is not None] == [True]
