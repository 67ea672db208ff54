"""A Ray Tune script with cardtune's searcher and scheduler: digits by a perceptron, on an emulated card of 8 MiB.

About a third of this space does not fit that card. On a GPU leave `cap_bytes` out: the card's own limit holds then.
"""

import sys

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

from tuning.ray import KnownSpeedSearcher, OomAwareScheduler, measured, report

CAP_BYTES, EPOCHS = 8 * 2**20, 12
SPACE = {
    "lr": tune.loguniform(1e-4, 3e-2),
    "batch_size": tune.choice([32, 64, 128, 256, 512]),
    "width": tune.choice([32, 64, 128, 256, 512]),
    "depth": tune.choice([1, 2, 3]),
}
TODAY = {"lr": 1e-3, "batch_size": 32, "width": 128, "depth": 2}


def train(config):
    """Trains on 1,437 images and reports the share of 360 others that is told right after each epoch."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images.float()[order] / 16, labels[order]
    torch.manual_seed(config.get("seed", 0))
    sizes = [64, *[config["width"]] * config["depth"]]
    layers = [layer for n in range(config["depth"]) for layer in (nn.Linear(sizes[n], sizes[n + 1]), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for _ in range(EPOCHS):
        for batch in torch.randperm(1437).split(config["batch_size"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean().item()
        report({"accuracy": right})


def main(trials=20, measure_s=30.0):
    """Searches, and prints what was found."""
    trainable = measured(train, cap_bytes=CAP_BYTES)
    searcher = KnownSpeedSearcher(SPACE, "accuracy", "max", reference=TODAY)
    searcher.measure(trainable, limit_s=measure_s)
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=OomAwareScheduler(searcher, max_t=EPOCHS, grace_period=4),
            num_samples=trials,
            max_concurrent_trials=1,
            reuse_actors=True,
        ),
    )
    results = tuner.fit()
    best = searcher.best
    print(f"{len(results)} trials, {results.num_errors} with an error. {searcher.stop_reason}")
    print(f"{dict(best.config)}: {best.samples_per_s:,.0f} samples/s at {best.value:.3f}")
    print(f"today: {best.reference_per_s:,.0f} samples/s at {best.reference_value:.3f}")
    return results, searcher


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
