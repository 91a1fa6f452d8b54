"""A large table of embeddings and Adam, whose state is twice as large. What a user has who has not heard of offload."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(100_000, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(5):
    items, prices = torch.randint(100_000, (4096,)), torch.randn(4096, 1)
    loss = nn.functional.mse_loss(model(items), prices)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
