"""lm-evaluation-harness's perplexities of one model, by the transformers package and by the server: make check-hf.

A random model with a tokenizer, as a directory for lm-eval's own `hf` and, converted, behind local-completions.
Texts are shorter than a window, since the two cut longer ones in different places.
"""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "golden"), str(ROOT / "tests" / "hf")]
import golden_harness as gh  # noqa: E402
import test_hf as served  # noqa: E402

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[api]'")
CONTEXT = 256
END = "<|endoftext|>"
TASK = """
task: pages
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
PAGES = ["The old mill stands by the river, and its bell is heard in the valley.\n\nIt was built in 1852.",
         "One short page.", "Na\u00efve \u53e4\u3044 museum: 1,348 stones and 27 maps."]


def make_base(folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END,
                                         eos_token=END).save_pretrained(folder)
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=256, eos_token_id=256,
        initializer_range=0.2)).save_pretrained(folder)
    return folder


def evaluate(folder, kind, arguments):
    env = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--include_path",
         str(folder), "--tasks", "pages", "--device", "cpu", "--output_path", str(folder / kind)],
        capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    path, = glob.glob(str(folder / kind / "**" / "results_*.json"), recursive=True)
    results = json.loads(Path(path).read_text())["results"]["pages"]
    return {name: results[name + ",none"] for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")}


def test_perplexities_are_the_same_through_both(tmp_path):
    base = make_base(tmp_path / "base")
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    (tmp_path / "pages.yaml").write_text(TASK % (tmp_path / "pages.jsonl"))
    due = evaluate(tmp_path, "hf", "pretrained=%s,dtype=float32,max_length=%d" % (base, CONTEXT))
    server = gh.Server(served.converted(base, tmp_path / "model"), "--dtype", "f32", "--served-model-name", "model")
    got = evaluate(tmp_path, "local-completions", "model=model,base_url=http://127.0.0.1:%d/v1/completions,max_length=%d"
                   % (server.port, CONTEXT))
    server.stop()
    for name, value in due.items():
        assert abs(got[name] / value - 1) < 1e-4, (name, got, due)
