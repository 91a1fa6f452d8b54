"""Wide layers and AdamW: most of the memory is optimizer state. What a user has before they have heard of offload."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(2048, 2048), nn.GELU())])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    rows = torch.randn(64, 2048)
    loss = (model(rows) - rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
