"""Checkpoint of train.py -> model directory: config.json, model.safetensors, and the tokenizer, which
is the given tokenizer.model or, for a model of bytes, vocab.txt.

In bf16, matrices and tables are rounded to BF16 and vectors (biases, norms) stay F32. What can be
had from other tensors or is unused at inference is left out: the tied output weight, and the
batch counter of BatchNorm.
"""
import argparse
import json
import os
import shutil
import struct

import numpy as np
import torch

from all_attention import AllAttention
from model import Transformer

ALIGN = 64
FAMILIES = {"pkm_transformer": Transformer, "all_attention": AllAttention}


def to_bytes(tensor, bf16):
    """-> safetensors dtype and little-endian bytes"""
    tensor = tensor.detach().contiguous()
    if bf16 and tensor.dim() > 1:
        return "BF16", tensor.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
    return "F32", tensor.float().numpy().astype("<f4").tobytes()


def save_safetensors(path, tensors, bf16):
    header, blobs, pos = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in sorted(tensors.items()):
        dtype, blob = to_bytes(tensor, bf16)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape),
                        "data_offsets": [pos, pos + len(blob)]}
        blobs.append(blob)
        pos += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.writelines(blobs)
    return 8 + len(text) + pos


def load_safetensors(path):
    """-> dict of fp32 tensors"""
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        header, data = json.loads(f.read(size)), f.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        blob = data[slice(*entry["data_offsets"])]
        if entry["dtype"] == "BF16":
            # A bfloat16 is the upper half of a float.
            array = (np.frombuffer(blob, "<u2").astype("<u4") << 16).view("<f4")
        else:
            array = np.frombuffer(blob, "<f4").copy()
        tensors[name] = torch.from_numpy(array).view(entry["shape"])
    return tensors


def load_model(folder):
    """-> the model of a model directory, in fp32, ready for inference"""
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    model = FAMILIES[config["model_type"]](config)
    tensors = load_safetensors(os.path.join(folder, "model.safetensors"))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing
               if name != "pred_layer.proj.weight" and not name.endswith("num_batches_tracked")]
    if missing or unexpected:
        raise SystemExit(f"{folder}: missing {missing}, unexpected {unexpected}")
    return model.eval()


def save_tokenizer(folder, config, tokenizer):
    if config.get("tokenizer") != "byte":
        shutil.copyfile(tokenizer, os.path.join(folder, "tokenizer.model"))
        return
    with open(os.path.join(folder, "vocab.txt"), "w") as f:
        for byte in range(config["vocab_size"]):
            f.write("<eos>\n" if byte == ord("\n") else f"{byte}\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--checkpoint", required=True, help="last.pt of a run")
    ap.add_argument("--tokenizer", help="tokenizer.model of prepare.py, unless tokens are bytes")
    ap.add_argument("--out", required=True, help="model directory")
    ap.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    args = ap.parse_args()

    state = torch.load(args.checkpoint, map_location="cpu")
    tensors = {name: t for name, t in state["model"].items()
               if name != "pred_layer.proj.weight" and not name.endswith("num_batches_tracked")}
    if args.tokenizer is None and state["config"].get("tokenizer") != "byte":
        ap.error("--tokenizer is needed: the model's tokens are SentencePiece's")
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "config.json"), "w") as f:
        json.dump(state["config"], f, indent=2)
        f.write("\n")
    size = save_safetensors(os.path.join(args.out, "model.safetensors"), tensors, args.dtype == "bf16")
    save_tokenizer(args.out, state["config"], args.tokenizer)
    print(f"step {state['step']}: {len(tensors)} tensors, {size} bytes")


if __name__ == "__main__":
    main()
