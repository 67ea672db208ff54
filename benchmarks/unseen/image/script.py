"""Trains the eye for shapes as a person has it: python script.py '{"batch_size": 64, "seed": 1}'."""

import json
import sys
import time

import torch
from shapes import TRAIN, Eye, accuracy
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 4
GUESS = {"learning_rate": 0.1, "batch_size": 32, "width": 16}
GUESS |= {"num_workers": 0, "amp_dtype": "fp32", "fused_optimizer": False, "channels_last": False}
SPACE = {"learning_rate": {"low": 0.003, "high": 1.0, "log": True}, "batch_size": [16, 32, 64, 128, 256]}
SPACE |= {"width": {"values": [8, 16, 24], "kind": "both"}, "num_workers": [0, 1, 2]}
SPACE |= {"amp_dtype": ["fp32", "bf16"], "fused_optimizer": [False, True], "channels_last": [False, True]}


def made(s, steps):
    """Returns net, optimiser and schedule."""
    net, rate = Eye(s["width"]), s["learning_rate"]
    how = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True, "fused": s["fused_optimizer"]}
    optimizer = torch.optim.SGD(net.parameters(), rate, **how)
    return net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps + 1)


def loss_of(net, batch):
    """Returns the mean cross-entropy of a batch, with its labels smoothed."""
    images, labels = batch
    return nn.functional.cross_entropy(net(images), labels, label_smoothing=0.1)


def train(report=None, seed=0, **settings):
    """Returns samples/s and accuracy of a training; what is not given is as first guessed."""
    s = {**GUESS, **settings}
    torch.manual_seed(seed)
    workers = {"num_workers": s["num_workers"], "persistent_workers": s["num_workers"] > 0}
    loader = DataLoader(TRAIN, s["batch_size"], shuffle=True, **workers)
    net, optimizer, schedule = made(s, EPOCHS * len(loader))
    if s["channels_last"]:
        net = net.to(memory_format=torch.channels_last)
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
