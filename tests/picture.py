"""Draws results/chat.png, the README's picture of the chat page.

    python tests/picture.py [FILE]      one minute; needs chromium and chromedriver

A server runs its demo, and the page plays its example. The picture is taken at the end: by then the strips
show almost every kind of chunk.
"""
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))           # as pytest does

from clients import eventually, program
from test_page import Page, open_chromium


def draw(url: str, file: str):
    browser = open_chromium()
    try:
        page = Page(browser)
        page.resize(1320, 860)
        page.open(url)
        page.find("#play")[0].click()
        eventually(lambda: "your turn" in page.find("#story")[0].text, seconds=120)
        eventually(lambda: "idle" in page.find(".row")[0].text and not page.find("[data-move]"))
        browser.save_screenshot(file)
    finally:
        browser.quit()


if __name__ == "__main__":
    os.environ["BROWSER"] = "true"          # the demo opens no window: we have a browser of our own
    file = sys.argv[1] if sys.argv[1:] else str(ROOT / "results" / "chat.png")
    with tempfile.TemporaryDirectory() as directory:
        with program(ROOT / "tiny_chat", Path(directory, "history"), "--demo") as (_, url, _):
            draw(url, file)
