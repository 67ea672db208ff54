"""A plain script: a GRU tells whether a sequence of 10 to 60 tokens has more of one token than of another."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

SETTINGS = {"learning_rate": 0.003, "hidden": 64, "batch_size": 32}
PASSES = 3


def sentences(count, seed):
    """Returns samples: a sequence of tokens, and whether token 1 stands in it more often than token 2."""
    random = torch.Generator().manual_seed(seed)
    samples = []
    for length in torch.randint(10, 61, (count,), generator=random):
        tokens = torch.randint(1, 8, (int(length),), generator=random)
        samples.append((tokens, int((tokens == 1).sum() > (tokens == 2).sum())))
    return samples


TRAIN, VAL = sentences(1536, 1), sentences(512, 2)


def collate(samples):
    """Returns a batch: tokens padded with 0, lengths and labels."""
    lengths = torch.tensor([len(tokens) for tokens, _ in samples])
    tokens = pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return tokens, lengths, torch.tensor([label for _, label in samples])


class Net(nn.Module):
    """An embedding, two layers of a GRU, and a layer on its last state."""

    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(8, 32, padding_idx=0)
        self.gru, self.head = nn.GRU(32, hidden, num_layers=2, batch_first=True), nn.Linear(hidden, 2)

    def forward(self, tokens, lengths):
        """Returns logits, shape (batch, 2)."""
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


def evaluate(net):
    """Returns the share of sequences that are told right."""
    net.eval()
    device, right = next(net.parameters()).device, 0
    with torch.no_grad():
        for tokens, lengths, labels in DataLoader(VAL, 128, collate_fn=collate):
            right += (net(tokens.to(device), lengths).argmax(dim=1).cpu() == labels).sum().item()
    net.train()
    return right / len(VAL)


def train(config):
    """Trains the net and tells its accuracy after each pass."""
    loader = DataLoader(TRAIN, config["batch_size"], shuffle=True, collate_fn=collate)
    net = Net(config["hidden"])
    optimizer = torch.optim.AdamW(net.parameters(), config["learning_rate"])
    for _ in range(PASSES):
        for tokens, lengths, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(tokens, lengths), labels).backward()
            optimizer.step()
        print(f"accuracy={evaluate(net):.3f}")


if __name__ == "__main__":
    train(SETTINGS)
