"""Inference with the models of model.py and, without memories, memory_llama.py, step by step, with a cache of keys and values.

tests/bench/torch_worker.py measures it beside the server, so it is written as one would who wants
speed from plain PyTorch: no autograd, the cache at its full size from the start, q, k and v by one
product, PyTorch's own attention, topk and embedding_bag, the BatchNorm of a memory's query folded
into its linear map. In bf16 the weights, the cache and what flows between layers are bf16. Queries
and keys of memories stay in fp32, as in training: rounded scores would choose other slots.
"""
import torch
import torch.nn.functional as F


def fold_query(query_proj):
    """-> weight and bias of the linear map and the BatchNorm behind it, as one map"""
    linear, *norms = query_proj.query_mlps
    weight, bias = linear.weight.double(), linear.weight.new_zeros(linear.out_features).double()
    if linear.bias is not None:
        bias = linear.bias.double()
    for norm in norms:
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        weight = scale[:, None] * weight
        bias = scale * (bias - norm.running_mean.double()) + norm.bias.double()
    return weight.float().contiguous(), bias.float()


class Layer:
    """The weights of one layer, ready for use. memory is None where there is an FFN."""

    def __init__(self, model, i, dtype):
        def cast(*params):
            return [p.detach().to(dtype).contiguous() for p in params]

        attention = model.attentions[i]
        lins = (attention.q_lin, attention.k_lin, attention.v_lin)
        self.qkv = cast(torch.cat([lin.weight for lin in lins]), torch.cat([lin.bias for lin in lins]))
        self.out = cast(attention.out_lin.weight, attention.out_lin.bias)
        self.norm1 = cast(model.layer_norm1[i].weight, model.layer_norm1[i].bias)
        self.norm2 = cast(model.layer_norm2[i].weight, model.layer_norm2[i].bias)
        self.memory = model.memories[f"{i}_in"] if f"{i}_in" in model.memories else None
        if f"{i}_after" in model.memories:
            raise SystemExit(f"decode.py: memories behind a layer are not measured here: memory {i}_after")
        if self.memory is not None:
            self.query = fold_query(self.memory.query_proj)
            self.values, = cast(self.memory.table())
        else:
            ffn = model.ffns[str(i)]
            self.act = ffn.act
            self.lin1 = cast(ffn.lin1.weight, ffn.lin1.bias)
            self.lin2 = cast(ffn.lin2.weight, ffn.lin2.bias)


class Decoder:
    """n_seq texts of up to n_pos positions, all as long as each other."""

    @torch.inference_mode()
    def __init__(self, model, dtype, n_seq, n_pos):
        c = model.config
        self.n_head, self.eps, self.dtype = c["n_head"], c["norm_eps"], dtype
        self.layers = [Layer(model, i, dtype) for i in range(c["n_layer"])]
        self.tokens = model.embeddings.weight.detach().to(dtype)
        self.positions = model.position_embeddings.weight.detach().to(dtype)
        self.norm = [p.detach().to(dtype) for p in model.layer_norm_emb.parameters()]
        self.out = [p.detach().to(dtype) for p in (model.output_layer().weight, model.output_layer().bias)]
        shape = (c["n_layer"], n_seq, c["n_head"], n_pos, c["d_model"] // c["n_head"])
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def normalise(self, x, weights):
        return F.layer_norm(x, x.shape[-1:], *weights, self.eps)

    def attend(self, i, layer, x, seq, pos):
        """x [n_seq, n_tok, d_model] of sequences seq.. at positions pos.. -> the same shape"""
        n_seq, n_tok, d_model = x.shape
        qkv = F.linear(x, *layer.qkv).view(n_seq, n_tok, 3, self.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                        # [n_seq, n_head, n_tok, d_head]
        cached = []
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[i, seq:seq + n_seq, :, pos:pos + n_tok] = new
            cached.append(cache[i, seq:seq + n_seq, :, :pos + n_tok])
        y = F.scaled_dot_product_attention(q, *cached, is_causal=n_tok > 1)
        return F.linear(y.transpose(1, 2).reshape(n_seq, n_tok, d_model), *layer.out)

    def remember(self, layer, x):
        flat = x.flatten(0, 1)
        slot, weight = layer.memory.search(F.linear(flat.float(), *layer.query))
        y = F.embedding_bag(slot.flatten(1), layer.values, mode="sum",
                            per_sample_weights=weight.flatten(1).to(self.dtype))
        return y.view(x.shape)

    @torch.inference_mode()
    def hidden(self, ids, seq=0, pos=0):
        """ids [n_seq, n_tok] of sequences seq.. from position pos on, the first or a single one
        -> hidden states [n_seq, n_tok, d_model]"""
        n_tok = ids.shape[1]
        assert n_tok == 1 or pos == 0
        x = self.normalise(F.embedding(ids, self.tokens) + self.positions[pos:pos + n_tok], self.norm)
        for i, layer in enumerate(self.layers):
            x = self.normalise(x + self.attend(i, layer, x, seq, pos), layer.norm1)
            if layer.memory is not None:
                y = self.remember(layer, x)
            else:
                y = F.linear(layer.act(F.linear(x, *layer.lin1)), *layer.lin2)
            x = self.normalise(x + y, layer.norm2)
        return x

    @torch.inference_mode()
    def logits(self, hidden):
        return F.linear(hidden, *self.out)

    @torch.inference_mode()
    def logprobs(self, hidden, targets):
        """hidden [n, d_model], targets [n] -> [n] in fp32"""
        logits = self.logits(hidden).float()
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


class LlamaDecoder:
    """The same of a model of memory_llama.py without memories: grouped queries, rotary positions, gated networks."""

    @torch.inference_mode()
    def __init__(self, model, dtype, n_seq, n_pos):
        c = model.config
        if c.get("memories"):
            raise SystemExit("decode.py: memory_llama with memories is not measured here")
        self.eps, self.n_head, self.n_kv = c["norm_eps"], c["n_head"], c.get("n_kv_head", c["n_head"])
        self.d_head = c.get("d_head", c["d_model"] // self.n_head)

        def cast(*params):
            return torch.cat([p.detach() for p in params]).to(dtype).contiguous()

        self.layers = []
        for layer in model.layers:
            a, f = layer.attention, layer.ffn
            self.layers.append((cast(layer.attention_norm.weight), cast(a.query.weight, a.key.weight, a.value.weight),
                                cast(a.out.weight), cast(layer.ffn_norm.weight), cast(f.gate.weight, f.up.weight),
                                cast(f.down.weight)))
        self.tokens, self.norm, self.out = (cast(module.weight) for module in (model.embeddings, model.norm,
                                                                             model.output))
        if c["tie_output"]:
            self.out = self.tokens
        self.turns = torch.complex(*model.turns[:, :n_pos])         # [n_pos, d_head / 2]
        shape = (len(self.layers), n_seq, self.n_kv, n_pos, self.d_head)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def normalise(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def turn(self, x, pos):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns[pos:pos + x.shape[2]]).flatten(-2).to(x.dtype)

    def attend(self, i, qkv, out, x, seq, pos):
        n_seq, n_tok, _ = x.shape
        heads = F.linear(x, qkv).view(n_seq, n_tok, -1, self.d_head).transpose(1, 2)
        q, k, v = heads.split((self.n_head, self.n_kv, self.n_kv), 1)
        q, k, cached = self.turn(q, pos), self.turn(k, pos), []
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[i, seq:seq + n_seq, :, pos:pos + n_tok] = new
            cached.append(cache[i, seq:seq + n_seq, :, :pos + n_tok])
        y = F.scaled_dot_product_attention(q, *cached, is_causal=n_tok > 1, enable_gqa=self.n_kv < self.n_head)
        return F.linear(y.transpose(1, 2).reshape(n_seq, n_tok, -1), out)

    @torch.inference_mode()
    def hidden(self, ids, seq=0, pos=0):
        """As Decoder.hidden."""
        assert ids.shape[1] == 1 or pos == 0
        x = F.embedding(ids, self.tokens)
        for i, (norm1, qkv, out, norm2, up, down) in enumerate(self.layers):
            x = x + self.attend(i, qkv, out, self.normalise(x, norm1), seq, pos)
            gate, value = F.linear(self.normalise(x, norm2), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, down)
        return self.normalise(x, self.norm)

    @torch.inference_mode()
    def logits(self, hidden):
        return F.linear(hidden, self.out)

    logprobs = Decoder.logprobs


def make_decoder(model, dtype, n_seq, n_pos):
    kind = LlamaDecoder if model.config["model_type"] == "memory_llama" else Decoder
    return kind(model, dtype, n_seq, n_pos)
