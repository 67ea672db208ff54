"""Trains the clerk of flights as a person has it: python script.py '{"batch_size": 64, "seed": 1}'."""

import json
import sys
import time

import torch
from flights import TRAIN, Clerk, accuracy
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 4
GUESS = {"learning_rate": 2e-3, "batch_size": 64, "width": 128, "dropout": 0.1}
GUESS |= {"num_workers": 0, "amp_dtype": "fp32", "fused_optimizer": False}
SPACE = {"learning_rate": {"low": 3e-4, "high": 3e-2, "log": True}, "batch_size": [32, 64, 128, 256, 512]}
SPACE |= {"width": {"values": [64, 128, 256], "kind": "both"}, "dropout": {"low": 0.0, "high": 0.4}}
SPACE |= {"num_workers": [0, 1, 2], "amp_dtype": ["fp32", "bf16"], "fused_optimizer": [False, True]}


def made(s, steps):
    """Returns net, optimiser and schedule."""
    net = Clerk(s["width"], s["dropout"])
    optimizer = torch.optim.AdamW(net.parameters(), s["learning_rate"], fused=s["fused_optimizer"])
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def loss_of(net, batch):
    """Returns the mean cross-entropy of a batch."""
    kinds, numbers, late = batch
    return nn.functional.cross_entropy(net(kinds, numbers), late)


def train(report=None, seed=0, **settings):
    """Returns samples/s and accuracy of a training; what is not given is as first guessed."""
    s = {**GUESS, **settings}
    torch.manual_seed(seed)
    workers = {"num_workers": s["num_workers"], "persistent_workers": s["num_workers"] > 0}
    loader = DataLoader(TRAIN, s["batch_size"], shuffle=True, **workers)
    net, optimizer, schedule = made(s, EPOCHS * len(loader))
    seconds = 0.0
    for epoch in range(1, EPOCHS + 1):
        began = time.perf_counter()
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=s["amp_dtype"] == "bf16"):
                loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        seconds += time.perf_counter() - began
        speed, quality = epoch * len(TRAIN) / seconds, accuracy(net)
        if report:
            report(accuracy=quality, samples_per_s=speed, percent=100 * epoch / EPOCHS)
    return speed, quality


if __name__ == "__main__":
    print(*train(**json.loads(sys.argv[1] if sys.argv[1:] else "{}")))
