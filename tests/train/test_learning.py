"""models/train/train.py: rates, and which optimizer takes which step."""

import json

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("sentencepiece")

import config as configuration  # noqa: E402
import train  # noqa: E402
from model import Transformer  # noqa: E402

CONFIG = {"model_type": "pkm_transformer", "vocab_size": 40, "d_model": 8, "n_layer": 2, "n_head": 2, "d_ff": 16,
          "max_position": 8, "activation": "gelu", "norm_eps": 1e-12, "tie_output": True, "bos_token_id": 1,
          "memories": [{"layer": 1, "place": "in", "kind": "product", "n_head": 2, "k_top": 2, "n_key": 4, "d_key": 8,
                        "n_slot": 16, "query_batch_norm": True, "query_bias": True}]}


def arguments(*more):
    return train.parse_args(["--data", "d", "--out", "o", "--device", "cpu", "--precision", "f32", *more])


SLOTS = {"layer": 1, "n_head": 2, "k_top": 2, "n_key": 40, "d_key": 8, "n_slot": 1600}
WIDE = {"vocab_size": 256, "d_model": 80, "n_layer": 2, "n_head": 2, "norm_eps": 1e-5, "tie_output": False, "bos_token_id": 1}


@pytest.mark.parametrize("more, due", [
    ({"model_type": "pkm_transformer", "max_position": 60, "activation": "gelu", "d_ff": 160,
      "memories": [CONFIG["memories"][0] | SLOTS]},
     {"embeddings.weight": 1 / 80, "pred_layer.proj.bias": 0, "attentions.0.q_lin.weight": 1 / 80,
      "attentions.1.v_lin.weight": 1 / 80, "attentions.0.k_lin.bias": 0, "attentions.1.out_lin.weight": 1 / 80 / 4,
      "ffns.0.lin1.weight": 1 / 80, "ffns.0.lin2.weight": 1 / 160 / 4, "ffns.0.lin2.bias": 0,
      "memories.1_in.values.weight": 1 / 80}),
    ({"model_type": "memory_llama", "max_position": 60, "d_ff": 160, "rope_theta": 1e4,
      "memories": [SLOTS | {"d_value": 50, "value_gate": True, "value_projection": True, "output_gate": True}]},
     {"embeddings.weight": 1 / 80, "output.weight": 1 / 80, "layers.0.attention.query.weight": 1 / 80,
      "layers.1.attention.out.weight": 1 / 80 / 4, "layers.0.ffn.up.weight": 1 / 80,
      "layers.0.ffn.down.weight": 1 / 160 / 4, "memories.1_in.values.weight": 1 / 50,
      "memories.1_in.value_gate.weight": 1 / 80, "memories.1_in.value_proj.weight": 1 / 50,
      "memories.1_in.output_gate.weight": 1 / 80, "memories.1_in.value_gate.bias": 0,
      "memories.1_in.value_proj.bias": 0, "memories.1_in.output_gate.bias": 0}),
    ({"model_type": "all_attention", "tokenizer": "byte", "d_ff": 0, "n_persistent": 40, "max_span": 64, "span_ramp": 8},
     {"output.weight": 1 / 80, "output.bias": 0, "layers.0.query.weight": 1 / 80, "layers.1.value.weight": 1 / 80,
      "layers.1.out.weight": 1 / 80 / 2, "layers.0.persistent.keys": 1, "positions": 1}),
], ids=["pkm_transformer", "memory_llama", "all_attention"])
def test_weights_begin_at_the_sizes_that_the_rates_are_for(more, due):
    """A model with others trains too, but worse or not at these rates. due: mean squares, of matrices 1 / columns, and
    less where they end a branch of the residual stream (README.md, "Start")."""
    torch.manual_seed(3)
    model, _ = train.FAMILIES[more["model_type"]]
    begun = dict(model(configuration.check(WIDE | more)).named_parameters())
    for name, square in due.items():
        n = begun[name].numel()
        assert float(begun[name].detach().square().mean()) == pytest.approx(square, rel=6 * n ** -0.5), name


def test_with_minutes_the_rate_rises_in_the_first_tenth_and_falls_in_the_last_fifth(monkeypatch):
    schedule = train.Schedule(arguments("--minutes", "10", "--warmup", "100"))
    for left, step, due in ((1.0, 0, 0.01), (0.95, 0, 0.5), (0.95, 99, 1), (0.9, 0, 1), (0.2, 500, 1), (0.1, 500, 0.5),
                            (0.0, 500, 0), (-1, 500, 0)):
        monkeypatch.setattr(schedule, "left", lambda left=left: left)
        assert schedule.rate(step) == pytest.approx(due), left
        assert schedule.over(step) == (left <= 0)


@pytest.mark.parametrize("more, start", [((), 80), (("--decay-start", "50"), 50), (("--decay-start", "0"), 0)])
def test_the_rate_falls_from_the_step_that_is_given_to_the_last(more, start):
    schedule = train.Schedule(arguments("--total-steps", "100", "--warmup", "4", *more))
    middle = (start + 100) // 2
    for step, due in ((start, 1 if start else 0.25), (middle, 0.5), (95, min(1, 5 / (100 - start))), (100, 0), (101, 0)):
        assert schedule.rate(step) == pytest.approx(due), step
        assert schedule.over(step) == (step >= 100)


def test_linear_maps_are_muons_from_its_step_on_and_each_kind_has_its_rate():
    torch.manual_seed(1)
    model = Transformer(configuration.check(CONFIG))
    optimizer = train.Optimizers(model, arguments("--muon-from", "3", "--lr", "0.01", "--value-lr", "0.05"))
    kind = {}
    for group in optimizer.adam.param_groups:
        for p in group["params"]:
            kind[p] = (group["weight_decay"], group["scale"])
    for name, p in model.named_parameters():
        linear = p.dim() == 2 and not name.endswith("embeddings.weight") and "values" not in name
        assert kind[p] == ((0.1, 1) if linear else (0, pytest.approx(5)) if "values" in name else (0, 1)), name
    for step in (2, 3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert optimizer.step(step, 0.5) == 0.005
        assert all(p.grad is None for p in model.parameters())
        assert len(optimizer.muon.state) == (0 if step < 3 else len(optimizer.muon.param_groups[0]["params"]))
    linear, table = model.attentions[0].q_lin.weight, model.memories["1_in"].values.weight
    assert optimizer.adam.state[linear]["step"] == 1 and optimizer.adam.state[table]["step"] == 2


def test_gradients_are_clipped(monkeypatch, tmp_path):
    """The first step of a run whose --clip is 0.001: AdamW's second moments are as small as that."""
    (tmp_path / "my.json").write_text(json.dumps(CONFIG))
    for name in ("train.bin", "valid.bin"):
        (np.arange(200) % 39 + 1).astype("<u2").tofile(tmp_path / name)
    args = ["--data", str(tmp_path), "--out", str(tmp_path / "run"), "--config", str(tmp_path / "my.json"), "--device",
            "cpu", "--threads", "1", "--n-tok", "8", "--batch", "4", "--total-steps", "1", "--muon-from", "9", "--clip",
            "0.001", "--log-every", "1"]
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    train.train(train.parse_args(args))
    state = torch.load(tmp_path / "run" / "last.pt")["optimizer"]["adam"]["state"]
    norm = sum(float(each["exp_avg_sq"].sum()) / 0.02 for each in state.values()) ** 0.5
    assert norm == pytest.approx(0.001, rel=0.01)
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[1])["grad_norm"] > 0.01
