"""What the processes of these tests do: train, be interrupted, hit a limit, fork, end.

Each function runs in a process of its own (see zygote.py), gets JSON arguments and answers with something JSON can say.
"""

import atexit
import ctypes
import errno
import functools
import gc
import logging
import os
import resource
import signal
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offload
from offload import _core, session
from offload.runtime import stores
from offload.runtime.engine import Engine

logging.getLogger("offload").addHandler(logging.NullHandler())  # a tensor that stays is logged: no fault here
SLAB_BYTES = {}
KEPT_ALIVE = []  # until the interpreter itself takes it down


class Net(nn.Module):
    """Saves four tensors of 250 KiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x * 2)


def enable(model, directory, tier, **more):
    if tier == "slab":
        session.make_engine = make_slab_engine
    options = {"n_tensors": -1, "lb": 2, "min_tensor_bytes": 1, "spill_dir": directory}
    return offload.enable(model, **options, **more)


def make_slab_engine(device, options):
    """A device's tier over host streams; by default in so little memory that it spills."""
    lanes = _core.HostDriver()
    nbytes = SLAB_BYTES.get("all", 640 << 10)
    spill_dir = options.spill_dir if nbytes < 1 << 20 else ""
    store = _core.SwapStore.slab(lanes, lanes, nbytes, spill_dir, slab_bytes=nbytes, slice_bytes=64 << 10)
    engine = Engine(store, device)
    stores._engines.add(engine)
    return engine


def steps(model, count, handle=None, optimizer=None):
    """Train `count` steps (None: for ever) from a seed; where there is a handle, every copy ends before backward."""
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    while count is None or done < count:
        loss = model(torch.randn(1000, 64)).square().mean()
        if handle is not None and done % 2:
            handle._engine.drain()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if count is None:
            os.write(1, f"{done}\n".encode())  # how far it came, for whoever kills it


def new_net():
    torch.manual_seed(1)
    return Net()


def are_equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def held_spill_files(directory, pid="self"):
    """The files in `directory` that a process has open: mode, links, and the open flags' relevant bits."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, about = str(link.readlink()), link.stat()
        except FileNotFoundError:
            continue
        if target.startswith(str(Path(directory).resolve()) + "/"):
            found.append({"mode": oct(about.st_mode & 0o7777), "links": about.st_nlink, "owner": about.st_uid})
    return found


def run_code(code):
    """A script, as a user would write it."""
    exec(code, {"__name__": "__main__"})
    return {"ended": True}


def train(directory, tier, count):
    """Plain and offloaded training end in the same parameters."""
    if count is None:
        model = new_net()
        return steps(model, None, enable(model, directory, tier))
    plain, model = new_net(), new_net()
    steps(plain, count)
    with enable(model, directory, tier) as handle:
        steps(model, count, handle)
        about = handle.report()
        return {
            "equal": are_equal(model, plain),
            "swapped": about.swapped.tensors,
            "files": held_spill_files(directory),
            "visible": [each.name for each in Path(directory).iterdir()],
        }


def train_moved(directory):
    """Train for ever; after each step, AdamW's state and the parameters are in the spill file, or on their way."""
    model = new_net()
    optimizer = torch.optim.AdamW(model.parameters())
    more = {"optimizer": optimizer, "optimizer_state": True, "step_in_backward": True, "parameters": "all"}
    handle = enable(model, directory, "direct", **more)
    optimizer.register_step_post_hook(lambda *_: assert_away(handle))
    steps(model, None, handle, optimizer)


def assert_away(handle):
    """After every other step, that no byte is on its way, and that three tensors of two weights are in the file."""
    (states,) = handle._states._alive()
    assert states.share.updates > 0
    if states.share.updates % 2:
        for engine in (states.engine, handle._enabled.parameters.engine):
            engine.drain()
            assert engine.resident.now == 0
        assert states.engine.store.stats()["spill_used_bytes"] >= 3 * 2 * (12 << 10)


def end(directory, tier, where):
    """Return, and let the interpreter end, while copies are under way and graphs alive."""
    SLAB_BYTES["all"] = 64 << 20  # all of it must fit: what is refused is not in flight
    model = nn.Sequential(*(nn.Tanh() for _ in range(8)))
    handle = enable(model, directory, tier)
    x = torch.randn(500, 1000).requires_grad_()
    KEPT_ALIVE.extend([model, handle, x])
    for _ in range(2):
        model(x * 2).sum().backward()
    if where == "mid-backward":
        model[3].register_full_backward_hook(leave)
    losses = [model(x * 2).sum() for _ in range(3)]
    KEPT_ALIVE.extend(losses)
    if where == "prefetching":
        handle._engine.drain()
        torch.autograd.grad(losses[0], [x], retain_graph=True)
        for storage in handle._engine.live_storages()[:10]:
            storage.prefetch()
    elif where == "in a thread":
        # Not a daemon: the interpreter ends those inside torch's backward, whose own frames do not survive it.
        threading.Thread(target=losses[0].backward).start()
    elif where == "mid-backward":
        handle._engine.drain()
        losses[1].backward()
    return {"where": where}


def end_with_copies_queued(directory):
    """Return with copies queued on lanes that run for nobody but who waits for them."""
    _core.HostDriver = functools.partial(_core.HostDriver, schedule="stepped")
    end(directory, "slab", "after forward")
    return copies_under_way()


def copies_under_way():
    engine = KEPT_ALIVE[1]._engine
    return sum(not storage.ticket.out_done() for storage in engine.live_storages())


def leave(*_):
    raise SystemExit(0)


def in_fork(function):
    """What `function` raises in a forked child ("" for nothing), or how the child died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # a child that hangs dies, visibly
        text = ""
        try:
            function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if status == 0 else f"died with {status}"


def fork_and_touch(directory, tier, times):
    """Children touch the engine while its threads are busy; the parent's graphs and training stay bit-equal."""
    plain, model = new_net(), new_net()
    handle = enable(model, directory, tier)
    x = torch.randn(1000, 64)
    expected = gradients_of(plain, plain(x).square().mean())
    are_whole = True
    found = {}
    for _ in range(times):
        settled = model(x).square().mean()
        handle._engine.drain()
        fresh = model(x).square().mean()  # its copies are under way
        touches = {
            "forward": lambda: model(x),
            "backward": lambda graph=settled: graph.backward(),
            "report": lambda: handle.report(),
            "drain": lambda: handle._engine.drain() or handle._engine.store.quiesce() or handle.report(),
            "drop": lambda: drop_graphs(handle._engine),
        }
        KEPT_ALIVE.append(fresh)
        del settled, fresh
        for name, touch in touches.items():
            text = in_fork(touch)
            found.setdefault(name, set()).add(text)
            if text.startswith("died"):  # the others would take as long to
                return {name: sorted(texts) for name, texts in found.items()} | {"equal": False}
        touches.clear()
        are_whole &= all(map(torch.equal, gradients_of(model, KEPT_ALIVE.pop()), expected))
    steps(plain, 3)
    steps(model, 3, handle)
    return {name: sorted(texts) for name, texts in found.items()} | {"equal": are_whole and are_equal(model, plain)}


def drop_graphs(engine):
    """A child's last graph goes, and what the next hook does then is done."""
    KEPT_ALIVE.clear()
    gc.collect()
    engine.collect()


def gradients_of(model, loss):
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def fork_and_leave_alone(directory, tier):
    """Data loaders' workers, and a child that ends as any interpreter does, beside busy engines."""
    data = TensorDataset(torch.arange(4096, dtype=torch.float32).reshape(64, 64))
    results = []
    for offloaded in (False, True):
        model = new_net()
        handle = enable(model, directory, tier) if offloaded else None
        for _ in range(2):
            for (rows,) in DataLoader(data, batch_size=16, num_workers=2):
                model(rows.repeat(50, 1) / 4096).square().mean().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    equal = all(map(torch.equal, *results))
    loss = model(torch.randn(1000, 64)).square().mean()
    pid = os.fork()
    if pid == 0:
        atexit.register(id, (loss, handle))  # the engine lives until the interpreter ends
        return {"child": True}  # through atexit, finalizers and all
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    loss.backward()
    return {"equal": equal, "status": status}


def reach_limit(directory, tier, limit, room_bytes=0, slab_bytes=640 << 10):
    """Train, meet a real limit of the system, train on; once it is lifted, swap again. Plain gradients throughout."""
    plain, model = new_net(), new_net()
    steps(plain, 6)
    SLAB_BYTES["all"] = slab_bytes
    met = Limit(limit, directory, room_bytes)
    if limit == "RLIMIT_MEMLOCK":  # what is locked is taken at once
        give_up_locking()
        met.impose()
    handle = enable(model, directory, tier)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    met.impose()
    for number in range(6):
        if number == 3:
            met.lift()
        store = handle._engine.store.stats()
        loss = model(torch.randn(1000, 64)).square().mean()
        handle._engine.drain()
        handle._engine.store.quiesce()
        counts.append(handle._engine.store.stats()["spilled_bytes"] - store["spilled_bytes"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    handle._engine.drain()
    about, stats = handle.report(), handle._engine.store.stats()
    return {
        "equal": are_equal(model, plain),
        "spilled": counts,
        "failed": about.to_dict()["failed"],
        "swapped": about.swapped.tensors,
        "kept": {reason: count.tensors for reason, count in about.kept.items()},
        "notes": list(about.notes),
        "live": [handle._engine.live_records, stats["live_tickets"], stats["spill_used_bytes"]],
    }


def reach_limit_with_state(directory, limit, room_bytes):
    """The same while AdamW's state moves: four tensors of 16 KiB. Plain weights and states throughout."""
    plain, model = new_net(), new_net()
    plain_optimizer, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    options = {"n_tensors": 0, "min_tensor_bytes": 8 << 10, "spill_dir": directory}
    handle = offload.enable(model, optimizer=optimizer, optimizer_state=True, **options)
    engine = optimizer.state.engine
    met = Limit(limit, directory, room_bytes)
    in_memory, equal = [], []
    met.impose()
    for number in range(6):
        if number == 3:
            equal.append(are_equal(model, plain) and are_states_equal(optimizer, plain_optimizer))
            met.lift()
        steps(plain, 1, optimizer=plain_optimizer)
        steps(model, 1, optimizer=optimizer)
        engine.drain()
        in_memory.append(engine.resident.now)
    equal.append(are_equal(model, plain) and are_states_equal(optimizer, plain_optimizer))
    about = handle.report()
    handle.disable()
    stats = engine.store.stats()
    return {
        "equal": equal,
        "in_memory": in_memory,
        "failed": about.optimizer_state[0].failed,
        "notes": list(about.notes),
        "left": [engine.resident.now, stats["live_tickets"], stats["spill_used_bytes"]],
    }


def are_states_equal(optimizer, other):
    one, two = optimizer.state_dict()["state"], other.state_dict()["state"]
    return all(torch.equal(value, two[key][name]) for key, state in one.items() for name, value in state.items())


class Limit:
    """A limit of the process by its name in `resource`; for "disk", a disk that is full but for `room_bytes`."""

    def __init__(self, name, directory, room_bytes=0):
        self.name = name
        self.room_bytes = room_bytes
        self.ballast = Path(directory) / "ballast"
        self.kind = getattr(resource, name, None)
        self.before = resource.getrlimit(self.kind) if self.kind is not None else None

    def impose(self):
        if self.name == "disk":
            fill(self.ballast)
            os.truncate(self.ballast, self.ballast.stat().st_size - self.room_bytes)
        elif self.name == "RLIMIT_AS":
            enlarge_stacks()
            resource.setrlimit(self.kind, (virtual_bytes() + self.room_bytes, self.before[1]))
        else:
            resource.setrlimit(self.kind, (4096, self.before[1]))

    def lift(self):
        if self.name == "disk":
            self.ballast.unlink()
        else:
            resource.setrlimit(self.kind, self.before)


def enlarge_stacks():
    """Have every new thread ask for 256 MiB: more than a limit leaves that has room for whatever else there is."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(256)  # more than a pthread_attr_t
    for error in (
        libc.pthread_attr_init(attributes),
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(256 << 20)),
        libc.pthread_setattr_default_np(attributes),
    ):
        if error:
            raise OSError(error, os.strerror(error))


def give_up_locking():
    """Take CAP_IPC_LOCK from this thread, which lets a superuser lock whatever the limit says."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the third version of the call; this thread
    held = (ctypes.c_uint32 * 6)()
    if libc.capget(header, held) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    held[0] &= ~(1 << 14)
    if libc.capset(header, held) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def fill(path):
    """Take what the disk has left, to the last page."""
    with path.open("wb", buffering=0) as file:
        for nbytes in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"\0" * nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def virtual_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run_long(directory, tier, count):
    """Samples of what must not grow, taken ten times over `count` steps."""
    model = new_net()
    handle = enable(model, directory, tier)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = []
    for number in range(count):
        loss = model(torch.randn(1000 if number % 3 else 700, 64)).square().mean()
        if number % 4 == 0:
            handle._engine.drain()
        if number % 7:
            loss.backward()  # else: abandoned
            optimizer.step()
        optimizer.zero_grad()
        del loss
        if (number + 1) % (count // 10) == 0:
            samples.append(sample(handle))
    return samples


def sample(handle):
    handle._engine.drain()
    handle._engine.store.quiesce()
    handle._engine.collect()
    stats = handle._engine.store.stats()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "records": handle._engine.live_records,
        "tickets": stats["live_tickets"],
        "extents": stats["spill_used_bytes"],
        "file": stats["spill_file_bytes"],
        "pool held": stats["pool_held_bytes"],
        "pool requested": stats["pool_requested_bytes"],
        "targets held": handle._engine.targets_held,
    }
