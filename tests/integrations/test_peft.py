"""PEFT's adapters in a loop of one's own: gradients bit-equal, frozen weights never moved, whatever is swapped in."""

from __future__ import annotations

import pytest
import torch
from frameworks import need
from torch import nn

need("peft")
need("transformers")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import offload  # noqa: E402
from offload.runtime.engine import Engine  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ON = {"n_tensors": -1, "min_tensor_bytes": 1}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
KINDS = {
    "lora": {},
    "lora with dropout": {"lora_dropout": 0.25},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def adapters(**options) -> LoraConfig:
    # Not zero at the beginning, so that every adapter has a gradient.
    return LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, init_lora_weights=False, **options)


def make_model(**options) -> nn.Module:
    base = make_base()
    torch.manual_seed(1)
    return get_peft_model(base, adapters(**options))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(64, (4, 20), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: int = 3, between=lambda model, step: None) -> list[dict[str, torch.Tensor]]:
    """The gradients of every step, by the parameter's name."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(steps):
        between(model, step)
        torch.manual_seed(step)
        model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def assert_same(found, expected) -> None:
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(theirs) != []
        for name, gradient in theirs.items():
            assert torch.equal(ours[name], gradient), name


@pytest.fixture
def moved(monkeypatch):
    """The storages that go out through the engine, by address; the test holds none of them."""
    seen = []
    swap_out = Engine.swap_out

    def watched(engine, tensor, *rest):
        seen.append(tensor.untyped_storage().data_ptr())
        return swap_out(engine, tensor, *rest)

    monkeypatch.setattr(Engine, "swap_out", watched)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_and_no_weight_moves(kind, moved):
    expected = train(make_model(**KINDS[kind]))
    model = make_model(**KINDS[kind])
    with offload.enable(model, **ON) as handle:
        assert_same(train(model), expected)
        report = handle.report()
    assert all("lora" in name for name in expected[0])
    assert len(moved) > 20
    assert not set(moved) & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert report.steps == 3
    assert report.kept["parameter"].tensors > 0


def test_the_base_enabled_before_its_adapters_are_added(moved):
    """`get_peft_model` replaces the layers of an enabled model; their weights are told from what is saved live."""
    expected = train(make_model())
    base = make_base()
    with offload.enable(base, **ON) as handle:
        torch.manual_seed(1)
        model = get_peft_model(base, adapters())
        assert_same(train(model), expected)
        assert handle.report().steps == 3
    assert not set(moved) & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def test_adapters_added_merged_and_switched_off_between_steps():
    def between(model, step):
        if step == 1:
            torch.manual_seed(2)
            model.add_adapter("second", adapters())
            model.set_adapter("second")
        elif step == 2:  # into the base's weights, in place, and out again
            model.merge_adapter()
            with torch.no_grad():
                model(input_ids=tokens(0))
            model.unmerge_adapter()
        elif step == 3:
            model.set_adapter("default")

    expected = train(make_model(), 5, between)
    model = make_model()
    with offload.enable(model, **ON) as handle:
        assert_same(train(model, 5, between), expected)
        report = handle.report()
        steps = report.steps
        with model.disable_adapter(), torch.no_grad():
            model(input_ids=tokens(0))
        assert handle.report().steps == steps == 5
    assert report.swapped.tensors > 0


def test_planned_steps(tmp_path):
    """The default: profiled, then planned."""
    expected = train(make_model(), 5)
    model = make_model()
    with offload.enable(model, max_slowdown=1.0, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        assert_same(train(model, 5), expected)
        assert handle.report().swapped.tensors > 0
        assert handle.plan.peak_bytes <= handle.plan.unswapped_peak_bytes
