"""A GPT of characters: the plain script.

After train.py and model.py of karpathy/nanoGPT (MIT), written anew: its network, settings and order, in small, without
checkpoints, several cards, fp16 and dropout (0 there). Its text is Python's own help, which differs a little from one
Python to the next: python nanogpt_script.py
"""

import math
import time
from contextlib import nullcontext
from pydoc_data.topics import topics
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

eval_interval, eval_iters, log_interval = 250, 20, 50
gradient_accumulation_steps, batch_size, block_size = 2, 12, 64  # sequences of a micro-batch, characters of one
n_layer, n_head, n_embd, bias = 4, 4, 64, False
learning_rate, max_iters, weight_decay, beta1, beta2, grad_clip = 1e-3, 1000, 1e-1, 0.9, 0.99, 1.0
warmup_iters, lr_decay_iters, min_lr = 100, 1000, 1e-4
device_type = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device_type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


class Block(nn.Module):
    """Attention of several heads to what came before, and a layer on each position, each with a norm before it."""

    def __init__(self, config):
        super().__init__()
        width, bias, self.n_head = config.n_embd, config.bias, config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.c_attn, self.attn_c_proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.c_fc, self.mlp_c_proj = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        """Returns states, (batch, time, n_embd), of states."""
        qkv = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        heads = (part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn_c_proj(y)
        return x + self.mlp_c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Embeddings of characters and of positions, blocks, and a layer that tells the next character."""

    def __init__(self, config):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, config.n_embd), nn.Embedding(block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02)

    def forward(self, idx, targets):
        """Returns logits of the character after each, (batch, time, vocab_size), and their mean loss."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, device_type):
        """Returns AdamW, which lets matrices and embeddings decay, and nothing else."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=device_type == "cuda")


text = "\n".join(topics.values())
stoi = {character: number for number, character in enumerate(sorted(set(text)))}
vocab_size = len(stoi)
data = torch.tensor([stoi[character] for character in text])
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
torch.manual_seed(1337)
ctx = nullcontext() if dtype == torch.float32 else torch.autocast(device_type, dtype)


def get_batch(split):
    """Returns sequences from anywhere in a split, (batch, time), and what follows each character."""
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device_type), y.to(device_type)


model = GPT(SimpleNamespace(n_layer=n_layer, n_head=n_head, n_embd=n_embd, bias=bias)).to(device_type)
optimizer = model.configure_optimizers(device_type)


@torch.no_grad()
def estimate_loss():
    """Returns the mean loss of some batches of each split."""
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    """Returns the rate of an iteration: in a line up, then down by a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    done = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (learning_rate - min_lr)


X, Y = get_batch("train")
iter_num, t0 = 0, time.time()
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    for _ in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    if grad_clip != 0.0:
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, {time.time() - t0:.1f} s")
    iter_num += 1
    if iter_num > max_iters:
        break
