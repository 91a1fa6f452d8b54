"""A transformer over bytes, with a DataLoader and AdamW. What a user has before they have heard of offload."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--layers", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)


class Bytes(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 128, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(text) + self.places))


text = torch.randint(256, (args.batch * args.steps, 129))
loader = DataLoader(TensorDataset(text), batch_size=args.batch)
model = Bytes()
optimizer = torch.optim.AdamW(model.parameters())
for step, (rows,) in enumerate(loader):
    logits = model(rows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
