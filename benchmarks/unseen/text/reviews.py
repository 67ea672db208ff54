"""Made reviews of a few clauses, good or not by a small grammar, and a recurrent net that tells which."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

THINGS = [
    "room",
    "staff",
    "food",
    "view",
    "lift",
    "bed",
    "price",
    "pool",
    "bar",
    "lobby",
    "garden",
    "shower",
    "music",
    "wine",
    "coffee",
    "street",
]
WORTH = {
    3: ["superb", "splendid", "perfect", "lovely", "brilliant", "wonderful"],
    1: ["good", "clean", "pleasant", "decent", "friendly", "quiet", "fresh"],
    -1: ["bad", "noisy", "dull", "stale", "slow", "cold", "tired"],
    -3: ["awful", "filthy", "dreadful", "broken", "horrible", "rotten"],
}
LINKS = {"and": (1, 1), "but": (1, 2), "though": (2, 1), "while": (1, 1)}
STRESS, FILLING = (
    {"very": 2, "rather": 1, "": 1},
    ["we", "our", "stay", "again", "week", "night", "later", "there", "really", "then", "once"],
)
TRAIN_SIZE, VAL_SIZE, SLIP = 6000, 4000, 0.04


def clause(random):
    """Returns the words of a clause and what it is worth: "not" turns the adjective and halves it, "very" doubles."""
    worth = int(random.choice(list(WORTH)))
    stress, negated = str(random.choice(list(STRESS))), random.random() < 0.3
    words = ["the", random.choice(THINGS), "was", "not" if negated else "", stress, random.choice(WORTH[worth])]
    words += list(random.choice(FILLING, random.integers(0, 3)))
    return [str(word) for word in words if word], STRESS[stress] * worth * (-0.5 if negated else 1)


def reviews(count, seed):
    """Returns (word numbers, class) pairs; a share of SLIP has a class drawn at random."""
    random, samples = np.random.default_rng(seed), []
    for _ in range(count):
        words, total = clause(random)
        for _ in range(random.integers(1, 3)):
            link = str(random.choice(list(LINKS)))
            more, worth = clause(random)
            before, after = LINKS[link]
            words, total = [*words, link, *more], before * total + after * worth
        label = int(total > 0) if random.random() > SLIP else int(random.integers(2))
        samples.append((torch.tensor([NUMBERS[word] for word in words]), label))
    return samples


def collate(samples):
    """Returns a batch: word numbers padded by 0 to the longest review, and classes."""
    return pad_sequence([words for words, _ in samples], batch_first=True), torch.tensor(
        [label for _, label in samples]
    )


class Reader(nn.Module):
    """Word vectors, a GRU, the largest of its states over the words, a layer on that."""

    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(len(NUMBERS) + 1, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, words):
        """Returns logits, (batch, 2), of word numbers, (batch, longest)."""
        states, _ = self.gru(self.words(words))
        return self.head(states.masked_fill((words == 0)[..., None], -1.0).amax(dim=1))


ALL = ["the", "was", "not", "very", "rather", *THINGS, *FILLING, *LINKS, *(w for some in WORTH.values() for w in some)]
NUMBERS = {word: number for number, word in enumerate(ALL, start=1)}
TRAIN, VAL = reviews(TRAIN_SIZE, 1), reviews(VAL_SIZE, 2)


def accuracy(net):
    """Returns the share of reviews not trained on that are told right."""
    net.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, VAL_SIZE, 500):
            words, labels = collate(VAL[start : start + 500])
            right += (net(words).argmax(dim=1) == labels).sum().item()
    net.train()
    return right / VAL_SIZE
