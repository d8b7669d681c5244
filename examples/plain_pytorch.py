"""A plain PyTorch loop on two sites: torchrun --nproc-per-node 2 examples/plain_pytorch.py."""

import torch
from torch import nn

import dadplug
from dadplug.data import load_dataset, site_indices

dadplug.connect()
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
reduction = dadplug.GradientReduction(model, mode="rankdad", rank=4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = load_dataset("digits")
mine = data.train.subset(site_indices(data.train.labels, reduction.site_rank, reduction.world_size))
loader = torch.utils.data.DataLoader(mine, batch_size=32, shuffle=True)
for _ in range(5):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        reduction.synchronize()
        optimizer.step()
accuracy = float((model(data.test.images).argmax(1) == data.test.labels).float().mean())
if reduction.site_rank == 0:
    print(f"accuracy {accuracy:.3f}; {reduction.traffic}")
