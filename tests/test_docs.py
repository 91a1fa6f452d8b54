"""The site is built as readers get it: strictly, without the network; and its generated page claims what exists."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser, need_browser
from example_pages import plan
from frameworks import need

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURE_BYTES_MAX = 200_000


class Resources(HTMLParser):
    """What a page makes a browser fetch without being asked: scripts, styles, fonts, pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
        about = dict(attrs)
        if tag == "link" and about.get("rel") in ("canonical", "prev", "next"):
            return
        if tag in names and about.get(names[tag]):
            self.found.append(str(about[names[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("mkdocs", "material", "mkdocstrings"):
        need(name)
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody answers at: whoever asks the network fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "WARNING" not in ran.stderr, ran.stderr
    return folder


def test_every_page_is_in_the_menu(site):
    front = (site / "index.html").read_text()
    for path in DOCS.rglob("*.md"):
        page = path.relative_to(DOCS).with_suffix(".html").as_posix()
        assert (site / page).is_file()
        assert f'href="{page}"' in front or path.stem == "index", path


def test_nothing_comes_from_elsewhere(site):
    pages = [path for path in site.glob("*.html") if path.name != "404.html"]  # that one is for servers alone
    assert pages
    for path in pages:
        for resource in Resources(path.read_text()).found:
            assert not re.match(r"(?:[a-z]+:)?//", resource), (path.name, resource)
            assert (site / re.split(r"[?#]", resource)[0]).exists() or resource.startswith("data:"), resource
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", path.read_text()), path


def test_the_api_page_shows_every_public_name(site):
    import offload

    text = (site / "api.html").read_text()
    for name in offload.__all__:
        assert re.search(rf"\b{name}\b", text), name
    for name in ("OffloadCallback", "LMSCallback", "OffloadTrainerMixin", "OffloadTrainerCallback"):
        assert f"{name}</" in text or f".{name}" in text, name


def test_the_page_of_knobs_names_every_argument():
    import inspect

    import offload

    text = (DOCS / "knobs.md").read_text()
    for name in list(inspect.signature(offload.enable).parameters)[1:]:
        assert f"| `{name}` |" in text, name
    read = re.compile(r'environ(?:\.get\(|\[)"(\w+)"|_count\("(\w+)"\)')
    sources = "\n".join(path.read_text() for path in (ROOT / "offload").rglob("*.py"))
    documented = {name for match in read.findall(sources) for name in match if name} - {"PATH"}
    assert documented
    for name in documented:
        assert name in text, name


def test_every_reason_to_stay_is_answered():
    from offload.diagnostics.oom import _FIXED

    hooks = (ROOT / "offload" / "runtime" / "hooks.py").read_text()
    core = (ROOT / "csrc" / "hook_core.cpp").read_text()
    reasons = set(re.findall(r'\.keep\([^)]*?"([\w ]+)"', hooks)) | _FIXED
    reasons |= set(re.findall(r'names\.(?:small|parameter|unsupported), "([\w ]+)"', core))
    reasons |= {"kept by plan", "n_tensors", "excluded"}
    assert {"small", "host limit"} <= reasons
    text = (DOCS / "faq.md").read_text()
    for reason in reasons:
        assert f"| `kept: {reason}` |" in text, reason


def test_pictures_are_small_and_shown_in_light_and_dark():
    pictures = sorted((DOCS / "pictures").iterdir())
    assert pictures
    shown = "\n".join(path.read_text() for path in DOCS.glob("*.md"))
    for picture in pictures:
        assert picture.stat().st_size <= PICTURE_BYTES_MAX, picture
        stem, scheme = picture.stem.rsplit("-", 1)
        other = {"light": "dark", "dark": "light"}[scheme]
        assert picture.with_stem(f"{stem}-{other}").is_file(), "each is there for light and for dark pages"
        assert f"](pictures/{picture.name}#only-{scheme})" in shown, picture


def test_the_plan_of_a_llama_block_has_the_lines_of_explain():
    """The text of a page is that of an earlier run: its figures may differ, not the kinds of its lines."""
    (shown,) = re.findall(r"docs/llama_block\.py`\).*?```text\n(.*?)```", (DOCS / "recomputation.md").read_text(), re.S)
    lines = plan(12).explain().splitlines()
    whole = [line for line in lines if "(tensor " not in line]
    assert len(whole) == 3
    assert [kind(line) for line in shown.splitlines()[: len(whole)]] == [kind(line) for line in whole]
    kinds = {kind(line) for line in lines if "(tensor " in line}
    assert kinds == {kind(line) for line in shown.splitlines()[len(whole) :]}


def kind(line: str) -> str:
    """A line of `explain()` without names, figures, reasons and the parts that only some lines have."""
    line = re.sub(r"^\S+ (?=\(tensor)|, slowed by swaps [\d.]+ m?s|; recomputing it would take .*", "", line)
    line = re.sub(r"(?<=node )(\d+) \([^)]*\)", r"\1", line)
    line = re.sub(r"; (?:hidden|compute waits).*|(?<=kept) since.*", "", line)
    line = re.sub(r"[+-]?\d[\d.]*(?: (?:[KMG]iB|m?s|us)\b)?", "0", line)
    return line.replace(" 0 node before", " 0 nodes before").replace("from 0, 0", "from 0")


def test_the_figures_of_the_pages_are_those_that_were_measured():
    command = [sys.executable, "docs/charts.py", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


# -- search and the repository's address ------------------------------------------------------------------------------


def test_search_needs_no_server(site):
    """Pages that are opened from a folder find the index in a script, and a worker that needs no server."""
    import json

    index = json.loads((site / "search" / "search_index.json").read_text())
    script = (site / "search" / "search_index.js").read_text()
    assert json.loads(script.removeprefix("var __index = ")) == index
    assert any("max_slowdown" in each["text"] for each in index["docs"])
    for page, to_root in (("index.html", ""), ("benchmarks/networks.html", "../")):
        assert f"{to_root}javascripts/iframe-worker.js" in Resources((site / page).read_text()).found


@pytest.mark.long
def test_search_finds_in_pages_that_are_opened_from_a_folder(site):
    command = [
        need_browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    page = (site / "benchmarks" / "networks.html").as_uri() + "?q=checkpoint"
    ran = subprocess.run([*command, page], capture_output=True, text=True, timeout=200, check=True)
    assert re.search(r"[1-9]\d* matching documents", ran.stdout)


# The table itself scrolls, so a page does not show it: what is wider than its place.
TOO_WIDE = """[...document.querySelectorAll(".md-typeset table:not([class])")]
  .map(table => [table.closest(".md-typeset__scrollwrap") || table.parentElement, table])
  .filter(([place, table]) => place.scrollWidth > place.clientWidth + 1)
  .map(([place, table]) => `${table.rows[0].innerText}: ${place.scrollWidth} > ${place.clientWidth}`)"""


@pytest.mark.long
def test_no_table_is_wider_than_its_page(site, tmp_path):
    program = need_browser()
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 20
    with Browser(program, tmp_path) as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        found = {}
        for page in pages:
            browser.open(page)
            found[page.name] = browser.run(TOO_WIDE)
    assert {name: tables for name, tables in found.items() if tables} == {}


@pytest.mark.parametrize("address", [None, "https://git.example/us/offload"])
def test_the_repositorys_address_is_one_setting(address, monkeypatch):
    need("mkdocs")
    from mkdocs.config import load_config

    monkeypatch.delenv("OFFLOAD_REPO_URL", raising=False)
    if address:
        monkeypatch.setenv("OFFLOAD_REPO_URL", address)
    assert load_config(str(ROOT / "mkdocs.yml")).repo_url == address


# -- the matrix -------------------------------------------------------------------------------------------------------


@pytest.fixture
def matrix():
    specification = importlib.util.spec_from_file_location("docs_matrix", DOCS / "matrix.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["docs_matrix"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules["docs_matrix"]


def test_the_campaigns_name_only_tests_that_exist():
    parts = json.loads((DOCS / "reliability.json").read_text())["parts"].values()
    named = {path for part in parts for path in part.get("passed", {})}
    cases = [case for part in parts for row in part.get("mutants", []) for case in row["caught_by"]]
    assert len(named | {case.partition("::")[0] for case in cases}) > 20
    assert [path for path in named if not (ROOT / path).is_file()] == []
    unknown = []
    for case in cases:
        path, _, function = case.partition("::")
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        if f"def {function.partition('[')[0]}(" not in source:
            unknown.append(case)
    assert unknown == []


def test_the_matrix_names_only_tests_that_exist(matrix):
    text = (DOCS / "matrix.md").read_text()
    sections = re.split(r"^`tests/integrations/(\w+\.py)`$", text, flags=re.M)[1:]
    assert sections
    known = set()
    for file, rows in zip(sections[::2], sections[1::2], strict=True):
        tree = ast.parse((ROOT / "tests" / "integrations" / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        named = re.findall(r"^\| (.+?) \| (?:passed|\*\*)", rows, re.M)
        assert named
        assert set(named) <= {matrix.Row(file, name).words for name in names}, file
        known |= {name.removeprefix("test_") for name in names}
    assert set(matrix.SENTENCES) <= known


def test_the_matrix_claims_no_failure():
    assert "FAILED" not in (DOCS / "matrix.md").read_text()


def test_the_matrix_claims_what_has_passed_and_nothing_else(matrix, tmp_path):
    results = tmp_path / "results.xml"
    case = '<testcase classname="tests.integrations.test_keras" name="{}">{}</testcase>'
    cases = [
        case.format("test_a_switch[one]", ""),
        case.format("test_a_switch[two]", '<failure message="no"/>'),
        case.format("test_a_switch[three]", '<skipped message="Skipped: needs a CUDA device"/>'),
        case.format("test_broken", '<error message="no"/>'),
    ]
    results.write_text(f'<testsuites><testsuite timestamp="2026-01-02T03:04">{"".join(cases)}</testsuite></testsuites>')
    day, rows = matrix.read(results)
    assert day == "2026-01-02"
    assert [row.outcome for row in rows] == [
        "passed (`one`); **not run** (`three`) (needs a CUDA device); **FAILED** (`two`)",
        "**FAILED**",
    ]
    again = tmp_path / "again.xml"
    again.write_text(f"<testsuite>{case.format('test_broken', '')}</testsuite>")
    assert [(row.name, row.outcome) for row in matrix.read_all([results, again])[1]] == [("test_broken", "passed")]
    text = matrix.page(day, rows, about="torch 1", where="")
    assert "| A switch | passed (`one`);" in text
    assert "| Broken | **FAILED** |" in text
    later = matrix.page("2027-01-01", [matrix.Row("test_trl.py", "test_new")], about="torch 2", where="", before=text)
    assert later.count("## ") == 2
    assert "Run on 2026-01-02 with torch 1." in later
    assert "Run on 2027-01-01 with torch 2." in later


def test_many_variants_are_counted(matrix):
    row = matrix.Row("test_keras.py", "test_a_switch", passed=list("abcde"), failed=list("fghij"))
    assert row.outcome == "passed (5 variants); **FAILED** (`f`, `g`, `h`, `i`, `j`)"
