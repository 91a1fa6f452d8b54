"""Writes docs/matrix.md: what of frameworks and switches is tested, from the results of a test run.

    pytest --full tests/integrations --junitxml=integrations.xml && python docs/matrix.py integrations.xml

Several files of results may be given; what a later one has of a test file replaces what an earlier one has. Sections of
the page whose test file is not among the results stay as they are. Only what has passed is claimed: a variant that was
skipped or has failed is named as such. Without `--full` the page would lose the rows of tests that only run with it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).with_name("matrix.md")
SENTENCES: dict[str, str] = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))  # what each test shows
TITLES = {
    "keras": "Keras",
    "lightning": "Lightning",
    "transformers": "transformers",
    "trl": "TRL",
    "peft": "PEFT",
    "accelerate": "accelerate",
    "optimizer_state": "Optimizer state in the store",
    "step_in_backward": "Parameters updated in backward",
    "moved_gradients": "Gradients in the store",
    "frozen_parameters": "Frozen parameters in the store",
    "trained_parameters": "All parameters in the store",
    "torch_loops": "torch: loops, mixed precision, checkpoint, torch.func",
    "torch_compile": "torch.compile",
    "compile_matrix": "torch.compile: kernels and graph breaks",
    "torch_distributed": "torch: several processes",
    "torch_refusals": "torch: what is refused",
}
PACKAGES = ("torch", "keras", "lightning", "transformers", "trl", "peft", "accelerate")
NAMED_MAX = 4  # variants that are named; of more, the number is given
HEAD = """# What is tested

Each row is a test with the real framework. If a test has variants, the names in brackets are those that passed. For a
test that was not run, the reason is given.
"""
RUN = "Run on {day} with {versions}{where}."
SECTION = re.compile(r"^## .+?(?=^## |^Generated: |\Z)", re.M | re.S)
FILE = re.compile(r"^`tests/integrations/(\w+\.py)`$", re.M)
COMMAND = "pytest --full tests/integrations --junitxml=integrations.xml && python docs/matrix.py integrations.xml"
FOOT = f"Generated: `{COMMAND}`."


@dataclass
class Row:
    """One test function: its variants by outcome, and why some were skipped."""

    file: str
    name: str
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    @property
    def words(self) -> str:
        """What the test shows, in a sentence; the test's name where nobody wrote one."""
        name = self.name.removeprefix("test_")
        return SENTENCES.get(name) or name.replace("_", " ").capitalize()

    @property
    def outcome(self) -> str:
        """What a reader may rely on, and what not."""
        said = []
        if self.passed:
            said.append("passed" + named(self.passed, NAMED_MAX))
        if self.skipped:
            said.append("**not run**" + named(self.skipped) + f" ({'; '.join(sorted(self.reasons))})")
        if self.failed:
            said.append("**FAILED**" + named(self.failed))
        return "; ".join(said)


def named(variants: Iterable[str], named_max: int | None = None) -> str:
    """The variants' names, where they have any; only their number where they are more than `named_max`."""
    found = [f"`{variant}`".replace("|", "\\|") for variant in variants if variant]
    if named_max is not None and len(found) > named_max:
        return f" ({len(found)} variants)"
    return f" ({', '.join(found)})" if found else ""


def read_all(paths: Iterable[Path]) -> tuple[str, list[Row]]:
    """The day of the last run, and the rows of all."""
    day, by_file = "", dict[str, list[Row]]()
    for path in paths:
        day, rows = read(path)
        by_file |= {file: [row for row in rows if row.file == file] for file in {row.file for row in rows}}
    return day, [row for rows in by_file.values() for row in rows]


def read(path: Path) -> tuple[str, list[Row]]:
    """The day of a test run, and its rows in the order of the run."""
    root = ElementTree.parse(path).getroot()
    rows: dict[tuple[str, str], Row] = {}
    for case in root.iter("testcase"):
        *_, module = case.attrib["classname"].split(".")
        name, _, variant = case.attrib["name"].partition("[")
        row = rows.setdefault((module, name), Row(f"{module}.py", name))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            row.failed.append(variant.removesuffix("]"))
        elif skipped is not None:
            row.skipped.append(variant.removesuffix("]"))
            row.reasons.add(skipped.get("message", "").removeprefix("Skipped: "))
        else:
            row.passed.append(variant.removesuffix("]"))
    days = [suite.get("timestamp", "")[:10] for suite in root.iter("testsuite")]
    return next(filter(None, days), "an unknown day"), list(rows.values())


def versions() -> str:
    """The frameworks of this environment."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def page(day: str, rows: list[Row], *, about: str, where: str, before: str = "") -> str:
    """The page, a section for each framework; `before`: the page whose other sections stay."""
    sections = {found[1]: text.strip() for text in SECTION.findall(before) if (found := FILE.search(text))}
    for file in dict.fromkeys(row.file for row in rows):
        stem = file.removeprefix("test_").removesuffix(".py")
        lines = [f"## {TITLES.get(stem, stem)}", "", f"`tests/integrations/{file}`", ""]
        lines += [RUN.format(day=day, versions=about, where=where), "", "| what is tested | outcome |", "|---|---|"]
        lines += [f"| {row.words} | {row.outcome} |" for row in rows if row.file == file]
        sections[file] = "\n".join(lines)
    order = [f"test_{stem}.py" for stem in TITLES]
    ordered = sorted(sections, key=lambda file: (order.index(file) if file in order else len(order), file))
    return "\n".join([HEAD, *(f"{sections[file]}\n" for file in ordered), FOOT, ""])


def main() -> int:
    """Write the page; 1 where a test has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="what pytest --junitxml wrote, on this machine")
    parser.add_argument("--where", default="on the CPU", help="what the tests ran on")
    args = parser.parse_args()
    day, rows = read_all(args.results)
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    text = page(day, rows, about=versions(), where=f", {args.where}", before=before)
    PAGE.write_text(text, encoding="utf-8")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
