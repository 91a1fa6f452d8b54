"""Training with each framework, plain and with an optimizer that offload moves the state of or steps in backward."""

from __future__ import annotations

import re
from contextlib import contextmanager

import torch
from frameworks import need

import offload


def everything(model, optimizer):
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


def words(loop):
    """A class's name as words."""
    return re.sub(r"(?<=[a-z])([A-Z])", r" \1", loop.__name__).lower().replace("loop", "plain loop")


def transformers_run(how, folder, options, **switches):
    """What `train` leaves: the trainer and, with offload, the handle. `options`: of offload; None: plain training."""
    need("transformers")
    import test_transformers as rig

    given = {"args": rig.arguments(folder, **switches), "train_dataset": rig.Rows()}
    if options and how == "mixin":
        trainer = rig.OffloadUnshuffled(model=rig.make_model(), offload=options, **given)
    else:
        callbacks = [rig.OffloadTrainerCallback(**options)] if options else []
        trainer = rig.Unshuffled(model=rig.make_model(), callbacks=callbacks, **given)
    trainer.train()
    handle = options and (trainer.offload_handle if how == "mixin" else callbacks[0].handle)
    return trainer, handle


def trl_runs(how, folder, **changes):
    """A plain trainer and one with offload, both of which have trained."""
    need("trl")
    import test_trl as rig

    trainers = [rig.make_trainer(folder, each, **changes) for each in ("plain", how)]
    for trainer in trainers:
        torch.manual_seed(1)
        trainer.train()
    return *trainers, rig.handle_of(trainers[1])


def peft_run(kind, options, steps):
    """Model, optimizer and, with offload, the handle."""
    need("peft")
    import test_peft as rig

    model = rig.make_model(**rig.KINDS[kind])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    handle = offload.enable(model, optimizer=optimizer, **options) if options else None
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=rig.tokens(step), labels=rig.tokens(step)).loss.backward()
        optimizer.step()
    return model, optimizer, handle


@contextmanager
def accelerator(**switches):
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield Accelerator(cpu=True, **switches)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def accelerate_run(when, options, steps, accumulated=1, max_norm=None):
    """Model, optimizer and, with offload, the handle. `when`: "before prepare", "after prepare", or "" for plain."""
    with accelerator(gradient_accumulation_steps=accumulated) as its:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.9)
        handle = offload.enable(model, optimizer=inner, **options) if when == "before prepare" else None
        model, optimizer, scheduler = its.prepare(model, inner, scheduler)
        if when == "after prepare":
            handle = offload.enable(model, optimizer=optimizer.optimizer, **options)
        for step in range(accumulated * steps):
            with its.accumulate(model):
                its.backward(model(torch.full((8, 16), 0.1 * step)).square().mean())
                if max_norm is not None:
                    its.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return model, optimizer, handle


def lightning_run(how, *callbacks, steps, **switches):
    need("lightning.pytorch")
    import test_lightning as rig

    model = rig.make(rig.Manual if how == "manual" else rig.Net)
    trainer = rig.fit(model, *callbacks, max_epochs=-1, max_steps=steps, **switches)
    return everything(model, trainer.optimizers[0])
