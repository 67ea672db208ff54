"""Checkpoints: a run resumes as if it had never stopped. Only safetensors are written, no pickle.

Two files: `state-<samples>.safetensors`, and `checkpoint.json`, which names the first and holds its sha256. The second
is replaced only once the first is on disk, so a crash at any moment leaves the older pair or the newer one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from trainables.files import SHARED, write_whole
from trainables.frozen_linear import merged
from trainables.loop import State
from trainables.resident import Resident, changing, plain, written
from trainables.state import Evaluation
from trainables.training import AnyState
from trainables.workload import Config, Workload

POINTER = "checkpoint.json"
_COUNTERS = ("samples", "steps", "epoch", "micro_batches_done")
_OF_DEVICE = ("fused", "foreach", "capturable")
"""Settings of a parameter group that depend on the device, and are not kept."""


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, or of another run, or cannot be made."""


def save(state: State, folder: Path, *, identity: str, made_of: Mapping[str, str] | None = None) -> Path:
    """Writes a checkpoint and returns its file. `identity` names the run; `load` raises for another one.

    `made_of` are further facts about the run; `load` returns them for its caller to compare.
    Raises CheckpointError if the optimiser keeps something that is neither tensor nor number.
    """
    tensors = {f"model.{name}": t for name, t in trained_tensors(state.model, state.marks).items()}
    tensors |= {f"best.{name}": t for name, t in state.best_weights.items()}
    tensors |= {f"average.{index}": mean for index, mean in enumerate(state.average.means)}
    kept = _optimizer_state(state)
    for name, value in kept.items():
        tensors[name] = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
    tensors["random.cpu"] = torch.get_rng_state()
    if state.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(state.device)
    payload = save_tensors(_copies(tensors))
    path = folder / f"state-{state.samples}.safetensors"
    write_whole(path, payload, mode=SHARED)
    pointer = {
        "file": path.name,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "identity": identity,
        "made_of": dict(made_of or {}),
        "scaler": state.scaler.state_dict(),
        "numbers": [name for name, value in kept.items() if not isinstance(value, Tensor)],
        "groups": [
            {n: v for n, v in group.items() if isinstance(v, int | float | str) and n not in _OF_DEVICE}
            for group in state.optimizer.param_groups
        ],
        "plain": {name: plain(module) for name, module in state.model.named_modules()},
        "evaluations": [asdict(one) for one in state.evaluations],
        **{name: getattr(state, name) for name in _COUNTERS},
    }
    write_whole(folder / POINTER, json.dumps(pointer, indent=1).encode(), mode=SHARED)
    for old in folder.glob("state-*.safetensors"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


def load(state: State, folder: Path, *, identity: str) -> dict[str, str]:
    """Restores a prepared run from a checkpoint; raises CheckpointError, and the state is then unchanged.

    Returns the `made_of` given to `save`; empty for a checkpoint of an earlier version.
    """
    pointer = _pointer(folder)
    if pointer.get("identity") != identity:
        raise CheckpointError(f"{folder / POINTER} belongs to another configuration; train into another folder")
    path = folder / str(pointer["file"])
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(payload).hexdigest() != pointer["sha256"]:
        raise CheckpointError(f"{path} is damaged: its sha256 is not the one in {POINTER}; delete both and train again")
    try:
        stored = load_tensors(payload)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    _restore(state, stored, pointer)
    return dict(pointer.get("made_of") or {})


def exists(folder: Path) -> bool:
    """Returns whether the folder holds a checkpoint to resume from."""
    return (folder / POINTER).is_file()


def clear(folder: Path) -> None:
    """Removes the checkpoint of a run that has ended; `checkpoint.json` first, so it never names a missing file.

    Drafts of a run that was killed while it wrote are removed, too: they are as large as the model.
    """
    (folder / POINTER).unlink(missing_ok=True)
    for state in (*folder.glob("state-*.safetensors"), *folder.glob(".*.safetensors.*.draft")):
        state.unlink(missing_ok=True)


def trained_tensors(model: nn.Module, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that training changed, by name: trainable parameters, buffers, and written frozen parameters.

    The latter, such as those of a teacher that follows the model, differ from the `first` marks (`resident.marks`).
    """
    return {**dict(changing(model)), **written(model, first)}


def weights(state: AnyState) -> dict[str, Tensor]:
    """Returns copies, on the host, of what training has changed so far, averaged weights if there are any."""
    with state.average.shown():
        return {} if state.model is None else _copies(trained_tensors(state.model, state.marks))


def exported(state: AnyState, *, merges: bool) -> bytes | None:
    """Returns the weights of the best evaluation, if kept, else the present ones, as a safetensors file; None of a
    custom loop that never showed its model. With `merges` it is all of the model, which has lost its adapters then.
    """
    if state.model is None:
        return None
    kept = state.best_weights or weights(state)
    if merges:
        write_into(state.model, kept, state.marks)
        whole = merged(state.model)
        kept = _copies({**dict(whole.named_parameters()), **dict(whole.named_buffers())})
    return save_tensors(kept)


def loaded(workload: Workload, config: Config, payload: bytes, *, is_merged: bool) -> nn.Module:
    """Returns a workload's model in eval mode with weights of `exported`; raises CheckpointError, SafetensorError."""
    model = Resident(workload).model(config)
    model = merged(model) if is_merged else model
    write_into(model, load_tensors(payload), {})
    return model.eval()


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Copies, since safetensors refuses tensors that share memory, as the map of 8-bit AdamW does with every parameter.
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def write_into(model: nn.Module, stored: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
    """Writes `stored` tensors, by name, over those of a model with the marks `first`, frozen ones and buffers included.

    Raises CheckpointError if one that training changes is missing or has another shape; the model is then unchanged.
    """
    buffers = dict(model.named_buffers())
    tensors = {name: p.detach() for name, p in model.named_parameters() if name in stored}  # frozen ones, too
    tensors |= trained_tensors(model, first)
    for name, tensor in tensors.items():
        other = stored.get(name)
        if other is None or (other.shape != tensor.shape and name not in buffers):
            has = "nothing" if other is None else f"shape {tuple(other.shape)}"
            raise CheckpointError(f"checkpoint has {has} for {name}, the model has shape {tuple(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape == (other := stored[name]).shape:
                tensor.copy_(other)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for prefix, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):  # a forward pass may make or resize one
            other = stored.get(f"{prefix}.{name}" if prefix else name)
            if other is not None and (buffer is None or buffer.shape != other.shape):
                setattr(module, name, other.to(device))


def _restore(state: State, stored: dict[str, Tensor], pointer: dict[str, Any]) -> None:
    if (kept := len(pointer["groups"])) != (own := len(state.optimizer.param_groups)):
        raise CheckpointError(f"checkpoint has {kept} groups of parameters, the optimizer {own}")
    write_into(state.model, _below("model.", stored), state.marks)
    state.best_weights = _below("best.", stored)
    state.evaluations = [Evaluation(**one) for one in pointer["evaluations"]]
    for number, mean in enumerate(state.average.means):
        mean.copy_(stored[f"average.{number}"])
    parameters = _parameters_of(state)
    # Adam keeps its step count on the CPU unless fused or capturable; the moments live with the parameter.
    steps_on_device = any(g.get("fused") or g.get("capturable") for g in state.optimizer.param_groups)
    for key, tensor in stored.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            parameter = parameters[int(index)]
            if key in pointer["numbers"]:  # bitsandbytes counts its steps in Python
                state.optimizer.state[parameter][name] = tensor.item()
                continue
            on_device = name != "step" or steps_on_device
            moved = tensor.to(parameter.device) if on_device else tensor
            if moved.shape == parameter.shape:  # a fused step needs the memory layout of the parameter
                moved = torch.empty_like(parameter, dtype=moved.dtype).copy_(moved)
            state.optimizer.state[parameter][name] = moved
    for group, settings in zip(state.optimizer.param_groups, pointer["groups"], strict=True):
        group.update(settings)  # some optimisers keep state there, as Prodigy its learning rate
    for name, module in state.model.named_modules():
        for attribute, value in pointer["plain"].get(name, {}).items():
            setattr(module, attribute, value)
    state.scaler.load_state_dict(pointer["scaler"])
    torch.set_rng_state(stored["random.cpu"])
    if "random.cuda" in stored and state.device.type == "cuda":
        torch.cuda.set_rng_state(stored["random.cuda"], state.device)
    for name in _COUNTERS:
        setattr(state, name, int(pointer[name]))


def _below(prefix: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _optimizer_state(state: State) -> dict[str, Tensor | float]:
    """Returns the optimiser's state of each parameter, by its name in the file."""
    values: dict[str, Tensor | float] = {}
    for index, parameter in enumerate(_parameters_of(state)):
        for name, value in state.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor | int | float):
                who = type(state.optimizer).__name__
                raise CheckpointError(f"{who} keeps a {type(value).__name__}, {name}, which no checkpoint holds")
            values[f"optimizer.{index}.{name}"] = value
    return values


def _parameters_of(state: State) -> list[Tensor]:
    return [p for group in state.optimizer.param_groups for p in group["params"]]


def _pointer(folder: Path) -> dict[str, Any]:
    try:
        pointer = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        needed = ("file", "sha256", "identity", "scaler", "numbers", "groups", "plain", "evaluations", *_COUNTERS)
        missing = [n for n in needed if n not in pointer]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / POINTER} cannot be read: {error}") from error
    if missing:
        raise CheckpointError(f"{folder / POINTER} lacks {', '.join(missing)}")
    if Path(str(pointer["file"])).name != pointer["file"]:
        raise CheckpointError(f"{folder / POINTER} names a file outside of its folder: {pointer['file']}")
    return dict(pointer)
