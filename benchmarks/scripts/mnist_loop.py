"""Digits by a small convolutional network: the script as a study can drive it.

After mnist/main.py of pytorch/examples (BSD-3-Clause), written anew: its network, settings and order, with the 1,797
digits of scikit-learn, made 28 x 28, in the place of MNIST. They are shuffled on a processor too, and nothing is
downloaded: python mnist_loop.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


def digits():
    """Returns 1,437 digits to train on and 360 to test on: images, (1, 28, 28), and which digit each is."""
    pixels, labels = load_digits(return_X_y=True)
    images = F.interpolate(torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8), size=(28, 28), mode="bilinear")
    images = (images - images[:1437].mean()) / images[:1437].std()
    labels = torch.tensor(labels, dtype=torch.int64)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


class Net(nn.Module):
    """Two convolutions and a pool, then two linear layers with dropout before each."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        """Returns log-probabilities of the digits, (batch, 10), of images, (batch, 1, 28, 28)."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(self.dropout1(x).flatten(1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train_epoch(run, args, model, device, train_loader, optimizer, epoch):
    """Trains one pass over the data."""
    model.train()
    for batch_idx, (data, target) in enumerate(run.batches(train_loader)):
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss = F.nll_loss(output, target)
        run.backward(loss, optimizer)
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch}, batch {batch_idx} of {len(train_loader)}: loss {loss.item():.4f}")


def test(model, device, test_loader):
    """Prints the mean loss, and how many digits are told right."""
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"test: mean loss {test_loss / count:.4f}, accuracy {correct} of {count} ({correct / count:.1%})")
    return correct / count


def train(run):
    """Trains for as long as `run` says, and reports the accuracy whenever it is due."""
    parser = argparse.ArgumentParser(description="Digits by a convolutional network")
    parser.add_argument("--test-batch-size", type=int, default=1000, help="digits of a batch of the test")
    parser.add_argument("--epochs", type=int, default=14, help="passes over the data")
    parser.add_argument("--gamma", type=float, default=0.7, help="what the rate is multiplied by after each pass")
    parser.add_argument("--log-interval", type=int, default=10, help="batches from one line to the next")
    parser.add_argument("--save-model", action="store_true", help="save the weights at the end")
    args = parser.parse_args()
    device = run.device
    use_cuda = device.type == "cuda"

    train_kwargs = {"shuffle": True, **run.loader()}
    test_kwargs = {"batch_size": args.test_batch_size}
    if use_cuda:
        cuda_kwargs = {"num_workers": 1, "pin_memory": True}
        test_kwargs.update(cuda_kwargs)
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, **train_kwargs)
    test_loader = DataLoader(test_set, **test_kwargs)

    model = Net().to(device)
    model.dropout2.p = run["dropout"]
    optimizer = optim.Adadelta(model.parameters(), lr=run["learning_rate"])
    scheduler = StepLR(optimizer, step_size=max(1, run.steps // args.epochs), gamma=args.gamma)
    run.prepare(model, optimizer, scheduler)
    for epoch in run.epochs():
        train_epoch(run, args, model, device, train_loader, optimizer, epoch)
        if run.evaluate_now:
            run.report(accuracy=test(model, device, test_loader))
    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


SPACE = {
    "learning_rate": {"low": 0.1, "high": 3.0, "log": True},
    "dropout": [0.25, 0.5],
    "batch_size": [32, 64, 128, 256],
    "micro_batch_size": [32, 64, 128, 256],
    "num_workers": [0, 1],
    "channels_last": [False, True],
}
OBJECTIVES = {"accuracy": "max"}
BASELINES = {"one digit": {"accuracy": digits()[1].tensors[1].bincount().max().item() / 360}}
BEFORE = {"learning_rate": 1.0, "dropout": 0.5, "batch_size": 64, "micro_batch_size": 64}  # as it is trained today

if __name__ == "__main__":
    from trainables.own_loop import alone

    train(alone(samples=14 * 1437, pass_samples=1437))
