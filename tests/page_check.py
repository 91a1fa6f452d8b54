"""Whether a page that the library writes is well formed and refers to nothing outside of itself."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any


def without_code(text: str) -> str:
    """A page without its style and its scripts; the data of its charts stays."""
    return re.sub(r"<style>.*?</style>|<script>.*?</script>", "", text, flags=re.S)


def charts_of(text: str) -> list[dict[str, Any]]:
    """The data of a page's charts."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.S)
    return [json.loads(each) for each in found]


class PageChecker(HTMLParser):
    """Counts what a page refers to outside of itself, and checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str) -> None:
    checker = PageChecker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert checker.outside == []
    assert "$" not in without_code(text)
