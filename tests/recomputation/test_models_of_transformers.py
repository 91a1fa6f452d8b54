"""Models of transformers, and nanoGPT's block with dropout, of which everything is dropped that has a recipe."""

from contextlib import nullcontext

import pytest
import torch
from forced import gradients
from frameworks import need
from some_rows import one_in
from torch import nn
from torch.nn import functional


class Dropping(nn.Module):
    """A GPT with dropout wherever nanoGPT has it."""

    def __init__(self, width=64, heads=2, layers=2, words=64):
        super().__init__()
        self.heads = heads
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "projection": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x):
        hidden = functional.dropout(self.embedding(x), 0.1)
        rows, length, width = hidden.shape
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](hidden)).view(rows, length, 3, self.heads, width // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)).masked_fill(mask, float("-inf")).softmax(-1)
            attended = (functional.dropout(scores, 0.1) @ v).transpose(1, 2).reshape(rows, length, width)
            hidden = hidden + functional.dropout(block["projection"](attended), 0.1)
            inner = functional.gelu(block["up"](block["norm2"](hidden)))
            hidden = hidden + functional.dropout(block["down"](inner), 0.1)
        return self.head(hidden)


def gpt2(transformers):
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def sizes_of(**more):
    return {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    } | more


def llama(transformers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes_of(num_key_value_heads=2)))


def bert(transformers):
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes_of()))


def mixtral(transformers):
    sizes = sizes_of(num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def vit(transformers):
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **sizes_of()))


def loss_of(model, number):
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(64, (4, 32), generator=generator)
    if isinstance(model, Dropping):
        return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    if model.config.model_type == "vit":
        pixels = torch.randn(4, 3, 32, 32, generator=generator)
        return model(pixel_values=pixels, labels=words[:, 0] % 2).loss
    return model(input_ids=words, labels=words).loss


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("make", one_in(2, [None, gpt2, llama, bert, vit, mixtral]))
def test_transformers(forcing, make, autocast):
    transformers = need("transformers") if make is not None else None

    def step(model, number):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, number)
        loss.backward()
        return [loss.detach(), *gradients(model), *(each.clone() for each in model.buffers())]

    def made():
        torch.manual_seed(0)
        return (Dropping() if make is None else make(transformers)).train()

    forcing.compare(made, step)
