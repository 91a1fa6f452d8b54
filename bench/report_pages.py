"""The pages of the documentation on benchmarks: a summary, and appendices with every table.

`report.py --pages DIR` writes them: DIR/benchmarks.md, and one page in DIR/benchmarks for each `Table.page`. Every
figure in their text is taken from the tables, so that a new measurement changes text, tables and charts together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from report import explain
from table import EQUAL, GRADIENTS, NETWORKS, NOT_REACHED, PEER_BETTER, SMALL, Row, Table, about

COMMAND = "python bench/report.py bench/results --pages docs"
DEFAULT, LEAST, CHECKPOINT, DISK = (
    "offload, max_slowdown 5 %",
    "offload, least memory",
    "checkpoint per block",
    "tutorial's disk hooks",
)
SHOWN = {DEFAULT: "offload, default", LEAST: "offload, least memory", CHECKPOINT: CHECKPOINT, DISK: DISK}
FULL_NAMES = {DISK: "the disk hooks of PyTorch's tutorial"}
BARS = tuple(list(SHOWN)[:3])
PROMISED = 0.05  # of the default
SAVES_NOTHING = 0.95  # of plain's memory: more is plain training, within the noise
ROUNDING = 0.01
APPENDICES = {
    "networks": ("Networks, full size", "every way to train five networks, with the spread of the step times"),
    "small": ("Networks, small", "the same networks with short steps, where offload does worse"),
    "largest": ("Largest that fits", "the largest batch, depth or image within a limit"),
    "recomputation": ("Recomputation", "what recomputing adds to swapping where copies take longer than computation"),
    "settling": ("The first steps", "step time and memory until a plan is found, and what the controller decides"),
    "parts": ("Parts", "copies, spill file, hooks and planner, each by itself"),
    "targets": ("Targets and predictions", "what was aimed at and what was reached; predicted beside measured"),
    "simulated": ("Simulated GPUs", "computed from assumed figures of two cards; no GPU ran"),
    "gpu": ("On a GPU", "training steps, copies and hooks on one GPU"),
}
UNITS = """*Plain* is training without any of these ways. *Memory* is what training adds to the memory of the process
after model and optimizer are loaded (on a GPU: to what torch has allocated there), relative to plain training; *time*
is the median step, relative to plain steps."""
TERMS = f"""{UNITS} Plain's own time differs from 1 by noise. *Peak*: memory in the timed steps; *in all steps*: with
those of the search for a plan. In brackets are the quartiles of the median step. *Waits*: how long computation waits
for copies in each step. *Peer better*: no setting of offload needs as little memory and as little time as this way.
The *tutorial's disk hooks* are those of PyTorch's tutorial on hooks for saved tensors: they write every tensor to a
file and read it back. *Selective checkpointing* recomputes cheap operators only."""
NOTES = {
    "networks": TERMS,
    "small": TERMS,
    "largest": "*Peer better*: a larger value fits with this way than with offload.",
    "recomputation": "The same limit, by swapping alone and with recomputation (the default).",
    "parts": "*Peer better*: offload reaches less than 97 % of the speed of what it is compared with.",
    "settling": "Plain training and offload with default settings train the same batches, step by step in turn.",
    "targets": "*Growth* is the memory that training adds to the process after model and optimizer are loaded.",
    "gpu": """*Memory* is what training adds to the memory that torch has allocated on the GPU after model and
optimizer are loaded, relative to plain training; *peak* the same in bytes. *Pinned*: host memory. *Waits*: how
long computation waits for copies in each step. In brackets are the quartiles of the median step. *offload,
max_slowdown 5 %* is the default. *Peer better*: no setting of offload needs as little memory and as little time
as this way; with copies, the swap store reaches less than 97 % of the speed of `Tensor.copy_`. In the first
run, plans were made from predictions alone. Each run had 85 to 136 s, so some ways are missing. The upper
quartiles of offload's steps contain three slow reference steps after the search. Hooks: the additional time per
saved tensor, compared with a step without hooks; small negative times are noise.""",
    "simulated": "*Peer better*: no setting of offload needs as little memory and as little time as this way.",
}
ABOUT = """Memory and step time of training with `offload`, beside training without it (*plain*) and beside other ways
to save memory. A factor is relative to plain training: 0.50 × memory is half of its memory, 1.05 × time is a step
that takes 5 % longer. The ways are explained [below](#the-ways)."""
WAYS = """* *offload, default*: `offload.enable(model)`. It aims at steps at most 5 % slower. Time and memory are those
  of steps after the search; the search tries plans that need more ([*all steps*](benchmarks/networks.md)). Where step
  times vary, it [saves less](benchmarks/targets.md#is-the-default-max_slowdown-kept-amd-epyc).
* *offload, max_slowdown 25 %*: `offload.enable(model, max_slowdown=0.25)`.
* *offload, least memory*: the smallest `memory_limit` for which there is a plan. The limit counts tensors, the tables
  show the process, so another setting may need slightly less.
* *`n_tensors=-1, lb=4`*: every tensor is swapped, without a plan.
* *save_on_cpu*: PyTorch's `torch.autograd.graph.save_on_cpu`, which copies every saved tensor and waits for each copy.
* *Checkpoint per block*: `torch.utils.checkpoint` around each block. It keeps none of the tensors inside a block, and
  runs the block again in backward.
* *Selective checkpointing*: the same, but results of matrix products, convolutions and attention are kept.
* *Disk hooks of PyTorch's tutorial*: hooks that write every saved tensor to a file and read it back."""
HOW = """Each way trains the same model on the same data, from the same seed, with the same malloc (tcmalloc), in its
own process. Its steps alternate with plain steps in a second process. The losses and gradients of every step are
compared bit for bit."""


@dataclass
class Point:
    """Memory and step time over plain of one way on one network."""

    network: str
    way: str
    memory: float
    step: float
    mark: str

    @classmethod
    def of(cls, row: Row) -> Point | None:
        """The point of a row, None for one that did not run."""
        family, _, way = row.key.removeprefix(SMALL).partition(" / ")
        return row.point and cls(NETWORKS.get(family, family), way, *row.point, row.mark)


def pages(tables: Sequence[Table], why: Mapping[str, str], pictures: Set[str]) -> dict[str, str]:
    """Lay out every page.

    Parameters
    ----------
    tables : sequence of Table
        All results.
    why : mapping of str to str
        Explanations of marked rows, as in why.json.
    pictures : set of str
        Charts in the folder of the appendices: slugs of tables, and "summary".

    Returns
    -------
    dict of str to str
        Markdown by path, relative to the folder of the documentation.
    """
    held = {name: [table for table in tables if table.page == name] for name in APPENDICES}
    made = {"benchmarks.md": summary(tables, held, pictures)}
    for name, own in held.items():
        if own:
            made[f"benchmarks/{name}.md"] = appendix(name, own, why, pictures)
    return made


# -- the summary --------------------------------------------------------------------------------------------------


def points_of(tables: Sequence[Table], page: str) -> list[Point]:
    """All points of the networks on one page, without the demo."""
    rows = [row for table in tables if table.page == page and table.kind == "frontier" for row in table.rows]
    found = [Point.of(row) for row in rows]
    return [point for point in found if point is not None and "demo" not in point.network]


def by_network(points: Sequence[Point]) -> dict[str, dict[str, tuple[float, float]]]:
    """Memory and step time by network and way; networks in the order of `NETWORKS`."""
    order = [name for name in NETWORKS.values() if any(point.network == name for point in points)]
    return {
        name: {point.way: (point.memory, point.step) for point in points if point.network == name} for name in order
    }


def summary(tables: Sequence[Table], held: Mapping[str, list[Table]], pictures: Set[str]) -> str:
    """The page that people read: where offload loses, one chart, one table."""
    points = points_of(tables, "networks")
    lines = ["# Benchmarks\n", f"{ABOUT}\n", f"{losses(tables, points)}\n", f"{gains(points)}"]
    lines += [*on_gpu(points_of(tables, "gpu")), ""]
    if "summary" in pictures:
        words = "Memory and step time of three ways on every network, relative to plain training"
        lines += [*chart(words, "benchmarks/summary"), ""]
    lines += [*big_table(points), "", f"*{machines(held['networks'])}.* {UNITS}\n"]
    lines += ["## The ways\n", f"{WAYS}\n", "## How it is measured\n", f"{HOW}\n", "## Everything else\n"]
    for name, (title, words) in APPENDICES.items():
        if held[name]:
            lines.append(f"* [{title}](benchmarks/{name}.md): {words}.")
    lines += ["", f"These pages are generated: `{COMMAND}`. How to measure again: `bench/results/README.md`."]
    return "\n".join(lines) + "\n"


def losses(tables: Sequence[Table], points: Sequence[Point]) -> str:
    """Say where offload is worse than something else, or than it should be."""
    said = []
    if not any(table.machine.get("device") and not table.machine.get("rehearsal") for table in tables):
        said.append("No GPU has run these benchmarks yet. All figures are from CPUs or marked as simulated.")
    late = {
        "": [each for each in points if is_late(each)],
        " with short steps ([small sizes](benchmarks/small.md))": [
            each for each in points_of(tables, "small") if is_late(each)
        ],
    }
    over = [
        f"on {listed([f'{each.network} ({percent(each.step)})' for each in found])}{size}"
        for size, found in late.items()
        if found
    ]
    if over:
        said.append(f"With default settings, steps are more than 5 % slower {'; '.join(over)}.")
    points = [*points, *(each for each in points_of(tables, "gpu") if "first run" not in each.network)]
    ahead = [point for point in points if point.mark == PEER_BETTER and point.memory < SAVES_NOTHING]
    for way in dict.fromkeys(point.way for point in ahead):
        said += beaten(way, [point for point in ahead if point.way == way], points)
    missed = [row for table in tables if table.page == "targets" for row in table.rows if row.mark == NOT_REACHED]
    if missed:
        judged = [row for table in tables if table.title.startswith("Targets") for row in table.rows]
        targets = [row for row in judged if row.cells[-1] != "–"]
        own = [row for row in targets if row in missed]
        said.append(f"{len(own)} of the {len(targets)} [targets of this project](benchmarks/targets.md) are missed.")
    return "\n".join(["**Where offload loses**\n", *(f"* {sentence}" for sentence in said)])


def is_late(point: Point) -> bool:
    """Whether the default exceeds the slowdown that it aims at."""
    return point.way == DEFAULT and point.step > 1 + PROMISED + ROUNDING


def percent(step: float) -> str:
    """How much longer a step takes than plain's."""
    return f"{step - 1:.0%}".replace("%", "&nbsp;%")


def beaten(way: str, better: Sequence[Point], points: Sequence[Point]) -> Iterator[str]:
    """Sentences on one alternative that no setting of offload matches on some networks."""
    name = FULL_NAMES.get(way, way)
    close = {point.network: alike for point in better if (alike := as_good_rounded(point, points))}
    clear = [f"{point.network} ({size(point)})" for point in better if point.network not in close]
    if clear:
        yield f"On {listed(clear)}, no setting of offload needs as little memory *and* as little time as {name}."
    for point in better:
        if own := close.get(point.network):
            setting = SHOWN.get(own.way, own.way)
            is_slower = own.step > point.step
            lacks = "is as fast" if is_slower else "needs as little memory"
            peers, ours = (
                f"{each.step:.4f} × the time at {each.memory:.2f} × the memory"
                if is_slower
                else f"{each.memory:.4f} × the memory at {each.step:.2f} × the time"
                for each in (point, own)
            )
            yield (
                f"No setting of offload {lacks} as {name} on {point.network}, by a difference that rounding hides: "
                f"it takes {peers}, *{setting}* {ours}."
            )


def as_good_rounded(peer: Point, points: Sequence[Point]) -> Point | None:
    """The setting of offload of least memory that is as good as `peer` in the digits that the pages show."""
    own = [
        point
        for point in points
        if point.network == peer.network
        and point.way.startswith("offload")
        and round(point.memory, 2) <= round(peer.memory, 2)
        and round(point.step, 2) <= round(peer.step, 2)
    ]
    return min(own, key=lambda point: point.memory, default=None)


def size(point: Point) -> str:
    """Memory and step time in words."""
    return f"{point.memory:.2f}&nbsp;× memory, {point.step:.2f}&nbsp;× time"


def gains(points: Sequence[Point]) -> str:
    """Say what offload does on the networks of the table."""
    found = by_network(points)
    own = [ways[DEFAULT] for ways in found.values() if DEFAULT in ways]
    if not own:
        return "No network has been measured."
    memory, step = zip(*own, strict=True)
    said = [
        f"With default settings, training needs {min(memory):.2f} to {max(memory):.2f} × the memory of plain training, "
        f"at {min(step):.2f} to {max(step):.2f} × the step time."
    ]
    pairs = [network for network, ways in found.items() if CHECKPOINT in ways]
    wins = {network: won for network in pairs if (won := ahead_of_checkpointing(network, points))}
    if wins:
        named: dict[str, list[str]] = {}
        for network, point in wins.items():
            shown = SHOWN.get(point.way, "")
            words = f"with *{shown}*" if shown else f"with {code_of(point.way)} ({size(point)})"
            named.setdefault(words, []).append(network)
        each = listed([f"{words} on {listed(networks)}" for words, networks in named.items()])
        said.append(
            f"On {len(wins)} of {len(pairs)} networks, a setting of offload needs less memory *and* less time than "
            f"checkpointing every block: {each}."
        )
    return "\n".join(["**What it gains**\n", *(f"* {sentence}" for sentence in said)])


def on_gpu(points: Sequence[Point]) -> Iterator[str]:
    """What `max_slowdown` gave on a GPU."""
    networks = dict.fromkeys(point.network for point in points if "first run" not in point.network)
    for network in networks:
        own = [point for point in points if point.network == network and "max_slowdown" in point.way]
        if own:
            told = listed([f"{size(point)} with *{SHOWN.get(point.way, point.way)}*" for point in own])
            yield f"* [{network}](benchmarks/gpu.md): {told}."


def ahead_of_checkpointing(network: str, points: Sequence[Point]) -> Point | None:
    """A setting of offload that is better than checkpointing in memory and time: one of the table, or another."""
    own = {point.way: point for point in points if point.network == network}
    peer = own[CHECKPOINT]
    won = [
        point
        for way, point in own.items()
        if way.startswith("offload") and point.memory <= peer.memory and point.step <= peer.step
    ]
    return next((point for way in SHOWN for point in won if point.way == way), next(iter(won), None))


def code_of(way: str) -> str:
    """A setting as arguments of `enable`: "offload, n_tensors −1, lb 4" is `n_tensors=-1, lb=4`."""
    words = way.removeprefix("offload, ").replace("−", "-").split(", ")
    return f"`{', '.join('='.join(word.split(' ', 1)) for word in words)}`"


def big_table(points: Sequence[Point]) -> Iterator[str]:
    """One row for each network: memory and time of the ways that most people choose between."""
    yield f"| network | {' | '.join(f'**{name}**' if 'offload' in name else name for name in SHOWN.values())} |"
    yield "|---|" + "---|" * len(SHOWN)
    for network, ways in by_network(points).items():
        cells = [
            f"{ways[way][0]:.2f}&nbsp;×&nbsp;memory<br>{ways[way][1]:.2f}&nbsp;×&nbsp;time" if way in ways else "–"
            for way in SHOWN
        ]
        yield f"| {network} | {' | '.join(cells)} |"


def machines(tables: Sequence[Table]) -> str:
    """Where and when the networks were measured, in one line."""
    days = sorted({str(table.machine.get("date", ""))[:10] for table in tables if "demo" not in table.title} - {""})
    machine = next((table.machine for table in tables), {})
    words = about({**machine, "date": "DAYS"}).partition(", DAYS")[0]
    return ", ".join([words, " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))])


def listed(words: Sequence[str]) -> str:
    """Words with commas and "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# -- appendices -----------------------------------------------------------------------------------------------------


def chart(words: str, path: str) -> Iterator[str]:
    """A chart for light pages and for dark ones."""
    for theme in ("light", "dark"):
        yield f"![{words}]({path}-{theme}.svg#only-{theme})"


def appendix(name: str, tables: Sequence[Table], why: Mapping[str, str], pictures: Set[str]) -> str:
    """One page of tables, each with what is to be said about its marked rows."""
    title, words = APPENDICES[name]
    lines = ["---\nhide: [toc]\n---\n", f"# {title}\n", f"{words[0].upper()}{words[1:]}. [Summary](../benchmarks.md)\n"]
    if name in NOTES:
        lines.append(f"{NOTES[name]}\n")
    for table in tables:
        lines.append(f"## {table.title}\n")
        if table.note:
            lines.append(f"{table.note}\n")
        if table.slug in pictures:
            lines += [*chart(table.title, table.slug), ""]
        for heading, own in split(table):
            lines += [f"### {heading}\n"] if heading else []
            lines += [*shown(own), ""]
        lines += [*reasons(table, why), f"*{about(table.machine)}.*\n"]
    lines.append(f"Generated: `{COMMAND}`.")
    return "\n".join(lines) + "\n"


def split(table: Table) -> Iterator[tuple[str, Table]]:
    """A simulated table network by network; every other table whole."""
    if table.kind != "simulated":
        yield "", table
        return
    for network in dict.fromkeys(row.cells[0] for row in table.rows):
        rows = [
            Row(row.key, row.cells[1:], row.mark, row.ours, row.point) for row in table.rows if row.cells[0] == network
        ]
        yield network, Table(table.title, table.columns[1:], rows, table.machine)


def shown(table: Table) -> Iterator[str]:
    """The table without empty columns and without what all rows have in common, which is said below it."""
    absent = [row for row in table.rows if row.cells[1:-1] and set(row.cells[1:-1]) == {"–"}]
    ran = [row for row in table.rows if row not in absent]
    kept = [place for place in range(len(table.columns)) if {row.cells[place] for row in ran} - {"–", ""}]
    alike = next((place for place in kept if table.columns[place] == GRADIENTS), None)
    if alike is not None and {row.cells[alike] for row in ran} == {EQUAL}:
        kept.remove(alike)
    else:
        alike = None
    if ran:
        yield "| " + " | ".join(table.columns[place] or "note" for place in kept) + " |"
        yield "|" + "---|" * len(kept)
    for row in ran:
        cells = [row.cells[place].replace("|", "\\|") for place in kept]
        yield "| " + " | ".join([f"**{cells[0]}**" if row.ours else cells[0], *cells[1:]]) + " |"
    if alike is not None:
        yield "\nLosses and gradients of all of them are equal to plain's to the last bit."
    if absent:
        yield f"\nNot run: {'; '.join(f'{row.cells[0]} ({first_words(row.cells[-1])})' for row in absent)}."


def first_words(reason: str) -> str:
    """A reason up to its first semicolon or full stop."""
    return reason.partition(";")[0].partition(". ")[0]


def reasons(table: Table, why: Mapping[str, str]) -> Iterator[str]:
    """Why an alternative is better, or a target is missed: one item for each explanation."""
    for key, reason in explain([table], dict(why)):
        group, _, name = key.rpartition(" / ")
        titles = {row.key: row.cells[0] for row in table.rows if row.mark}
        words = titles.get(key, name) if group else ""
        yield f"* **{words}:** {reason}" if words else f"* {reason}"
    yield ""
