"""Other people's web pages, and keys: who may ask, and what a key learns about the others."""
import base64
import contextlib
import hashlib
import json
import re
import socket
from email.message import Message

import pytest

from serving.guard import Guard
from serving.operations import APIError
from serving.sessions import Sessions
from clients import CONTEXT, ask, connect, eventually, fetch, posting, raw, serving, user

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")
CHAT = dict(messages=[user("Hi")], max_tokens=2)
FRIEND, STRANGER = "https://chat.example", "https://evil.example"


@pytest.fixture(scope="module")
def server(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, debug=True)
    with serving(sessions, allow_origins=[FRIEND]) as server:
        yield server


def test_a_missing_key_is_asked_for_as_http_says(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with serving(sessions, api_keys=["k"]) as server:
        status, headers, _ = response_to(server, "GET", "/v1/models", [("Host", "localhost")])
        assert status == 401 and headers["WWW-Authenticate"] == "Bearer"


def response_to(server, method, path, headers, body=b""):
    """(status, headers, body) of a request with exactly these headers."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers),
             f"Content-Length: {len(body)}", "Connection: close", "", ""]
    head, _, content = raw(server, "\r\n".join(lines).encode() + body).decode().partition("\r\n\r\n")
    status, *rest = head.split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in rest), content


# ---- web pages

@pytest.mark.parametrize("origin, status", [
    (None, 200), ("http://{host}", 200), ("https://{host}", 200), (FRIEND, 200),
    (STRANGER, 403), ("null", 403), ("http://localhost:1", 403), ("http://{host}.evil.example", 403),
    ("file://", 403), ("", 403), ("chat.example", 403), ("http://[", 403)])
def test_pages_of_other_sites_may_not_ask(server, origin, status):
    host = "{}:{}".format(*server.server_address)
    headers = [("Host", host)] + ([("Origin", origin.format(host=host))] if origin is not None else [])
    before = server.sessions.history.conversations()
    for method, path, body in (("GET", "/cache", b""), ("GET", "/", b""), ("GET", "/health", b""),
                               ("POST", "/v1/conversations", b"{}"),
                               ("POST", "/v1/chat/completions", json.dumps(CHAT).encode())):
        found, answered, content = response_to(server, method, path, headers, body)
        assert found == status, (path, content)
        assert answered.get("Access-Control-Allow-Origin") == (FRIEND if origin == FRIEND else None)
        if status == 403:
            assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
    assert (server.sessions.history.conversations() == before) == (status == 403)


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:8000", 200), ("127.8.8.8", 200),
    ("[::1]:8000", 200), ("app.localhost", 200), ("chat.example", 200), ("evil.example", 403),
    ("127.0.0.1.evil.example:8000", 403), ("localhost.evil.example", 403), ("192.168.0.1", 403), ("[", 403),
    ("evil.example@localhost", 200)])
def test_a_name_that_points_at_loopback(server, host, status):
    """DNS rebinding: the browser believes that it still talks to the stranger's site."""
    for headers in ([("Host", host)], [("Host", host), ("Origin", f"http://{host}")]):
        assert response_to(server, "GET", "/cache", headers)[0] == status
    absolute = response_to(server, "GET", f"http://{host}/cache?a=b", [("Host", "localhost")])
    assert absolute[0] == status or host == "["


def test_two_hosts(server):
    assert response_to(server, "GET", "/cache", [("Host", "localhost"), ("Host", "evil.example")])[0] == 403


def test_a_server_for_the_whole_network_has_any_name():
    guard, headers = Guard("0.0.0.0"), Message()
    headers["Host"] = "chat.university.example"
    guard.check_site(headers)
    headers["Origin"] = "http://chat.university.example"
    guard.check_site(headers)


def test_preflight(server):
    """As Chromium asks on behalf of openai's client for browsers: without a key."""
    asked = [("Host", "localhost"), ("Access-Control-Request-Method", "POST"),
             ("Access-Control-Request-Headers", "authorization,content-type,x-stainless-lang")]
    status, headers, content = response_to(server, "OPTIONS", "/v1/chat/completions",
                                           asked + [("Origin", FRIEND)])
    assert status == 204 and not content
    assert headers["Access-Control-Allow-Origin"] == FRIEND and "Origin" in headers["Vary"]
    assert {"GET", "POST", "DELETE"} <= set(headers["Access-Control-Allow-Methods"].split(", "))
    assert "x-stainless-lang" in headers["Access-Control-Allow-Headers"]
    assert response_to(server, "OPTIONS", "/v1/chat/completions", asked + [("Origin", STRANGER)])[0] == 403


def test_an_allowed_page_reads_errors_and_streams_too(server):
    headers = [("Host", "localhost"), ("Origin", FRIEND)]
    for body in (b"{", json.dumps(dict(CHAT, stream=True)).encode()):
        answered = response_to(server, "POST", "/v1/chat/completions", headers, body)[1]
        assert answered["Access-Control-Allow-Origin"] == FRIEND


def test_every_site_is_allowed(checkpoint):
    with serving(Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0),
                 allow_origins=["*"]) as server:
        headers = [("Host", "localhost"), ("Origin", STRANGER)]
        status, answered, _ = response_to(server, "GET", "/health", headers)
        assert (status, answered["Access-Control-Allow-Origin"]) == (200, "*")


def test_the_page_runs_only_its_own_script(server):
    status, headers, page = response_to(server, "GET", "/", [("Host", "localhost")])
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    script, = re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"


# ---- keys

@pytest.mark.parametrize("keys", [[""], [" "], ["good", ""], ["two words"], ["\t"], ["end "]])
def test_keys_that_would_open_the_server_or_fit_nobody(keys):
    with pytest.raises(ValueError, match="api_key must be"):
        Guard("127.0.0.1", keys)


@pytest.mark.parametrize("origin", ["", "evil.example", "https://", "https://a/", "ftp://a", "https://a b",
                                    "https://*.example", "https://a:443", "http://a:80", "file://a",
                                    "https://a:", "https://me@a", "chrome-extension://", "https://ä"])
def test_origins_that_no_browser_sends(origin):
    with pytest.raises(ValueError, match="allow_origin must be"):
        Guard("127.0.0.1", (), [origin])


@pytest.mark.parametrize("origin", ["chrome-extension://abcdefgh", "app://obsidian.md", "tauri://localhost"])
def test_one_app_or_extension_is_allowed(origin):
    """By its scheme. Its name is none of ours."""
    guard, headers = Guard("127.0.0.1", (), [origin]), Message()
    headers["Host"], headers["Origin"] = "localhost:8000", origin
    guard.check_site(headers)
    assert guard.cors(headers)["Access-Control-Allow-Origin"] == origin
    headers.replace_header("Host", "obsidian.md")
    with pytest.raises(APIError, match="loopback"):
        guard.check_site(headers)


@pytest.mark.parametrize("site, mode, status", [
    ("cross-site", "no-cors", 403), ("same-site", "no-cors", 403), ("same-origin", "cors", 200),
    ("none", "navigate", 200), ("cross-site", "navigate", 200)])
def test_a_page_that_loads_our_answers_as_images(server, site, mode, status):
    """It cannot read them, but each costs us time. A link to our page is fine."""
    headers = [("Host", "localhost"), ("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode)]
    for path in ("/cache", "/metrics", "/v1/conversations/c"):
        assert response_to(server, "GET", path, headers)[0] in (status, 404)
        assert (response_to(server, "GET", path, headers)[0] == 403) == (status == 403)


def test_one_key_cannot_take_all_places(checkpoint):
    """It gets no more than are free, so some are left for the other key, and all for a key that is alone."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, max_running=2)
    body = dict(messages=[user("long")], ignore_eos=True, stream=True)
    for keys, most in ((["ada", "bob"], 4), (["ada"], 8)):
        with serving(sessions, api_keys=keys, max_waiting=6) as server:
            with contextlib.ExitStack() as stack:
                def begin(key):
                    connection = stack.enter_context(socket.create_connection(server.server_address, 30))
                    authorized = f"\r\nAuthorization: Bearer {key}\r\n".encode()
                    connection.sendall(posting(body).replace(b"\r\n", authorized, 1))
                    return connection.recv(12)[9:]
                begun = [begin("ada") for _ in range(most + 1)]
                assert begun == [b"200"] * most + [b"429"]
                if "bob" in keys:
                    assert begin("bob") == b"200"
            eventually(lambda: not server.at_work)
        sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, max_running=2)
    sessions.close()


def test_browsers_send_the_name_of_a_site_in_small_letters():
    guard, headers = Guard("127.0.0.1", (), ["https://Chat.Example"]), Message()
    headers["Origin"] = "https://chat.example"
    assert guard.allowed_origin(headers) == "https://chat.example"


def test_a_key_is_needed(checkpoint):
    with serving(Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0),
                 api_keys=["señor"]) as server:
        with connect(server.url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            ask(client, [user("Hi")])
        for header in ({}, {"Authorization": "señor".encode()}, {"Authorization": "Basic señor".encode()},
                       {"Authorization": "Bearer"}, {"Authorization": "Bearer "}):
            statuses = [fetch(server, "GET", path, headers=header)[0]
                        for path in ("/v1/models", "/metrics", "/cache", "/health")]
            assert statuses == [401, 401, 401, 200]
        header = {"Authorization": "Bearer señor".encode()}
        assert fetch(server, "GET", "/v1/models", headers=header)[0] == 200


def test_a_key_learns_nothing_about_the_turns_of_another(checkpoint):
    """Whatever Ada does, Bob reads the same numbers; his own are counted."""
    def read(key):
        header = {"Authorization": f"Bearer {key}"}
        cache, metrics = (fetch(server, "GET", path, headers=header)[1] for path in ("/cache", "/metrics"))
        metrics = [line for line in metrics.split("\n") if "_created" not in line]
        return {name: cache[name] for name in ("stats", "conversations", "turns")}, metrics

    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=CONTEXT)
    with (serving(sessions, api_keys=["ada", "bob"]) as server, connect(server.url, "ada") as ada,
          connect(server.url, "bob") as bob):
        before = read("bob")
        for stream in (False, True):
            _, _, usage, _ = ask(ada, [user("a secret of some length" * 9)], stream, max_tokens=40)
        ada.responses.create(model="ascii", input="more", store=False, max_output_tokens=4)
        assert read("bob") == before
        assert read("ada")[0]["stats"]["slots_free"] < CONTEXT and len(read("ada")[0]["turns"]) == 2
        _, _, usage, _ = ask(bob, [user("Hi")])
        cache, metrics = read("bob")
        used = cache["stats"]["slots_total"] - cache["stats"]["slots_free"]
        assert used == cache["conversations"][0]["gpu"]
        assert f'vllm:prompt_tokens_total{{model_name="ascii"}} {usage.prompt_tokens}.0' in metrics


def test_one_offs_are_in_no_keys_picture(checkpoint):
    """Their conversations have numbers for names."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with serving(sessions, api_keys=["ada", "bob"]) as server, connect(server.url, "ada") as ada:
        with ada.chat.completions.create(model="ascii", messages=[user("Hi")], store=False, stream=True,
                                         extra_body=dict(ignore_eos=True)) as stream:
            next(iter(stream))
            names = server.engine.call(lambda: list(server.engine.cache.conversations))
            assert [type(name) for name in names] == [int]
            for key in ("ada", "bob"):
                status, cache = fetch(server, "GET", "/cache", headers={"Authorization": f"Bearer {key}"})
                assert status == 200 and cache["conversations"] == []


def test_the_live_picture_shows_a_key_its_own_conversations_alone(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with (serving(sessions, api_keys=["ada", "bob"]) as server, connect(server.url, "ada") as ada,
          connect(server.url, "bob") as bob,
          socket.create_connection(server.server_address, timeout=30) as connection):
        connection.sendall(b"GET /cache/events HTTP/1.1\r\nHost: localhost\r\n"
                           b"Authorization: Bearer bob\r\n\r\n")
        eventually(lambda: server.broadcast.queues)
        ask(ada, [user("a secret")], extra_body=dict(conversation_id="diary"))
        ask(bob, [user("Hi")], extra_body=dict(conversation_id="mine"))
        for line in connection.makefile("rb"):
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            seen = {entry["id"] for entry in event["conversations"]}
            assert seen <= {"mine"} and {move["conversation"] for move in event["transfers"]} <= {"mine"}
            assert set(event["stats"]) == {"slots_total", "slots_free", "cpu_chunks_total", "cpu_chunks_free"}
            if seen:
                break


def test_the_metrics_key_reads_the_counts_of_all_keys_and_nothing_else(checkpoint):
    def read(key, path="/metrics"):
        return fetch(server, "GET", path, headers={"Authorization": f"Bearer {key}"})

    def count(key, name):
        pattern = f'^{name}{{model_name="ascii"}} (.*)$'
        return float(re.search(pattern, read(key)[1], re.MULTILINE)[1])

    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with (serving(sessions, api_keys=["ada", "bob"], metrics_key="prometheus") as server,
          connect(server.url, "ada") as ada, connect(server.url, "bob") as bob):
        ask(ada, [user("a text of some length")], max_tokens=3)
        ask(bob, [user("Hi")], max_tokens=4)
        for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total",
                     "vllm:e2e_request_latency_seconds_count"):
            assert count("prometheus", name) == count("ada", name) + count("bob", name) > 0
        assert count("prometheus", "nano_pensieve:slots") == CONTEXT
        assert read("ada")[0] == 200 and "nano_pensieve:slots" not in read("ada")[1]
        statuses = [read("prometheus", path)[0] for path in ("/cache", "/cache/events", "/v1/models", "/")]
        assert statuses == [401, 401, 401, 200]
        with pytest.raises(openai.AuthenticationError), connect(server.url, "prometheus") as client:
            ask(client, [user("Hi")])


@pytest.mark.parametrize("keys, metrics_key, message", [
    (["ada"], "", "metrics_key must be a text"), (["ada"], "ada", "metrics_key must be a key of its own"),
    ([], "prometheus", "metrics_key must be .* beside at least one api_key")])
def test_a_metrics_key_that_would_open_more_or_nothing(keys, metrics_key, message):
    with pytest.raises(ValueError, match=message):
        Guard("127.0.0.1", keys, metrics_key=metrics_key)


def test_a_key_that_stores_too_much_loses_its_own_conversations(checkpoint):
    """At its next write, not a minute later; the other key loses nothing."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=CONTEXT)
    with serving(sessions, api_keys=["ada", "bob"], history_max_bytes=16_000) as server:
        def create(key, size):
            body = dict(items=[dict(type="message", role="user", content="x" * size)])
            header = {"Authorization": f"Bearer {key}"}
            status, content = fetch(server, "POST", "/v1/conversations", body, header)
            assert status == 200
            return content["id"]
        kept = create("bob", 100)
        names = [create("ada", 1500) for _ in range(20)]
        stored = [name.partition("/")[2] for name in sessions.history.conversations()]
        assert kept in stored and names[-1] in stored and names[0] not in stored
        assert 3 <= len(stored) - 1 <= 8_000 // 2_000 + 1
