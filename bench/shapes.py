"""Synthetic traces in the shapes of common networks, for measuring the planner on what it has not seen."""

from __future__ import annotations

import random
from collections.abc import Callable

from offload.plan.trace import Node, SavedTensor, Trace

MIB = 1 << 20


class Recorder:
    """Builds a trace forward first: operators, what they save, then backward in reverse."""

    def __init__(self, source: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.source = source
        self.forward: list[tuple[str, float, int]] = []
        self.saved: list[list[int]] = []  # [bytes, produced, packed, last_forward, operators that need it…]

    def run(self, name: str, seconds: float, workspace_bytes: int = 0) -> int:
        """Record one operator and return its node number."""
        jitter = self.random.uniform(0.9, 1.1)
        self.forward.append((name, seconds * jitter, workspace_bytes))
        return len(self.forward) - 1

    def save(self, count: int, node: int, readers: list[int]) -> None:
        """Record a tensor of `count` bytes, saved at `node`, read in backward by the operators `readers`."""
        self.saved.append([count, node, node, max([node, *readers]), *(readers or [node])])

    def trace(self, base_bytes: int, slowdown: float = 2.0, gradient_bytes: int = 0) -> Trace:
        """Return the trace: every operator's backward takes `slowdown` times its forward."""
        count = len(self.forward)
        nodes = [Node(name, seconds, False) for name, seconds, _ in self.forward]
        base = [base_bytes + space for _, _, space in self.forward]
        for i in reversed(range(count)):
            name, seconds, space = self.forward[i]
            nodes.append(Node(name + ".backward", seconds * slowdown * self.random.uniform(0.9, 1.1), True))
            base.append(base_bytes + 2 * space + gradient_bytes * (count - i) // count)
        tensors = []
        for i, (size, produced, packed, last_forward, *readers) in enumerate(self.saved):
            uses = [2 * count - 1 - reader for reader in readers]
            tensors.append(SavedTensor(i, size, produced, packed, last_forward, min(uses), max(uses)))
        return Trace(tuple(nodes), tuple(base), tuple(tensors), self.source)


def transformer(tensor_count: int, seed: int) -> Trace:
    """Return a stack of equal layers, a large head and a loss."""
    r = Recorder("transformer", seed)
    layers = max(1, tensor_count // 8)
    hidden = r.random.choice((8, 24, 64)) * MIB + r.random.randrange(MIB)
    heads = r.random.uniform(0.5, 3.0)
    for layer in range(layers):
        for name, seconds, size in (
            ("norm1", 0.04, 1.0),
            ("qkv", 0.6, 3.0),
            ("attention", 0.5, heads),
            ("proj", 0.2, 1.0),
            ("norm2", 0.04, 1.0),
            ("fc1", 0.8, 4.0),
            ("gelu", 0.08, 4.0),
            ("fc2", 0.8, 1.0),
        ):
            node = r.run(f"blocks.{layer}.{name}", seconds * 1e-3, int(hidden * size))
            r.run(f"blocks.{layer}.{name}.out", seconds * 1e-4)
            r.save(int(hidden * size), node, [node + 1])
    head = r.run("head", 3e-3, 12 * hidden)
    r.save(6 * hidden, head, [r.run("loss", 1e-3, 6 * hidden)])
    return r.trace(layers * 12 * MIB, gradient_bytes=layers * 12 * MIB)


def cnn(tensor_count: int, seed: int) -> Trace:
    """Return stages of halving resolution: large tensors first, small ones last, with residual reads."""
    r = Recorder("cnn", seed)
    blocks = max(4, tensor_count // 3)
    size = r.random.choice((200, 500)) * MIB
    held = 0
    for block in range(blocks):
        stage = block * 4 // blocks
        count = int(size / 2**stage * r.random.uniform(0.5, 1.0))
        seconds = r.random.uniform(0.4, 2.0) * 1e-3 * (1 + stage / 2)
        conv = r.run(f"stage{stage}.{block}.conv", seconds, count // 2)
        norm = r.run(f"stage{stage}.{block}.norm", seconds / 8)
        relu = r.run(f"stage{stage}.{block}.relu", seconds / 10)
        r.save(count, conv, [norm])
        r.save(count, norm, [relu])
        r.save(count // 2 if stage % 2 else count, relu, [relu, r.run(f"stage{stage}.{block}.add", seconds / 10)])
        held += 1 + stage
    return r.trace(held * MIB, gradient_bytes=held * MIB)


def unet(tensor_count: int, seed: int) -> Trace:
    """Return an encoder and a decoder whose skips are read late in forward and early in backward."""
    r = Recorder("unet", seed)
    levels = 6
    repeats = max(1, tensor_count // (levels * 5))
    size = r.random.choice((150, 400)) * MIB
    skips = []
    for level in range(levels):
        for repeat in range(repeats):
            count = int(size / 1.7**level * r.random.uniform(0.8, 1.0))
            conv = r.run(f"down{level}.{repeat}.conv", r.random.uniform(1.0, 2.0) * 1e-3, count // 2)
            r.save(count, conv, [r.run(f"down{level}.{repeat}.act", 1e-4)])
            skips.append((count, conv + 1))
    for level in reversed(range(levels)):
        for repeat in range(repeats):
            count, node = skips.pop()
            join = r.run(f"up{level}.{repeat}.join", 2e-4, count)
            r.save(count, node, [node, join])
            conv = r.run(f"up{level}.{repeat}.conv", r.random.uniform(1.5, 3.0) * 1e-3, count // 2)
            r.save(count * 2, join, [conv])
            r.save(count, conv, [r.run(f"up{level}.{repeat}.act", 1e-4)])
    return r.trace(300 * MIB, gradient_bytes=300 * MIB)


def irregular(tensor_count: int, seed: int) -> Trace:
    """Return operators and lifetimes with no structure: sizes over three decades, zero-length nodes, odd orders."""
    r = Recorder("irregular", seed)
    count = max(4, tensor_count * 2)
    for i in range(count):
        seconds = 0.0 if r.random.random() < 0.05 else r.random.lognormvariate(-7.5, 1.2)
        r.run(f"op{i}", seconds, int(r.random.lognormvariate(2.0, 1.0) * MIB))
    for _ in range(tensor_count):
        node = r.random.randrange(count - 1)
        furthest = min(count - 1, node + r.random.choice((1, 2, 3, 10, count // 4 + 1)))
        readers = sorted({r.random.randint(node, furthest) for _ in range(r.random.choice((1, 1, 2, 3)))})
        r.save(int(r.random.lognormvariate(3.0, 1.3) * MIB) + 1, node, readers)
    return r.trace(200 * MIB, slowdown=r.random.uniform(1.5, 2.5), gradient_bytes=100 * MIB)


def small(seed: int) -> Trace:
    """Return a random instance small enough for the exact planner: at most 12 tensors."""
    rng = random.Random(seed)
    forward = rng.randint(4, 9)
    backward = rng.randint(forward, forward + 3)
    total = forward + backward
    nodes = tuple(
        Node(f"n{k}", 0.0 if rng.random() < 0.05 else round(rng.uniform(0.1, 3.0), 3), k >= forward)
        for k in range(total)
    )
    base = tuple(rng.randint(0, 30) for _ in range(total))
    tensors = []
    for i in range(rng.randint(2, 12)):
        produced = rng.randrange(forward)
        packed = min(forward - 1, produced + rng.choice((0, 0, 0, 1)))
        last_forward = min(forward - 1, packed + rng.choice((0, 0, 1, 2)))
        mirrored = total - 1 - packed + rng.choice((-1, 0, 0, 0, 1))
        first_backward = min(total - 1, max(forward, mirrored))
        last_use = min(total - 1, first_backward + rng.choice((0, 0, 0, 1)))
        tensors.append(SavedTensor(i, rng.randint(5, 60), produced, packed, last_forward, first_backward, last_use))
    return Trace(nodes, base, tuple(tensors), "small")


SHAPES: dict[str, Callable[[int, int], Trace]] = {
    "transformer": transformer,
    "cnn": cnn,
    "unet": unet,
    "irregular": irregular,
}
