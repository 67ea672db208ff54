"""A language model of words, by an LSTM: the plain script.

After word_language_model/main.py, model.py and data.py of pytorch/examples (BSD-3-Clause), written anew: its LSTM,
settings and order, in small; weights are not saved, nor tested at the end. Its text is the first 90,000 words and signs
of Python's own help, which differs a little from one Python to the next: python word_lm_script.py
"""

import argparse
import math
import re
import time
from collections import Counter
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description="A language model of words")
parser.add_argument("--emsize", type=int, default=64, help="size of a word's embedding")
parser.add_argument("--nhid", type=int, default=64, help="hidden units of a layer")
parser.add_argument("--lr", type=float, default=20.0, help="learning rate at the start")
parser.add_argument("--clip", type=float, default=0.25, help="largest norm of the gradients")
parser.add_argument("--epochs", type=int, default=6, help="passes over the text")
parser.add_argument("--batch_size", type=int, default=20, help="texts side by side")
parser.add_argument("--bptt", type=int, default=35, help="words that a gradient goes back")
parser.add_argument("--dropout", type=float, default=0.2, help="dropout of embeddings and layers")
parser.add_argument("--seed", type=int, default=1111, help="random seed")
parser.add_argument("--log-interval", type=int, default=50, help="batches from one line to the next")
args = parser.parse_args()
torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Corpus:
    """A text as numbers of words, in two parts; what is not among the 5,000 most frequent words is one word."""

    def __init__(self):
        lines = [line for topic in topics.values() for line in topic.lower().splitlines() if re.search(r"\w", line)]
        words = [word for line in lines for word in [*re.findall(r"\w+|[^\w\s]", line), "<eos>"]][:90_000]
        frequent = [word for word, _ in Counter(words[:80_000]).most_common(5000)]
        self.dictionary = {word: number for number, word in enumerate([*frequent, "<unk>"])}
        numbers = torch.tensor([self.dictionary.get(word, len(frequent)) for word in words])
        self.train, self.valid = numbers[:80_000], numbers[80_000:90_000]


class RNNModel(nn.Module):
    """An embedding, two layers of an LSTM, and a layer that tells the next word, with dropout between them."""

    def __init__(self, ntoken, ninp, nhid, dropout):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(ntoken, ninp)
        self.rnn, self.decoder = nn.LSTM(ninp, nhid, 2, dropout=dropout), nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words, hidden):
        """Returns log-probabilities of the word after each, (time x batch, ntoken), of words, (time, batch)."""
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden

    def init_hidden(self, bsz):
        """Returns the state that a text begins with."""
        return tuple(self.decoder.weight.new_zeros(2, bsz, self.rnn.hidden_size) for _ in range(2))


def batchify(data, bsz):
    """Returns a text as bsz texts of one length side by side, (time, bsz); what is left over is dropped."""
    return data[: len(data) // bsz * bsz].view(bsz, -1).t().contiguous().to(device)


corpus = Corpus()
ntokens = len(corpus.dictionary)
eval_batch_size = 10
train_data = batchify(corpus.train, args.batch_size)
val_data = batchify(corpus.valid, eval_batch_size)
model = RNNModel(ntokens, args.emsize, args.nhid, args.dropout).to(device)
criterion = nn.NLLLoss()


def repackage_hidden(hidden):
    """Returns the state cut from what made it."""
    return tuple(state.detach() for state in hidden)


def get_batch(source, i):
    """Returns the words from row i on, (time, batch), and those that follow them, (time x batch,)."""
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


@torch.no_grad()
def evaluate(data_source):
    """Returns the mean loss of a word."""
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(eval_batch_size)
    for i in range(0, data_source.size(0) - 1, args.bptt):
        data, targets = get_batch(data_source, i)
        output, hidden = model(data, hidden)
        total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train():
    """Trains one pass over the text."""
    model.train()
    total_loss, start_time = 0.0, time.time()
    hidden = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            cur_loss, ms = total_loss / args.log_interval, (time.time() - start_time) * 1000 / args.log_interval
            print(f"epoch {epoch} | batch {batch} | lr {lr:.2f} | {ms:.1f} ms | ppl {math.exp(cur_loss):.2f}")
            total_loss, start_time = 0.0, time.time()


lr = args.lr
best_val_loss = None
try:
    for epoch in range(1, args.epochs + 1):
        epoch_start_time = time.time()
        train()
        val_loss = evaluate(val_data)
        print(f"epoch {epoch} | {time.time() - epoch_start_time:.1f} s | valid ppl {math.exp(val_loss):.2f}")
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0
except KeyboardInterrupt:
    print("exiting from training early")
