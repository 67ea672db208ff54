"""Trains the reader of reviews as a person has it: python script.py '{"batch_size": 64, "seed": 1}'."""

import json
import sys
import time

import torch
from reviews import TRAIN, Reader, accuracy, collate
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 4
GUESS = {"learning_rate": 2e-3, "batch_size": 32, "width": 64}
GUESS |= {"num_workers": 0, "amp_dtype": "fp32", "fused_optimizer": False}
SPACE = {"learning_rate": {"low": 3e-4, "high": 3e-2, "log": True}, "batch_size": [16, 32, 64, 128, 256]}
SPACE |= {"width": {"values": [32, 64, 128], "kind": "both"}, "num_workers": [0, 1, 2]}
SPACE |= {"amp_dtype": ["fp32", "bf16"], "fused_optimizer": [False, True]}


def made(s, steps):
    """Returns net, optimiser and schedule: the rate goes up over a tenth of the steps, then down in a line."""
    net = Reader(s["width"])
    optimizer = torch.optim.AdamW(net.parameters(), s["learning_rate"], fused=s["fused_optimizer"])

    def share(step):
        return min(1.0, 10 * step / steps + 0.01, (1 - step / steps) / 0.9 + 0.01)

    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def loss_of(net, batch):
    """Returns the mean cross-entropy of a batch."""
    words, labels = batch
    return nn.functional.cross_entropy(net(words), labels)


def train(report=None, seed=0, **settings):
    """Returns samples/s and accuracy of a training; what is not given is as first guessed."""
    s = {**GUESS, **settings}
    torch.manual_seed(seed)
    workers = {"num_workers": s["num_workers"], "persistent_workers": s["num_workers"] > 0}
    loader = DataLoader(TRAIN, s["batch_size"], shuffle=True, collate_fn=collate, **workers)
    net, optimizer, schedule = made(s, EPOCHS * len(loader))
    seconds = 0.0
    for epoch in range(1, EPOCHS + 1):
        began = time.perf_counter()
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=s["amp_dtype"] == "bf16"):
                loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        seconds += time.perf_counter() - began
        speed, quality = epoch * len(TRAIN) / seconds, accuracy(net)
        if report:
            report(accuracy=quality, samples_per_s=speed, percent=100 * epoch / EPOCHS)
    return speed, quality


if __name__ == "__main__":
    print(*train(**json.loads(sys.argv[1] if sys.argv[1:] else "{}")))
