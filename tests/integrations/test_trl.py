"""TRL's trainers, as others made of transformers' Trainer, and PEFT's adapters: bit-equal, and no offloading of two."""

from __future__ import annotations

import copy

import pytest
import torch
from frameworks import ONE_WAY, need

need("trl")
need("transformers")
need("peft")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import offload  # noqa: E402
from offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ON = {"n_tensors": -1, "min_tensor_bytes": 1}
WORDS = ["<pad>", "<eos>", "the", "cat", "sat", "on", "a", "mat", "dog"]
TEXTS = ["the cat sat on a mat", "the dog sat", "a dog sat on the cat", "the mat"] * 3
PAIRS = {"prompt": ["the cat", "a dog", "the"] * 4, "chosen": [" sat on a mat"] * 12, "rejected": [" dog dog cat"] * 12}
DATA = {
    SFTTrainer: {"text": TEXTS},
    DPOTrainer: PAIRS,
    RewardTrainer: {"chosen": TEXTS, "rejected": TEXTS[1:] + TEXTS[:1]},
    GRPOTrainer: {"prompt": PAIRS["prompt"]},
}
CONFIGS = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig, RewardTrainer: RewardConfig, GRPOTrainer: GRPOConfig}
OTHERS = [DPOTrainer, RewardTrainer, GRPOTrainer]
ADAPTERS = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.25)


def long_words(completions, **_):
    """What GRPO rewards here."""
    return [float(len(completion)) for completion in completions]


def make_trainer(path, how: str, kind=SFTTrainer, **changes):
    """A trainer as its users make it: plain, with the mixin among its bases, or with the callback."""
    torch.manual_seed(0)
    architecture = LlamaForSequenceClassification if kind is RewardTrainer else LlamaForCausalLM
    model = architecture(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            num_labels=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    peft_config = changes.pop("peft_config", None)
    own = {"num_generations": 2, "max_completion_length": 6} if kind is GRPOTrainer else {}
    args = CONFIGS[kind](
        output_dir=str(path),
        per_device_train_batch_size=2,
        max_steps=changes.pop("max_steps", 6),
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **{"gradient_checkpointing": False, "bf16": False, **own, **changes},
    )
    given = {
        "model": model,
        "args": args,
        "train_dataset": Dataset.from_dict(DATA[kind]),
        "processing_class": tokenizer,
        "peft_config": peft_config,
    }
    if kind is DPOTrainer and peft_config is None:
        given["ref_model"] = copy.deepcopy(model)
    if kind is GRPOTrainer:
        given["reward_funcs"] = long_words
    if how == "mixin":
        offloaded = type("OffloadTrainer", (OffloadTrainerMixin, kind), {})  # `class OffloadTrainer(…): pass`
        return offloaded(**given, offload=ON)
    return kind(**given, callbacks=[OffloadTrainerCallback(**ON)] if how == "callback" else None)


def handle_of(trainer):
    if isinstance(trainer, OffloadTrainerMixin):
        return trainer.offload_handle
    [callback] = [each for each in trainer.callback_handler.callbacks if isinstance(each, OffloadTrainerCallback)]
    return callback.handle


def train_both(path, how, kind=SFTTrainer, **changes):
    """A run without the engine and one with it are equal to the last bit: the report and the trainer of the second."""
    plain, swapped = (make_trainer(path, each, kind, **changes) for each in ("plain", how))
    before = [parameter.detach().clone() for parameter in plain.model.parameters()]
    for trainer in (plain, swapped):
        torch.manual_seed(1)  # what making the other one has drawn
        trainer.train()
    for (name, a), b in zip(swapped.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    changed = [not torch.equal(a, b) for a, b in zip(plain.model.parameters(), before, strict=True)]
    assert any(changed), "it has learned"
    assert not {"training_step", "get_batch_samples"} & set(vars(swapped))
    report = handle_of(swapped).report()
    assert report.swapped.tensors > 0
    with offload.enable(swapped.model, n_tensors=-1):
        pass
    return report, swapped


@pytest.mark.parametrize("how", ["mixin", "callback"])
@pytest.mark.parametrize(
    "switch",
    [{}, {"gradient_accumulation_steps": 2, "bf16": True, "max_steps": 3}, {"gradient_checkpointing": True}],
    ids=lambda switch: ", ".join(switch) or "plain",
)
def test_the_same_weights(how, switch, tmp_path):
    report, _ = train_both(tmp_path, how, **switch)
    assert report.steps == 6
    assert ("gradient checkpointing is on" in str(report)) == ("gradient_checkpointing" in switch)


@pytest.mark.parametrize("how", ONE_WAY)
@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_the_same_weights_of_other_trainers(how, kind, tmp_path):
    """A reference model, two rows to a pair, completions that the model itself writes between two steps."""
    report, _ = train_both(tmp_path, how, kind)
    assert report.steps == 6


@pytest.mark.parametrize("how", ONE_WAY)
@pytest.mark.parametrize("kind", [SFTTrainer, *OTHERS], ids=lambda kind: kind.__name__)
def test_adapters_learn_the_same_and_the_frozen_weights_stay_where_they_are(how, kind, tmp_path):
    report, trainer = train_both(tmp_path, how, kind, peft_config=ADAPTERS)
    frozen = [parameter for parameter in trainer.model.parameters() if not parameter.requires_grad]
    assert len(frozen) >= 20
    assert report.kept["parameter"].tensors > 0


@pytest.mark.parametrize("how", ONE_WAY)
@pytest.mark.parametrize("kind", [SFTTrainer, DPOTrainer, RewardTrainer], ids=lambda kind: kind.__name__)
def test_its_own_activation_offloading_is_refused_with_the_reason(how, kind, tmp_path):
    trainer = make_trainer(tmp_path, how, kind)
    trainer.args.activation_offloading = True
    name = CONFIGS[kind].__name__
    with pytest.raises(ValueError, match=rf"{name}\(activation_offloading=True\) swaps the same tensors, and autograd"):
        trainer.train()
    with offload.enable(trainer.model, n_tensors=-1):
        pass
