"""A Ray Tune script with cardtune's searcher and scheduler: digits by a small convolutional net.

A card of 2.5 MiB is emulated, which a third of this space does not fit. On a GPU leave `cap_bytes` out: then it is the
card's own memory.
"""

import sys

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

from tuning.ray import KnownSpeedSearcher, OomAwareScheduler, measured, report

CAP_BYTES, EPOCHS = 5 * 2**19, 6
SPACE = {
    "lr": tune.loguniform(3e-4, 3e-2),
    "batch_size": tune.choice([32, 64, 128, 256, 512]),
    "width": tune.choice([4, 8, 16, 32]),
    "depth": tune.choice([1, 2, 3]),
}
TODAY = {"lr": 1e-3, "batch_size": 32, "width": 16, "depth": 2}
IMAGES, LABELS = (torch.tensor(part) for part in load_digits(return_X_y=True))
ORDER = torch.randperm(len(IMAGES), generator=torch.Generator().manual_seed(0))
IMAGES, LABELS = IMAGES[ORDER].float().view(-1, 1, 8, 8) / 16, LABELS[ORDER]


def train(config):
    """Trains on 1,437 images and reports after each epoch which share of the 360 others is told right."""
    torch.manual_seed(config.get("seed", 0))
    widths = [1, *[config["width"]] * config["depth"]]
    layers = [part for n in range(config["depth"]) for part in (nn.Conv2d(*widths[n : n + 2], 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * config["width"], 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for _ in range(EPOCHS):
        for batch in torch.randperm(1437).split(config["batch_size"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(IMAGES[batch]), LABELS[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            parts = torch.arange(1437, 1797).split(config["batch_size"])
            right = sum((model(IMAGES[part]).argmax(dim=1) == LABELS[part]).sum().item() for part in parts)
        report({"accuracy": right / 360})


def main(trials=20, measure_s=30.0, storage_path=None):
    """Searches, and prints what was found."""
    trainable = measured(train, metric="accuracy", cap_bytes=CAP_BYTES)
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
        run_config=tune.RunConfig(storage_path=storage_path),
    )
    results = tuner.fit()
    best = searcher.best
    print(f"{len(results)} trials, {results.num_errors} with an error. {searcher.stop_reason}")
    print(f"{dict(best.config)}: {best.samples_per_s:,.0f} samples/s at {best.value:.3f}")
    print(f"reference: {best.reference_per_s:,.0f} samples/s at {best.reference_value:.3f}")
    return results, searcher


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
