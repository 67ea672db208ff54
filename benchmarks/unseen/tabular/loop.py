"""The training of script.py as cardtune drives it."""

import script
from flights import TRAIN, accuracy
from torch.utils.data import DataLoader


def train(run):
    """Trains for as long as `run` says."""
    loader = DataLoader(TRAIN, shuffle=True, **run.loader())
    net, optimizer, schedule = script.made(run, run.steps)
    run.prepare(net, optimizer, schedule)
    for batch in run.batches(loader):
        with run.autocast():
            loss = script.loss_of(net, batch)
        run.backward(loss, optimizer)
        if run.evaluate_now:
            run.report(accuracy=accuracy(net))


EPOCHS = script.EPOCHS
SPACE = {**script.SPACE, "persistent_workers": [True]}  # as the script has them, where it has workers
OBJECTIVES = {"accuracy": "max"}
BEFORE = script.GUESS
