"""Trains while signals come at random moments of its steps; the signal's handler raises, as that of Ctrl-C does.

    python tests/signals_worker.py SIGINT|SIGTERM|SIGALRM COUNT SEED KNOBS-AS-JSON

A step that a signal interrupts is taken back and run again. Prints JSON: how many signals were sent, how many arrived
as an exception, and a digest of all losses and of the parameters at the end. SIGINT and SIGTERM are sent by a child,
SIGALRM is the alarm of `setitimer`. KNOBS null: without offload, and without signals.
"""

import copy
import hashlib
import json
import os
import random
import select
import signal
import sys
import time

import torch
from torch import nn

import offload

WIDTH = 128
ROWS = 2048  # × WIDTH × 4 bytes: 1 MiB, which is what is worth moving by default
STEPS_PER_HANDLE = 8  # a session begins with its slow step, and ends with steps that follow a plan
PATIENCE_S = 120


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)).square())


class Terminated(BaseException):
    """What the handlers of SIGTERM and SIGALRM raise."""


def raises(number, frame):
    raise Terminated


class Sender:
    """A child that sends a signal so many seconds after it was told to, and then says so."""

    def __init__(self, number):
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._orders)
            with os.fdopen(orders) as lines:
                for line in lines:
                    time.sleep(float(line))
                    os.kill(os.getppid(), number)
                    os.write(answers, b".")
            os._exit(0)
        os.close(orders)
        os.close(answers)

    def order(self, seconds):
        os.write(self._orders, f"{seconds}\n".encode())

    def wait(self):
        assert os.read(self._answers, 1) == b"."

    def state(self):
        return f"its sender: waitpid says {os.waitpid(self._child, os.WNOHANG)}"


class Alarm:
    """The process's own timer."""

    def order(self, seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def wait(self):
        pass

    def state(self):
        return f"its timer: {signal.getitimer(signal.ITIMER_REAL)}"


class Training:
    def __init__(self, knobs):
        torch.manual_seed(0)
        self.knobs = knobs
        self.model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch = torch.randn(ROWS, WIDTH)
        self.handle = None
        self.swapped = 0
        self.steps = 0

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())), torch.get_rng_state()

    def restore(self, state):
        (model, optimizer), numbers = state
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        torch.set_rng_state(numbers)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def renew(self):
        """Begin a new session every few steps, so that there are many of the first ones."""
        if self.knobs is not None and self.steps % STEPS_PER_HANDLE == 0:
            self.close()
            self.handle = offload.enable(self.model, **self.knobs)
        self.steps += 1

    def close(self):
        if self.handle is not None:
            self.swapped += self.handle.report().swapped.tensors
            self.handle.disable()
            assert self.handle._engine.live_records == 0
            assert self.handle._engine.store.stats()["live_tickets"] == 0


def interrupted(training, sender, told, seconds):
    """Run a step and have a signal sent `seconds` after its beginning. Returns whether it arrived as an exception."""
    try:
        sender.order(seconds)
        training.step()
        sender.wait()
        ready, _, _ = select.select([told], [], [], PATIENCE_S)
        assert ready, f"the signal was never delivered; {sender.state()}"
    except (KeyboardInterrupt, Terminated):
        return True
    return False


def main():
    name, count, seed, knobs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    training = Training(knobs)
    number = getattr(signal, name)
    sender = Alarm() if number == signal.SIGALRM else Sender(number)
    # The C part of every handler writes to this pipe: a signal is known to have been delivered, whatever became of it.
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    # Said for SIGINT too, which a shell has its background jobs ignore.
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else raises)
    chance = random.Random(seed)
    arrived, losses, longest = 0, [], 0.05
    for _ in range(count):
        training.renew()
        before = training.state()
        if knobs is not None:
            arrived += interrupted(training, sender, told, chance.uniform(1e-4, longest))
            assert os.read(told, 1)[0] == number
            training.restore(before)
        began = time.monotonic()
        losses.append(training.step())
        longest = min(0.5, 1.2 * (time.monotonic() - began))
    training.close()
    digest = hashlib.sha256(repr(losses).encode())
    for parameter in training.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps({"sent": count, "arrived": arrived, "swapped": training.swapped, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
