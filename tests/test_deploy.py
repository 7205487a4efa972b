"""Two servers behind the router of deploy/haproxy.cfg, all of them real: a conversation always comes to the
same server, and when a server is killed, nothing is lost that its clients were told."""
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import time

import pytest

from clients import ROOT, connect, eventually, fetch, program, user

pytestmark = [pytest.mark.clients,
              pytest.mark.skipif(not shutil.which("haproxy"), reason="needs haproxy")]
CONFIGURATION = ROOT / "deploy" / "haproxy.cfg"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Deployment:
    """Servers s1 and s2, and the router. A server that was killed can start again: at its port, with its
    history."""

    def __init__(self, checkpoint, directory, stack):
        self.checkpoint, self.directory, self.stack = checkpoint, directory, stack
        self.ports = dict(s1=free_port(), s2=free_port())
        self.front, self.processes = free_port(), {}
        self.server_address = "127.0.0.1", self.front
        for name in self.ports:
            self.start(name)
        self.route()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.front}"

    def start(self, name):
        server = program(self.checkpoint, self.directory / f"{name}.sqlite", "--name", name,
                         "--port", str(self.ports[name]), "--gpu-cache-tokens", "16384",
                         "--allow-origin", "https://chat.example")
        self.processes[name], *_ = self.stack.enter_context(server)

    def route(self):
        text = CONFIGURATION.read_text()
        for ours, theirs in [("127.0.0.1:8000", self.front), ("127.0.0.1:8001", self.ports["s1"]),
                             ("127.0.0.1:8002", self.ports["s2"])]:
            text = text.replace(ours, f"127.0.0.1:{theirs}")
        file = self.directory / "haproxy.cfg"
        file.write_text(text)
        router = subprocess.Popen(["haproxy", "-db", "-f", file], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        self.stack.callback(router.wait)
        self.stack.callback(router.kill)            # runs before the wait
        eventually(lambda: self.up("s1") and self.up("s2"))

    def up(self, name) -> bool:
        """Does the router send a request to the server that has made this id?"""
        with contextlib.suppress(OSError):
            return self.get(f"/v1/responses/resp_{name}-{24 * '0'}")[0] == 404     # no such id there
        return False

    def get(self, path):
        """(status, headers) of a request through the router."""
        connection = http.client.HTTPConnection("127.0.0.1", self.front, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, answer.headers


@pytest.fixture(scope="module")
def deployment(checkpoint, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Deployment(checkpoint, tmp_path_factory.mktemp("deployment"), stack)


def maker(id: str) -> str:
    return id.partition("_")[2].partition("-")[0]


def resend(client, session, messages):
    """One more turn of a client that resends its history: (server, usage); messages get the answer."""
    answer = client.chat.completions.create(model="ascii", messages=messages, max_tokens=8,
                                            extra_headers={"X-Session-ID": session})
    messages.append(dict(role="assistant", content=answer.choices[0].message.content))
    return answer.usage


def test_a_conversation_comes_home(deployment):
    """Twenty conversations of five turns: all tokens of a turn are cached at the next one, but for the last
    token, which is sampled and never fed. One server alone would do no better."""
    with connect(deployment.url) as client:
        makers = set()
        for number in range(10):                        # these say only what is new
            previous, total = None, 1
            for turn in range(5):
                response = client.responses.create(model="ascii", input=f"turn {turn} of {number}",
                                                   max_output_tokens=8, previous_response_id=previous,
                                                   extra_headers={"X-Session-ID": f"key {number}"})
                assert response.usage.input_tokens_details.cached_tokens == total - 1
                previous, total = response.id, response.usage.total_tokens
                makers.add(maker(previous))
        for number in range(10):                        # these resend their history
            messages, total = [], 1
            for turn in range(5):
                messages.append(user(f"turn {turn} of session {number}"))
                usage = resend(client, f"session {number}", messages)
                assert usage.prompt_tokens_details.cached_tokens == total - 1
                total = usage.total_tokens
    assert makers == {"s1", "s2"}


def test_every_id_names_its_server(deployment):
    with connect(deployment.url) as client:
        conversation = client.conversations.create(items=[user("first")])
        response = client.responses.create(model="ascii", input="next", max_output_tokens=4,
                                           conversation=conversation.id)
        later, = client.conversations.items.create(conversation.id, items=[user("later")]).data
        ids = [response.id, later.id, *(item.id for item in client.conversations.items.list(conversation.id))]
        assert {maker(id) for id in ids} == {maker(conversation.id)}


def test_what_a_user_quotes_is_no_address(deployment):
    """An id counts where the API has one, and not in a text, wherever it stands in the body."""
    with connect(deployment.url) as client:
        def begin(session):
            return client.responses.create(model="ascii", input="Hi", max_output_tokens=4,
                                           extra_headers={"X-Session-ID": session})
        made = {maker(response.id): response for response in map(begin, map(str, range(20)))}
    ours, theirs = made["s1"], made["s2"]
    said, reference = f"What is {theirs.id}?", dict(type="item_reference", id=ours.output[0].id)
    quoted = user(f'{{"type": "item_reference", "id": "{theirs.output[0].id}"}}')
    for body in (dict(input=said, previous_response_id=ours.id),
                 dict(previous_response_id=ours.id, input=said),
                 dict(instructions=said, input="x", previous_response_id=ours.id),
                 dict(input=[user(said), reference]), dict(input=[quoted, reference]),
                 dict(input=[quoted, dict(reversed(reference.items()))]),
                 dict(input=[quoted], previous_response_id=ours.id)):
        status, answer = fetch(deployment, "POST", "/v1/responses", body | dict(max_output_tokens=2))
        assert status == 200 and maker(answer["id"]) == "s1", (body, answer)


def test_a_server_is_killed(deployment):
    with connect(deployment.url) as client:
        conversations = [client.conversations.create() for _ in range(6)]
        for conversation in conversations:
            client.responses.create(model="ascii", input="remember", max_output_tokens=4,
                                    conversation=conversation.id)
        chats = {f"session {number}": [user(f"chat {number}")] for number in range(6)}
        for session, messages in chats.items():
            resend(client, session, messages)

        victim = maker(conversations[0].id)
        deployment.processes[victim].send_signal(signal.SIGKILL)
        deployment.processes[victim].wait()
        eventually(lambda: deployment.get(f"/v1/conversations/{conversations[0].id}")[0] == 503)

        for conversation in conversations:              # its conversations wait, the others go on
            status, headers = deployment.get(f"/v1/conversations/{conversation.id}/items")
            killed = maker(conversation.id) == victim
            assert status == (503 if killed else 200)
            assert (headers["Retry-After"] is not None) == killed
        for session, messages in chats.items():         # a client that resends loses nothing but KV
            resend(client, session, messages + [user("and now?")])

        deployment.start(victim)
        eventually(lambda: deployment.up(victim))
        for conversation in conversations:              # nothing was lost
            items = client.conversations.items.list(conversation.id).data
            assert [item.role for item in items] == ["assistant", "user"]


@pytest.mark.parametrize("host, origin, status", [
    ("127.0.0.1:{}", "http://127.0.0.1:{}", 200),
    ("localhost:{}", "http://localhost:{}", 200),
    ("chat.example", "https://chat.example", 200),                  # --allow-origin names this one
    ("other.example", "https://other.example", 403),
    ("127.0.0.1:{}", "https://other.example", 403)])
def test_the_page_through_the_router(deployment, host, origin, status):
    """A browser's POST has an Origin; the servers see the name by which the browser calls the router."""
    headers = dict(Host=host.format(deployment.front), Origin=origin.format(deployment.front))
    body = dict(input="hello", max_output_tokens=2)
    assert fetch(deployment, "POST", "/v1/responses", body, headers)[0] == status


def test_tokens_arrive_one_by_one(deployment):
    """The first token has gone through the router long before the last one is computed."""
    body = json.dumps(dict(model="ascii", input="go on", stream=True, max_output_tokens=1000))
    connection = http.client.HTTPConnection("127.0.0.1", deployment.front, timeout=30)
    start = time.monotonic()
    connection.request("POST", "/v1/responses", body)
    answer, arrivals = connection.getresponse(), []
    while line := answer.readline():
        if b"output_text.delta" in line:
            arrivals.append(time.monotonic() - start)
    connection.close()
    assert len(arrivals) > 1000 and arrivals[0] < arrivals[-1] / 4
