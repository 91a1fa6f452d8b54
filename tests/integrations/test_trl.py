"""TRL's SFTTrainer, as the others made of transformers' Trainer: bit-equal, and its own offloading refused."""

from __future__ import annotations

import pytest
import torch
from frameworks import need

need("trl")
need("transformers")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

import offload  # noqa: E402
from offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ON = {"n_tensors": -1, "min_tensor_bytes": 1}
WORDS = ["<pad>", "<eos>", "the", "cat", "sat", "on", "a", "mat", "dog"]


class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer):
    """What a user writes."""


def make_trainer(path, how: str, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    texts = ["the cat sat on a mat", "the dog sat", "a dog sat on the cat", "the mat"] * 3
    args = SFTConfig(
        output_dir=str(path),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **{"gradient_checkpointing": False, "bf16": False, **changes},
    )
    given = {
        "model": LlamaForCausalLM(config),
        "args": args,
        "train_dataset": Dataset.from_dict({"text": texts}),
        "processing_class": tokenizer,
    }
    if how == "mixin":
        return OffloadSFTTrainer(**given, offload=ON)
    return SFTTrainer(**given, callbacks=[OffloadTrainerCallback(**ON)] if how == "callback" else None)


def handle_of(trainer):
    if isinstance(trainer, OffloadSFTTrainer):
        return trainer.offload_handle
    [callback] = [each for each in trainer.callback_handler.callbacks if isinstance(each, OffloadTrainerCallback)]
    return callback.handle


@pytest.mark.parametrize("how", ["mixin", "callback"])
@pytest.mark.parametrize(
    "switch",
    [{}, {"gradient_accumulation_steps": 2, "bf16": True}, {"gradient_checkpointing": True}],
    ids=lambda switch: ", ".join(switch) or "plain",
)
def test_the_same_weights(how, switch, tmp_path):
    plain = make_trainer(tmp_path, "plain", **switch)
    plain.train()
    swapped = make_trainer(tmp_path, how, **switch)
    swapped.train()
    for a, b in zip(swapped.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    report = handle_of(swapped).report()
    assert report.steps == 6
    assert report.swapped.tensors > 0
    assert ("gradient checkpointing is on" in str(report)) == ("gradient_checkpointing" in switch)
    with offload.enable(swapped.model, n_tensors=-1):
        pass


@pytest.mark.parametrize("how", ["mixin", "callback"])
def test_its_own_activation_offloading_is_refused_with_the_reason(how, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, how)
    trainer.args.activation_offloading = True
    with pytest.raises(
        ValueError, match=r"SFTConfig\(activation_offloading=True\) swaps the same tensors, and autograd"
    ):
        trainer.train()
    with offload.enable(trainer.model, n_tensors=-1):
        pass
