"""The chat page as a user sees it: headless Chromium, a server in its own process, the embedded model, tiny
tiers."""
import json
import os
import re
import shutil
import signal
import time
import urllib.error
import urllib.request

import pytest

from clients import ROOT, eventually, make_checkpoint, program
from serving.example import NOTES

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (requirements-dev.txt)")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser
SLOWLY = """
import time, worker
fast = worker.Worker.compute_logits
worker.Worker.compute_logits = lambda *arguments: (time.sleep(0.02), fast(*arguments))[1]
"""                                     # so that an answer takes long enough to be stopped
FACTS = [["Hi, I'm Zorbella.", "My lucky number is 4711.", "I live in Oslo.", "My favourite food is ramen.",
          "What is my lucky number?"],
         ["Hello, my name is Linus.", "I work as a librarian.", "My hobby is chess.", "I live in Nairobi.",
          "Who am I?"]]
STRIPS = """return [...document.querySelectorAll(".row")].map(row => [
    row.querySelector("button").textContent,
    [...row.querySelectorAll(".chunk")].map(chunk => chunk.dataset.state).join("")])"""
SAID = """return [...document.querySelectorAll(".chat")].map(chat =>
    [...chat.querySelectorAll(".turn")].map(turn =>
        [...turn.querySelectorAll(".user, .ours :is(.answer, .share)")].map(part => part.textContent)))"""

# Keeps every picture: of each strip its name (the first that it had: a new chat's may be told late), its
# chunks' states, and which chunk is framed (-1: none).
RECORD = """
const read = () => [...document.querySelectorAll(".row")].map(row => {
    const chunks = [...row.querySelectorAll(".chunk")];
    row.firstName ??= row.querySelector("button").textContent;
    return [row.firstName, chunks.map(chunk => chunk.dataset.state).join(""),
            chunks.findIndex(chunk => chunk.classList.contains("next"))];
});
window.pictures = [];
new MutationObserver(() => pictures.push(read())).observe(
    document.getElementById("strips"), {attributes: true, childList: true, subtree: true});"""
# From now on the picture is this one, again and again.
PRETEND = """
const [whole] = arguments, real = window.fetch;
const event = `data: ${JSON.stringify(whole)}\\n\\n`;
const stream = () => new ReadableStream({start(to) {
    setInterval(() => to.enqueue(new TextEncoder().encode(event)), 100); }});
window.fetch = (path, options) =>
    path === "/cache/events" ? Promise.resolve(new Response(stream())) : real(path, options);
for (const hidden of [true, false]) {       // look away and back: the page asks again
    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""
# What is typed is no hint any more: for a test that wants to see how turns find evicted chunks.
NO_HINTS = """
const fetch = window.fetch;
window.fetch = (path, options) => path.endsWith("/warm") ? Promise.reject() : fetch(path, options);"""
# Pauses take no time, but are noted.
HURRY = """
const later = setTimeout;
window.pauses = [];
window.setTimeout = (action, milliseconds) => { pauses.push(milliseconds); later(action); };"""


@pytest.fixture(scope="module")
def url(zygote, tmp_path_factory):
    history = tmp_path_factory.mktemp("page") / "history"
    flags = "--gpu-cache-tokens", "192", "--cpu-cache-tokens", "128"
    pid, url = zygote.start(ROOT / "tiny_chat", history, *flags, before=SLOWLY)
    yield url
    os.kill(pid, signal.SIGKILL)
    zygote.exit_code()


@pytest.fixture
def new_url(tmp_path):
    """Of a server that knows no conversation yet."""
    with program(ROOT / "tiny_chat", tmp_path / "history") as (_, url, _):
        yield url


@pytest.fixture(scope="module")
def chromium():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Debian's chromium and chromium-driver")
    browser = open_chromium()
    yield browser
    browser.quit()


def open_chromium():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL"))
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


@pytest.fixture
def page(chromium):
    """A wide window that remembers no other test. Its console must stay empty, except for a 401 (then the
    page asks for a key)."""
    page = Page(chromium)
    page.resize(1280, 800)
    yield page
    complaints = [entry["message"] for entry in chromium.get_log("browser")
                  if entry["level"] in ("SEVERE", "WARNING")]
    assert [text for text in complaints if "401" not in text] == []
    chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
    chromium.get("about:blank")                                 # the server may end now


class Page:

    def __init__(self, browser):
        self.browser, self.run = browser, browser.execute_script

    def open(self, url, ready=".chat"):
        self.url = url
        self.browser.get(url)
        eventually(lambda: self.find(ready))

    def resize(self, width, height):
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                     dict(width=width, height=height, deviceScaleFactor=1, mobile=False))

    def find(self, selector, within=None):
        return (within or self.browser).find_elements(By.CSS_SELECTOR, selector)

    def chats(self):
        return self.find(".chat")

    def ask(self, chat, text):
        self.find("textarea", self.chats()[chat])[0].send_keys(text, Keys.ENTER)

    def say(self, chat, text):
        """Ask, and wait until the answer is there, and below it where its context came from."""
        before = len(self.said()[chat])
        self.ask(chat, text)
        eventually(lambda: len(self.said()[chat]) > before and len(self.said()[chat][-1]) == 6)
        return self.said()[chat][-1][1]

    def press(self, chat, button):
        next(found for found in self.find("button", self.chats()[chat]) if found.text == button).click()

    def said(self):
        """For each chat its turns: what was said, the answer, and where its tokens came from."""
        return self.run(SAID)

    def strips(self):
        return dict(self.run(STRIPS))

    def post(self, url, path="/v1/responses", **body):
        request = urllib.request.Request(url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def get(self, path, key=""):
        request = urllib.request.Request(self.url + path, headers=dict(Authorization=f"Bearer {key}"))
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def ids(self):
        """Name of a strip -> id of its conversation, for our chats."""
        chats = json.loads(self.run("return localStorage.getItem('chats')") or "[]")
        return {f"Chat {chat['name']}": chat["id"] for chat in chats}

    def agrees(self):
        """True if the strips show what the server says. It does not list conversations without chunks."""
        said = {entry["id"]: entry["chunks"] for entry in self.get("/cache")["conversations"]}
        strips = self.strips()
        return all(said.get(id, "." * len(strips.get(name, "?"))) == strips.get(name)
                   for name, id in self.ids().items())


def test_ten_turns_in_two_conversations(page, url):
    page.open(url)
    page.run(NO_HINTS)
    page.find("#start")[0].click()
    seen = []
    for number in range(5):
        for chat in (0, 1):
            page.say(chat, FACTS[chat][number])
            eventually(page.agrees)
            seen.append(set("".join(page.strips().values())))
    assert set("GBC.") in seen, seen
    answers = [[turn[1] for turn in chat] for chat in page.said()]
    assert "4711" in answers[0][-1] and "Linus" in answers[1][-1]
    accounts = {"".join(turn[2:]) for chat in page.said() for turn in chat}
    turns, sources = page.get("/cache")["turns"], ("gpu", "cpu", "recomputed", "new")
    assert accounts <= {"".join(f"{source} {turn[source]}" for source in sources) for turn in turns}
    assert any(turn["recomputed"] and turn["cpu"] for turn in turns)
    assert "got a copy on the CPU" in page.run("return document.getElementById('picture').textContent")

    said = page.said()
    page.browser.refresh()                                      # the server has kept everything
    eventually(lambda: page.said() == said)
    eventually(page.agrees)


def test_the_framed_chunk_leaves_the_gpu_next(page, url):
    page.open(url)
    for chat, facts in enumerate(FACTS):
        if chat:
            page.find("#start")[0].click()
        for text in facts[:4 - chat]:
            page.say(chat, text)
    page.find("#start")[0].click()
    page.run(RECORD)
    for text in FACTS[0][:4]:
        page.say(2, text)                                       # it needs slots, and the others are idle
        eventually(page.agrees)                                 # a picture between two turns, at least
    pictures = page.run("return pictures")
    departures = 0
    for before, after in zip(pictures, pictures[1:]):
        now = {name: states for name, states, _ in after}       # without who has no chunks any more
        gone = {(name, i) for name, states, _ in before for i, state in enumerate(states)
                if state in "GB" and now.get(name, "." * len(states))[i] in "C."}
        framed = {(name, i) for name, _, i in before if i >= 0}
        assert not gone or framed <= gone and len(framed) == 1, (before, after)
        departures += len(gone)
    assert departures >= 2, pictures
    log = page.find("#log")[0]
    for _ in range(8):          # a chunk that leaves both tiers between two pictures is "dropped", not "left"
        if "left the GPU" not in log.text:
            page.say(2, "Hello!")
            eventually(page.agrees)
    assert "left the GPU" in log.text


def test_what_was_saved(page, url):
    page.open(url)
    page.say(0, "My lucky number is 7.")
    page.say(0, "I live in Oslo.")
    usage = page.get("/cache")["turns"][-1]
    cached, tokens = usage["gpu"] + usage["cpu"], usage["prompt_tokens"]
    assert page.find(".ours .source p")[-1].text == (
        f"{cached} of {tokens} tokens were cached, {tokens - cached} computed. First token after "
        f"{usage['first_token_ms']:,} ms.")
    assert not page.find("#compare")[0].is_displayed()          # there is no other engine


def test_fetched_while_you_typed(page, url):
    """The first keystroke of a message is a hint, once, and not in a new chat."""
    hints = "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('/warm')).length"
    page.open(url)
    for text in FACTS[0]:
        page.say(0, text)
    sent = page.run(hints)
    assert sent == len(FACTS[0]) - 1                            # the first message began the chat
    page.find("#start")[0].click()
    for text in FACTS[1]:
        page.say(1, text)
    eventually(lambda: "." in page.strips()["Chat 1"])
    box, sent = page.find("textarea", page.chats()[0])[0], page.run(hints)
    box.send_keys("Who")
    eventually(lambda: set(page.strips()["Chat 1"]) <= set("GB"))
    box.send_keys(" am I", Keys.BACKSPACE)
    assert page.run(hints) == sent + 1
    page.say(0, "I?")
    usage = page.get("/cache")["turns"][-1]
    assert usage["cpu"] == usage["recomputed"] == 0
    sentence = page.find(".ours .source p", page.chats()[0])[-1].text
    all_fetched, copied, recomputed = map(int, re.search(
        r"computed\. (\d+) were fetched while you typed: (\d+) copied from the CPU, (\d+) recomputed\. First",
        sentence).groups())
    assert copied + recomputed == all_fetched < usage["gpu"] and recomputed > 0


def test_half_speed(page, url):
    page.open(url)
    page.say(0, "Hello!")
    eventually(lambda: page.find(".chunk"))
    move = """const chunk = document.querySelector(".chunk");
              chunk.dataset.move = arguments[0];
              return parseFloat(getComputedStyle(chunk, arguments[1]).animationDuration)"""
    for kind, half in (("swap_in", "::before"), ("swap_out", "::after"), ("recompute", "::before")):
        whole = page.run(move, kind, half)
        page.find("#slow")[0].click()
        assert page.run(move, kind, half) == 2 * whole > 0
        page.find("#slow")[0].click()


def test_eighty_chats(page, url):
    """The strips scroll, the one that spoke last comes first, and the explanation stays in view."""
    ids = [page.post(url, input=f"Hello {number}", max_output_tokens=1)["conversation"]["id"]
           for number in range(80)]
    page.post(url, "/v1/chat/completions", conversation_id="my notes", max_tokens=1,
              messages=[dict(role="user", content="Hello")])
    page.post(url, input="Hello", max_output_tokens=1)
    page.browser.get(url)
    page.run("localStorage.setItem('chats', JSON.stringify(arguments[0]))",
             [dict(id=id, name=number) for number, id in enumerate(ids)])
    page.open(url)
    eventually(lambda: len(page.find(".row")) >= 82, seconds=30)
    assert {"my notes", "Other 1", "Chat 0", "Chat 79"} <= page.strips().keys()
    page.say(40, "My lucky number is 7.")
    eventually(lambda: next(iter(page.strips())) == "Chat 40")
    page.find("summary")[0].click()                             # it was folded, to make room for the strips
    for size in ((1280, 900), (390, 844)):
        page.resize(*size)
        assert page.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
                        ) == [*size]
        strips, explanation = page.find("#strips")[0], page.find("#about")[0]
        assert "cut into chunks of 32 tokens" in explanation.text
        assert strips.size["height"] > 90 and strips.size["height"] < strips.get_property("scrollHeight")
        assert explanation.rect["y"] + explanation.rect["height"] < page.find("#picture")[0].rect["y"] \
            + page.find("#picture")[0].rect["height"] < size[1]


@pytest.fixture
def drawn(page):
    """Opens the page with chats whose strips have so many chunks, with every letter among them. No server of
    a test has such tiers, so the pictures come from us."""
    def draw(url, *lengths):
        def entry(chat, chunks):
            letters = ("." * (chunks // 6) + "C" * (chunks // 3) + "B" * (chunks // 4)).ljust(chunks, "G")
            return dict(id=f"conv_{chat}", tokens=32 * chunks, gpu=32, cpu=32, running=False, waiting=False,
                        idle_seconds=7.5, chunks=letters, leaves_next=None if chat else chunks // 2)
        whole = dict(stats=dict(slots_total=8192, slots_free=100, cpu_chunks_total=512, cpu_chunks_free=3),
                     conversations=[entry(chat, chunks) for chat, chunks in enumerate(lengths)],
                     transfers=[])
        page.open(url)
        for _ in lengths[1:]:
            page.find("#start")[0].click()
        page.run(PRETEND, whole)
        eventually(lambda: [len(chunks) for chunks in page.strips().values()] == [*lengths])
    return draw


def overflows(page):
    """How far the strips, the page, and anything in the page reach beyond their places, in pixels."""
    return page.run("""
        const strips = document.getElementById("strips"), {scrollWidth} = document.documentElement;
        return {strips: strips.scrollHeight - strips.clientHeight, sideways: scrollWidth - innerWidth,
                strip: Math.max(...[...document.querySelectorAll(".strip")].map(strip =>
                    strip.getBoundingClientRect().right - strips.getBoundingClientRect().right))}""")


@pytest.mark.parametrize("lengths", [(10, 10, 10), (32, 32, 32), (60, 60, 60), (120, 90, 60)])
def test_three_strips_are_seen_as_a_whole(page, url, drawn, lengths):
    """While a sentence of the example stands above them, too."""
    page.resize(1280, 720)
    drawn(url, *lengths)
    page.run("document.getElementById('story').textContent = 'Chat 3 needs space. '.repeat(6)")
    eventually(lambda: max(overflows(page).values()) <= 0)
    story, legend = page.find("#story")[0].rect["height"], page.find("#legend span")
    assert story > 60 and len({item.rect["y"] for item in legend}) == 1 and len(legend) == 6


@pytest.mark.parametrize("size", [(1280, 720), (420, 800)])
def test_long_strips_stay_readable(page, url, drawn, size):
    """Each of their chunks has room for a pointer. What it is worth stands in the log's place."""
    page.resize(*size)
    drawn(url, 120, 60)
    assert overflows(page)["sideways"] <= 0 and overflows(page)["strip"] <= 0
    chunks = page.find(".chunk", page.find(".strip")[0])
    sizes = {(chunk.rect["width"] >= 8, chunk.rect["height"] >= 14) for chunk in chunks}
    assert sizes == {(True, True)} and len({chunk.rect["y"] for chunk in chunks}) == 4
    places = [chunk.rect["y"] for chunk in chunks]
    webdriver.ActionChains(page.browser).move_to_element(chunks[70]).perform()
    eventually(lambda: "tokens 2240 to 2271: " in page.find("#worth")[0].text)
    assert not page.find("#log")[0].is_displayed()
    assert [chunk.rect["y"] for chunk in chunks] == places      # nothing has moved below the pointer
    page.find(".strip")[0].send_keys(Keys.END)
    assert "tokens 3808 to 3839: " in page.find("#worth")[0].text
    page.find("textarea")[0].send_keys("")
    webdriver.ActionChains(page.browser).move_to_element(page.find("h1")[0]).perform()
    eventually(lambda: not page.find("#worth")[0].text)


def test_the_explanation_is_read_once(new_url, page, drawn):
    """It is there at the first visit, as long as it costs no strip. It can be opened again."""
    def is_open():
        return page.find("#about")[0].get_property("open")
    page.resize(1280, 720)
    drawn(new_url, 10, 10, 10)
    assert is_open() and "cut into chunks" in page.find("#about")[0].text
    page.find("summary")[0].click()
    eventually(lambda: page.run("return localStorage.getItem('explained')"))
    page.open(new_url)
    assert not is_open()
    page.find("summary")[0].send_keys(Keys.ENTER)
    assert is_open()
    page.run("localStorage.clear()")
    drawn(new_url, *[30] * 6)
    eventually(lambda: not is_open())
    page.find("summary")[0].click()
    time.sleep(0.5)                                             # the reader has the last word
    assert is_open()
    page.open(new_url)
    assert not is_open()


@pytest.mark.parametrize("width", [360, 420, 800])
def test_narrow_panels_are_aligned(page, url, width):
    """The picture, and below it one chat, or two. "New chat" stands beside the title, in one line."""
    page.resize(width, 800)
    page.open(url)
    page.find("#start")[0].click()
    page.run("document.getElementById('chats').scrollTo(0, 0)")
    boxes = "return [...arguments].map(part => part.getBoundingClientRect().toJSON())"
    parts = [page.find(name)[0] for name in ("h1", "#start", "#picture")]
    title, start, picture, first, second = page.run(boxes, *parts, *page.chats())
    last = second if width == 800 else first
    assert [first["left"], last["right"]] == pytest.approx([picture["left"], picture["right"]], abs=0.1)
    assert [title["left"], start["right"]] == pytest.approx([picture["left"], picture["right"]], abs=0.1)
    assert start["top"] <= title["top"] and title["bottom"] <= start["bottom"] < start["top"] + 40


def test_the_example_needs_its_tiers(page, url):
    page.browser.get("about:blank")
    page.open(url + "/#play")
    eventually(lambda: "python server.py --demo" in page.find("#story")[0].text)
    assert page.find("#play")[0].text == "Play the example" and page.said() == [[]]


def test_branch(page, url):
    page.open(url)
    for text in ("Hi, I'm Hedy.", "My lucky number is 7."):
        page.say(0, text)
    # A message after the last answer is no branch, so that answer has no button.
    assert [button.is_displayed() for button in page.find(".branch")] == [True, False]
    page.find(".branch")[0].click()
    assert [len(chat) for chat in page.said()] == [2, 1]
    page.say(1, "My lucky number is 31.")
    assert "31" in page.say(1, "What is my lucky number?") and "7" in page.say(0, "What is my lucky number?")
    assert len(set(page.ids().values())) == 2 and page.said()[1][0][:2] == page.said()[0][0][:2]
    eventually(page.agrees)


def test_stop_in_mid_stream(page, url):
    page.open(url)
    page.say(0, "My hobby is chess.")
    before = page.get(f"/v1/conversations/{page.ids()['Chat 1']}/items")
    page.ask(0, "My password is a very long sentence without sense.")
    eventually(lambda: len(page.said()[0][-1][1]) > 3)
    page.press(0, "Stop")
    eventually(lambda: page.find(".undone"))
    assert "Stopped" in page.find(".undone .source")[0].text and "without sense" not in page.said()[0][-1][1]
    assert page.get(f"/v1/conversations/{page.ids()['Chat 1']}/items") == before
    assert page.get("/cache")["stats"]["running"] == 0
    box = page.find("textarea")[0]
    assert box.get_attribute("value") == "My password is a very long sentence without sense."
    box.clear()
    assert "chess" in page.say(0, "What is my hobby?")


def test_delete(page, url):
    page.open(url)
    page.say(0, "<img src=x onerror=alert(1)>")                 # text is never markup
    assert page.said()[0][0][0] == "You: <img src=x onerror=alert(1)>" and not page.find("img")
    eventually(lambda: "Chat 1" in page.strips())
    gone = page.ids()["Chat 1"]
    page.press(0, "Delete")
    page.browser.switch_to.alert.accept()
    eventually(lambda: page.said() == [[]] and "Chat 1" not in page.strips() and gone not in page.strips())
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page.get(f"/v1/conversations/{gone}")
    assert page.ids() == {}


def test_two_clicks_count_once(page, url):
    """On Delete, and on the name of a conversation that another client has begun."""
    page.open(url)
    for chat in range(3):
        if chat:
            page.find("#start")[0].click()
        page.say(chat, "Hello!")
    twice = "confirm = () => true; arguments[0].click(); arguments[0].isConnected && arguments[0].click()"
    page.run(twice, page.find(".chat .plain")[0])
    eventually(lambda: len(page.chats()) == 2)
    page.post(url, "/v1/chat/completions", conversation_id="theirs", max_tokens=1,
              messages=[dict(role="user", content="Hello")])
    eventually(lambda: "theirs" in page.strips() and "Chat 1" not in page.strips())     # no row leaves later
    page.run(twice, next(name for name in page.find(".row .plain") if name.text == "theirs"))
    eventually(lambda: len(page.chats()) == 3)
    page.say(0, "Hello again!")
    assert list(page.ids()) == ["Chat 2", "Chat 3", "Chat 4"] and len(page.chats()) == 3


def test_a_conversation_of_an_agent(new_url, page):
    """Its calls of tools are not shown. What waits for an answer is, and the next turn follows it."""
    page.open(new_url)
    call = dict(type="function_call", call_id="1", name="add", arguments="{}")
    result = dict(type="function_call_output", call_id="1", output="4")
    asked = [dict(role="user", content="2 + 2?"), call, result, dict(role="user", content="And my name?")]
    made = page.post(new_url, input=asked, max_output_tokens=4)
    path = f"/v1/conversations/{made['conversation']['id']}/items"
    waiting = [dict(role="assistant", content="Hm."), dict(role="user", content="I am Zorbella.")]
    page.post(new_url, path, items=waiting)
    eventually(lambda: "Other 1" in page.strips())
    next(name for name in page.find(".row .plain") if name.text == "Other 1").click()
    eventually(lambda: len(page.said()) == 2)
    answer = made["output"][0]["content"][0]["text"]
    shown = [["You: 2 + 2?\nAnd my name?", answer], ["You: ", "Hm."], ["You: I am Zorbella.", ""]]
    assert [turn[:2] for turn in page.said()[1]] == shown
    page.say(1, "Who am I?")
    asked = [item["content"][0]["text"] for item in page.get(path + "?order=desc")["data"][1:4]]
    assert asked == ["Who am I?", "I am Zorbella.", "Hm."]


def test_a_chat_that_cannot_be_opened_is_kept(page, url):
    """And those behind it are opened."""
    page.open(url)
    for chat in range(2):
        page.find("#start")[0].click() if chat else None
        page.say(chat, "Hello!")
    ids = page.ids()
    fails = """const real = window.fetch, failed = () => Promise.resolve(new Response("{}", {status: 500}));
        window.fetch = (path, options) => path.endsWith("%s") ? failed() : real(path, options);"""
    source = dict(source=fails % ids["Chat 1"])
    once = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    page.browser.refresh()
    page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", once)
    eventually(lambda: [len(chat) for chat in page.said()] == [1])
    page.say(0, "Hello again!")
    assert page.ids() == ids
    page.browser.refresh()
    eventually(lambda: [len(chat) for chat in page.said()] == [1, 2])


def test_keyboard_and_words(page, url):
    """A user can reach and read everything that the picture shows without a mouse."""
    page.open(url)
    for text in FACTS[0][:3]:
        page.say(0, text)
    eventually(lambda: "idle" in page.find(".row")[0].text)
    strip, chunks = page.find(".strip")[0], page.strips()["Chat 1"]
    assert strip.get_attribute("aria-label").startswith(f"Chat 1, {len(chunks)} chunks, from the oldest: ")
    strip.send_keys(Keys.END)
    focused = page.browser.switch_to.active_element
    assert focused.get_attribute("role") == "option"
    assert page.find(".chunk", strip).index(focused) == len(chunks) - 1
    focused.send_keys(Keys.ARROW_LEFT)
    told = page.browser.switch_to.active_element.get_attribute("aria-label")
    size, cost = 32, page.get("/cache")["recompute_seconds"][len(chunks) - 2]
    assert told.startswith(f"Chat 1, tokens {size * (len(chunks) - 2)} to {size * (len(chunks) - 1) - 1}: ")
    figures = re.search("([0-9.]+) ms to recompute ÷ ([0-9.]+) s idle = retention value ([0-9.]+) µs/s",
                        told.replace(",", ""))
    milliseconds, idle, value = map(float, figures.groups())
    assert milliseconds == pytest.approx(1e3 * cost, rel=0.01)
    assert value == pytest.approx(1e3 * milliseconds / idle, rel=0.02)
    eventually(lambda: page.find("#worth")[0].text != told)     # as it stays idle, it is worth less
    labelled = "return arguments[0].labels.length || arguments[0].ariaLabel"
    assert all(page.run(labelled, box) for box in page.find("textarea, input"))


@pytest.fixture(params=[("lru", "left end"), ("conversation", "whole chat")])
def another_policy(request, tmp_path):
    """A server's address, and what its page must say."""
    policy, rule = request.param
    with program(ROOT / "tiny_chat", tmp_path / "history", "--policy", policy) as (_, url, _):
        yield url, rule


def test_the_words_are_those_of_the_policy(another_policy, page):
    """Only the policy "retention" has a retention value."""
    url, rule = another_policy
    page.open(url)
    page.say(0, FACTS[0][0])
    page.find(".strip")[0].send_keys(Keys.HOME)
    eventually(lambda: "s idle" in page.find("#worth")[0].text)
    told = page.run("return document.getElementById('picture').textContent")
    assert rule in told and "retention value" not in told


def test_nobody_watches(page, url):
    """In a hidden tab the picture stands still."""
    def show(hidden):
        page.run("Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
                 "document.dispatchEvent(new Event('visibilitychange'))", hidden)
    page.open(url)
    page.say(0, "Hello!")
    eventually(lambda: "idle" in page.find("#strips")[0].text)
    show(hidden=True)
    text = page.find("#strips")[0].text
    time.sleep(2)
    assert page.find("#strips")[0].text == text
    show(hidden=False)
    eventually(lambda: page.find("#strips")[0].text != text)


def test_narrow(page, url):
    page.resize(390, 844)
    page.open(url)
    word = "Supercalifragilisticexpialidociousandmuchlongerthanaphoneiswide"
    assert word in page.say(0, f"My job is {word}")
    page.find("#start")[0].click()
    eventually(lambda: len(page.chats()) == 2)
    size = "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    assert page.run(size) == [390, 844]
    # The box to write in is in view.
    eventually(lambda: 0 < page.run("return document.activeElement.getBoundingClientRect().right") <= 390)


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """python server.py --demo --api-key secret: its address, and a file with what it opened in a browser."""
    opened = tmp_path / "opened"
    monkeypatch.setenv("BROWSER", f"sh -c 'echo $0 > {opened}' %s")
    with program(ROOT / "tiny_chat", tmp_path / "history", "--demo", "--api-key", "secret") as (_, url, _):
        yield url, opened


def test_the_demo(demo, page):
    """A browser opens. The page asks for the key until it is right, and then no more. The example plays, here
    without its pauses, shows every kind of move, and its answers are right."""
    url, opened = demo
    eventually(lambda: opened.exists() and opened.read_text() == f"{url}/#play\n")
    page.open(url, ready="#key")
    for key in ("wrong", "secret"):
        eventually(page.find("#key")[0].is_displayed)
        page.find("#secret")[0].clear()
        page.find("#secret")[0].send_keys(key, Keys.ENTER)
    eventually(lambda: "384" in page.find(".tier")[0].text)
    page.say(0, "Hello!")
    page.browser.refresh()
    eventually(lambda: page.said() and page.said()[0])
    assert not page.find("#key")[0].is_displayed()

    def turns():
        return sum(len(chat) for chat in page.said())
    play, step = page.find("#play")[0], page.find("#step")[0]
    page.run(HURRY)
    step.click()
    eventually(lambda: turns() == 2 and len(page.said()[1][-1]) == 6)
    page.find("#slow")[0].click()
    play.click()
    assert play.text == "Pause"
    eventually(lambda: turns() > 3)
    play.click()
    assert play.text == "Play on" and {3000, 1400} <= {*page.run("return pauses")}
    eventually(lambda: all(len(turn) == 6 for chat in page.said() for turn in chat))
    paused_at = turns()
    time.sleep(0.5)
    assert turns() == paused_at
    play.click()
    for number in range(paused_at, 36):                         # "Hello!", and the 35 turns of the example
        eventually(lambda: turns() > number)
    eventually(lambda: "your turn" in page.find("#story")[0].text)
    assert len(page.chats()) == 5 and not page.find(".undone")

    usage = page.get("/cache", "secret")["turns"][-3:]
    assert usage[0]["cpu"] and usage[1]["recomputed"] and usage[2]["gpu"] and usage[2]["cpu"]
    assert not page.find(".without")[-1].is_displayed()
    page.find("#compare")[0].click()
    assert page.find(".without")[-1].is_displayed()
    panes = page.run("return [...document.querySelectorAll('.answer')].map(pane => "
                     "[pane.textContent, pane.getBoundingClientRect().y])")
    assert len(panes) == 2 * 36 and panes[::2] == panes[1::2]   # side by side: ours, and the same without
    told = page.run("return document.getElementById('chats').textContent")
    for turn in page.get("/cache", "secret")["turns"]:
        tokens, cached = turn["prompt_tokens"], turn["gpu"] + turn["cpu"]
        ours, without = turn["first_token_ms"], turn["stateless"]["first_token_ms"]
        assert (f"{cached} of {tokens} tokens were cached, {tokens - cached} computed. "
                f"First token after {ours:,} ms; without memory {without:,} ms.") in told
        assert (f"0 of {tokens} tokens were cached, {tokens} computed. "
                f"First token after {without:,} ms.") in told
    for sentence in "came back from the CPU", "the model recomputed its first", "fell out of both tiers":
        # The last picture may come a second after the last answer.
        eventually(lambda: sentence in page.run("return document.getElementById('log').textContent"))
    answers = {said.removeprefix("You: "): answer for chat in page.said()[1:] for said, answer, *_ in chat}
    asked = {"What is my lucky number?": "4711", "What is my favourite food?": "lasagna",
             "Who am I?": "Zorbella"}
    for said, answer in answers.items():
        value = asked.get(said) or said.rstrip(".").split()[-1]
        assert answer.count(value) == 1, (said, answer)


@pytest.fixture
def talkative(tmp_path, monkeypatch):
    """A demo with a model that knows no end of an answer, and a token for each character."""
    make_checkpoint(tmp_path / "ascii")
    monkeypatch.setenv("BROWSER", "true")
    with program(tmp_path / "ascii", tmp_path / "history", "--demo") as (_, url, _):
        yield url


def test_the_demo_with_another_model(talkative, page):
    """Its tiers are larger, its answers are cut off, its chats end before all is said. Every move is seen."""
    page.open(talkative)
    page.run(HURRY)
    page.find("#play")[0].click()
    eventually(lambda: "your turn" in page.find("#story")[0].text, seconds=120)
    stats, turns = page.get("/cache")["stats"], page.get("/cache")["turns"]
    assert stats["slots_total"] > 384 and not page.find(".undone")
    assert max(turn["completion_tokens"] for turn in turns) == 32
    chats, said = page.said(), NOTES.said
    assert len(chats) == 4 and 1 < len(chats[1]) < len(said[1] + said[5])
    assert {turn[0].removeprefix("You: ") for turn in chats[1]} < {*said[1]}
    assert turns[-2]["recomputed"] and turns[-1]["gpu"] and turns[-3]["cpu"]


@pytest.fixture
def roomy(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER", "true")
    flags = "--demo", "--gpu-cache-tokens", "512"
    with program(ROOT / "tiny_chat", tmp_path / "history", *flags) as (_, url, _):
        yield url


def test_a_demo_with_tiers_of_the_user(roomy, page):
    """In these the example would not show what it tells."""
    page.open(roomy + "/#play")
    eventually(lambda: "512 and 768 tokens" in page.find("#story")[0].text)


def test_a_chat_of_the_example_is_deleted(demo, page):
    """Then the example begins anew."""
    page.open(demo[0], ready="#key")
    page.find("#secret")[0].send_keys("secret", Keys.ENTER)
    eventually(lambda: "tokens" in page.find(".tier")[0].text)
    page.run(HURRY)
    for turns in (1, 2):
        page.find("#step")[0].click()
        eventually(lambda: len(page.said()[0]) == turns and len(page.said()[0][-1]) == 6)
    page.press(0, "Delete")
    page.browser.switch_to.alert.accept()
    eventually(lambda: page.said() == [[]])
    page.find("#step")[0].click()
    eventually(lambda: page.said()[0] and page.said()[0][0][0] == "You: Hi, I'm Zorbella.")


def test_the_example_waits_where_a_turn_was_refused(demo, page):
    """The next step says the same again."""
    page.open(demo[0], ready="#key")
    page.find("#secret")[0].send_keys("secret", Keys.ENTER)
    eventually(lambda: "tokens" in page.find(".tier")[0].text)
    page.run(HURRY)
    page.run("""const real = window.fetch;
        window.fetch = (path, options) => {
            if (path !== "/v1/responses") return real(path, options);
            window.fetch = real;
            return Promise.resolve(new Response("{}", {status: 429}));
        };""")
    page.find("#play")[0].click()
    eventually(lambda: page.find("#play")[0].text == "Play the example" and page.find(".undone"))
    page.find("#step")[0].click()
    eventually(lambda: len(page.said()[0]) == 2 and len(page.said()[0][1]) == 6)
    assert [turn[0] for turn in page.said()[0]] == ["You: Hi, I'm Zorbella."] * 2


def test_a_demo_without_a_browser(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER", raising=False)
    with program(ROOT / "tiny_chat", tmp_path / "history", "--demo") as (process, url, _):
        assert process.stdout.readline() == f"There is no browser here. Open {url}/#play in yours.\n"
