"""How much of what a network saves for backward can be recomputed, by the operator that makes it.

    python bench/recipe_coverage.py [--json FILE] [--size tiny|quick] [--network NAME …]

For each network one step is recorded, and in a second one every recipe is tried and compared bit for bit, as
`offload.enable` does; in float32 and under autocast to bfloat16. Tensors below 1 KiB are left out. The networks of
transformers are small, with random weights; they are left out where transformers is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from models import FAMILIES, loss_of
from result_file import write_json
from torch import Tensor, nn

import offload
from offload.profiling.profiler import Recorder
from offload.profiling.recipe_trial import RecipeTrial

FORMAT = "offload-coverage/1"
TRANSFORMERS = ("GPT-2", "Llama", "BERT", "Mixtral", "ViT of transformers")
WORDS, LENGTH, BATCH = 512, 128, 4
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class RecordAndTry:
    """In place of a session's controller: the first step is recorded, and in the second every recipe is tried."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.recorder = Recorder()
        self.trial: RecipeTrial | None = None

    def observer(self, _signature: object, _model: nn.Module) -> Recorder | RecipeTrial | None:
        """Return what observes the step that begins now."""
        if not self.recorder.finished:
            return self.recorder
        if self.trial is None:
            self.trial = RecipeTrial(self._engine, self.recorder.order)
            return self.trial
        return None

    def needs_hooks(self, _signature: object) -> bool:
        """Return True: both steps run under hooks."""
        return True

    def end_finished_profiles(self) -> None:
        """Do nothing: nothing is planned."""

    def end_profiles(self) -> None:
        """Do nothing: nothing is planned."""


def coverage(model: nn.Module, step: Callable[[nn.Module], None]) -> dict[str, Any]:
    """Return the saved bytes, and those that have a recipe, by its last operator."""
    with tempfile.TemporaryDirectory() as folder:
        handle = offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes=1024, spill_dir=folder)
        controller = handle._on_device.controller = RecordAndTry(handle._engine)  # type: ignore[assignment]
        for _ in range(2):
            step(model)
        trial = controller.trial
        assert trial is not None
        assert trial.finished
        entries, recipes = controller.recorder.order.entries, trial.recipes()
        handle.disable()
    light: Counter[str] = Counter()
    heavy: Counter[str] = Counter()
    for index, recipe in recipes.items():
        (heavy if recipe.is_heavy else light)[recipe.operators[-1]] += entries[index].nbytes
    return {
        "saved_bytes": sum(entry.nbytes for entry in entries.values()),
        "light_bytes": dict(light.most_common()),
        "heavy_bytes": dict(heavy.most_common()),
    }


def family_step(name: str, size: dict[str, int], model: nn.Module) -> None:
    """Train a network of `models.py` for one step."""
    x, y = FAMILIES[name].draw(size, torch.Generator().manual_seed(0))
    loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]


def transformer(name: str) -> nn.Module:
    """Build a network of transformers."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "GPT-2":
        small = {"vocab_size": WORDS, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
        return hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=0, eos_token_id=0, **small))
    if name == "Llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=4, **_SIZES))
    if name == "BERT":
        return hf.BertForMaskedLM(hf.BertConfig(**_SIZES))
    if name == "Mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_key_value_heads=4, num_local_experts=4, **_SIZES))
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=64, patch_size=8, **_SIZES))


def transformer_step(model: Any) -> None:
    """Train a network of transformers for one step."""
    generator = torch.Generator().manual_seed(0)
    words: Tensor = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    given: dict[str, Tensor] = {"input_ids": words, "labels": words}
    if model.config.model_type == "vit":
        given = {"pixel_values": torch.randn(BATCH, 3, 64, 64, generator=generator), "labels": words[:, 0] % 2}
    model(**given).loss.backward()


def measure(name: str, size_name: str, *, autocast: bool) -> dict[str, Any]:
    """Return one row."""
    step: Callable[[nn.Module], None]
    if name in FAMILIES:
        size = getattr(FAMILIES[name], size_name)
        torch.manual_seed(0)
        model, step = FAMILIES[name].make(size), partial(family_step, name, size)
    else:
        model, step = transformer(name), transformer_step

    def cast(trained: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            step(trained)

    return {"network": name, "autocast": autocast, **coverage(model.train(), cast)}


def line(row: dict[str, Any]) -> str:
    """Return one row in words."""
    saved = row["saved_bytes"]
    light, heavy = sum(row["light_bytes"].values()) / saved, sum(row["heavy_bytes"].values()) / saved
    parts = ", ".join(f"{name} {nbytes / saved:.0%}" for name, nbytes in row["light_bytes"].items())
    dtype = "autocast" if row["autocast"] else "float32"
    return f"{row['network']}, {dtype}: {light:.0%} ({parts}), with heavy operators {light + heavy:.0%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    is_there = importlib.util.find_spec("transformers") is not None
    names = (*FAMILIES, *(TRANSFORMERS if is_there else ()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--size", choices=("tiny", "quick"), default="quick", help="of the networks of models.py")
    parser.add_argument("--network", choices=names, action="append", help="only this one (repeatable)")
    args = parser.parse_args(argv)
    rows = []
    for name in args.network or names:
        for autocast in (False, True):
            rows.append(measure(name, args.size, autocast=autocast))
            print(line(rows[-1]), flush=True)
    if args.json is not None:
        write_json(args.json, {"format": FORMAT, "machine": machine.describe(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
