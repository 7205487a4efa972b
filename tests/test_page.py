"""The chat page as a user has it: headless Chromium, a server in a process of its own, the embedded model, tiers far too small."""
import json
import os
import re
import shutil
import signal
import time
import urllib.error
import urllib.request

import pytest

from clients import ROOT, eventually, program

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (requirements-dev.txt)")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser
SLOWLY = """
import time, worker
fast = worker.Worker._logits
worker.Worker._logits = lambda *arguments: (time.sleep(0.02), fast(*arguments))[1]
"""                                     # so that there is a middle of an answer to stop in
FACTS = [["Hi, I'm Zorbella.", "My lucky number is 4711.", "I live in Oslo.", "My favourite food is ramen.", "What is my lucky number?"],
         ["Hello, my name is Linus.", "I work as a librarian.", "My hobby is chess.", "I live in Nairobi.", "Who am I?"]]
STRIPS = """return [...document.querySelectorAll(".row")].map(row =>
    [row.querySelector("button").textContent, [...row.querySelectorAll(".chunk")].map(chunk => chunk.dataset.state).join("")])"""
SAID = """return [...document.querySelectorAll(".chat")].map(chat => [...chat.querySelectorAll(".turn")].map(turn =>
    [...turn.querySelectorAll(".user, .answer, .source .share")].map(element => element.textContent)))"""


@pytest.fixture(scope="module")
def url(zygote, tmp_path_factory):
    history = tmp_path_factory.mktemp("page") / "history"
    pid, url = zygote.start(ROOT / "tiny_chat", history, "--gpu-cache-tokens", "192", "--cpu-cache-tokens", "64", before=SLOWLY)
    yield url
    os.kill(pid, signal.SIGKILL)
    zygote.exit_code()


@pytest.fixture(scope="module")
def chromium():
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL"))
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def page(chromium):
    """Wide, with no memory of other tests; nothing may complain on its console, but a 401 that is then answered."""
    page = Page(chromium)
    page.resize(1280, 800)
    yield page
    complaints = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert [text for text in complaints if "401" not in text] == []
    chromium.execute_script("localStorage.clear(); sessionStorage.clear()")


class Page:

    def __init__(self, browser):
        self.browser, self.run = browser, browser.execute_script

    def open(self, url, ready=".chat"):
        self.url = url
        self.browser.get(url)
        eventually(lambda: self.find(ready))

    def resize(self, width, height):
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", dict(width=width, height=height, deviceScaleFactor=1, mobile=False))

    def find(self, selector, within=None):
        return (within or self.browser).find_elements(By.CSS_SELECTOR, selector)

    def chats(self):
        return self.find(".chat")

    def ask(self, chat, text):
        self.find("textarea", self.chats()[chat])[0].send_keys(text, Keys.ENTER)

    def say(self, chat, text):
        """Returns when the answer is there, with its account."""
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

    def get(self, path, key=""):
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=dict(Authorization=f"Bearer {key}"))) as response:
            return json.load(response)

    def ids(self):
        """The conversations of our chats, by the names of their strips."""
        return {f"Chat {chat['name']}": chat["id"] for chat in json.loads(self.run("return localStorage.getItem('chats')") or "[]")}

    def agrees(self):
        """Do the strips show what the server says? Of a conversation that has nothing cached it says nothing."""
        said = {entry["id"]: entry["chunks"] for entry in self.get("/cache")["conversations"]}
        return all(said.get(id, "." * len(self.strips().get(name, "?"))) == self.strips().get(name) for name, id in self.ids().items())


def test_ten_turns_in_two_conversations(page, url):
    page.open(url)
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
    turns = page.get("/cache")["turns"]
    assert accounts <= {"".join(f"{source} {turn[source]}" for source in ("gpu", "cpu", "recomputed", "new")) for turn in turns}
    assert any(turn["recomputed"] and turn["cpu"] for turn in turns)
    assert "copied to the CPU" in page.run("return document.getElementById('picture').textContent")

    said = page.said()
    page.browser.refresh()                                      # the server knows it all
    eventually(lambda: page.said() == said)
    eventually(page.agrees)


def test_branch(page, url):
    page.open(url)
    for text in ("Hi, I'm Hedy.", "My lucky number is 7."):
        page.say(0, text)
    assert [button.is_displayed() for button in page.find(".branch")] == [True, False]      # what follows the last answer is no branch
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
    page.ask(0, "My password is a very long sentence about nothing.")
    eventually(lambda: len(page.said()[0][-1][1]) > 3)
    page.press(0, "Stop")
    eventually(lambda: page.find(".undone"))
    assert "Stopped" in page.find(".undone .source")[0].text and "about nothing" not in page.said()[0][-1][1]
    assert page.get(f"/v1/conversations/{page.ids()['Chat 1']}/items") == before and page.get("/cache")["stats"]["running"] == 0
    box = page.find("textarea")[0]
    assert box.get_attribute("value") == "My password is a very long sentence about nothing."
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


def test_keyboard_and_words(page, url):
    """What the picture shows can be read, and reached without a mouse."""
    page.open(url)
    for text in FACTS[0][:3]:
        page.say(0, text)
    eventually(lambda: "idle" in page.find(".row")[0].text)
    strip, chunks = page.find(".strip")[0], page.strips()["Chat 1"]
    assert strip.get_attribute("aria-label").startswith(f"Chat 1, {len(chunks)} chunks, from the oldest: ")
    strip.send_keys(Keys.END)
    focused = page.browser.switch_to.active_element
    assert focused.get_attribute("role") == "option" and page.find(".chunk", strip).index(focused) == len(chunks) - 1
    focused.send_keys(Keys.ARROW_LEFT)
    told = page.browser.switch_to.active_element.get_attribute("aria-label")
    size, cost = 32, page.get("/cache")["recompute_seconds"][len(chunks) - 2]
    assert told.startswith(f"Chat 1, tokens {size * (len(chunks) - 2)} to {size * (len(chunks) - 1) - 1}: ")
    figures = re.search("([0-9.]+) ms to recompute ÷ ([0-9.]+) s idle = retention value ([0-9.]+) µs/s", told.replace(",", ""))
    milliseconds, idle, value = map(float, figures.groups())
    assert milliseconds == pytest.approx(1e3 * cost, rel=0.01) and value == pytest.approx(1e3 * milliseconds / idle, rel=0.02)
    eventually(lambda: page.find("#worth")[0].text != told)     # as it stays idle, it is worth less
    assert all(page.run("return arguments[0].labels.length || arguments[0].ariaLabel", box) for box in page.find("textarea, input"))


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
    page.say(0, "Too long for a phone: " + 20 * "la")
    page.find("#start")[0].click()
    eventually(lambda: len(page.chats()) == 2)
    assert page.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [390, 844]
    eventually(lambda: 0 < page.run("return document.activeElement.getBoundingClientRect().right") <= 390)      # where one writes


@pytest.fixture
def guarded_url(tmp_path):
    flags = "--api-key", "secret", "--gpu-cache-tokens", "384", "--cpu-cache-tokens", "768"
    with program(ROOT / "tiny_chat", tmp_path / "history", *flags) as (_, url, _):
        yield url


def test_a_key_and_the_example(guarded_url, page):
    """The key is asked for until it is right, and then no more. Then the example plays, without its pauses: it shows every kind of move."""
    page.open(guarded_url, ready="#key")
    for key in ("wrong", "secret"):
        eventually(page.find("#key")[0].is_displayed)
        page.find("#secret")[0].clear()
        page.find("#secret")[0].send_keys(key, Keys.ENTER)
    eventually(lambda: "384" in page.find(".tier")[0].text)
    page.say(0, "Hello!")
    page.browser.refresh()
    eventually(lambda: page.said() and page.said()[0])
    assert not page.find("#key")[0].is_displayed()

    page.run("const later = setTimeout; window.setTimeout = action => later(action)")
    page.find("#play")[0].click()
    eventually(lambda: "your turn" in page.find("#story")[0].text, seconds=40)
    assert len(page.chats()) == 5 and not page.find(".undone")
    usage = page.get("/cache", "secret")["turns"][-3:]
    assert usage[0]["cpu"] and usage[1]["recomputed"] and usage[2]["gpu"] and usage[2]["cpu"]
    answers = [page.said()[chat][-1][1] for chat in (1, 2)]
    assert "Zorbella" in answers[0] and "lasagna" in answers[1]
