"""Checkpoints of train.py and retrofit.py: last.pt, which is written whole or not at all, and from which the same
command goes on exactly where it stopped; one run at a time in a folder.
"""
import fcntl
import math
import os
import pickle

import torch

from files import whole_file

NAME = "last.pt"


def read(path, keys, program):
    """-> what `save` wrote there, with at least these keys"""
    with open(path, "rb") as f:
        try:
            state = torch.load(f, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
            state = None
    if not isinstance(state, dict) or not keys <= state.keys():
        raise SystemExit(f"{path}: no checkpoint of {program}, or a part of one: give another, or delete it and "
                         "train anew")
    return state


def save(path, state, norms, advice):
    """norms: the sum of those of all gradients since the start, which shows whether one was not finite."""
    step = state["step"]
    if not math.isfinite(float(norms)):
        raise SystemExit(f"step {step}: the gradients are no longer numbers, so this is not saved; {kept(path)} {advice}")
    try:
        with whole_file(path) as f:
            torch.save(state, f)
    except (OSError, RuntimeError) as e:  # The latter is PyTorch's, when it cannot write.
        raise SystemExit(f"{path}: step {step} could not be saved: {e}; {kept(path)} Make room, and give the same "
                         "command again") from None


def kept(path):
    return f"{path} is still what it was." if os.path.exists(path) else f"there is no {path} yet."


def lock(folder, program):
    """Keeps a second run out of the folder, whose checkpoints would take the place of ours. -> its log.jsonl, which
    holds the lock as long as it is open"""
    log = open(os.path.join(folder, "log.jsonl"), "a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"--out {folder}: another {program} is at work there: wait for it, end it, or give another "
                         "--out") from None
    return log


def load_moments(optimizer, saved):
    """Moments alone: rates and weight decay are those that this run was given."""
    given = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, options in zip(optimizer.param_groups, given):
        group.update(options)
