"""Checkpoint of train.py -> model directory: config.json, model.safetensors, and the tokenizer, which
is the tokenizer.model of prepare.py with tokenizer.json and tokenizer_config.json beside it or, for a
model of bytes, vocab.txt.

What can be had from other tensors or is unused at inference is left out: a tied output weight, and the
batch counter of BatchNorm. The file is written by the converter's code, with its rules for each type:
see models/README.md.
"""
import argparse
import json
import os
import sys

import numpy as np
import torch

import checkpoint
import config as configuration
import logprobs
from all_attention import AllAttention
from files import check_at_most, check_positive, check_range, copy_whole, file_hash, read_object, run, whole_file
from memory_llama import MemoryLlama
from model import Transformer
from tokenizer_json import read_model as read_tokenizer
from tokenizer_json import write as write_tokenizer_json

# Of the converter: files has its folder among those of modules.
import identity
import safetensors_file
import safetensors_source
from fault import Refused, one_line

FAMILIES = {"pkm_transformer": Transformer, "memory_llama": MemoryLlama,
            "all_attention": AllAttention}
READ = {"F32": "<f4", "F16": "<f2", "I8": "i1"}
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


def open_safetensors(path):
    """-> the file's tensors, the header checked: a Shard of the converter"""
    try:
        return safetensors_source.Shard(path)
    except Refused as e:
        raise SystemExit(f"{path}: no safetensors file that can be read: {one_line(e)}") from None


def load_safetensors(path):
    """-> dict of fp32 tensors"""
    tensors = {}
    for name, entry in open_safetensors(path).entries.items():
        if entry.dtype == "BF16":
            # A bfloat16 is the upper half of a float.
            array = (np.frombuffer(entry.bytes(), "<u2").astype("<u4") << 16).view("<f4")
        elif entry.dtype in READ:
            array = np.frombuffer(entry.bytes(), READ[entry.dtype]).astype("<f4")
        else:
            raise SystemExit(f"{path}: tensor '{name}' is of type {entry.dtype}; read here are F32, BF16, F16 and I8")
        tensors[name] = torch.from_numpy(array).view(entry.shape)
    for name in [name for name in tensors if name.endswith(".scale")]:
        table, scale = name[:-len(".scale")], tensors.pop(name)
        if table not in tensors or scale.shape != tensors[table].shape[:1]:
            raise SystemExit(f"{path}: tensor '{name}' scales no rows: '{table}' "
                             f"{'has others' if table in tensors else 'is missing'}")
        tensors[table] *= scale[:, None]
    return tensors


def left_out(name, config):
    """Whether a tensor of the checkpoint is not written."""
    return name.endswith("num_batches_tracked") or \
        config["tie_output"] and name in ("pred_layer.proj.weight", "output.weight")


def load_model(folder):
    """-> the model of a model directory, in fp32, ready for inference"""
    path = os.path.join(folder, "config.json")
    config = read_object(path)
    try:
        configuration.check_known(config)
        model = FAMILIES[config["model_type"]](config)
    except configuration.ConfigError as e:
        raise SystemExit(f"{path}: {e}") from None
    except KeyError as e:
        raise SystemExit(f"{path}: {e} is missing") from None
    tensors, due = load_safetensors(os.path.join(folder, "model.safetensors")), model.state_dict()
    missing = sorted(name for name in due.keys() - tensors.keys() if not left_out(name, config))
    unexpected = sorted(tensors.keys() - due.keys())
    if missing or unexpected:
        raise SystemExit(f"{folder}: missing {missing}, unexpected {unexpected}")
    for name, tensor in tensors.items():
        if tensor.shape != due[name].shape:
            raise SystemExit(f"{folder}: tensor '{name}' is {list(tensor.shape)}, but config.json makes it "
                             f"{list(due[name].shape)}")
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def read_checkpoint(path):
    """-> what train.py saved"""
    return checkpoint.read(path, {"model", "config", "step"}, "train.py")


def load_checkpoint(path, tokenizer):
    """-> the model of a last.pt, in fp32, ready for inference; tokenizer: the file that is meant to be its"""
    state = read_checkpoint(path)
    check_tokenizer(state, path, tokenizer)
    model = FAMILIES[state["config"]["model_type"]](state["config"])
    model.load_state_dict(state["model"])
    return model.eval()


def check_tokenizer(state, path, tokenizer):
    """The tokenizer must be that of the tokens on which the checkpoint in `path` was trained."""
    n_piece, due = len(read_tokenizer(tokenizer)), state.get("task", {}).get("tokenizer")
    if n_piece != state["config"]["vocab_size"]:
        raise SystemExit(f"--tokenizer {tokenizer}: it has {n_piece} pieces, but the model's vocab_size is "
                         f"{state['config']['vocab_size']}: give the tokenizer.model of the data that it was trained on")
    if due is None:
        print(f"{path} does not say with which tokenizer it was trained: of {tokenizer} the number of pieces alone was "
              "compared", file=sys.stderr)
    elif file_hash(tokenizer) != due:
        raise SystemExit(f"--tokenizer {tokenizer}: {path} was trained with another one of as many pieces, so what it "
                         f"says would be read as other words: give the tokenizer.model of its data, which were in "
                         f"{state['args']['data']}; its SHA-256 is {due}")


def save_tokenizer(folder, config, tokenizer):
    if config.get("tokenizer") != "byte":
        copy_whole(tokenizer, os.path.join(folder, "tokenizer.model"))
        write_tokenizer_json(folder)
        return
    with whole_file(os.path.join(folder, "vocab.txt"), "w") as f:
        for byte in range(config["vocab_size"]):
            f.write("<eos>\n" if byte == ord("\n") else f"{byte}\n")


def write_json(folder, name, content):
    with whole_file(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2)
        f.write("\n")


def export(state, tokenizer, folder, dtype, value_dtype, sampling, program=None):
    """-> what the converter's writer says of the file"""
    config = state["config"]
    os.makedirs(folder, exist_ok=True)
    write_json(folder, "config.json", config)
    save_tokenizer(folder, config, tokenizer)
    if sampling:
        write_json(folder, "generation_config.json", sampling)
    elif os.path.exists(os.path.join(folder, "generation_config.json")):
        print(f"{folder}/generation_config.json is kept as it was: give --temperature and the like anew, or delete it",
              file=sys.stderr)
    tensors = [(name, t.float().numpy()) for name, t in sorted(state["model"].items())
               if not left_out(name, config)]
    own = {name: value_dtype for name, _ in tensors if name.endswith("values.weight")}
    with whole_file(os.path.join(folder, "model.safetensors")) as f:
        done = safetensors_file.write(f, tensors, dtype, own=own)
    why = identity.write(folder, identity.find_program(program),
                         lambda ids: logprobs.of_text(load_model(folder), ids))
    if why is not None:
        print(f"export: {folder}/{identity.NAME} has no probe: {why}", file=sys.stderr)
    return done


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--checkpoint", required=True, help="last.pt of a run")
    ap.add_argument("--tokenizer", help="tokenizer.model of prepare.py, unless tokens are bytes")
    ap.add_argument("--out", required=True, help="model directory")
    ap.add_argument("--dtype", choices=("bf16", "f16", "f32", "int8"), default="bf16",
                    help="of matrices and tables (bf16); vectors stay fp32")
    ap.add_argument("--values", choices=("bf16", "f16", "f32", "int8"),
                    help="of the values of memories (as --dtype)")
    ap.add_argument("--program", help="pkmserve, which measures the tolerances of model.sha256; none: without it"
                    " (convert/identity.py says where it is looked for)")
    ap.add_argument("--temperature", type=float, help="recommended to clients by generation_config.json")
    ap.add_argument("--top-p", type=float, help="likewise")
    ap.add_argument("--top-k", type=int, help="likewise")
    ap.add_argument("--repetition-penalty", type=float, help="likewise")
    args = ap.parse_args()
    check_range(ap, args, 0, "temperature")
    check_range(ap, args, -1, "top_k")
    check_positive(ap, args, "top_p", "repetition_penalty")
    check_at_most(ap, args, temperature=2, top_p=1, repetition_penalty=10)
    state = read_checkpoint(args.checkpoint)
    if state["config"].get("tokenizer") != "byte":
        if args.tokenizer is None:
            ap.error("--tokenizer is needed: the model's tokens are SentencePiece's")
        check_tokenizer(state, args.checkpoint, args.tokenizer)
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    try:
        done = export(state, args.tokenizer, args.out, args.dtype, args.values or args.dtype, sampling,
                      args.program)
    except Refused as e:
        raise SystemExit(str(e)) from None
    print(f"step {state['step']}: {done.parameters} parameters, {done.bytes} bytes"
          + (f"; largest relative error of int8 {done.loss[0]:.4f}, {done.loss[1]}" if done.loss else ""))


if __name__ == "__main__":
    run(main)
