"""Small random models of each kind, and what the transformers package computes with them in fp32.

    python3 tests/hf/truth.py              writes tests/golden/hf/<case> anew, which test_hf.py reads
    random_case(numpy generator)           a case that no one has seen: test_fresh.py

Needs torch and transformers (requirements.txt). A case is a Hugging Face directory as save_pretrained writes
it, or as older versions of the package did (old), and beside its files expected.json and
expected.safetensors: ids, the logits of each row, and the greedy continuation of the first ids.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden" / "hf"
KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
N_ID, N_PROMPT, N_NEW = 64, 8, 24
GAP = 0.02  # between the likeliest word and the next one: far above what rounding changes
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# Of positions of which some turn as they would, some slower, and one by something between.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}

# kind, changes of its configuration, and: dtype of the files, shard size, generation configuration, old
# form of the positions in config.json.
CASES = {
    "llama": ("llama", {}, {"generation": {"bos_token_id": 1, "eos_token_id": [2, 3]}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                               "num_key_value_heads": 4}, {}),
    "llama3-rope": ("llama", {"num_key_value_heads": 1, "head_dim": 16, "rope_parameters":
                              {**LLAMA3, "rope_theta": 500.0}}, {"old": "rope_type"}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0,
                                                   "rope_theta": 10000.0}},
                     {"old": "type", "dtype": "float16"}),
    "qwen2": ("qwen2", {"bos_token_id": 0, "eos_token_id": 1},
              {"dtype": "bfloat16", "shard": "6KB",
               "generation": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
                              "repetition_penalty": 1.05, "eos_token_id": [1, 0], "pad_token_id": 0}}),
    "qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {}),
    "qwen3-biases": ("qwen3", {"head_dim": 4, "attention_bias": True, "num_attention_heads": 6}, {}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 6}, {"shard": "4KB"}),
}


def random_case(rng):
    """A kind, changes and options as above, drawn anew."""
    def one(*choices):
        return choices[int(rng.integers(len(choices)))]

    kind = one(*KINDS)
    n_kv, n_group = one(1, 2, 3), one(1, 2, 4)
    d_head = one(4, 6, 8, 14)
    changes = {"vocab_size": one(33, 64, 100), "num_hidden_layers": one(1, 2, 3),
               "num_attention_heads": n_kv * n_group, "num_key_value_heads": n_kv,
               "intermediate_size": one(12, 40, 57), "tie_word_embeddings": one(True, False),
               "rms_norm_eps": one(1e-5, 1e-6), "hidden_size": n_kv * n_group * d_head}
    if kind != "qwen2":
        changes["head_dim"] = one(d_head, d_head + 2, 2 * d_head)
    if kind in ("llama", "qwen3"):
        changes["attention_bias"] = one(True, False)
    if kind == "llama":
        changes["mlp_bias"] = one(True, False)
    if kind == "mistral":
        changes["sliding_window"] = one(None, SIZES["max_position_embeddings"])
    changes["rope_parameters"] = {**one({"rope_type": "default"}, LLAMA3,
                                        {"rope_type": "linear", "factor": 2.5}),
                                  "rope_theta": one(500.0, 10000.0, 1e6)}
    return kind, changes, {"dtype": one("float32", "bfloat16", "float16"), "shard": one("50GB", "8KB"),
                           "old": one(None, "type", "rope_type")}


# ---- making -------------------------------------------------------------------------------------


def make_model(kind, changes, dtype, seed):
    """Every number of it is drawn: biases and norms too, which begin as zeros and ones."""
    config = getattr(transformers, KINDS[kind] + "Config")(**{**SIZES, **changes})
    model = getattr(transformers, KINDS[kind] + "ForCausalLM")(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            is_norm = name.endswith("norm.weight")
            tensor.normal_(1 if is_norm else 0, 0.2 if tensor.ndim == 1 else tensor.shape[1] ** -0.5)
            if "embed" in name or "lm_head" in name:
                tensor.mul_(2)
    return model.to(getattr(torch, dtype))


def write_old(path, kind):
    """config.json as versions below 5 wrote it: positions beside the sizes, their kind under a name."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    name = rope.pop("rope_type")
    config["rope_scaling"] = None if name == "default" else {kind: name, **rope}
    path.write_text(json.dumps(config, indent=2) + "\n")


def load(folder):
    """The directory as transformers reads it, in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def expect(model, ids):
    """logits [n, n_vocab], greedy ids, the smallest distance of one of these to the next best"""
    logits = model(torch.tensor([ids])).logits[0]
    greedy, gap = ids[:N_PROMPT], float("inf")
    for _ in range(N_NEW):
        best = model(torch.tensor([greedy])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        greedy = greedy + [int(best.indices[0])]
    return logits.numpy(), greedy[N_PROMPT:], gap


def make(folder, case, seed):
    """Writes a case; with another seed if its greedy text would hang on rounding."""
    kind, changes, options = case
    transformers.logging.set_verbosity_error()
    for attempt in range(seed, seed + 100):
        shutil.rmtree(folder, ignore_errors=True)
        model = make_model(kind, changes, options.get("dtype", "float32"), attempt)
        model.save_pretrained(folder, max_shard_size=options.get("shard", "50GB"))
        if options.get("old"):
            write_old(folder / "config.json", options["old"])
        (folder / "generation_config.json").unlink(missing_ok=True)
        if "generation" in options:
            (folder / "generation_config.json").write_text(json.dumps(options["generation"]) + "\n")
        n_vocab = model.config.vocab_size
        ids = np.random.default_rng(attempt).integers(0, n_vocab, N_ID).tolist()
        logits, greedy, gap = expect(load(folder), ids)
        if gap > GAP:
            break
    save_file({"logits": logits}, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(
        {"ids": ids, "n_prompt": N_PROMPT, "greedy": greedy,
         "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}) + "\n")


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, case) in enumerate(CASES.items()):
        make(FOLDER / name, case, 1000 * seed + 1)
        size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
        print("%-14s %6d bytes" % (name, size))


if __name__ == "__main__":
    sys.exit(main())
