"""Hashes of modules, by which a run or a model folder knows the modules it was made with."""

from __future__ import annotations

import hashlib

from torch import nn


def fingerprints(module: nn.Module) -> dict[str, str]:
    """Return the hash of all numbers of a module, and that of its frozen ones."""
    return {"all": fingerprint(module, trainable=True), "frozen": fingerprint(module, trainable=False)}


def fingerprint(module: nn.Module, *, trainable: bool) -> str:
    """Return a hash of the module's names, sizes and numbers; of what is trainable the numbers count if `trainable`."""
    found = hashlib.sha256()
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    frozen |= {name for name, _ in module.named_buffers()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {name in frozen}\n".encode())
        if trainable or name in frozen:
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]
